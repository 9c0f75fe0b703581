"""The cases of the benchmark, and the suite of them in docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ep_dispatcher.argument_types import EngineName
from ep_dispatcher.checks import ROW_GRANULARITY, num_scales
from ep_dispatcher.tools.testing import ROUTINGS, make_hot_routing, make_routing

HOT = "hot_rank"
CASE_ROUTINGS = (*ROUTINGS, HOT)
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
# How often an operation moves every received row; the backward of a dispatch counts as a combine and vice versa.
PASSES = dict.fromkeys(OPERATIONS, 1) | {"dispatch+combine": 2, "forward+backward": 4}


@dataclass(frozen=True)
class Case:
    """One configuration. It becomes one JSON file."""

    ranks: int
    engine: EngineName = "cuda"
    tokens: int = 4096  # per rank
    hidden: int = 7168
    experts: int = 256  # of all ranks
    topk: int = 8
    routing: str = "uniform"
    dtype: str = "bfloat16"
    layout: str = "expert"
    sms: int = 24  # multiprocessors of a GPU; the CPU engine has none
    ranks_per_node: int | None = None  # None: one node
    threads: int = 1  # of a rank on the host
    graph: bool = False  # each operation of the engine in a CUDA graph too
    iters: int = 20
    warmup: int = 3
    operations: tuple[str, ...] = OPERATIONS
    others: tuple[str, ...] = (
        "all_to_all",
    )  # "all_to_all", "fast_sum", or names of modules (measurements.measure_module)

    @property
    def name(self) -> str:
        """The name of its file, without the suffix."""
        parts = [f"{self.engine}-{self.ranks}ranks-{self.tokens}tokens-{self.hidden}hidden-{self.experts}experts"]
        parts += [f"top{self.topk}", self.dtype, self.routing, self.layout]
        parts += [f"{self.sms}sms"] if self.engine == "cuda" else []
        parts += [f"{self.ranks_per_node}per_node"] if self.ranks_per_node else []
        return "-".join(parts)

    @property
    def has_float8(self) -> bool:
        return self.dtype == "bfloat16" and self.hidden % ROW_GRANULARITY == 0

    def row_bytes(self, operation: str) -> int:
        if operation in FLOAT8_OPERATIONS:
            return self.hidden + num_scales(self.hidden) * 4
        return self.hidden * getattr(torch, self.dtype).itemsize

    def routing_on_host(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return topk_idx and topk_weights; the same on every machine."""
        sizes = (self.tokens, self.experts, self.topk)
        if self.routing == HOT:
            return make_hot_routing(*sizes, self.ranks, seed=rank)
        topk_idx, topk_weights = make_routing(self.routing, *sizes, seed=rank)
        assert topk_weights is not None
        return topk_idx, topk_weights

    def inputs(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, topk_idx and topk_weights of a rank."""
        topk_idx, topk_weights = self.routing_on_host(rank)
        generator = torch.Generator(device).manual_seed(rank)
        x = torch.randn(self.tokens, self.hidden, generator=generator, dtype=torch.float32, device=device)
        x = x.to(getattr(torch, self.dtype))
        return x, topk_idx.to(device), topk_weights.to(device)


def inputs_of(
    rank: int, device: torch.device, tokens: int, hidden: int, experts: int, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x in bfloat16, topk_idx and topk_weights of a rank, with uniform routing."""
    return Case(1, tokens=tokens, hidden=hidden, experts=experts, topk=topk).inputs(rank, device)


# Cases that run if no sizes are given.
STANDARD = {
    "cpu": Case(4, "cpu", tokens=1024, hidden=1024, experts=64, others=("all_to_all", "fast_sum")),
    "cuda": Case(4),
}


def is_standard(case: Case, *but: str) -> bool:
    """Return whether the case has the sizes of its engine's standard one, except for the fields ``but``."""
    fields = ("tokens", "hidden", "experts", "topk", "routing", "dtype", "layout", "sms")
    standard = STANDARD[case.engine]
    return all(getattr(case, name) == getattr(standard, name) for name in fields if name not in but)


def suite_cases(ranks: int, modules: Sequence[str] = (), **settings) -> Iterator[Case]:
    """Yield the GPU cases of docs/performance.md, the most important first.

    The first two also measure ``modules``. ``settings`` are common to all.
    """
    first = replace(STANDARD["cuda"], ranks=ranks, graph=True, **settings)
    beside = (*first.others, *modules)
    yield replace(first, others=beside)
    yield replace(first, hidden=2048, experts=128, others=beside)
    small = ("dispatch", "combine", "cached dispatch", "dispatch+combine")
    yield replace(first, tokens=128, operations=small)
    yield replace(first, topk=1, graph=False)
    yield replace(first, routing=HOT, graph=False)
    for sms in (8, 12, 16, 32):
        yield replace(first, sms=sms, graph=False, operations=FEW_OPERATIONS, others=())
    growth = (*FEW_OPERATIONS, "dispatch+combine")
    for tokens in (256, 512, 1024, 2048, 8192, 16384, 32768):
        yield replace(first, tokens=tokens, graph=False, operations=growth)
