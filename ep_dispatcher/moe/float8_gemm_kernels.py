"""The Triton kernels that quantize and dequantize for float8_gemm. Its GEMM is a kernel of grouped_gemm_kernels.

A tile is as wide as a block, that is, as the entries of a row that share a scale.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ep_dispatcher.float8 import QuantizedRows
from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.activation_kernels import activation_value, constants_of, linear_value
from ep_dispatcher.moe.address_table import address_table
from ep_dispatcher.moe.block_scales import BLOCK, quantize_blocks, scale_of
from ep_dispatcher.moe.expert_matrices import ExpertMatrices, QuantizedMatrices
from ep_dispatcher.moe.kernel_launch import Configuration, Launcher, cdiv

TILE_ROWS = 32
FLAGGED_TILES = 8  # tiles of a program that may have to skip them, so that few programs start only to return
_DEQUANTIZE = Configuration(dict(TILE_ROWS=TILE_ROWS))


def quantize_weights(weights: ExpertMatrices, out: QuantizedMatrices, skip: Tensor | None = None) -> None:
    experts, n, k = out.rows.shape  # type: ignore[union-attr]  # each field is one tensor
    addresses, is_aligned = address_table(weights, weights[0].device)
    num_tiles = 1 if skip is None else FLAGGED_TILES
    _launch_quantize_weights(
        (cdiv(cdiv(n, 128) * cdiv(k, 128), num_tiles), experts, 1),
        _weight_configuration(is_aligned, num_tiles),
        weights[0],
        addresses,
        *out,
        skip,
        n,
        k,
    )


@functools.cache
def _weight_configuration(is_aligned: bool, num_tiles: int) -> Configuration:
    constants = dict(ALIGNED=is_aligned, NUM_TILES=num_tiles)
    return Configuration(constants, num_warps=8, maxnreg=128)  # two programs fit on a multiprocessor


@triton.jit
def _quantize_weights(
    weights,
    addresses,
    rows,
    scales,
    transposed,
    transposed_scales,
    skip,
    n,
    k,
    ALIGNED: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    if skip is not None:
        if tl.load(skip) != 0:
            return
    n_blocks, k_blocks = tl.cdiv(n, BLOCK), tl.cdiv(k, BLOCK)
    expert = tl.program_id(1).to(tl.int64)
    weight = tl.load(addresses + expert).to(weights.dtype)
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
    rows += expert * n * k
    transposed += expert * n * k
    scales += expert * n_blocks * k_blocks
    transposed_scales += expert * n_blocks * k_blocks
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    first = tl.program_id(0) * NUM_TILES
    for tile in range(first, tl.minimum(first + NUM_TILES, n_blocks * k_blocks)):
        i, j = tile // k_blocks, tile % k_blocks
        inside = (row < n - i * BLOCK)[:, None] & (column < k - j * BLOCK)[None, :]
        begin = i.to(tl.int64) * BLOCK * k + j * BLOCK
        transposed_begin = j.to(tl.int64) * BLOCK * n + i * BLOCK
        x = tl.load(weight + begin + (row[:, None] * k + column[None, :]), inside, 0).to(tl.float32)
        scale, inverse = scale_of(tl.max(tl.max(tl.abs(x), 1), 0))
        x = (x * inverse).to(rows.dtype.element_ty)
        tl.store(rows + begin + (row[:, None] * k + column[None, :]), x, inside)
        tl.store(transposed + transposed_begin + (column[None, :] * n + row[:, None]), x, inside)
        tl.store(scales + i * k_blocks + j, scale)
        tl.store(transposed_scales + j * n_blocks + i, scale)


def quantize(
    rows: Tensor,
    ends: Tensor,
    out: QuantizedRows,
    row_weights: Tensor | None = None,
    activation: Activation | None = None,
) -> None:
    """Quantize rows, or the activation of rows times row_weights."""
    num_rows, columns = out.rows.shape
    if num_rows:
        grid = (cdiv(num_rows, TILE_ROWS), cdiv(columns, 128), 1)
        configuration = _row_configuration(activation)
        _launch_quantize(grid, configuration, rows, row_weights, ends, *out, columns, ends.shape[0])


@functools.cache
def _row_configuration(activation: Activation | None) -> Configuration:
    return Configuration(constants_of(activation) | dict(TILE_ROWS=TILE_ROWS))


def dequantize(rows: Tensor, scales: Tensor, ends: Tensor, out: Tensor) -> None:
    num_rows, columns = rows.shape
    if num_rows:
        grid = (cdiv(num_rows, TILE_ROWS), cdiv(columns, 128), 1)
        _launch_dequantize(grid, _DEQUANTIZE, rows, scales, ends, out, columns, ends.shape[0])


@triton.jit
def _place(ends, experts, columns, TILE_ROWS: tl.constexpr):
    """Return the rows and columns of a tile, which of its rows exist, and which of its entries."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_m = row < tl.load(ends + experts - 1)
    return row, column, inside_m, inside_m[:, None] & (column < columns)[None, :]


@triton.jit
def _quantize(
    x,
    row_weights,
    ends,
    rows,
    scales,
    columns,
    experts,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    row, column, inside_m, inside = _place(ends, experts, columns, TILE_ROWS)
    if FUNCTION is None:
        at = x + row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(at, inside, 0).to(tl.float32)
    else:
        at = x + row.to(tl.int64)[:, None] * columns * (2 if GATED else 1) + column[None, :]
        gate = tl.load(at, inside, 0).to(tl.float32)
        value, _ = activation_value(gate, FUNCTION, ALPHA, LIMIT, BETA)
        if GATED:
            up = tl.load(at + columns, inside, 0).to(tl.float32)
            up, _ = linear_value(up, FUNCTION, LIMIT, OFFSET, LINEAR_BETA)
            value = value * up
        value = value * tl.load(row_weights + row, inside_m, 0)[:, None]
    quantized, scale = quantize_blocks(value, rows.dtype.element_ty)
    tl.store(rows + row.to(tl.int64)[:, None] * columns + column[None, :], quantized, inside)
    tl.store(scales + row.to(tl.int64) * tl.cdiv(columns, BLOCK) + tl.program_id(1), scale, inside_m)


@triton.jit
def _dequantize(rows, scales, ends, out, columns, experts, TILE_ROWS: tl.constexpr):
    row, column, inside_m, inside = _place(ends, experts, columns, TILE_ROWS)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    scale = tl.load(scales + row.to(tl.int64) * tl.cdiv(columns, BLOCK) + tl.program_id(1), inside_m, 0)
    tile = tl.load(rows + at, inside, 0.0).to(tl.float32) * scale[:, None]
    tl.store(out + at, tile.to(out.dtype.element_ty), inside)


_launch_quantize_weights = Launcher(_quantize_weights)
_launch_quantize, _launch_dequantize = Launcher(_quantize), Launcher(_dequantize)
