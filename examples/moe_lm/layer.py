"""A mixture-of-experts layer whose experts are spread over the ranks of a process group.

    buffer = ep.Buffer(group, hidden=128, num_experts=16, num_topk=2, max_tokens_per_rank=1024, dtype=torch.float32)
    local_experts = range(4 * rank, 4 * rank + 4)  # the buffer gives rank r the r-th part of the experts
    layer = MoELayer(buffer, hidden=128, intermediate=256, num_experts=16, num_topk=2, local_experts=local_experts)
    y, balance_loss, tokens_per_expert = layer(x)  # x and y: [num_tokens, 128] on every rank

One buffer serves any number of layers: each layer's handle has all that its backward needs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ep_dispatcher as ep


class Router(nn.Module):
    """probs = softmax(x @ w); the top-k of them, divided by their sum, are the weights of the token's experts."""

    def __init__(self, hidden: int, num_experts: int, num_topk: int):
        super().__init__()
        self.num_topk = num_topk
        self.gate = nn.Linear(hidden, num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``topk_idx`` and ``topk_weights`` [num_tokens, num_topk], balance loss, tokens per expert [num_experts]."""
        with torch.autocast(x.device.type, enabled=False):  # in bfloat16 many probabilities would be equal
            probs = self.gate(x.float()).softmax(-1)
        topk_probs, topk_idx = probs.topk(self.num_topk, dim=-1)
        topk_weights = topk_probs / topk_probs.sum(-1, keepdim=True)
        chosen = topk_idx.flatten()  # bincount would make the host wait for a GPU
        tokens_per_expert = chosen.new_zeros(probs.shape[1]).scatter_add_(0, chosen, torch.ones_like(chosen))
        return topk_idx, topk_weights, load_balancing_loss(probs, tokens_per_expert), tokens_per_expert


def load_balancing_loss(probs: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """num_experts * sum over experts of (share of the routed tokens) * (mean router probability); 1 when balanced.

    Equation 4 of Fedus, Zoph and Shazeer, "Switch Transformers" (2021, arXiv:2101.03961), without its coefficient. For
    top-k the share is tokens / (num_tokens * num_topk), as in Megatron-core's ``switch_load_balancing_loss_func``; the
    idea is from Lepikhin et al., "GShard" (2020, arXiv:2006.16668). The gradient goes through the probabilities only.
    """
    share = tokens_per_expert / tokens_per_expert.sum()
    return probs.shape[1] * (share * probs.mean(0)).sum()


class Expert(nn.Module):
    """y = gelu(x @ up) @ down. (seed, layer, expert) determine the weights, on any rank."""

    def __init__(self, hidden: int, intermediate: int, seed: tuple[int, int, int]):
        super().__init__()
        generator = torch.Generator().manual_seed(seed[0] * 1_000_000 + seed[1] * 1_000 + seed[2])
        self.up = nn.Parameter(torch.randn(hidden, intermediate, generator=generator) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(intermediate, hidden, generator=generator) * intermediate**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.up, approximate="tanh") @ self.down


class MoELayer(nn.Module):
    """y[t] = sum over k of topk_weights[t, k] * expert[topk_idx[t, k]](x[t]), each expert on the rank that owns it.

    Rows travel in ``dtype``, that of the buffer. Parameters are float32: with bfloat16 call this in torch.autocast.
    """

    def __init__(
        self,
        buffer,
        hidden,
        intermediate,
        num_experts,
        num_topk,
        local_experts,
        seed=0,
        layer=0,
        dtype=torch.float32,
    ):
        super().__init__()
        self.buffer, self.dtype = buffer, dtype
        self.router = Router(hidden, num_experts, num_topk)
        # The keys are global numbers of experts, so that a parameter has the same name on any rank.
        self.experts = nn.ModuleDict({str(e): Expert(hidden, intermediate, (seed, layer, e)) for e in local_experts})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        topk_idx, topk_weights, balance_loss, tokens_per_expert = self.router(x)
        out = ep.dispatch(self.buffer, x.to(self.dtype), topk_idx, topk_weights)
        groups = out.x.split(out.rows_on_host.tolist())  # the rows arrive sorted by local expert
        rows = torch.cat([expert(group) for expert, group in zip(self.experts.values(), groups)])
        y = ep.combine(self.buffer, (rows * out.topk_weights[:, None]).to(self.dtype), out.handle)
        return y, balance_loss, tokens_per_expert
