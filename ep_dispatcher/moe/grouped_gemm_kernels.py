"""The Triton kernels of grouped_gemm: one tile of the result per program, which finds its expert by itself.

The host does not know how many rows an expert has. So it starts as many programs as there can be tiles, and those that
find none end at once. Programs start in the order of their numbers as multiprocessors become free: a kernel of other
work that holds some of them, such as a dispatch, delays no tile of its own.

Operands come through the tensor memory accelerator, tile by tile. It reads matrices whose rows begin at multiples of
16 bytes. A tile at the end of an expert's rows reads on into the next expert's; what comes from there is not stored.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_dispatcher.moe.grouped_gemm import Matrices, RowSet, Stack, stack_in_place


class Tile(NamedTuple):
    """Rows and columns of the result in a tile, entries of the sums in a step, and how the compiler spreads them.

    ``down``: so many tiles follow each other down a column of tiles, then come those of the next column.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    down: int = 16


# The fastest on H200 over the cases of benchmarks/grouped_gemm.py.
TRANSPOSED_TILE, TILE, SMALL_TILE = Tile(128, 128, 64, 4, 4), Tile(128, 256, 64, 8, 3), Tile(64, 128, 64, 4, 4)
FEW_ROWS = 64  # per expert: for the small tile
# Of outer products, by the rows per expert up to which a tile is the fastest.
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
SWIGLU_COLUMNS = 1024


def stacked(weights: Matrices) -> Stack:
    """The weights as one matrix where they lie, if they lie at equal distances; else a copy."""
    stack = stack_in_place(weights)
    if stack is None:
        n = weights[0].shape[0]
        stack = Stack(torch.stack(tuple(weights)), n * len(weights), 0, n)
    return stack


