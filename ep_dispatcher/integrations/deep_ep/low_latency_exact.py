"""Low latency with EP_DISPATCHER_DEEP_EP_EXACT=1: sums, float8 rows and handles as in DeepEP, but slower.

dispatch   the engine's dispatch in expert layout with max_recv_rows; then copies each row into the packed tensor
combine    another dispatch brings the packed rows back to their sources, which weight and sum them in float32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_dispatcher import checks, float8
from ep_dispatcher.integrations.deep_ep.float8 import quantize
from ep_dispatcher.integrations.deep_ep.low_latency_route import Asked, Routed, measured, same_experts
from ep_dispatcher.integrations.deep_ep.pool import Key, Pool
from ep_dispatcher.integrations.deep_ep.rows import Kind

MAX_SOURCES = 2**24  # tokens of all ranks together: their numbers travel as float32


@dataclass(frozen=True, eq=False)
class Packed:
    """Positions of received rows, and of rows that a combine returns. Made by dispatch, read by combine.

    ``rows`` is the number of received rows, with unused ones.
    """

    pool: Pool
    shape: tuple[int, int, int]  # num_local_experts, rows_per_group, hidden
    num_choices: int  # the most rows that return: those of num_max_dispatch_tokens_per_rank tokens
    packed_row: Tensor  # int64 [rows] row in the packed tensor; for unused rows the one after its end
    source_rank: Tensor  # int64 [rows, 1] -1 for unused rows
    topk_idx: Tensor  # int64 [num_tokens, num_topk] of this rank's tokens; a copy
    row_back: Tensor  # int64 [num_tokens, num_topk] the position of (token, k) among the rows that return
    src_info: Tensor
    layout_range: Tensor

    @property
    def num_packed_rows(self) -> int:
        return self.shape[0] * self.shape[1]

    def tensors(self) -> tuple[Tensor, ...]:
        return self.packed_row, self.source_rank, self.topk_idx, self.row_back, self.src_info, self.layout_range

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, out: Tensor | None, waits: Tensor | None, hook: bool
    ) -> tuple[Tensor, Callable[[], None] | None]:
        pool, rows_per_rank = self.pool, self.packed_row.numel()
        key = Key(Kind(x.shape[2], torch.bfloat16), pool.group.size(), 1)
        buffer = pool.sized(key, rows_per_rank).buffer
        with measured(buffer, "dispatch", waits):
            returned = buffer.dispatch(self.unpack(x), self.source_rank, layout="rank", max_recv_rows=self.num_choices)
        assert isinstance(returned.x, Tensor)  # as what was sent
        combined = _weighted_sum(returned.x, *self.rows_back(topk_idx), topk_weights)
        return (combined if out is None else out.copy_(combined)), (_received if hook else None)

    def pack(self, rows: Tensor) -> Tensor:
        """[rows, n] -> [num_local_experts, rows_per_group, n]; rows after the last one of an expert are not written."""
        packed = rows.new_empty(self.num_packed_rows + 1, rows.shape[1])
        packed.view(torch.int32).index_copy_(0, self.packed_row, rows.view(torch.int32))  # float8 has no index_copy_
        return packed[:-1].view(*self.shape[:2], rows.shape[1])

    def rows_back(self, topk_idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the rows of these choices, and whether each has one. Columns may differ."""
        same = same_experts(topk_idx, self.topk_idx)
        return (same * self.row_back[:, None, :]).sum(2), same.any(2)

    def unpack(self, packed: Tensor) -> Tensor:
        """[num_local_experts, rows_per_group, n] -> [rows, n]; unused rows have any values."""
        return packed.flatten(0, 1).index_select(0, self.packed_row.clamp(max=self.num_packed_rows - 1))


