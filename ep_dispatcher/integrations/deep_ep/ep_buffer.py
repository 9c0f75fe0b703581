"""``deep_ep.EPBuffer``, the interface of DeepEP 2.5, on ep_dispatcher, and the classes of 2.5 that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ep_dispatcher import checks
from ep_dispatcher.balance.slot_layout import PULL_BLOCKS
from ep_dispatcher.integrations.deep_ep.config import warn_ignored, warn_once
from ep_dispatcher.integrations.deep_ep.elastic_base import WIRE, ElasticBase, Previous, Received, unsupported
from ep_dispatcher.integrations.deep_ep.elastic_handle import EPHandle
from ep_dispatcher.integrations.deep_ep.events import EventOverlap, in_current_stream, outside_graphs
from ep_dispatcher.integrations.deep_ep.redundant_experts import (
    ALLOCATION_ALIGNMENT,
    BufferAllocator,
    Exchange,
    RedundantExperts,
)


class CompiledObject:
    """An object of DeepEP's compiled module, with what programs use of it. All else raises NotImplementedError."""

    name: str  # of the buffer's attribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python and tools look for such names
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NotImplementedError(
            f"{self.name}.{name}: of DeepEP's compiled {self.name}; use the methods of deep_ep.EPBuffer"
        )


class Context(CompiledObject):
    """``buffer.context``: the sizes of the buffer's domains."""

    name = "context"

    def __init__(self, physical: tuple[int, int], logical: tuple[int, int]):
        self._physical, self._logical = physical, logical

    def get_physical_domain_size(self) -> tuple[int, int]:
        return self._physical

    def get_logical_domain_size(self) -> tuple[int, int]:
        return self._logical


class Runtime(CompiledObject):
    """``buffer.runtime``: its context, and the memory for redundant experts."""

    name = "runtime"

    def __init__(self, context: Context, lb_storage: Tensor | None):
        self.context, self.lb_storage = context, lb_storage


