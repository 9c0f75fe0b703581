"""Layers with redundant experts, whose routing has hot experts."""

import dataclasses

import torch

from ep_dispatcher.balance.planner import BalanceSizes, count_choices, plan_copies
from lib.autograd import normal
from lib.dispatch_combine import Case, Inputs, make_inputs

HIDDEN, NUM_TOPK, EXPERTS_PER_RANK = 32, 3, 3


def make_skewed_case(
    num_ranks: int,
    ranks_per_node: int,
    dtype: torch.dtype = torch.float32,
    *,
    tokens: str = "uneven",
    seed: int = 3,
    hidden: int = HIDDEN,
) -> tuple[Case, Inputs]:
    """The first experts are the most popular, and a seventh of the choices is -1."""
    sizes = dict(num_topk=NUM_TOPK, experts_per_rank=EXPERTS_PER_RANK, hidden=hidden, tokens=tokens)
    case = Case(num_ranks, ranks_per_node, dtype, **sizes)
    inputs = make_inputs(dataclasses.replace(case, routing="skewed"))
    inputs.x[:] = [normal(x.shape, 20 + seed + rank, dtype) for rank, x in enumerate(inputs.x)]
    for rank, idx in enumerate(inputs.topk_idx):
        is_none = torch.rand(idx.shape, generator=torch.Generator().manual_seed(seed + rank)) < 1 / 7
        idx[is_none] = -1
    return case, inputs


def fullest_over_mean(case: Case, topk_idx: list[torch.Tensor]) -> float:
    """Rows of the fullest rank over the mean of all, where every expert stays at home."""
    chosen = torch.cat([idx[idx >= 0] for idx in topk_idx])
    rows = torch.bincount(chosen // case.experts_per_rank, minlength=case.num_ranks)
    return float(rows.max() / rows.float().mean())


def copies_of_homes(topk_idx: list[torch.Tensor], sizes: BalanceSizes) -> list[int]:
    """How many copies each rank's own experts have on other ranks, as the plan of these routings has them."""
    counts = torch.stack([count_choices(idx, sizes.num_experts) for idx in topk_idx])
    experts = plan_copies(counts, sizes).copies[..., 0]
    homes = experts[experts >= 0] // sizes.num_local_experts
    return torch.bincount(homes, minlength=sizes.num_ranks).tolist()
