"""What is measured: cases, and the suite of them that the figures of docs/performance.md come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from ep_dispatcher.float8 import BLOCK
from ep_dispatcher.testing import ROUTINGS, make_hot_routing, make_routing

HOT = "hot_rank"
CASE_ROUTINGS = (*ROUTINGS, HOT)
FORWARD_STEPS, ALL_STEPS = "six steps, forward", "six steps, forward+backward"  # of a dispatcher in Megatron
FEW_OPERATIONS = ("dispatch", "dispatch FP8", "combine", "cached dispatch")
OPERATIONS = (
    "dispatch",
    "dispatch FP8",  # a pair of float8 rows and scales is given
    "dispatch, quantize",  # bfloat16 rows are given, quantize="e4m3_1x128"
    "combine",
    "cached dispatch",
    "dispatch+combine",
    "forward+backward",
)
FLOAT8_OPERATIONS = OPERATIONS[1:3]
# How often every received row crosses, per operation; the backward of a dispatch counts as a combine and vice versa.
PASSES = dict.fromkeys(OPERATIONS, 1) | {"dispatch+combine": 2, "forward+backward": 4, FORWARD_STEPS: 2, ALL_STEPS: 4}
OTHERS = ("all_to_all", "megatron", "deep_ep")


@dataclass(frozen=True)
class Case:
    """One configuration, which becomes one JSON file."""

    ranks: int
    engine: str = "cuda"
    tokens: int = 4096  # per rank
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    routing: str = "uniform"
    dtype: str = "bfloat16"
    layout: str = "expert"
    sms: int = 24
    ranks_per_node: int | None = None  # None: one node
    graph: bool = False  # each operation of the engine in a CUDA graph too
    iters: int = 20
    warmup: int = 3
    operations: tuple[str, ...] = OPERATIONS
    others: tuple[str, ...] = OTHERS  # what the engine is compared with

    @property
    def name(self) -> str:
        fields = asdict(self)
        return (
            "{engine}-{ranks}ranks-{tokens}tokens-{hidden}hidden-{experts}experts-top{topk}-{dtype}-{routing}-{layout}"
            "-{sms}sms"
        ).format(**fields) + (f"-{self.ranks_per_node}per_node" if self.ranks_per_node else "")

    @property
    def has_float8(self) -> bool:
        return self.dtype == "bfloat16" and self.hidden % BLOCK == 0

    def row_bytes(self, operation: str) -> int:
        if operation in FLOAT8_OPERATIONS:
            return self.hidden + self.hidden // BLOCK * 4
        return self.hidden * getattr(torch, self.dtype).itemsize

    def routing_on_host(self, rank: int) -> tuple[Tensor, Tensor]:
        """topk_idx and topk_weights; the same on every machine."""
        sizes = (self.tokens, self.experts, self.topk)
        if self.routing == HOT:
            return make_hot_routing(*sizes, self.ranks, seed=rank)
        return make_routing(self.routing, *sizes, seed=rank)

    def inputs(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """x, topk_idx and topk_weights of a rank."""
        topk_idx, topk_weights = self.routing_on_host(rank)
        generator = torch.Generator(device).manual_seed(rank)
        x = torch.randn(self.tokens, self.hidden, generator=generator, device=device).to(getattr(torch, self.dtype))
        return x, topk_idx.to(device), topk_weights.to(device)


def suite_cases(ranks: int, **settings) -> Iterator[Case]:
    """Every case that docs/performance.md shows, the most important first; ``settings`` are common to all of them."""
    first = Case(ranks, graph=True, **settings)
    yield first
    yield replace(first, hidden=2048, experts=128)
    small = ("dispatch", "combine", "cached dispatch", "dispatch+combine")
    yield replace(first, tokens=128, operations=small, others=("all_to_all",))
    yield replace(first, topk=1, graph=False, others=("all_to_all",))
    yield replace(first, routing=HOT, graph=False, others=("all_to_all",))
    for sms in (8, 12, 16, 32):
        yield replace(first, sms=sms, graph=False, operations=FEW_OPERATIONS, others=())
    growth = (*FEW_OPERATIONS, "dispatch+combine")
    for tokens in (256, 512, 1024, 2048, 8192, 16384, 32768):
        yield replace(first, tokens=tokens, graph=False, operations=growth, others=("all_to_all",))
