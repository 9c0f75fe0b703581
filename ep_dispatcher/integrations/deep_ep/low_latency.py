"""The low-latency half of ``deep_ep.Buffer``: rows by expert in tensors of a fixed shape, and no host waits.

It uses the engine's decode layout, with one operation each way, and hooks that receive. Rows are placed as in DeepEP.
Sums are rounded as in the engine: each rank's sum over its experts is rounded to bfloat16 before the owner adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks, float8
from ep_dispatcher.argument_types import QuantizeBlocks
from ep_dispatcher.integrations.deep_ep.buffer_pool import BufferKey, BufferPool, DecodeBuffer, PoolUser
from ep_dispatcher.integrations.deep_ep.config import warn_ignored
from ep_dispatcher.integrations.deep_ep.events import EventOverlap, outside_graphs
from ep_dispatcher.integrations.deep_ep.handle import attach, attached_to, log_placeholders, placeholder
from ep_dispatcher.integrations.deep_ep.late_errors import LateErrors
from ep_dispatcher.integrations.deep_ep.layout import is_same_memory, repeated_expert_error, version_of
from ep_dispatcher.integrations.deep_ep.row_conversion import SMALLEST, RowFormat, numbered_rows

_OTHER_EXPERT = "topk_idx has an expert that the token was not dispatched to"
_ONE_PLACE = "low latency has one place for each token and expert, as DeepEP has in a combine"


class LowLatencyPlan:
    """What a combine needs from its low_latency_dispatch. The handle carries it.

    topk_idx        the caller's tensor, from which the engine's handle was made
    shape           num_local_experts, rows_per_group, hidden
    combine_buffer  of get_next_low_latency_combine_buffer
    """

    def __init__(
        self,
        decode_buffer: DecodeBuffer,
        handle: ep.Handle,
        topk_idx: Tensor,
        shape: tuple[int, int, int],
        late: LateErrors,
    ):
        self._decode_buffer, self._handle, self.topk_idx, self.shape = decode_buffer, handle, topk_idx, shape
        self._version, self._late = version_of(topk_idx), late
        self.combine_buffer: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that operations read."""
        return self._handle.plan, self.topk_idx

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, out: Tensor | None, waits: Tensor | None, hook: bool
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Return the sums, and with ``hook`` the function to call before reading them."""
        weights, buffer = self._weights(topk_idx, topk_weights), self._decode_buffer.ready()
        self._decode_buffer.turns.count += 1
        record_waits(buffer, "combine", waits)
        combined = buffer.combine(x, self._handle, weights=weights, out=out, return_hook=hook)
        return combined.x, self._decode_buffer.hook(combined) if hook else None

    def _weights(self, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weights in the columns of the dispatch. A combine may order choices differently, or omit some.

        Refuse experts that the token was not dispatched to. Their weights are ignored.
        """
        if version_of(self.topk_idx) != self._version:
            checks.refuse(
                "topk_idx was changed in place after the dispatch: leave the choices as they were, or set "
                "EP_DISPATCHER_DEEP_EP_EXACT=1"
            )
        if is_same_memory(topk_idx, self.topk_idx):
            return topk_weights
        is_chosen = topk_idx >= 0
        same = (topk_idx[:, :, None] == self.topk_idx[:, None, :]) & is_chosen[:, :, None]
        self._late.refuse_unless((same.any(2) == is_chosen).all(), _OTHER_EXPERT)
        return torch.where(same, topk_weights[:, :, None], 0.0).sum(1)


def plan_of(handle: tuple) -> LowLatencyPlan:
    plan = attached_to(handle, 1)
    if not isinstance(plan, LowLatencyPlan):
        allowed = "the handle of a low_latency_dispatch, or a tuple or list of its items"
        checks.fail("handle", f"of type {type(handle).__name__}", allowed)
    return plan


