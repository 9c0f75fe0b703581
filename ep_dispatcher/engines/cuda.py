"""The CUDA engine: kernels that read and write the memory of all ranks of a node, launched in the current stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from ep_dispatcher import _C_cuda, checks
from ep_dispatcher.engines.base import EngineConfig, Received
from ep_dispatcher.engines.faults import find_late_ranks
from ep_dispatcher.engines.rendezvous import rendezvous
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.float8 import BLOCK
from ep_dispatcher.topology import host_id

_DTYPES = {
    torch.float32: _C_cuda.DType.float32,
    torch.bfloat16: _C_cuda.DType.bfloat16,
    torch.float16: _C_cuda.DType.float16,
}
_LAYOUTS = {"rank": _C_cuda.Layout.rank, "expert": _C_cuda.Layout.expert}
_OPERATIONS = ("dispatch", "combine")
_PHASES = ("free staging", "counts", "lists", "rows", "free slots", "partial sums")
_BAD_ENTRY, _TOO_FEW_ROWS, _TOO_MANY_ROWS, _DISAGREE = range(1, 5)
_AGREED = (  # what ranks give alike, as Given in csrc has it, and how a number stands for it
    ("handle", lambda n: f"the plan of epoch {n}" if n else "None"),
    ("layout", lambda n: repr(_C_cuda.Layout(n).name)),
    ("expert_alignment", str),
    ("max_recv_rows", str),
    ("topk_weights", lambda n: "them" if n else "None"),
    ("x: bytes per row", str),
    ("x: bytes of scales", str),
)
_NO_ELEMENTS = 64  # an address that is not 0, which is for None, and never read

# On 4 H200: enough for NVLink; more make a combine faster, and take as many from the kernels beside it.
DEFAULT_SMS = 24
MAX_EXPERTS = 8192  # the counts of a warp have to fit into shared memory


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
        self._failure: Callable[[], Exception] | None = None  # makes the error that ended the use of this buffer
        self._in_use = threading.Lock()
        self._ticket = 0
        self._launched = 0  # operations since the host knew all of them to be complete
        self._stream: torch.cuda.Stream | None = None  # of the last operation
        self._own_stream: torch.cuda.Stream | None = None
        self._caller: torch.cuda.Stream | None = None  # waits for an asynchronous operation later
        s = self._sizes = _C_cuda.Sizes()
        s.rank, s.num_ranks, s.ranks_per_node = topology.rank, topology.num_ranks, topology.ranks_per_node
        s.num_experts, s.num_topk = config.num_experts, config.num_topk
        s.max_tokens, s.hidden, s.dtype = config.max_tokens_per_rank, config.hidden, _DTYPES[config.dtype]

        def allocate():
            if topology.num_ranks > _C_cuda.max_ranks:
                checks.fail("group", f"{topology.num_ranks} ranks", f"at most {_C_cuda.max_ranks} with engine='cuda'")
            if config.num_experts > MAX_EXPERTS:
                checks.fail("num_experts", config.num_experts, f"at most {MAX_EXPERTS} with engine='cuda'")
            self._device = torch.device("cuda", torch.cuda.current_device())
            # Not symmetric_memory.empty, which may take memory from a pool and give it back to that: a slow peer with
            # the old mapping could then write into a later buffer. This lives while a peer has it mapped.
            allocate_symmetric = symmetric_memory._SymmetricMemory.empty_strided_p2p
            self._memory = allocate_symmetric((_C_cuda.region_bytes(s),), (1,), torch.uint8, self._device)
            self._memory[: _C_cuda.flag_bytes(s)].zero_()
            num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
            self._num_sms = min(config.num_sms or DEFAULT_SMS, num_sms)
            self._state = torch.zeros(_C_cuda.state_bytes(s, self._num_sms), dtype=torch.uint8, device=self._device)
            self._report = torch.zeros(_C_cuda.report_bytes, dtype=torch.uint8, pin_memory=True)
            self._one = torch.ones(1, dtype=torch.int64, pin_memory=True)
            self._to_peers = torch.cuda.Stream(self._device)  # of what must not wait for the kernels under way
            torch.cuda.synchronize(self._device)
            return host_id()

        def attach():
            if len(set(hosts)) > 1:
                raise ValueError(
                    "engine: given 'cuda' for ranks on several hosts, allowed: ranks of one host, or 'cpu'"
                )
            name = f"ep_dispatcher/{config.buffer_id}"  # used once
            self._symmetric = rendezvous(self._memory, topology, config.store, name)
            regions = list(self._symmetric.buffer_ptrs)
            addresses = (self._state.data_ptr(), self._report.data_ptr())
            self._c = _C_cuda.Engine(s, regions, *addresses, config.timeout_s, self._num_sms)

        hosts = config.gather(allocate)
        config.gather(attach)

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
                num_rows = self._c.wait_for_counts(self._ticket)
                if num_rows < 0:
                    self._check()
                    raise RuntimeError("the kernels did not start in time: what is before them in the stream?")
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
        if counted:  # all ranks that wait for counts find the same mistake here, and none has gone on
            self._launched = 0
            self._check(ends=False)
        return received

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
        return _C_cuda.plan_capacity(self._sizes, num_rows)

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
        try:
            if self._stream is not None:
                torch.cuda.synchronize(self._device)
            if self._failure is None:
                self._check(ends=False)
        finally:
            self._c = None
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
        if self._stream is not None:
            self._stream.synchronize()
        launched, self._launched = self._launched, 0
        self._check(ends=None if launched > 1 else False)  # a graph is replayed by all ranks or none

    def check(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self.synchronize()

    def idle(self) -> bool:
        return self._stream is None or self._stream.query()

    def _hand_over(self, *outputs: Tensor) -> None:
        """Memory that another stream than its own uses must not be given away before that stream is through."""
        if self._caller is not None:
            for t in outputs:
                t.record_stream(self._caller)

    @contextmanager
    def _operation(self, name: str, *inputs: Tensor | None) -> Iterator[int]:
        """One operation at a time, in the current stream, whose number this yields."""
        self._check()
        for t in inputs:
            if t is not None and t.device != self._device:
                checks.fail("x" if name == "dispatch" else "y", f"a tensor on {t.device}", f"tensors on {self._device}")
        if not self._in_use.acquire(blocking=False):
            raise ValueError("buffer: given while another thread is in an operation on it, allowed: one at a time")
        try:
            with torch.cuda.device(self._device):
                stream = torch.cuda.current_stream()
                if self._stream is None or stream != self._stream:  # a stream is never unequal to None
                    # A graph cannot wait for what comes before it, but for streams that are captured with it.
                    if not torch.cuda.is_current_stream_capturing() or self._is_captured():
                        self.join()
                    self._stream = stream
                self._launched = 0 if torch.cuda.is_current_stream_capturing() else self._launched + 1
                yield stream.cuda_stream
        except BaseException as error:  # an interrupt, no memory: this rank is now the one that is late for the others
            if self._failure is None:
                text = f"this buffer gave up in {name}, by {type(error).__name__}: {error}; destroy() it"
                self._give_up(partial(RuntimeError, text))
            raise
        finally:
            self._in_use.release()

    # ---- what went wrong ------------------------------------------------------------------------------------------

    def _check(self, ends: bool | None = True) -> None:
        """Raises what kernels have found so far; the host waits for nothing.

        A mistake that an operation finds at its start ``ends`` the use of the buffer: when ranks find it depends on
        their speed, so that others may be in the operation that this one refuses. They are told, and find it too. So
        does one that was found behind such an operation (None, when all are complete: it depends on that).
        """
        if self._failure is None and self._c is not None:  # destroyed, it has raised what there was
            late = self._c.late()
            mistake, epoch = self._take_mistake()  # after `late`: of two reports it came first, and led to the other
            if mistake is not None and ends is None:
                ends = epoch != self._epoch()
            if mistake is not None and late is None and not ends:
                raise ValueError(mistake)
            if mistake is not None:
                text = f"{mistake}. Found when other operations had begun, which leaves ranks out of step; "
                self._give_up(partial(ValueError, text + "destroy() this buffer"))
            elif late is not None:
                self._failure = self._timeout(*late)
        if self._failure is not None:
            raise self._failure()

    def _give_up(self, failure: Callable[[], Exception]) -> None:
        """The end of this buffer's use; the peers need not wait for this rank."""
        self._failure = failure
        num_ranks, rank = self._topology.num_ranks, self._topology.rank
        try:
            with torch.cuda.stream(self._to_peers):
                for peer in range(num_ranks):
                    gave_up = self._symmetric.get_buffer(peer, (num_ranks,), torch.int64)  # first in csrc's Region
                    gave_up[rank : rank + 1].copy_(self._one, non_blocking=True)  # no kernel, which might have to wait
        except RuntimeError:  # the device is lost: the peers wait for as long as they may
            pass

    def _timeout(self, operation, phase, epoch, waited_for, waited_s) -> Callable[[], Exception]:
        """The error of a kernel that has given up; it has told the peers itself."""
        late_ranks = find_late_ranks(self._config.store, self._topology.rank, waited_for)
        where = (_OPERATIONS[operation], epoch, _PHASES[phase], self._topology.rank)
        return partial(PeerTimeoutError, *where, late_ranks=late_ranks, waited_s=waited_s)

    def _epoch(self) -> int:
        """Of the last complete operation."""
        return self._state[:8].view(torch.int64).item()  # first in csrc's State

    def _take_mistake(self) -> tuple[str | None, int]:
        """What the caller did wrong in which epoch, as far as kernels have found it; each is found once."""
        found = self._c.take_mistake()
        if found is None:
            return None, 0
        kind, epoch, details, values = found
        return self._explain(kind, details, values), epoch

    def _explain(self, kind: int, details: list[int], values: list[int]) -> str:
        if kind == _BAD_ENTRY:
            token, k, repeated = details
            return checks.bad_entry((token, k, values[0], bool(repeated)), self._config.num_experts)
        needs = list(enumerate(zip(values[::2], values[1::2])))
        if kind == _TOO_FEW_ROWS:
            short = [f"rank {r} needs {needed} rows, given {given}" for r, (needed, given) in needs if needed > given]
            return "max_recv_rows: too small: " + "; ".join(short)
        if kind == _TOO_MANY_ROWS:
            rank, (needed, _) = max(needs, key=lambda need: need[1][0])
            return (
                f"expert_alignment: given {details[0]}, with which rank {rank} receives {needed} rows; allowed: up to "
                f"{checks.MAX_INT} rows of a rank in one dispatch"
            )
        field, rank, theirs = details
        name, say = _AGREED[field]
        return f"{name}: rank {rank} gave {say(theirs)}, rank 0 gave {say(values[0])}; all ranks must give the same"
