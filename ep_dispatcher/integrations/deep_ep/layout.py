"""Counts the tokens of a routing by rank and expert as DeepEP does, and makes routings for our engine."""

from __future__ import annotations

from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.addressable import as_addressable, check_memory
from ep_dispatcher.integrations.deep_ep.config import NVL_PEERS, num_rdma_ranks
from ep_dispatcher.integrations.deep_ep.late_errors import LateErrors, must_host_wait

_OTHER_RANKS = "is_token_in_rank has another routing than topk_idx: it has to be what get_dispatch_layout gives for it"
_OTHER_COUNTS = {
    name: f"{name} has other numbers than those of topk_idx: it has to be what get_dispatch_layout gives for it"
    for name in ("num_tokens_per_rank", "num_tokens_per_expert")
}
_OTHER_SUMS = "num_tokens_per_rank has other numbers than those of is_token_in_rank: the tokens for each rank"
_NO_EXPERT = (
    "topk_idx was given to get_dispatch_layout with an expert that does not exist: -1 (no expert), or below num_experts"
)


class Layout(NamedTuple):
    """How many tokens of this rank go where. The first four are what ``Buffer.get_dispatch_layout`` returns."""

    num_tokens_per_rank: Tensor  # int32 [num_ranks]
    num_tokens_per_rdma_rank: Tensor | None  # int32 [num_ranks / 8]; None with up to 8 ranks
    num_tokens_per_expert: Tensor  # int32 [num_experts]
    is_token_in_rank: Tensor  # bool [num_tokens, num_ranks]
    num_unknown_experts: Tensor  # int32 [2]: entries of topk_idx below -1, and of num_experts or above


class Origin(NamedTuple):
    """What a layout was made of and with, so that a dispatch need not check it again."""

    topk_idx: ReferenceType[Tensor]
    counts: tuple[ReferenceType[Tensor], ReferenceType[Tensor]]
    num_unknown_experts: Tensor
    versions: tuple[int, ...]  # of the topk_idx, and of is_token_in_rank


def dispatch_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count the tokens for every rank and expert. The host does not wait.

        num_tokens_per_expert[e] = entries of topk_idx that are e;  is_token_in_rank[t, r] = token t has an expert of r

    topk_idx: int32 or int64 [num_tokens, num_topk], -1 for none. Experts below -1, or of num_experts and above, are a
    ValueError on a CPU. On a GPU they count as -1 and in ``num_unknown_experts``: the dispatch refuses them.
    """
    checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), ("num_tokens", "num_topk"), topk_idx.device.type)
    check_memory("topk_idx", topk_idx)  # PyTorch does not look, and may end the process
    topk_idx = as_addressable("topk_idx", topk_idx)
    num_experts = checks.integer("num_experts", num_experts, 1)
    if num_experts % num_ranks:
        checks.fail("num_experts", num_experts, f"a multiple of the number of ranks ({num_ranks})")
    expert = topk_idx.long()
    # Few operations: each takes a GPU about 2 us, and the host 5. The first entry of `counted` is for numbers below -1,
    # the second for -1, the last for num_experts and above, because an index out of bounds is a device-side assert.
    counted = expert.new_zeros(num_experts + 3, dtype=torch.int32)
    places = (expert + 2).clamp_(0, num_experts + 2)
    counted.scatter_add_(0, places.flatten(), counted.new_ones(1).expand(expert.numel()))
    num_unknown_experts = counted[:: num_experts + 2]
    if not must_host_wait(expert) and bool(num_unknown_experts.any()):
        token, k = ((expert < -1) | (expert >= num_experts)).nonzero()[0].tolist()
        raise checks.invalid_entry_error((token, k, int(expert[token, k]), False), num_experts)
    ranks = torch.arange(num_ranks, dtype=torch.int64, device=expert.device)
    in_rank = (expert // (num_experts // num_ranks))[:, :, None].eq(ranks).any(1)
    per_node = None
    if num_ranks > NVL_PEERS:
        nodes = in_rank.view(-1, num_rdma_ranks(num_ranks), NVL_PEERS)
        per_node = nodes.any(2).sum(0, dtype=torch.int32)
    return Layout(in_rank.sum(0, dtype=torch.int32), per_node, counted[2:-1], in_rank, num_unknown_experts)


def routing_of_ranks(is_token_in_rank: Tensor) -> Tensor:
    """Return the routing int64 [num_tokens, num_ranks] to the same ranks, with one expert per rank.

    In rank layout it gives the same rows in the same order as the original routing of ``is_token_in_rank``.
    """
    num_ranks = is_token_in_rank.shape[1]
    if num_ranks > checks.MAX_TOPK:
        raise NotImplementedError(
            f"dispatch by is_token_in_rank alone, or of another row size than the handle's: {num_ranks} ranks, and the "
            f"engine takes {checks.MAX_TOPK} choices of a token; give topk_idx"
        )
    ranks = torch.arange(num_ranks, dtype=torch.int64, device=is_token_in_rank.device)
    return ranks.where(is_token_in_rank, -1)


def make_distinct(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Return expert * num_topk + k for every choice: a routing in which no row repeats an expert.

    It leads to the same ranks. ``// num_topk`` gives the expert again. Negative entries stay as they are, and experts
    that do not exist stay above all others, so the engine still refuses them.
    """
    num_topk = topk_idx.shape[1]
    choices = torch.arange(num_topk, dtype=topk_idx.dtype, device=topk_idx.device)
    return (topk_idx.clamp(max=num_experts) * num_topk + choices).where(topk_idx >= 0, topk_idx)


