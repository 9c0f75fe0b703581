"""Generates text with the model, byte by byte."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def generate(model: nn.Module, prompt: str, num_bytes: int, seq_len: int, seed: int, temperature: float = 0.6) -> str:
    """Return ``prompt`` and ``num_bytes`` more bytes.

    All ranks must call this together, with equally long prompts: every byte dispatches in every layer.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(num_bytes):
        logits = model(tokens[:, -seq_len:].to(device))[0][:, -1].cpu()
        byte = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, byte], 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