def exchange_sources(buffer: ep.Buffer, rank: int, topk_idx: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
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


def record_waits(buffer: ep.Buffer, operation: str, waits: Tensor | None) -> None:
    """Let the next operation add its wait for each rank to ``waits``, unless that is None."""
    name = f"{operation}_wait_ns"
    if getattr(buffer, name) is not waits:
        setattr(buffer, name, waits)


@outside_graphs
class LowLatency(PoolUser):
    """Methods of Buffer, which sets these attributes."""

    group_size: int
    low_latency_mode: bool
    enable_shrink: bool
    _chosen_sms: int | None = None  # what Buffer.set_num_sms was given; None: the engine's default

    def _ready_pool(self) -> BufferPool:
        return self._pool_for(self._chosen_sms)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Only check the arguments: no other operation shares the memory, and it starts clean."""
        self._check_low_latency()
        checks.integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        checks.integer("hidden", hidden, 1)
        checks.integer("num_experts", num_experts, 1)

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
        *,
        use_nvfp4: bool = False,
        x_global_scale: Tensor | None = None,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, tuple, EventOverlap, Callable[[], None] | None]:
        """Bring every token to its experts. Return recv_x, recv_count, handle, event, hook.

            recv_x[expert, i] = row i of the expert, in order of (source rank, source token), i < recv_count[expert]

        x          bfloat16 [num_tokens, hidden], at most num_max_dispatch_tokens_per_rank tokens
        recv_x     bfloat16 [num_local_experts, rows_per_group, hidden],
                   rows_per_group = num_ranks * num_max_dispatch_tokens_per_rank.
                   With use_fp8 a pair: float8_e4m3fn of the same shape, and scales float32 [..., ceil(hidden / 128)];
                   with use_ue8m0 scales int32 [..., hidden / 512], four exponents each. The last two dimensions of
                   scales are column-major
        recv_count int32 [num_local_experts]
        handle     (recv_src_info int32 [num_local_experts, rows_per_group], the row's token on its source rank;
                   recv_layout_range int64 [num_local_experts, num_ranks], first row << 32 | rows of each source; ...).
                   These two need EP_DISPATCHER_DEEP_EP_EXACT=1; otherwise they are handle.placeholder
        cumulative_local_expert_recv_stats  int32 [num_local_experts]; the dispatch adds recv_count
        dispatch_wait_recv_cost_stats       int64 [num_ranks]; the dispatch adds its wait for each rank, in nanoseconds
                   (``ep.Buffer.dispatch_wait_ns``; DeepEP counts clock cycles)
        hook       with return_recv_hook: call it before reading recv_x. Two dispatches may have pending hooks; a third
                   one calls the first hook
        use_nvfp4, x_global_scale  of a branch of DeepEP that SGLang calls: NotImplementedError

        An expert may occur only once in a row of topk_idx: NotImplementedError, on a GPU a late ValueError. Raises
        ValueError for arguments that are not allowed.
        """
        if use_nvfp4 or x_global_scale is not None:
            argument = "use_nvfp4" if use_nvfp4 else "x_global_scale"
            raise NotImplementedError(
                f"{argument}: rows travel as bfloat16 or float8, and the engine has no 4-bit rows"
            )
        pool, num_ranks, stats = self._check_low_latency(), self.group_size, cumulative_local_expert_recv_stats
        waits = dispatch_wait_recv_cost_stats
        self._check_call(x, async_finish, return_recv_hook, dispatch_wait_recv_cost_stats=waits)
        most = checks.integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        checks.tensor("x", x, (torch.bfloat16,), ("num_tokens", "hidden"), x.device.type)
        checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), (x.shape[0], "num_topk"), x.device.type)
        _check_float8(x.shape[1], use_fp8, round_scale, use_ue8m0)
        error: Exception | None = repeated_expert_error(topk_idx, _ONE_PLACE)
        if x.shape[0] > most:
            error = ValueError(
                f"x has {x.shape[0]} tokens on rank {pool.group.rank()}, but at most "
                f"num_max_dispatch_tokens_per_rank = {most}"
            )
        num_local = num_experts // num_ranks
        if stats is not None:
            checks.tensor("cumulative_local_expert_recv_stats", stats, (torch.int32,), (num_local,), x.device.type)
        shape = num_local, num_ranks * most, x.shape[1]
        with self._comm.operation((x, topk_idx, stats, waits), None, async_finish) as operation:
            if pool.settings().exact:
                topk_idx = topk_idx.clone()  # the program may change its own
                smallest = BufferKey(SMALLEST, num_experts, topk_idx.shape[1])
                other = pool.next_decode_buffer(smallest, most, self.enable_shrink).ready()
                if error is not None:
                    pool.refuse(error)
                record_waits(other, "dispatch", waits)
                src_info, ranges = exchange_sources(other, pool.group.rank(), topk_idx, num_ranks)
                operation.hand_over(src_info, ranges)
            else:
                log_placeholders("recv_src_info and recv_layout_range")
                src_info = placeholder(num_local, shape[1], device=x.device)
                ranges = placeholder(num_local, num_ranks, dtype=torch.int64, device=x.device)
            key = BufferKey(RowFormat(x.shape[1], torch.bfloat16), num_experts, topk_idx.shape[1])
            decode_buffer = pool.next_decode_buffer(key, most, self.enable_shrink)
            if error is not None:
                pool.refuse(error)
            buffer = decode_buffer.ready()
            record_waits(buffer, "dispatch", waits)
            quantize: QuantizeBlocks | None = None
            if use_fp8:
                quantize = checks.POWERS_OF_TWO if round_scale else "e4m3_1x128"
            out = buffer.dispatch(
                x,
                topk_idx,
                layout="decode",
                quantize=quantize,
                scale_format="ue8m0" if use_ue8m0 else "float32",
                return_hook=return_recv_hook,
            )
            counts, hook = out.tokens_per_expert, None
            add_counts = None if stats is None else partial(stats.add_, counts)
            if return_recv_hook:
                hook = decode_buffer.hook(out, add_counts)
            elif add_counts is not None:
                add_counts()
            plan = LowLatencyPlan(decode_buffer, out.handle, topk_idx, shape, pool.late)
            recv_x = (out.x[0], out.x[1]) if isinstance(out.x, tuple) else out.x
            operation.hand_over(recv_x, counts, plan)
        operation.keep_tensors()
        handle = src_info, attach(ranges, plan), most, x.shape[1], num_experts
        return recv_x, counts, handle, operation.event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        *,
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int | None = None,
        threshold: int | None = None,
        num_sms: int | None = None,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Sum every token's rows with its weights. Return combined_x, event, hook.

            combined_x[token] = sum over k of topk_weights[token, k] * x[row of (token, k)]

        x             bfloat16, shaped as recv_x of the dispatch; with zero_copy the rows are in
                      get_next_low_latency_combine_buffer(handle) instead, and x is not read
        topk_idx      int64 [num_tokens, num_topk]: of the dispatch, or with -1 for choices to leave out. If it is not
                      the same tensor, small operations look for its experts among those of the dispatch
        topk_weights  float32 of the same shape; ignored where topk_idx is -1
        use_logfmt    accepted, but rows travel as bfloat16, so the result is closer to the exact one
        out           bfloat16 [num_tokens, hidden], which becomes combined_x
        combine_wait_recv_cost_stats  int64 [num_ranks], as those of low_latency_dispatch
        overlap       of a branch of DeepEP that SGLang calls. True lets a combine wait for signals of a GEMM that still
                      writes x: NotImplementedError. With False the arguments after it describe nothing, and a line
                      says so once

        Sums and products are in float32. The sum of each rank's rows is rounded to bfloat16, and so is their sum.
        """
        self._check_low_latency()
        if overlap:
            raise NotImplementedError(
                "overlap is True, but has to be False: a combine does not wait for signals of a GEMM that still writes "
                "x. With SGLang leave out --enable-single-batch-overlap"
            )
        signals = dict(
            packed_recv_count=packed_recv_count,
            comp_signal=comp_signal,
            block_m=block_m,
            threshold=threshold,
            num_sms=num_sms,
            src_signals=src_signals,
            src_signal_expect_value=src_signal_expect_value,
        )
        given = [name for name, value in signals.items() if value is not None]
        if given:
            warn_ignored(", ".join(given), "they describe the signals of overlap=True")
        plan = plan_of(handle)
        if use_logfmt:
            warn_ignored("use_logfmt", "rows travel as bfloat16")
        if zero_copy:
            if plan.combine_buffer is None:
                checks.refuse("zero_copy is True without get_next_low_latency_combine_buffer(handle) before it")
            x = plan.combine_buffer
        device, num_tokens = x.device.type, plan.topk_idx.shape[0]
        checks.tensor("x", x, (torch.bfloat16,), plan.shape, device)
        checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), (num_tokens, "num_topk"), device)
        checks.tensor("topk_weights", topk_weights, (torch.float32,), tuple(topk_idx.shape), device)
        if out is not None:
            checks.tensor("out", out, (torch.bfloat16,), (num_tokens, plan.shape[2]), device)
        waits = combine_wait_recv_cost_stats
        self._check_call(x, async_finish, return_recv_hook, combine_wait_recv_cost_stats=waits)
        inputs = x, topk_idx, topk_weights, out, waits, plan
        with self._comm.operation(inputs, None, async_finish) as operation:
            combined_x, hook = plan.combine(x, topk_idx, topk_weights, out=out, waits=waits, hook=return_recv_hook)
            operation.hand_over(combined_x)
        operation.keep_tensors()
        return combined_x, operation.event, hook

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> Tensor:
        """Return the tensor that low_latency_combine reads with this handle and zero_copy; bfloat16, shaped as x."""
        self._check_low_latency()
        plan = plan_of(handle)
        if plan.combine_buffer is None:
            plan.combine_buffer = torch.empty(plan.shape, dtype=torch.bfloat16, device=plan.topk_idx.device)
        return plan.combine_buffer

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank by hand, for later operations. Needs enable_shrink=True. Call it on all ranks but the masked one.

        One rank alone cannot be unmasked: NotImplementedError. low_latency_clean_mask_buffer() unmasks all.
        """
        pool = self._check_low_latency()
        rank = checks.integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        if not mask:
            status = torch.zeros(self.group_size, dtype=torch.int32, device="cpu")
            pool.merge_masks_into(status)
            if status[rank]:
                raise NotImplementedError(
                    f"low_latency_update_mask_buffer cannot let the masked rank {rank} in alone: call "
                    "low_latency_clean_mask_buffer() on all ranks, which lets in all"
                )
            return
        if not self.enable_shrink:
            checks.refuse("this buffer was made without enable_shrink=True, so it masks no ranks")
        pool.mask_rank(rank)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Fill int32 [num_ranks] with 1 for each masked rank, after the earlier operations in the current stream."""
        pool = self._check_low_latency()
        checks.tensor("mask_status", mask_status, (torch.int32,), (self.group_size,), mask_status.device.type)
        pool.merge_masks_into(mask_status.zero_())

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks. Collective if buffers have masks: masked ranks call it too. In DeepEP it is local."""
        self._check_low_latency().unmask()

    def _check_low_latency(self) -> BufferPool:
        pool = self._ready_pool()
        if not self.low_latency_mode:
            checks.refuse("this buffer was made without low_latency_mode=True, which low_latency_ methods need")
        return pool

    def _check_call(self, x: Tensor, async_finish: bool, return_recv_hook: bool, **waits: Tensor | None) -> None:
        """Check what dispatch and combine share."""
        if async_finish and return_recv_hook:
            checks.refuse("async_finish and return_recv_hook are both True: give one of them")
        for name, each in waits.items():
            if each is not None:
                checks.tensor(name, each, (torch.int64,), (self.group_size,), x.device.type)


def _check_float8(hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> None:
    if use_ue8m0 and not (use_fp8 and round_scale):
        checks.fail("use_ue8m0", True, "False without use_fp8 and round_scale")
    if round_scale and not use_fp8:
        warn_ignored("round_scale", "only rows with use_fp8 have scales")
    granularity = float8.BLOCK * float8.SCALES_OF_INT if use_ue8m0 else checks.ROW_GRANULARITY
    if use_fp8 and hidden % granularity:
        checks.refuse(f"x has hidden {hidden}, but use_fp8 needs a multiple of {granularity}")
