"""The Triton kernels of gradients of weights and biases, sums over the rows of an expert. A program computes a tile.

Experts have as many tiles each, so the host starts as many programs as there are tiles. The tensor memory accelerator
loads the operands, as in grouped_gemm_kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_dispatcher.moe.address_table import address_table
from ep_dispatcher.moe.expert_matrices import BiasGradInputs, ExpertMatrices, WeightGradInputs, num_matrices
from ep_dispatcher.moe.grouped_gemm_kernels import Tile, place_tile, tile_configuration
from ep_dispatcher.moe.kernel_launch import Configuration, Launcher, Matrix, cdiv

# Tiles of outer products, each with the number of rows per expert up to which it is the fastest.
STORED_TILES = {
    64: Tile(64, 128, 64, 4, 2, down=8),
    256: Tile(128, 128, 64, 4, 3, down=4),
    math.inf: Tile(128, 128, 64, 4, 3, down=1024),
}
ADDED_TILES = {
    256: Tile(64, 128, 64, 4, 2, down=4),
    2048: Tile(128, 128, 64, 8, 3, down=1024),
    math.inf: Tile(128, 128, 64, 4, 3, down=1024),
}
BIAS_ROWS, BIAS_COLUMNS = 64, 64  # that one step sums for the gradient of a bias


def outer_products(
    sets: Sequence[WeightGradInputs],
    out: ExpertMatrices,
    *,
    accumulate: bool,
    first_expert: int = 0,
    held: Tensor | None = None,
) -> None:
    """Store in out[e] [n, k] the sum of grad[r] [n] times rows[r] [k] over the rows of e in all sets, or add it.

    first_expert: the expert of out[0]
    held: int32 [len(out), 3], contiguous: leave out[e] as it is if held[e, 0] is negative
    """
    first_grad, first_rows, _ = sets[0]
    n, k, experts = first_grad.shape[1], first_rows.shape[1], num_matrices(out)
    sets = [(grad, rows, ends) for grad, rows, ends in sets if grad.shape[0]]
    if not sets:
        if not accumulate:
            torch._foreach_zero_(list(out))
        return
    tile = _outer_tile(sum([rows.shape[0] for _, rows, _ in sets]), experts, accumulate)
    grad, rows, ends, num_rows = _describe_rows(sets[0], tile)
    addresses, is_aligned = address_table(out, ends.device)
    second_set = _describe_rows(sets[1], tile) if len(sets) > 1 else (None, None, None, None)
    _launch_outer_products(
        (experts * cdiv(n, tile.m) * cdiv(k, tile.n), 1, 1),
        tile_configuration(tile, ACCUMULATE=accumulate, ALIGNED=is_aligned, HAS_SECOND_SET=len(sets) > 1),
        grad,
        rows,
        out[0],
        addresses,
        ends,
        num_rows,
        n,
        k,
        first_expert,
        held,
        *second_set,
    )


def _outer_tile(num_rows: int, experts: int, accumulate: bool) -> Tile:
    tiles = ADDED_TILES if accumulate else STORED_TILES
    return tiles[next(max_rows for max_rows in tiles if num_rows <= max_rows * experts)]


def _describe_rows(inputs: WeightGradInputs, tile: Tile) -> tuple[Matrix, Matrix, Tensor, int]:
    """Return the arguments of `_outer_products` for a set of rows: grad, rows, ends, num_rows."""
    grad, rows, ends = inputs
    return (
        Matrix(grad, list(grad.shape), [grad.stride(0), 1], [tile.k, tile.m]),
        Matrix(rows, list(rows.shape), [rows.stride(0), 1], [tile.k, tile.n]),
        ends,
        grad.shape[0],
    )


@triton.jit
def _expert_rows(expert, ends, num_rows):
    """Return the first row of an expert, and the end of its rows."""
    end = tl.minimum(tl.load(ends + expert), num_rows)
    begin = tl.minimum(tl.load(ends + tl.maximum(expert - 1, 0)), num_rows) * (expert > 0).to(tl.int32)
    return begin, end


@triton.jit
def _add_products(total, grad, rows, begin, end, row, column, BLOCK_K: tl.constexpr):
    """Add the outer products of the rows [begin, end) in a tile at (row, column)."""
    last_step = begin + (end - begin) // BLOCK_K * BLOCK_K
    for r in range(begin, last_step, BLOCK_K):
        total = tl.dot(grad.load([r, row]).T, rows.load([r, column]), total)
    if last_step < end:  # the rows after `end` belong to another expert, or nobody wrote them
        is_own_row = (last_step + tl.arange(0, BLOCK_K) < end)[:, None]
        a = tl.where(is_own_row, grad.load([last_step, row]), 0)
        total = tl.dot(a.T, tl.where(is_own_row, rows.load([last_step, column]), 0), total)
    return total


# Without HAS_SECOND_SET the arguments of the second set are constants, and the kernel has one loop.
@triton.jit(do_not_specialize=["first_expert", "num_second_rows"])
def _outer_products(
    grad,
    rows,
    out,
    addresses,
    ends,
    num_rows,
    n,
    k,
    first_expert,
    held,
    second_grad,
    second_rows,
    second_ends,
    num_second_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOWN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_SECOND_SET: tl.constexpr,
):
    m_tiles, n_tiles = tl.cdiv(n, BLOCK_M), tl.cdiv(k, BLOCK_N)
    pid = tl.program_id(0)
    expert, number = pid // (m_tiles * n_tiles), pid % (m_tiles * n_tiles)
    begin, end = _expert_rows(first_expert + expert, ends, num_rows)
    if HAS_SECOND_SET:
        second_begin, second_end = _expert_rows(first_expert + expert, second_ends, num_second_rows)
    if held is not None:
        if tl.load(held + 3 * expert) < 0:
            return
    if ACCUMULATE:
        is_empty = begin == end
        if HAS_SECOND_SET:
            is_empty &= second_begin == second_end
        if is_empty:
            return
    i, j = place_tile(number, m_tiles, n_tiles, DOWN)
    row, column = i * BLOCK_M, j * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = _add_products(total, grad, rows, begin, end, row, column, BLOCK_K)
    if HAS_SECOND_SET:
        total = _add_products(total, second_grad, second_rows, second_begin, second_end, row, column, BLOCK_K)
    to = tl.load(addresses + expert).to(out.dtype)
    if ALIGNED:  # otherwise the compiler writes entry by entry
        to = tl.multiple_of(to, 16)
    # Store the tile in halves, which takes fewer registers.
    halves = total.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
    for half in tl.static_range(2):
        _store(to, halves[half], row, column + half * (BLOCK_N // 2), n, k, BLOCK_M, BLOCK_N // 2, ACCUMULATE)


@triton.jit
def _store(to, tile, row, column, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Write a tile at (row, column) of the matrix [n, k], or add it to the values there."""
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (row + i < n)[:, None] & (column + j < k)[None, :]
    to += row.to(tl.int64) * k + column + (i[:, None] * k + j[None, :])
    if ACCUMULATE:
        tile += tl.load(to, inside, 0).to(tl.float32)
    tl.store(to, tile.to(to.dtype.element_ty), inside)


