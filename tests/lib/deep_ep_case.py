"""What the tests of deep_ep share: routings of all ranks, and what DeepEP's interface promises of them, densely."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import as_test, load
from torch import Tensor

from ep_dispatcher import reference
from ep_dispatcher.integrations.deep_ep import Buffer, destroy_buffers
from ep_dispatcher.tools.testing import device_of

RANKS, HIDDEN, EXPERTS, TOPK = 4, 256, 8, 3
LOCAL = EXPERTS // RANKS
# Tokens of the ranks, uneven and none at all. The tests of memory and sums want more than one of a rank.
LENGTHS = (13, 0, 7, 20)


@dataclass(frozen=True)
class Case:
    engine: str
    ranks_per_node: int | None = None
    exact: bool = False
    lengths: tuple[int, ...] = LENGTHS
    experts = EXPERTS


def on_ranks(*fields: str, **fixed: Any) -> Callable:
    """Run ``test(rank, case, *parameters)`` on all ranks and engines. The case has these parameters and values."""

    def run(body: Callable, pools: Any, engine: str, **given: Any) -> None:
        case = Case(engine, **{field: given.pop(field) for field in fields}, **fixed)
        pools(RANKS).run(load, body)
        pools(RANKS).run(body, case, *given.values())

    def decorate(body: Callable) -> Callable:
        return as_test(body, ["pools", "engine", *fields, *list(inspect.signature(body).parameters)[2:]], run)

    return decorate


def install(rank: int) -> None:
    """Let programs in this rank find our deep_ep."""
    import ep_dispatcher.integrations.deep_ep as d

    d.install()


@contextlib.contextmanager
def environment(case: Case, **variables: str) -> Iterator[None]:
    """The switches that the case wants, in this rank. The memory of a block without an error goes after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISPATCHER_ENGINE", case.engine)
        patch.setenv("EP_DISPATCHER_DEEP_EP_EXACT", "1" if case.exact else "0")
        patch.setenv("EP_DISPATCHER_RANKS_PER_NODE", str(case.ranks_per_node or ""))
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
        destroy_buffers()


@contextlib.contextmanager
def opened(case: Case, variables: dict[str, str] | None = None, **options) -> Iterator[Buffer]:
    """A buffer in the case's environment, destroyed after a block without an error: that is collective."""
    with environment(case, **(variables or {})):
        buffer = Buffer(dist.group.WORLD, explicitly_destroy=True, **dict(low_latency_mode=True) | options)
        yield buffer
        buffer.destroy()


def routed(buffer: Buffer, topk_idx: Tensor, topk_weights: Tensor | None = None, num_experts: int = EXPERTS) -> dict:
    """The arguments of a dispatch that describe a routing, as programs hand them on; with weights also the choices."""
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    layout = dict(
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )
    return layout if topk_weights is None else layout | dict(topk_idx=topk_idx, topk_weights=topk_weights)


def sent(buffer: Buffer, data: Data, rank: int, **options) -> tuple:
    """What a dispatch of this rank's tokens returns."""
    x, topk_idx, weights = data.of(rank)
    return buffer.dispatch(x, **routed(buffer, topk_idx, weights), **options)


@dataclass
class Data:
    """Everything that all ranks bring, on this rank's device; lists by rank."""

    x: list[Tensor]
    topk_idx: list[Tensor]
    weights: list[Tensor]

    def of(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[rank], self.topk_idx[rank], self.weights[rank]

    def given_weights(self, rank: int) -> Tensor:
        """Those that a combine gives back: 0 where there is no expert."""
        return torch.where(self.topk_idx[rank] >= 0, self.weights[rank], 0.0)

    def in_rank(self, source: int, rank: int) -> Tensor:
        """bool [tokens of source]: has an expert of rank."""
        return (self.topk_idx[source] // LOCAL == rank).any(1)


def make_data(case: Case, rank: int, *, seed: int = 0, dtype=torch.bfloat16, hidden: int = HIDDEN) -> Data:
    """Random rows, distinct experts of every token, some -1, and one token without any expert."""
    generator = torch.Generator().manual_seed(seed)
    device, x, topk_idx, weights = device_of(case.engine, rank), [], [], []
    for length in case.lengths:
        x.append(torch.randn(length, hidden, generator=generator).to(device, dtype))
        chosen = torch.rand(length, EXPERTS, generator=generator).topk(TOPK).indices
        chosen[torch.rand(length, TOPK, generator=generator) < 0.2] = -1
        chosen[length // 2 : length // 2 + 1] = -1
        topk_idx.append(chosen.to(device))
        weights.append(torch.rand(length, TOPK, generator=generator).to(device))
    return Data(x, topk_idx, weights)


def expected(data: Data, rank: int, **layout: Any) -> reference.Dispatched:
    """What the definition gives to a rank, on the CPU."""
    x = [tuple(t.cpu() for t in one) if isinstance(one, tuple) else one.cpu() for one in data.x]
    idx, weights = ([t.cpu() for t in each] for each in (data.topk_idx, data.weights))
    return reference.dispatch(x, idx, weights, num_experts=EXPERTS, **layout)[rank]


def expected_rows(data: Data, rank: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """What rank receives: rows, local experts or -1, weights or 0, tokens of each local expert."""
    out, device = expected(data, rank, layout="rank"), data.x[0].device
    tensors = (t.to(device) for t in (out.x, out.topk_idx, out.topk_weights))
    return *tensors, out.tokens_per_expert.tolist()


def assert_received(received: tuple, data: Data, rank: int, alignment: int = 1, worst: int = 0) -> None:
    """What a dispatch returns is what rank receives. Behind it are rows without experts, up to ``worst``."""
    rows, local_idx, weights, counts = expected_rows(data, rank)
    recv_x, recv_idx, recv_weights, recv_list = received[:4]
    num = len(rows)
    assert torch.equal(recv_x[:num], rows) and recv_x.shape == (worst or num, rows.shape[1])
    assert torch.equal(recv_idx[:num], local_idx) and torch.equal(recv_weights[:num], weights)
    assert recv_idx.shape == (worst or num, TOPK) and bool((recv_idx[num:] == -1).all())
    assert recv_list == ([] if worst else [-(-count // alignment) * alignment for count in counts])


def num_ranks_of(data: Data, source: int) -> Tensor:
    """float32 [tokens, 1]: to how many ranks each token goes."""
    return sum(data.in_rank(source, rank) for rank in range(RANKS))[:, None].float()
