"""A small stand-in of CollectiveX: the base class of its adapters, inputs of a case, and what it checks.

Only the names are those of CollectiveX, where an adapter meets them. What is timed is not here.

**Inputs.** All ranks know all tokens. A row has multiples of 1/64 between -2 and 2; its first 32 elements are +1 or -1
and spell the token's number on all ranks, so that a receiver knows which token a row is, also in float8.

**Dispatch in normal mode.** A rank receives each token that has an expert there once. Its row has the very bits of
the token's (in float8: those after quantizing and dequantizing), and with it come the global numbers of its local
experts and their weights. The counts per expert are those of the routing.

**Dispatch in low-latency mode.** The same, with one row for each pair of a token and a local expert. No weights.

**Combine.** Each expert e has a function f_e(row) = a_e * row + b_e + c_e * pattern. In normal mode the caller gives
for each received row the sum of weight * f_e(row) over its local experts, rounded to bfloat16; the result is their sum
over all ranks in float32. In low-latency mode it gives f_e(row), rounded to bfloat16, for each row; the result is their
sum in float32, each times its weight. The result may differ by less than 8 * 2^-8 of the expected value, and where that
is smaller than 0.02, of 0.02.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

TOLERANCE, SMALLEST = 8 * 2.0**-8, 0.02
NUM_BITS = 32


class EPBackend:
    """The part of the base class that works without a GPU."""

    name = maturity = ""
    SUPPORTED_MODES: tuple = ("normal",)
    SUPPORTED_PRECISIONS: tuple = ("bf16",)
    stage_device_work = requires_fresh_pair = False
    receive_layout, combine_weight_semantics = "token-rank", "unweighted-rank-sum"
    dispatch_dtype = combine_dtype = "bf16"
    dispatch_value_bytes, dispatch_scale_bytes_per_copy = 2, 0

    def __init__(self, args, rank, world_size, local_rank, device):
        self.args, self.rank, self.world_size, self.local_rank, self.device = args, rank, world_size, local_rank, device
        self.mode, self.precision = args.mode, args.precision
        if self.mode not in self.SUPPORTED_MODES or self.precision not in self.SUPPORTED_PRECISIONS:
            raise ValueError(f"{self.name} has no {self.mode} mode in {self.precision}")

    def buffer_cap(self, args):
        return None

    def semantic_payload(self, x):
        return x

    def make_problem(self, T, idx, weights, x):
        inputs = dict(x=x, dispatch_x=x, topk_idx=idx, topk_weights=weights)
        return SimpleNamespace(T=T, oracle_x=self.semantic_payload(x), **inputs)

    def finalize(self, rc):
        return rc


class Tokens:
    """The tokens of all ranks: x bfloat16 [tokens, hidden], topk_idx int64 and topk_weights float32 [tokens, topk]."""

    def __init__(self, args: Any, num_ranks: int, tokens_per_rank: int, device: torch.device, seed: int = 0):
        generator, num_tokens = torch.Generator().manual_seed(seed), num_ranks * tokens_per_rank
        x = torch.randint(-128, 129, (num_tokens, args.hidden), generator=generator) / 64
        x[:, :NUM_BITS] = (torch.arange(num_tokens)[:, None] >> torch.arange(NUM_BITS) & 1) * 2.0 - 1
        scores = torch.rand(num_tokens, args.experts, generator=generator)
        scores[: num_tokens // 3, : args.experts // num_ranks] += 1  # these have no expert on other ranks
        weights = torch.rand(num_tokens, args.topk, generator=generator)
        self.tokens_per_rank, self.experts_per_rank = tokens_per_rank, args.experts // num_ranks
        self.x = x.to(torch.bfloat16).to(device)
        self.topk_idx = scores.topk(args.topk).indices.to(device)
        self.topk_weights = (weights / weights.sum(1, keepdim=True)).to(device)

    def of(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a rank's (topk_idx, topk_weights, x), in the order of make_problem."""
        own = slice(rank * self.tokens_per_rank, (rank + 1) * self.tokens_per_rank)
        return self.topk_idx[own], self.topk_weights[own], self.x[own]


def token_numbers(payload: Tensor) -> Tensor:
    return ((payload[:, :NUM_BITS] > 0).long() << torch.arange(NUM_BITS, device=payload.device)).sum(1)