def bias_grads(sets: Sequence[BiasGradInputs], out: ExpertMatrices, *, accumulate: bool, first_expert: int = 0) -> None:
    """Store in out[e] [n] the sum of row_weights[r] * grad[r] [n] over the rows of e in all sets, or add it.

    first_expert: the expert of out[0]
    """
    grad, ends, row_weights = sets[0]
    second_set: tuple[Any, ...] = (None, None, None, 0)  # grad, ends, row_weights and the number of rows
    if len(sets) > 1:
        second_grad, second_ends, second_row_weights = sets[1]
        second_set = second_grad, second_ends, second_row_weights, second_grad.shape[0]
    addresses, _ = address_table(out, grad.device)
    n = grad.shape[1]
    _launch_bias_grads(
        (num_matrices(out), cdiv(n, BIAS_COLUMNS), 1),
        _bias_configuration(row_weights is not None, len(sets) > 1, accumulate),
        grad,
        ends,
        row_weights,
        grad.shape[0],
        *second_set,
        out[0],
        addresses,
        n,
        first_expert,
    )


@functools.cache
def _bias_configuration(is_weighted: bool, has_second_set: bool, accumulate: bool) -> Configuration:
    constants = dict(WEIGHTED=is_weighted, HAS_SECOND_SET=has_second_set, ACCUMULATE=accumulate)
    return Configuration(constants | dict(ROWS=BIAS_ROWS, COLUMNS=BIAS_COLUMNS))


@triton.jit
def _add_rows(
    total,
    grad,
    ends,
    row_weights,
    num_rows,
    n,
    first_expert,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Add the rows of an expert to the sums of a block of columns."""
    begin, end = _expert_rows(first_expert + tl.program_id(0), ends, num_rows)
    i, j = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(begin, end, ROWS):
        row = first + i
        rows = tl.load(grad + row.to(tl.int64)[:, None] * n + j[None, :], (row < end)[:, None] & (j < n)[None, :], 0)
        rows = rows.to(tl.float32)
        if WEIGHTED:
            rows *= tl.load(row_weights + row, row < end, 0)[:, None]
        total += tl.sum(rows, 0)
    return total


@triton.jit(do_not_specialize=["num_rows", "num_second_rows", "first_expert"])
def _bias_grads(
    grad,
    ends,
    row_weights,
    num_rows,
    second_grad,
    second_ends,
    second_row_weights,
    num_second_rows,
    out,
    addresses,
    n,
    first_expert,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_SECOND_SET: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    total = tl.zeros((COLUMNS,), tl.float32)
    total = _add_rows(total, grad, ends, row_weights, num_rows, n, first_expert, ROWS, COLUMNS, WEIGHTED)
    if HAS_SECOND_SET:
        total = _add_rows(
            total,
            second_grad,
            second_ends,
            second_row_weights,
            num_second_rows,
            n,
            first_expert,
            ROWS,
            COLUMNS,
            WEIGHTED,
        )
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    to = tl.load(addresses + tl.program_id(0)).to(out.dtype) + j
    if ACCUMULATE:
        total += tl.load(to, j < n, 0).to(tl.float32)
    tl.store(to, total.to(to.dtype.element_ty), j < n)


_launch_outer_products, _launch_bias_grads = Launcher(_outer_products), Launcher(_bias_grads)
