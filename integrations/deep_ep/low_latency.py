"""The low-latency half of ``deep_ep.Buffer``: rows packed by expert in tensors of a fixed shape, and no host waits.

    dispatch   the engine's expert layout with max_recv_rows, then every row to its place in the packed tensor
    combine    the packed rows back to their sources by another dispatch, where they are weighted and summed in float32

Two kernels each way more than a layout of the engine's own would need, and no split of sending and receiving: a hook
finds everything done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks, float8
from ep_dispatcher.integrations.deep_ep.config import say_once
from ep_dispatcher.integrations.deep_ep.events import CommStream, EventOverlap
from ep_dispatcher.integrations.deep_ep.float8 import quantize
from ep_dispatcher.integrations.deep_ep.pool import Key, Pool
from ep_dispatcher.integrations.deep_ep.refuse import refuse
from ep_dispatcher.integrations.deep_ep.rows import Kind

MAX_SOURCES = 2**24  # tokens of all ranks together: their numbers travel as float32


@dataclass(frozen=True, eq=False)
class Packed:
    """Where the received rows lie, and where they come back; made by dispatch, read by combine.

    ``rows`` counts the received rows, unused ones included.
    """

    num_local_experts: int
    rows_per_group: int  # num_ranks * num_max_dispatch_tokens_per_rank
    packed_row: Tensor  # int64 [rows] row in the packed tensor; the one behind its end for unused rows
    source_rank: Tensor  # int64 [rows, 1] -1 for unused rows
    topk_idx: Tensor  # int64 [num_tokens, num_topk] of the tokens that this rank brought; a copy
    row_back: Tensor  # int64 [num_tokens, num_topk] the place of (token, k) among the rows that come back

    @property
    def num_packed_rows(self) -> int:
        return self.num_local_experts * self.rows_per_group

    def tensors(self) -> tuple[Tensor, ...]:
        return self.packed_row, self.source_rank, self.topk_idx, self.row_back

    def pack(self, rows: Tensor) -> Tensor:
        """[rows, n] -> [num_local_experts, rows_per_group, n]; rows behind an expert's are not written."""
        packed = rows.new_empty(self.num_packed_rows + 1, rows.shape[1])
        packed.view(torch.int32).index_copy_(0, self.packed_row, rows.view(torch.int32))  # float8 has no index_copy_
        return packed[:-1].view(self.num_local_experts, self.rows_per_group, rows.shape[1])

    def rows_back(self, topk_idx: Tensor) -> tuple[Tensor, Tensor]:
        """Places of the rows of choices that may stand in other columns, or be left out: ([num_tokens, k], bool)."""
        same = (topk_idx[:, :, None] == self.topk_idx[:, None, :]) & (topk_idx >= 0)[:, :, None]
        chosen = same.any(2)
        allowed = "experts that the token was dispatched to, or -1"
        mistake = checks.mistake("topk_idx", "an expert that the token was not dispatched to", allowed)
        refuse((chosen != (topk_idx >= 0)).any(), ValueError(mistake))
        return (same * self.row_back[:, None, :]).sum(2), chosen

    def unpack(self, packed: Tensor) -> Tensor:
        """[num_local_experts, rows_per_group, n] -> [rows, n]; unused rows are any."""
        return packed.flatten(0, 1).index_select(0, self.packed_row.clamp(max=self.num_packed_rows - 1))


class LowLatencyHandle(tuple):
    """(recv_src_info, recv_layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts), as DeepEP's."""

    packed: Packed
    combine_buffer: Tensor | None = None  # of get_next_low_latency_combine_buffer


