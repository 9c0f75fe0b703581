"""The Triton kernels of grouped_gemm: one tile of the result per program, which finds its expert by itself.

The host does not know how many rows an expert has. So it starts as many programs as there can be tiles, and those that
find none end at once. Programs start in the order of their numbers as multiprocessors become free: a kernel of other
work that holds some of them, such as a dispatch, delays no tile of its own.

Operands come through the tensor memory accelerator, tile by tile. It reads matrices whose rows begin at multiples of
16 bytes. A tile at the end of an expert's rows reads on into the next expert's; what comes from there is not stored.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.matrices import LINE_BYTES, BiasSet, Matrices, RowSet, shifts_of


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

    def options(self) -> dict[str, int]:
        """Return what a kernel is launched with."""
        blocks = dict(BLOCK_M=self.m, BLOCK_N=self.n, BLOCK_K=self.k, DOWN=self.down)
        return blocks | dict(num_warps=self.warps, num_stages=self.stages)


# The fastest on H200 over the cases of benchmarks/grouped_gemm.py.
TRANSPOSED_TILE, TILE, SMALL_TILE = Tile(128, 128, 64, 4, 4), Tile(128, 256, 64, 8, 3), Tile(64, 128, 64, 4, 4)
# Of nine tiles and numbers of stages on an H100 the fastest, or within 10 % of it, over five sizes of weights.
FLOAT8_TILE, SMALL_FLOAT8_TILE = Tile(128, 128, 128, 8, 4), Tile(64, 128, 128, 4, 4)
FEW_ROWS = 64  # per expert: for the small tiles
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
ACTIVATION_COLUMNS = 1024
BIAS_ROWS, BIAS_COLUMNS = 64, 64  # of a step of the sums for a bias
BLOCK: tl.constexpr = tl.constexpr(128)  # float8 entries that share a scale, and a step of each sum


# Triton's own take the host 2 us each.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def described(weights: Matrices, block: list[int]) -> tuple[TensorDescriptor, Tensor | None, int, int]:
    """Describe the matrices [n, k] of all experts as one tensor [shifts, n, k]; a shift is LINE_BYTES long.

    So one descriptor reads matrices wherever they lie. Return it, a table of shifts int32 [experts] or None, and two
    numbers: without a table expert e's shift is first + e * step.
    """
    base, shifts = shifts_of(weights)
    n, k = base.shape
    num_shifts, *where = _places(shifts, base.device)
    strides = [LINE_BYTES // base.itemsize, k, 1]
    return TensorDescriptor(base, [num_shifts, n, k], strides, [1, *block]), *where


@functools.lru_cache(4096)  # of matrices that come and go; those of Megatron stay the same
def _places(shifts: tuple[int, ...], device: torch.device) -> tuple[int, Tensor | None, int, int]:
    """Return how many shifts a descriptor needs, and the table, first and step of `described`."""
    first, step = shifts[0], shifts[-1] - shifts[-2] if len(shifts) > 1 else 0
    is_regular = all(b - a == step for a, b in zip(shifts, shifts[1:]))
    table = None if is_regular else torch.tensor(shifts, dtype=torch.int32, device=device)
    return max(shifts) + 1, table, first, step


def multiply(
    rows: Tensor,
    weights: Matrices,
    ends: Tensor,
    out: Tensor,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    row_weights: Tensor | None = None,
    scales: Tensor | None = None,
    weight_scales: Matrices | None = None,
) -> None:
    """out[r] = rows[r] @ weights[e].T + row_weights[r] * bias[e], or rows[r] @ weights[e] where not `transposed`.

    scales, weight_scales: of float8 rows and weights, as float8_gemm has them; only with `transposed`
    """
    num_rows, length = rows.shape
    columns, experts = out.shape[1], len(ends)
    if not num_rows:
        return
    if weight_scales is None:
        tile, usual = SMALL_TILE, TRANSPOSED_TILE if transposed else TILE
        weights_scaled: tuple[Any, ...] = (None, None, None, None)
    else:
        tile, usual = SMALL_FLOAT8_TILE, FLOAT8_TILE
        if isinstance(weight_scales, Tensor):
            weights_scaled = weight_scales, None, *weight_scales.stride()[:2]
        else:
            addresses, one = placed(weight_scales, rows.device)[0], weight_scales[0]
            weights_scaled = one, addresses, None, one.stride(0)
    if num_rows > FEW_ROWS * experts:
        tile = usual
    descriptor, shifts, first, step = described(weights, [tile.n, tile.k] if transposed else [tile.k, tile.n])
    most_tiles = num_rows // tile.m + min(experts, num_rows)  # along the rows: each expert can begin one more
    _multiply[most_tiles * cdiv(columns, tile.n),](
        TensorDescriptor(rows, [num_rows, length], [rows.stride(0), 1], [tile.m, tile.k]),
        descriptor,
        shifts,
        out,
        bias,
        row_weights,
        ends,
        scales,
        *weights_scaled,
        num_rows,
        columns,
        length,
        first,
        step,
        experts,
        EXPERTS=next_power_of_2(experts),
        TRANSPOSED=transposed,
        **tile.options(),
    )


@triton.jit
def find_tile(pid, ends, num_rows, experts, others, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
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
def place_tile(number, m_tiles, n_tiles, DOWN: tl.constexpr):
    """The row and the column of a tile, among tiles. Tiles that run at the same time read the same lines."""
    first = number // (DOWN * n_tiles) * DOWN
    number -= first * n_tiles
    in_column = tl.minimum(m_tiles - first, DOWN)
    return first + number % in_column, number // in_column


@triton.jit(do_not_specialize=["num_rows", "first", "step", "weight_scale_step", "weight_scale_stride"])
def _multiply(
    rows,
    weights,
    shifts,
    out,
    bias,
    row_weights,
    ends,
    scales,
    weight_scales,
    scale_addresses,
    weight_scale_step,
    weight_scale_stride,
    num_rows,
    columns,
    length,
    first,
    step,
    experts,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOWN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    n_tiles = tl.cdiv(columns, BLOCK_N)
    expert, begin, end, number = find_tile(tl.program_id(0), ends, num_rows, experts, n_tiles, EXPERTS, BLOCK_M)
    if expert >= experts:
        return
    i, j = place_tile(number, tl.cdiv(end - begin, BLOCK_M), n_tiles, DOWN)
    row, column = begin + i * BLOCK_M, j * BLOCK_N
    shift = first + expert * step if shifts is None else tl.load(shifts + expert)
    if scales is not None:
        tl.static_assert(BLOCK % BLOCK_N == 0 and BLOCK_K == BLOCK, "a step has one scale of a weight")
        row_m = row + tl.arange(0, BLOCK_M)
        inside_m = row_m < end
        if scale_addresses is None:  # one tensor of all experts
            weight_scale = weight_scales + expert * weight_scale_step
        else:
            weight_scale = tl.load(scale_addresses + expert).to(weight_scales.dtype)
        weight_scale += column // BLOCK * weight_scale_stride
        row_scale = scales + row_m.to(tl.int64) * tl.cdiv(length, BLOCK)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, length, BLOCK_K):
        a = rows.load([row, k])
        if TRANSPOSED:
            b = weights.load([shift, column, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = weights.load([shift, k, column]).reshape(BLOCK_K, BLOCK_N)
        if scales is None:
            total = tl.dot(a, b, total)
        else:
            part = tl.dot(a, b)
            factor = tl.load(row_scale + k // BLOCK, inside_m, 0) * tl.load(weight_scale + k // BLOCK)
            total += part * factor[:, None]
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)  # behind the loop, which has the registers until then
    if bias is not None:
        added = tl.load(bias + expert * columns + column + n, column + n < columns, 0).to(tl.float32)[None, :]
        if row_weights is not None:
            added = tl.load(row_weights + row + m, row + m < end, 0)[:, None] * added
        total += added
    inside = (row + m < end)[:, None] & (column + n < columns)[None, :]
    to = out + row.to(tl.int64) * columns + column + (m[:, None] * columns + n[None, :])
    tl.store(to, total.to(out.dtype.element_ty), inside)


def outer_products(sets: Sequence[RowSet], out: Matrices, *, accumulate: bool) -> None:
    """out[e] [n, k] = the sum of grad[r] [n] times rows[r] [k] over the rows of e in all sets, or that is added."""
    n, k, experts = sets[0][0].shape[1], sets[0][1].shape[1], len(out)
    sets = [one for one in sets if one[0].shape[0]]
    if not sets:
        if not accumulate:
            torch._foreach_zero_(list(out))
        return
    num_rows = sum(one[0].shape[0] for one in sets)
    tiles = ADDED_TILES if accumulate else STORED_TILES
    tile = next(tile for most, tile in tiles.items() if num_rows <= most * experts)
    addresses, is_aligned = placed(out, sets[0][1].device)
    first, second = _described(sets[0], tile), (_described(sets[1], tile) if len(sets) > 1 else (None,) * 4)
    _outer_products[experts * cdiv(n, tile.m) * cdiv(k, tile.n),](
        *first[:2],
        out[0],
        addresses,
        *first[2:],
        n,
        k,
        *second,
        ACCUMULATE=accumulate,
        ALIGNED=is_aligned,
        MORE=len(sets) > 1,
        **tile.options(),
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


def placed(matrices: Matrices, device: torch.device) -> tuple[Tensor, bool]:
    """Return the addresses of the matrices, int64 on the device, and whether all are multiples of 16 bytes."""
    if isinstance(matrices, Tensor):
        step = matrices.stride(0) * matrices.element_size()
        return _in_steps(matrices.data_ptr(), step, len(matrices), device)
    addresses = tuple([matrix.data_ptr() for matrix in matrices])
    found = _placed.get((addresses, device))
    if found is None:
        found = _place(addresses, device)
    return found


_placed: dict[tuple[tuple[int, ...], torch.device], tuple[Tensor, bool]] = {}  # tables that were copied to a device
MOST_PLACED = 4096


def _place(addresses: tuple[int, ...], device: torch.device) -> tuple[Tensor, bool]:
    """Make a table of addresses. While a CUDA graph is captured nothing can be copied from the host.

    There gradients are new, and lie side by side in one piece of memory. Their table belongs to the graph, because only
    its replays write it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        steps = {after - before for before, after in itertools.pairwise(addresses)} or {16}
        if len(steps) == 1:
            return _in_steps(addresses[0], steps.pop(), len(addresses), device)
    table = torch.tensor(addresses, dtype=torch.int64, device=device)
    if len(_placed) >= MOST_PLACED:
        _placed.clear()
    return _placed.setdefault((addresses, device), (table, not any(one % 16 for one in addresses)))


