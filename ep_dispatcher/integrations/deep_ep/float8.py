"""Float8 rows by the rule of DeepEP's low-latency dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_dispatcher.float8 import BLOCK, E4M3_MAX, next_power_of_two

SMALLEST_AMAX = 1e-4  # DeepEP's, so that no scale is 0


def quantize(x: Tensor, *, round_scale: bool) -> tuple[Tensor, Tensor]:
    """scale = max(amax(|block|), 1e-4) / 448;  row = float8_e4m3fn(block * (448 / amax))

    x: bfloat16 [n, hidden], hidden a multiple of 128. Scales: float32 [n, hidden / 128]; with ``round_scale`` the next
    power of two. Values that rounding would bring above 448 become 448.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX)
    scales = amax * (1 / E4M3_MAX)
    if round_scale:
        scales = next_power_of_two(scales)
        inverse = scales.reciprocal()
    else:
        inverse = torch.full_like(amax, E4M3_MAX) / amax
    rows = (blocks * inverse).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
    return rows, scales.squeeze(-1)
