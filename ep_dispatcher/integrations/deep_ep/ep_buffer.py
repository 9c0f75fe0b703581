"""``deep_ep.EPBuffer``, the interface of DeepEP 2.5, on ep_dispatcher, and the classes of 2.5 that are not here."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.config import warn_ignored, warn_once
from ep_dispatcher.integrations.deep_ep.elastic_base import WIRE, ElasticBase, Previous, Received, unsupported
from ep_dispatcher.integrations.deep_ep.elastic_handle import EPHandle
from ep_dispatcher.integrations.deep_ep.events import in_current_stream, outside_graphs

_NO_BALANCER = (
    "of DeepEP's load balancer; this engine has no redundant experts. Give each expert one place, and leave "
    "lb_allocation_plan_or_num_bytes at 0"
)


class Context:
    """``buffer.context``: the sizes of the buffer's domains. All else raises NotImplementedError."""

    def __init__(self, physical: tuple[int, int], logical: tuple[int, int]):
        self._physical, self._logical = physical, logical

    def get_physical_domain_size(self) -> tuple[int, int]:
        return self._physical

    def get_logical_domain_size(self) -> tuple[int, int]:
        return self._logical

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python and tools look for such names
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NotImplementedError(f"context.{name}: of DeepEP's compiled context; use the methods of deep_ep.EPBuffer")


@outside_graphs
class EPBuffer(ElasticBase):
    """Dispatch and combine with DeepEP 2.5's names, arguments and results. ElasticBuffer has those of DeepEP 2.

        recv_x, recv_topk_idx, recv_topk_weights, handle, event = buffer.dispatch(x, topk_idx, ..., num_experts=...)
        combined_x, combined_topk_weights, event = buffer.combine(y, handle)

    Making one is collective. The first operation makes the memory, which all buffers of a group share (buffer_pool.py).

    lb_allocation_plan_or_num_bytes  other than 0: NotImplementedError
    sl_idx                   other than None: a hint without effect, and a line says so once
    context                  tells the sizes of the domains; None after destroy()

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
        lb_allocation_plan_or_num_bytes: int = 0,
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
        if lb_allocation_plan_or_num_bytes != 0:
            raise NotImplementedError(f"lb_allocation_plan_or_num_bytes: {_NO_BALANCER}")
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
        )
        self.num_lb_bytes = 0
        self.context: Context | None = Context(self.get_physical_domain_size(), self.get_logical_domain_size())
        if sl_idx is not None:
            warn_ignored("sl_idx", WIRE)

    @property
    def main_context(self) -> Context | None:
        """Return ``context``: a buffer has one."""
        return self.context

    def destroy(self) -> None:
        """Free the memory with the last buffer of the group, if all were made with explicitly_destroy. Collective."""
        super().destroy()
        self.context = None

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

    lb_get_theoretical_num_sms = unsupported("lb_get_theoretical_num_sms", _NO_BALANCER)
    lb_prefetch_weights = unsupported("lb_prefetch_weights", _NO_BALANCER)
    lb_reduce_grads = unsupported("lb_reduce_grads", _NO_BALANCER)
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
BufferAllocator = _unsupported_class(
    "BufferAllocator", "of DeepEP's BucketBuffer and load balancer, which are not part of this engine"
)
