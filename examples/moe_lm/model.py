"""A byte-level transformer language model with a mixture-of-experts layer in every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 2
    hidden: int = 128
    num_heads: int = 4
    num_experts: int = 16
    num_topk: int = 2
    intermediate: int = 256  # width inside an expert
    seq_len: int = 128
    seed: int = 0
    dtype: torch.dtype = torch.float32  # of matrix products and of the rows that travel; parameters are float32


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_heads, head_dim = config.num_heads, config.hidden // config.num_heads
        self.cos: Tensor
        self.sin: Tensor
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.arange(config.seq_len)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], 1), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        length, half = x.shape[-2], x.shape[-1] // 2
        return x * self.cos[:length] + x.roll(half, -1) * self.sin[:length]

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """x = x + attention(norm(x)); x = x + moe(norm(x))"""

    def __init__(self, config: ModelConfig, moe: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(config.hidden, bias=False), Attention(config)
        self.moe_norm, self.moe = nn.LayerNorm(config.hidden, bias=False), moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, balance_loss, tokens_per_expert = self.moe(self.moe_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance_loss, tokens_per_expert


class MoELanguageModel(nn.Module):
    """``tokens`` int64 [batch, length] -> logits float32 [batch, length, 256], balance loss, counts [layers, experts]

    ``make_moe(layer)`` makes a block's mixture-of-experts layer. ``config.seed`` alone determines all other parameters,
    so they are the same on every rank.
    """

    def __init__(self, config: ModelConfig, make_moe: Callable[[int], nn.Module]):
        super().__init__()
        self.dtype = config.dtype
        torch.manual_seed(config.seed)
        self.embedding = nn.Embedding(256, config.hidden)
        self.blocks = nn.ModuleList(Block(config, make_moe(layer)) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden, bias=False)
        self.head = nn.Linear(config.hidden, 256, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        balance_losses, tokens_per_expert = [], []
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            x = self.embedding(tokens)
            for block in self.blocks:
                x, balance_loss, counts = block(x)
                balance_losses.append(balance_loss)
                tokens_per_expert.append(counts)
            logits = self.head(self.norm(x)).float()
        return logits, torch.stack(balance_losses).mean(), torch.stack(tokens_per_expert)


def is_expert(name: str) -> bool:
    """Return whether the parameter of this name belongs to an expert, so that only one rank has it."""
    return ".experts." in name
