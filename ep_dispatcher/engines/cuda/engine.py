"""The CUDA engine: launches kernels in the current stream.

Kernels read and write the memory of all ranks of a node, and send to other nodes through a wire.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ep_dispatcher import _C_cuda, checks, envs
from ep_dispatcher.engines.base import (
    ANY,
    Combined,
    CombineRequest,
    DispatchRequest,
    EngineConfig,
    ExplainsErrors,
    Received,
    address_of,
)
from ep_dispatcher.engines.cuda import stuck_kernels
from ep_dispatcher.engines.cuda.aborts import Aborts
from ep_dispatcher.engines.cuda.kernel_reports import KernelReports
from ep_dispatcher.engines.cuda.regions import SuspendableRegions, mapped_rail, regions_of
from ep_dispatcher.engines.cuda.streams import StreamEvent, side_stream
from ep_dispatcher.engines.cuda.stuck_kernels import StuckKernels
from ep_dispatcher.engines.health import Health
from ep_dispatcher.engines.optional import suspension
from ep_dispatcher.engines.optional.masks import Masks
from ep_dispatcher.engines.ranges import ranges_of
from ep_dispatcher.engines.trace import Counters, StreamTrace, trace_of
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.float8 import BLOCK, SCALES_OF_INT
from ep_dispatcher.gather import Gather
from ep_dispatcher.memory import DEFAULT_SMS, Shape, check_cuda_masks, check_cuda_sizes, check_cuda_sms
from ep_dispatcher.topology import Topology

T = TypeVar("T")
Step = Callable[[str], None]

_SLICE_OVER = -2  # result of wait_for_counts after SLICE_S without counts
_HERE = nullcontext()  # for the device that is the current one already

# One SM in so many serves the wire, by layout. In rank layout the others have less to do: they write a row once.
_RAIL_SHARES = {"expert": 6, "rank": 4, "decode": 6}
# How often a waiting host checks for signals, and for destroy() in another thread.
SLICE_S = 0.05
_stuck_engines: list[CudaEngine] = []  # destroyed, but a kernel may still write their memory


def _aligned(t: Tensor) -> Tensor:
    """Return the tensor, or a copy, at an address that is a multiple of 16: kernels copy 16 bytes at a time."""
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _rail_sms(topology: Topology, num_sms: int) -> dict[str, int]:
    """Return the number of SMs that serve the wire between nodes, by layout."""
    check_cuda_sms(topology, num_sms)
    if topology.num_nodes == 1:
        return dict.fromkeys(_RAIL_SHARES, 0)
    return {layout: max(1, num_sms // share) for layout, share in _RAIL_SHARES.items()}


def _late_ranks(engine: _C_cuda.Engine) -> list[int]:
    """Return the ranks that a kernel has waited for in vain."""
    late = engine.late()
    return [] if late is None else late[3]


class CudaEngine:
    device = "cuda"
    layouts: tuple[str, ...] = ("expert", "rank", "decode")
    rows_on_host: Tensor | None = None

    def __init__(self, config: EngineConfig):
        topology = config.topology
        self._config, self._topology, self._num_local_experts = config, topology, config.num_local_experts
        self._ticket = 0
        self._is_sound = False  # destroy() found all operations complete
        self._thread = threading.get_ident()  # the one that made the buffer
        self._wait_ns: dict[str, Tensor] = {}  # by operation, if the caller measures waits
        self._stamps: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None  # of the last operation
        self._own_stream: torch.cuda.Stream | None = None
        self._caller: torch.cuda.Stream | None = None  # the stream that will wait for an asynchronous operation
        # An operation that has only sent: its name, its second launch with arguments, and the tensors that these
        # arguments point to.
        self._unreceived: tuple[str, Callable[..., None], Any, Tensor, tuple[Tensor | None, ...]] | None = None
        self._sent_in_capture = False  # whether that operation was sent while a CUDA graph was captured
        with config.gather.same_on_all_ranks():
            check_cuda_sizes(topology, config.num_experts, config.max_tokens_per_rank)
            shape = Shape(
                topology.num_nodes,
                topology.ranks_per_node,
                config.num_experts,
                config.num_topk,
                config.max_tokens_per_rank,
                config.hidden,
                config.dtype,
                config.mask_late_ranks,
            )
            check_cuda_masks(shape)
        # If one rank refuses, all learn it here, before any of them waits for the others to allocate.
        self._rail_sms = config.gather("multiprocessors", self._share_sms)[topology.rank]
        with config.gather.same_on_all_ranks():
            self._regions = regions_of(config)
        compiled = self._compiled = self._regions.compiled
        c = self._c_config = self._native_config(compiled, shape)
        if shape.masks:
            self.layouts = ("decode",)

        def allocate() -> None:
            self._regions.allocate()
            self._regions.memory[: compiled.flag_bytes(c)].zero_()
            self._state = torch.zeros(compiled.state_bytes(c, self.num_sms), dtype=torch.uint8, device=self._device)
            self._report = torch.zeros(compiled.report_bytes(c), dtype=torch.uint8, device="cpu", pin_memory=True)
            self._counted_rows = self._report[compiled.counted_rows_offset :].view(torch.int64)
            torch.cuda.synchronize(self._device)

        def attach() -> list[bool]:
            self._regions.attach()
            own_flag = self._state.data_ptr() + compiled.state_aborted_offset
            at_peers = compiled.aborted_offset(c) + 8 * topology.rank
            flags = [address + at_peers for address in self._regions.addresses if address]
            self._aborts = Aborts(self._device, compiled.copy, own_flag, flags, topology.rank)
            return [address != 0 for address in self._regions.rail]

        is_attached = False
        try:
            self._regions.prepare(compiled.region_bytes(c), compiled.flag_bytes(c))
            config.gather("memory", allocate, waits_for_peers=self._regions.allocates_together)
            mapped = config.gather("memory of the other ranks", attach, waits_for_peers=True)
            is_attached = True
            rail = mapped_rail(topology, self._regions.rail, mapped)
            if all(map(all, mapped)):  # NVLink reaches all rail peers: kernels without NVSHMEM are faster
                compiled = self._compiled = _C_cuda
                c = self._c_config = self._native_config(compiled, shape)
            self._c = compiled.Engine(
                config=c,
                regions=[self._regions.addresses[rank] for rank in topology.node_ranks],
                rail=rail,
                rail_pes=self._regions.rail_pes,
                state=self._state.data_ptr(),
                report=self._report.data_ptr(),
                timeout_s=config.timeout_s,
                num_sms=self.num_sms,
            )
            if (gb_per_s := envs.wire_gbps()) and topology.num_nodes > 1 and compiled is _C_cuda:
                self._c.pace_wire(gb_per_s * 1e9)
            self.summary = f"CUDA engine, {self.num_sms} multiprocessors"
            if topology.num_nodes > 1:
                shares = sorted(set(self._rail_sms.values()))
                self.summary += (
                    f", {' or '.join(map(str, shares))} of them for the {self._regions.wire} wire between nodes"
                )
                if self._regions.wire == "NVSHMEM":
                    self.summary += (
                        f", {sum(map(bool, rail)) - 1} of {topology.num_nodes - 1} rail peers through NVLink"
                    )
            self._aborts.named = partial(_late_ranks, self._c)
            self._health = Health(self._aborts.run)
            self._masks = Masks(self._health)
            self._reports = KernelReports(
                self._c, config, self._health, self._masks if config.mask_late_ranks else None
            )
            self._stuck: StuckKernels | None = None  # only if kernels may never end
            if compiled is not _C_cuda:
                self._stuck = StuckKernels(self._c.late)
                stuck_kernels.watch(self)
            trace = trace_of(topology.rank)
            self._trace = None if trace is None else StreamTrace(trace, self._state, self._read_state)
        except BaseException:  # an exception may keep this object alive, but not its memory
            try:
                if is_attached:  # the other ranks may have the buffer already: they must learn that this one left
                    self._aborts.run()
                    torch.cuda.synchronize(self._device)
            finally:
                for name in ("_c", "_aborts", "_state", "_health", "_reports"):
                    self.__dict__.pop(name, None)
                regions = self.__dict__.pop("_regions")
                regions.free(is_sound=False) if is_attached else regions.abandon()
            raise

    def _native_config(self, compiled: ModuleType, shape: Shape) -> Any:
        c = shape.cuda_config(compiled.Config())
        c.rank = self._topology.rank
        return c

    def _share_sms(self) -> dict[str, int]:
        """Choose the multiprocessors. Return the number that serve the wire, by layout."""
        if (gb_per_s := envs.wire_gbps()) and not _C_cuda.has_pace:
            checks.fail("EP_DISPATCHER_WIRE_GBPS", gb_per_s, "unset, or a build with EP_DISPATCHER_PACE=1")
        self._device_index = torch.cuda.current_device()
        self._device = torch.device("cuda", self._device_index)
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self.all_sms, self.num_sms = num_sms, min(self._config.num_sms or DEFAULT_SMS, num_sms)
        return _rail_sms(self._topology, self.num_sms)

    def dispatch(self, request: DispatchRequest) -> Received:
        counted = request.counts
        if counted and torch.cuda.is_current_stream_capturing():
            checks.fail("max_recv_rows", None, "a number while a CUDA graph is captured: no host can wait for counts")
        launch = partial(self._dispatch, request)
        received = self._run("dispatch", launch, *request[:5], traced=not request.sends_only)
        if counted and (self._c.has_report() or self._health.ended):
            try:
                self._reports.raise_found(ends=False)
            except ValueError:
                if request.sends_only:
                    self.receive()
                assert self._stream is not None  # that of this operation
                self._wait(self._stream)  # after the operation all ranks are in step
                raise
        return received

    def _dispatch(self, request: DispatchRequest, stream: int, step: Step) -> Received:
        """Launch the kernels of a dispatch; with `sends_only` only those before its hook."""
        rows, scales, topk_idx, topk_weights, plan, layout, expert_alignment, num_rows, *rest = request
        quantize, sends_only, packs_scales = rest
        counted = request.counts
        rows, scales = _aligned(rows), None if scales is None else _aligned(scales)
        num_tokens, hidden = rows.shape
        dtype, num_scales = (torch.float8_e4m3fn, hidden // BLOCK) if quantize else (rows.dtype, 0)
        num_scales = num_scales if scales is None else scales.shape[1]
        # Every assignment and every call costs host time: set only fields that differ from their defaults, and write
        # address_of() out.
        args: _C_cuda.DispatchArgs = self._compiled.DispatchArgs()
        args.layout, args.expert_alignment = getattr(self._compiled.Layout, layout), expert_alignment
        args.rows, args.row_bytes, args.num_tokens = rows.data_ptr() or ANY, hidden * dtype.itemsize, num_tokens
        args.num_rows, args.rail_blocks = num_rows, self._rail_sms[layout]
        if num_scales:
            args.quantizes, args.scales, args.scale_bytes = quantize, address_of(scales), num_scales * 4
        if topk_idx is not None:
            args.topk_idx = topk_idx.data_ptr() or ANY
        if topk_weights is not None:
            args.topk_weights = topk_weights.data_ptr() or ANY
        if self._wait_ns:
            args.wait_ns = address_of(self._wait_ns.get("dispatch"))
        decodes = layout == "decode"
        count_dtype = torch.int32 if decodes else torch.int64
        tokens_per_expert = torch.empty(self._num_local_experts, dtype=count_dtype, device=self._device)
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
            step("wait for counts")
            num_rows = self._wait_for_counts()
            step("launch")
        by_rank = layout == "rank"
        weights_out = idx_out = scales_out = None
        rows_out = rows.new_empty(num_rows, hidden, dtype=dtype)
        args.num_rows, args.out_rows = num_rows, rows_out.data_ptr() or ANY
        if num_scales:
            scales_out = self._empty_scales(num_rows, num_scales, decodes, packs_scales)
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
            self._wait_for_receive("dispatch", self._c.pull, args, plan, rows, *received)
        else:
            (self._c.pull if counted else self._c.dispatch)(args, plan.data_ptr(), stream)
        if counted:  # copy only now, while the rows move
            # An invalid plan has no rows, and the counts in memory are not its own.
            self.rows_on_host = self._counted_rows.clone() if num_rows > 0 else torch.zeros_like(self._counted_rows)
        if self._caller is not None:
            self._hand_over(received)
        return received

    def check_routing(self, topk_idx: Tensor) -> None:
        """Do nothing: kernels find invalid entries, and the host does not wait for them here."""

    def _empty_scales(self, num_rows: int, num_scales: int, by_column: bool, packs: bool) -> Tensor:
        """Allocate the scales of a dispatch: [rows, columns], or by column [num_local_experts, rows, columns]."""
        if not by_column:
            return torch.empty(num_rows, num_scales, dtype=torch.float32, device=self._device)
        columns, dtype = (num_scales // SCALES_OF_INT, torch.int32) if packs else (num_scales, torch.float32)
        shape = (self._num_local_experts, columns, num_rows // self._num_local_experts)
        return torch.empty(shape, dtype=dtype, device=self._device).transpose(1, 2)

    def _wait_for_counts(self) -> int:
        """Return the number of rows of the dispatch with the last ticket.

        Kernels have a limit of their own. The limit here applies if they cannot start in this stream.
        """
        end = time.monotonic() + 2 * self._config.timeout_s + 5
        while (num_rows := self._c.wait_for_counts(self._ticket, SLICE_S)) == _SLICE_OVER:
            self._health.raise_if_ended()
            if time.monotonic() > end:
                raise RuntimeError("the kernels did not start in time: what is before them in the stream?")
        if num_rows < 0:
            self._reports.raise_found(ends=True)
            raise RuntimeError("the kernels were aborted")
        return num_rows

    def combine(self, request: CombineRequest) -> Combined:
        launch = partial(self._combine, request)
        return self._run("combine", launch, *request[:3], request.weights, traced=not request.sends_only)

    def _combine(self, request: CombineRequest, stream: int, step: Step) -> Combined:
        """Launch the kernels of a combine; with `sends_only` only those before its hook."""
        y, plan, topk_weights, num_tokens, layout, weights, sends_only, out = request
        y, weights_out = _aligned(y), None
        x = y.new_empty(num_tokens, self._config.hidden) if out is None else out
        args: _C_cuda.CombineArgs = self._compiled.CombineArgs()  # set only what differs from defaults, as in _dispatch
        args.y, args.out, args.num_tokens = y.data_ptr() or ANY, x.data_ptr() or ANY, num_tokens
        args.rail_blocks = self._rail_sms[layout]
        if topk_weights is not None:
            weights_out = topk_weights.new_empty(num_tokens, self._config.num_topk)
            args.topk_weights, args.out_weights = address_of(topk_weights), address_of(weights_out)
        if weights is not None:
            args.combine_weights = address_of(weights)
        if self._wait_ns:
            args.wait_ns = address_of(self._wait_ns.get("combine"))
        combined = Combined(x, weights_out)
        if sends_only:
            self._c.push(args, plan.data_ptr(), stream)
            self._wait_for_receive("combine", self._c.reduce, args, plan, *combined)
        else:
            self._c.combine(args, plan.data_ptr(), stream)
        if self._caller is not None:
            self._hand_over(combined)
        return combined

    @property
    def unreceived(self) -> str | None:
        return None if self._unreceived is None or self._health.ended else self._unreceived[0]

    def _wait_for_receive(
        self, name: str, launch: Callable[..., None], args: Any, plan: Tensor, *outputs: Tensor | None
    ) -> None:
        """Keep the second launch of an operation, and the tensors that it accesses."""
        self._unreceived = name, launch, args, plan, (*outputs, self._wait_ns.get(name))
        self._sent_in_capture = torch.cuda.is_current_stream_capturing()

    def receive(self) -> None:
        assert self._unreceived is not None  # the caller checks this
        name, launch, args, plan, outputs = self._unreceived
        if torch.cuda.is_current_stream_capturing() != self._sent_in_capture:
            where = "in the CUDA graph" if self._sent_in_capture else "outside of a CUDA graph"
            checks.fail("hook", f"a call elsewhere than the {name}", f"one {where}, where the {name} was called")

        def pull_or_reduce(stream: int, step: Step) -> None:
            for t in (plan, *outputs):
                if t is not None:
                    t.record_stream(torch.cuda.current_stream())  # it may differ from the stream of the first launch
            launch(args, plan.data_ptr(), stream)
            self._unreceived = None

        self._run(name, pull_or_reduce)

    def measure_waits(self, operation: str, wait_ns: Tensor | None) -> None:
        self._wait_ns.pop(operation, None)
        if wait_ns is not None:
            if wait_ns.device != self._device:
                checks.fail(f"{operation}_wait_ns", f"a tensor on {wait_ns.device}", f"a tensor on {self._device}")
            self._wait_ns[operation] = wait_ns

    def plan_capacity(self, num_rows: int, layout: str) -> int:
        return self._compiled.plan_capacity(self._c_config, num_rows)

    def counters(self) -> dict[str, list[int]]:
        """Return Buffer.counters(). The host waits for the device."""
        self.join()
        return self._read_state(self._state.cpu())[1]

    def _read_state(self, state: Tensor) -> tuple[int, Counters]:
        """Return the epoch of the last operation and the counters, from a copy of the state on the CPU."""
        topology, compiled = self._topology, self._compiled

        def counter(offset: int, num: int = topology.num_ranks) -> list[int]:
            return state[offset : offset + 8 * num].view(torch.int64).tolist()

        def of_rail(offset: int) -> list[int]:
            sent = dict(zip(topology.rail, counter(offset, topology.num_nodes), strict=True))
            return [sent.get(rank, 0) for rank in range(topology.num_ranks)]

        return counter(compiled.epoch_offset, 1)[0], {
            "inter_node_bytes_sent": of_rail(compiled.bytes_sent_offset),
            "inter_node_list_bytes_sent": of_rail(compiled.lists_sent_offset),
            "intra_node_bytes_read": counter(compiled.bytes_read_offset),
            "intra_node_bytes_written": counter(compiled.bytes_written_offset),
        }

    def stamps(self) -> Tensor:
        """Return the stamps: when each warp ended each step of the last operations. Then clear them.

        int64 [launches, operations, blocks, warps, steps] on the CPU: nanoseconds of this GPU's clock, 0 for no stamp.
        An operation with one launch has no stamps in the second. The index of an operation is its epoch modulo the
        number of operations. ``steps`` of the compiled module has the names of steps. The host waits for the device.
        The first call turns stamps on, for operations launched or captured later. benchmarks/time_line.py draws them.
        """
        compiled = self._compiled
        if not compiled.has_stamps:
            raise RuntimeError("built without stamps: EP_DISPATCHER_STAMPS=1 python setup.py build_ext --inplace")
        if self._stamps is None:
            of_one = (self.all_sms, compiled.stamped_warps, len(compiled.steps))
            shape = (compiled.stamped_launches, compiled.stamped_operations, *of_one)
            self._stamps = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._c.stamp_into(self._stamps.data_ptr(), self.all_sms)
        torch.cuda.synchronize(self._device)
        found = self._stamps.to("cpu", copy=True)
        self._stamps.zero_()
        torch.cuda.synchronize(self._device)
        return found

    @property
    def mask(self) -> Tensor:
        self._follow()
        return self._masked().clone()

    def mask_rank(self, rank: int) -> None:
        self._health.raise_if_ended()
        self._follow()
        compiled, stream = self._compiled, torch.cuda.current_stream(self._device)
        flag = self._regions.addresses[rank] + compiled.excluded_offset(self._c_config) + 8 * self._topology.rank
        one = torch.ones(1, dtype=torch.int64, device=self._device)
        compiled.copy(flag, one.data_ptr(), 8, stream.cuda_stream)  # signal the rank first
        self._masked()[rank : rank + 1].fill_(1)
        self._stream = stream  # later operations follow it

    def _masked(self) -> Tensor:
        """Return the mask in the memory of the kernels: int32 [num_ranks], 1 for masked ranks."""
        offset = self._compiled.masked_offset
        return self._state[offset : offset + 4 * self._topology.num_ranks].view(torch.int32)

    def unmask(self, meet: Callable[[], Gather]) -> None:
        compiled, state = self._compiled, self._state

        def settle() -> int:
            torch.cuda.synchronize(self._device)
            try:
                self._reports.raise_found(ends=False)
            except PeerTimeoutError:
                if not self._masks.is_out:
                    raise
            torch.cuda.synchronize(self._device)  # for copies of an abort
            return self._read_state(state.cpu())[0]

        def reset(epoch: int) -> None:
            """Reset all but epoch and counters to the state of a new buffer. No rank has a kernel under way."""
            self._regions.memory[: compiled.flag_bytes(self._c_config)].zero_()
            counters = slice(compiled.bytes_read_offset, compiled.lists_sent_offset + 8 * compiled.max_nodes)
            kept = state[counters].clone()
            state.zero_()
            state[counters] = kept
            state[compiled.epoch_offset : compiled.epoch_offset + 8].view(torch.int64).fill_(epoch)
            self._report.zero_()
            self._unreceived = None
            torch.cuda.synchronize(self._device)

        self._masks.unmask(meet, settle, reset)

    def suspend(self, meet: Callable[[], Gather]) -> None:
        regions = self._suspendable_regions()

        def give_back() -> None:
            self._set_aborted(1)  # a graph that is replayed meanwhile ends at once, before it accesses missing memory
            regions.give_back()

        suspension.suspend(meet, self._health, settle=self._settle, give_back=give_back)

    def resume(self, meet: Callable[[], Gather]) -> None:
        regions = self._suspendable_regions()

        def attach() -> None:
            regions.attach_again()
            self._set_aborted(0)

        suspension.resume(meet, self._health, take=regions.take, attach=attach, drop=regions.drop)

    def _suspendable_regions(self) -> SuspendableRegions:
        assert isinstance(self._regions, SuspendableRegions)  # the caller checks this
        return self._regions

    def _settle(self) -> None:
        """Wait for all operations, also in replays of graphs, and raise their errors."""
        self.synchronize()
        torch.cuda.synchronize(self._device)
        self._reports.raise_found(ends=False)

    def _set_aborted(self, value: int) -> None:
        """Make kernels of this rank end at once, or (0) run again. Peers are not signalled."""
        offset = self._compiled.state_aborted_offset
        self._state[offset : offset + 4].view(torch.int32).fill_(value)
        torch.cuda.synchronize(self._device)

    @property
    def is_suspended(self) -> bool:
        return self._health.suspended

    @property
    def is_busy(self) -> bool:
        return self._health.is_busy

    def destroy(self) -> None:
        """Wait for all operations, raise their errors, and free.

        Abort the operations instead if the calling thread is not the one that made the buffer, or if a thread is inside
        an operation. So a watchdog can free a rank that hangs.
        """
        try:
            if self._thread != threading.get_ident() or self._health.is_busy:
                self._aborts.run()
            elif not self._health.ended:
                if self._stream is not None:
                    self._wait(self._stream)
                torch.cuda.synchronize(self._device)  # for replays of graphs: their streams are not known here
                self._write_traces()
                self._reports.raise_found(ends=False)
                self._is_sound = self._unreceived is None
        finally:
            self._health.stop(self._aborts.run, self._free)

    def _free(self) -> None:
        if self._stuck is not None and not self._is_idle_within(stuck_kernels.GRACE_S):
            _stuck_engines.append(self)
            return
        torch.cuda.synchronize(self._device)
        self._aborts.free()
        self._regions.free(self._is_sound)

    # ---- streams --------------------------------------------------------------------------------------------------

    def event(self, owner: ExplainsErrors) -> StreamEvent:
        return StreamEvent(self, owner)

    @contextmanager
    def asynchronous(self, *inputs: object) -> Iterator[None]:
        """Run operations inside in a stream of the buffer's own, after all work so far in the current stream."""
        self._caller = torch.cuda.current_stream(self._device)
        if self._own_stream is None:
            self._own_stream = torch.cuda.Stream(self._device, priority=-1)
        self._own_stream.wait_stream(self._caller)
        for value in inputs:
            for t in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(t, Tensor) and t.is_cuda:
                    t.record_stream(self._own_stream)
        try:
            with torch.cuda.stream(self._own_stream):
                yield
        finally:
            self._caller = None

    def side_stream(self) -> torch.cuda.Stream:
        """Return the stream for operations beside kernels of experts in the current stream."""
        return side_stream(self._device.index)

    def join(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)

    def _follow(self) -> None:
        """Let the current stream wait for the last operation."""
        # In a capture a stream cannot wait for earlier work, only for streams of the same capture.
        if not torch.cuda.is_current_stream_capturing() or self._is_captured():
            self.join()

    def _is_captured(self) -> bool:
        """Return whether the stream of the last operation is being captured."""
        if self._stream is None or self._stream.cuda_stream == 0:  # the default stream is never captured; do not ask it
            return False
        with torch.cuda.stream(self._stream):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait for the last operation, and raise errors found by operations.

        The buffer stays usable if all ranks call this at the same place: an operation completes on a rank only after
        every rank has begun it, so all ranks are in step.
        """
        self._health.raise_if_ended()
        if self._stream is not None:
            self._wait_or_end(self._stream)
        self._write_traces()
        self._reports.raise_found(ends=False)

    def _write_traces(self) -> None:
        if self._trace is not None:
            self._trace.write_complete()

    def check(self) -> None:
        self._wait_or_end(torch.cuda.current_stream(self._device))
        self.synchronize()

    def _wait_or_end(self, stream: torch.cuda.Stream) -> None:
        """Wait for a stream. An interrupt ends the buffer's use, so that destroy() does not wait for peers."""
        try:
            self._wait(stream)
        except BaseException as error:  # it is raised again
            self.give_up("waited for its operations", error)
            raise

    def give_up(self, doing: str, error: BaseException) -> None:
        """End the buffer's use, and its kernels."""
        text = f"this buffer gave up while it {doing}, by {type(error).__name__}: {error}; destroy() it"
        self._health.end(partial(RuntimeError, text))

    def idle(self) -> bool:
        return self._stream is None or self._stream.query()

    def has_stuck_kernel(self) -> bool | None:
        """Return whether a kernel runs on long after the report of a late rank. None if the answer is final.

        Query the stream only after such a report: a query from another thread would end the capture of a CUDA graph.
        """
        if self._stuck is None or self._health.is_stopped:
            return None
        if not self._stuck.found():
            return False
        return None if self.idle() else True

    def _is_idle_within(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not self.idle():
            if time.monotonic() > end:
                return False
            time.sleep(SLICE_S)
        return True

    def _wait(self, stream: torch.cuda.Stream) -> None:
        """Wait for a stream, and let Python's signal handlers run. In ``stream.synchronize()`` they would not."""
        begin = time.monotonic()
        while not stream.query():
            if self._stuck is not None and self._stuck.found():
                self._reports.raise_found(ends=True, reason=stuck_kernels.REASON)
            waited = time.monotonic() - begin
            if waited > 1e-3:  # then a sleep of a tenth of this time adds little
                time.sleep(min(waited / 10, SLICE_S))

    def _hand_over(self, outputs: Received | Combined) -> None:
        """Keep outputs of the buffer's own stream until the caller's stream no longer uses them."""
        assert self._caller is not None  # of an asynchronous operation
        for t in outputs:
            if t is not None:
                t.record_stream(self._caller)

    def _run(self, name: str, launch: Callable[[int, Step], T], *inputs: Tensor | None, traced: bool = True) -> T:
        """Run one operation at a time, in the current stream. Return ``launch(stream, step)``.

        ``stream``: its address. ``step``: names a step to profilers. ``traced``: EP_DISPATCHER_TRACE shows the
        operation. One with a hook is shown once, when it receives.

        A ``contextmanager`` would cost the host 1 us more.
        """
        with ranges_of(name) as ranges:
            ranges.step("check")
            self._health.raise_if_ended()
            if self._c.has_report():
                self._reports.raise_found(ends=True)
            device = self._device_index
            for t in inputs:
                if t is not None and t.get_device() != device:
                    argument = "x" if name == "dispatch" else "y"
                    checks.fail(argument, f"a tensor on {t.device}", f"tensors on {self._device}")
            is_current = torch._C._cuda_getDevice() == device
            with self._health.operation(name), _HERE if is_current else torch.cuda.device(device):
                # Only the address: torch.cuda.current_stream() makes a Python object, which costs 2 us more.
                stream = torch._C._cuda_getCurrentRawStream(device)
                if self._stream is None or self._stream.cuda_stream != stream:
                    self._follow()
                    self._stream = torch.cuda.current_stream()
                ranges.step("launch")
                if self._trace is None or not traced:
                    return launch(stream, ranges.step)
                with self._trace.operation(name):
                    return launch(stream, ranges.step)
