"""Experts and dense computations for ep.MoELayer."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lib.autograd import normal
from lib.experts import swiglu_experts

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 16, 24, 8, 3, 20


def gelu_experts(rows: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    hidden = F.gelu(torch.einsum("th,eih->tei", rows, w1) + b1)
    return torch.einsum("tei,ehi->teh", hidden, w2) + b2


def dense(x: Tensor, gate: Tensor, *experts: Tensor, num_topk: int = NUM_TOPK) -> Tensor:
    """The layer in one process that has all experts; those with biases have GELU."""
    rows = x.flatten(0, 1)
    weights, chosen = F.linear(rows, gate).softmax(-1).topk(num_topk)
    run = swiglu_experts if len(experts) == 2 else gelu_experts
    of_chosen = run(rows, *experts).gather(1, chosen[:, :, None].expand(-1, -1, HIDDEN))
    return (of_chosen * (weights / weights.sum(1, keepdim=True))[:, :, None]).sum(1).view(x.shape)


class LoopedExperts(nn.Module):
    """Experts of a user."""

    def __init__(self, num_local: int, device: str):
        super().__init__()
        self.w1 = nn.Parameter(normal((num_local, 2 * INTERMEDIATE, HIDDEN), 1 + dist.get_rank()).to(device) / 4)
        self.w2 = nn.Parameter(normal((num_local, HIDDEN, INTERMEDIATE), 9 + dist.get_rank()).to(device) / 4)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        groups = rows.split([*counts.tolist(), len(rows) - int(counts.sum())])
        matrices = zip(self.w1.to_local()[:, None], self.w2.to_local()[:, None])
        y = [swiglu_experts(x, w1, w2)[:, 0] for x, (w1, w2) in zip(groups, matrices)]
        return torch.cat([*y, groups[-1]])
