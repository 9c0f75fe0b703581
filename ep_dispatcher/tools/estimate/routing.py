"""Routings of an estimate, sampled at random: those of the tests, and those with a limit of nodes per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_dispatcher.checks import fail
from ep_dispatcher.tools.benchmark.cases import HOT
from ep_dispatcher.tools.testing import make_hot_routing, make_routing

GROUP_SCORES = ("top2", "max")


@dataclass(frozen=True)
class Sizes:
    """Ranks and tokens of one estimate. Rank = node * gpus_per_node + local index; experts are split evenly.

    Raises ValueError for sizes that no group can have.
    """

    nodes: int
    gpus_per_node: int = 8
    tokens: int = 4096  # per rank
    hidden: int = 7168
    experts: int = 256  # of all ranks together
    topk: int = 8

    def __post_init__(self):
        if self.experts % self.ranks:
            fail("experts", self.experts, f"multiples of the {self.ranks} ranks")
        if self.topk > self.experts:
            fail("topk", self.topk, f"at most the {self.experts} experts")

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts.

    kind         one of ``testing.make_routing``, or "hot_rank" (``testing.make_hot_routing``)
    topk_groups  the most groups of experts of a token; needs kind "uniform". None: no limit
    groups       number of equal groups of experts. None: one per node, so that topk_groups limits nodes
    group_score  as in ``make_limited_routing``
    """

    kind: str = "uniform"
    topk_groups: int | None = None
    groups: int | None = None
    group_score: str = "top2"

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError where these sizes have no such routing."""
        if self.topk_groups is None:
            if self.groups is not None:
                fail("groups", self.groups, "a number of groups only together with topk_groups")
            return
        if self.kind != "uniform":
            fail("routing", repr(self.kind), "'uniform' beside topk_groups")
        groups, limit = self.limits(sizes)
        if sizes.experts % groups:
            fail("groups", groups, f"divisors of the {sizes.experts} experts")
        if limit * (sizes.experts // groups) < sizes.topk:
            allowed = f"as many groups of {sizes.experts // groups} experts as hold the {sizes.topk} of a token"
            fail("topk_groups", self.topk_groups, allowed)

    def limits(self, sizes: Sizes) -> tuple[int, int]:
        """Return the number of groups, and the most of one token: all, if there are fewer than ``topk_groups``."""
        groups = self.groups or sizes.nodes
        assert self.topk_groups is not None
        return groups, min(self.topk_groups, groups)

    def sample(self, sizes: Sizes, seed: int) -> Iterator[Tensor]:
        """Yield topk_idx of every rank in order: int64 [tokens, topk], -1 for no expert."""
        self.check(sizes)
        shape = (sizes.tokens, sizes.experts, sizes.topk)
        for number in range(seed * sizes.ranks, (seed + 1) * sizes.ranks):
            if self.topk_groups is not None:
                yield make_limited_routing(*shape, *self.limits(sizes), self.group_score, seed=number)
            elif self.kind == HOT:
                yield make_hot_routing(*shape, sizes.ranks, seed=number)[0]
            else:
                yield make_routing(self.kind, *shape, seed=number, weights=False)[0]


def make_limited_routing(
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    num_groups: int,
    topk_groups: int,
    group_score: str = "top2",
    *,
    seed: int,
) -> Tensor:
    """Choose num_topk experts of the best topk_groups groups: int64 [num_tokens, num_topk].

        score  = random, independent and equally distributed    [num_tokens, num_experts]
        best   = topk_groups groups of the largest group score
        chosen = num_topk experts of the largest score in them

    The score of a group is the sum of its two largest scores ("top2": node-limited routing of DeepSeek-V3, section
    2.1.2 of its report, arXiv 2412.19437) or its largest ("max": ``tests/test_internode.py`` of DeepEP v1.2.1). Random
    scores are uniform in (0, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = num_tokens, num_groups, num_experts // num_groups
    score = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    of_group = score.amax(2) if group_score == "max" else score.topk(min(2, score.shape[2]), 2).values.sum(2)
    best = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device="cpu")
    best.scatter_(1, of_group.topk(topk_groups, 1).indices, True)
    return score.masked_fill(~best[:, :, None], -1).view(num_tokens, num_experts).topk(num_topk, 1).indices
