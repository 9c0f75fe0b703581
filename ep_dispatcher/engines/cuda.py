"""The CUDA engine: kernels that read and write the memory of all ranks of a node, launched in the current stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from ep_dispatcher import _C_cuda, checks
from ep_dispatcher.engines.base import EngineConfig, Received
from ep_dispatcher.engines.health import Health
from ep_dispatcher.engines.kernel_reports import KernelReports
from ep_dispatcher.engines.rendezvous import rendezvous
from ep_dispatcher.float8 import BLOCK
from ep_dispatcher.topology import host_id

_DTYPES = {
    torch.float32: _C_cuda.DType.float32,
    torch.bfloat16: _C_cuda.DType.bfloat16,
    torch.float16: _C_cuda.DType.float16,
}
_LAYOUTS = {"rank": _C_cuda.Layout.rank, "expert": _C_cuda.Layout.expert}
_NO_ELEMENTS = 64  # an address that is not 0, which is for None, and never read
_SLICE_OVER = -2  # of wait_for_counts

# On 4 H200: enough for NVLink; more make a combine faster, and take as many from the kernels beside it.
DEFAULT_SMS = 24
MAX_EXPERTS = 8192  # the counts of a warp have to fit into shared memory
MAX_TOKENS = 2**22  # the counters of a block's chunks have to
# How often a waiting host looks for signals and for destroy() in another thread.
SLICE_S = 0.05


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr() or _NO_ELEMENTS


def _aligned(t: Tensor | None) -> Tensor | None:
    """The rows are copied 16 bytes at a time; a view can begin anywhere."""
    return t if t is None or t.data_ptr() % 16 == 0 else t.clone()


class StreamEvent:
    """The event of an operation in a stream. It may wait for later operations of the same buffer too."""

    def __init__(self, engine: CudaEngine):
        self._engine = engine

    def wait(self) -> None:
        """Let the current stream wait for the operation."""
        self._engine.join()

    def synchronize(self) -> None:
        """Let the host wait for the operation; raises what went wrong on the device.

        After a ValueError that all ranks ask for before their next operation the buffer is as good as before.
        """
        self._engine.synchronize()

    def query(self) -> bool:
        """Whether the operation is complete."""
        return self._engine.idle()


class CudaEngine:
    device = "cuda"

    def __init__(self, config: EngineConfig):
        topology = config.topology
        self._config, self._topology = config, topology
        self._ticket = 0
        self._thread = threading.get_ident()  # that made the buffer
        self._stream: torch.cuda.Stream | None = None  # of the last operation
        self._own_stream: torch.cuda.Stream | None = None
        self._caller: torch.cuda.Stream | None = None  # waits for an asynchronous operation later
        c = self._c_config = _C_cuda.Config()
        # All ranks reach each other's memory; the nodes of the topology decide the order of the sums alone.
        c.rank, c.ranks_per_node, c.ranks_per_sum = topology.rank, topology.num_ranks, topology.ranks_per_node
        c.num_experts, c.num_topk = config.num_experts, config.num_topk
        c.max_tokens, c.hidden, c.dtype = config.max_tokens_per_rank, config.hidden, _DTYPES[config.dtype]

        def allocate():
            if topology.num_ranks > _C_cuda.max_ranks:
                checks.fail("group", f"{topology.num_ranks} ranks", f"at most {_C_cuda.max_ranks} with engine='cuda'")
            if config.num_experts > MAX_EXPERTS:
                checks.fail("num_experts", config.num_experts, f"at most {MAX_EXPERTS} with engine='cuda'")
            if config.max_tokens_per_rank > MAX_TOKENS:
                given = config.max_tokens_per_rank
                checks.fail("max_tokens_per_rank", given, f"at most {MAX_TOKENS} with engine='cuda'")
            self._device = torch.device("cuda", torch.cuda.current_device())
            # Not symmetric_memory.empty, which may take memory from a pool and give it back to that: a slow peer with
            # the old mapping could then write into a later buffer. This lives while a peer has it mapped.
            allocate_symmetric = symmetric_memory._SymmetricMemory.empty_strided_p2p
            self._memory = allocate_symmetric((_C_cuda.region_bytes(c),), (1,), torch.uint8, self._device)
            self._memory[: _C_cuda.flag_bytes(c)].zero_()
            num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
            self._num_sms = min(config.num_sms or DEFAULT_SMS, num_sms)
            self._state = torch.zeros(_C_cuda.state_bytes(c, self._num_sms), dtype=torch.uint8, device=self._device)
            self._report = torch.zeros(_C_cuda.report_bytes, dtype=torch.uint8, pin_memory=True)
            self._aborts = Aborts(self._device, topology.rank)
            torch.cuda.synchronize(self._device)
            return host_id()

        def attach():
            if len(set(hosts)) > 1:
                raise ValueError(
                    "engine: given 'cuda' for ranks on several hosts, allowed: ranks of one host, or 'cpu'"
                )
            name = f"ep_dispatcher/{config.buffer_id}"  # used once
            self._symmetric = rendezvous(self._memory, topology, config.store, name, config.timeout_s)
            regions = list(self._symmetric.buffer_ptrs)
            addresses = (self._state.data_ptr(), self._report.data_ptr())
            self._c = _C_cuda.Engine(c, regions, *addresses, config.timeout_s, self._num_sms)
            offset = _C_cuda.aborted_offset(c)
            for peer in range(topology.num_ranks):
                region = self._symmetric.get_buffer(peer, (offset + 8 * topology.num_ranks,), torch.uint8)
                self._aborts.add_peer(region[offset:].view(torch.int64))
            self._aborts.state = self._state[_C_cuda.state_aborted_offset :][:4].view(torch.int32)

        try:
            hosts = config.gather("memory", allocate)
            config.gather("memory of the other ranks", attach, waits_for_peers=True)
        except BaseException:  # a kept exception keeps this object, but not its memory
            for name in ("_c", "_aborts", "_symmetric", "_memory", "_state"):
                self.__dict__.pop(name, None)
            raise
        self._health = Health(self._aborts.run)
        self._reports = KernelReports(self._c, config, self._health)

    def dispatch(
        self, rows, scales, topk_idx, topk_weights, plan, layout, expert_alignment, num_rows, quantize
    ) -> Received:
        new, counted = plan is None, plan is None and num_rows < 0
        if counted and torch.cuda.is_current_stream_capturing():
            checks.fail("max_recv_rows", None, "a number while a CUDA graph is captured: no host can wait for counts")
        with self._operation("dispatch", rows, scales, topk_idx, topk_weights, plan) as stream:
            rows, scales, args = _aligned(rows), _aligned(scales), _C_cuda.DispatchArgs()
            dtype, num_scales = (torch.float8_e4m3fn, rows.shape[1] // BLOCK) if quantize else (rows.dtype, 0)
            num_scales = num_scales if scales is None else scales.shape[1]
            args.rows, args.row_bytes, args.quantizes = _address(rows), rows.shape[1] * dtype.itemsize, quantize
            args.scales, args.scale_bytes = _address(scales), num_scales * 4
            args.topk_idx, args.topk_weights = _address(topk_idx), _address(topk_weights)
            args.num_tokens, args.layout = rows.shape[0], _LAYOUTS[layout]
            args.expert_alignment, args.num_rows = expert_alignment, num_rows
            tokens_per_expert, rows_per_expert = (
                torch.empty(self._config.num_local_experts, dtype=torch.int64, device="cuda") for _ in range(2)
            )
            new_plan = torch.empty(self.plan_capacity(num_rows, layout) if new else 0, dtype=torch.int32, device="cuda")
            args.out_tokens_per_expert = _address(tokens_per_expert)
            args.out_rows_per_expert = _address(rows_per_expert)
            if new:
                plan, self._ticket = new_plan, self._ticket + 1
                args.ticket = self._ticket
            if counted:
                self._c.prepare(args, plan.data_ptr(), stream)
                num_rows = self._wait_for_counts()
            by_rank = layout == "rank"
            weights_shape = (num_rows, self._config.num_topk) if by_rank else (num_rows,)
            received = Received(
                rows=rows.new_empty(num_rows, rows.shape[1], dtype=dtype),
                scales=rows.new_empty((num_rows, num_scales) if num_scales else 0, dtype=torch.float32),
                topk_weights=rows.new_empty(0 if topk_weights is None else weights_shape, dtype=torch.float32),
                topk_idx=rows.new_empty((num_rows, self._config.num_topk) if by_rank else 0, dtype=torch.int64),
                tokens_per_expert=tokens_per_expert,
                rows_per_expert=rows_per_expert,
                plan=new_plan,
            )
            args.num_rows, args.out_rows = num_rows, _address(received.rows)
            args.out_scales = _address(received.scales if num_scales else None)
            args.out_weights = _address(None if topk_weights is None else received.topk_weights)
            args.out_topk_idx = _address(received.topk_idx if by_rank else None)
            (self._c.pull if counted else self._c.dispatch)(args, plan.data_ptr(), stream)
            self._hand_over(*received)
        if counted:
            try:
                self._reports.raise_found(ends=False)
            except ValueError:
                self._wait(self._stream)  # until the operation is complete: then all ranks are in step
                raise
        return received

    def _wait_for_counts(self) -> int:
        """Rows of the dispatch with the last ticket. Kernels end at their own limit; this one is for a stream in which
        they cannot start."""
        end = time.monotonic() + 2 * self._config.timeout_s + 5
        while (num_rows := self._c.wait_for_counts(self._ticket, SLICE_S)) == _SLICE_OVER:
            self._health.raise_if_ended()
            if time.monotonic() > end:
                raise RuntimeError("the kernels did not start in time: what is before them in the stream?")
        if num_rows < 0:
            self._reports.raise_found(ends=True)
            raise RuntimeError("the kernels were aborted")
        return num_rows

    def combine(self, y: Tensor, plan: Tensor, topk_weights: Tensor | None, num_tokens: int) -> tuple[Tensor, Tensor]:
        with self._operation("combine", y, plan, topk_weights) as stream:
            y, args = _aligned(y), _C_cuda.CombineArgs()
            x = y.new_empty(num_tokens, self._config.hidden)
            shape = 0 if topk_weights is None else (num_tokens, self._config.num_topk)
            weights_out = y.new_empty(shape, dtype=torch.float32)
            args.y, args.topk_weights, args.out = _address(y), _address(topk_weights), _address(x)
            args.out_weights, args.num_tokens = _address(None if topk_weights is None else weights_out), num_tokens
            self._c.combine(args, plan.data_ptr(), stream)
            self._hand_over(x, weights_out)
        return x, weights_out

    def plan_capacity(self, num_rows: int, layout: str) -> int:
        return _C_cuda.plan_capacity(self._c_config, num_rows)

    def counters(self) -> dict[str, list[int]]:
        """Bytes since the start, per rank of the group, by whose memory; the host waits for the device."""
        self.join()
        num_ranks, state = self._topology.num_ranks, self._state.cpu()

        def counter(offset: int) -> list[int]:
            return state[offset : offset + 8 * num_ranks].view(torch.int64).tolist()

        return {
            "inter_node_bytes_sent": [0] * num_ranks,
            "intra_node_bytes_read": counter(_C_cuda.bytes_read_offset),
            "intra_node_bytes_written": counter(_C_cuda.bytes_written_offset),
        }

    def destroy(self) -> None:
        """Complete what is under way, raise what it has found, and free.

        In another thread than the one that made the buffer, or while another thread is inside an operation: abort what
        is under way instead, so that a watchdog can free a rank that hangs.
        """
        try:
            if self._thread != threading.get_ident() or self._health.is_busy:
                self._aborts.run()
            elif not self._health.ended:
                if self._stream is not None:
                    self._wait(self._stream)
                torch.cuda.synchronize(self._device)  # for replays of graphs, which are in no stream known here
                self._reports.raise_found(ends=False)
        finally:
            self._health.stop(self._aborts.run, self._free)

    def _free(self) -> None:
        torch.cuda.synchronize(self._device)
        self._aborts.free()
        del self._symmetric, self._memory

    # ---- streams --------------------------------------------------------------------------------------------------

    def event(self) -> StreamEvent:
        return StreamEvent(self)

    @contextmanager
    def asynchronous(self, *inputs) -> Iterator[None]:
        """Operations inside run in a stream of the buffer's own, which starts where the current stream is now."""
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

    def join(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)

    def _is_captured(self) -> bool:
        """Whether the stream of the last operation is being captured."""
        if self._stream is None or self._stream.cuda_stream == 0:  # the default stream cannot be, nor always be asked
            return False
        with torch.cuda.stream(self._stream):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait for the last operation and raise what operations have found. The buffer stays usable if all ranks do so
        here: an operation completes on a rank only after every rank has begun it, so all are in step."""
        self._health.raise_if_ended()
        if self._stream is not None:
            self._wait_or_end(self._stream)
        self._reports.raise_found(ends=False)

    def check(self) -> None:
        self._wait_or_end(torch.cuda.current_stream(self._device))
        self.synchronize()

    def _wait_or_end(self, stream: torch.cuda.Stream) -> None:
        """Wait for a stream. An interrupt ends the buffer's use: whoever destroys it then does not wait for peers."""
        try:
            self._wait(stream)
        except BaseException as error:
            text = f"this buffer gave up while it waited for its operations, by {type(error).__name__}: {error}; "
            self._health.end(partial(RuntimeError, text + "destroy() it"))
            raise

    def idle(self) -> bool:
        return self._stream is None or self._stream.query()

    @staticmethod
    def _wait(stream: torch.cuda.Stream) -> None:
        """Wait for a stream. Python's signal handlers run meanwhile, as they do not in ``stream.synchronize()``."""
        begin = time.monotonic()
        while not stream.query():
            waited = time.monotonic() - begin
            if waited > 1e-3:  # then a sleep of a tenth of it delays little
                time.sleep(min(waited / 10, SLICE_S))

    def _hand_over(self, *outputs: Tensor) -> None:
        """Memory that another stream than its own uses must not be given away before that stream is through."""
        if self._caller is not None:
            for t in outputs:
                t.record_stream(self._caller)

    @contextmanager
    def _operation(self, name: str, *inputs: Tensor | None) -> Iterator[int]:
        """One operation at a time, in the current stream, whose number this yields."""
        self._health.raise_if_ended()
        self._reports.raise_found(ends=True)
        for t in inputs:
            if t is not None and t.device != self._device:
                checks.fail("x" if name == "dispatch" else "y", f"a tensor on {t.device}", f"tensors on {self._device}")
        with self._health.operation(name), torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if self._stream is None or stream != self._stream:  # a stream is never unequal to None
                # A graph cannot wait for what comes before it, but for streams that are captured with it.
                if not torch.cuda.is_current_stream_capturing() or self._is_captured():
                    self.join()
                self._stream = stream
            yield stream.cuda_stream


class Aborts:
    """Abort this rank from the host: its kernels end soon, and the peers' kernels wait for it no longer."""

    def __init__(self, device: torch.device, rank: int):
        self._rank = rank
        self._one = torch.ones(1, dtype=torch.int64, pin_memory=True)
        self._stream = torch.cuda.Stream(device)  # copies in it need not wait for the kernels under way
        self._peers: list[Tensor] = []
        self.state: Tensor | None = None  # int32 [1] that this rank's kernels look at

    def add_peer(self, aborted: Tensor) -> None:
        """``aborted``: int64 [num_ranks] flags in the peer's region."""
        self._peers.append(aborted)

    def free(self) -> None:
        """Let go of the peers' memory, once nothing runs any more."""
        self._peers.clear()
        self.state = None

    def run(self) -> None:
        with torch.cuda.stream(self._stream):  # copies, no kernels: these might have to wait for a multiprocessor
            if self.state is not None:
                self.state.copy_(self._one.view(torch.int32)[:1], non_blocking=True)
            for flags in self._peers:
                flags[self._rank : self._rank + 1].copy_(self._one, non_blocking=True)
