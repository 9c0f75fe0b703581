"""One training step under expert parallelism: the dense part is data parallel, the experts are sharded.

The loss is the mean of the ranks' losses. So
- a dense parameter's gradient is the mean over the ranks: one all-reduce of one flat bucket;
- an expert's gradient is complete on its rank, because the backward of combine and dispatch brings the gradients of all
  ranks' tokens there; it is only divided by the number of ranks;
- the gradient norm counts a dense parameter once, and the experts of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_lm.model import is_expert


@dataclass(frozen=True)
class StepResult:
    """The figures of one step, the same on every rank."""

    loss: float  # mean over the ranks, nats per byte
    balance_loss: float
    grad_norm: float  # before clipping
    tokens_per_expert: Tensor  # int64 [layers, experts], of all ranks; on the CPU


def backward(
    model: nn.Module, inputs: Tensor, targets: Tensor, balance_coefficient: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of this rank's loss. Return (loss, balance loss, tokens per expert) of this rank."""
    logits, balance_loss, tokens_per_expert = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (loss + balance_coefficient * balance_loss).backward()
    return loss.detach(), balance_loss.detach(), tokens_per_expert


def gradient(p: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter after a backward, in which every parameter takes part."""
    assert p.grad is not None
    return p.grad


def reduce_gradients(model: nn.Module, loss: Tensor, balance_loss: Tensor, counts: Tensor) -> StepResult:
    """Turn every rank's gradients into those of the mean loss, in place, with a single all-reduce.

    Its bucket also carries the losses, the tokens per expert and the experts' squared gradient norm. On a GPU this is
    where the host waits for the step.
    """
    num_ranks = dist.get_world_size()
    dense = [gradient(p) for name, p in model.named_parameters() if not is_expert(name)]
    experts = [gradient(p) for name, p in model.named_parameters() if is_expert(name)]
    torch._foreach_div_(dense + experts, num_ranks)
    scalars = torch.stack([loss / num_ranks, balance_loss / num_ranks, sum_of_squares(experts)])
    bucket = torch.cat([grad.flatten() for grad in dense] + [scalars, counts.flatten().float()])
    dist.all_reduce(bucket)

    *reduced, figures = bucket.split([grad.numel() for grad in dense] + [len(scalars) + counts.numel()])
    for grad, flat in zip(dense, reduced):
        grad.copy_(flat.view_as(grad))
    figures = torch.cat([sum_of_squares(reduced)[None], figures]).cpu()  # one copy, so one wait
    dense_square, mean_loss, mean_balance_loss, expert_square = figures[:4].tolist()
    norm = math.sqrt(dense_square + expert_square)
    return StepResult(mean_loss, mean_balance_loss, norm, figures[4:].long().view_as(counts))


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square().sum()


def learning_rate(peak: float, done: float, warmup: float = 0.05, floor: float = 0.05) -> float:
    """Linear warm-up, then a half cosine down to ``floor * peak``; ``done`` is the share of the run, 0 to 1."""
    if done < warmup:
        return peak * done / warmup
    turn = min(1.0, (done - warmup) / (1 - warmup))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * turn)))


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW for this rank's parameters: the dense ones and its own experts. Matrices decay, norms do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, grad_norm: float, max_norm: float) -> None:
    """Clip the gradients to ``max_norm``, take the optimizer's step, clear the gradients."""
    if grad_norm > max_norm:
        torch._foreach_mul_([gradient(p) for p in model.parameters()], max_norm / grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
