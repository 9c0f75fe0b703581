"""Generates text with the model, byte by byte."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module, prompt: str, num_bytes: int, seq_len: int, seed: int, temperature: float = 0.6, max_seconds=15.0
) -> str:
    """Return ``prompt`` and up to ``num_bytes`` more bytes, fewer if rank 0 needs more than ``max_seconds``.

    All ranks must call this together, with equally long prompts: every byte dispatches in every layer.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    start = time.monotonic()
    for i in range(num_bytes):
        late = torch.tensor(time.monotonic() - start > max_seconds)
        if i % 16 == 15:
            dist.broadcast(late, 0)
            if late:
                break
        logits = model(tokens[:, -seq_len:].to(device))[0][:, -1].cpu()
        byte = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, byte], 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