@outside_graphs
class EPBuffer(ElasticBase):
    """Dispatch and combine with DeepEP 2.5's names, arguments and results. ElasticBuffer has those of DeepEP 2.

        recv_x, recv_topk_idx, recv_topk_weights, handle, event = buffer.dispatch(x, topk_idx, ..., num_experts=...)
        combined_x, combined_topk_weights, event = buffer.combine(y, handle)

    Making one is collective. The first operation makes the memory, which all buffers of a group share (buffer_pool.py).

    lb_allocation_plan_or_num_bytes  memory for redundant experts: a BufferAllocator, whose tensors get their memory
                             here, or bytes, a multiple of 2 MiB. The same on all ranks
    sl_idx                   other than None: a hint without effect, and a line says so once
    context                  tells the sizes of the domains; None after destroy()
    runtime                  its lb_storage is the memory for redundant experts, uint8 [num_lb_bytes], or None;
                             None after destroy()

    All other arguments are those of ElasticBuffer.
    """

    deep_ep_class = "EPBuffer"

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: BufferAllocator | int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):
        num_lb_bytes = _num_lb_bytes(lb_allocation_plan_or_num_bytes)
        super().__init__(
            group,
            num_bytes=num_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            deterministic=deterministic,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
            num_allocated_qps=num_allocated_qps,
            num_cpu_timeout_secs=num_cpu_timeout_secs,
            num_gpu_timeout_secs=num_gpu_timeout_secs,
            explicitly_destroy=explicitly_destroy,
            num_lb_bytes=num_lb_bytes,
        )
        self.num_lb_bytes = num_lb_bytes
        self._redundant: RedundantExperts | None = None
        if num_lb_bytes:
            self._redundant = self._make_redundant_experts(lb_allocation_plan_or_num_bytes)
        self.context: Context | None = Context(self.get_physical_domain_size(), self.get_logical_domain_size())
        storage = None if self._redundant is None else self._redundant.storage
        self.runtime: Runtime | None = Runtime(self.context, storage)
        if sl_idx is not None:
            warn_ignored("sl_idx", WIRE)

    @property
    def main_context(self) -> Context | None:
        """Return ``context``: a buffer has one."""
        return self.context

    def destroy(self) -> None:
        """Free the memory with the last buffer of the group, if all were made with explicitly_destroy. Collective."""
        super().destroy()
        self.context = self.runtime = None
        if self._redundant is not None:
            self._redundant.free()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Return the engine's default, 24, for any sizes."""
        return self._num_sms(num_scaleout_topk, (rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs), (0, 0, 0, 0))

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """Let the current stream wait until all ranks have come here: a dispatch of no tokens.

        wait_comm_stream  earlier work in get_comm_stream() comes first
        with_cpu_sync     the host waits for the device before and after
        sequential        changes nothing that a program could see
        context_idx       None or 0: a buffer has one context
        """
        if context_idx not in (None, 0):
            raise ValueError(f"context_idx is {context_idx}, but an EPBuffer has one context: None or 0")
        self._barrier(wait_comm_stream, with_cpu_sync)

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Previous = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Bring tokens to the ranks of their experts. Return recv_x, recv_topk_idx, recv_topk_weights, handle, event.

        do_handle_copy  False: a handle keeps the caller's topk_idx, which must stay as it is while the handle is used
        defer_epilogue  return the event alone. ``event.current_stream_wait()`` then returns recv_x, recv_topk_idx,
                        recv_topk_weights, handle. Needs async_with_compute_stream. The whole operation is launched
                        here; if the host has to wait for counts (do_cpu_sync), it waits here and not there

        The other arguments and the results are those of ElasticBuffer.dispatch, and so are the errors.
        """
        if do_handle_copy:
            raise ValueError(
                "do_handle_copy is True, but DeepEP 2.5 and this engine take False only: give topk_idx.clone()"
            )
        self._check_deferred(defer_epilogue, async_with_compute_stream)
        received, event = self._dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
            num_experts=num_experts,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            expert_alignment=expert_alignment,
            num_sms=num_sms,
            num_qps=num_qps,
            previous_event=previous_event,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
            handle=handle,
            copies_topk_idx=False,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
            do_zero_padding=do_zero_padding,
            use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        )
        if not defer_epilogue:
            return *received, event
        if handle is None and do_cpu_sync is not False:
            warn_once(
                "defer_epilogue: the host waits for the counts in dispatch, not in the event's wait; with "
                "do_cpu_sync=False it does not wait at all"
            )

        def hand_out() -> Received:
            in_current_stream(received)
            return received

        event.register_hook_after_wait(hand_out)
        return event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Previous = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Sum every token's rows on its source rank, without weights. Return combined_x, combined_topk_weights, event.

        defer_epilogue  return the event alone. ``event.current_stream_wait()`` then adds the biases, which may be
                        written until then, and returns combined_x, combined_topk_weights. Needs
                        async_with_compute_stream. All communication is launched here

        The other arguments and the results are those of ElasticBuffer.combine.
        """
        self._check_deferred(defer_epilogue, async_with_compute_stream)
        combined, event = self._combine(
            x,
            handle=handle,
            topk_weights=topk_weights,
            bias=bias,
            num_sms=num_sms,
            num_qps=num_qps,
            previous_event=previous_event,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
            defers_bias=defer_epilogue,
        )
        return event if defer_epilogue else (*combined, event)

    @staticmethod
    def _check_deferred(defer_epilogue: bool, async_with_compute_stream: bool) -> None:
        if defer_epilogue and not async_with_compute_stream:
            checks.fail("defer_epilogue", True, "False without async_with_compute_stream")

    def lb_get_theoretical_num_sms(self) -> int:
        """Return the most multiprocessors that lb_prefetch_weights or lb_reduce_grads takes by itself, 32."""
        return PULL_BLOCKS

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Sequence[Tensor] | Tensor,
        expert_weights: Sequence[Tensor] | Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Previous = None,
    ) -> EventOverlap:
        """Copy this rank's experts into slots of other ranks of its node. All ranks of the group call it.

            for rank, slot in the slots of this node's other ranks:
                owner, expert = divmod(redundancy_mapping[rank, slot], num_local_experts)
                if owner is this rank:
                    redundant_expert_weights[slot] on that rank = expert_weights[expert]

        redundant_expert_weights  [num_redundant_experts, ...] in this buffer's memory, as of its plan. Slots without an
                            expert stay as they are. A tensor, or several, for as many of expert_weights
        expert_weights      [num_local_experts, ...] of any dtype and shape, with the same bytes for each expert, a
                            multiple of 16. All are contiguous. num_local_experts is the same on all ranks of a node
        redundancy_mapping  int32 [ranks of a node, num_redundant_experts], the same on all ranks of a node: expert or
                            -1. Ranks count within the node, and experts through its ranks. So expert //
                            num_local_experts is its rank in the node, which must not be that of the slot
        num_sms             blocks of the kernel; 0: 24
        previous_event      start after it, instead of after all work so far in the current stream

        Return an event. After its wait this rank's slots have their weights. The copy begins when all ranks have come
        here in their streams, so uses of the slots before the call are over.

        Raises ValueError for arguments that are not allowed; on a GPU wrong experts in redundancy_mapping come later.
        PeerTimeoutError if a rank does not arrive.
        """
        redundant = self._require_redundant_experts(num_sms)
        exchange = redundant.weights(redundant_expert_weights, expert_weights, redundancy_mapping)
        return self._exchange(exchange, previous_event, lambda copies: redundant.push(exchange, copies, num_sms))

    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor,
        expert_grads: Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Previous = None,
    ) -> EventOverlap:
        """Add the gradients of this rank's experts in other ranks' slots to its own. All ranks of the group call it.

            for rank, slot in the slots of this node's other ranks, in ascending order:
                owner, expert = divmod(redundancy_mapping[rank, slot], num_local_experts)
                if owner is this rank:
                    expert_grads[expert] += redundant_expert_grads[slot] on that rank

        redundant_expert_grads  float32 [num_redundant_experts, n], of the plan. It does not change
        expert_grads        float32 [num_local_experts, n], n a multiple of 4. Both are contiguous
        num_sms             blocks of the kernel; 0: 32

        The other arguments, the event and the errors are those of lb_prefetch_weights. After the event's wait
        expert_grads has the sums, and the slots may be written again.
        """
        redundant = self._require_redundant_experts(num_sms)
        exchange = redundant.gradients(redundant_expert_grads, expert_grads, redundancy_mapping)
        return self._exchange(exchange, previous_event, lambda copies: redundant.pull(exchange, copies, num_sms))

    def _make_redundant_experts(self, plan_or_num_bytes: BufferAllocator | int) -> RedundantExperts:
        plan = plan_or_num_bytes if isinstance(plan_or_num_bytes, BufferAllocator) else None
        buffer = self._barrier_buffer()
        planned = "" if plan is None else plan.describe()
        redundant = self._require_pool().make_redundant_experts(buffer, self.num_lb_bytes, planned)
        if plan is not None:
            plan.materialize(redundant.storage)
        return redundant

    def _require_redundant_experts(self, num_sms: int) -> RedundantExperts:
        self._pool_for(None, self._timeout_s)
        checks.integer("num_sms", num_sms, 0)
        if self._redundant is None:
            checks.refuse(
                "this buffer was made without lb_allocation_plan_or_num_bytes, which lb_prefetch_weights and "
                "lb_reduce_grads need"
            )
        return self._redundant

    def _exchange(self, exchange: Exchange, previous_event: Previous, run: Callable[[Tensor], None]) -> EventOverlap:
        """Run copies between this rank's experts and slots of other ranks, as an asynchronous operation.

        The barrier before it waits for other ranks' uses of their slots, and the one behind it for their copies.
        """
        pool, redundant = self._require_pool(), self._redundant
        assert redundant is not None
        inputs: Iterable[Any] = (exchange.of_experts, exchange.mapping)
        with self._comm.operation(inputs, previous_event, async_finish=True) as operation:
            try:
                copies = redundant.copies(exchange, pool.late)
            except ValueError as error:
                pool.refuse(error)
            self._barrier(waits_for_comm_stream=False, with_cpu_sync=False)
            run(copies)
            self._barrier(waits_for_comm_stream=False, with_cpu_sync=False)
        return operation.event

    print_memory_usage = unsupported(
        "print_memory_usage", "the memory is the engine's, of all buffers of the group; docs/memory.md has its size"
    )


