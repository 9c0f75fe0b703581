"""Plans which experts get a copy for one microbatch, and which of their rows go there.

    counts[rank] = count_choices(topk_idx, num_experts)      on each rank; then all ranks gather the rows. On GPUs of
                                                             one node Engine.gather_counts does both
    plan = plan_copies(counts, sizes)                                    the same on all ranks
    physical = rewrite(topk_idx, counts, rank, plan, sizes)              instead of topk_idx

A *logical* expert is one of the router's. Expert e has its home on rank ``e // num_local_experts``. *Physical* experts
are where rows go: rank R has those from ``R * (num_local_experts + num_slots)`` on, first its logical experts, then
its slots. A copy lies in a slot of another rank of the home's node, so a token visits the same nodes as without copies.

Everything is integer arithmetic with written tie-breaks, in one header for CPUs and GPUs (csrc/common/balance.h), so
every rank finds the same plan and nothing is broadcast. On a GPU the host waits for nothing, and a CUDA graph can
capture every function of this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_dispatcher import _C_cpu, checks
from ep_dispatcher.addressable import OWN_TYPES, as_addressable, check_writable
from ep_dispatcher.engines.cuda.streams import on_device

_INDICES = (torch.int64, torch.int32)
_COUNTS = (torch.int32,)
_LIMITS = {
    "num_ranks": _C_cpu.BALANCE_MAX_RANKS,
    "ranks_per_node": _C_cpu.BALANCE_MAX_LOCAL,
    "num_experts": _C_cpu.BALANCE_MAX_EXPERTS,
    "redundant_experts_per_rank": _C_cpu.BALANCE_MAX_SLOTS,
}


def why_not(num_ranks: int, ranks_per_node: int, num_experts: int, num_slots: int) -> str | None:
    """Return why experts of a group of this size cannot be balanced, as a sentence; None if they can."""
    for (name, most), given in zip(_LIMITS.items(), (num_ranks, ranks_per_node, num_experts, num_slots)):
        if not 1 <= given <= most:
            return f"{name} is {given}, but balanced experts need 1 to {most}"
    if num_ranks % ranks_per_node:
        return f"ranks_per_node is {ranks_per_node}, but has to divide the {num_ranks} ranks"
    if num_experts % num_ranks:
        return f"num_experts is {num_experts}, but has to be a multiple of the number of ranks ({num_ranks})"
    return None


@dataclass(frozen=True)
class BalanceSizes:
    """The sizes of a group whose experts are balanced, the same on all ranks.

    num_ranks           ranks of the group, at most 512
    ranks_per_node      ranks with mutual access to memory, at most 72
    num_local_experts   logical experts of each rank; all ranks together have 1024 at most
    num_slots           slots of each rank for copies, 1 to 8
    smallest_copy       rows of a copy, at least: fewer do not pay for the weights that travel
    rank_at             ranks in the order of nodes: rank_at[node * ranks_per_node + i]

    Raises ValueError if there can be no such group.
    """

    num_ranks: int
    ranks_per_node: int
    num_local_experts: int
    num_slots: int
    smallest_copy: int
    rank_at: tuple[int, ...]

    def __post_init__(self) -> None:
        reason = why_not(self.num_ranks, self.ranks_per_node, self.num_experts, self.num_slots)
        if reason is not None:
            checks.refuse(reason)
        checks.integer("smallest_copy", self.smallest_copy, 1)
        if sorted(self.rank_at) != list(range(self.num_ranks)):
            checks.refuse(f"rank_at is {self.rank_at}, but has to have each of the {self.num_ranks} ranks once")

    @property
    def num_experts(self) -> int:
        """Logical experts of all ranks."""
        return self.num_ranks * self.num_local_experts

    @property
    def num_physical(self) -> int:
        """Physical experts of all ranks: logical ones and slots."""
        return self.num_ranks * (self.num_local_experts + self.num_slots)

    def numbers(self) -> tuple[int, int, int, int, int]:
        """Return the first arguments of the compiled functions."""
        return self.num_ranks, self.ranks_per_node, self.num_local_experts, self.num_slots, self.smallest_copy


class BalancePlan(NamedTuple):
    """The copies of one microbatch, the same on all ranks.

    copies  int32 [num_ranks, num_slots, 3]: what is in each slot, as (logical expert, begin, end). Of the expert's
            choices, numbered in the order of (source rank, source token), those from begin to end - 1 go to the slot.
            The home keeps those before the first copy. Copies follow by ascending rank, at most one on each. A free
            slot has (-1, 0, 0)
    rows    int32 [2, num_ranks]: rows of each rank before and after
    """

    copies: Tensor
    rows: Tensor


def count_choices(topk_idx: Tensor, num_experts: int, out: Tensor | None = None) -> Tensor:
    """Count how often each expert is chosen.

    topk_idx     int64 or int32 [num_tokens, num_topk]. Entries that are no expert's, such as -1, are left out
    num_experts  logical experts, at most 1024
    out          int32 [num_experts or more], contiguous, on topk_idx's device: a row of a larger tensor, for instance.
                 Elements behind the first num_experts stay as they are

    Returns int32 [num_experts], a part of ``out`` if that is given. Raises ValueError for other tensors.
    """
    checks.integer("num_experts", num_experts, 1, _C_cpu.BALANCE_MAX_EXPERTS)
    device = _check_indices(topk_idx)
    topk_idx = as_addressable("topk_idx", topk_idx)
    if out is None:
        out = torch.empty(num_experts, dtype=torch.int32, device=topk_idx.device)
    else:
        checks.tensor("out", out, _COUNTS, ("num_experts or more",), device)
        check_writable("out", out)
        if out.shape[0] < num_experts or not out.is_contiguous() or out.device != topk_idx.device:
            given = f"{out.shape[0]} elements {out.stride(0)} apart on {out.device}"
            checks.fail("out", given, f"at least {num_experts} contiguous elements on {topk_idx.device}")
    choices = (topk_idx.data_ptr(), topk_idx.itemsize, topk_idx.numel())
    _call("balance_count", topk_idx, *choices, num_experts, out.data_ptr())
    return out[:num_experts]


def plan_copies(counts: Tensor, sizes: BalanceSizes) -> BalancePlan:
    """Plan the copies of one microbatch.

        before = rows of each rank if every choice goes to its home
        if max(before) < 1.05 * mean(before): no copies
        else, in each node, the lowest threshold >= mean(before) that works:
            while a rank has more rows than the threshold: its largest expert gives some to the emptiest rank

    counts  int32 [num_ranks, num_experts or more]: count_choices of every rank; further columns are not read. Rows may
            lie further apart. The counts add up to 2^31 - 1 at most: a CPU checks it, a GPU does not

    Returns the plan, on the same device. Raises ValueError for other tensors, and for too many rows.
    """
    counts = _plain_counts(counts, sizes, counts)
    copies = counts.new_empty((sizes.num_ranks, sizes.num_slots, 3))
    rows = counts.new_empty((2, sizes.num_ranks))
    given = (*sizes.numbers(), sizes.rank_at, counts.data_ptr(), counts.stride(0))
    _call("balance_plan", counts, *given, copies.data_ptr(), rows.data_ptr())
    return BalancePlan(copies, rows)


def rewrite(topk_idx: Tensor, counts: Tensor, rank: int, plan: BalancePlan, sizes: BalanceSizes) -> Tensor:
    """Return the physical expert of each choice of this rank.

    topk_idx  int64 or int32 [num_tokens, num_topk]: the routing that ``counts[rank]`` counts
    counts    int32 [num_ranks, num_experts or more], as for plan_copies
    rank      this rank
    plan      of these counts

    Returns int64 [num_tokens, num_topk]. -1 stays -1. An entry that is no expert's becomes one that is no physical
    expert's: e < -1 stays, and e >= num_experts becomes num_physical + e - num_experts. An expert that a token has
    twice stays one that it has twice. Raises ValueError for other tensors.
    """
    device = _check_indices(topk_idx)
    checks.integer("rank", rank, 0, sizes.num_ranks - 1)
    counts = _plain_counts(counts, sizes, topk_idx)
    checks.tensor("plan.copies", plan.copies, _COUNTS, (sizes.num_ranks, sizes.num_slots, 3), device)
    if plan.copies.device != topk_idx.device:
        checks.fail("plan.copies", f"on {plan.copies.device}", f"on {topk_idx.device}, as topk_idx is")
    topk_idx, copies = as_addressable("topk_idx", topk_idx), as_addressable("plan.copies", plan.copies)
    physical = torch.empty(topk_idx.shape, dtype=torch.int64, device=topk_idx.device)
    routing = (topk_idx.data_ptr(), topk_idx.itemsize, *topk_idx.shape)
    addresses = (counts.data_ptr(), counts.stride(0), copies.data_ptr(), physical.data_ptr())
    _call("balance_rewrite", topk_idx, *sizes.numbers(), rank, *routing, *addresses)
    return physical


def _check_indices(topk_idx: Tensor) -> str:
    """Check a routing. Return the type of its device."""
    device = topk_idx.device.type if isinstance(topk_idx, Tensor) and topk_idx.is_cuda else "cpu"
    checks.tensor("topk_idx", topk_idx, _INDICES, ("num_tokens", "num_topk"), device)
    return device


def _plain_counts(counts: Tensor, sizes: BalanceSizes, beside: Tensor) -> Tensor:
    """Check the counts of all ranks. Return them with adjacent columns."""
    device = "cuda" if isinstance(beside, Tensor) and beside.is_cuda else "cpu"
    checks.tensor("counts", counts, _COUNTS, (sizes.num_ranks, "num_experts or more"), device)
    if counts.shape[1] < sizes.num_experts:
        checks.fail("counts", f"a tensor {list(counts.shape)}", f"at least {sizes.num_experts} columns wide")
    if counts.device != beside.device:
        checks.fail("counts", f"on {counts.device}", f"on {beside.device}, as topk_idx is")
    if type(counts) in OWN_TYPES and counts.stride(1) == 1 and counts.data_ptr() != 0:
        return counts
    return as_addressable("counts", counts)


def _call(name: str, tensor: Tensor, *given: Any) -> None:
    """Call a compiled function, on a GPU with the current stream of the tensor's device."""
    if not tensor.is_cuda:
        getattr(_C_cpu, name)(*given)
        return
    index = tensor.get_device()
    with on_device(index):
        getattr(import_module("ep_dispatcher._C_cuda"), name)(*given, torch._C._cuda_getCurrentRawStream(index))
