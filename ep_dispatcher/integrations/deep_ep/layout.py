"""Counts a routing by rank and expert as DeepEP does, and makes routings for our engine."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.config import NVL_PEERS, num_rdma_ranks
from ep_dispatcher.plain import plain, require_memory


def refuse_unless(right: Tensor, mistake: str) -> None:
    """Raise ValueError if ``right``, a bool without dimensions, is false.

    On a GPU this is an assert on the device: a host wait would cost more than the operation.
    """
    if right.is_cuda:
        torch._assert_async(right, mistake)
    elif not right:
        raise ValueError(mistake)


def dispatch_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Count the tokens for every rank and expert. The host does not wait.

        num_tokens_per_expert[e] = entries of topk_idx that are e;  is_token_in_rank[t, r] = token t has an expert of r

    topk_idx: int32 or int64 [num_tokens, num_topk], -1 for none. Return num_tokens_per_rank int32 [num_ranks],
    num_tokens_per_rdma_rank int32 [num_ranks / 8] or None with up to 8 ranks, num_tokens_per_expert int32
    [num_experts], is_token_in_rank bool [num_tokens, num_ranks]. Refuse experts below -1, or of num_experts and above.
    """
    checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), ("num_tokens", "num_topk"), topk_idx.device.type)
    require_memory("topk_idx", topk_idx)  # PyTorch does not look, and may end the process
    topk_idx = plain("topk_idx", topk_idx)
    num_experts = checks.integer("num_experts", num_experts, 1)
    if num_experts % num_ranks:
        checks.fail("num_experts", num_experts, f"a multiple of the number of ranks ({num_ranks})")
    expert = topk_idx.long()
    if not expert.is_cuda:  # on a GPU scatter_add_ itself asserts that its indices are valid
        allowed = f"-1 (no expert), or an expert from 0 to {num_experts - 1}"
        mistake = checks.mistake("topk_idx", "an expert that does not exist", allowed)
        refuse_unless(((expert >= -1) & (expert < num_experts)).all(), mistake)
    # Few operations: each takes a GPU about 2 us, and the host 5. The first entry of `counted` is for -1.
    counted = expert.new_zeros(1 + num_experts, dtype=torch.int32)
    counted.scatter_add_(0, (expert + 1).flatten(), counted.new_ones(1).expand(expert.numel()))
    ranks = torch.arange(num_ranks, dtype=torch.int64, device=expert.device)
    in_rank = (expert // (num_experts // num_ranks))[:, :, None].eq(ranks).any(1)
    per_node = None
    if num_ranks > NVL_PEERS:
        nodes = in_rank.view(-1, num_rdma_ranks(num_ranks), NVL_PEERS)
        per_node = nodes.any(2).sum(0, dtype=torch.int32)
    return in_rank.sum(0, dtype=torch.int32), per_node, counted[1:], in_rank


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


def distinct(topk_idx: Tensor) -> Tensor:
    """Return expert * num_topk + k for every choice, and -1 for none: a routing in which no row repeats an expert.

    It leads to the same ranks. ``// num_topk`` gives the expert again.
    """
    choices = torch.arange(topk_idx.shape[1], dtype=topk_idx.dtype, device=topk_idx.device)
    return (topk_idx * topk_idx.shape[1] + choices).where(topk_idx >= 0, -1)


def refuse_repeated(topk_idx: Tensor, reason: str) -> None:
    """Raise NotImplementedError if a row has an expert twice. On a GPU only the engine sees it, and raises late."""
    if topk_idx.is_cuda:
        return
    ordered = topk_idx.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise NotImplementedError(f"topk_idx: given an expert twice for a token, allowed: once; {reason}")


def remember(is_token_in_rank: Tensor, topk_idx: Tensor, *counts: Tensor) -> None:
    """Note on a layout what get_dispatch_layout made it of and with, so that a dispatch need not check it again."""
    is_token_in_rank.made_with = tuple(map(ref, (topk_idx, *counts)))  # type: ignore[attr-defined]  # our attribute


def is_of_one_layout(is_token_in_rank: Tensor, *counts: Tensor) -> bool:
    """Return whether these tensors are from one ``get_dispatch_layout``: then their shapes are right."""
    known = getattr(is_token_in_rank, "made_with", ())[1:]
    return len(known) == len(counts) and all(made() is t for made, t in zip(known, counts))


def check_same_routing(topk_idx: Tensor, num_experts: int, is_token_in_rank: Tensor) -> None:
    """Refuse an ``is_token_in_rank`` that does not fit ``topk_idx``.

    On a GPU trust a layout that get_dispatch_layout has counted from the same memory; count again for any other.
    """
    if topk_idx.is_cuda and hasattr(is_token_in_rank, "made_with"):
        counted_from = is_token_in_rank.made_with[0]()
        if counted_from is not None and is_same_memory(counted_from, topk_idx):
            return
    *_, expected = dispatch_layout(topk_idx, num_experts, is_token_in_rank.shape[1])
    mistake = checks.mistake(
        "is_token_in_rank", "another routing than topk_idx", "what get_dispatch_layout gives for it"
    )
    refuse_unless((expected == is_token_in_rank).all(), mistake)


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether both are the same elements in memory: the same tensor, or equal views of it."""
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    )


def version_of(t: Tensor) -> int:
    """Return the number of changes in place, as far as PyTorch counts them."""
    return 0 if t.is_inference() else t._version
