"""The Triton kernels of float8_gemm that quantise, alone or after an activation.

They take tiles of 128 x 128 entries, of the rows of one expert. So they read rows once, and write them with scales
along rows, along columns, or both.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ep_dispatcher.float8 import QuantizedRows
from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.float8_gemm import HiddenGrads, QuantizedColumns, QuantizedMatrices, num_blocks
from ep_dispatcher.moe.grouped_gemm import Matrices
from ep_dispatcher.moe.grouped_gemm_kernels import (
    activation_settings,
    activation_value,
    are_aligned,
    find_tile,
    linear_value,
    matrix_addresses,
)

BLOCK: tl.constexpr = tl.constexpr(128)  # entries that share a scale
ACTIVATION_ROWS = 32  # of a tile without columns' scales


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


@triton.jit
def _write_columns(x, block, number, columns, padded, to, scales):
    """Quantise the columns of rows in a block, by 128 x 1, in the transposed copy. What is outside is 0."""
    column = number * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    scale, inverse = _scale_of(tl.max(tl.abs(x), 0))
    at = to + column.to(tl.int64)[None, :] * padded + block * BLOCK + tl.arange(0, BLOCK)[:, None]
    tl.store(at, (x * inverse[None, :]).to(to.dtype.element_ty), inside[None, :])
    tl.store(scales + block.to(tl.int64) * columns + column, scale, inside)


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


def quantize(
    rows: Tensor,
    scales: Tensor | None,
    ends: Tensor,
    pair: QuantizedRows | None,
    columns: QuantizedColumns | None,
) -> None:
    """Write rows, times their scales, with scales along rows, along columns, or both."""
    num_rows, width = rows.shape
    if not num_rows:
        return
    experts = len(ends)
    _quantize[num_blocks(num_rows, experts), triton.cdiv(width, 128)](
        rows,
        scales,
        ends,
        *(pair or (None, None)),
        *(columns or (None, None)),
        num_rows,
        width,
        0 if columns is None else columns.values.shape[1],
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        SCALED=scales is not None,
        ROWS=pair is not None,
        COLUMNS=columns is not None,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _quantize(
    x,
    x_scales,
    ends,
    rows,
    row_scales,
    values,
    column_scales,
    num_rows,
    columns,
    padded,
    experts,
    EXPERTS: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)  # also of all blocks of rows, because all experts begin one
    expert, begin, end, number = find_tile(block, ends, num_rows, experts, 1, EXPERTS, BLOCK)
    if expert >= experts:
        return
    row = begin + number * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_m, inside_n = row < end, column < columns
    tile = tl.load(
        x + row.to(tl.int64)[:, None] * columns + column[None, :], inside_m[:, None] & inside_n[None, :], 0.0
    )
    tile = tile.to(tl.float32)
    if SCALED:
        scale = tl.load(x_scales + row.to(tl.int64) * tl.cdiv(columns, BLOCK) + tl.program_id(1), inside_m, 0)
        tile *= scale[:, None]
    if ROWS:
        _write_rows(tile, row, inside_m, tl.program_id(1), columns, rows, row_scales)
    if COLUMNS:
        _write_columns(tile, block, tl.program_id(1), columns, padded, values, column_scales)


def activate(hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation, out: QuantizedRows) -> None:
    num_rows, columns = out.rows.shape
    if num_rows:
        _activate[triton.cdiv(num_rows, ACTIVATION_ROWS), triton.cdiv(columns, 128)](
            hidden, row_weights, ends[-1:], *out, columns, **activation_settings(activation), TILE_ROWS=ACTIVATION_ROWS
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


def activate_grad(
    grad: Tensor,
    hidden: Tensor,
    row_weights: Tensor,
    ends: Tensor,
    activation: Activation,
    grad_out: Tensor | None,
    bias: Tensor | None,
    out: HiddenGrads,
) -> None:
    """Write all gradients. The sums over a row, in blocks of columns, are added up by another kernel."""
    num_rows, columns = grad.shape
    if not num_rows:
        return
    experts = len(ends)
    blocks = triton.cdiv(columns, 128)
    sums = row_weights.new_empty(num_rows, blocks)
    _activate_grad[num_blocks(num_rows, experts), blocks](
        grad,
        hidden,
        row_weights,
        ends,
        *out.pair,
        *out.columns,
        *out.activated,
        out.exact,
        sums,
        num_rows,
        columns,
        out.columns.values.shape[1],
        experts,
        **activation_settings(activation),
        EXPERTS=triton.next_power_of_2(experts),
        EXACT=out.exact is not None,
        CROSSES=columns % 128 != 0,
        num_warps=8,
    )
    _add_sums[num_rows,](
        sums,
        ends,
        out.grad_row_weights,
        grad_out,
        bias,
        blocks,
        0 if bias is None else bias.shape[1],
        experts,
        BIASED=bias is not None,
        EXPERTS=triton.next_power_of_2(experts),
        SUMS=triton.next_power_of_2(blocks),
        COLUMNS=1024,
    )


@triton.jit
def _load_block(at, number, columns, inside_m, half: tl.constexpr, CROSSES: tl.constexpr):
    """Load a block of a pair's columns, which lie `columns` apart, from where the first of the pair lies.

    half: 1 if the block begins in the second half. CROSSES: a block may begin in one and end in the other
    """
    column = number * BLOCK + tl.arange(0, BLOCK)
    if CROSSES:
        inside = inside_m[:, None] & ((column >= columns) & (column < 2 * columns))[None, :]
        second = tl.load(at + (column - columns)[None, :], inside, 0).to(tl.float32)
        return second + tl.load(at + column[None, :], inside_m[:, None] & (column < columns)[None, :], 0).to(tl.float32)
    return tl.load(at + (column - half * columns)[None, :], inside_m[:, None], 0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _activate_grad(
    grad,
    hidden,
    row_weights,
    ends,
    rows,
    row_scales,
    values,
    column_scales,
    activated,
    activated_scales,
    exact,
    sums,
    num_rows,
    columns,
    padded,
    experts,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMPS: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXACT: tl.constexpr,
    CROSSES: tl.constexpr,
):
    block = tl.program_id(0)
    expert, begin, end, tile = find_tile(block, ends, num_rows, experts, 1, EXPERTS, BLOCK)
    if expert >= experts:
        return
    PAIR: tl.constexpr = 2 if GATED else 1
    blocks = tl.cdiv(columns, BLOCK)
    row = begin + tile * BLOCK + tl.arange(0, BLOCK)
    inside_m = row < end
    weight = tl.load(row_weights + row, inside_m, 0)[:, None]
    of_row = row.to(tl.int64)[:, None]
    grad += of_row * columns
    hidden += of_row * columns * PAIR

    # The activation, and the sums of its products with the gradient.
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = inside_m[:, None] & (column < columns)[None, :]
    given = tl.load(grad + column[None, :], inside, 0).to(tl.float32)
    gate = tl.load(hidden + column[None, :], inside, 0).to(tl.float32)
    value, slope = activation_value(gate, FUNCTION, ALPHA, CLAMPS, LIMIT, BETA)
    if GATED:
        up = tl.load(hidden + columns + column[None, :], inside, 0).to(tl.float32)
        up, up_slope = linear_value(up, FUNCTION, CLAMPS, LIMIT, OFFSET, LINEAR_BETA)
        value = value * up
    tl.store(sums + row.to(tl.int64) * blocks + tl.program_id(1), tl.sum(given * value, 1), inside_m)
    _write_columns(value * weight, block, tl.program_id(1), columns, padded, activated, activated_scales)

    # The gradient of hidden. With a gate a program has two blocks of its columns, and one may cross the middle.
    for half in tl.static_range(PAIR):
        number = tl.program_id(1) + half * blocks
        if number * BLOCK < PAIR * columns:
            given = _load_block(grad, number, columns, inside_m, half, CROSSES) * weight
            gate = _load_block(hidden, number, columns, inside_m, half, CROSSES)
            value, slope = activation_value(gate, FUNCTION, ALPHA, CLAMPS, LIMIT, BETA)
            column = number * BLOCK + tl.arange(0, BLOCK)
            if GATED:
                up = _load_block(hidden + columns, number, columns, inside_m, half, CROSSES)
                up, up_slope = linear_value(up, FUNCTION, CLAMPS, LIMIT, OFFSET, LINEAR_BETA)
                if CROSSES:
                    given *= tl.where((column < columns)[None, :], up * slope, value * up_slope)
                elif half == 0:
                    given *= up * slope
                else:
                    given *= value * up_slope
            else:
                given *= slope
            _write_rows(given, row, inside_m, number, PAIR * columns, rows, row_scales)
            _write_columns(given, block, number, PAIR * columns, padded, values, column_scales)
            if EXACT:
                inside = inside_m[:, None] & (column < PAIR * columns)[None, :]
                tl.store(exact + of_row * (PAIR * columns) + column[None, :], given.to(exact.dtype.element_ty), inside)


@triton.jit
def _add_sums(
    sums,
    ends,
    grad_row_weights,
    grad_out,
    bias,
    blocks,
    wide,
    experts,
    BIASED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SUMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the sums of a row. With a bias add its product with the gradient of the result."""
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    if row < tl.load(ends + experts - 1):
        i = tl.arange(0, SUMS)
        total += tl.sum(tl.load(sums + row * blocks + i, i < blocks, 0))
        if BIASED:
            e = tl.arange(0, EXPERTS)
            expert = tl.sum((tl.load(ends + e, e < experts, 0x7FFFFFFF) <= row).to(tl.int32))
            products = tl.zeros((COLUMNS,), tl.float32)
            for first in range(0, wide, COLUMNS):
                j = first + tl.arange(0, COLUMNS)
                given = tl.load(grad_out + row * wide + j, j < wide, 0).to(tl.float32)
                products += given * tl.load(bias + expert * wide + j, j < wide, 0).to(tl.float32)
            total += tl.sum(products)
    tl.store(grad_row_weights + row, total)
