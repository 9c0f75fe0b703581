"""A layer of experts in plain PyTorch: all-to-all, grouped_mm, all-to-all, one after the other.

    layer = AllToAllLayer(topk_idx, num_experts, group)   # collective: plans once
    y = layer(x, topk_weights, w1, w2)                    # collective, with gradients

The host knows all counts in advance, so no call waits for them. A real router does not give this advantage.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single


class AllToAllLayer:
    """The plan of one routing. Every entry of topk_idx [num_tokens, num_topk] is an expert.

    A token's row goes to each of its experts, even if several are on one rank. Weights do not travel: they multiply the
    rows that return.
    """

    def __init__(self, topk_idx: Tensor, num_experts: int, group: dist.ProcessGroup):
        self.group, self.num_topk = group, topk_idx.shape[1]
        num_ranks, rank = group.size(), group.rank()
        local = num_experts // num_ranks
        experts = topk_idx.flatten()
        self.order = experts.argsort(stable=True)
        self.place = self.order.argsort()
        counts = experts.bincount(minlength=num_experts)
        everyone = [torch.empty_like(counts) for _ in range(num_ranks)]
        dist.all_gather(everyone, counts, group=group)
        mine = torch.stack(everyone)[:, rank * local : (rank + 1) * local]  # [source, local expert]
        self.sent, self.received = counts.view(num_ranks, local).sum(1).tolist(), mine.sum(1).tolist()
        self.ends = mine.sum(0).cumsum(0).int()
        # Rows arrive by source, and within it by expert.
        arriving = torch.arange(local, device=counts.device).repeat(num_ranks).repeat_interleave(mine.flatten())
        self.by_expert = arriving.argsort(stable=True)
        self.by_source = self.by_expert.argsort()

    def __call__(self, x: Tensor, topk_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """Return y of ep.moe_mlp with the same arguments."""
        rows = _Pick.apply(x, self.order, self.place, self.num_topk)
        rows = _Pick.apply(self._exchange(rows, self.sent, self.received), self.by_expert, self.by_source, 1)
        out = _Pick.apply(self.experts(rows, w1, w2), self.by_source, self.by_expert, 1)
        back = _Pick.apply(self._exchange(out, self.received, self.sent), self.place, self.order, 1)
        weights = topk_weights.to(x.dtype).unsqueeze(1)
        return torch.bmm(weights, back.view(x.shape[0], self.num_topk, -1)).squeeze(1)

    def experts(self, rows: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        gate, up = F.grouped_mm(rows, w1.mT, offs=self.ends).chunk(2, dim=1)
        return F.grouped_mm(F.silu(gate) * up, w2.mT, offs=self.ends)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), rows.shape[1])
        return all_to_all_single(out, rows, received, sent, self.group)


class _Pick(torch.autograd.Function):
    """Return each row `copies` times, in order. The gradient only reads; autograd's own would add atomically."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        picked = grad.index_select(0, inverse)
        of_rows = picked if ctx.copies == 1 else picked.unflatten(0, (-1, ctx.copies)).sum(1)
        return of_rows, None, None, None