def _in_steps(begin: int, step: int, count: int, device: torch.device) -> tuple[Tensor, bool]:
    addresses = torch.arange(begin, begin + count * step, step, dtype=torch.int64, device=device)
    return addresses, not (begin % 16 or step % 16)


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
        is_empty = begin == end
        if MORE:
            is_empty &= more_begin == more_end
        if is_empty:
            return
    i, j = place_tile(number, m_tiles, n_tiles, DOWN)
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


def bias_grads(sets: Sequence[BiasSet], out: Matrices, *, accumulate: bool) -> None:
    """out[e] [n] = the sum of row_weights[r] * grad[r] [n] over the rows of e in all sets, or that is added."""
    n = sets[0][0].shape[1]
    first, second = sets[0], sets[1] if len(sets) > 1 else (None, None, None)
    _bias_grads[len(out), cdiv(n, BIAS_COLUMNS)](
        *first,
        first[0].shape[0],
        *second,
        0 if second[0] is None else second[0].shape[0],
        out[0],
        placed(out, first[0].device)[0],
        n,
        ROWS=BIAS_ROWS,
        COLUMNS=BIAS_COLUMNS,
        WEIGHTED=first[2] is not None,
        MORE=len(sets) > 1,
        ACCUMULATE=accumulate,
    )