def _unsupported_class(name: str, why: str, *static: str) -> type:
    """Return a class of DeepEP that this engine does not have. Making one, and its static methods, say so."""
    members: dict[str, Any] = {method: staticmethod(unsupported(f"{name}.{method}", why)) for method in static}
    text = f"``deep_ep.{name}``, {why}. Programs find the name; making one raises NotImplementedError."
    return type(name, (), members | {"__init__": unsupported(name, why), "__doc__": text, "__module__": __name__})


_USE_TORCH = "which is not part of this engine; use torch.distributed"
EngramBuffer = _unsupported_class(
    "EngramBuffer",
    "the memory of DeepEP's Engram, which is not part of this engine",
    "get_storage_size_hint",
    "get_theoretical_config",
)
PPBuffer = _unsupported_class("PPBuffer", f"DeepEP's transport between pipeline stages, {_USE_TORCH}")
BucketBuffer = _unsupported_class("BucketBuffer", f"DeepEP's memory for collectives of buckets, {_USE_TORCH}")
BucketSession = _unsupported_class("BucketSession", f"a session of DeepEP's BucketBuffer, {_USE_TORCH}")


def _num_lb_bytes(given: BufferAllocator | int) -> int:
    """Return the bytes that lb_allocation_plan_or_num_bytes asks for."""
    if isinstance(given, BufferAllocator):
        if given.materialized:
            checks.refuse("lb_allocation_plan_or_num_bytes is the plan of another buffer: make a plan for each buffer")
        return given.num_bytes
    num_bytes = checks.integer("lb_allocation_plan_or_num_bytes", given, 0, 1 << 62)
    if num_bytes % ALLOCATION_ALIGNMENT:
        allowed = f"a BufferAllocator, or a multiple of {ALLOCATION_ALIGNMENT} bytes"
        checks.fail("lb_allocation_plan_or_num_bytes", num_bytes, allowed)
    return num_bytes
