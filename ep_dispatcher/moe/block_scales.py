"""Float8 entries that share a scale, in Triton kernels. The bits are those of float8_gemm's loops."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(128)  # entries of a row that share a scale, and that one step of a sum adds


@triton.jit
def scale_of(amax):
    """Return the scale of a block with this absolute maximum, and its inverse.

    The scale is the least power of two, but at least 2^-126, for which amax / scale is at most 448.

    448 is 1.75 * 2^8, so a larger mantissa than 0x600000 carries into the exponent.
    """
    bits = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - 0x04000000
    bits = tl.maximum(bits, 0x00800000)
    scale = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return tl.where(amax < float("inf"), scale, amax), inverse


@triton.jit
def quantize_blocks(x, dtype: tl.constexpr):
    """Return blocks [number, BLOCK] quantized, and their scales [number]."""
    scale, inverse = scale_of(tl.max(tl.abs(x), 1))
    return (x * inverse[:, None]).to(dtype), scale
