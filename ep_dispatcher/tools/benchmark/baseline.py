"""The dispatch and combine that a user writes without this package: sort, ``all_to_all_single``, sort, and back.

Each step is the fastest that we know in plain PyTorch. One gather replicates and sorts the tokens. Rows travel in their
own dtype. One concatenation of whole chunks groups received rows by local expert. The backward of a dispatch is a
combine on the same plan, and the other way round. Rows come out in the order of our expert layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.tools.benchmark.sides import go_back


@dataclass(frozen=True)
class Plan:
    """Sizes and orders of one routing; a "sent row" is one (token, k) with an expert."""

    num_tokens: int
    num_topk: int
    choice_of: Tensor  # int64 [sent rows]: token * num_topk + k, ordered by expert, then by token
    token_of: Tensor  # int64 [sent rows]
    send_rows: list[int]  # per rank
    recv_rows: list[int]  # per rank
    recv_chunks: list[int]  # rows per (source rank, local expert), source rank slowest
    num_local_experts: int
    bag_idx: Tensor | None  # int64 [sent rows]: the sent rows, ordered by token
    bag_begin: Tensor | None  # int64 [num_tokens]: where a token's entries begin in bag_idx


@dataclass(frozen=True)
class Received:
    x: Tensor  # [rows, hidden]
    topk_weights: Tensor  # float32 [rows]
    handle: Plan


class AllToAllBaseline:
    """dispatch and combine by ``all_to_all_single``, forward and backward.

    A token's rows are summed in float32 and rounded once, by ``index_add_``. With ``fast_sum`` ``embedding_bag`` sums
    them: much faster on a CPU, but few users know of it.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, fast_sum: bool = False):
        self.group = group
        self.num_experts = num_experts
        self.fast_sum = fast_sum

    def plan(self, topk_idx: Tensor) -> Plan:
        num_tokens, num_topk = topk_idx.shape
        num_ranks = self.group.size()
        num_local = self.num_experts // num_ranks
        flat = topk_idx.flatten()
        counts = torch.bincount(flat + 1, minlength=self.num_experts + 1)  # the first counts "no expert"
        choice_of = flat.argsort(stable=True)[int(counts[0]) :]
        send_counts = counts[1:].view(num_ranks, num_local)
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts, group=self.group)
        bag_idx = bag_begin = None
        if self.fast_sum:
            bag_idx = choice_of.argsort()
            per_token = (topk_idx >= 0).sum(1)
            bag_begin = per_token.cumsum(0) - per_token
        return Plan(
            num_tokens=num_tokens,
            num_topk=num_topk,
            choice_of=choice_of,
            token_of=choice_of // num_topk,
            send_rows=send_counts.sum(1).tolist(),
            recv_rows=recv_counts.sum(1).tolist(),
            recv_chunks=recv_counts.flatten().tolist(),
            num_local_experts=num_local,
            bag_idx=bag_idx,
            bag_begin=bag_begin,
        )

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Received:
        return self.dispatch_cached(x, topk_weights, self.plan(topk_idx))

    def dispatch_cached(self, x: Tensor, topk_weights: Tensor, plan: Plan) -> Received:
        weights = topk_weights.flatten().index_select(0, plan.choice_of)
        return Received(self._send(x.index_select(0, plan.token_of), plan), self._send(weights, plan), plan)

    def combine(self, y: Tensor, plan: Plan) -> Tensor:
        return self._sum_per_token(self._send_back(y, plan), plan)

    def combine_weights(self, row_weights: Tensor, plan: Plan) -> Tensor:
        back = self._send_back(row_weights, plan)
        weights = back.new_zeros(plan.num_tokens * plan.num_topk).index_copy_(0, plan.choice_of, back)
        return weights.view(plan.num_tokens, plan.num_topk)

    def _send(self, rows: Tensor, plan: Plan) -> Tensor:
        """Rows sorted by expert -> the rows of this rank's experts, grouped by local expert."""
        recv = self._all_to_all(rows, plan.send_rows, plan.recv_rows)
        return _transpose_chunks(recv, plan.recv_chunks, len(plan.recv_rows), plan.num_local_experts)

    def _send_back(self, rows: Tensor, plan: Plan) -> Tensor:
        num_ranks, num_local = len(plan.recv_rows), plan.num_local_experts
        by_expert = [plan.recv_chunks[r * num_local + e] for e in range(num_local) for r in range(num_ranks)]
        by_rank = _transpose_chunks(rows, by_expert, num_local, num_ranks)
        return self._all_to_all(by_rank, plan.recv_rows, plan.send_rows)

    def _all_to_all(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        out = rows.new_empty((sum(recv), *rows.shape[1:]))
        dist.all_to_all_single(out, rows, recv, send, group=self.group)
        return out

    def _sum_per_token(self, rows: Tensor, plan: Plan) -> Tensor:
        if plan.bag_idx is not None:
            return torch.nn.functional.embedding_bag(plan.bag_idx, rows, plan.bag_begin, mode="sum")
        total = rows.new_zeros((plan.num_tokens, rows.shape[1]), dtype=torch.float32)
        return total.index_add_(0, plan.token_of, rows.float()).to(rows.dtype)

    def forward_backward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return y and the gradients of x and topk_weights. Experts are the identity, and the gradient of y is x."""
        x = x.detach().requires_grad_()
        topk_weights = topk_weights.detach().requires_grad_()
        plan = self.plan(topk_idx)
        rows, row_weights = _Dispatch.apply(x, topk_weights, self, plan)
        y = _Combine.apply(rows, self, plan)
        return go_back(y, row_weights, x, topk_weights)


def _transpose_chunks(rows: Tensor, sizes: list[int], num_outer: int, num_inner: int) -> Tensor:
    """Chunks ordered by (outer, inner) -> the same chunks ordered by (inner, outer)."""
    chunks = rows.split(sizes)
    return torch.cat([chunks[o * num_inner + i] for i in range(num_inner) for o in range(num_outer)])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_weights, baseline, plan):
        ctx.baseline, ctx.plan = baseline, plan
        received = baseline.dispatch_cached(x, topk_weights, plan)
        return received.x, received.topk_weights

    @staticmethod
    def backward(ctx, grad_rows, grad_row_weights):
        baseline, plan = ctx.baseline, ctx.plan
        return baseline.combine(grad_rows, plan), baseline.combine_weights(grad_row_weights, plan), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, baseline, plan):
        ctx.baseline, ctx.plan = baseline, plan
        return baseline.combine(y, plan)

    @staticmethod
    def backward(ctx, grad_x):
        baseline, plan = ctx.baseline, ctx.plan
        return baseline._send(grad_x.index_select(0, plan.token_of), plan), None, None  # noqa: SLF001