class LowLatency:
    """Methods of Buffer, which has the attributes."""

    rank: int
    group_size: int
    low_latency_mode: bool
    _comm: CommStream
    _live_pool: Callable[[], Pool]

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing to do: the memory is not shared with other operations, and starts clean."""
        self._check_low_latency()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Bring every token to its experts: (recv_x, recv_count, handle, event, hook).

            recv_x[expert, i] = the row of the expert's token i, by (source rank, source token), i < recv_count[expert]

        x          bfloat16 [num_tokens, hidden], at most num_max_dispatch_tokens_per_rank tokens
        recv_x     [num_local_experts, rows_per_group, hidden] of bfloat16; with use_fp8 a pair of it in float8_e4m3fn
                   and scales [..., hidden / 128] of float32, or with use_ue8m0 [..., hidden / 512] of int32 (four
                   exponents each), whose last two dimensions are column-major.
                   rows_per_group = num_ranks * num_max_dispatch_tokens_per_rank
        recv_count int32 [num_local_experts]
        handle     (recv_src_info int32 [num_local_experts, rows_per_group], the row's token on its source rank;
                   recv_layout_range int64 [num_local_experts, num_ranks], first row << 32 | rows of each source; ...)
        cumulative_local_expert_recv_stats  int32 [num_local_experts], to which recv_count is added
        dispatch_wait_recv_cost_stats       int64 [num_ranks], to which the time waited for each rank is added, in
                   nanoseconds (``ep.Buffer.dispatch_wait_ns``; DeepEP counts clock cycles)
        hook       with return_recv_hook: to be called before recv_x is read

        An expert may stand only once in a row of topk_idx. Raises ValueError for arguments that are not allowed.
        """
        pool, num_ranks, stats = self._check_low_latency(), self.group_size, cumulative_local_expert_recv_stats
        self._check_asking(async_finish, return_recv_hook)
        waits = dispatch_wait_recv_cost_stats
        self._check_waits("dispatch_wait_recv_cost_stats", waits, x)
        most = self._check_rows(x, topk_idx, num_max_dispatch_tokens_per_rank)
        _check_float8(x.shape[1], use_fp8, round_scale, use_ue8m0)
        num_tokens, hidden = x.shape
        num_topk = topk_idx.shape[1]
        sized = pool.sized(Key(Kind(hidden, torch.bfloat16), num_experts, num_topk), most)
        num_local = num_experts // num_ranks
        if stats is not None:
            checks.tensor("cumulative_local_expert_recv_stats", stats, (torch.int32,), (num_local,), x.device.type)
        inputs = (x, topk_idx, stats, waits)
        with self._comm.operation(*inputs, previous_event=None, async_finish=async_finish) as operation:
            data = quantize(x, round_scale=round_scale) if use_fp8 else x
            source = self.rank * most + torch.arange(num_tokens, dtype=torch.float32, device=x.device)
            with _measured(sized.buffer, waits):
                out = sized.buffer.dispatch(
                    data,
                    topk_idx,
                    source[:, None].repeat(1, num_topk),  # in the place of weights: every row says where it is from
                    layout="expert",
                    max_recv_rows=num_ranks * most * min(num_topk, num_local),
                )
            counts, sources = out.tokens_per_expert, out.topk_weights
            assert sources is not None  # as they were given
            packed_row, source_rank, src_info, ranges = _place(sources.long(), counts, num_ranks, most)
            chosen = topk_idx.long().clone()
            packed = Packed(
                num_local, num_ranks * most, packed_row, source_rank, chosen, _rows_back(chosen, num_experts)
            )
            recv_x: Tensor | tuple[Tensor, Tensor]
            if isinstance(out.x, tuple):
                scales = packed.pack(out.x[1])
                scales = float8.column_major(float8.packed_exponents(scales) if use_ue8m0 else scales)
                recv_x = (packed.pack(out.x[0]), scales)
            else:
                recv_x = packed.pack(out.x)
            recv_count = counts.int()
            if stats is not None:
                stats += recv_count
            handle = LowLatencyHandle((src_info, ranges, most, hidden, num_experts))
            handle.packed = packed
            operation.hand_over(
                *(recv_x if isinstance(recv_x, tuple) else (recv_x,)), recv_count, src_info, ranges, *packed.tensors()
            )
        return recv_x, recv_count, handle, operation.event, _received if return_recv_hook else None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Sum every token's rows with its weights: (combined_x, event, hook).

            combined_x[token] = bfloat16(sum over k in order of topk_weights[token, k] * x[row of (token, k)])

        x             bfloat16, shaped as recv_x of the dispatch; with zero_copy the rows are in
                      get_next_low_latency_combine_buffer(handle) instead, and x is not read
        topk_idx      int64 [num_tokens, num_topk]: of the dispatch, or with -1 for choices to leave out
        topk_weights  float32 of the same shape; not used where topk_idx is -1
        use_logfmt    accepted: rows travel as bfloat16 all the same, so the result is nearer to the exact one
        out           bfloat16 [num_tokens, hidden], which becomes combined_x
        combine_wait_recv_cost_stats  int64 [num_ranks], as those of low_latency_dispatch

        All sums and products are in float32.
        """
        pool = self._check_low_latency()
        self._check_asking(async_finish, return_recv_hook)
        if not isinstance(handle, LowLatencyHandle):
            checks.fail("handle", type(handle).__name__, "the handle that low_latency_dispatch has returned, as it is")
        if use_logfmt:
            say_once("use_logfmt: accepted; rows travel as bfloat16")
        packed, (_, _, most, hidden, _) = handle.packed, handle
        if zero_copy:
            if handle.combine_buffer is None:
                checks.fail("zero_copy", True, "it after get_next_low_latency_combine_buffer(handle)")
            x = handle.combine_buffer
        device = x.device.type
        shape = (packed.num_local_experts, packed.rows_per_group, hidden)
        checks.tensor("x", x, (torch.bfloat16,), shape, device)
        num_tokens, num_topk = packed.topk_idx.shape
        checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), (num_tokens, "num_topk"), device)
        checks.tensor("topk_weights", topk_weights, (torch.float32,), tuple(topk_idx.shape), device)
        if out is not None:
            checks.tensor("out", out, (torch.bfloat16,), (num_tokens, hidden), device)
        rows_per_rank = packed.packed_row.numel()
        sized = pool.sized(Key(Kind(hidden, torch.bfloat16), self.group_size, 1), rows_per_rank)
        waits = combine_wait_recv_cost_stats
        self._check_waits("combine_wait_recv_cost_stats", waits, x)
        inputs = (x, topk_idx, topk_weights, out, waits, *packed.tensors())
        with self._comm.operation(*inputs, previous_event=None, async_finish=async_finish) as operation:
            with _measured(sized.buffer, waits):
                returned = sized.buffer.dispatch(
                    packed.unpack(x), packed.source_rank, layout="rank", max_recv_rows=most * num_topk
                )
            assert isinstance(returned.x, Tensor)  # as what was sent
            combined = _weighted_sum(returned.x, *packed.rows_back(topk_idx), topk_weights)
            out = combined if out is None else out.copy_(combined)
            operation.hand_over(out)
        return out, operation.event, _received if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """The tensor that a low_latency_combine of this handle with zero_copy reads; bfloat16, shaped as its x."""
        self._check_low_latency()
        if not isinstance(handle, LowLatencyHandle):
            checks.fail("handle", type(handle).__name__, "the handle that low_latency_dispatch has returned, as it is")
        if handle.combine_buffer is None:
            packed = handle.packed
            shape = (packed.num_local_experts, packed.rows_per_group, handle[3])
            handle.combine_buffer = torch.empty(shape, dtype=torch.bfloat16, device=packed.packed_row.device)
        return handle.combine_buffer

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Unmask a rank, which changes nothing. To mask one is not supported: these operations need all ranks."""
        self._check_low_latency()
        checks.integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        if mask:
            raise NotImplementedError(
                "low_latency_update_mask_buffer: these operations have layouts that need all ranks of the group; "
                "make a new group without the rank, and a buffer on it, or use layout='decode' of an "
                "ep_dispatcher.Buffer with mask_late_ranks=True"
            )

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Fill int32 [num_ranks] with 0: no rank is ever masked."""
        self._check_low_latency()
        checks.tensor("mask_status", mask_status, (torch.int32,), (self.group_size,), mask_status.device.type)
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """Nothing to do: no rank is ever masked."""
        self._check_low_latency()

    def _check_low_latency(self) -> Pool:
        pool = self._live_pool()
        if not self.low_latency_mode:
            checks.fail("low_latency_mode", False, "low_latency_ methods of a buffer made with low_latency_mode=True")
        return pool

    def _check_rows(self, x: Tensor, topk_idx: Tensor, most: int) -> int:
        """Return num_max_dispatch_tokens_per_rank as an int."""
        most = checks.integer("num_max_dispatch_tokens_per_rank", most, 1)
        if self.group_size * most > MAX_SOURCES:
            checks.fail("num_max_dispatch_tokens_per_rank", most, f"at most {MAX_SOURCES // self.group_size}")
        checks.tensor("x", x, (torch.bfloat16,), ("num_tokens", "hidden"), x.device.type)
        if x.shape[0] > most:
            checks.fail("x", f"{x.shape[0]} tokens", f"up to num_max_dispatch_tokens_per_rank = {most}")
        checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), (x.shape[0], "num_topk"), x.device.type)
        return most

    def _check_waits(self, argument: str, waits: Tensor | None, x: Tensor) -> None:
        if waits is not None:
            checks.tensor(argument, waits, (torch.int64,), (self.group_size,), x.device.type)

    @staticmethod
    def _check_asking(async_finish: bool, return_recv_hook: bool) -> None:
        if async_finish and return_recv_hook:
            checks.fail("async_finish", True, "one of async_finish and return_recv_hook")


def _received() -> None:
    """The hook of an operation that is complete, in the order of the current stream, before its call returns."""


def _check_float8(hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> None:
    if use_ue8m0 and not (use_fp8 and round_scale):
        checks.fail("use_ue8m0", True, "it with use_fp8 and round_scale alone")
    granularity = float8.BLOCK * (float8.SCALES_OF_INT if use_ue8m0 else 1)
    if use_fp8 and hidden % granularity:
        checks.fail("x", f"hidden {hidden}", f"a multiple of {granularity} with use_fp8")


@contextmanager
def _measured(buffer: ep.Buffer, waits: Tensor | None) -> Iterator[None]:
    """Let one dispatch of our engine add what it waits for each rank."""
    if waits is None:
        yield
        return
    buffer.dispatch_wait_ns = waits
    try:
        yield
    finally:
        buffer.dispatch_wait_ns = None


def _place(source: Tensor, counts: Tensor, num_ranks: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The places of received rows, and what a handle says of them: (packed_row, source_rank, src_info, layout_range).

    source: int64 [rows] rank * most + token, of rows in expert layout; counts: int64 [num_local_experts]
    """
    num_local, rows_per_group, ends = counts.numel(), num_ranks * most, counts.cumsum(0)
    row = torch.arange(source.numel(), device=source.device)
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
    """int64 [num_tokens, num_topk]: the place of each choice's row among those that come back, by (expert, token)."""
    num_tokens = topk_idx.shape[0]
    token = torch.arange(num_tokens, device=topk_idx.device)[:, None]
    order = (topk_idx.where(topk_idx >= 0, num_experts) * num_tokens + token).flatten().argsort()
    place = torch.arange(order.numel(), device=topk_idx.device)
    return torch.empty_like(order).scatter_(0, order, place).view_as(topk_idx)


def _weighted_sum(rows: Tensor, row_of: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """bfloat16 [num_tokens, hidden]: sum over k of weights[:, k] * rows[row_of[:, k]] where chosen, in float32."""
    total = rows.new_zeros(row_of.shape[0], rows.shape[1], dtype=torch.float32)
    for k in range(row_of.shape[1]):
        product = rows.index_select(0, row_of[:, k]).float() * weights[:, k, None]
        total += product.where(chosen[:, k, None], 0.0)
    return total.to(torch.bfloat16)
