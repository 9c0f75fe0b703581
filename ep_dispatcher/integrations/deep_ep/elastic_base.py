"""What ``deep_ep.ElasticBuffer`` of DeepEP 2 and ``deep_ep.EPBuffer`` of DeepEP 2.5 share: nodes, dispatch, combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.buffer_pool import BufferKey, PoolUser
from ep_dispatcher.integrations.deep_ep.config import warn_ignored
from ep_dispatcher.integrations.deep_ep.domains import find_topology
from ep_dispatcher.integrations.deep_ep.elastic_handle import EPHandle, checked_handle
from ep_dispatcher.integrations.deep_ep.events import EventHandle, EventOverlap, in_current_stream, outside_graphs
from ep_dispatcher.integrations.deep_ep.redundant_experts import ALLOCATION_ALIGNMENT
from ep_dispatcher.integrations.deep_ep.row_conversion import SMALLEST, Rows, add_biases, biases_of
from ep_dispatcher.memory import DEFAULT_SMS

WIRE = "between nodes the engine uses the connections of its own wire"
Previous = EventHandle | EventOverlap | None
# recv_x, recv_topk_idx, recv_topk_weights, handle
Received = tuple[Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, EPHandle]
Combined = tuple[Tensor, Tensor | None]  # combined_x, combined_topk_weights


@outside_graphs
class ElasticBase(PoolUser):
    """The buffer of a group: everything that its operations need, except for their public signatures."""

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh,
        *,
        num_bytes: int | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        use_fp8_dispatch: bool,
        deterministic: bool,
        allow_hybrid_mode: bool,
        allow_multiple_reduction: bool,
        prefer_overlap_with_compute: bool,
        num_allocated_qps: int,
        num_cpu_timeout_secs: int,
        num_gpu_timeout_secs: int,
        explicitly_destroy: bool,
        num_lb_bytes: int = 0,
    ):
        most = checks.integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        checks.seconds("num_gpu_timeout_secs", num_gpu_timeout_secs)
        super().__init__(group, explicitly_destroy)
        self.rank_idx, self.num_ranks, self.num_max_tokens_per_rank = self.group.rank(), self.group.size(), most
        hint = self.get_buffer_size_hint(
            group, most, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode, allow_multiple_reduction
        )
        self.num_bytes = hint if num_bytes is None else num_bytes
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or 1
        self._timeout_s = None if num_gpu_timeout_secs == 100 else num_gpu_timeout_secs
        for argument, given, default, reason in (
            ("prefer_overlap_with_compute", bool(prefer_overlap_with_compute), True, "num_sms of a dispatch has one"),
            ("num_allocated_qps", num_allocated_qps, 0, WIRE),
            ("num_cpu_timeout_secs", num_cpu_timeout_secs, 300, "num_gpu_timeout_secs limits waits of the host too"),
        ):
            if given != default:
                warn_ignored(argument, reason)
        self._topology = find_topology(
            self.group, dict(num_max_tokens_per_rank=most, lb_allocation_plan_or_num_bytes=num_lb_bytes)
        )
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)

    @staticmethod
    def get_buffer_size_hint(
        group: ProcessGroup | DeviceMesh,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return bytes, a multiple of 2 MiB, that grow with tokens, ranks and rows; not the memory of our buffers."""
        sent = hidden + 4 * checks.num_scales(hidden) if use_fp8_dispatch else 2 * hidden
        back = 2 * hidden if allow_multiple_reduction else 4 * hidden
        num_bytes = (1 + allow_hybrid_mode) * group.size() * num_max_tokens_per_rank * (sent + back + 24 * num_topk)
        return -(-num_bytes // ALLOCATION_ALIGNMENT) * ALLOCATION_ALIGNMENT

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of all work so far in the current stream."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the number of nodes, and of ranks of each."""
        return self._topology.num_nodes, self._topology.ranks_per_node

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the same; without allow_hybrid_mode 1 and the number of ranks."""
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return num_allocated_qps: the engine has its own connections."""
        return self.num_allocated_qps

    @staticmethod
    def _num_sms(num_scaleout_topk: int, speeds: tuple[float, ...], default_speeds: tuple[float, ...]) -> int:
        """Return the engine's default number of multiprocessors, and warn about arguments that do not change it."""
        if num_scaleout_topk:
            raise NotImplementedError("num_scaleout_topk has to be 0: it is reserved in DeepEP too")
        if speeds != default_speeds:
            warn_ignored("rdma_gbs, nvlink_gbs, sm_read_gbs and sm_write_gbs", "24 is measured, not modelled")
        return DEFAULT_SMS

    def _barrier_buffer(self) -> ep.Buffer:
        """Return the buffer of barriers. Collective if it must be made."""
        return self._pool_for(None, self._timeout_s).buffer_for(BufferKey(SMALLEST, self.num_ranks, 1), 1)

    def _barrier(self, waits_for_comm_stream: bool, with_cpu_sync: bool) -> None:
        """Let the current stream wait until all ranks have come here: a dispatch of no tokens."""
        buffer = self._barrier_buffer()
        device, on_gpu = buffer.engine, buffer.engine == "cuda"
        if with_cpu_sync and on_gpu:
            torch.cuda.synchronize()
        if waits_for_comm_stream and on_gpu:
            torch.cuda.current_stream().wait_stream(self.get_comm_stream())
        rows = torch.empty(0, SMALLEST.hidden, dtype=SMALLEST.dtype, device=device)
        buffer.dispatch(rows, torch.empty(0, 1, dtype=torch.int64, device=device), max_recv_rows=0)
        if with_cpu_sync and on_gpu:
            torch.cuda.synchronize()
            self._require_pool().raise_late_error(ends=False)

    def _dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        *,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        cumulative_local_expert_recv_stats: Tensor | None,
        num_experts: int | None,
        num_max_tokens_per_rank: int | None,
        expert_alignment: int | None,
        num_sms: int,
        num_qps: int,
        previous_event: Previous,
        async_with_compute_stream: bool,
        allocate_on_comm_stream: bool,
        handle: EPHandle | None,
        copies_topk_idx: bool,
        do_cpu_sync: bool | None,
        do_expand: bool,
        do_zero_padding: bool,
        use_tma_aligned_col_major_sf: bool,
        another_event: Previous = None,
    ) -> tuple[Received, EventOverlap]:
        """Dispatch. The arguments are those of ElasticBuffer.dispatch. It waits for ``another_event`` too."""
        rows, stats, is_new = Rows(x), cumulative_local_expert_recv_stats, handle is None
        device = rows.device.type
        self._check_common(num_sms, num_qps, previous_event, allocate_on_comm_stream)
        if do_zero_padding and not do_expand:
            checks.fail("do_zero_padding", True, "False without do_expand")
        pool = self._pool_for(num_sms or None, self._timeout_s)
        sizes = dict(
            num_experts=num_experts, expert_alignment=expert_alignment, num_max_tokens_per_rank=num_max_tokens_per_rank
        )
        if handle is not None:
            _check_with_handle(
                checked_handle(handle), sizes, topk_idx=topk_idx, cumulative_local_expert_recv_stats=stats
            )
            if do_cpu_sync:
                checks.fail("do_cpu_sync", True, "None or False with a handle, which has the counts")
        else:
            new = self._new_sizes(**sizes)
            checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), (rows.num_tokens, "num_topk"), device)
            assert topk_idx is not None  # checked
            handle = EPHandle(
                pool,
                self._topology,
                topk_idx,
                do_expand=do_expand,
                num_sms=num_sms or DEFAULT_SMS,
                do_cpu_sync=do_cpu_sync is not False,
                max_tokens=max(new["num_max_tokens_per_rank"], self.num_max_tokens_per_rank),
                **new,
            )
            if stats is not None:
                shape = (handle.num_local,)
                checks.tensor("cumulative_local_expert_recv_stats", stats, (torch.int32,), shape, device)
        inputs = x, topk_weights, stats, handle
        with self._comm.operation(inputs, previous_event, async_with_compute_stream) as operation:
            if another_event is not None:
                another_event.current_stream_wait()
            if is_new and copies_topk_idx:
                handle.keep_copy()
            layout, exact = "expert" if do_expand else "rank", pool.settings().exact
            if is_new:
                handle.refuse_more_tokens(rows, layout)
            out = handle.dispatch(rows.row_format, rows.data, topk_weights, layout)
            if is_new:
                handle.set_counts(out, exact)
            if stats is not None:
                stats += handle.num_unaligned_recv_tokens_per_expert
            recv_x = rows.restore(out.x)
            if use_tma_aligned_col_major_sf and isinstance(recv_x, tuple):
                recv_x = recv_x[0], _column_major(recv_x[1])
            operation.hand_over(recv_x, out.topk_idx, out.topk_weights, handle)
        return (recv_x, out.topk_idx, out.topk_weights, handle), operation.event

    def _combine(
        self,
        x: Tensor,
        *,
        handle: EPHandle,
        topk_weights: Tensor | None,
        bias: Tensor | tuple[Tensor, Tensor] | None,
        num_sms: int,
        num_qps: int,
        previous_event: Previous,
        async_with_compute_stream: bool,
        allocate_on_comm_stream: bool,
        another_event: Previous = None,
        defers_bias: bool = False,
    ) -> tuple[Combined, EventOverlap]:
        """Combine. The arguments are those of ElasticBuffer.combine. The operation waits for ``another_event`` too.

        defers_bias  leave the biases, and the rounding to the dtype of x, to the event's first wait, which returns the
                     results. So a program may write the biases after this call
        """
        handle = checked_handle(handle)
        self._check_common(num_sms, num_qps, previous_event, allocate_on_comm_stream)
        checks.tensor("x", x, checks.DTYPES, (handle.num_rows, "hidden"), x.device.type)
        biases = biases_of(bias, x, len(handle.topk_idx))
        self._pool_for(num_sms or handle.num_sms, self._timeout_s)
        inputs = x, topk_weights, biases, handle
        with self._comm.operation(inputs, previous_event, async_with_compute_stream) as operation:
            if another_event is not None:
                another_event.current_stream_wait()
            rounds_twice = handle.do_expand or self._topology.num_nodes > 1 or biases
            y = x.float() if rounds_twice and not self.allow_multiple_reduction else x
            out = handle.combine(y, topk_weights, "expert" if handle.do_expand else "rank")
            combined_x = out.x if defers_bias else add_biases(out.x, biases, x.dtype)
            operation.hand_over(combined_x, out.topk_weights, handle)

        def add_deferred() -> Combined:
            in_current_stream((combined_x, out.topk_weights))
            return add_biases(combined_x, biases, x.dtype), out.topk_weights

        if defers_bias:
            operation.event.register_hook_after_wait(add_deferred)
        return (combined_x, out.topk_weights), operation.event

    @staticmethod
    def _check_common(num_sms: int, num_qps: int, previous_event: Previous, allocate_on_comm_stream: bool) -> None:
        checks.integer("num_sms", num_sms, 0)
        if num_qps:
            warn_ignored("num_qps", WIRE)
        if previous_event is not None and not allocate_on_comm_stream:
            checks.fail("allocate_on_comm_stream", False, "True with previous_event")

    def _new_sizes(
        self, num_experts: int | None, expert_alignment: int | None, num_max_tokens_per_rank: int | None
    ) -> dict[str, int]:
        """Return the sizes of a dispatch without a handle, checked."""
        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        most = checks.integer("num_max_tokens_per_rank", most, 1)
        num_experts = checks.integer("num_experts", num_experts, 1)
        if num_experts % self.num_ranks:
            checks.fail("num_experts", num_experts, f"a multiple of the number of ranks ({self.num_ranks})")
        alignment = checks.integer("expert_alignment", 1 if expert_alignment is None else expert_alignment, 1)
        return dict(num_experts=num_experts, expert_alignment=alignment, num_max_tokens_per_rank=most)


