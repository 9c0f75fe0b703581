"""``deep_ep.ElasticBuffer``, the interface of DeepEP 2, on ep_dispatcher. elastic_base.py does the work."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ep_dispatcher.integrations.deep_ep.config import warn_ignored
from ep_dispatcher.integrations.deep_ep.elastic_base import WIRE, ElasticBase, Previous, unsupported
from ep_dispatcher.integrations.deep_ep.elastic_handle import EPHandle
from ep_dispatcher.integrations.deep_ep.events import EventOverlap, outside_graphs


@outside_graphs
class ElasticBuffer(ElasticBase):
    """Dispatch and combine with DeepEP 2's names, arguments and results, in two layouts, for training and decoding.

        recv_x, recv_topk_idx, recv_topk_weights, handle, event = buffer.dispatch(x, topk_idx, ..., num_experts=...)
        combined_x, combined_topk_weights, event = buffer.combine(y, handle)

    Making one is collective. The first operation makes the memory, which all buffers of a group share (buffer_pool.py).

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
    explicitly_destroy       allows destroy(); without it the memory stays until the group or
                             ``ep_dispatcher.integrations.deep_ep.destroy_buffers()`` ends it
    all others               hints without effect, and a line says so once
    """

    deep_ep_class = "ElasticBuffer"

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
            raise NotImplementedError("num_cpu_bytes has to be 0: Engram is not part of this engine")
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
        if sl_idx != 3:
            warn_ignored("sl_idx", WIRE)

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
        return self._num_sms(num_scaleout_topk, (rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs), (0, 0, 200, 50))

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Let the current stream wait until all ranks have come here: a dispatch of no tokens.

        use_comm_stream  earlier work in get_comm_stream() comes first
        with_cpu_sync    the host waits for the device before and after
        sequential       changes nothing that a program could see
        """
        self._barrier(use_comm_stream, with_cpu_sync)

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
            copies_topk_idx=do_handle_copy,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
            do_zero_padding=do_zero_padding,
            use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
            another_event=previous_event_before_epilogue,
        )
        return *received, event

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
            another_event=previous_event_before_epilogue,
        )
        return *combined, event


_UNSUPPORTED = {
    "Engram": "engram_write engram_fetch get_engram_storage_size_hint",
    "pipeline": "pp_set_config pp_send pp_recv get_pp_buffer_size_hint",
    "all-gather": "create_agrs_session destroy_agrs_session agrs_new_session agrs_set_config agrs_get_inplace_tensor "
    "all_gather get_agrs_num_max_session_bytes get_agrs_buffer_size_hint",
}
for _part, _names in _UNSUPPORTED.items():
    for _name in _names.split():
        setattr(ElasticBuffer, _name, unsupported(_name, f"of DeepEP's {_part}, which is not part of this engine"))
