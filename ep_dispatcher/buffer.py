"""Buffer: the memory, the connections and the operations of one expert-parallel group."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ep_dispatcher import checks, engines, recompute
from ep_dispatcher.addressable import check_writable
from ep_dispatcher.argument_types import EngineName, Layout, Quantize, ScaleFormat, TrainingLayout
from ep_dispatcher.arguments import BufferDispatchOptions, combine_request, dispatch_request, plan_request
from ep_dispatcher.balance.balancer import Balancer
from ep_dispatcher.buffer_arguments import BufferArguments, agree_on_config, checked_group
from ep_dispatcher.engines.base import Engine
from ep_dispatcher.gather import Gather, History
from ep_dispatcher.handle import CombineOutput, DispatchOutput, Handle
from ep_dispatcher.outputs import combine_output, dispatch_output, new_handle
from ep_dispatcher.sizes import BufferSizes
from ep_dispatcher.statistics import Stats, Totals
from ep_dispatcher.wording import Wording

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NO_ASYNC = nullcontext()  # around an operation that is not asynchronous

if not dist.is_initialized():
    # torch._dynamo imports this module, and default arguments in it hold the default group of that moment. So import it
    # while there is none. A group that is held keeps its threads after destroy_process_group, and they can abort the
    # process when it ends.
    import_module("torch.distributed.nn.functional")

_buffers: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()


def find_buffer(buffer_id: str) -> Buffer:
    """Return the buffer of a traced operator, which has only its id. ValueError when it is gone."""
    buffer = _buffers.get(buffer_id)
    if buffer is None:
        raise ValueError(
            f"buffer (id {buffer_id}) is gone or was destroyed: what torch.compile has compiled does not keep its "
            "buffer alive, so keep a reference to it, and destroy() it after the last backward"
        )
    return buffer


def planned_buffer() -> Buffer | None:
    """Return the buffer that the next dispatch has to use if it belongs to a recompute, otherwise None."""
    buffer_id = recompute.planned_buffer_id()
    return None if buffer_id is None else find_buffer(buffer_id)


@atexit.register
def _end_operations() -> None:
    """Make daemon threads leave their operations: Python would end them inside, which aborts the process."""
    with ExitStack() as stack:  # all buffers are destroyed, even if one of them raises an error
        for buffer in list(_buffers.values()):
            if not buffer.is_destroyed and buffer.live_engine().health.is_busy:
                stack.callback(buffer.destroy)


class Buffer(BufferSizes):
    """Bring tokens to the ranks of their experts, and the results back.

        with ep.Buffer(group, hidden=7168, num_experts=256, num_topk=8, max_tokens_per_rank=4096) as buffer:
            out = buffer.dispatch(x, topk_idx, topk_weights)      # out.x: one row per (token, local expert)
            y = experts(out.x, out.rows_per_expert) * out.topk_weights[:, None]
            res = buffer.combine(y, out.handle)                   # res.x: one row per token again

    All ranks of the group make the buffer together, destroy it together, and call every operation in the same order.
    ``ep.dispatch`` and ``ep.combine`` are the same operations with gradients.

    group                torch.distributed process group, or a DeviceMesh of one dimension (``mesh["ep"]``); None: the
                         default group. Each rank owns ``num_experts / num_ranks`` consecutive experts
    hidden               elements of a row; a row must be a multiple of 16 bytes
    num_experts          on all ranks together
    num_topk             columns of topk_idx, at most 64
    max_tokens_per_rank  the most tokens of a rank in one dispatch
    dtype                torch.bfloat16, torch.float16 or torch.float32
    engine               "cpu", "cuda" or "auto". The default "auto" reads EP_DISPATCHER_ENGINE; if that is unset, it
                         takes "cuda" if there is a usable GPU
    ranks_per_node       None: the ranks that NVLink joins form a node, those of one host (with the CUDA engine also of
                         several), unless EP_DISPATCHER_RANKS_PER_NODE is set. An int: that many consecutive ranks form
                         a node, also several nodes on one host (virtual nodes). "nvlink": like None, but an error where
                         ranks of several hosts cannot use the NVLink between them, not nodes of one host
    timeout_s            limit in seconds for every operation (CUDA engine: for each wait in it) and for each step of
                         making the buffer. None: EP_DISPATCHER_TIMEOUT_S, by default 100. Ranks may give different
                         limits: the shortest ends the wait on all of them
    num_sms              the most multiprocessors the CUDA engine uses at a time. None: 24, with layout="decode" 64;
                         fewer if two such buffers of all ranks would not fit on a GPU together. The CPU engine ignores
                         it
    nccl_sms             the most multiprocessors that NCCL uses in addition to num_sms, with the NCCL wire between
                         nodes. None: 4. The same on all ranks
    suspendable          True: suspend() and resume() can be called. The same on all ranks. The CUDA engine then takes
                         its memory through NVIDIA's package cuda-bindings instead of PyTorch's symmetric memory. Not
                         possible with the NVSHMEM wire between hosts
    mask_late_ranks      True: a rank that does not arrive within timeout_s is masked (see ``mask``), and the others go
                         on. For layout="decode" on one node of at most 32 ranks. The same on all ranks
    redundant_experts_per_rank  slots of each rank, at most 8, for redundant copies of experts of other ranks of its
                         node. ep.moe_mlp and ep.MoELayer then balance every microbatch (docs/balance.md); other
                         dispatches on this buffer are refused. The same on all ranks
    max_tokens_to_node   the most tokens of a rank that have an expert on any one other node, in dispatches with
                         max_recv_rows. Where no host waits for counts, messages between nodes have this size; None:
                         that of max_tokens_per_rank. The same on all ranks, and it can be set later (below)

    The sizes are read-only properties too, such as ``buffer.hidden``. ``buffer.max_recv_rows()`` is the safe limit of
    that name for a dispatch.

    Set ``note`` to what the caller is doing ("layer 3"). A PeerTimeoutError begins with it, and so does a ValueError
    about arguments that differ between ranks.

    Copying returns the same buffer: a ``copy.deepcopy`` of a module shares it, and destroy() ends it for both. A buffer
    cannot be pickled.

    Raises ValueError on every rank if an argument is not allowed or differs between ranks, PeerTimeoutError if a rank
    does not arrive, and RuntimeError on every rank if one rank fails.
    """

    backward_note: str = ""  # `note` for the backwards of the operations that are called from now on
    _label: int = 0
    caller_keeps_plans = False  # whether the caller saves plans for recomputes, as Megatron's dispatcher does
    caller_uses_anchors = False  # whether gradients of float8 rows come through their anchors alone, likewise

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None = None,
        *,
        hidden: int,
        num_experts: int,
        num_topk: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        engine: EngineName | Literal["auto"] = "auto",
        ranks_per_node: int | Literal["nvlink"] | None = None,
        timeout_s: float | None = None,
        num_sms: int | None = None,
        nccl_sms: int | None = None,
        suspendable: bool = False,
        mask_late_ranks: bool = False,
        redundant_experts_per_rank: int = 0,
        max_tokens_to_node: int | None = None,
    ):
        self._engine: Engine | None = None
        self._balancer: Balancer | None = None
        self._wait_ns: dict[str, Tensor | None] = {}
        self.totals: Totals | None = None  # from the first stats() on
        self.wording = self.make_wording()
        self._mesh = group if isinstance(group, DeviceMesh) else None
        group = checked_group(group)

        arguments = BufferArguments(
            hidden=hidden,
            num_experts=num_experts,
            num_topk=num_topk,
            max_tokens_per_rank=max_tokens_per_rank,
            dtype=dtype,
            engine=engine,
            ranks_per_node=ranks_per_node,
            timeout_s=timeout_s,
            num_sms=num_sms,
            nccl_sms=nccl_sms,
            suspendable=suspendable,
            mask_late_ranks=mask_late_ranks,
            redundant_experts_per_rank=redundant_experts_per_rank,
            max_tokens_to_node=max_tokens_to_node,
        )
        try:
            with Gather(group, arguments.limit_s) as gather:
                self._engine_name, self.config = agree_on_config(gather, group, arguments, self.wording)
                self.id: str = self.config.buffer_id
                self._suspend_history = History(f"ep_dispatcher/change/{self.id}", is_in_step=True)
                self._unmask_history = History(f"ep_dispatcher/unmask/{self.id}")
                self._engine = engines.make(self._engine_name, self.config)
                kind = self._engine.device
                self._device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
            _buffers[self.id] = self
            self.max_tokens_to_node = max_tokens_to_node
        except BaseException:  # it is raised again
            engine_or_none, self._engine = self._engine, None
            if engine_or_none is not None:  # after the last step: the others have the buffer, and learn that we left
                engine_or_none.destroy()
            raise

    @property
    def note(self) -> str:
        """What the caller is doing, in the caller's own words."""
        return self.wording.note

    @note.setter
    def note(self, note: str) -> None:
        self.wording.note = note

    @property
    def label(self) -> int:
        """A number of the caller, such as that of a layer. The error of a dispatch with too few rows contains it."""
        return self._label

    @label.setter
    def label(self, label: int | None) -> None:
        self._label = label or 0

    @property
    def max_tokens_to_node(self) -> int | None:
        """The most tokens of a rank for any one other node; None: max_tokens_per_rank.

            buffer.max_tokens_to_node = math.ceil(1.2 * mean_tokens_of_a_rank_for_a_node)
            out = buffer.dispatch(x, topk_idx, max_recv_rows=rows)    # and what is done with out.handle

        It is for dispatches with max_recv_rows on any rank, whose messages cannot be exact, as their hosts do not know
        the counts. A new value is for later dispatches without a handle, so a captured graph keeps its own. All ranks
        set the same value between the same two operations. If a rank has more tokens for a node, every rank raises an
        ep.TooFewRowsError with the number that is enough, as for max_recv_rows. A limit of max_tokens_per_rank or more
        is no limit. Decode layout has none, nor has a dispatch in which every host waits for the counts: its messages
        are exact. A recompute without ``recompute_contexts`` plans again, with the limit of that moment.
        """
        return self._max_tokens_to_node

    @max_tokens_to_node.setter
    def max_tokens_to_node(self, most: int | None) -> None:
        engine, config = self.live_engine(), self.config
        most = checks.tokens_to_node(most)
        has_limit = most is not None and most < config.max_tokens_per_rank and config.num_nodes > 1
        engine.limit_tokens_to_node(most if most is not None and has_limit else 0)
        self._max_tokens_to_node = most

    @property
    def is_destroyed(self) -> bool:
        """Whether destroy() was called."""
        return self._engine is None

    @property
    def is_suspended(self) -> bool:
        """Whether the buffer is suspended: suspend() was called, and resume() was not called since."""
        return self._engine is not None and self._engine.health.suspended

    # The overloads give the types of the results, as for ep.dispatch.
    @overload
    def dispatch(  # type: ignore[overload-overlap]  # the first that fits counts
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: None = None,
        *,
        quantize: None = None,
        **options: Unpack[BufferDispatchOptions],
    ) -> DispatchOutput[Tensor, None]: ...

    @overload
    def dispatch(  # type: ignore[overload-overlap]  # the first that fits counts
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor = ...,
        *,
        quantize: None = None,
        **options: Unpack[BufferDispatchOptions],
    ) -> DispatchOutput[Tensor, Tensor]: ...

    @overload
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: None = None,
        *,
        quantize: Quantize | None = None,
        **options: Unpack[BufferDispatchOptions],
    ) -> DispatchOutput[tuple[Tensor, Tensor], None]: ...

    @overload
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor = ...,
        *,
        quantize: Quantize | None = None,
        **options: Unpack[BufferDispatchOptions],
    ) -> DispatchOutput[tuple[Tensor, Tensor], Tensor]: ...

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        layout: Layout = "expert",
        expert_alignment: int = 1,
        quantize: Quantize | None = None,
        handle: Handle | None = None,
        max_recv_rows: int | None = None,
        async_finish: bool = False,
        scale_format: ScaleFormat = "float32",
        return_hook: bool = False,
    ) -> DispatchOutput:
        """Bring every token to the ranks of its experts, without gradients (``ep.dispatch`` has them).

            expert layout:  out.x[row of (token, expert)] = x[token]  for every expert of the token that lives here
            rank layout:    out.x[row of token] = x[token]            for every token that has an expert here
            decode layout:  out.x[expert, i] = x[the expert's i-th token]  for i < out.tokens_per_expert[expert]

        x             [num_tokens, hidden] of the buffer's dtype, or a pair (float8_e4m3fn [num_tokens, hidden], scales)
                      if hidden is a multiple of 16. out.x has the same form. Scales are float32 [num_tokens,
                      ceil(hidden / 128)], or for MXFP8 float8_e8m0fnu or uint8 [num_tokens, 4 * ceil(hidden / 128)].
                      torch.autocast of the buffer's dtype casts rows, here and in a combine
        topk_idx      int32 or int64 [num_tokens, num_topk]: the experts of each token, -1 for none. No expert may
                      appear twice for a token
        topk_weights  float32 [num_tokens, num_topk], or None on every rank
        layout        "expert": rows are grouped by local expert in ascending order, and ordered by (source rank, source
                      token) inside a group. Zero rows pad every group to a multiple of expert_alignment.
                      "rank": rows are ordered by (source rank, source token). There is no padding;
                      expert_alignment only rounds rows_per_expert up.
                      "decode": every local expert has room for all tokens of all ranks. So shapes do not depend on
                      counts, as masked grouped GEMMs require. Rows are ordered as in expert layout. Do not give
                      topk_weights, max_recv_rows or expert_alignment. There are no gradients
        quantize      "e4m3_1x128", "e4m3_1x128_pow2" or "mxfp8": bfloat16 rows travel and arrive as the float8 pairs
                      of ep.quantize(x, quantize)
        handle        the handle of an earlier dispatch on this buffer, whose routing is used again. topk_idx must then
                      be None, and all ranks must pass the handle of the same dispatch
        max_recv_rows the exact number of rows of the output; zero rows fill its end. If a rank needs more, every rank
                      raises a ValueError with the rows each rank needs. With the CUDA engine the host does not wait
                      in this case. So this error and others are raised later, by the first of these: check() or
                      out.event.synchronize() (the buffer stays usable if all ranks call it there), the next operation
                      or destroy() (the buffer has ended). Discard the outputs
        scale_format  decode layout with quantize: "float32", or "ue8m0" for scales that are powers of two, four
                      exponents in an int32; hidden must then be a multiple of 512. With MXFP8 it must be "ue8m0", for
                      every hidden
        return_hook   decode layout: the call sends, once all ranks have called it; out.hook() waits and places rows,
                      in the stream that is current then. No multiprocessor is in use between the two. The arguments
                      may be overwritten once the call's work in its stream is done. Call the hook before any other
                      operation of this buffer, and in the CUDA graph of the call; another buffer may be used meanwhile.
                      Until the hook is called out.event covers the call alone. The CPU engine does both in the call.
                      Not possible with async_finish
        async_finish  return before the operation is complete; wait with out.event. With the CUDA engine the operation
                      then runs in a stream of the buffer instead of the current stream. The CPU engine ignores it

        num_tokens may differ between ranks and may be 0. ``help(ep.DispatchOutput)`` has the shapes of the results.
        Raises ValueError before anything is sent if an argument is not allowed, and PeerTimeoutError if a peer does
        not arrive in time.
        """
        engine = self.live_engine()
        with self._async_scope(async_finish, x, topk_idx, topk_weights, getattr(handle, "plan", None)):
            request = dispatch_request(
                engine,
                x,
                topk_idx,
                topk_weights,
                layout=layout,
                expert_alignment=expert_alignment,
                quantize=quantize,
                handle=handle,
                max_recv_rows=max_recv_rows,
                scale_format=scale_format,
                return_hook=return_hook,
                async_finish=async_finish,
                label=self.label,
            )
            return dispatch_output(engine, request, engine.dispatch(request), handle)

    def plan(
        self,
        topk_idx: Tensor,
        *,
        layout: TrainingLayout = "expert",
        expert_alignment: int = 1,
        max_recv_rows: int | None = None,
        async_finish: bool = False,
    ) -> Handle:
        """Make the plan of a routing before its rows are ready. Return its handle.

            handle = buffer.plan(topk_idx)
            out = buffer.dispatch(x, topk_weights=topk_weights, handle=handle)      # as fast as with any handle
            out = ep.dispatch(buffer, x, topk_weights=topk_weights, handle=handle)  # the same, with gradients

        Without max_recv_rows the host waits here for the counts, and the dispatch does not wait again. Then
        ``handle.rows_on_host`` has the counts per expert.

        topk_idx is int32 or int64 [num_tokens, num_topk]. All arguments are as in dispatch; decode layout is not
        allowed. This is a collective operation, with the errors of a dispatch. It moves 16 bytes for each row, which
        ``counters()`` includes.
        """
        engine = self.live_engine()
        with self._async_scope(async_finish, topk_idx):
            request = plan_request(
                engine,
                topk_idx,
                layout=layout,
                expert_alignment=expert_alignment,
                max_recv_rows=max_recv_rows,
                label=self.label,
            )
            handles: list[Handle] = []  # of this plan; a recompute finds the one of its forward pass here
            if not self.caller_keeps_plans:
                handles = recompute.handles_for(engine, request)
            if not handles:
                handles.append(new_handle(engine, request, engine.dispatch(request)))
            return handles[0]

    @overload
    def combine(
        self,
        y: Tensor,
        handle: Handle,
        *,
        topk_weights: None = None,
        async_finish: bool = False,
        weights: Tensor | None = None,
        out: Tensor | None = None,
        return_hook: bool = False,
    ) -> CombineOutput[None]: ...

    @overload
    def combine(
        self,
        y: Tensor,
        handle: Handle,
        *,
        topk_weights: Tensor,
        async_finish: bool = False,
        weights: Tensor | None = None,
        out: Tensor | None = None,
        return_hook: bool = False,
    ) -> CombineOutput[Tensor]: ...

    def combine(
        self,
        y: Tensor,
        handle: Handle,
        *,
        topk_weights: Tensor | None = None,
        async_finish: bool = False,
        weights: Tensor | None = None,
        out: Tensor | None = None,
        return_hook: bool = False,
    ) -> CombineOutput:
        """Sum every token's rows on the token's own rank, without gradients (``ep.combine`` has them).

            res.x[token] = sum of y[row] over the token's rows on all ranks
            res.topk_weights[token, k] = topk_weights[row of (token, k)]
            decode layout: res.x[token] = sum of weights[token, k] * y[row of (token, k)]

        y             [rows, hidden] of the buffer's dtype, in the order of dispatch's rows. Padding is not read. In
                      rank layout each row is the caller's sum over the token's local experts. In decode layout y has
                      the shape of out.x, [num_local_experts, num_ranks * max_tokens_per_rank, hidden]. Contiguous
                      memory that begins at a multiple of 16 bytes is sent without a copy
        handle        the handle of the dispatch, which must be the same dispatch on all ranks. The CUDA engine reports
                      a difference late, like the errors of max_recv_rows
        topk_weights  float32, in the shape that dispatch returned, or None on every rank. They travel back to their
                      tokens, as a backward needs it. Decode layout has none
        weights       decode layout, required there: float32 [num_tokens, num_topk] of this rank's tokens. It is not
                      read where topk_idx is -1
        out           decode layout: [num_tokens, hidden] of the buffer's dtype; it becomes res.x. The sums are written
                      there directly. If it is strided or part of y's memory, they are copied there
        return_hook   decode layout: as in dispatch
        async_finish  as in dispatch

        Only decode layout multiplies by weights. Sums are in float32, in the order of ``ep_dispatcher.reference``.
        Raises ValueError and PeerTimeoutError as dispatch does.
        """
        engine = self.live_engine()
        with self._async_scope(async_finish, y, topk_weights, weights, out, getattr(handle, "plan", None)):
            request = combine_request(
                engine,
                y,
                handle,
                topk_weights,
                weights=weights,
                out=out,
                return_hook=return_hook,
                async_finish=async_finish,
            )
            return combine_output(engine, request, engine.combine(request), out)

    @property
    def dispatch_wait_ns(self) -> Tensor | None:
        """Nanoseconds that dispatches have waited for each rank: int64 [num_ranks] on the engine's device, or None.

        With redundant experts also those that gathers of counts and barriers have waited.

            buffer.dispatch_wait_ns = torch.zeros(num_ranks, dtype=torch.int64, device="cuda")
            buffer.combine_wait_ns = torch.zeros(num_ranks, dtype=torch.int64, device="cuda")
            ...                                     # from now on every operation adds to them, also in backwards
            buffer.dispatch_wait_ns.argmax()        # the rank that this rank has waited for longest

        The tensor stays the caller's: read it, or set it to zero. The default None measures nothing. Keep the tensor
        while operations that were launched with it may run. A CUDA graph adds to the tensor of its capture.

        Entry r grows by the time from the start of a wait until rank r has done what this rank waits for. The entry of
        this rank does not change. A rank that arrives first sees large entries, a late one small entries. Times of one
        operation overlap, because it waits for several ranks at once.

        CPU engine: all waits, by CLOCK_MONOTONIC. In a combine between nodes the wait for a rail peer's sums counts for
        that peer, even if it waits for another rank itself. CUDA engine: the waits of one warp, by globaltimer, whose
        steps are up to 1 us. Waits for ranks to begin the operation count in full, those for rows and sums only as far
        as this warp moves them. The host does not wait.

        Setting it raises ValueError for another dtype, shape or device, and for a tensor that is not contiguous.
        """
        return self._wait_ns.get("dispatch")

    @dispatch_wait_ns.setter
    def dispatch_wait_ns(self, wait_ns: Tensor | None) -> None:
        self._measure_waits("dispatch", wait_ns)

    @property
    def combine_wait_ns(self) -> Tensor | None:
        """Nanoseconds that combines have waited for each rank, as ``dispatch_wait_ns``.

        CUDA engine, decode layout on one node, at most 64 tokens of all ranks: only waits for ranks to begin count.
        """
        return self._wait_ns.get("combine")

    @combine_wait_ns.setter
    def combine_wait_ns(self, wait_ns: Tensor | None) -> None:
        self._measure_waits("combine", wait_ns)

    def _measure_waits(self, operation: str, wait_ns: Tensor | None) -> None:
        engine, argument = self.live_engine(), f"{operation}_wait_ns"
        if self.totals is not None:
            if wait_ns is None:
                return  # stats() goes on measuring
            checks.refuse(f"{argument} cannot be set after stats(), which returns the same waits")
        if wait_ns is not None:
            checks.tensor(argument, wait_ns, (torch.int64,), (self.topology.num_ranks,), engine.device)
            if not wait_ns.is_contiguous() or wait_ns.is_neg():
                checks.refuse(
                    f"{argument} has to lie in plain memory, but its strides are {wait_ns.stride()}, negated: "
                    f"{wait_ns.is_neg()}"
                )
            check_writable(argument, wait_ns)
        engine.measure_waits(operation, wait_ns)
        self._wait_ns[operation] = wait_ns

    def stats(self) -> Stats | None:
        """Return the tokens of each expert and the waits for each rank since the last result, without a wait.

            for step in range(steps):
                train_step()
                if (stats := buffer.stats()) is not None:       # on GPUs usually about the step before
                    stats.tokens_per_expert.sum()               # tokens that have arrived on this rank

        The first call begins to count, and returns None. Each further call starts a copy of the counts so far to the
        host, and returns the difference between the newest copy that has arrived and the copy of the last result. It
        returns None if there is no new copy. So nothing is lost or counted twice, however far the host is ahead.

        Every dispatch with a topk_idx counts, and every ``plan``. A dispatch with a handle does not count, for example
        in backwards, and in recomputes with ``ep.recompute_contexts``. CUDA graphs count in each replay if they were
        captured after the first call. Every rank may call this or not, between any two operations.

        It costs one small kernel in each dispatch that counts. On GPUs the waits are measured as with
        ``dispatch_wait_ns``, which must be None and can no longer be set. See docs/statistics.md.
        """
        engine, config = self.live_engine(), self.config
        if self.totals is None:
            self.totals = Totals(engine, config.num_local_experts, config.num_ranks, self.device)
            if config.redundant_experts_per_rank:
                self.balancer().totals = self.totals
            return None
        return self.totals.take(engine)

    def check(self) -> None:
        """Wait for the current stream, and raise the errors of this buffer's operations in that stream.

            graph.replay()
            buffer.check()    # a replay alone raises nothing

        Raises PeerTimeoutError if a peer did not arrive, or ValueError for the first wrong argument since the last
        check. Discard the outputs of all operations since then. After a ValueError the buffer stays usable if all ranks
        called check() at the same place.
        """
        with self.wording:
            self.live_engine().check()

    def overlook(self, found: Callable[[ValueError], bool]) -> None:
        """Drop each late ValueError for which ``found`` returns True, so that the buffer stays usable.

        All ranks have to drop the same errors. A dispatch with too few rows has returned zeros on all of them. The CPU
        engine has no late errors.
        """
        self.live_engine().overlook(found)

    def balancer(self) -> Balancer:
        """Return what balances the layers on this buffer. ValueError if it has no redundant experts."""
        engine = self.live_engine()
        if not self.config.redundant_experts_per_rank:
            checks.refuse("buffer has no redundant experts: make it by ep.Buffer(..., redundant_experts_per_rank=1)")
        if self._balancer is None:
            self._balancer = Balancer(engine, self.device)
        return self._balancer

    def counters(self) -> dict[str, list[int]]:
        """Return the bytes that this rank has moved since the buffer was made. Each list has an entry per rank.

        inter_node_bytes_sent       rows, scales, weights and sums sent to that rank on another node
        inter_node_list_bytes_sent  counts and lists sent to that rank
        intra_node_bytes_read       rows, scales and weights read from the memory of that rank on this node
        intra_node_bytes_written    sums and weights written to the memory of that rank on this node

        A rank also counts what it reads from its own memory and writes to it.

        With the CUDA engine the host waits for the device.
        """
        return self.live_engine().counters()

    def suspend(self) -> None:
        """Free memory, but keep everything else: addresses, connections, handles, captured graphs.

            buffer = ep.Buffer(..., suspendable=True)
            buffer.suspend()
            ...                # another phase uses the memory
            buffer.resume()

        Collective: all ranks call it, within the buffer's time limit. It waits for operations that are running. If they
        have late errors, it raises these and does not suspend. When it returns, all ranks have freed the memory of
        ``ep.buffer_bytes(...).region``, except for the flags. While the buffer is suspended, operations raise
        ValueError, and the outputs of a replayed graph are not valid. See docs/memory.md.

        Raises ValueError on every rank if the buffer was made without ``suspendable=True``, is suspended or destroyed.
        Raises PeerTimeoutError if a rank does not arrive: the buffer has ended then.
        """
        self._suspend_or_resume("suspend")

    def resume(self) -> None:
        """Map memory again, at the same addresses. Collective, like suspend().

        Handles and captured graphs are valid again. If a rank gets no memory, every rank raises RuntimeError. Then
        the buffer stays suspended, and all ranks can call resume() again. Other errors are as in suspend(), and it
        raises ValueError if the buffer is not suspended.
        """
        self._suspend_or_resume("resume")

    @property
    def mask(self) -> Tensor:
        """The masked ranks, with ``mask_late_ranks=True``: int32 [num_ranks] on the engine's device, 1 if masked.

            buffer = ep.Buffer(..., mask_late_ranks=True)
            out = buffer.dispatch(x, topk_idx, layout="decode")     # raises nothing if rank 3 does not come
            buffer.mask                                             # tensor([0, 0, 0, 1])

        It is a copy of the state after earlier operations in the current stream. The host does not wait. A masked rank
        is treated as absent:

        - No rank waits for it.
        - A dispatch brings none of its tokens. If it was masked after the dispatch had begun, or after the dispatch of
          a given handle, its tokens count, and their rows are zeros (CPU engine) or undefined (CUDA engine).
        - In a combine the rows of its experts add nothing to the sums.

        Each rank masks on its own, once it has waited for timeout_s. A masked rank that still runs raises
        PeerTimeoutError with ``late_ranks == (itself,)``. See "Masked ranks" in docs/errors.md.
        """
        return self._masking_engine().mask

    def mask_rank(self, rank: int) -> None:
        """Mask a rank explicitly, for later operations in the current stream. All ranks except that one call it.

        Raises ValueError if the rank is not in the group, or is this rank.
        """
        engine, num_ranks = self._masking_engine(), self.topology.num_ranks
        rank = checks.integer("rank", rank, 0, num_ranks - 1)
        if rank == self.topology.rank:
            checks.refuse(f"rank is {rank}, which is this rank: a rank cannot mask itself")
        engine.mask_rank(rank)

    def unmask(self) -> None:
        """Unmask all ranks. Collective: all ranks of the group call it, the masked ones too.

        It waits for all ranks and for their running operations. An operation that waits for its hook is dropped.
        Handles and captured graphs are valid again. If a rank does not arrive within timeout_s, PeerTimeoutError names
        it, the masks stay, and operations go on with them. If a rank is gone for good, no rank can be unmasked: make a
        new buffer on a smaller group. If a rank fails after all have arrived, the buffer ends on all ranks, with a
        RuntimeError.
        """
        engine = self._masking_engine()
        self._unmask_history.attempts = 0  # do not count calls that only some ranks made
        with self.wording:
            engine.unmask(self._meeting(engine, "unmask", self._unmask_history))

    def _masking_engine(self) -> Engine:
        engine = self.live_engine()
        if not self.config.mask_late_ranks:
            checks.refuse("buffer has no masks: make it by ep.Buffer(..., mask_late_ranks=True)")
        return engine

    def _meeting(self, engine: Engine, operation: str, history: History) -> Callable[[], Gather]:
        """Return a function that opens an exchange between the ranks of this buffer."""
        members, limit_s, health = self.config.members, self.config.timeout_s, engine.health
        return partial(
            Gather,
            members,
            limit_s,
            operation=operation,
            history=history,
            is_stopped=lambda: health.is_stopped,
        )

    def _suspend_or_resume(self, operation: Literal["suspend", "resume"]) -> None:
        engine, config = self.live_engine(), self.config
        if not config.suspendable:
            checks.refuse("buffer cannot be suspended: make it by ep.Buffer(..., suspendable=True)")
        engine.refuse_if_pending(operation)
        if not dist.is_initialized():
            checks.refuse(
                f"the process group of this buffer is gone: call {operation}() before destroy_process_group()"
            )
        meet = self._meeting(engine, operation, self._suspend_history)
        with self.wording:
            if operation == "suspend":
                engine.suspend(meet)
            else:
                engine.resume(meet)

    def destroy(self) -> None:
        """Free memory and connections. All ranks call it; it does not wait for peers. A second call does nothing.

        Any thread may call it, such as a watchdog. On the CUDA engine a thread other than the one that made the buffer
        aborts operations that are running, healthy ones too. If a thread is inside an operation, that thread soon
        raises RuntimeError, and this call waits for it, for at most timeout_s and 10 s more.

        Raises the errors that operations have found since the last check, errors while freeing, such as a lost GPU, and
        RuntimeError if the thread inside does not leave its operation. That thread then frees when it leaves.
        """
        if self._engine is not None:
            engine, self._engine = self._engine, None
            balancer, self._balancer = self._balancer, None
            try:
                _buffers.pop(self.id, None)
                with self.wording:
                    engine.destroy()
            except BaseException as error:
                # The other ranks must learn at once that this one left, wherever an interrupt arrived.
                if engine.health.waits_to_be_freed or not isinstance(error, Exception):
                    with suppress(Exception):  # the first error is the one to raise
                        engine.destroy()
                raise
            finally:
                if balancer is not None:
                    balancer.free()

    def __repr__(self) -> str:
        if self._engine is None:
            return self.config.describe("destroyed")
        state = self._engine.summary
        if self.is_suspended:
            state += ", suspended"
        return self.config.describe(state)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Buffer:
        """Return this buffer itself: a deep copy of a module gets its own weights and shares the buffer."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Buffer is a connection between running ranks, not data, and cannot be pickled: save the module's "
            "state_dict(), or leave the buffer out in the module's __getstate__ and give the loaded module another one"
        )

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.destroy()
        except (ValueError, RuntimeError):  # a late error of an operation must not hide the first error
            if error is None:
                raise

    def _async_scope(self, async_finish: bool, *inputs: object) -> AbstractContextManager[None]:
        return self.live_engine().asynchronous(*inputs) if async_finish else _NO_ASYNC

    def live_engine(self) -> Engine:
        """Return the engine. Raise ValueError after destroy()."""
        if self._engine is None:
            checks.refuse("buffer was destroyed")
        return self._engine

    def make_wording(self) -> Wording:
        """Return what words this buffer's errors. Subclasses use their own terms."""
        return Wording()
