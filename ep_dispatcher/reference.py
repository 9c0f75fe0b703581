"""The definition of dispatch and combine: plain PyTorch, all ranks in one process, nothing fast.

Every engine must agree with this file bit by bit (``torch.equal``): the order of the rows, the order of
the sums and where they are rounded are part of the definition. All arguments that differ between ranks
are lists with one entry per rank of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dispatched:
    """The rows one rank receives; the fields are those of ``Buffer.dispatch``'s result."""

    x: Tensor | tuple[Tensor, Tensor]
    topk_weights: Tensor | None
    topk_idx: Tensor | None
    tokens_per_expert: Tensor
    rows_per_expert: Tensor
    row_of: list[Tensor]  # per source rank: int64 [num_tokens, num_topk], the row that (token, k) became, or -1


def _place_rows(
    topk_idx: list[Tensor], first_expert: int, num_local_experts: int, layout: str, alignment: int, rows_per_group: int
):
    """Rows of one receiving rank: ``row_of`` per source, the number of rows, true and padded counts per expert.

    rows_per_group: rows of an expert's group in decode layout
    """
    experts = range(first_expert, first_expert + num_local_experts)
    row_of = [torch.full_like(idx, -1, dtype=torch.int64) for idx in topk_idx]
    counts = [sum(int((idx == e).sum()) for idx in topk_idx) for e in experts]
    padded = [-(-c // alignment) * alignment for c in counts]
    if layout == "rank":  # ordered by (source rank, source token), each token once
        row = 0
        for idx, rows in zip(topk_idx, row_of):
            local = (idx >= first_expert) & (idx < first_expert + num_local_experts)
            for t in local.any(1).nonzero().flatten().tolist():
                rows[t][local[t]] = row
                row += 1
        return row_of, row, counts, padded
    begin = 0
    for e, group in zip(experts, padded):  # ordered by (expert, source rank, source token), groups padded
        row = begin
        for idx, rows in zip(topk_idx, row_of):
            tokens, ks = (idx == e).nonzero(as_tuple=True)
            rows[tokens, ks] = torch.arange(row, row + tokens.numel(), dtype=torch.int64, device="cpu")
            row += tokens.numel()
        begin += rows_per_group if layout == "decode" else group
    return row_of, begin, counts, padded


def dispatch(
    x: list[Tensor] | list[tuple[Tensor, Tensor]],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor] | None,
    *,
    num_experts: int,
    layout: str = "expert",
    expert_alignment: int = 1,
    max_recv_rows: int | None = None,
    max_tokens_per_rank: int = 0,
) -> list[Dispatched]:
    """Bring every token to the ranks that own its experts; returns one ``Dispatched`` per rank.

    In decode layout rows are numbered through all groups, each of ``max_tokens_per_rank`` times the ranks, and those
    behind a group's count are any.
    """
    num_local, rows_per_group = num_experts // len(topk_idx), len(topk_idx) * max_tokens_per_rank
    received = []
    for rank in range(len(topk_idx)):
        first = rank * num_local
        row_of, num_rows, counts, padded = _place_rows(
            topk_idx, first, num_local, layout, expert_alignment, rows_per_group
        )
        if max_recv_rows is not None:
            if num_rows > max_recv_rows:
                raise ValueError(f"max_recv_rows: rank {rank} needs {num_rows} rows, given {max_recv_rows}")
            num_rows = max_recv_rows
        tensors = [xs if isinstance(xs, tuple) else (xs,) for xs in x]
        out = tuple(t.new_zeros(num_rows, t.shape[1]) for t in tensors[0])
        num_topk = topk_idx[0].shape[1]
        weights_shape = (num_rows, num_topk) if layout == "rank" else (num_rows,)
        weights = torch.zeros(weights_shape, dtype=torch.float32, device="cpu")
        local_idx = torch.full((num_rows, num_topk), -1, dtype=torch.int64, device="cpu")
        for src, rows in enumerate(row_of):
            tokens, ks = (rows >= 0).nonzero(as_tuple=True)
            to = rows[tokens, ks]
            for o, t in zip(out, tensors[src]):
                o[to] = t[tokens]
            local_idx[to, ks] = topk_idx[src][tokens, ks].long() - first
            if topk_weights is not None:
                weights[(to, ks) if layout == "rank" else to] = topk_weights[src][tokens, ks]
        received.append(
            Dispatched(
                x=(out[0], out[1]) if isinstance(x[0], tuple) else out[0],
                topk_weights=weights if topk_weights is not None else None,
                topk_idx=local_idx if layout == "rank" else None,
                tokens_per_expert=torch.tensor(counts, dtype=torch.int64, device="cpu"),
                rows_per_expert=torch.tensor(padded, dtype=torch.int64, device="cpu"),
                row_of=row_of,
            )
        )
    return received


def combine(
    y: list[Tensor],
    received: list[Dispatched],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor] | None = None,
    *,
    num_experts: int,
    node_of: list[int],
    layout: str = "expert",
    factors: list[Tensor] | None = None,
) -> list[tuple[Tensor, Tensor | None]]:
    """Sum every token's expert rows on the rank that owns the token; returns (x, topk_weights) per rank.

    All sums run in float32 and in ascending order: a rank's local experts, rounded once to the dtype of
    ``y``; between nodes, the partial sums of a remote node's ranks, rounded once; then on the owner one
    addend per remote node and one per rank of its own node, nodes in ascending order. With ``factors`` (decode layout;
    float32, as topk_idx) the first of these sums is of products, each rounded to float32.
    """
    num_local = num_experts // len(y)
    results = []
    for src, idx in enumerate(topk_idx):
        shape, dtype = (idx.shape[0], y[0].shape[1]), y[0].dtype
        total = torch.zeros(shape, dtype=torch.float32, device="cpu")
        weights = torch.zeros(idx.shape, dtype=torch.float32, device="cpu")
        for node in sorted(set(node_of)):
            node_sum = torch.zeros_like(total)
            for dst in (r for r in range(len(y)) if node_of[r] == node):
                row_of, partial = received[dst].row_of[src], torch.zeros_like(total)
                for e in range(dst * num_local, (dst + 1) * num_local):
                    tokens, ks = (idx == e).nonzero(as_tuple=True)
                    rows = row_of[tokens, ks]
                    addends = y[dst][rows].float()
                    if factors is not None:
                        addends = addends * factors[src][tokens, ks, None]
                    if layout == "rank":  # the caller has summed a token's local experts into its one row
                        partial[tokens] = addends
                    else:
                        partial[tokens] += addends
                    if topk_weights is not None:
                        weights[tokens, ks] = topk_weights[dst][(rows, ks) if layout == "rank" else rows]
                partial = partial.to(dtype).float()
                if node == node_of[src]:
                    total += partial
                else:
                    node_sum += partial
            if node != node_of[src]:
                total += node_sum.to(dtype).float()
        results.append((total.to(dtype), weights if topk_weights is not None else None))
    return results
