"""Low latency by the engine's decode layout: one operation of the engine each way, and hooks that receive.

Rows are placed as in DeepEP: a group of fixed size for every expert, rows without gaps. Sums are those of the engine:
each rank's sum over its experts is rounded to bfloat16 before the owner adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks, float8
from ep_dispatcher.integrations.deep_ep.handle import missing, say_missing
from ep_dispatcher.integrations.deep_ep.layout import is_same_memory
from ep_dispatcher.integrations.deep_ep.low_latency_route import Asked, Routed, measured, same_experts
from ep_dispatcher.integrations.deep_ep.pool import HookedBuffer, Key, Pool
from ep_dispatcher.integrations.deep_ep.rows import Kind


class Decoded(NamedTuple):
    """The handle of our engine, and the caller's topk_idx, from which it was made."""

    buffer: HookedBuffer
    handle: ep.Handle
    shape: tuple[int, int, int]
    topk_idx: Tensor
    version: int
    src_info: Tensor
    layout_range: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.handle.plan, self.topk_idx

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, out: Tensor | None, waits: Tensor | None, hook: bool
    ) -> tuple[Tensor, Callable[[], None] | None]:
        weights, buffer = self._weights(topk_idx, topk_weights), self.buffer.combines()
        with measured(buffer, "combine", waits):
            combined = buffer.combine(x, self.handle, weights=weights, out=out, return_hook=hook)
        return combined.x, self.buffer.hook(combined) if hook else None

    def _weights(self, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weights in the columns of the dispatch. A combine may order choices otherwise, or omit some."""
        is_unchanged = _version(self.topk_idx) == self.version
        if is_unchanged and is_same_memory(topk_idx, self.topk_idx):
            return topk_weights
        if not is_unchanged:
            allowed = "one that still has the choices of the dispatch; or set EP_DISPATCHER_DEEP_EP_EXACT=1"
            checks.fail("topk_idx", "a tensor that was changed in place after the dispatch", allowed)
        same = same_experts(topk_idx, self.topk_idx)
        return torch.where(same, topk_weights[:, :, None], 0.0).sum(1)


def dispatch(pool: Pool, x: Tensor, topk_idx: Tensor, asked: Asked) -> Routed:
    num_ranks, hidden = pool.group.size(), x.shape[1]
    key = Key(Kind(hidden, torch.bfloat16), asked.num_experts, topk_idx.shape[1])
    hooked = pool.in_turn(key, asked.max_tokens, asked.masks)
    buffer = hooked.ready()
    data: Tensor | tuple[Tensor, Tensor] = x
    is_fused = asked.use_fp8 and asked.round_scale == asked.use_ue8m0  # no kernel makes rounded scales of float32
    if asked.use_fp8 and not is_fused:
        data = float8.quantize(x, powers_of_two=True)
    with measured(buffer, "dispatch", asked.waits):
        out = buffer.dispatch(
            data,
            topk_idx,
            layout="decode",
            quantize="e4m3_1x128" if is_fused else None,
            scale_format="ue8m0" if asked.use_ue8m0 else "float32",
            return_hook=asked.hook,
        )
    shape = (asked.num_experts // num_ranks, num_ranks * asked.max_tokens, hidden)
    items = _items(*shape[:2], num_ranks, x.device)
    say_missing("recv_src_info and recv_layout_range")
    decoded = Decoded(hooked, out.handle, shape, topk_idx, _version(topk_idx), *items)
    recv_x = (out.x[0], out.x[1]) if isinstance(out.x, tuple) else out.x
    hook = None
    if asked.hook:
        hook = hooked.hook(out, partial(asked.add_counts, out.tokens_per_expert))
    else:
        asked.add_counts(out.tokens_per_expert)
    return Routed(recv_x, out.tokens_per_expert, decoded, hook)


@cache
def _items(num_local: int, rows_per_group: int, num_ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return recv_src_info and recv_layout_range, which are not there. Kept: each takes the host a microsecond."""
    src_info = missing(num_local, rows_per_group, device=device)
    return src_info, missing(num_local, num_ranks, dtype=torch.int64, device=device)


def _version(t: Tensor) -> int:
    """Return the number of changes in place, as far as PyTorch counts them."""
    return 0 if t.is_inference() else t._version
