"""The Triton kernels of float8_gemm: that of grouped_gemm_kernels with a scale for each step of the sum, and those that
quantise, alone or after an activation, by tiles whose columns are a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_dispatcher.float8 import QuantizedRows
from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.float8_gemm import QuantizedMatrices
from ep_dispatcher.moe.grouped_gemm import Matrices
from ep_dispatcher.moe.grouped_gemm_kernels import (
    Tile,
    activation_settings,
    activation_value,
    are_aligned,
    described,
    find_tile,
    linear_value,
    matrix_addresses,
    num_tiles,
    place_tile,
)

BLOCK: tl.constexpr = tl.constexpr(128)  # entries that share a scale, and a step of each sum
# Of nine tiles and numbers of stages on an H100 the fastest, or within 10 % of it, over five sizes of weights.
TILE, SMALL_TILE = Tile(128, 128, 128, 8, 4), Tile(64, 128, 128, 4, 4)
FEW_ROWS = 64  # per expert: for the small tile
TILE_ROWS = 32  # of what quantises


def multiply(
    rows: Tensor,
    scales: Tensor,
    weights: Matrices,
    weight_scales: Matrices,
    ends: Tensor,
    out: Tensor,
    bias: Tensor | None,
    row_weights: Tensor | None,
) -> None:
    """out[r] = rows[r] @ weights[e].T + row_weights[r] * bias[e], all of the dequantised values."""
    num_rows, length = rows.shape
    columns, experts = out.shape[1], len(ends)
    if not num_rows:
        return
    tile = SMALL_TILE if num_rows <= FEW_ROWS * experts else TILE
    descriptor, shifts, first, step = described(weights, [tile.n, tile.k])
    _multiply[num_tiles(num_rows, tile.m, experts) * triton.cdiv(columns, tile.n),](
        TensorDescriptor(rows, [num_rows, length], [rows.stride(0), 1], [tile.m, tile.k]),
        scales,
        descriptor,
        shifts,
        first,
        step,
        weight_scales[0],
        matrix_addresses(weight_scales, rows.device),
        weight_scales[0].stride(0),
        out,
        bias,
        row_weights,
        ends,
        num_rows,
        columns,
        length,
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        DOWN=tile.down,
        TABLE=shifts is not None,
        BIASED=bias is not None,
        WEIGHTED=row_weights is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(do_not_specialize=["num_rows", "first", "step", "weight_scale_stride"])
def _multiply(
    rows,
    scales,
    weights,
    shifts,
    first,
    step,
    weight_scales,
    scale_addresses,
    weight_scale_stride,
    out,
    bias,
    row_weights,
    ends,
    num_rows,
    columns,
    length,
    experts,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOWN: tl.constexpr,
    TABLE: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    tl.static_assert(BLOCK % BLOCK_N == 0 and BLOCK_K == BLOCK, "a step of a tile has one scale of a weight")
    n_tiles = tl.cdiv(columns, BLOCK_N)
    expert, begin, end, number = find_tile(tl.program_id(0), ends, num_rows, experts, n_tiles, EXPERTS, BLOCK_M)
    if expert >= experts:
        return
    i, j = place_tile(number, tl.cdiv(end - begin, BLOCK_M), n_tiles, DOWN)
    row, column = begin + i * BLOCK_M, j * BLOCK_N
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside_m, inside_n = row + m < end, column + n < columns
    shift = tl.load(shifts + expert) if TABLE else first + expert * step
    weight_scale = tl.load(scale_addresses + expert).to(weight_scales.dtype) + column // BLOCK * weight_scale_stride
    row_scale = scales + (row + m).to(tl.int64) * tl.cdiv(length, BLOCK)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, length, BLOCK_K):
        part = tl.dot(rows.load([row, k]), weights.load([shift, column, k]).reshape(BLOCK_N, BLOCK_K).T)
        factor = tl.load(row_scale + k // BLOCK, inside_m, 0) * tl.load(weight_scale + k // BLOCK)
        total += part * factor[:, None]
    if BIASED:
        added = tl.load(bias + expert * columns + column + n, inside_n, 0).to(tl.float32)[None, :]
        if WEIGHTED:
            added = tl.load(row_weights + row + m, inside_m, 0)[:, None] * added
        total += added
    to = out + row.to(tl.int64) * columns + column + (m[:, None] * columns + n[None, :])
    tl.store(to, total.to(out.dtype.element_ty), inside_m[:, None] & inside_n[None, :])


@triton.jit
def _scale_of(amax):
    """The least power of two by which amax is at most 448, not below 2^-126, and its inverse. Bit by bit float8_gemm's.

    448 is 1.75 * 2^8, so a larger mantissa than 0x600000 carries into the exponent.
    """
    bits = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - 0x04000000
    bits = tl.maximum(bits, 0x00800000)
    scale = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return tl.where(amax < float("inf"), scale, amax), inverse


@triton.jit
def _write_rows(x, row, inside_m, number, columns, to, scales):
    """Quantise the columns of rows in a block, by 1 x 128. What is outside is 0."""
    column = number * BLOCK + tl.arange(0, BLOCK)
    scale, inverse = _scale_of(tl.max(tl.abs(x), 1))
    at = to + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, (x * inverse[:, None]).to(to.dtype.element_ty), inside_m[:, None] & (column < columns)[None, :])
    tl.store(scales + row.to(tl.int64) * tl.cdiv(columns, BLOCK) + number, scale, inside_m)


def quantize_weights(weights: Matrices, out: QuantizedMatrices) -> None:
    experts, n, k = out.rows.shape  # type: ignore[union-attr]  # each field is one tensor
    _quantize_weights[triton.cdiv(n, 128) * triton.cdiv(k, 128), experts](
        weights[0],
        matrix_addresses(weights, out.rows[0].device),
        *out,
        n,
        k,
        ALIGNED=are_aligned(weights),
        num_warps=8,
    )


@triton.jit
def _quantize_weights(weights, addresses, rows, scales, transposed, transposed_scales, n, k, ALIGNED: tl.constexpr):
    n_blocks, k_blocks = tl.cdiv(n, BLOCK), tl.cdiv(k, BLOCK)
    i, j = tl.program_id(0) // k_blocks, tl.program_id(0) % k_blocks
    expert = tl.program_id(1).to(tl.int64)
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    inside = (row < n)[:, None] & (column < k)[None, :]
    weight = tl.load(addresses + expert).to(weights.dtype)
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
    x = tl.load(weight + row.to(tl.int64)[:, None] * k + column[None, :], inside, 0).to(tl.float32)
    scale, inverse = _scale_of(tl.max(tl.max(tl.abs(x), 1), 0))
    x = (x * inverse).to(rows.dtype.element_ty)
    tl.store(rows + expert * n * k + row.to(tl.int64)[:, None] * k + column[None, :], x, inside)
    tl.store(transposed + expert * n * k + column.to(tl.int64)[None, :] * n + row[:, None], x, inside)
    tl.store(scales + expert * n_blocks * k_blocks + i * k_blocks + j, scale)
    tl.store(transposed_scales + expert * n_blocks * k_blocks + j * n_blocks + i, scale)


def quantize(rows: Tensor, ends: Tensor, out: QuantizedRows) -> None:
    num_rows, columns = rows.shape
    if num_rows:
        _quantize[triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(columns, 128)](
            rows, ends[-1:], *out, columns, TILE_ROWS=TILE_ROWS
        )


@triton.jit
def _quantize(x, last, rows, scales, columns, TILE_ROWS: tl.constexpr):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_m = row < tl.load(last)
    inside = inside_m[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], inside, 0.0).to(tl.float32)
    _write_rows(tile, row, inside_m, tl.program_id(1), columns, rows, scales)


def dequantize(rows: Tensor, scales: Tensor, ends: Tensor, out: Tensor) -> None:
    num_rows, columns = rows.shape
    if num_rows:
        _dequantize[triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(columns, 128)](
            rows, scales, ends[-1:], out, columns, TILE_ROWS=TILE_ROWS
        )


@triton.jit
def _dequantize(rows, scales, last, out, columns, TILE_ROWS: tl.constexpr):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_m = row < tl.load(last)
    inside = inside_m[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    scale = tl.load(scales + row.to(tl.int64) * tl.cdiv(columns, BLOCK) + tl.program_id(1), inside_m, 0)
    tile = tl.load(rows + at, inside, 0.0).to(tl.float32) * scale[:, None]
    tl.store(out + at, tile.to(out.dtype.element_ty), inside)


def activate(hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation, out: QuantizedRows) -> None:
    num_rows, columns = out.rows.shape
    if num_rows:
        _activate[triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(columns, 128)](
            hidden, row_weights, ends[-1:], *out, columns, **activation_settings(activation), TILE_ROWS=TILE_ROWS
        )


@triton.jit
def _activate(
    hidden,
    row_weights,
    last,
    out,
    scales,
    columns,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMPS: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_m, inside_n = row < tl.load(last), column < columns
    inside = inside_m[:, None] & inside_n[None, :]
    at = hidden + row.to(tl.int64)[:, None] * columns * (2 if GATED else 1) + column[None, :]
    value, _ = activation_value(tl.load(at, inside, 0).to(tl.float32), FUNCTION, ALPHA, CLAMPS, LIMIT, BETA)
    if GATED:
        up = tl.load(at + columns, inside, 0).to(tl.float32)
        up, _ = linear_value(up, FUNCTION, CLAMPS, LIMIT, OFFSET, LINEAR_BETA)
        value = value * up
    value = value * tl.load(row_weights + row, inside_m, 0)[:, None]
    _write_rows(value, row, inside_m, tl.program_id(1), columns, out, scales)
