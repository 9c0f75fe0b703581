"""A dispatch that makes a handle: checks the program's routing, sends rows, and gathers counts of all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher import checks, envs
from ep_dispatcher.integrations.deep_ep.config import NVL_PEERS, num_rdma_ranks
from ep_dispatcher.integrations.deep_ep.handle import Items, Plans, say_missing
from ep_dispatcher.integrations.deep_ep.layout import (
    check_same_routing,
    distinct,
    is_of_one_layout,
    refuse_repeated,
    routing_of_ranks,
)
from ep_dispatcher.integrations.deep_ep.pool import Key, Pool
from ep_dispatcher.integrations.deep_ep.rows import Rows
from ep_dispatcher.memory import MAX_EXPERTS

_EXACT = f"with EP_DISPATCHER_DEEP_EP_EXACT=1 it may, if experts times choices are at most {MAX_EXPERTS}"
# recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle
Received = tuple[
    Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, list[int] | None, tuple[Tensor, ...] | None
]


class Routing(NamedTuple):
    """A program's description of a routing. The last two are both given or both None; the one before may be None."""

    num_tokens_per_rank: Tensor  # int32 [num_ranks]
    num_tokens_per_expert: Tensor  # int32 [num_experts]
    is_token_in_rank: Tensor  # bool [num_tokens, num_ranks]
    num_tokens_per_rdma_rank: Tensor | None  # int32 [nodes]; the engine counts them itself
    topk_idx: Tensor | None  # int64 [num_tokens, num_topk]
    topk_weights: Tensor | None  # float32 [num_tokens, num_topk]

    def check(self, rows: Rows, num_ranks: int) -> None:
        per_rank, per_expert, in_rank = self[:3]
        is_known = is_of_one_layout(in_rank, per_rank, per_expert) and in_rank.device == rows.device
        if not is_known or in_rank.shape != (rows.num_tokens, num_ranks):
            device = rows.device.type
            checks.tensor("num_tokens_per_rank", per_rank, (torch.int32,), (num_ranks,), device)
            checks.tensor("num_tokens_per_expert", per_expert, (torch.int32,), ("num_experts",), device)
            checks.tensor("is_token_in_rank", in_rank, (torch.bool,), (rows.num_tokens, num_ranks), device)
        if self.num_tokens_per_rdma_rank is not None:
            shape, device = (num_rdma_ranks(num_ranks),), rows.device.type
            checks.tensor("num_tokens_per_rdma_rank", self.num_tokens_per_rdma_rank, (torch.int32,), shape, device)
        if (self.topk_idx is None) != (self.topk_weights is None):
            missing = "topk_idx" if self.topk_idx is None else "topk_weights"
            checks.fail(missing, None, "both of topk_idx and topk_weights, or none of them")
        if self.topk_idx is not None:
            check_same_routing(self.topk_idx, self.num_tokens_per_expert.numel(), self.is_token_in_rank)


def dispatch(
    pool: Pool, rows: Rows, routing: Routing, *, expert_alignment: int, num_worst_tokens: int, num_channels: int
) -> tuple[Received, Plans]:
    """Dispatch with a new routing. The arguments and what is received are those of ``Buffer.dispatch``."""
    is_distinct = False
    num_ranks, by_topk, exact = pool.group.size(), routing.topk_idx is not None, envs.deep_ep_exact()
    routing.check(rows, num_ranks)
    if num_worst_tokens and not by_topk:
        checks.fail("num_worst_tokens", num_worst_tokens, "0 without topk_idx")
    if routing.topk_idx is not None:
        idx, num_experts = routing.topk_idx, routing.num_tokens_per_expert.numel()
        is_distinct = exact and num_experts * idx.shape[1] <= MAX_EXPERTS
        if is_distinct:
            idx, num_experts = distinct(idx), num_experts * idx.shape[1]
        else:
            refuse_repeated(idx, _EXACT)
    else:
        idx, num_experts = routing_of_ranks(routing.is_token_in_rank), num_ranks
    key = Key(rows.kind, num_experts, idx.shape[1])
    sized = pool.for_dispatch(key, rows.num_tokens, num_worst_tokens)
    # Make these before the launch: after a wait for counts the device may wait for the host.
    plans = Plans(pool, routing.is_token_in_rank, sized.max_tokens, num_worst_tokens or None)
    items = Items(routing.is_token_in_rank, num_channels, plans)
    out = sized.buffer.dispatch(
        rows.data,
        idx,
        routing.topk_weights,
        layout="rank",
        expert_alignment=expert_alignment,
        max_recv_rows=num_worst_tokens or None,
    )
    plans.begin(key, sized.buffer, out)
    everyone = prefix = None
    if num_ranks <= NVL_PEERS and by_topk and not exact:
        say_missing("rank_prefix_matrix")
    if exact or not by_topk:
        everyone = _gather(pool, routing)
        prefix = everyone[:, :num_ranks].cumsum(0).to(rows.device, torch.int32)
        plans.gathered.append(prefix)
    if num_worst_tokens:
        counts: list[int] = []
    elif everyone is None:
        counts = out.rows_on_host.tolist()  # the host has waited for them
    else:
        counts = _counts(pool, everyone, expert_alignment)
    recv_idx = out.topk_idx if by_topk else None
    if recv_idx is not None and is_distinct:
        recv_idx = recv_idx.div(recv_idx.shape[1], rounding_mode="floor")  # of -1 it is -1
    handle = items.handle(plans.num_rows, prefix)
    return (rows.restore(out.x), recv_idx, out.topk_weights, counts, handle), plans


def _gather(pool: Pool, routing: Routing) -> Tensor:
    """Return every rank's counts by rank and by expert, int64 [num_ranks, num_ranks + num_experts] on the CPU."""
    own = torch.cat([routing.num_tokens_per_rank, routing.num_tokens_per_expert]).cpu().long()
    everyone = own.new_zeros(pool.group.size(), own.numel())
    everyone[pool.group.rank()] = own
    pool.agree(everyone, dist.ReduceOp.SUM, "gather the counts")
    return everyone


def _counts(pool: Pool, everyone: Tensor, expert_alignment: int) -> list[int]:
    """Return the rows of every local expert, rounded up to the alignment, from every rank's counts."""
    num_ranks = pool.group.size()
    mine = everyone[:, num_ranks:].sum(0).view(num_ranks, -1)[pool.group.rank()]
    return [-(-count // expert_alignment) * expert_alignment for count in mine.tolist()]
