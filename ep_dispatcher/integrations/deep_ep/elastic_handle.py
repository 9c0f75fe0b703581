"""Handles of ElasticBuffer and EPBuffer: the routing of one dispatch, its plans, and what programs read of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.buffer_pool import BufferPool
from ep_dispatcher.integrations.deep_ep.config import warn_once
from ep_dispatcher.integrations.deep_ep.handle import RoutingPlans, log_placeholders, placeholder
from ep_dispatcher.integrations.deep_ep.layout import version_of
from ep_dispatcher.integrations.deep_ep.row_conversion import SMALLEST, RowFormat, Rows, numbered_rows
from ep_dispatcher.memory import DEFAULT_SMS
from ep_dispatcher.topology import Topology


class EPHandle(RoutingPlans):
    """The routing of a dispatch, for combines and for dispatches that repeat it, with rows of any size and dtype.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms   as given to the dispatch
    topk_idx                               int64 or int32 [num_tokens, num_topk], as given: a ValueError after a change
                                           of it in place, as far as PyTorch counts these
    num_recv_tokens_per_expert_list        rows of each local expert, with padding; empty if the host did not wait
    num_unaligned_recv_tokens_per_expert   int32 [num_local_experts], without padding
    psum_num_recv_tokens_per_expert        int32 [num_local_experts], the end of each expert's rows: with its padding,
                                           but with do_expand without
    num_expanded_tokens                    rows of all local experts, with padding; the most if the host did not wait
    num_recv_tokens                        rows without do_expand; with it None if it is not known
    psum_num_recv_tokens_per_scaleup_rank  int32 [num_scaleup_ranks], ends of the tokens of each source
    recv_src_metadata                      int32 [num_recv_tokens, 2 + num_topk]: source rank * num_max_tokens_per_rank
                                           + token; DeepEP's place; with do_expand the row for each choice, or -1
    dst_buffer_slot_idx                    int32 [num_tokens, num_topk]: DeepEP's places

    Places in DeepEP's buffers are placeholders (handle.py). So are sources, unless EP_DISPATCHER_DEEP_EP_EXACT=1 lets
    the dispatch exchange them. Without do_expand the last element of psum_num_recv_tokens_per_scaleup_rank, the number
    of received tokens, is always right.
    """

    token_metadata_at_forward = channel_linked_list = None  # DeepEP uses them between nodes

    def __init__(
        self,
        pool: BufferPool,
        topology: Topology,
        topk_idx: Tensor,
        *,
        max_tokens: int,
        do_cpu_sync: bool,
        **given: Any,
    ):
        super().__init__(pool, max_tokens)
        self.do_expand: bool = given["do_expand"]
        self.num_experts: int = given["num_experts"]
        self.expert_alignment: int = given["expert_alignment"]
        self.num_max_tokens_per_rank: int = given["num_max_tokens_per_rank"]
        self.num_sms: int = given["num_sms"]
        self._topk_idx, self._version = topk_idx, version_of(topk_idx)
        self.num_local = self.num_experts // topology.num_ranks
        self._topology, self._host_waits = topology, do_cpu_sync

    @property
    def topk_idx(self) -> Tensor:
        if version_of(self._topk_idx) != self._version:
            raise ValueError(
                "topk_idx was changed in place while the handle of its dispatch is in use. Give the dispatch a tensor "
                "of its own: topk_idx.clone()"
            )
        return self._topk_idx

    def keep_copy(self) -> None:
        """Keep a copy of topk_idx, which the program may change. Called in the stream of the dispatch."""
        self._topk_idx = self._topk_idx.clone()
        self._version = version_of(self._topk_idx)

    def routing(self, layout: str) -> tuple[Tensor, int, dict[str, Any]]:
        most = None if self._host_waits else self._most_rows(layout)
        options = dict(expert_alignment=self.expert_alignment, max_recv_rows=most)
        return self.topk_idx, self.num_experts, options

    def _find(self, row_format: RowFormat, layout: str) -> tuple[ep.Buffer, dict[str, Any]]:
        buffer, how = super()._find(row_format, layout)
        num_sms = buffer.config.num_sms or DEFAULT_SMS
        if self._pool.num_sms not in (None, num_sms):
            warn_once(f"num_sms is {self._pool.num_sms}; buffers that were made before keep {num_sms} multiprocessors")
        return buffer, how

    def refuse_more_tokens(self, rows: Rows, layout: str) -> None:
        """Raise ValueError for more tokens than num_max_tokens_per_rank. Other ranks learn that this rank has left."""
        most = self.num_max_tokens_per_rank
        if rows.num_tokens > most:
            self._find(rows.row_format, layout)  # the other ranks make the buffer too
            rank = self._topology.rank
            self._pool.refuse(
                ValueError(f"x has {rows.num_tokens} tokens on rank {rank}, but num_max_tokens_per_rank is {most}")
            )

    def set_counts(self, out: ep.DispatchOutput, exact: bool) -> None:
        """Take the counts of the dispatch that makes the handle."""
        self.num_rows = out.handle.num_rows
        tokens, rows = out.tokens_per_expert.int(), out.rows_per_expert.int()
        ends = rows.cumsum(0, dtype=torch.int32)
        self.num_unaligned_recv_tokens_per_expert = tokens
        self.psum_num_recv_tokens_per_expert = ends - rows + tokens if self.do_expand else ends
        self.num_recv_tokens_per_expert_list: list[int] = out.rows_on_host.tolist() if self._host_waits else []
        counted = sum(self.num_recv_tokens_per_expert_list)
        self.num_expanded_tokens = counted if self._host_waits else self._most_rows("expert")
        device, (num_tokens, num_topk) = self.topk_idx.device, self.topk_idx.shape
        self.dst_buffer_slot_idx = placeholder(num_tokens, num_topk, device=device)
        self.num_recv_tokens: int | None = None if self.do_expand else self.num_rows
        if exact:
            self._exchange_sources(ends - rows)
            return
        log_placeholders(
            "recv_src_metadata, dst_buffer_slot_idx and psum_num_recv_tokens_per_scaleup_rank (but its end)"
        )
        self.recv_src_metadata = placeholder(self.num_recv_tokens or 0, 2 + num_topk, device=device)
        self.psum_num_recv_tokens_per_scaleup_rank = placeholder(self._topology.ranks_per_node, device=device).clone()
        if out.topk_idx is not None:
            received = self.num_rows if self._host_waits else (out.topk_idx >= 0).any(1).sum()
            self.psum_num_recv_tokens_per_scaleup_rank[-1] = received

    def tensors(self) -> list[Tensor]:
        """Return the tensors that operations read or have made."""
        made = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return made + [handle.plan for _, handle in self._plans.values()]

    def _exchange_sources(self, begins: Tensor) -> None:
        """Fill the fields with the source of each received token, by a dispatch of 16 bytes for each token."""
        idx, most, device = self.topk_idx, self.num_max_tokens_per_rank, self.topk_idx.device
        sent = numbered_rows(len(idx), self._topology.rank * most, device)
        out = self.dispatch(SMALLEST, sent)
        assert isinstance(out.x, Tensor) and out.topk_idx is not None  # rows in rank layout
        source, local_idx = out.x.view(torch.int32)[:, 0], out.topk_idx
        is_local = local_idx >= 0
        self.num_recv_tokens = len(source)
        self.recv_src_metadata = placeholder(len(source), 2 + idx.shape[1], device=device).clone()
        self.recv_src_metadata[:, 0] = source
        if self.do_expand:
            experts = torch.arange(self.num_local, dtype=local_idx.dtype, device=device)
            before = (local_idx[:, :, None] == experts).any(1).cumsum(0, dtype=torch.int32) - 1
            rows = (begins + before).gather(1, local_idx.clamp(min=0))
            self.recv_src_metadata[:, 2:] = rows.where(is_local, -1)
        ranks = torch.arange(self._topology.ranks_per_node, dtype=torch.int32, device=device)
        is_from = (source // most % len(ranks))[:, None] == ranks
        counts = (is_from & is_local.any(1, keepdim=True)).sum(0, dtype=torch.int32)
        self.psum_num_recv_tokens_per_scaleup_rank = counts.cumsum(0, dtype=torch.int32)

    def _most_rows(self, layout: str) -> int:
        tokens = self._topology.num_ranks * self.num_max_tokens_per_rank
        if layout == "rank":
            return tokens
        rows = tokens * min(self.topk_idx.shape[1], self.num_local) + (self.expert_alignment - 1) * self.num_local
        return -(-rows // self.expert_alignment) * self.expert_alignment


def checked_handle(handle: object) -> EPHandle:
    if not isinstance(handle, EPHandle):
        checks.fail(
            "handle", f"of type {type(handle).__name__}", "the EPHandle of a dispatch of ElasticBuffer or EPBuffer"
        )
    return handle
