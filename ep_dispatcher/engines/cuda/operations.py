"""The operations of the CUDA engine: from a request to the launch of its kernels in the current stream.

    dispatch        check for earlier errors, follow the last operation
        with a given number of rows     allocate the outputs, _c.dispatch
        if the host waits for counts    _c.plan_and_stage, _wait_for_counts, allocate the outputs, _c.pull

Each call of _c reads the addresses of the request and of the outputs, and launches (csrc/cuda/requests.h).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ep_dispatcher import _C_cuda, checks
from ep_dispatcher.engines.base import Engine, EngineConfig, PendingOperation, address_of
from ep_dispatcher.engines.cuda import stuck_kernels
from ep_dispatcher.engines.cuda.kernel_reports import KernelReports
from ep_dispatcher.engines.cuda.nccl import NcclRail
from ep_dispatcher.engines.cuda.streams import SLICE_S, Streams, on_device
from ep_dispatcher.engines.cuda.stuck_kernels import StuckKernels
from ep_dispatcher.engines.profiler_ranges import NoProfilerRanges, profile_operation
from ep_dispatcher.engines.trace import StreamTrace
from ep_dispatcher.float8 import SCALES_OF_INT
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Planned, Received

_NO_COUNTS_YET = -2  # what _c.wait_for_counts returns after SLICE_S without counts
_NO_SCOPE = nullcontext()


class _PendingLaunch(PendingOperation):
    """An operation that waits for its hook: its second launch, and the tensors that it needs."""

    def __init__(
        self,
        operation: str,
        launch: Callable[[int], None],
        tensors: Iterable[Tensor | None],
        counted: Tensor | None = None,
        label: int = 0,
    ):
        super().__init__(operation)
        self.launch = launch  # takes a stream
        self.tensors = [t for t in tensors if t is not None]  # accessed by the second launch
        self.counted, self.label = counted, label  # tokens per expert of a new plan, to be counted after the launch
        self.is_captured = torch.cuda.is_current_stream_capturing()  # whether a CUDA graph is being captured


class CudaOperations(Streams, Engine):
    """The operations of the CUDA engine: dispatch, combine, and their hooks. engine.py has everything else."""

    # CudaEngine sets these before the first operation:
    _c: _C_cuda.Engine
    _c_config: _C_cuda.Config
    _reports: KernelReports
    _trace: StreamTrace | None
    _stuck: StuckKernels | None  # only if kernels may never end
    _counted_rows: Tensor  # int64 [num_local_experts], pinned; written by kernels
    _reported_message_rows: Tensor  # int32, pinned: MessageRows of the compiled module; written by kernels
    _rail: NcclRail | None
    pending: _PendingLaunch | None

    def __init__(self, config: EngineConfig):
        self.config, self._topology, self._num_local_experts = config, config.topology, config.num_local_experts
        self.wait_ns = {}
        self.pending = None

    def dispatch(self, request: DispatchRequest) -> Received:
        needs_counts = request.needs_counts
        if needs_counts and torch.cuda.is_current_stream_capturing():
            checks.fail("max_recv_rows", None, "a number while a CUDA graph is captured: no host can wait for counts")
        with self.config.wording, profile_operation("dispatch") as ranges:
            self.refuse_if_pending("dispatch")
            request.make_addressable()
            self._check(ranges, request.tensors())
            with self.health.operation("dispatch"), on_device(self._device_index):
                stream = self._enter(ranges)
                with self._traced("dispatch", request.is_send_only):
                    if needs_counts:
                        received = self._dispatch_with_counts(request, stream, ranges)
                    else:
                        received = self._allocate(request, request.num_rows, self._allocate_counts(request))
                        if request.layout != "decode":
                            launch = self._c.dispatch
                        else:
                            launch = self._c.decode_dispatch_send if request.is_send_only else self._c.decode_dispatch
                        launch(request, received, stream)
                        if request.meanwhile is not None:
                            request.meanwhile()
                self._note_dispatch(request, received)
            if needs_counts and (self._c.has_report() or self.health.ended):
                self._raise_when_in_step()
        return received

    def _dispatch_with_counts(self, request: DispatchRequest, stream: int, ranges: NoProfilerRanges) -> Received:
        """Plan and stage, wait for the counts, allocate that number of rows, and pull them."""
        counts = self._allocate_counts(request)
        self._c.plan_and_stage(request, counts, stream)
        if request.meanwhile is not None:
            ranges.step("meanwhile")
            request.meanwhile()
        ranges.step("wait for counts")
        num_rows = self._wait_for_counts()
        ranges.step("launch")
        message_rows = None if self._rail is None else self._reported_message_rows.clone()
        received = self._allocate(request, num_rows, counts, message_rows)
        self._c.pull(request, received, stream)
        # Copy only now, while the rows move. An invalid plan has no rows, and the counts in memory are of another plan.
        counted = self._counted_rows.clone() if num_rows > 0 else torch.zeros_like(self._counted_rows)
        return received._replace(rows_on_host=counted)

    def _note_dispatch(self, request: DispatchRequest, received: Received) -> None:
        """After the launch: keep the second launch for the hook, or count the tokens."""
        if request.is_send_only:
            tensors = (*(t for _, t in request.tensors()), *received)
            new_tokens = received.tokens_per_expert if request.plan is None else None
            self.pending = _PendingLaunch(
                "dispatch",
                partial(self._c.decode_dispatch_receive, request, received),
                tensors,
                new_tokens,
                request.label,
            )
        elif request.plan is None:
            self.count(request.label, received.tokens_per_expert)
        if self._caller is not None:
            self._record_on_caller_stream(received)

    def _raise_when_in_step(self) -> None:
        """Raise the errors of a dispatch whose counts have arrived. Before a ValueError wait until it is complete."""
        try:
            self._reports.raise_found(ends=False)
        except ValueError:
            assert self._stream is not None  # the stream of this operation
            self._wait(self._stream)  # after the operation all ranks are in step
            raise

    def _allocate_counts(self, request: DispatchRequest) -> Planned:
        """Allocate what a dispatch writes first: the counts, and the plan if it makes one."""
        device, num_local_experts = self._device, self._num_local_experts
        if request.layout == "decode":
            tokens = rows = torch.empty(num_local_experts, dtype=torch.int32, device=device)
        else:
            tokens = torch.empty(num_local_experts, dtype=torch.int64, device=device)
            rows = torch.empty(num_local_experts, dtype=torch.int64, device=device)
        if self.expert_tokens is not None and self.config.mask_late_ranks:
            tokens.zero_()  # an operation that ends because this rank was masked does not write them
        if request.plan is not None:
            return Planned(tokens, rows, None)
        elements = self.plan_capacity(request.num_rows, request.layout)
        return Planned(tokens, rows, torch.empty(elements, dtype=torch.int32, device=device))

    def _allocate(
        self, request: DispatchRequest, num_rows: int, counts: Planned, message_rows: Tensor | None = None
    ) -> Received:
        """Allocate the rows of a dispatch, and their scales, weights and experts."""
        rows, device = request.rows, self._device
        hidden, by_rank = rows.shape[1], request.layout == "rank"
        dtype = torch.float8_e4m3fn if request.quantize else rows.dtype
        scale_dtype = checks.scale_dtype(request.quantize, request.scales)
        scales = topk_weights = topk_idx = None
        out = torch.empty(num_rows, hidden, dtype=dtype, device=device)
        if scale_dtype is not None and request.layout == "decode":
            scales = self._empty_scales_by_column(num_rows, hidden, scale_dtype, request.packs_scales)
        elif scale_dtype is not None:
            scales = torch.empty(num_rows, checks.num_scales(hidden, scale_dtype), dtype=scale_dtype, device=device)
        if request.topk_weights is not None:
            shape = (num_rows, self.config.num_topk) if by_rank else (num_rows,)
            topk_weights = torch.empty(shape, dtype=torch.float32, device=device)
        if by_rank:
            topk_idx = torch.empty(num_rows, self.config.num_topk, dtype=torch.int64, device=device)
        return Received(
            out,
            scales,
            topk_weights,
            topk_idx,
            counts.tokens_per_expert,
            counts.rows_per_expert,
            counts.plan,
            message_rows,
        )

    def _empty_scales_by_column(self, num_rows: int, hidden: int, dtype: torch.dtype, packs: bool) -> Tensor:
        """Allocate the scales of decode layout: [num_local_experts, rows, columns], contiguous by column."""
        columns = checks.num_scales(hidden) // (SCALES_OF_INT if packs else 1)
        dtype = torch.int32 if packs or dtype != torch.float32 else dtype
        shape = (self._num_local_experts, columns, num_rows // self._num_local_experts)
        return torch.empty(shape, dtype=dtype, device=self._device).transpose(1, 2)

    def gather_counts(self, topk_idx: Tensor | None) -> Tensor | None:
        with self.config.wording, profile_operation("gather_counts") as ranges:
            self.refuse_if_pending("gather of counts")
            self._check(ranges, [("topk_idx", topk_idx)])
            with self.health.operation("gather of counts"), on_device(self._device_index):
                stream = self._enter(ranges)
                with self._traced("gather of counts"):
                    if topk_idx is None:
                        self._c.gather_counts(0, 8, 0, 0, 0, stream)
                        return None
                    num_experts = self.config.num_logical_experts
                    counts = torch.empty(self.config.num_ranks, num_experts, dtype=torch.int32, device=self._device)
                    given = address_of(topk_idx), topk_idx.itemsize, topk_idx.numel()
                    self._c.gather_counts(*given, num_experts, counts.data_ptr(), stream)
        return counts

    def compare_routing(self, planned: Tensor, given: Tensor, where: tuple[int, int]) -> None:
        with self.config.wording, profile_operation("compare") as ranges:
            self._check(ranges, (("topk_idx", planned), ("topk_idx", given)))
            with self.health.operation("compare"), on_device(self._device_index):
                stream = self._enter(ranges)
                self._c.compare_routing(planned.data_ptr(), given.data_ptr(), given.shape[0], where, stream)

    def _wait_for_counts(self) -> int:
        """Return the number of rows of the dispatch that was planned last.

        Kernels have a limit of their own. The limit here applies if they cannot start in this stream.
        """
        end = time.monotonic() + self._start_limit_s
        while (num_rows := self._c.wait_for_counts(SLICE_S)) == _NO_COUNTS_YET:
            self.health.raise_if_ended()
            if time.monotonic() > end:
                raise RuntimeError(
                    f"the kernels of this dispatch did not start within {self._start_limit_s:.0f} s: earlier work in "
                    "this stream, or other kernels on this GPU, keep them from starting"
                )
        if num_rows < 0:
            self._reports.raise_found(ends=True)
            raise RuntimeError("the kernels were aborted")
        return num_rows

    def combine(self, request: CombineRequest) -> Combined:
        with self.config.wording, profile_operation("combine") as ranges:
            self.refuse_if_pending("combine")
            request.make_addressable()
            self._check(ranges, request.tensors())
            with self.health.operation("combine"), on_device(self._device_index):
                stream = self._enter(ranges)
                with self._traced("combine", request.is_send_only):
                    combined = self._allocate_sums(request)
                    if request.layout != "decode":
                        launch = self._c.combine
                    else:
                        launch = self._c.decode_combine_send if request.is_send_only else self._c.decode_combine
                    launch(request, combined, stream)
                if request.is_send_only:
                    rest = replace(request, y=combined.x, weights=None)  # the second launch reads neither
                    launch = partial(self._c.decode_combine_receive, rest, combined)
                    self.pending = _PendingLaunch("combine", launch, (request.plan, *combined))
                if self._caller is not None:
                    self._record_on_caller_stream(combined)
        return combined

    def _allocate_sums(self, request: CombineRequest) -> Combined:
        num_tokens, topk_weights = request.num_tokens, None
        x = request.out
        if x is None:
            x = torch.empty(num_tokens, self.config.hidden, dtype=request.y.dtype, device=self._device)
        if request.topk_weights is not None:
            topk_weights = torch.empty(num_tokens, self.config.num_topk, dtype=torch.float32, device=self._device)
        return Combined(x, topk_weights)

    def receive(self) -> None:
        pending = self.pending
        assert pending is not None  # the caller checks this
        operation = pending.operation
        if torch.cuda.is_current_stream_capturing() != pending.is_captured:
            where = "in the CUDA graph" if pending.is_captured else "outside of a CUDA graph"
            checks.refuse(f"hook() has to be called {where}, where the {operation} was called")
        with self.config.wording, profile_operation(operation) as ranges:
            self._check(ranges)
            with self.health.operation(operation), on_device(self._device_index):
                stream = self._enter(ranges)
                with self._traced(operation):
                    for t in (*pending.tensors, self.wait_ns.get(operation)):
                        if t is not None and t.is_cuda:
                            t.record_stream(torch.cuda.current_stream())  # may differ from that of the first launch
                    pending.launch(stream)
                    if pending.counted is not None:
                        self.count(pending.label, pending.counted)
                    self.pending = None

    def measure_waits(self, operation: str, wait_ns: Tensor | None) -> None:
        if wait_ns is not None and wait_ns.device != self._device:
            checks.fail(f"{operation}_wait_ns", f"a tensor on {wait_ns.device}", f"a tensor on {self._device}")
        super().measure_waits(operation, wait_ns)
        self._c.measure_waits(operation == "dispatch", address_of(wait_ns))

    def plan_capacity(self, num_rows: int, layout: str) -> int:
        return self._compiled.plan_capacity(self._c_config, num_rows)

    @property
    def _start_limit_s(self) -> float:
        """How long the host waits for this buffer's kernels. They have a limit of their own once they have started."""
        return 2 * self.config.timeout_s + 5

    def _wait(self, stream: torch.Stream) -> None:
        """Wait for a stream, and let Python's signal handlers run. ``stream.synchronize()`` would not run them.

        RuntimeError if the stream is busy for longer than this buffer's kernels can take, or if another thread destroys
        the buffer meanwhile.
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

    def _check(self, ranges: NoProfilerRanges, tensors: Iterable[tuple[str, Tensor | None]] = ()) -> None:
        """Raise errors of earlier operations, and refuse tensors of another device: the buffer stays usable."""
        ranges.step("check")
        self.health.raise_if_ended()
        if self._c.has_report():
            self._reports.raise_found(ends=True)
        for argument, t in tensors:
            if t is not None and t.get_device() != self._device_index:
                checks.fail(argument, f"a tensor on {t.device}", f"a tensor on {self._device}")

    def _enter(self, ranges: NoProfilerRanges) -> int:
        """Let the current stream follow the last operation. Return the stream's address."""
        stream = self.current_address()
        if self._stream is None or self._stream_address != stream:
            self._follow()
            self._keep_stream()
        ranges.step("launch")
        return stream

    def _traced(self, operation: str, is_send_only: bool = False) -> AbstractContextManager[None]:
        """Return a scope for EP_DISPATCHER_TRACE. An operation with a hook is shown once, when it receives."""
        if self._trace is None or is_send_only:
            return _NO_SCOPE
        return self._trace.operation(operation)
