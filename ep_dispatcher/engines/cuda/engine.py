"""The CUDA engine, from the allocation of its memory to its end. Its operations are in operations.py.

Kernels read and write the memory of all ranks of a node, and send to other nodes through a wire.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher import _C_cuda, checks, envs
from ep_dispatcher.decode.masks import Masks
from ep_dispatcher.engines import suspension
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.engines.cuda import nccl, stuck_kernels
from ep_dispatcher.engines.cuda.aborts import Aborts
from ep_dispatcher.engines.cuda.kernel_reports import KernelReports
from ep_dispatcher.engines.cuda.nccl import NcclRail
from ep_dispatcher.engines.cuda.operations import CudaOperations
from ep_dispatcher.engines.cuda.regions import SuspendableRegions, mapped_rail, regions_of, wire_of
from ep_dispatcher.engines.cuda.streams import SLICE_S, free_when_idle, wait_for_device
from ep_dispatcher.engines.cuda.stuck_kernels import StuckKernels
from ep_dispatcher.engines.health import Health, watch
from ep_dispatcher.engines.trace import Counters, StreamTrace, Trace
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.gather import Gather
from ep_dispatcher.handle import Event
from ep_dispatcher.memory import check_cuda_sizes, check_cuda_sms, default_sms
from ep_dispatcher.topology import Topology

logger = logging.getLogger(__name__)
# One SM in so many serves the wire, by layout. In rank layout the others have less to do: they write a row once.
_RAIL_SHARES = {"expert": 6, "rank": 4, "decode": 6}
ABORT_S = 2.0  # how long a failed attempt to make a buffer waits for the GPU; aborted kernels end within milliseconds
_stuck_engines: list[CudaEngine] = []  # destroyed, but a kernel may still write their memory


def _rail_sms(topology: Topology, sms: dict[str, int], wire: str) -> dict[str, int]:
    """Return the number of SMs that serve the wire between nodes, by layout. With NCCL they only wait and signal."""
    least = check_cuda_sms(topology.num_nodes, min(sms.values()))
    if topology.num_nodes == 1 or wire == "nccl":
        return dict.fromkeys(_RAIL_SHARES, least)
    return {layout: max(least, sms[layout] // share) for layout, share in _RAIL_SHARES.items()}


def _late_ranks(engine: _C_cuda.Engine) -> list[int]:
    """Return the ranks that a kernel has waited for in vain."""
    late = engine.late()
    return [] if late is None else late[3]


def _abort(aborts: Aborts, rail: NcclRail | None) -> None:
    """Abort this rank, and then NCCL's kernels, so that none of this rank's kernels takes what has not arrived."""
    try:
        aborts.run()
    finally:  # after a sticky error of CUDA the copies of an abort fail
        if rail is not None:
            rail.free(aborts.wait)


class CudaEngine(CudaOperations):
    """The life cycle of the engine: memory, late errors, masks, suspension, destruction."""

    device = "cuda"
    layouts: tuple[str, ...] = ("expert", "rank", "decode")

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._is_attached = False  # all ranks can reach each other's memory
        self._is_sound = False  # destroy() found all operations complete
        self._rail: NcclRail | None = None
        self._thread = threading.get_ident()  # the one that made the buffer
        self._stamps: Tensor | None = None
        if config.mask_late_ranks:
            self.layouts = ("decode",)
        self.gathers_counts = self._topology.num_nodes == 1 and not config.mask_late_ranks
        wire, gpus = self._agree_on_hardware()
        try:
            c = self._c_config
            self._regions.prepare(self._compiled.region_bytes(c), self._compiled.flag_bytes(c))
            config.gather("memory", self._allocate_memory, waits_for_peers=self._regions.allocates_together)
            mapped = config.gather("memory of the other ranks", self._attach_memory, waits_for_peers=True)
            self._is_attached = True
            rail = mapped_rail(self._topology, self._regions.rail, mapped)
            if wire == "nccl":
                self._rail = NcclRail(config, gpus)
            if all(map(all, mapped)):  # NVLink reaches all rail peers: kernels without NVSHMEM are faster
                self._compiled, self._c_config = _C_cuda, self._native_config(_C_cuda)
            self._make_launcher(rail)
            self.summary = self._summary(gpus, rail)
            self._guard_operations()
        except BaseException:  # it is raised again
            self._free_unfinished()
            raise

    def _agree_on_hardware(self) -> tuple[str, list[str]]:
        """Choose GPU, wire, multiprocessors and kind of memory. Return the wire, and the GPUs of all ranks.

        If one rank refuses, all learn it here, before any of them waits for the others to allocate.
        """
        config, topology = self.config, self._topology
        with config.gather.same_on_all_ranks():
            check_cuda_sizes(topology, config)
        with config.gather.same_on_all_ranks():
            wire = wire_of(config)
        gpus = config.gather("GPU", self._find_gpu)
        sharing = gpus.count(gpus[topology.rank])
        self._rail_sms = config.gather("multiprocessors", partial(self._share_sms, wire, sharing))[topology.rank]
        with config.gather.same_on_all_ranks():
            self._regions = regions_of(config, wire)
        self._compiled = self._regions.compiled
        self._c_config = self._native_config(self._compiled)
        return wire, gpus

    def _allocate_memory(self) -> None:
        """Take the memory of this rank: what peers reach, what only this rank uses, and what the host reads."""
        compiled, c = self._compiled, self._c_config
        self._regions.allocate()
        self._regions.memory[: compiled.flag_bytes(c)].zero_()
        state_bytes = compiled.state_bytes(c, max(self._sms.values()))
        self._state = torch.zeros(state_bytes, dtype=torch.uint8, device=self._device)
        report = torch.zeros(compiled.report_bytes(c), dtype=torch.uint8, device="cpu", pin_memory=True)
        counted_rows = report[compiled.counted_rows_offset(c) :].view(torch.int64)
        begin = compiled.reported_message_rows_offset(c)
        message_rows = report[begin : begin + compiled.message_rows_bytes].view(torch.int32)
        self._report, self._counted_rows = report, counted_rows[: self._num_local_experts]
        self._reported_message_rows = message_rows
        wait_for_device(self._device, self.config.timeout_s)

    def _attach_memory(self) -> list[bool]:
        """Map the memory of the other ranks. Return for each node whether the rail peer's is mapped here."""
        compiled, c = self._compiled, self._c_config
        self._regions.attach()
        own_flag = self._state.data_ptr() + compiled.state_aborted_offset
        num_words = compiled.rank_words(c)
        at_peers = compiled.aborted_offset(c) + 8 * num_words * self._topology.rank
        flags = [address + at_peers for address in self._regions.addresses if address]
        self._aborts = Aborts(self._device, compiled.copy, own_flag, flags, num_words, self._topology.rank)
        return [address != 0 for address in self._regions.rail]

    def _make_launcher(self, rail: list[int]) -> None:
        """Give all addresses to the compiled engine. rail: those of the rail peers' memory."""
        self._c = self._compiled.Engine(
            config=self._c_config,
            regions=[self._regions.addresses[rank] for rank in self._topology.node_ranks],
            rail=rail,
            rail_pes=self._regions.rail_pes,
            state=self._state.data_ptr(),
            report=self._report.data_ptr(),
            timeout_s=self.config.timeout_s,
            num_sms=max(self._sms.values()),
        )
        for layout, num_blocks in self._sms.items():
            self._c.share_blocks(getattr(self._compiled.Layout, layout), num_blocks, self._rail_sms[layout])
        if self._rail is not None:
            self._rail.serve(self._c)
            self.num_message_rows = self._reported_message_rows.numel()

    def _summary(self, gpus: list[str], rail: list[int]) -> str:
        """Say what the engine uses: multiprocessors, wires, NVLink."""
        topology, few, many = self._topology, self._sms["expert"], self._sms["decode"]
        parts = [f"CUDA engine, {few} multiprocessors" + f" ({many} in decode layout)" * (many != few)]
        if topology.num_nodes > 1:
            shares = " or ".join(map(str, sorted(set(self._rail_sms.values()))))
            parts.append(f"{shares} of them for the {self._regions.wire} wire between nodes")
        if self._rail is not None:
            parts.append(f"at most {self.config.nccl_sms} more for NCCL {nccl.version()}")
        if topology.num_nodes > 1 and self._regions.wire == "NVSHMEM":
            parts.append(f"{sum(map(bool, rail)) - 1} of {topology.num_nodes - 1} rail peers through NVLink")
        num_hosts = len({self.config.hosts[rank] for rank in topology.node_ranks})
        if num_hosts > 1:
            parts.append(f"NVLink between {num_hosts} hosts of a node")
        elif len({gpus[rank] for rank in topology.node_ranks}) > 1:
            parts.append("NVLink within a node")
        if self.config.why_hosts:
            parts.append(f"nodes are hosts, not NVLink domains ({self.config.why_hosts})")
        return ", ".join(parts)

    def _guard_operations(self) -> None:
        """Look after operations from now on: their errors, late ranks, and a line for each where that is asked for."""
        self._aborts.named = partial(_late_ranks, self._c)
        self.health = Health(partial(_abort, self._aborts, self._rail), self.config.timeout_s)
        self._masks = Masks(self.health)
        masks = self._masks if self.config.mask_late_ranks else None
        self._reports = KernelReports(self._c, self.config, self.health, masks, self._rail is not None)
        self._stuck = None
        if self._compiled is not _C_cuda:
            self._stuck = StuckKernels(self._c.late)
            watch(self.report_stuck_kernel, "ep_dispatcher watch")
        if self._rail is not None:
            watch(self.end_late_messages, "ep_dispatcher watch of messages")
        self._trace = None
        if envs.trace():
            self._trace = StreamTrace(Trace(self._topology.rank), self._state, self._read_state)

    def _free_unfinished(self) -> None:
        """Free what a buffer has taken that could not be made. An exception may keep this object, not its memory."""
        try:
            if self._is_attached:  # the other ranks may have the buffer already: they must learn that this one left
                _abort(self._aborts, self._rail)
        finally:
            regions = self.__dict__.pop("_regions")
            names = ("_c", "_aborts", "_state", "health", "_reports", "_rail")
            kept = [self.__dict__.pop(name, None) for name in names]

            def free() -> None:
                kept.clear()
                regions.free(is_sound=False)

            if self._is_attached:  # a kernel may still use the memory: that of NCCL's first message, for example
                free_when_idle(self._device, free, ABORT_S)
            else:
                kept.clear()
                regions.abandon()

    def _native_config(self, compiled: ModuleType) -> Any:
        c = self.config.cuda_config(compiled.Config())
        c.rank = self._topology.rank
        return c

    def _find_gpu(self) -> str:
        self._device_index = torch.cuda.current_device()
        self._device = torch.device("cuda", self._device_index)
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def _share_sms(self, wire: str, sharing: int) -> dict[str, int]:
        """Choose the multiprocessors. Return the number that serve the wire, by layout. ``sharing``: its ranks."""
        self.all_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        # Kernels wait for messages, so NCCL has to find room beside them, and so has the kernel between two messages.
        kept = self.config.nccl_sms + 1 if wire == "nccl" else 0
        given = self.config.num_sms
        # Blocks wait for other ranks, so all have to fit on the GPU: by default those of two buffers, of all its ranks.
        most = self.all_sms // (1 if given else 2 * sharing) - kept
        self._sms = {layout: min(sms, most) for layout, sms in default_sms(given).items()}
        self.used_sms = self._sms["expert"] + kept
        return _rail_sms(self._topology, self._sms, wire)

    def counters(self) -> dict[str, list[int]]:
        """Return Buffer.counters(). The host waits for the device."""
        self.join()
        self._wait(torch.cuda.current_stream(self._device))
        return self._read_state(self._state.cpu())[1]

    def _read_state(self, state: Tensor) -> tuple[int, Counters]:
        """Return the epoch of the last operation and the counters, from a copy of the state on the CPU."""
        topology, compiled = self._topology, self._compiled
        offsets = compiled.state_offsets(self._c_config)

        def counter(offset: int, num: int = topology.num_ranks) -> list[int]:
            return state[offset : offset + 8 * num].view(torch.int64).tolist()

        def of_rail(offset: int) -> list[int]:
            sent = dict(zip(topology.rail, counter(offset, topology.num_nodes), strict=True))
            return [sent.get(rank, 0) for rank in range(topology.num_ranks)]

        return counter(compiled.epoch_offset, 1)[0], {
            "inter_node_bytes_sent": of_rail(offsets["bytes_sent"]),
            "inter_node_list_bytes_sent": of_rail(offsets["lists_sent"]),
            "intra_node_bytes_read": counter(offsets["bytes_read"]),
            "intra_node_bytes_written": counter(offsets["bytes_written"]),
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
        wait_for_device(self._device, self._start_limit_s)
        found = self._stamps.to("cpu", copy=True)
        self._stamps.zero_()
        wait_for_device(self._device, self._start_limit_s)
        return found

    @property
    def mask(self) -> Tensor:
        self._follow()
        return self._masked().clone()

    def mask_rank(self, rank: int) -> None:
        self.health.raise_if_ended()
        self._follow()
        compiled = self._compiled
        flag = self._regions.addresses[rank] + compiled.excluded_offset(self._c_config) + 8 * self._topology.rank
        one = torch.ones(1, dtype=torch.int64, device=self._device)
        compiled.copy(flag, one.data_ptr(), 8, self.current_address())  # signal the rank first
        self._masked()[rank : rank + 1].fill_(1)
        self._keep_stream()  # later operations follow it

    def _masked(self) -> Tensor:
        """Return the mask in the memory of the kernels: int32 [num_ranks], 1 for masked ranks."""
        offset = self._compiled.state_offsets(self._c_config)["masked"]
        return self._state[offset : offset + 4 * self._topology.num_ranks].view(torch.int32)

    def unmask(self, meet: Callable[[], Gather]) -> None:
        def settle() -> int:
            wait_for_device(self._device, self._start_limit_s)
            try:
                self._reports.raise_found(ends=False)
            except PeerTimeoutError:
                if not self._masks.is_out:
                    raise
            wait_for_device(self._device, self._start_limit_s)  # for copies of an abort
            return self._read_state(self._state.cpu())[0]

        def reset(epoch: int) -> None:
            """Reset all but epoch and counters to the state of a new buffer. No rank has a kernel under way."""
            self._clear_flags()
            self._report.zero_()
            self.pending = None
            self._begin_again(epoch)

        self._masks.unmask(meet, settle, reset)

    def _clear_flags(self) -> None:
        """Zero all that peers wait for in this rank's region. No rank has a kernel under way that writes there."""
        self._regions.memory[: self._compiled.flag_bytes(self._c_config)].zero_()

    def _begin_again(self, epoch: int) -> None:
        """Reset this rank's state to that of a new buffer, except for the counters of bytes. Let kernels run again.

        No rank begins an operation before the flags of all are clear. ``epoch``: of the last one, the same on all ranks
        """
        compiled, state = self._compiled, self._state
        offsets, begin = compiled.state_offsets(self._c_config), compiled.state_aborted_offset
        aborted = state[begin : begin + 4]
        for part in (state[:begin], state[begin + 4 : offsets["bytes_read"]], state[offsets["masked"] :]):
            part.zero_()
        state[compiled.epoch_offset : compiled.epoch_offset + 8].view(torch.int64).fill_(epoch)
        aborted.zero_()  # last: until then a graph that is replayed ends at once
        wait_for_device(self._device, self._start_limit_s)

    def suspend(self, meet: Callable[[], Gather]) -> None:
        regions = self._suspendable_regions()

        def settle() -> None:
            """Wait for all operations, also in replays of graphs, and raise their errors."""
            self.synchronize()
            wait_for_device(self._device, self._start_limit_s)
            self._reports.raise_found(ends=False)
            if self._c.has_captured_messages() and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
                checks.refuse(
                    "buffer cannot be suspended after a CUDA graph over the NCCL wire was captured, for which NCCL "
                    "keeps memory: "
                    "set NCCL_GRAPH_REGISTER=0"
                )

        def give_back(_: list[None]) -> None:
            # A graph that is replayed meanwhile ends before it accesses missing memory.
            self._aborts.end_kernels()
            wait_for_device(self._device, self._start_limit_s)
            regions.give_back()

        suspension.change("suspend", meet, self.health, settle, give_back)

    def resume(self, meet: Callable[[], Gather]) -> None:
        """Take memory again, and begin as a new buffer does, but count operations on.

        ``suspend`` may have ended a replay of a graph at any place, on one rank or several. There it has left flags and
        tagged words of an epoch that is not complete, and counters that are not 0. Ranks may differ in their epochs.
        """
        regions = self._suspendable_regions()

        def take() -> int:
            regions.take()
            self._clear_flags()
            wait_for_device(self._device, self._start_limit_s)
            return self._read_state(self._state.cpu())[0]

        def attach(epochs: list[int]) -> None:
            regions.attach_again()
            self._begin_again(max(epochs))

        suspension.change("resume", meet, self.health, take, attach, regions.drop)

    def _suspendable_regions(self) -> SuspendableRegions:
        assert isinstance(self._regions, SuspendableRegions)  # the caller checks this
        return self._regions

    def destroy(self) -> None:
        """Wait for all operations, raise their errors, and free.

        The wait includes all other work on the GPU. If that does not end in time, the memory is freed when it does.
        Abort the operations instead if the calling thread is not the one that made the buffer, or if a thread is inside
        an operation. So a watchdog can free a rank that hangs.
        """
        try:
            if self._thread != threading.get_ident() or self.health.is_busy:
                _abort(self._aborts, self._rail)
            elif not self.health.ended:
                if self._stream is not None:
                    self._wait(self._stream)
                # For replays of graphs: their streams are not known here.
                wait_for_device(self._device, self._start_limit_s)
                self._write_traces()
                self._reports.raise_found(ends=False)
                self._is_sound = self.pending is None
                if self._rail is not None:
                    self._rail.is_sound = self._is_sound
        finally:
            self.health.stop(partial(_abort, self._aborts, self._rail), self._free)

    def _free(self) -> None:
        if self._stuck is not None and not self._is_idle_within(stuck_kernels.GRACE_S):
            _stuck_engines.append(self)
            return
        free_when_idle(self._device, self._free_memory, self.config.timeout_s)

    def _free_memory(self) -> None:
        """Free what kernels use. None is under way any more."""
        self._aborts.free()
        self._regions.free(self._is_sound)

    def event(self) -> StreamEvent:
        return StreamEvent(self)

    def synchronize(self) -> None:
        """Wait for the last operation, and raise errors found by operations.

        The buffer stays usable if all ranks call this at the same place: an operation completes on a rank only after
        every rank has begun it, so all ranks are in step.
        """
        self.health.raise_if_ended()
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

    def overlook(self, found: Callable[[ValueError], bool]) -> None:
        self._reports.overlooks = found

    def _wait_or_end(self, stream: torch.Stream) -> None:
        """Wait for a stream. An interrupt ends the buffer's use, so that destroy() does not wait for peers."""
        try:
            self._wait(stream)
        except BaseException as error:  # it is raised again
            self.give_up("waited for its operations", error)
            raise

    def give_up(self, doing: str, error: BaseException) -> None:
        """End the buffer's use, and its kernels."""
        text = f"this buffer gave up while it {doing}, by {type(error).__name__}: {error}; destroy() it"
        self.health.end(partial(RuntimeError, text))

    def end_late_messages(self) -> bool:
        """Abort NCCL's kernels when ranks are late, or out of step. Return whether that is done, or needed no more."""
        if self.health.is_stopped or self._rail is None:
            return True
        if self._c.late() is None and not self._c.out_of_step():
            return False
        self._rail.free()  # a kernel has aborted this rank, so no later one takes what has not arrived
        return True

    def report_stuck_kernel(self) -> bool:
        """Log that a kernel runs on long after the report of a late rank. Return whether to look no more.

        Query the stream only after such a report: a query from another thread would end the capture of a CUDA graph.
        """
        if self._stuck is None or self.health.is_stopped:
            return True
        if not self._stuck.found():
            return False
        if not self.idle():
            logger.error("ep_dispatcher: a rank is late or gone. %s", stuck_kernels.REASON)
        return True

    def _is_idle_within(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not self.idle():
            if time.monotonic() > end:
                return False
            time.sleep(SLICE_S)
        return True


class StreamEvent(Event):
    """The event of an operation in a stream. A wait for it may include later operations of the same buffer."""

    def __init__(self, engine: CudaEngine):
        self._engine = engine

    def wait(self) -> None:
        self._engine.join()

    def synchronize(self) -> None:
        """Let the host wait for the operation. Raise the errors that it found late.

        After a ValueError the buffer stays usable if all ranks call this before their next operation.
        """
        with self._engine.config.wording:
            self._engine.synchronize()

    def query(self) -> bool:
        return self._engine.idle()
