"""A dispatch that makes a handle: it checks the program's routing, sends rows, and gathers the counts of all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.integrations.collectives import all_reduce
from ep_dispatcher.integrations.deep_ep.buffer_pool import BufferKey, BufferPool
from ep_dispatcher.integrations.deep_ep.config import NVL_PEERS, num_rdma_ranks
from ep_dispatcher.integrations.deep_ep.handle import HandleState, attach, log_placeholders, make_items, set_num_rows
from ep_dispatcher.integrations.deep_ep.late_errors import LateErrors
from ep_dispatcher.integrations.deep_ep.layout import (
    check_same_routing,
    check_without_topk_idx,
    make_distinct,
    origin_of,
    repeated_expert_error,
    routing_of_ranks,
)
from ep_dispatcher.integrations.deep_ep.row_conversion import Rows
from ep_dispatcher.memory import MAX_EXPERTS

_EXACT = f"with EP_DISPATCHER_DEEP_EP_EXACT=1 it may be repeated, if experts x choices is at most {MAX_EXPERTS}"
# recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle
Received = tuple[
    Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, list[int] | None, tuple[Tensor, ...] | None
]


class Routing(NamedTuple):
    """A program's description of a routing. topk_idx and topk_weights are both given or both None."""

    num_tokens_per_rank: Tensor  # int32 [num_ranks]
    num_tokens_per_expert: Tensor  # int32 [num_experts]
    is_token_in_rank: Tensor  # bool [num_tokens, num_ranks]
    num_tokens_per_rdma_rank: Tensor | None  # int32 [nodes]; only checked, because the engine counts them itself
    topk_idx: Tensor | None  # int64 [num_tokens, num_topk]
    topk_weights: Tensor | None  # float32 [num_tokens, num_topk]

    def check(self, rows: Rows, num_ranks: int, late: LateErrors) -> None:
        per_rank, per_expert, in_rank, per_node, topk_idx, topk_weights = self
        device = rows.device.type
        is_known = origin_of(in_rank, per_rank, per_expert) is not None
        if not is_known or in_rank.device != rows.device or in_rank.shape != (rows.num_tokens, num_ranks):
            checks.tensor("num_tokens_per_rank", per_rank, (torch.int32,), (num_ranks,), device)
            checks.tensor("num_tokens_per_expert", per_expert, (torch.int32,), ("num_experts",), device)
            checks.tensor("is_token_in_rank", in_rank, (torch.bool,), (rows.num_tokens, num_ranks), device)
        if per_node is not None:
            shape = (num_rdma_ranks(num_ranks),)
            checks.tensor("num_tokens_per_rdma_rank", per_node, (torch.int32,), shape, device)
        if (topk_idx is None) != (topk_weights is None):
            missing = "topk_idx" if topk_idx is None else "topk_weights"
            checks.refuse(f"{missing} is None: give both topk_idx and topk_weights, or neither")
        if topk_idx is not None:
            check_same_routing(late, topk_idx, per_rank, per_expert, in_rank)
        else:
            check_without_topk_idx(late, per_rank, per_expert, in_rank)


def dispatch(
    pool: BufferPool, rows: Rows, routing: Routing, expert_alignment: int, num_worst_tokens: int, num_channels: int
) -> tuple[Received, HandleState]:
    """Dispatch with a new routing. The arguments and what is received are those of ``Buffer.dispatch``."""
    num_ranks, is_distinct = pool.group.size(), False
    routing.check(rows, num_ranks, pool.late)
    exact, error = pool.settings(num_worst_tokens).exact, None
    idx, num_experts = routing.topk_idx, routing.num_tokens_per_expert.numel()
    gathers_counts = exact or idx is None  # of all ranks
    if idx is None:
        if num_worst_tokens:
            checks.fail("num_worst_tokens", num_worst_tokens, "0 without topk_idx")
        idx, num_experts = routing_of_ranks(routing.is_token_in_rank), num_ranks
    elif exact and num_experts * idx.shape[1] <= MAX_EXPERTS:
        idx, num_experts, is_distinct = make_distinct(idx, num_experts), num_experts * idx.shape[1], True
    else:
        error = repeated_expert_error(idx, _EXACT)
    key = BufferKey(rows.row_format, num_experts, idx.shape[1])
    buffer, max_rows = pool.buffer_for_dispatch(key, rows.num_tokens, num_worst_tokens), num_worst_tokens or None
    if error is not None:
        pool.refuse(error)
    # Make these before the launch: after a wait for counts the device may wait for the host.
    plans = HandleState(pool, routing.is_token_in_rank, buffer.config.max_tokens_per_rank, max_rows)
    items = make_items(routing.is_token_in_rank, num_channels)
    items[-1] = attach(items[-1], plans)
    out = buffer.dispatch(
        rows.data,
        idx,
        routing.topk_weights,
        layout="rank",
        expert_alignment=expert_alignment,
        max_recv_rows=max_rows,
    )
    plans.set_first_plan(key, buffer, out)
    set_num_rows(items, plans.num_rows)
    counts: list[int] = []
    if gathers_counts:
        prefix, gathered = _gather_counts(pool, routing, expert_alignment)
        plans.rank_prefix = prefix.to(rows.device, torch.int32)
        counts = [] if num_worst_tokens else gathered
    elif not num_worst_tokens:
        counts = out.rows_on_host.tolist()  # the host has waited for them
    if max_rows is None:  # the host has waited, so errors found before have arrived, and here all ranks are in step
        pool.raise_late_error(ends=False)
    if num_ranks <= NVL_PEERS:
        if plans.rank_prefix is None:
            log_placeholders("rank_prefix_matrix")
        else:
            items[0] = plans.rank_prefix
    recv_idx = None if routing.topk_idx is None else out.topk_idx
    if recv_idx is not None and is_distinct:
        recv_idx = recv_idx // idx.shape[1]  # of -1 it is -1
    return (rows.restore(out.x), recv_idx, out.topk_weights, counts, tuple(items)), plans


def _gather_counts(pool: BufferPool, routing: Routing, expert_alignment: int) -> tuple[Tensor, list[int]]:
    """Return rank_prefix_matrix, and the rows of every local expert, rounded up to the alignment."""
    num_ranks, rank = pool.group.size(), pool.group.rank()
    own = torch.cat([routing.num_tokens_per_rank, routing.num_tokens_per_expert]).cpu().long()
    everyone = own.new_zeros(num_ranks, own.numel())
    everyone[rank] = own
    all_reduce(everyone, dist.ReduceOp.SUM, pool.group, about="gather the counts")
    mine = everyone[:, num_ranks:].sum(0).view(num_ranks, -1)[rank]
    return everyone[:, :num_ranks].cumsum(0), [-(-n // expert_alignment) * expert_alignment for n in mine.tolist()]
