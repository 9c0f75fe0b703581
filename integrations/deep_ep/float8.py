"""Float8 rows as DeepEP's low-latency dispatch makes them, and their scales as masked grouped GEMMs take them."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_dispatcher.float8 import BLOCK, E4M3_MAX

SMALLEST_AMAX = 1e-4  # DeepEP's, so that no scale is 0
_MANTISSA = 0x007FFFFF  # of a float32
SCALES_OF_INT = 4  # exponents in an int32


def quantize(x: Tensor, *, round_scale: bool) -> tuple[Tensor, Tensor]:
    """scale = max(amax(|block|), 1e-4) / 448;  row = float8_e4m3fn(block * (448 / amax))

    x: bfloat16 [n, hidden], hidden a multiple of 128; scales float32 [n, hidden / 128], with ``round_scale`` the next
    power of two. Numbers that are rounded beyond 448 become 448.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX)
    scales = amax * (1 / E4M3_MAX)
    if round_scale:
        bits = scales.view(torch.int32) + _MANTISSA  # carries into the exponent unless the mantissa is 0
        scales = (bits & ~_MANTISSA).view(torch.float32)
        inverse = scales.reciprocal()
    else:
        inverse = torch.full_like(amax, E4M3_MAX) / amax
    rows = (blocks * inverse).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
    return rows, scales.squeeze(-1)


def packed_exponents(scales: Tensor) -> Tensor:
    """float32 [..., n], powers of two -> their exponents, int32 [..., n / 4] with the first of four in the low byte."""
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8).contiguous()
    return exponents.view(torch.int32)


def column_major(scales: Tensor) -> Tensor:
    """The same values [groups, rows, n], with the rows of a group beside each other in memory."""
    return scales.transpose(1, 2).contiguous().transpose(1, 2)
