"""The operations of the CUDA engine: from a request to the launch of its kernels in the current stream."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_dispatcher import _C_cuda, checks
from ep_dispatcher.engines.base import (
    ANY,
    Combined,
    CombineRequest,
    DispatchRequest,
    Engine,
    EngineConfig,
    Received,
    address_of,
)
from ep_dispatcher.engines.cuda import stuck_kernels
from ep_dispatcher.engines.cuda.kernel_reports import KernelReports
from ep_dispatcher.engines.cuda.nccl import NcclRail
from ep_dispatcher.engines.cuda.streams import SLICE_S, Streams
from ep_dispatcher.engines.cuda.stuck_kernels import StuckKernels
from ep_dispatcher.engines.ranges import NoRanges, ranges_of
from ep_dispatcher.engines.trace import StreamTrace
from ep_dispatcher.float8 import SCALES_OF_INT

_SLICE_OVER = -2  # result of wait_for_counts after SLICE_S without counts
_NO_SCOPE = nullcontext()


class _Unreceived(NamedTuple):
    """An operation that has only sent: what its second launch needs, and the tensors that this launch accesses."""

    operation: str
    args: Any  # DispatchArgs or CombineArgs of the compiled module in use
    plan: Tensor
    tensors: tuple[Tensor | None, ...]
    new_counts: Tensor | None  # tokens per expert of a new plan, which Engine.count has not seen
    in_capture: bool  # whether it was sent while a CUDA graph was captured


def _aligned(t: Tensor) -> Tensor:
    """Return the tensor, or a copy, at an address that is a multiple of 16: kernels copy 16 bytes at a time."""
    return t if t.data_ptr() % 16 == 0 else t.clone()


class Launches(Streams, Engine):
    """Dispatch, combine, and their hooks."""

    # Made by the engine before its first operation:
    _compiled: Any  # the compiled module in use: _C_cuda or _C_nvshmem, which have the same interface
    _c: _C_cuda.Engine
    _c_config: _C_cuda.Config
    _reports: KernelReports
    _trace: StreamTrace | None
    _stuck: StuckKernels | None  # only if kernels may never end
    _sms: dict[str, int]  # multiprocessors of an operation, by layout
    _rail_sms: dict[str, int]  # multiprocessors that serve the wire between nodes, by layout
    _counted_rows: Tensor  # int64 [num_local_experts], pinned: what kernels have counted
    _reported_message_rows: Tensor  # int32, pinned: MessageRows of the compiled module, as kernels have counted
    _rail: NcclRail | None

    def __init__(self, config: EngineConfig):
        self._config, self._topology, self._num_local_experts = config, config.topology, config.num_local_experts
        self._ticket = 0
        self.wait_ns = {}
        self._unreceived: _Unreceived | None = None

    def dispatch(self, request: DispatchRequest) -> Received:
        counted = request.counts
        if counted and torch.cuda.is_current_stream_capturing():
            checks.fail("max_recv_rows", None, "a number while a CUDA graph is captured: no host can wait for counts")
        with ranges_of("dispatch") as ranges:
            self._check(ranges, "x", request[:5])
            message_rows = self._message_rows(request.plan)
            with self.health.operation("dispatch"), self._on_device():
                stream = self._enter(ranges)
                with self._traced("dispatch", request):
                    received = self._dispatch(request, stream, ranges, message_rows)
        if counted and (self._c.has_report() or self.health.ended):
            try:
                self._reports.raise_found(ends=False)
            except ValueError:
                if request.sends_only:
                    self.receive()
                assert self._stream is not None  # that of this operation
                self._wait(self._stream)  # after the operation all ranks are in step
                raise
        return received

    def _dispatch(self, request: DispatchRequest, stream: int, ranges: NoRanges, message_rows: int) -> Received:
        """Launch the kernels of a dispatch; with `sends_only` only those before its hook."""
        rows, scales, topk_idx, topk_weights, plan, layout, expert_alignment, num_rows = request[:8]
        quantize, sends_only, packs_scales = request[8:]
        counted = request.counts
        rows, scales = _aligned(rows), None if scales is None else _aligned(scales)
        num_tokens, hidden = rows.shape
        dtype, scale_dtype = torch.float8_e4m3fn if quantize else rows.dtype, checks.scale_dtype(quantize, scales)
        # Every assignment and every call costs host time: set only fields that differ from their defaults, and write
        # address_of() out.
        args: _C_cuda.DispatchArgs = self._compiled.DispatchArgs()
        args.layout, args.expert_alignment = getattr(self._compiled.Layout, layout), expert_alignment
        args.rows, args.row_bytes, args.num_tokens = rows.data_ptr() or ANY, hidden * dtype.itemsize, num_tokens
        args.num_rows, args.num_blocks, args.rail_blocks = num_rows, self._sms[layout], self._rail_sms[layout]
        if scale_dtype is not None:
            args.scales, args.scale_bytes = address_of(scales), checks.num_scales(hidden) * 4
            args.scale_size = scale_dtype.itemsize
            if quantize:
                args.quantizes, args.powers_of_two = True, quantize == checks.POWERS_OF_TWO
        if topk_idx is not None:
            args.topk_idx = topk_idx.data_ptr() or ANY
        if topk_weights is not None:
            args.topk_weights = topk_weights.data_ptr() or ANY
        if self.label:
            args.label = self.label
        if self.wait_ns:
            args.wait_ns = address_of(self.wait_ns.get("dispatch"))
        decodes = layout == "decode"
        count_dtype = torch.int32 if decodes else torch.int64
        tokens_per_expert = torch.empty(self._num_local_experts, dtype=count_dtype, device=self._device)
        if self.expert_tokens is not None and self._config.mask_late_ranks:
            tokens_per_expert.zero_()  # an operation that ends because this rank was masked does not write them
        if decodes:
            rows_per_expert = tokens_per_expert
            args.out_counts, args.packs_scales = address_of(tokens_per_expert), packs_scales
        else:
            rows_per_expert = torch.empty_like(tokens_per_expert)
            args.out_tokens_per_expert = tokens_per_expert.data_ptr()
            args.out_rows_per_expert = rows_per_expert.data_ptr()
        new_plan = None
        if plan is None:
            elements = self.plan_capacity(num_rows, layout)
            plan = new_plan = torch.empty(elements, dtype=torch.int32, device=self._device)
        if counted:
            self._ticket += 1
            args.ticket = self._ticket
            self._c.prepare(args, plan.data_ptr(), stream)
            ranges.step("wait for counts")
            num_rows = self._wait_for_counts()
            ranges.step("launch")
            if self._rail is not None:
                reported = self._reported_message_rows.clone()
                plan.untyped_storage().message_rows = reported  # type: ignore[attr-defined]
                message_rows = self._message_rows(plan)
        if message_rows:
            args.message_rows = message_rows
        by_rank = layout == "rank"
        weights_out = idx_out = scales_out = None
        rows_out = rows.new_empty(num_rows, hidden, dtype=dtype)
        args.num_rows, args.out_rows = num_rows, rows_out.data_ptr() or ANY
        if scale_dtype is not None:
            scales_out = self._empty_scales(num_rows, hidden, scale_dtype, decodes, packs_scales)
            args.out_scales = address_of(scales_out)
        per_choice = (num_rows, self._config.num_topk)
        if topk_weights is not None:
            weights_out = topk_weights.new_empty(per_choice if by_rank else num_rows)
            args.out_weights = weights_out.data_ptr() or ANY
        if by_rank:
            idx_out = rows.new_empty(per_choice, dtype=torch.int64)
            args.out_topk_idx = idx_out.data_ptr() or ANY
        received = Received(rows_out, scales_out, weights_out, idx_out, tokens_per_expert, rows_per_expert, new_plan)
        if sends_only:
            if not counted:
                self._c.prepare(args, plan.data_ptr(), stream)
            new_counts = None if new_plan is None else tokens_per_expert
            self._keep_for_receive("dispatch", args, plan, new_counts, rows, *received)
        elif counted:
            self._c.pull(args, plan.data_ptr(), stream)
        else:
            self._c.dispatch(args, plan.data_ptr(), stream)
        if new_plan is not None and not sends_only:
            self.count(tokens_per_expert)
        if counted:  # copy only now, while the rows move
            # An invalid plan has no rows, and the counts in memory are not its own.
            self.rows_on_host = self._counted_rows.clone() if num_rows > 0 else torch.zeros_like(self._counted_rows)
        if self._caller is not None:
            self._hand_over(received)
        return received

    def compare_routing(self, planned: Tensor, given: Tensor, where: tuple[int, int]) -> None:
        with ranges_of("compare") as ranges:
            self._check(ranges, "topk_idx", (planned, given))
            with self.health.operation("compare"), self._on_device():
                stream = self._enter(ranges)
                self._c.compare_routing(planned.data_ptr(), given.data_ptr(), given.shape[0], where, stream)

    def _empty_scales(self, num_rows: int, hidden: int, dtype: torch.dtype, by_column: bool, packs: bool) -> Tensor:
        """Allocate the scales of a dispatch: [rows, columns], or by column [num_local_experts, rows, columns]."""
        if not by_column:
            return torch.empty(num_rows, checks.num_scales(hidden, dtype), dtype=dtype, device=self._device)
        columns = checks.num_scales(hidden) // (SCALES_OF_INT if packs else 1)
        dtype = torch.int32 if packs or dtype != torch.float32 else dtype
        shape = (self._num_local_experts, columns, num_rows // self._num_local_experts)
        return torch.empty(shape, dtype=dtype, device=self._device).transpose(1, 2)

    def _wait_for_counts(self) -> int:
        """Return the number of rows of the dispatch with the last ticket.

        Kernels have a limit of their own. The limit here applies if they cannot start in this stream.
        """
        end = time.monotonic() + self._start_limit_s
        while (num_rows := self._c.wait_for_counts(self._ticket, SLICE_S)) == _SLICE_OVER:
            self.health.raise_if_ended()
            if time.monotonic() > end:
                raise RuntimeError("the kernels did not start in time: what is before them in the stream?")
        if num_rows < 0:
            self._reports.raise_found(ends=True)
            raise RuntimeError("the kernels were aborted")
        return num_rows

    def combine(self, request: CombineRequest) -> Combined:
        with ranges_of("combine") as ranges:
            self._check(ranges, "y", (*request[:3], request.weights))
            message_rows = self._message_rows(request.plan)
            with self.health.operation("combine"), self._on_device():
                stream = self._enter(ranges)
                with self._traced("combine", request):
                    return self._combine(request, stream, message_rows)

    def _combine(self, request: CombineRequest, stream: int, message_rows: int) -> Combined:
        """Launch the kernels of a combine; with `sends_only` only those before its hook."""
        y, plan, topk_weights, num_tokens, layout, weights, sends_only, out = request
        y, weights_out = _aligned(y), None
        x = y.new_empty(num_tokens, self._config.hidden) if out is None else out
        args: _C_cuda.CombineArgs = self._compiled.CombineArgs()  # set only what differs from defaults, as in _dispatch
        args.y, args.out, args.num_tokens = y.data_ptr() or ANY, x.data_ptr() or ANY, num_tokens
        args.num_blocks, args.rail_blocks = self._sms[layout], self._rail_sms[layout]
        if topk_weights is not None:
            weights_out = topk_weights.new_empty(num_tokens, self._config.num_topk)
            args.topk_weights, args.out_weights = address_of(topk_weights), address_of(weights_out)
        if weights is not None:
            args.combine_weights = address_of(weights)
        if self.wait_ns:
            args.wait_ns = address_of(self.wait_ns.get("combine"))
        if message_rows:
            args.message_rows = message_rows
        combined = Combined(x, weights_out)
        if sends_only:
            self._c.push(args, plan.data_ptr(), stream)
            self._keep_for_receive("combine", args, plan, None, *combined)
        else:
            self._c.combine(args, plan.data_ptr(), stream)
        if self._caller is not None:
            self._hand_over(combined)
        return combined

    @property
    def unreceived(self) -> str | None:
        return None if self._unreceived is None or self.health.ended else self._unreceived.operation

    def _keep_for_receive(
        self, operation: str, args: Any, plan: Tensor, new_counts: Tensor | None, *outputs: Tensor | None
    ) -> None:
        """Keep the second launch of an operation, and the tensors that it accesses."""
        tensors, in_capture = (*outputs, self.wait_ns.get(operation)), torch.cuda.is_current_stream_capturing()
        self._unreceived = _Unreceived(operation, args, plan, tensors, new_counts, in_capture)

    def receive(self) -> None:
        assert self._unreceived is not None  # the caller checks this
        operation, args, plan, outputs, new_counts, in_capture = self._unreceived
        if torch.cuda.is_current_stream_capturing() != in_capture:
            where = "in the CUDA graph" if in_capture else "outside of a CUDA graph"
            checks.fail(
                "hook", f"a call elsewhere than the {operation}", f"one {where}, where the {operation} was called"
            )
        with ranges_of(operation) as ranges:
            self._check(ranges, "hook", ())
            with self.health.operation(operation), self._on_device():
                stream = self._enter(ranges)
                with self._traced(operation):
                    for t in (plan, *outputs):
                        if t is not None:
                            t.record_stream(torch.cuda.current_stream())  # may differ from that of the first launch
                    if operation == "dispatch":
                        self._c.pull(args, plan.data_ptr(), stream)
                        if new_counts is not None:
                            self.count(new_counts)
                    else:
                        self._c.reduce(args, plan.data_ptr(), stream)
                    self._unreceived = None

    def measure_waits(self, operation: str, wait_ns: Tensor | None) -> None:
        if wait_ns is not None and wait_ns.device != self._device:
            checks.fail(f"{operation}_wait_ns", f"a tensor on {wait_ns.device}", f"a tensor on {self._device}")
        super().measure_waits(operation, wait_ns)

    def plan_capacity(self, num_rows: int, layout: str) -> int:
        # Only a plan with counts for the host has one element more: `_message_rows` knows it by its size.
        return self._compiled.plan_capacity(self._c_config, num_rows) + (num_rows < 0)

    def _message_rows(self, plan: Tensor | None) -> int:
        """Return the address of the rows in messages of the NCCL wire, 0 where the host did not wait for counts.

        The storage of a plan keeps them, because operators and autograd hand on nothing but the plan.
        """
        if self._rail is None or plan is None or plan.numel() != self.plan_capacity(-1, ""):
            return 0
        rows = getattr(plan.untyped_storage(), "message_rows", None)
        if rows is None:  # a copy of a plan: the host waits for the device
            if torch.cuda.is_current_stream_capturing():
                given = "a copy of a plan, made by a dispatch without max_recv_rows, while a CUDA graph is captured"
                checks.fail("handle", given, "max_recv_rows in that dispatch")
            self._wait(torch.cuda.current_stream(self._device))
            first, num = self._compiled.planned_message_rows_offset // 4, self._reported_message_rows.numel()
            rows = plan[first : first + num].cpu()
        self._used_message_rows = rows  # until the next operation; a hook comes before it
        return rows.data_ptr() if rows[0] else 0

    @property
    def _start_limit_s(self) -> float:
        """How long the host waits for this buffer's kernels: they have a limit of their own, once they can start."""
        return 2 * self._config.timeout_s + 5

    def _wait(self, stream: torch.cuda.Stream) -> None:
        """Wait for a stream, and let Python's signal handlers run. In ``stream.synchronize()`` they would not.

        RuntimeError if the stream is busy for so long that it cannot be this buffer's kernels, or if another thread
        destroys the buffer meanwhile.
        """
        begin, limit_s = time.monotonic(), self._start_limit_s
        while not stream.query():
            if self._stuck is not None and self._stuck.found():
                self._reports.raise_found(ends=True, reason=stuck_kernels.REASON)
            if self.health.is_stopped:
                self.health.raise_if_ended()
            waited = time.monotonic() - begin
            if waited > limit_s:
                raise RuntimeError(f"the stream was still busy after {waited:.1f} s: what is in it beside this buffer?")
            if waited > 1e-3:  # then a sleep of a tenth of this time adds little
                time.sleep(min(waited / 10, SLICE_S))

    def _check(self, ranges: NoRanges, argument: str, inputs: tuple[Tensor | None, ...]) -> None:
        """Raise errors of earlier operations, and refuse tensors of another device."""
        ranges.step("check")
        self.health.raise_if_ended()
        if self._c.has_report():
            self._reports.raise_found(ends=True)
        for t in inputs:
            if t is not None and t.get_device() != self._device_index:
                checks.fail(argument, f"a tensor on {t.device}", f"tensors on {self._device}")

    def _on_device(self) -> AbstractContextManager[None]:
        is_current = torch._C._cuda_getDevice() == self._device_index
        return _NO_SCOPE if is_current else torch.cuda.device(self._device_index)

    def _enter(self, ranges: NoRanges) -> int:
        """Let the current stream follow the last operation. Return the stream's address."""
        # Only the address: torch.cuda.current_stream() makes a Python object, which costs 2 us more.
        stream: int = torch._C._cuda_getCurrentRawStream(self._device_index)
        if self._stream is None or self._stream.cuda_stream != stream:
            self._follow()
            self._stream = torch.cuda.current_stream()
        ranges.step("launch")
        return stream

    def _traced(
        self, operation: str, request: DispatchRequest | CombineRequest | None = None
    ) -> AbstractContextManager[None]:
        """Return a scope for EP_DISPATCHER_TRACE. An operation with a hook is shown once, when it receives."""
        if self._trace is None or (request is not None and request.sends_only):
            return _NO_SCOPE
        return self._trace.operation(operation)