def apply_experts(rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of weights[n, k] * f_{experts[n, k]}(rows[n]) over k in float32. Weight 0 where there is none."""
    pattern = torch.arange(rows.shape[1], device=rows.device) % 7 / 4 - 0.75
    a, b, c = (1 + experts % 5) / 8, (experts % 7 - 3) / 16, (experts % 3 - 1) / 32
    sums = [(weights * each).sum(1, keepdim=True) for each in (a, b, c)]
    return rows.float() * sums[0] + sums[1] + sums[2] * pattern


def check_normal(backend: Any, problem: Any, tokens: Tokens) -> None:
    """Collective: one dispatch and combine in normal mode."""
    rank, per_rank = backend.rank, tokens.experts_per_rank
    received = backend.dispatch(problem)
    view = backend.inspect_dispatch(problem, received)
    number = token_numbers(view.payload)
    is_local = tokens.topk_idx // per_rank == rank
    assert number.sort().values.tolist() == is_local.any(1).nonzero().flatten().tolist()
    assert torch.equal(view.payload, backend.semantic_payload(tokens.x)[number])
    assert view.expert_ids.shape == view.weights.shape == (number.numel(), tokens.topk_idx.shape[1])
    for given, ids, weights in zip(number.tolist(), view.expert_ids, view.weights):
        right = dict(zip(tokens.topk_idx[given].tolist(), tokens.topk_weights[given].tolist()))
        there = dict(zip(ids.tolist(), weights.tolist()))
        assert there.pop(-1, 0) == 0
        assert there == {expert: weight for expert, weight in right.items() if expert // per_rank == rank}
    assert_counts(view, tokens, rank)

    weighted = apply_experts(view.payload, view.expert_ids, view.weights.masked_fill(view.expert_ids < 0, 0))
    combined = backend.combine_transformed(problem, received, weighted.bfloat16())
    expected = torch.zeros_like(problem.x, dtype=torch.float32)
    for other in range(backend.world_size):
        weights = problem.topk_weights * (problem.topk_idx // per_rank == other)
        expected += apply_experts(problem.oracle_x, problem.topk_idx, weights).bfloat16()
    assert_close(combined, expected)


def check_low_latency(backend: Any, problem: Any, tokens: Tokens) -> None:
    """Collective: one dispatch and combine in low-latency mode."""
    rank, per_rank = backend.rank, tokens.experts_per_rank
    received = backend.dispatch(problem)
    view = backend.inspect_dispatch(problem, received)
    number = token_numbers(view.payload)
    token, k = (tokens.topk_idx // per_rank == rank).nonzero(as_tuple=True)
    right = zip(token.tolist(), tokens.topk_idx[token, k].tolist())
    assert sorted(zip(number.tolist(), view.expert_ids.tolist())) == sorted(right)
    assert torch.equal(view.payload, backend.semantic_payload(tokens.x)[number])
    assert_counts(view, tokens, rank)

    one = torch.ones(number.numel(), 1, device=number.device)
    rows = apply_experts(view.payload, view.expert_ids[:, None], one).bfloat16()
    combined = backend.combine_transformed(problem, received, rows)
    expected = torch.zeros_like(problem.x, dtype=torch.float32)
    for column in range(problem.topk_idx.shape[1]):
        weight = problem.topk_weights[:, column, None]
        message = apply_experts(problem.oracle_x, problem.topk_idx[:, column, None], torch.ones_like(weight))
        expected += weight * message.bfloat16().float()
    assert_close(combined, expected)


def assert_counts(view: Any, tokens: Tokens, rank: int) -> None:
    counts = tokens.topk_idx.flatten().bincount(minlength=tokens.experts_per_rank * (rank + 1))
    own = slice(rank * tokens.experts_per_rank, (rank + 1) * tokens.experts_per_rank)
    assert view.local_expert_counts.tolist() == counts[own].tolist()


def assert_close(combined: Tensor, expected: Tensor) -> None:
    assert combined.shape == expected.shape and combined.dtype == torch.bfloat16
    error = (combined.float() - expected).abs() / expected.abs().clamp_min(SMALLEST)
    assert error.max() < TOLERANCE, f"{error.max()} of the expected values"
