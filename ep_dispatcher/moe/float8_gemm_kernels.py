"""The Triton kernels of float8_gemm's GEMMs: grouped_gemm_kernels', with a scale for each step of a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_dispatcher.moe.float8_gemm import ColumnSet
from ep_dispatcher.moe.grouped_gemm import Matrices
from ep_dispatcher.moe.grouped_gemm_kernels import (
    Tile,
    are_aligned,
    described,
    find_tile,
    matrix_addresses,
    num_tiles,
    place_tile,
    store_tile,
)

BLOCK: tl.constexpr = tl.constexpr(128)  # entries that share a scale, and a step of each sum
# Not tuned yet.
TILE, SMALL_TILE = Tile(128, 128, 128, 8, 4), Tile(64, 128, 128, 4, 4)
FEW_ROWS = 64  # per expert: for the small tile
OUTER_TILE = Tile(128, 128, 128, 8, 4, down=1024)


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


def outer_products(sets: Sequence[ColumnSet], out: Matrices, *, accumulate: bool) -> None:
    """out[e] [n, k] = the sum of grad[r] [n] times rows[r] [k] over the rows of e in all sets, or that is added."""
    n, k = out[0].shape
    experts, device, tile = len(out), sets[0][2].device, OUTER_TILE
    sets = [one for one in sets if len(one[0].scales)]
    if not sets:
        if not accumulate:
            torch._foreach_zero_(list(out))
        return
    _outer_products[experts * triton.cdiv(n, tile.m) * triton.cdiv(k, tile.n),](
        *_described(sets[0], tile),
        *(_described(sets[1], tile) if len(sets) > 1 else [None] * 5),
        out[0],
        matrix_addresses(out, device),
        n,
        k,
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        DOWN=tile.down,
        ACCUMULATE=accumulate,
        ALIGNED=are_aligned(out),
        MORE=len(sets) > 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _described(one: ColumnSet, tile: Tile) -> list[object]:
    """Return what `_outer_products` takes of a set of rows."""
    (grad, grad_scales), (rows, row_scales), ends = one
    return [
        TensorDescriptor(grad, list(grad.shape), [grad.stride(0), 1], [tile.m, tile.k]),
        grad_scales,
        TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [tile.n, tile.k]),
        row_scales,
        ends,
    ]


@triton.jit
def _blocks_of(expert, ends, experts, EXPERTS: tl.constexpr):
    """The first block of an expert's rows, and the end of its blocks."""
    e = tl.arange(0, EXPERTS)
    end = tl.load(ends + e, e < experts, 0)
    begin = tl.load(ends + e - 1, (e > 0) & (e < experts), 0)
    upto = tl.cumsum(tl.where(e < experts, tl.cdiv(end - begin, BLOCK), 0))
    return tl.sum(tl.where(e == expert - 1, upto, 0)), tl.sum(tl.where(e == expert, upto, 0))


@triton.jit
def _add_products(
    total,
    grad,
    grad_scales,
    rows,
    row_scales,
    first,
    last,
    row,
    column,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the outer products of the rows of some blocks in a tile at (row, column)."""
    i, j = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    for block in range(first, last):
        part = tl.dot(grad.load([row, block * BLOCK]), rows.load([column, block * BLOCK]).T)
        grad_scale = tl.load(grad_scales + block * n + i, i < n, 0)
        row_scale = tl.load(row_scales + block * k + j, j < k, 0)
        total += part * (grad_scale[:, None] * row_scale[None, :])
    return total


# Without MORE there is no second set of rows: its arguments are constants, and the kernel has one loop.
@triton.jit
def _outer_products(
    grad,
    grad_scales,
    rows,
    row_scales,
    ends,
    more_grad,
    more_grad_scales,
    more_rows,
    more_row_scales,
    more_ends,
    out,
    addresses,
    n,
    k,
    experts,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOWN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MORE: tl.constexpr,
):
    m_tiles, n_tiles = tl.cdiv(n, BLOCK_M), tl.cdiv(k, BLOCK_N)
    pid = tl.program_id(0)
    expert, number = pid // (m_tiles * n_tiles), pid % (m_tiles * n_tiles)
    first, last = _blocks_of(expert, ends, experts, EXPERTS)
    count = last - first
    if MORE:
        more_first, more_last = _blocks_of(expert, more_ends, experts, EXPERTS)
        count += more_last - more_first
    if ACCUMULATE:
        if count == 0:
            return
    i, j = place_tile(number, m_tiles, n_tiles, DOWN)
    row, column = i * BLOCK_M, j * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = _add_products(total, grad, grad_scales, rows, row_scales, first, last, row, column, n, k, BLOCK_M, BLOCK_N)
    if MORE:
        total = _add_products(
            total,
            more_grad,
            more_grad_scales,
            more_rows,
            more_row_scales,
            more_first,
            more_last,
            row,
            column,
            n,
            k,
            BLOCK_M,
            BLOCK_N,
        )
    to = tl.load(addresses + expert).to(out.dtype)
    if ALIGNED:  # else the compiler writes entry by entry
        to = tl.multiple_of(to, 16)
    store_tile(to, total, row, column, n, k, BLOCK_M, BLOCK_N, ACCUMULATE)
