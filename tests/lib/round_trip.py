"""One small dispatch and combine on a buffer, checked on every rank against ep_dispatcher.reference.

round_trip(make_buffer(), seed=3)     # collective; AssertionError where a bit is wrong
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import reference
from ep_dispatcher.tools.testing import device_of, make_routing, same_bits, with_negative_zeros

HIDDEN, NUM_EXPERTS, NUM_TOPK, MAX_TOKENS = 64, 12, 3, 32  # 12 experts: groups of 1, 2, 3, 4 and 6 ranks
CONFIG = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, max_tokens_per_rank=MAX_TOKENS)


def make_buffer(group=None, **changes: Any) -> ep.Buffer:
    if changes.get("engine") == "cuda":
        device_of("cuda", torch.distributed.get_rank())
    return ep.Buffer(group, **(dict(CONFIG, timeout_s=30) | changes))


def device(buffer: ep.Buffer) -> str:
    """Where the tensors of its operations are."""
    return "cpu" if buffer.engine == "cpu" else f"cuda:{torch.cuda.current_device()}"


def inputs(rank: int, *, seed: int = 0, dtype=torch.bfloat16, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """What a rank gives to a dispatch: (x, topk_idx, topk_weights)."""
    num_tokens = MAX_TOKENS - 3 * rank
    topk_idx, topk_weights = make_routing("masked", num_tokens, NUM_EXPERTS, NUM_TOPK, seed=100 * seed + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)
    x = with_negative_zeros(x, seed=seed)
    return x.to(device), topk_idx.to(device), topk_weights.to(device)


def outputs(rank: int, num_rows: int, *, seed: int = 0, dtype=torch.bfloat16, device: str = "cpu") -> Tensor:
    """What a rank gives to a combine: the rows of its experts."""
    y = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(9000 + 100 * seed + rank))
    return with_negative_zeros(y, seed=seed).to(dtype).to(device)


def node_of(buffer: ep.Buffer) -> list[int]:
    """The node of every rank."""
    nodes = buffer.topology.nodes
    return [next(n for n, ranks in enumerate(nodes) if rank in ranks) for rank in range(buffer.topology.num_ranks)]


def expected(buffer: ep.Buffer, *, seed: int = 0, max_recv_rows: int | None = None):
    """What dispatch and combine must give on this rank, from the definition."""
    num_ranks, rank, options = buffer.topology.num_ranks, buffer.topology.rank, dict(num_experts=NUM_EXPERTS)
    given = dict(seed=seed, dtype=buffer.config.dtype)
    x, topk_idx, topk_weights = (list(each) for each in zip(*(inputs(r, **given) for r in range(num_ranks))))
    received = reference.dispatch(x, topk_idx, topk_weights, max_recv_rows=max_recv_rows, **options)
    y = [outputs(r, out.x.shape[0], **given) for r, out in enumerate(received)]
    combined = reference.combine(y, received, topk_idx, node_of=node_of(buffer), **options)
    return received[rank], combined[rank][0]


def assert_received(out: ep.DispatchOutput, right: reference.Dispatched) -> None:
    for name in ("x", "topk_weights", "tokens_per_expert", "rows_per_expert"):
        assert same_bits(getattr(out, name).cpu(), getattr(right, name)), name


def round_trip(buffer: ep.Buffer, *, seed: int = 0, max_recv_rows: int | None = None) -> None:
    """Collective: dispatch and combine, and every bit is the definition's."""
    rank, given = buffer.topology.rank, dict(seed=seed, dtype=buffer.config.dtype)
    right, right_sum = expected(buffer, seed=seed, max_recv_rows=max_recv_rows)
    out = buffer.dispatch(*inputs(rank, **given, device=device(buffer)), max_recv_rows=max_recv_rows)
    assert_received(out, right)
    y = outputs(rank, out.x.shape[0], **given, device=device(buffer))
    assert same_bits(buffer.combine(y, out.handle).x.cpu(), right_sum)


def check_new_buffer(group=None, **changes: Any) -> None:
    """Collective: make a buffer, which works."""
    with make_buffer(group, **changes) as buffer:
        round_trip(buffer)
