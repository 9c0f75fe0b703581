"""``deep_ep.ElasticBuffer``, the interface of DeepEP 2, on ep_dispatcher. elastic_handle.py has its handles."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ep_dispatcher import checks, engines, envs
from ep_dispatcher.gather import Gather
from ep_dispatcher.integrations.deep_ep.config import say_without_effect
from ep_dispatcher.integrations.deep_ep.elastic_handle import EPHandle, handle_of
from ep_dispatcher.integrations.deep_ep.events import EventHandle, EventOverlap, outside_graphs
from ep_dispatcher.integrations.deep_ep.pool import Key, PoolUser
from ep_dispatcher.integrations.deep_ep.rows import SMALLEST, Rows, add_biases, biases_of
from ep_dispatcher.memory import DEFAULT_SMS
from ep_dispatcher.nvlink import find_nodes
from ep_dispatcher.topology import host_id, registered_group

_ALIGNMENT = 2 << 20  # bytes, of DeepEP's buffers
_WIRE = "between nodes the engine uses the connections of its own wire"
Previous = EventHandle | EventOverlap | None


@outside_graphs
class ElasticBuffer(PoolUser):
    """Dispatch and combine with DeepEP 2's names, arguments and results, in two layouts, for training and decoding.

        recv_x, recv_topk_idx, recv_topk_weights, handle, event = buffer.dispatch(x, topk_idx, ..., num_experts=...)
        combined_x, combined_topk_weights, event = buffer.combine(y, handle)

    Making one is collective. The first operation makes the memory, which all buffers of a group share (pool.py).

    group                    the ranks: a process group, or a DeviceMesh of one dimension
    num_max_tokens_per_rank  the most tokens of a rank, the same on all ranks. A dispatch may give another number
    num_bytes, hidden, num_topk, use_fp8_dispatch  only for num_bytes, which programs compare; it reserves nothing.
                             num_cpu_bytes: NotImplementedError
    deterministic            results are the same in every run in any case
    allow_multiple_reduction=False  one rounding of a sum. So the rows of a combine travel as float32, but not on one
                             node without do_expand and bias
    num_gpu_timeout_secs     limit of every wait, also of the host, in memory that this buffer makes;
                             100: EP_DISPATCHER_TIMEOUT_S
    allow_hybrid_mode=False  only lets get_logical_domain_size say that there is one domain
    explicitly_destroy       allows destroy(); without it the memory is freed with the last buffer and handle
    all others               hints without effect, and a line says so once
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):
        if num_cpu_bytes:
            raise NotImplementedError("num_cpu_bytes: of Engram, which is not part of this engine; allowed: 0")
        most = checks.integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        checks.seconds("num_gpu_timeout_secs", num_gpu_timeout_secs)
        super().__init__(group, explicitly_destroy)
        self.rank_idx, self.num_ranks, self.num_max_tokens_per_rank = self.group.rank(), self.group.size(), most
        hint = self.get_buffer_size_hint(group, most, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = hint if num_bytes is None else num_bytes
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or 1
        self._timeout_s = None if num_gpu_timeout_secs == 100 else num_gpu_timeout_secs
        for argument, given, default, reason in (
            ("prefer_overlap_with_compute", bool(prefer_overlap_with_compute), True, "num_sms of a dispatch has one"),
            ("sl_idx", sl_idx, 3, _WIRE),
            ("num_allocated_qps", num_allocated_qps, 0, _WIRE),
            ("num_cpu_timeout_secs", num_cpu_timeout_secs, 300, "num_gpu_timeout_secs limits waits of the host too"),
        ):
            if given != default:
                say_without_effect(argument, reason)
        with Gather(registered_group(self.group), envs.timeout_s()) as gather:
            found = gather("hosts", lambda: (host_id(), engines.choose(envs.engine())))
            hosts, names = (list(of_ranks) for of_ranks in zip(*found, strict=True))
            engine = "cpu" if "cpu" in names else "cuda"
            self._topology, _ = find_nodes(gather, self.rank_idx, hosts, envs.ranks_per_node(), engine)
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
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

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

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return the engine's default, 24, for any sizes."""
        if num_scaleout_topk:
            raise NotImplementedError("num_scaleout_topk: reserved in DeepEP too; allowed: 0")
        if (rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs) != (0, 0, 200, 50):
            say_without_effect("rdma_gbs, nvlink_gbs, sm_read_gbs and sm_write_gbs", "24 is measured, not modelled")
        return DEFAULT_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return num_allocated_qps: the engine has its own connections."""
        return self.num_allocated_qps

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Let the current stream wait until all ranks have come here: a dispatch of no tokens.

        use_comm_stream  earlier work in get_comm_stream() comes first
        with_cpu_sync    the host waits for the device before and after
        sequential       changes nothing that a program could see
        """
        buffer = self._pool_for(None, self._timeout_s).sized(Key(SMALLEST, self.num_ranks, 1), 1)
        device, on_gpu = buffer.engine, buffer.engine == "cuda"
        if with_cpu_sync and on_gpu:
            torch.cuda.synchronize()
        if use_comm_stream and on_gpu:
            torch.cuda.current_stream().wait_stream(self.get_comm_stream())
        rows = torch.empty(0, SMALLEST.hidden, dtype=SMALLEST.dtype, device=device)
        buffer.dispatch(rows, torch.empty(0, 1, dtype=torch.int64, device=device), max_recv_rows=0)
        if with_cpu_sync and on_gpu:
            torch.cuda.synchronize()

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
        previous_event_before_epilogue: Previous = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Bring tokens to the ranks of their experts. Return recv_x, recv_topk_idx, recv_topk_weights, handle, event.

            do_expand=False: a row for every token that has an expert here, in order of (source rank, token);
                             recv_topk_idx[row, k] = local expert or -1; recv_topk_weights[row, k] = weight or 0
            do_expand=True:  a row for every (token, local expert), in order of (expert, source rank, token);
                             recv_topk_idx is None; recv_topk_weights[row]; zero rows pad to expert_alignment

        x             rows, or a pair of rows and scales: see rows.Rows
        topk_idx, topk_weights  int64 [num_tokens, num_topk], -1 for no expert, and float32 of the same shape or None
        cumulative_local_expert_recv_stats  int32 [num_local_experts]; the dispatch adds the tokens of each expert
        num_experts, num_max_tokens_per_rank, expert_alignment  of the handle, if one is given. num_max_tokens_per_rank
                      is that of the buffer, if it is None
        num_sms       multiprocessors of memory that this call makes; 0: 24
        num_qps       without effect, and a line says so once
        previous_event  the operation waits for it, instead of all work so far. Needs allocate_on_comm_stream
        previous_event_before_epilogue  the operation waits for it too, from its beginning
        handle        of an earlier dispatch, to use its routing again; with topk_weights or without
        do_cpu_sync   None: True without a handle. False: no host waits, and outputs have the most rows that any routing
                      can need: tokens are num_ranks * num_max_tokens_per_rank; with do_expand times min(num_topk,
                      num_local_experts), and padding. Rows at the end are zeros, with -1 in recv_topk_idx
        do_zero_padding  only with do_expand; padding is zeros in any case
        use_tma_aligned_col_major_sf  columns of scales are contiguous, and begin at a multiple of 16 bytes

        Raises ValueError for arguments that are not allowed, PeerTimeoutError if a rank does not arrive.
        """
        rows, stats, is_new = Rows(x), cumulative_local_expert_recv_stats, handle is None
        device = rows.device.type
        self._check_common(num_sms, num_qps, previous_event, allocate_on_comm_stream)
        if do_zero_padding and not do_expand:
            checks.fail("do_zero_padding", True, "True only with do_expand")
        pool = self._pool_for(num_sms or None, self._timeout_s)
        sizes = dict(
            num_experts=num_experts, expert_alignment=expert_alignment, num_max_tokens_per_rank=num_max_tokens_per_rank
        )
        if handle is not None:
            _check_beside(handle_of(handle), sizes, topk_idx=topk_idx, cumulative_local_expert_recv_stats=stats)
            if do_cpu_sync:
                checks.fail("do_cpu_sync", True, "None or False with a handle, which has the counts")
        else:
            new = self._new_sizes(rows, **sizes)
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
            if previous_event_before_epilogue is not None:
                previous_event_before_epilogue.current_stream_wait()
            if is_new and do_handle_copy:
                handle.topk_idx = handle.topk_idx.clone()
            out = handle.dispatch(rows.kind, rows.data, topk_weights, "expert" if do_expand else "rank")
            if is_new:
                handle.begin(out, envs.deep_ep_exact())
            if stats is not None:
                stats += handle.num_unaligned_recv_tokens_per_expert
            recv_x = rows.restore(out.x)
            if use_tma_aligned_col_major_sf and isinstance(recv_x, tuple):
                recv_x = recv_x[0], _column_major(recv_x[1])
            operation.hand_over(recv_x, out.topk_idx, out.topk_weights, handle)
        return recv_x, out.topk_idx, out.topk_weights, handle, operation.event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Previous = None,
        previous_event_before_epilogue: Previous = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sum every token's rows on its source rank, without weights. Return combined_x, combined_topk_weights, event.

            combined_x[token] = sum of x[row of token] + bias
            combined_topk_weights[token, k] = topk_weights at the row of (token, k), or 0

        x             bfloat16, float16 or float32, as many rows as the dispatch had, in its order; of any width
        topk_weights  float32 [rows, num_topk], with do_expand [rows]
        bias          one or two tensors [num_tokens, hidden] of the dtype of x, added in float32 after the sum
        num_sms       multiprocessors of memory that this call makes, as for rows of another dtype than the dispatch's

        The other arguments are those of dispatch.
        """
        handle = handle_of(handle)
        self._check_common(num_sms, num_qps, previous_event, allocate_on_comm_stream)
        checks.tensor("x", x, checks.DTYPES, (handle.num_rows, "hidden"), x.device.type)
        biases = biases_of(bias, x, len(handle.topk_idx))
        self._pool_for(num_sms or handle.num_sms, self._timeout_s)
        inputs = x, topk_weights, biases, handle
        with self._comm.operation(inputs, previous_event, async_with_compute_stream) as operation:
            if previous_event_before_epilogue is not None:
                previous_event_before_epilogue.current_stream_wait()
            rounds_twice = handle.do_expand or self._topology.num_nodes > 1 or biases
            y = x.float() if rounds_twice and not self.allow_multiple_reduction else x
            out = handle.combine(y, topk_weights, "expert" if handle.do_expand else "rank")
            combined_x = add_biases(out.x, biases, x.dtype)
            operation.hand_over(combined_x, out.topk_weights, handle)
        return combined_x, out.topk_weights, operation.event

    @staticmethod
    def _check_common(num_sms: int, num_qps: int, previous_event: Previous, allocate_on_comm_stream: bool) -> None:
        checks.integer("num_sms", num_sms, 0)
        if num_qps:
            say_without_effect("num_qps", _WIRE)
        if previous_event is not None and not allocate_on_comm_stream:
            checks.fail("allocate_on_comm_stream", False, "True with previous_event")

    def _new_sizes(
        self, rows: Rows, num_experts: int | None, expert_alignment: int | None, num_max_tokens_per_rank: int | None
    ) -> dict[str, int]:
        """Return the sizes of a dispatch without a handle, checked."""
        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        most = checks.integer("num_max_tokens_per_rank", most, 1)
        if rows.num_tokens > most:
            checks.fail("x", f"{rows.num_tokens} tokens", f"up to num_max_tokens_per_rank = {most}")
        num_experts = checks.integer("num_experts", num_experts, 1)
        if num_experts % self.num_ranks:
            checks.fail("num_experts", num_experts, f"a multiple of the number of ranks ({self.num_ranks})")
        alignment = checks.integer("expert_alignment", 1 if expert_alignment is None else expert_alignment, 1)
        return dict(num_experts=num_experts, expert_alignment=alignment, num_max_tokens_per_rank=most)


def _check_beside(handle: EPHandle, sizes: dict[str, int | None], **tensors: Tensor | None) -> None:
    """Refuse arguments of a new routing beside a handle, unless they are those of the handle."""
    for name, given in tensors.items():
        if given is not None:
            checks.fail(name, "a tensor beside handle", "None: the handle has the routing and its counts")
    for name, size in sizes.items():
        if size not in (None, getattr(handle, name)):
            checks.fail(name, size, f"None, or {getattr(handle, name)} as of the handle")


def _column_major(scales: Tensor) -> Tensor:
    """Return scales [rows, n] of four bytes with contiguous columns, which begin at multiples of 16 bytes."""
    columns = scales.new_empty(scales.shape[1], -(-len(scales) // 4) * 4)
    return columns.t()[: len(scales)].copy_(scales)


def _refused(name: str, part: str):
    def refuse(*args, **kwargs):
        raise NotImplementedError(f"{name}: of DeepEP's {part}, which is not part of this engine")

    return refuse


_REFUSED = {
    "Engram": "engram_write engram_fetch get_engram_storage_size_hint",
    "pipeline": "pp_set_config pp_send pp_recv get_pp_buffer_size_hint",
    "all-gather": "create_agrs_session destroy_agrs_session agrs_new_session agrs_set_config agrs_get_inplace_tensor "
    "all_gather get_agrs_num_max_session_bytes get_agrs_buffer_size_hint",
}
for _part, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(ElasticBuffer, _name, _refused(_name, _part))
