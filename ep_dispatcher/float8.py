"""Float8 rows with one float32 scale per 128 elements of a row."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448


class QuantizedRows(tuple):
    """The pair (rows float8_e4m3fn [n, hidden], scales float32 [n, hidden / 128]).

    ``anchor`` is None, or a bfloat16 [n, hidden] tensor without memory of its own. It stands for the exact rows in
    autograd: PyTorch rounds every gradient to its tensor's dtype, so float8 rows cannot carry one. ``dequantize`` uses
    it. A grouped GEMM of your own takes it as an input, and returns the gradient of the dequantised rows for it.
    """

    anchor: Tensor | None

    def __new__(cls, rows: Tensor, scales: Tensor, anchor: Tensor | None = None) -> QuantizedRows:
        pair = super().__new__(cls, (rows, scales))
        pair.anchor = anchor
        return pair

    def __reduce__(
        self,
    ) -> tuple[
        type, tuple[Tensor, Tensor]
    ]:  # copies and pickles are without the anchor, which is part of an autograd graph
        return QuantizedRows, (self.rows, self.scales)

    @property
    def rows(self) -> Tensor:
        return self[0]

    @property
    def scales(self) -> Tensor:
        return self[1]


def quantize(x: Tensor) -> QuantizedRows:
    """scale = max(amax(|block|) / 448, 2^-126);  row = float8_e4m3fn(block / scale)

    x: floating point [n, hidden], hidden a multiple of 128. The result has no gradient. Blocks are 1 x 128 as in
    DeepSeek-V3 (technical report, section 3.3.2); the largest magnitude of each becomes 448, the largest of e4m3. All
    steps are in float32.
    """
    blocks = x.detach().float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    # Divide by a tensor: for a number, PyTorch on GPUs multiplies by its reciprocal and rounds differently.
    scales = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(torch.finfo(torch.float32).tiny)
    rows = (blocks / scales).to(torch.float8_e4m3fn).flatten(-2)
    return QuantizedRows(rows, scales.squeeze(-1))


def dequantize(pair: tuple[Tensor, Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """row * scale, rounded to ``dtype``: [n, hidden].

    pair: (rows float8_e4m3fn [n, hidden], scales float32 [n, hidden / 128]). Differentiable if the pair comes from
    ``ep.dispatch``.
    """
    rows, scales = pair
    x = (rows.detach().float().unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)).flatten(-2).to(dtype)
    anchor = getattr(pair, "anchor", None)
    return x if anchor is None else x + anchor.to(dtype)