@triton.jit
def _add_rows(
    total, grad, ends, row_weights, num_rows, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr
):
    """Add the rows of an expert to the sums of a block of columns."""
    begin, end = _rows_of(tl.program_id(0), ends, num_rows)
    i, j = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(begin, end, ROWS):
        row = first + i
        rows = tl.load(grad + row.to(tl.int64)[:, None] * n + j[None, :], (row < end)[:, None] & (j < n)[None, :], 0)
        rows = rows.to(tl.float32)
        if WEIGHTED:
            rows *= tl.load(row_weights + row, row < end, 0)[:, None]
        total += tl.sum(rows, 0)
    return total


@triton.jit(do_not_specialize=["num_rows", "num_more"])
def _bias_grads(
    grad,
    ends,
    row_weights,
    num_rows,
    more_grad,
    more_ends,
    more_row_weights,
    num_more,
    out,
    addresses,
    n,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MORE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    total = tl.zeros((COLUMNS,), tl.float32)
    total = _add_rows(total, grad, ends, row_weights, num_rows, n, ROWS, COLUMNS, WEIGHTED)
    if MORE:
        total = _add_rows(total, more_grad, more_ends, more_row_weights, num_more, n, ROWS, COLUMNS, WEIGHTED)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    to = tl.load(addresses + tl.program_id(0)).to(out.dtype) + j
    if ACCUMULATE:
        total += tl.load(to, j < n, 0).to(tl.float32)
    tl.store(to, total.to(to.dtype.element_ty), j < n)


def activate(hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation) -> Tensor:
    num_rows, columns = hidden.shape[0], hidden.shape[1] // activation.pair
    out = hidden.new_empty(num_rows, columns)
    if num_rows:
        _activate[num_rows,](hidden, row_weights, ends[-1:], out, columns, ACT=activation, BLOCK=ACTIVATION_COLUMNS)
    return out


def activate_grad(
    grad: Tensor,
    hidden: Tensor,
    row_weights: Tensor,
    ends: Tensor,
    activation: Activation,
    grad_out: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out, grad_weights = torch.empty_like(hidden), torch.empty_like(row_weights)
    if hidden.shape[0]:
        _activate_grad[hidden.shape[0],](
            grad,
            hidden,
            row_weights,
            ends,
            out,
            grad_weights,
            grad.shape[1],
            grad_out,
            bias,
            0 if bias is None else bias.shape[1],
            len(ends),
            ACT=activation,
            EXPERTS=next_power_of_2(len(ends)),
            BLOCK=ACTIVATION_COLUMNS,
        )
    return out, grad_weights


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


# The formulas of activation.py: a value, and its derivative, which the compiler leaves out where it is not used.
@triton.jit
def activation_value(x, ACT: tl.constexpr):
    if ACT.limit is not None:
        inside = x <= ACT.limit
        x = tl.minimum(x, ACT.limit)
    if ACT.function == "silu":
        scaled = x
        if ACT.alpha != 1:
            scaled = ACT.alpha * x
        sigmoid = tl.sigmoid(scaled)
        value = x * sigmoid
        slope = sigmoid * (1 + scaled * (1 - sigmoid))
    elif ACT.function == "gelu":
        erf = tl.erf(x * 0.7071067811865476)
        value = x * (1 + erf) * 0.5
        slope = (1 + erf) * 0.5 + x * tl.exp(-x * x * 0.5) * 0.3989422804014327
    elif ACT.function == "gelu_tanh":
        tanh = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        value = x * (1 + tanh) * 0.5
        slope = (1 + tanh) * 0.5 + x * (1 - tanh * tanh) * 0.3989422804014327 * (1 + 0.134145 * x * x)
    elif ACT.function == "squared_relu":
        positive = tl.maximum(x, 0.0)
        value = positive * positive
        slope = 2 * positive
    else:
        sigmoid = tl.sigmoid(x)
        tanh = _tanh(x / ACT.beta)
        value = ACT.beta * tanh * sigmoid
        slope = (1 - tanh * tanh) * sigmoid + value * (1 - sigmoid)
    if ACT.limit is not None:
        slope = tl.where(inside, slope, 0.0)
    return value, slope


@triton.jit
def linear_value(up, ACT: tl.constexpr):
    slope = tl.full(up.shape, 1.0, tl.float32)
    if ACT.function == "situ":
        tanh = _tanh(up / ACT.linear_beta)
        up = ACT.linear_beta * tanh
        slope = 1 - tanh * tanh
    if ACT.limit is not None:
        slope = tl.where(tl.abs(up) <= ACT.limit, slope, 0.0)
        up = tl.minimum(tl.maximum(up, -ACT.limit), ACT.limit)
    if ACT.offset != 0:
        up += ACT.offset
    return up, slope


@triton.jit
def _activate(
    hidden,
    row_weights,
    end,
    out,
    columns,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end):
        return
    weight = tl.load(row_weights + row)
    hidden += row * columns * ACT.pair
    for first in range(0, columns, BLOCK):
        i = first + tl.arange(0, BLOCK)
        gate = tl.load(hidden + i, i < columns, 0).to(tl.float32)
        value, _ = activation_value(gate, ACT)
        if ACT.gated:
            up = tl.load(hidden + columns + i, i < columns, 0).to(tl.float32)
            up, _ = linear_value(up, ACT)
            value = value * up
        tl.store(out + row * columns + i, (value * weight).to(out.dtype.element_ty), i < columns)


@triton.jit
def _activate_grad(
    grad,
    hidden,
    row_weights,
    ends,
    out,
    grad_weights,
    columns,
    grad_out,
    bias,
    wide,
    experts,
    ACT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + experts - 1):
        tl.store(grad_weights + row, 0.0)
        return
    weight = tl.load(row_weights + row)
    total = tl.zeros((BLOCK,), tl.float32)
    pair = columns * ACT.pair
    hidden += row * pair
    out += row * pair
    for first in range(0, columns, BLOCK):
        i = first + tl.arange(0, BLOCK)
        gate = tl.load(hidden + i, i < columns, 0).to(tl.float32)
        given = tl.load(grad + row * columns + i, i < columns, 0).to(tl.float32)
        value, slope = activation_value(gate, ACT)
        if ACT.gated:
            up = tl.load(hidden + columns + i, i < columns, 0).to(tl.float32)
            up, up_slope = linear_value(up, ACT)
            total += given * value * up
            given *= weight
            tl.store(out + columns + i, (given * value * up_slope).to(out.dtype.element_ty), i < columns)
            given *= up
        else:
            total += given * value
            given *= weight
        tl.store(out + i, (given * slope).to(out.dtype.element_ty), i < columns)
    if bias is not None:
        e = tl.arange(0, EXPERTS)
        expert = tl.sum((tl.load(ends + e, e < experts, 0x7FFFFFFF) <= row).to(tl.int32))
        for first in range(0, wide, BLOCK):
            i = first + tl.arange(0, BLOCK)
            given = tl.load(grad_out + row * wide + i, i < wide, 0).to(tl.float32)
            total += given * tl.load(bias + expert * wide + i, i < wide, 0).to(tl.float32)
    tl.store(grad_weights + row, tl.sum(total))
