"""Low latency by the engine's decode layout: one operation of the engine each way, and hooks that receive.

Rows are placed as in DeepEP: a group of fixed size for every expert, rows without gaps. Sums are those of the engine:
each rank's sum over its experts is rounded to bfloat16 before the owner adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.handle import carried_by, missing
from ep_dispatcher.integrations.deep_ep.layout import is_same_memory, refuse_unless
from ep_dispatcher.integrations.deep_ep.pool import HookedBuffer
from ep_dispatcher.integrations.deep_ep.rows import numbered_rows


class Trip:
    """A low_latency_dispatch for its combines, which its handle carries.

    topk_idx        the caller's tensor, from which the engine's handle was made
    shape           num_local_experts, rows_per_group, hidden
    combine_buffer  of get_next_low_latency_combine_buffer
    """

    def __init__(self, hooked: HookedBuffer, handle: ep.Handle, topk_idx: Tensor, shape: tuple[int, int, int]):
        self._hooked, self._handle, self.topk_idx, self.shape = hooked, handle, topk_idx, shape
        self._version = _version(topk_idx)
        self.combine_buffer: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that operations read."""
        return self._handle.plan, self.topk_idx

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, out: Tensor | None, waits: Tensor | None, hook: bool
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Return the sums, and with ``hook`` the function to call before reading them."""
        weights, buffer = self._weights(topk_idx, topk_weights), self._hooked.combines()
        measure(buffer, "combine", waits)
        combined = buffer.combine(x, self._handle, weights=weights, out=out, return_hook=hook)
        return combined.x, self._hooked.hook(combined) if hook else None

    def _weights(self, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weights in the columns of the dispatch. A combine may order choices otherwise, or omit some.

        Refuse experts that the token was not dispatched to.
        """
        is_unchanged = _version(self.topk_idx) == self._version
        if is_unchanged and is_same_memory(topk_idx, self.topk_idx):
            return topk_weights
        if not is_unchanged:
            allowed = "one that still has the choices of the dispatch; or set EP_DISPATCHER_DEEP_EP_EXACT=1"
            checks.fail("topk_idx", "a tensor that was changed in place after the dispatch", allowed)
        is_chosen = topk_idx >= 0
        same = (topk_idx[:, :, None] == self.topk_idx[:, None, :]) & is_chosen[:, :, None]
        allowed = "experts that the token was dispatched to, or -1"
        mistake = checks.mistake("topk_idx", "an expert that the token was not dispatched to", allowed)
        refuse_unless((same.any(2) == is_chosen).all(), ValueError(mistake))
        return torch.where(same, topk_weights[:, :, None], 0.0).sum(1)


def trip_of(handle: tuple) -> Trip:
    trip = carried_by(handle, 1)
    if not isinstance(trip, Trip):
        allowed = "the handle of a low_latency_dispatch, or a tuple or list of its items"
        checks.fail("handle", type(handle).__name__, allowed)
    return trip


def sources(buffer: ep.Buffer, rank: int, topk_idx: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return recv_src_info and recv_layout_range of a dispatch by the same topk_idx. Exchanges 16 bytes per row."""
    most = buffer.config.max_tokens_per_rank
    sent = numbered_rows(len(topk_idx), rank * most, topk_idx.device)
    out = buffer.dispatch(sent, topk_idx, layout="decode")
    assert isinstance(out.x, Tensor)  # as what was sent
    number = out.x.view(torch.int32)[:, :, 0]
    rows, ranks = (torch.arange(n, dtype=torch.int32, device=number.device) for n in (number.shape[1], num_ranks))
    source = (number // most).where(rows < out.tokens_per_expert[:, None], -1)
    num_rows = (source[:, :, None] == ranks).sum(1)
    return number % most, (num_rows.cumsum(1) - num_rows) << 32 | num_rows


@cache
def missing_sources(num_local: int, rows_per_group: int, num_ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return recv_src_info and recv_layout_range, which are not there. Kept: each takes the host a microsecond."""
    src_info = missing(num_local, rows_per_group, device=device)
    return src_info, missing(num_local, num_ranks, dtype=torch.int64, device=device)


def measure(buffer: ep.Buffer, operation: str, waits: Tensor | None) -> None:
    """Let the next operation add its wait for each rank to ``waits``, if not None."""
    name = f"{operation}_wait_ns"
    if getattr(buffer, name) is not waits:
        setattr(buffer, name, waits)


def handle_of(
    trip: Trip, items: tuple[Tensor, Tensor], most: int, num_experts: int
) -> tuple[Tensor, Tensor, int, int, int]:
    """Return recv_src_info, recv_layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts, as DeepEP."""
    src_info, ranges = items
    carrier: Any = ranges.view_as(ranges)  # the original may belong to many handles
    carrier.carried = trip
    return src_info, carrier, most, trip.shape[2], num_experts


def _version(t: Tensor) -> int:
    """Return the number of changes in place, as far as PyTorch counts them."""
    return 0 if t.is_inference() else t._version