def dispatch(pool: Pool, x: Tensor, topk_idx: Tensor, asked: Asked) -> Routed:
    num_ranks, most, num_experts = pool.group.size(), asked.max_tokens, asked.num_experts
    if num_ranks * most > MAX_SOURCES:
        checks.fail("num_max_dispatch_tokens_per_rank", most, f"at most {MAX_SOURCES // num_ranks}")
    (num_tokens, hidden), num_topk, num_local = x.shape, topk_idx.shape[1], num_experts // num_ranks
    buffer = pool.sized(Key(Kind(hidden, torch.bfloat16), num_experts, num_topk), most).buffer
    data = quantize(x, round_scale=asked.round_scale) if asked.use_fp8 else x
    source = pool.group.rank() * most + torch.arange(num_tokens, dtype=torch.float32, device=x.device)
    with measured(buffer, "dispatch", asked.waits):
        out = buffer.dispatch(
            data,
            topk_idx,
            source[:, None].repeat(1, num_topk),  # in place of weights: the source of every row
            layout="expert",
            max_recv_rows=num_ranks * most * min(num_topk, num_local),
        )
    counts, sources = out.tokens_per_expert, out.topk_weights
    assert sources is not None  # as they were given
    packed_row, source_rank, src_info, ranges = _place(sources.long(), counts, num_ranks, most)
    chosen = topk_idx.long().clone()
    packed = Packed(
        pool=pool,
        shape=(num_local, num_ranks * most, hidden),
        num_choices=most * num_topk,
        packed_row=packed_row,
        source_rank=source_rank,
        topk_idx=chosen,
        row_back=_rows_back(chosen, num_experts),
        src_info=src_info,
        layout_range=ranges,
    )
    recv_x: Tensor | tuple[Tensor, Tensor]
    if isinstance(out.x, tuple):
        scales = packed.pack(out.x[1])
        scales = float8.column_major(float8.packed_exponents(scales) if asked.use_ue8m0 else scales)
        recv_x = (packed.pack(out.x[0]), scales)
    else:
        recv_x = packed.pack(out.x)
    recv_count = counts.int()
    asked.add_counts(recv_count)
    return Routed(recv_x, recv_count, packed, _received if asked.hook else None)


def _received() -> None:
    """Do nothing: this is the hook of an operation that is already complete in the order of the current stream."""


def _place(source: Tensor, counts: Tensor, num_ranks: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return packed_row, source_rank, src_info and layout_range of received rows, as in ``Packed``.

    source: int64 [rows] rank * most + token, of rows in expert layout; counts: int64 [num_local_experts]
    """
    num_local, rows_per_group, ends = counts.numel(), num_ranks * most, counts.cumsum(0)
    row = torch.arange(source.numel(), dtype=torch.int64, device=source.device)
    used = row < ends[-1]
    expert = torch.searchsorted(ends, row, right=True).clamp_(max=num_local - 1)
    packed_row = torch.where(used, expert * rows_per_group + row - (ends - counts)[expert], num_local * rows_per_group)
    source_rank = torch.where(used, source // most, -1)
    src_info = source.new_zeros(num_local * rows_per_group + 1, dtype=torch.int32)
    src_info.index_copy_(0, packed_row, (source % most).int())
    pair = torch.where(used, expert * num_ranks + source_rank, num_local * num_ranks)
    per_source = source.new_zeros(num_local * num_ranks + 1).scatter_add_(0, pair, torch.ones_like(pair))
    per_source = per_source[:-1].view(num_local, num_ranks)
    ranges = (per_source.cumsum(1) - per_source) << 32 | per_source
    return packed_row, source_rank[:, None], src_info[:-1].view(num_local, rows_per_group), ranges


def _rows_back(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Return int64 [num_tokens, num_topk]: the position of each choice's row in the order of (expert, token)."""
    num_tokens = topk_idx.shape[0]
    token = torch.arange(num_tokens, dtype=torch.int64, device=topk_idx.device)[:, None]
    order = (topk_idx.where(topk_idx >= 0, num_experts) * num_tokens + token).flatten().argsort()
    place = torch.arange(order.numel(), dtype=torch.int64, device=topk_idx.device)
    return torch.empty_like(order).scatter_(0, order, place).view_as(topk_idx)


def _weighted_sum(rows: Tensor, row_of: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return bfloat16 [num_tokens, hidden]: float32 sum over k of weights[:, k] * rows[row_of[:, k]] where chosen."""
    total = rows.new_zeros(row_of.shape[0], rows.shape[1], dtype=torch.float32)
    for k in range(row_of.shape[1]):
        product = rows.index_select(0, row_of[:, k]).float() * weights[:, k, None]
        total += product.where(chosen[:, k, None], 0.0)
    return total.to(torch.bfloat16)
