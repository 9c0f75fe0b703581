"""Handles of ``deep_ep.ElasticBuffer``: the routing of one dispatch, its plans, and what programs read of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.config import say_once
from ep_dispatcher.integrations.deep_ep.handle import missing, say_missing
from ep_dispatcher.integrations.deep_ep.pool import Key, Pool
from ep_dispatcher.integrations.deep_ep.rows import Kind
from ep_dispatcher.memory import DEFAULT_SMS
from ep_dispatcher.topology import Topology

_SOURCE = Kind(8, torch.bfloat16)  # 16 bytes, the smallest row: it carries the number of its token


class EPHandle:
    """The routing of a dispatch, for combines and for dispatches that repeat it, with rows of any size and dtype.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms   as given to the dispatch
    topk_idx                               int64 [num_tokens, num_topk]
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

    Places in DeepEP's buffers are ``missing``. So are sources, unless EP_DISPATCHER_DEEP_EP_EXACT=1 lets the dispatch
    exchange them; without do_expand the last element of psum_num_recv_tokens_per_scaleup_rank, the number of received
    tokens, is there always.
    """

    token_metadata_at_forward = channel_linked_list = None  # of DeepEP's way between nodes

    def __init__(
        self, pool: Pool, topology: Topology, topk_idx: Tensor, *, max_tokens: int, do_cpu_sync: bool, **given: Any
    ):
        self.do_expand: bool = given["do_expand"]
        self.num_experts: int = given["num_experts"]
        self.expert_alignment: int = given["expert_alignment"]
        self.num_max_tokens_per_rank: int = given["num_max_tokens_per_rank"]
        self.num_sms: int = given["num_sms"]
        self.topk_idx = topk_idx
        self.num_local = self.num_experts // topology.num_ranks
        self._pool, self._topology, self._max_tokens, self._waits = pool, topology, max_tokens, do_cpu_sync
        self._plans: dict[tuple[Kind, bool], tuple[ep.Buffer, ep.Handle]] = {}

    def dispatch(self, kind: Kind, expanded: bool, rows: Any, topk_weights: Tensor | None) -> ep.DispatchOutput:
        """Dispatch rows of the kind in a layout. The first of each makes a plan."""
        if (kind, expanded) in self._plans:
            buffer, plan = self._plans[kind, expanded]
            self._say_of_sms(buffer)
            return buffer.dispatch(rows, topk_weights=topk_weights, handle=plan)
        buffer = self._buffer(kind)
        self._say_of_sms(buffer)
        out = buffer.dispatch(rows, self.topk_idx, topk_weights, **self._layout(expanded))
        self._plans[kind, expanded] = buffer, out.handle
        return out

    def combine(self, y: Tensor, topk_weights: Tensor | None) -> ep.CombineOutput:
        kind = Kind(y.shape[1], y.dtype)
        if (kind, self.do_expand) not in self._plans:
            buffer = self._buffer(kind)
            self._plans[kind, self.do_expand] = buffer, buffer.plan(self.topk_idx, **self._layout(self.do_expand))
        buffer, plan = self._plans[kind, self.do_expand]
        self._say_of_sms(buffer)
        return buffer.combine(y, plan, topk_weights=topk_weights)

    def _buffer(self, kind: Kind) -> ep.Buffer:
        return self._pool.sized(Key(kind, self.num_experts, self.topk_idx.shape[1]), self._max_tokens).buffer

    def _say_of_sms(self, buffer: ep.Buffer) -> None:
        has = buffer.config.num_sms or DEFAULT_SMS
        if self._pool.num_sms not in (None, has):
            say_once(f"num_sms: given {self._pool.num_sms}; memory that was made before keeps {has} multiprocessors")

    def _layout(self, expanded: bool) -> dict[str, Any]:
        """Return the engine's arguments for a plan."""
        most = None if self._waits else self._most_rows(expanded)
        name = "expert" if expanded else "rank"
        return dict(layout=name, expert_alignment=self.expert_alignment, max_recv_rows=most)

    def begin(self, out: ep.DispatchOutput, exact: bool) -> None:
        """Take the counts of the dispatch that makes the handle."""
        self.num_rows = out.handle.num_rows
        tokens, rows = out.tokens_per_expert.int(), out.rows_per_expert.int()
        ends = rows.cumsum(0, dtype=torch.int32)
        self.num_unaligned_recv_tokens_per_expert = tokens
        self.psum_num_recv_tokens_per_expert = ends - rows + tokens if self.do_expand else ends
        self.num_recv_tokens_per_expert_list: list[int] = out.rows_on_host.tolist() if self._waits else []
        counted = sum(self.num_recv_tokens_per_expert_list)
        self.num_expanded_tokens = counted if self._waits else self._most_rows(True)
        device, (num_tokens, num_topk) = self.topk_idx.device, self.topk_idx.shape
        self.dst_buffer_slot_idx = missing(num_tokens, num_topk, device=device)
        self.num_recv_tokens: int | None = None if self.do_expand else self.num_rows
        if exact:
            self._exchange_sources(ends - rows)
            return
        say_missing("recv_src_metadata, dst_buffer_slot_idx and psum_num_recv_tokens_per_scaleup_rank (but its end)")
        self.recv_src_metadata = missing(self.num_recv_tokens or 0, 2 + num_topk, device=device)
        self.psum_num_recv_tokens_per_scaleup_rank = missing(self._topology.ranks_per_node, device=device)
        if out.topk_idx is not None:
            received = self.num_rows if self._waits else (out.topk_idx >= 0).any(1).sum()
            self.psum_num_recv_tokens_per_scaleup_rank = self.psum_num_recv_tokens_per_scaleup_rank.contiguous()
            self.psum_num_recv_tokens_per_scaleup_rank[-1] = received

    def tensors(self) -> list[Tensor]:
        """Return the tensors that operations read or have made."""
        made = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return made + [handle.plan for _, handle in self._plans.values()]

    def _exchange_sources(self, begins: Tensor) -> None:
        """Fill what tells the source of each received token, by a dispatch of 16 bytes for each."""
        idx, most, device = self.topk_idx, self.num_max_tokens_per_rank, self.topk_idx.device
        sent = torch.zeros(len(idx), 4, dtype=torch.int32, device=device)
        first = self._topology.rank * most
        sent[:, 0] = torch.arange(first, first + len(idx), dtype=torch.int32, device=device)
        out = self.dispatch(_SOURCE, False, sent.view(torch.bfloat16), None)
        assert isinstance(out.x, Tensor) and out.topk_idx is not None  # rows in rank layout
        source, here = out.x.view(torch.int32)[:, 0], out.topk_idx
        is_here = here >= 0
        self.num_recv_tokens = len(source)
        self.recv_src_metadata = missing(len(source), 2 + idx.shape[1], device=device).contiguous()
        self.recv_src_metadata[:, 0] = source
        if self.do_expand:
            experts = torch.arange(self.num_local, dtype=here.dtype, device=device)
            before = (here[:, :, None] == experts).any(1).cumsum(0, dtype=torch.int32) - 1
            rows = (begins + before).gather(1, here.clamp(min=0))
            self.recv_src_metadata[:, 2:] = rows.where(is_here, -1)
        ranks = torch.arange(self._topology.ranks_per_node, dtype=torch.int32, device=device)
        is_from = (source // most % len(ranks))[:, None] == ranks
        counts = (is_from & is_here.any(1, keepdim=True)).sum(0, dtype=torch.int32)
        self.psum_num_recv_tokens_per_scaleup_rank = counts.cumsum(0, dtype=torch.int32)

    def _most_rows(self, expanded: bool) -> int:
        tokens = self._topology.num_ranks * self.num_max_tokens_per_rank
        if not expanded:
            return tokens
        rows = tokens * min(self.topk_idx.shape[1], self.num_local) + (self.expert_alignment - 1) * self.num_local
        return -(-rows // self.expert_alignment) * self.expert_alignment


def handle_of(handle: object) -> EPHandle:
    if not isinstance(handle, EPHandle):
        checks.fail("handle", type(handle).__name__, "the EPHandle of an ElasticBuffer's dispatch")
    return handle