def multiply(rows: Tensor, weights: Matrices, ends: Tensor, out: Tensor, *, transposed: bool) -> None:
    """out[r] = rows[r] @ weights[e].T, or rows[r] @ weights[e] where not `transposed`."""
    num_rows, length = rows.shape
    columns, experts = out.shape[1], len(ends)
    if not num_rows:
        return
    stack = stacked(weights)
    tile = _tile(num_rows, experts, transposed)
    block = [tile.n, tile.k] if transposed else [tile.k, tile.n]
    wide = stack.base.shape[-1]
    _multiply[_num_tiles(num_rows, tile.m, experts) * triton.cdiv(columns, tile.n),](
        TensorDescriptor(rows, [num_rows, length], [rows.stride(0), 1], [tile.m, tile.k]),
        TensorDescriptor(stack.base, [stack.num_rows, wide], [wide, 1], block),
        out,
        ends,
        num_rows,
        columns,
        length,
        stack.first,
        stack.step,
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        DOWN=tile.down,
        TRANSPOSED=transposed,
        MASKS=not transposed and length % tile.k != 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _tile(num_rows: int, experts: int, transposed: bool) -> Tile:
    if num_rows <= FEW_ROWS * experts:
        return SMALL_TILE
    return TRANSPOSED_TILE if transposed else TILE


def _num_tiles(num_rows: int, size: int, experts: int) -> int:
    """The most tiles along the rows: each expert can begin one more."""
    return num_rows // size + min(experts, num_rows)


@triton.jit
def _find(pid, ends, num_rows, experts, others, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Find a tile by its number: its expert, the expert's first row and end, and the number within the expert.

    `others` are the tiles beside each other. The expert is `experts` where there is no such tile.
    """
    e = tl.arange(0, EXPERTS)
    end = tl.minimum(tl.load(ends + e, e < experts, 0), num_rows)
    begin = tl.minimum(tl.load(ends + e - 1, (e > 0) & (e < experts), 0), num_rows)
    tiles = tl.where(e < experts, tl.cdiv(end - begin, BLOCK_M) * others, 0)
    upto = tl.cumsum(tiles)
    expert = tl.minimum(tl.sum((upto <= pid).to(tl.int32)), experts)
    here = e == expert
    first = tl.sum(tl.where(here, begin, 0))
    last = tl.sum(tl.where(here, end, 0))
    return expert, first, last, pid - tl.sum(tl.where(here, upto - tiles, 0))


# Numbers that change from step to step make no kernel of their own.
@triton.jit
def _place(number, m_tiles, n_tiles, DOWN: tl.constexpr):
    """The row and the column of a tile, among tiles. Tiles that run at the same time read the same lines."""
    first = number // (DOWN * n_tiles) * DOWN
    number -= first * n_tiles
    in_column = tl.minimum(m_tiles - first, DOWN)
    return first + number % in_column, number // in_column


@triton.jit(do_not_specialize=["num_rows", "first_weight", "weight_step"])
def _multiply(
    rows,
    weights,
    out,
    ends,
    num_rows,
    columns,
    length,
    first_weight,
    weight_step,
    experts,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOWN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MASKS: tl.constexpr,
):
    n_tiles = tl.cdiv(columns, BLOCK_N)
    expert, begin, end, number = _find(tl.program_id(0), ends, num_rows, experts, n_tiles, EXPERTS, BLOCK_M)
    if expert >= experts:
        return
    i, j = _place(number, tl.cdiv(end - begin, BLOCK_M), n_tiles, DOWN)
    row, column = begin + i * BLOCK_M, j * BLOCK_N
    weight = first_weight + expert * weight_step
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, length, BLOCK_K):
        a = rows.load([row, k])
        if TRANSPOSED:
            total = tl.dot(a, weights.load([weight + column, k]).T, total)
        else:
            b = weights.load([weight + k, column])
            if MASKS:  # rows of the next expert's weights: 0 times what they hold could be no number
                b = tl.where((k + tl.arange(0, BLOCK_K) < length)[:, None], b, 0)
            total = tl.dot(a, b, total)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (row + m < end)[:, None] & (column + n < columns)[None, :]
    to = out + row.to(tl.int64) * columns + column + (m[:, None] * columns + n[None, :])
    tl.store(to, total.to(out.dtype.element_ty), inside)


def outer_products(
    grad: Tensor, rows: Tensor, ends: Tensor, out: Matrices, *, accumulate: bool, more: RowSet | None = None
) -> None:
    """out[e] [n, k] = the sum of grad[r] [n] times rows[r] [k] over the rows of e, or that is added.

    more: a second set of rows. They are added to the sums of the first, before these are rounded.
    """
    n, k, experts = grad.shape[1], rows.shape[1], len(out)
    sets = [one for one in ((grad, rows, ends), more) if one is not None and one[0].shape[0]]
    num_rows = sum(one[0].shape[0] for one in sets)
    tiles = ADDED_TILES if accumulate else STORED_TILES
    tile = next(tile for most, tile in tiles.items() if num_rows <= most * experts)
    if not sets:
        if not accumulate:
            torch._foreach_zero_(list(out))
        return
    first, second = _described(sets[0], tile), (_described(sets[1], tile) if len(sets) > 1 else (None,) * 4)
    _outer_products[experts * triton.cdiv(n, tile.m) * triton.cdiv(k, tile.n),](
        *first[:2],
        out[0],
        _addresses(out, rows.device),
        *first[2:],
        n,
        k,
        *second,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        DOWN=tile.down,
        ACCUMULATE=accumulate,
        ALIGNED=_are_aligned(out),
        MORE=len(sets) > 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _described(rows_of: RowSet, tile: Tile) -> tuple[TensorDescriptor, TensorDescriptor, Tensor, int]:
    """Return what `_outer_products` takes of a set of rows."""
    grad, rows, ends = rows_of
    return (
        TensorDescriptor(grad, list(grad.shape), [grad.stride(0), 1], [tile.k, tile.m]),
        TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [tile.k, tile.n]),
        ends,
        grad.shape[0],
    )


def _are_aligned(matrices: Matrices) -> bool:
    """Return whether all matrices begin at multiples of 16 bytes."""
    if isinstance(matrices, Tensor):
        return not (matrices.data_ptr() % 16 or matrices.stride(0) * matrices.element_size() % 16)
    return not any(matrix.data_ptr() % 16 for matrix in matrices)


_tables: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _addresses(matrices: Matrices, device: torch.device) -> Tensor:
    """The addresses of the matrices, int64 on the device."""
    if isinstance(matrices, Tensor):
        begin, step = matrices.data_ptr(), matrices.stride(0) * matrices.element_size()
        return torch.arange(begin, begin + len(matrices) * step, step, dtype=torch.int64, device=device)
    addresses = tuple(matrix.data_ptr() for matrix in matrices)
    key = addresses, device  # Megatron's gradients stay where they are, so their table is copied once
    if key not in _tables:
        if len(_tables) >= 4096:  # of matrices that come and go
            _tables.clear()
        _tables[key] = torch.tensor(addresses, dtype=torch.int64, device=device)
    return _tables[key]


@triton.jit
def _rows_of(expert, ends, num_rows):
    """The first row of an expert, and its end."""
    end = tl.minimum(tl.load(ends + expert), num_rows)
    begin = tl.minimum(tl.load(ends + tl.maximum(expert - 1, 0)), num_rows) * (expert > 0).to(tl.int32)
    return begin, end


@triton.jit
def _add_products(total, grad, rows, begin, end, row, column, BLOCK_K: tl.constexpr):
    """Add the outer products of the rows [begin, end) in a tile at (row, column)."""
    whole = begin + (end - begin) // BLOCK_K * BLOCK_K
    for r in range(begin, whole, BLOCK_K):
        total = tl.dot(grad.load([r, row]).T, rows.load([r, column]), total)
    if whole < end:  # what follows is another expert's, or memory that nobody wrote
        mine = (whole + tl.arange(0, BLOCK_K) < end)[:, None]
        a = tl.where(mine, grad.load([whole, row]), 0)
        total = tl.dot(a.T, tl.where(mine, rows.load([whole, column]), 0), total)
    return total


# Without MORE there is no second set of rows: its arguments are constants, and the kernel has one loop.
@triton.jit(do_not_specialize=["num_more"])
def _outer_products(
    grad,
    rows,
    out,
    addresses,
    ends,
    num_rows,
    n,
    k,
    more_grad,
    more_rows,
    more_ends,
    num_more,
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
    begin, end = _rows_of(expert, ends, num_rows)
    if MORE:
        more_begin, more_end = _rows_of(expert, more_ends, num_more)
    if ACCUMULATE:
        if MORE:
            if (begin == end) & (more_begin == more_end):
                return
        else:
            if begin == end:
                return
    i, j = _place(number, m_tiles, n_tiles, DOWN)
    row, column = i * BLOCK_M, j * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = _add_products(total, grad, rows, begin, end, row, column, BLOCK_K)
    if MORE:
        total = _add_products(total, more_grad, more_rows, more_begin, more_end, row, column, BLOCK_K)
    to = tl.load(addresses + expert).to(out.dtype)
    if ALIGNED:  # else the compiler writes entry by entry
        to = tl.multiple_of(to, 16)
    # In halves, which takes fewer registers.
    halves = total.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
    for half in tl.static_range(2):
        _store(to, halves[half], row, column + half * (BLOCK_N // 2), n, k, BLOCK_M, BLOCK_N // 2, ACCUMULATE)


@triton.jit
def _store(to, tile, row, column, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Write a tile at (row, column) of the matrix [n, k], or add it to what is there."""
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (row + i < n)[:, None] & (column + j < k)[None, :]
    to += row.to(tl.int64) * k + column + (i[:, None] * k + j[None, :])
    if ACCUMULATE:
        tile += tl.load(to, inside, 0).to(tl.float32)
    tl.store(to, tile.to(to.dtype.element_ty), inside)


def weighted_swiglu(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    num_rows, half = rows.shape[0], rows.shape[1] // 2
    out = rows.new_empty(num_rows, half)
    if num_rows:
        _swiglu[num_rows,](rows, weights, ends[-1:], out, half, BLOCK=SWIGLU_COLUMNS)
    return out


def weighted_swiglu_grad(grad: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    out, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    if rows.shape[0]:
        half = grad.shape[1]
        _swiglu_grad[rows.shape[0],](grad, rows, weights, ends[-1:], out, grad_weights, half, BLOCK=SWIGLU_COLUMNS)
    return out, grad_weights


@triton.jit
def _swiglu(rows, weights, end, out, half, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end):
        return
    weight = tl.load(weights + row)
    for first in range(0, half, BLOCK):
        i = first + tl.arange(0, BLOCK)
        gate = tl.load(rows + row * 2 * half + i, i < half, 0).to(tl.float32)
        up = tl.load(rows + row * 2 * half + half + i, i < half, 0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + row * half + i, value.to(out.dtype.element_ty), i < half)


@triton.jit
def _swiglu_grad(grad, rows, weights, end, out, grad_weights, half, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end):
        tl.store(grad_weights + row, 0.0)
        return
    weight = tl.load(weights + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, half, BLOCK):
        i = first + tl.arange(0, BLOCK)
        gate = tl.load(rows + row * 2 * half + i, i < half, 0).to(tl.float32)
        up = tl.load(rows + row * 2 * half + half + i, i < half, 0).to(tl.float32)
        given = tl.load(grad + row * half + i, i < half, 0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += given * silu * up
        given *= weight
        # d silu / d gate = sigmoid * (1 + gate * (1 - sigmoid))
        grad_gate = given * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(out + row * 2 * half + i, grad_gate.to(out.dtype.element_ty), i < half)
        tl.store(out + row * 2 * half + half + i, (given * silu).to(out.dtype.element_ty), i < half)
    tl.store(grad_weights + row, tl.sum(total))
