"""Float8 rows with a scale for each block of a row: float32 for 128 elements, or e8m0 for 32 (MXFP8)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.argument_types import Quantize
from ep_dispatcher.checks import BLOCK, E8M0, MXFP8, POWERS_OF_TWO, num_scales

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
SCALES_OF_INT = 4  # packed exponents in an int32
_MANTISSA = 0x007FFFFF  # of a float32


class QuantizedRows(tuple[Tensor, Tensor]):
    """The pair (rows float8_e4m3fn [n, hidden], scales float32 [n, ceil(hidden / 128)] or of MXFP8, see ep.quantize).

    ``anchor`` is None, or a bfloat16 [n, hidden] tensor without memory of its own. It stands for the exact rows in
    autograd: PyTorch rounds every gradient to its tensor's dtype, so float8 rows cannot carry one. ``dequantize`` uses
    it. A grouped GEMM of your own takes it as an input, and returns the gradient of the dequantized rows for it.
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


class Float8Rows(torch.autograd.Function):
    """Links float8 rows to their anchor: a gradient of the rows becomes one of the exact rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scales: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(scales)
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        if not torch.compiler.is_compiling():  # it traces this line even if it never runs
            warnings.warn(
                "a gradient went through float8 rows, and PyTorch rounded it to float8; use ep.dequantize(out.x), or "
                "out.x.anchor as an input of your own operator, to keep it exact",
                stacklevel=2,
            )
        (scales,) = ctx.saved_tensors
        factors = float32_of(scales).unsqueeze(-1)
        exact = torch.where(factors > 0, blocks_of(grad, scales.dtype) / factors, 0)
        return None, None, rows_of(exact, grad.shape[-1]).to(torch.bfloat16)


def quantize(x: Tensor, kind: Quantize = "e4m3_1x128") -> QuantizedRows:
    """scale = max(amax(|block|) / 448, 2^-126);  row = float8_e4m3fn(block / scale)

    x     floating point [n, hidden]. The result has no gradient. All steps are in float32
    kind  "e4m3_1x128": blocks of 128 as in DeepSeek-V3 (technical report, section 3.3.2), and the last one has what is
          left; the largest magnitude of each becomes 448, the largest of e4m3. Scales float32 [n, ceil(hidden / 128)]
          "e4m3_1x128_pow2": a scale is the next power of two, and the largest magnitude at most 448, as in
          Transformer Engine's blockwise recipe
          "mxfp8": blocks of 32, scales float8_e8m0fnu [n, 4 * ceil(hidden / 128)]: hidden / 32, rounded up to a
          multiple of 4 as in Transformer Engine, with 2^-127 behind the last block. A scale is the next power of two,
          from 2^-127 on, as in Transformer Engine's MXFP8 recipe; the one that the OCP MX specification describes
          (section 6.3) is the power of two below, with clamped elements. Zeros have the scale 2^-127, and a NaN makes
          its block and the scale NaN. An infinity becomes 448 * 2^127

    Raises ValueError for another x or kind.
    """
    _check_floating(x)
    checks.one_of("kind", kind, checks.QUANTIZE[1:])
    blocks = blocks_of(x.detach(), E8M0 if kind == MXFP8 else torch.float32)
    amax = blocks.abs().amax(-1, keepdim=True)
    if kind == MXFP8:
        scales = _e8m0_scales(amax)
        blocks = (blocks / float32_of(scales)).clamp(-E4M3_MAX, E4M3_MAX)  # infinities are 448
    else:
        # Divide by a tensor: for a number, PyTorch on GPUs multiplies by its reciprocal and rounds differently.
        scales = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(torch.finfo(torch.float32).tiny)
        if kind == POWERS_OF_TWO:
            scales = next_power_of_two(scales)
        blocks = blocks / scales
    return QuantizedRows(rows_of(blocks.to(torch.float8_e4m3fn), x.shape[-1]), scales.squeeze(-1))


def _e8m0_scales(amax: Tensor) -> Tensor:
    """Return float8_e8m0fnu: the smallest powers of two that are at least amax / 448, which is 1.75 * 2^8."""
    bits = amax.view(torch.int32)
    exponents = (bits + _MANTISSA - 0x600000 >> 23) - 8  # the sum carries if the mantissa is above 1.75
    exponents = exponents.clamp_min(0).where(amax < torch.inf, 254 + amax.isnan().int())
    return exponents.to(torch.uint8).view(E8M0)


def float32_of(scales: Tensor) -> Tensor:
    """Return scales of any of checks.SCALES in float32."""
    return scales if scales.dtype == torch.float32 else scales.view(E8M0).float()


def blocks_of(rows: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Return rows [..., hidden] as float32 [..., scales, 128 or 32], with zeros behind the last element."""
    missing, rows = -rows.shape[-1] % BLOCK, rows.float()
    padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    return padded.unflatten(-1, (-1, BLOCK * scale_dtype.itemsize // 4))


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


def unpacked(scales: Tensor, hidden: int) -> Tensor:
    """int32 [..., n], four exponents each as `packed_exponents` has them -> one scale for each block of a row.

    float32 [..., 4 * n] for blocks of 128. There are more of them in MXFP8, whose scales come back as uint8.
    """
    exponents = scales.contiguous().view(torch.uint8)
    return exponents if _is_packed_mx(exponents.shape[-1], hidden) else float32_of(exponents)


def _is_packed_mx(num_exponents: int, hidden: int) -> bool:
    """Return whether so many exponents of a row are those of MXFP8: one for 32 entries, in whole integers."""
    return num_exponents == num_scales(hidden, E8M0)


def dequantize(pair: tuple[Tensor, Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """row * scale, rounded to ``dtype``: [n, hidden], or [num_local_experts, n, hidden] in decode layout.

    pair: rows and scales as ``ep.quantize`` and dispatches return them. Scales of MXFP8 may be uint8, and those of
    decode layout with scale_format="ue8m0" are int32, with four exponents each. Differentiable if it comes from
    ``ep.dispatch``.

    Raises ValueError for another pair.
    """
    _check_pair(pair)
    rows, scales = pair
    if scales.dtype == torch.int32:
        scales = unpacked(scales, rows.shape[-1])
    blocks = blocks_of(rows.detach(), scales.dtype) * float32_of(scales).unsqueeze(-1)
    x = rows_of(blocks, rows.shape[-1]).to(dtype)
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
        checks.fail("pair", f"of type {type(pair).__name__}", "two tensors (rows, scales), as ep.quantize returns them")
    rows, scales = pair
    if rows.dtype == torch.float8_e4m3fn and rows.dim() > 0 and scales.shape[:-1] == rows.shape[:-1]:
        if scales.dim() == rows.dim() and scales.shape[-1] in _numbers_of_scales(rows.shape[-1], scales.dtype):
            return
    given = f"rows of {rows.dtype} {list(rows.shape)} and scales of {scales.dtype} {list(scales.shape)}"
    allowed = (
        f"rows of torch.float8_e4m3fn [n, hidden] and scales of torch.float32 [n, ceil(hidden / {BLOCK})], of "
        f"{E8M0} or torch.uint8 [n, 4 * ceil(hidden / {BLOCK})], or packed ones of torch.int32: "
        f"[n, ceil(hidden / {BLOCK})] of MXFP8, else [n, hidden / {BLOCK * SCALES_OF_INT}]"
    )
    checks.fail("pair", given, allowed)


def _numbers_of_scales(hidden: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return how many scales of this dtype a row may have."""
    if dtype in checks.SCALES:
        return (num_scales(hidden, dtype),)
    if dtype != torch.int32:
        return ()
    block = BLOCK * SCALES_OF_INT
    of_mx = num_scales(hidden)
    return (of_mx,) if hidden % block else (of_mx, hidden // block)