def get_num_allocation_alignment() -> int:
    """Return the bytes of which DeepEP's buffers are a multiple."""
    return ALLOCATION_ALIGNMENT


def get_num_rdma_alignment() -> int:
    """Return the bytes at whose multiples DeepEP sends between nodes."""
    return 64


def get_num_tma_alignment() -> int:
    """Return the bytes at whose multiples DeepEP copies by TMA."""
    return 32


def _check_with_handle(handle: EPHandle, sizes: dict[str, int | None], **tensors: Tensor | None) -> None:
    """Refuse arguments of a new routing that are given with a handle, unless they equal those of the handle."""
    for name, given in tensors.items():
        if given is not None:
            checks.refuse(f"{name} is given beside handle, which has the routing and its counts")
    for name, size in sizes.items():
        if size not in (None, getattr(handle, name)):
            checks.fail(name, size, f"None, or {getattr(handle, name)} as in the handle")


def _column_major(scales: Tensor) -> Tensor:
    """Return scales [rows, n] of four bytes with contiguous columns, which begin at multiples of 16 bytes."""
    columns = scales.new_empty(scales.shape[1], -(-len(scales) // 4) * 4)
    return columns.t()[: len(scales)].copy_(scales)


def unsupported(name: str, why: str) -> Callable[..., NoReturn]:
    """Return a stand-in for a function of DeepEP that this engine does not have. It raises NotImplementedError."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {why}")

    refuse.__name__ = name
    return refuse