def repeated_expert_error(topk_idx: Tensor, reason: str) -> NotImplementedError | None:
    """Return an error if a token has an expert twice. On a GPU only the engine sees that, and raises the error late.

    The error depends on this rank's data, so other ranks may begin the operation: raise it by ``BufferPool.refuse``.
    """
    if topk_idx.is_cuda:
        return None
    ordered = topk_idx.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        return NotImplementedError(
            f"topk_idx has an expert twice for a token, but an expert may occur only once; {reason}"
        )
    return None


def remember_origin(layout: Layout, topk_idx: Tensor) -> None:
    """Note on a layout from which topk_idx get_dispatch_layout has made it, and the counts that belong to it."""
    in_rank, counts = layout.is_token_in_rank, (ref(layout.num_tokens_per_rank), ref(layout.num_tokens_per_expert))
    versions = version_of(topk_idx), version_of(in_rank)
    in_rank.origin = Origin(ref(topk_idx), counts, layout.num_unknown_experts, versions)  # type: ignore[attr-defined]  # ours


def origin_of(is_token_in_rank: Tensor | None, *counts: Tensor | None) -> Origin | None:
    """Return where a layout is from, if these tensors are from one ``get_dispatch_layout``: their shapes are right."""
    origin = getattr(is_token_in_rank, "origin", None)
    if origin is None or not all(t is not None and made() is t for made, t in zip(origin.counts, counts, strict=True)):
        return None
    return origin


def check_same_routing(
    late: LateErrors, topk_idx: Tensor, per_rank: Tensor, per_expert: Tensor, is_token_in_rank: Tensor
) -> None:
    """Refuse a layout that does not fit ``topk_idx``.

    On a GPU trust a layout that get_dispatch_layout has counted from the same memory; count again for any other.
    """
    origin = origin_of(is_token_in_rank, per_rank, per_expert)
    if origin is not None and must_host_wait(topk_idx):
        counted_from = origin.topk_idx()
        if counted_from is not None and is_same_memory(counted_from, topk_idx):
            if origin.versions == (version_of(counted_from), version_of(is_token_in_rank)):
                return
    expected = dispatch_layout(topk_idx, per_expert.numel(), is_token_in_rank.shape[1])
    late.refuse_unless((expected.is_token_in_rank == is_token_in_rank).all(), _OTHER_RANKS)
    for name, given in (("num_tokens_per_rank", per_rank), ("num_tokens_per_expert", per_expert)):
        late.refuse_unless((getattr(expected, name) == given).all(), _OTHER_COUNTS[name])


def check_without_topk_idx(late: LateErrors, per_rank: Tensor, per_expert: Tensor, is_token_in_rank: Tensor) -> None:
    """Refuse counts that do not fit, and layouts of a topk_idx with unknown experts, which no dispatch would see."""
    origin = origin_of(is_token_in_rank, per_rank, per_expert)
    if origin is not None:
        late.refuse_unless(origin.num_unknown_experts.any().logical_not(), _NO_EXPERT)
    late.refuse_unless((is_token_in_rank.sum(0) == per_rank).all(), _OTHER_SUMS)


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether both are the same elements in memory: the same tensor, or equal views of it."""
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    )


def version_of(t: Tensor) -> int:
    """Return the number of changes in place, as far as PyTorch counts them."""
    return 0 if t.is_inference() else t._version
