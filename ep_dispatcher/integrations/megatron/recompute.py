"""Keeps plans of forward passes for an activation recompute.

A checkpointed layer runs forward twice: without gradients, and again with them when backward reaches it. The second run
has the same routing, and reuses the plan of the first. Several microbatches may be in flight. All ranks together choose
the kept plan whose routing is the same; if there is none, they make a new plan.

Nothing is kept under ``torch.inference_mode()``. Autograd refuses to save its tensors, and no recompute follows.

On a GPU nothing is kept. To compare routings and to agree with the other ranks, the host would wait for the device. A
new plan takes no more waits, and none if the number of rows is given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher.integrations.agree import all_reduce


@dataclass(frozen=True, eq=False)
class Kept:
    topk_idx: Tensor
    microbatch: int
    buffer: ep.Buffer
    handle: ep.Handle


def under_way() -> bool:
    """Return whether this forward pass is part of a backward pass."""
    return torch._C._current_graph_task_id() != -1


class RecomputePlans:
    """The plans of forward passes without gradients, oldest first; at most ``most`` of them.

    Some are never taken, because evaluation runs without gradients too. So when a plan is taken, older ones are
    dropped. If none fits, all are dropped.
    """

    def __init__(self, most: int):
        self._kept: deque[Kept] = deque(maxlen=most)

    @classmethod
    def make(cls, config) -> RecomputePlans:
        """Keep as many plans as a pipeline schedule has in flight for a layer; none if no MoE layer is recomputed."""
        granularity = config.recompute_granularity
        recomputes = granularity == "full" or (granularity == "selective" and "moe" in (config.recompute_modules or ()))
        group = getattr(config, "microbatch_group_size_per_vp_stage", None) or 0
        return cls(2 * max(config.pipeline_model_parallel_size, group) + 2 if recomputes else 0)

    def keep(self, topk_idx: Tensor, microbatch: int, buffer: ep.Buffer, handle: ep.Handle) -> None:
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or topk_idx.is_cuda:
            return
        self._kept.append(Kept(topk_idx, microbatch, buffer, handle))

    def take(self, topk_idx: Tensor, group: ProcessGroup, layer: str) -> Kept | None:
        """Return the oldest plan with this routing on every rank of the group, or None. Collective.

        Raises PeerTimeoutError if a rank does not arrive.
        """
        if not torch.is_grad_enabled():
            return None
        while self._kept and self._kept[0].buffer.is_destroyed:  # after an error ranks may have kept unequal numbers
            self._kept.popleft()
        if not self._kept:  # the same on every rank: all run the same passes
            return None
        no = topk_idx.new_zeros((), dtype=torch.bool)
        fit = [(k.topk_idx == topk_idx).all() if k.topk_idx.shape == topk_idx.shape else no for k in self._kept]
        fits = torch.stack(fit).int()
        note = f"{layer}, microbatch {self._kept[0].microbatch}, recompute"
        all_reduce(fits, dist.ReduceOp.MIN, group, about="agree on the plan", note=note)
        kept, found = list(self._kept), fits.nonzero().flatten().tolist()
        self._kept.clear()
        if not found:
            return None
        self._kept.extend(kept[found[0] + 1 :])
        return kept[found[0]]
