"""Float8 rows with one float32 scale per block of 128 elements of a row. The last block has what is left."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.checks import BLOCK, num_scales

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
SCALES_OF_INT = 4  # packed exponents in an int32
_MANTISSA = 0x007FFFFF  # of a float32


class QuantizedRows(tuple):
    """The pair (rows float8_e4m3fn [n, hidden], scales float32 [n, ceil(hidden / 128)]).

    ``anchor`` is None, or a bfloat16 [n, hidden] tensor without memory of its own. It stands for the exact rows in
    autograd: PyTorch rounds every gradient to its tensor's dtype, so float8 rows cannot carry one. ``dequantize`` uses
    it. A grouped GEMM of your own takes it as an input, and returns the gradient of the dequantised rows for it.
    """

    anchor: Tensor | None

    def __new__(cls, rows: Tensor, scales: Tensor, anchor: Tensor | None = None) -> QuantizedRows:
        pair = super().__new__(cls, (rows, scales))
        pair.anchor = anchor
        return pair

    def __reduce__(self) -> tuple[type, tuple[Tensor, Tensor]]:
        # Copies and pickles are without the anchor, which is part of an autograd graph.
        return QuantizedRows, (self.rows, self.scales)

    @property
    def rows(self) -> Tensor:
        return self[0]

    @property
    def scales(self) -> Tensor:
        return self[1]


def quantize(x: Tensor, *, powers_of_two: bool = False) -> QuantizedRows:
    """scale = max(amax(|block|) / 448, 2^-126);  row = float8_e4m3fn(block / scale)

    x: floating point [n, hidden]. The result has no gradient. Blocks are 1 x 128 as in DeepSeek-V3 (technical report,
    section 3.3.2), and the last one has what is left; the largest magnitude of each becomes 448, the largest of e4m3.
    All steps are in float32. With ``powers_of_two`` a scale is the next power of two, and the largest magnitude at most
    448, as in Transformer Engine's blockwise recipe.

    Raises ValueError for another x.
    """
    _check_floating(x)
    blocks = blocks_of(x.detach())
    amax = blocks.abs().amax(-1, keepdim=True)
    # Divide by a tensor: for a number, PyTorch on GPUs multiplies by its reciprocal and rounds differently.
    scales = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(torch.finfo(torch.float32).tiny)
    if powers_of_two:
        scales = next_power_of_two(scales)
    rows = rows_of((blocks / scales).to(torch.float8_e4m3fn), x.shape[-1])
    return QuantizedRows(rows, scales.squeeze(-1))


def blocks_of(rows: Tensor) -> Tensor:
    """Return rows [..., hidden] as float32 [..., ceil(hidden / 128), 128], with zeros behind the last element."""
    missing, rows = -rows.shape[-1] % BLOCK, rows.float()
    return (torch.nn.functional.pad(rows, (0, missing)) if missing else rows).unflatten(-1, (-1, BLOCK))


def rows_of(blocks: Tensor, hidden: int) -> Tensor:
    """Return what ``blocks_of`` made blocks of: [..., hidden], contiguous."""
    rows = blocks.flatten(-2)
    return rows[..., :hidden].contiguous() if hidden % BLOCK else rows


def next_power_of_two(scales: Tensor) -> Tensor:
    """Round each scale up to a power of two: normal, positive float32 of any shape, or NaN, which stays NaN."""
    bits = scales.view(torch.int32) + _MANTISSA  # carries into the exponent unless the mantissa is 0
    return (bits & ~_MANTISSA).view(torch.float32).where(scales < torch.inf, scales)


def packed_exponents(scales: Tensor) -> Tensor:
    """float32 [..., n], powers of two -> their exponents, int32 [..., n / 4] with the first of four in the low byte."""
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8).contiguous()
    return exponents.view(torch.int32)


def column_major(scales: Tensor) -> Tensor:
    """The same values [groups, rows, n], with the rows of a group beside each other in memory."""
    return scales.transpose(1, 2).contiguous().transpose(1, 2)


def dequantize(pair: tuple[Tensor, Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """row * scale, rounded to ``dtype``: [n, hidden].

    pair: (rows float8_e4m3fn [n, hidden], scales float32 [n, ceil(hidden / 128)]). Differentiable if it comes from
    ``ep.dispatch``.

    Raises ValueError for another pair.
    """
    _check_pair(pair)
    rows, scales = pair
    x = rows_of(blocks_of(rows.detach()) * scales.unsqueeze(-1), rows.shape[-1]).to(dtype)
    anchor = getattr(pair, "anchor", None)
    return x if anchor is None else x + anchor.to(dtype)


# Each returns before any text is made: torch.compile cannot put unknown sizes into a text.


def _check_floating(x: Tensor) -> None:
    given = type(x).__name__
    if isinstance(x, Tensor):
        if x.is_floating_point() and x.dim() > 0:
            return
        given = f"{list(x.shape)} of {x.dtype}"
    checks.fail("x", given, "a floating point tensor [n, hidden]")


def _check_pair(pair: tuple[Tensor, Tensor]) -> None:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair)):
        checks.fail("pair", type(pair).__name__, "two tensors (rows, scales), as ep.quantize returns them")
    rows, scales = pair
    if rows.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and rows.dim() > 0:
        if scales.shape == (*rows.shape[:-1], num_scales(rows.shape[-1])):
            return
    given = f"rows of {rows.dtype} {list(rows.shape)} and scales of {scales.dtype} {list(scales.shape)}"
    allowed = "rows of torch.float8_e4m3fn [n, hidden] and scales of torch.float32 "
    checks.fail("pair", given, allowed + f"[n, ceil(hidden / {BLOCK})]")
