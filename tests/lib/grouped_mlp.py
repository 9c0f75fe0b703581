"""Operands of the experts' grouped GEMMs, and the exact layer."""

import torch

import ep_dispatcher as ep
from lib.activations import right

BEHIND = 3  # rows of no expert, at the end


def ends_of(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def operands(
    device: str, hidden: int, intermediate: int, act: ep.Activation, counts: list[int], dtype=torch.bfloat16
) -> list[torch.Tensor]:
    """rows, row_weights, w1, w2, b1 and b2; the rows of no expert are no numbers."""
    torch.manual_seed(1)
    num_rows, pair, experts = sum(counts) + BEHIND, act.pair * intermediate, len(counts)
    rows, row_weights = torch.randn(num_rows, hidden), torch.rand(num_rows)
    rows[sum(counts) :] = row_weights[sum(counts) :] = float("nan")
    w1, w2 = torch.randn(experts, pair, hidden) / hidden**0.5, torch.randn(experts, hidden, intermediate)
    others = w1, w2 / intermediate**0.5, torch.randn(experts, pair), torch.randn(experts, hidden)
    return [rows.to(device, dtype), row_weights.to(device), *(t.to(device, dtype) for t in others)]


def loss(out: torch.Tensor, counts: list[int]) -> torch.Tensor:
    factors = torch.randn(sum(counts), out.shape[1], generator=torch.Generator().manual_seed(2)).to(out.device)
    return (out[: sum(counts)].double() * factors).sum()


def exact_layer(given: list[torch.Tensor], act: ep.Activation, counts: list[int]) -> list[torch.Tensor]:
    """The result and all gradients in float64, without the rows of no expert."""
    end, parts, begin = sum(counts), [], 0
    leaves = [t.double().requires_grad_() for t in (given[0][:end], given[1][:end], *given[2:])]
    rows, row_weights, w1, w2, *biases = leaves
    for e, count in enumerate(counts):
        group = slice(begin, begin + count)
        hidden = rows[group] @ w1[e].t() + (biases[0][e] if biases else 0)
        out = right(hidden, act) * row_weights[group, None] @ w2[e].t()
        parts.append(out + (row_weights[group, None] * biases[1][e] if biases else 0))
        begin += count
    out = torch.cat(parts)
    loss(out, counts).backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]
