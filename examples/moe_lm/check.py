"""``--check``: the same training without a dispatcher, on one rank, must give the same losses and gradients.

All ranks train the expert-parallel model. Rank 0 also trains a dense model that has every expert. It takes the ranks'
batches one after the other, each with its own load-balancing loss, and minimises their mean. Both models start from the
same weights and see the same text, but each takes its own optimizer steps. So the check covers routing, the
dispatcher's forward and backward, the reduction of gradients, clipping and updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_lm.layer import Expert, Router
from moe_lm.model import ModelConfig, MoELanguageModel, is_expert
from moe_lm.step import backward, gradient, learning_rate, make_optimizer, reduce_gradients, update
from moe_lm.text import RandomWindows

TOLERANCE = 3e-4  # of a tensor's largest entry; measured: 1e-5 to 2.2e-5 (default model, 10 to 16 steps, 3 seeds)

HEADER = """
       loss, nats per byte                         relative difference                           tokens
step  parallel     dense          loss  balance loss     grad norm   dense grads  expert grads  rerouted"""


class DenseMoELayer(nn.Module):
    """The same layer as ``MoELayer``, but with all experts on this rank, and a loop in place of the dispatcher."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.router = Router(config.hidden, config.num_experts, config.num_topk)
        seeds = {e: (config.seed, layer, e) for e in range(config.num_experts)}
        self.experts = nn.ModuleDict(
            {str(e): Expert(config.hidden, config.intermediate, seed) for e, seed in seeds.items()}
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        topk_idx, topk_weights, balance_loss, tokens_per_expert = self.router(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts.values()):
            tokens, ks = (topk_idx == e).nonzero(as_tuple=True)
            y = y.index_add(0, tokens, expert(x[tokens]) * topk_weights[tokens, ks, None])
        return y, balance_loss, tokens_per_expert


def relative_difference(a: Tensor | float, b: Tensor | float) -> float:
    """Return the largest difference over the largest value of ``b``."""
    a, b = (torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in (a, b))
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


def largest(values: Iterable[float]) -> float:
    """Return the maximum, or nan if one is nan. Python's max may miss a nan."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def all_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter's gradient by name on rank 0, with those of experts on other ranks; nothing elsewhere."""
    mine = {name: gradient(p).cpu() for name, p in model.named_parameters() if is_expert(name) or dist.get_rank() == 0}
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered)
    return {name: grad for part in gathered or [] for name, grad in part.items()}


def dense_backward(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], balance_coefficient: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of the mean over the batches; return (mean loss, mean balance loss, tokens per expert)."""
    done = [backward(model, inputs, targets, balance_coefficient) for inputs, targets in batches]
    losses, balance_losses, counts = zip(*done)
    for p in model.parameters():
        gradient(p).div_(len(batches))
    return torch.stack(losses).mean(), torch.stack(balance_losses).mean(), torch.stack(counts).sum(0)


def check(args, config: ModelConfig, model: nn.Module, text: Tensor) -> bool:
    """Train both models for ``args.steps`` steps. Rank 0 prints a table, every rank returns the verdict.

    ``model`` and ``text`` are on the same device; so is the dense model.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    windows = [RandomWindows(text, args.batch, config.seq_len, config.seed, r) for r in range(num_ranks)]
    optimizer = make_optimizer(model, args.weight_decay)
    dense = MoELanguageModel(config, lambda layer: DenseMoELayer(config, layer)).to(text.device)  # rank 0 trains it
    dense_optimizer = make_optimizer(dense, args.weight_decay)
    if rank == 0:
        print(f"Expert parallel over {num_ranks} ranks against one rank without dispatcher, float32.")
        print("Differences are relative to the largest entry of each tensor; the largest of all tensors is shown.")
        print(HEADER)
    worst, rerouted = 0.0, 0
    for step in range(args.steps):
        batches = [w.next() for w in windows]
        lr = learning_rate(args.lr, (step + 1) / args.steps)
        result = reduce_gradients(model, *backward(model, *batches[rank], args.balance))
        gradients = all_gradients(model)
        update(model, optimizer, lr, result.grad_norm, args.clip)
        if rank != 0:
            continue
        loss, balance_loss, counts = dense_backward(dense, batches, args.balance)
        norm = torch.stack([gradient(p).norm() for p in dense.parameters()]).norm().item()
        differences = {name: relative_difference(gradients[name], gradient(p)) for name, p in dense.named_parameters()}
        row = (
            relative_difference(result.loss, loss),
            relative_difference(result.balance_loss, balance_loss),
            relative_difference(result.grad_norm, norm),
            largest(d for name, d in differences.items() if not is_expert(name)),
            largest(d for name, d in differences.items() if is_expert(name)),
        )
        worst = largest((worst, *row))
        moved = int((result.tokens_per_expert - counts.cpu()).abs().sum()) // 2
        rerouted += moved
        cells = "  ".join(f"{value:12.1e}" for value in row)
        print(f"{step:4}  {result.loss:8.5f}  {loss:8.5f}  {cells}  {moved:8}", flush=True)
        update(dense, dense_optimizer, lr, norm, args.clip)
    verdict = [worst <= TOLERANCE]
    dist.broadcast_object_list(verdict)
    if rank == 0:
        if rerouted and not verdict[0]:
            print(
                "\nTokens went to other experts: a bug, or two experts with nearly equal weight (try another --seed)."
            )
        answer = "AGREE" if verdict[0] else "DO NOT AGREE"
        print(f"\n{answer}: largest difference {worst:.1e}, allowed {TOLERANCE:.0e}", flush=True)
    return verdict[0]
