"""The Triton kernels of grouped_gemm: each program computes one tile of the result, and finds its expert by itself.

The host does not know how many rows an expert has. So it starts as many programs as there can be tiles, and a program
without a tile ends at once. Programs start in the order of their numbers as multiprocessors become free. So another
kernel that occupies some multiprocessors, such as a dispatch, delays no particular tile.

The tensor memory accelerator loads the operands, tile by tile. It reads matrices whose rows begin at multiples of 16
bytes. A tile at the end of an expert's rows also reads rows of the next expert; their results are not stored.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_dispatcher.moe.address_table import address_table
from ep_dispatcher.moe.block_scales import BLOCK
from ep_dispatcher.moe.expert_matrices import (
    LINE_BYTES,
    ExpertMatrices,
    WithCopies,
    num_matrices,
    places_of,
)
from ep_dispatcher.moe.kernel_launch import Configuration, Launcher, Matrix, cdiv, next_power_of_2


class Tile(NamedTuple):
    """Rows and columns of a tile of the result, the entries of the sums in a step, and options of the compiler.

    ``down``: this number of tiles of one column of tiles are computed in order, then as many of the next column.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    down: int = 16


@functools.cache
def tile_configuration(tile: Tile, **constants: Any) -> Configuration:
    """Return the configuration of a kernel that has such tiles, and further constants."""
    constants |= dict(BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, DOWN=tile.down)
    return Configuration(constants, num_warps=tile.warps, num_stages=tile.stages)


# The fastest on H200 over the cases of benchmarks/grouped_gemm.py.
TRANSPOSED_TILE, TILE, SMALL_TILE = Tile(128, 128, 64, 4, 4), Tile(128, 256, 64, 8, 3), Tile(64, 128, 64, 4, 4)
# Over five sizes of weights on an H200, with 512 to 2048 rows per expert, the faster of these two is within 3 % of the
# fastest of eight tiles. With short sums the small one takes 0.82 to 0.85 of the time of the other: three blocks share
# a multiprocessor, so one multiplies while another adds its products to the sums. With long ones it takes 0.98 to 1.14.
FLOAT8_TILE, SMALL_FLOAT8_TILE = Tile(128, 128, 128, 8, 4), Tile(64, 128, 128, 4, 3)
SHORT_FLOAT8_SUM = 2048  # entries up to which the small float8 tile is used
FEW_ROWS = 64  # rows per expert up to which the small tiles are used


def describe_weights(weights: ExpertMatrices, block: list[int]) -> tuple[Matrix, Tensor | None, int, int]:
    """Describe the matrices [n, k] of all experts as one tensor [shifts, n, k]; a shift is LINE_BYTES long.

    So one descriptor reads matrices anywhere in memory. Return it, and the shifts, first and step of places_of.
    """
    base, num_shifts, shifts, first, step = places_of(weights)
    n, k = base.shape[-2:]
    return Matrix(base, [num_shifts, n, k], [LINE_BYTES // base.itemsize, k, 1], [1, *block]), shifts, first, step


def multiply(
    rows: Tensor,
    weights: ExpertMatrices,
    ends: Tensor,
    out: Tensor,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    row_weights: Tensor | None = None,
    scales: Tensor | None = None,
    weight_scales: ExpertMatrices | None = None,
    first_expert: int = 0,
) -> None:
    """out[r] = rows[r] @ weights[e].T + row_weights[r] * bias[e], or rows[r] @ weights[e] where not `transposed`.

    scales, weight_scales: those of float8 rows and weights, as in float8_gemm; only with `transposed`, and not with
    copies behind the weights
    first_expert: the expert of weights[0]. Only rows of the experts that weights has are computed. There are few of
    them unless it is 0
    """
    num_rows, length = rows.shape
    columns, experts = out.shape[1], num_matrices(weights)
    if not num_rows:
        return
    has_few_rows = num_rows <= FEW_ROWS * experts
    # The kernel's weight_scales, scale_addresses, weight_scale_step and weight_scale_stride.
    weight_scale_arguments: tuple[Any, ...] = (None, None, None, None)
    if weight_scales is None:
        usual_tile = TRANSPOSED_TILE if transposed else TILE
        tile = SMALL_TILE if has_few_rows else usual_tile
    else:
        tile = SMALL_FLOAT8_TILE if has_few_rows or length <= SHORT_FLOAT8_SUM else FLOAT8_TILE
        if isinstance(weight_scales, Tensor):
            weight_scale_arguments = weight_scales, None, *weight_scales.stride()[:2]
        else:
            addresses, _ = address_table(weight_scales, rows.device)
            weight_scale_arguments = weight_scales[0], addresses, None, weight_scales[0].stride(0)
    block = [tile.n, tile.k] if transposed else [tile.k, tile.n]
    # The kernel's copies, copy_shifts, copy_first, copy_step and num_own.
    copy_arguments: tuple[Any, ...] = (None, None, None, None, None)
    if type(weights) is WithCopies:  # isinstance takes the host 1 us, because it is an abstract class's
        copy_arguments = *describe_weights(weights.copies, block), num_matrices(weights.own)
        weights = weights.own
    descriptor, shifts, first, step = describe_weights(weights, block)
    max_row_tiles = num_rows // tile.m + min(experts, num_rows)  # the rows of each expert may end in a partial tile
    max_tiles = max_row_tiles * cdiv(columns, tile.n)
    if first_expert:  # nearly all of these programs would find no tile, which takes longer than the few tiles
        max_tiles = min(max_tiles, _num_sms(rows.device))
    _launch_multiply(
        (max_tiles, 1, 1),
        tile_configuration(tile, LOOPS=first_expert > 0, EXPERTS=next_power_of_2(experts), TRANSPOSED=transposed),
        Matrix(rows, [num_rows, length], [rows.stride(0), 1], [tile.m, tile.k]),
        descriptor,
        shifts,
        out,
        bias,
        row_weights,
        ends,
        scales,
        *weight_scale_arguments,
        num_rows,
        columns,
        length,
        first,
        step,
        experts,
        first_expert,
        *copy_arguments,
    )


def ends_of(counts: Tensor) -> Tensor:
    """Return the end of each expert's rows, int32, from the numbers of rows."""
    counts = counts.contiguous()
    ends, experts = torch.empty_like(counts, dtype=torch.int32), counts.shape[0]
    _launch_ends((1, 1, 1), _ends_configuration(next_power_of_2(experts)), counts, ends, experts)
    return ends


@functools.cache
def _ends_configuration(experts: int) -> Configuration:
    return Configuration(dict(EXPERTS=experts), num_warps=1)


@triton.jit
def _write_ends(counts, ends, experts, EXPERTS: tl.constexpr):
    e = tl.arange(0, EXPERTS)
    count = tl.load(counts + e, e < experts, 0).to(tl.int32)
    tl.store(ends + e, tl.cumsum(count), e < experts)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _row_tiles(ends, num_rows, experts, skipped, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return each expert's first row, the end of its rows, and the number of tiles down them.

    `skipped`: the first row of the first expert
    """
    e = tl.arange(0, EXPERTS)
    end = tl.minimum(tl.load(ends + e, e < experts, 0), num_rows)
    begin = tl.minimum(tl.load(ends + e - 1, (e > 0) & (e < experts), skipped), num_rows)
    return begin, end, tl.where(e < experts, tl.cdiv(end - begin, BLOCK_M), 0)


@triton.jit
def find_tile(pid, ends, num_rows, experts, others, skipped, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Find a tile by its number: its expert, the expert's first row and end, and its number within the expert.

    `others`: the number of tiles side by side in a row of tiles. `skipped`: the first row of the first expert. The
    expert is `experts` if there is no such tile.
    """
    e = tl.arange(0, EXPERTS)
    begin, end, row_tiles = _row_tiles(ends, num_rows, experts, skipped, EXPERTS, BLOCK_M)
    tiles = row_tiles * others
    upto = tl.cumsum(tiles)
    expert = tl.minimum(tl.sum((upto <= pid).to(tl.int32)), experts)
    here = e == expert
    first = tl.sum(tl.where(here, begin, 0))
    last = tl.sum(tl.where(here, end, 0))
    return expert, first, last, pid - tl.sum(tl.where(here, upto - tiles, 0))


@triton.jit
def place_tile(number, m_tiles, n_tiles, DOWN: tl.constexpr):
    """Return the row and the column of a tile, counted in tiles. Tiles that run at the same time read the same data."""
    first = number // (DOWN * n_tiles) * DOWN
    number -= first * n_tiles
    in_column = tl.minimum(m_tiles - first, DOWN)
    return first + number % in_column, number // in_column


@triton.jit
def _products(
    rows,
    weights,
    shift,
    row,
    column,
    length,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Return a tile of products without scales."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, length, BLOCK_K):
        a = rows.load([row, k])
        if TRANSPOSED:
            b = weights.load([shift, column, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = weights.load([shift, k, column]).reshape(BLOCK_K, BLOCK_N)
        total = tl.dot(a, b, total)
    return total


@triton.jit
def _scaled_products(
    rows,
    weights,
    shift,
    scales,
    weight_scales,
    scale_addresses,
    weight_scale_step,
    weight_scale_stride,
    expert,
    row,
    column,
    end,
    length,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Return a tile of products of float8 operands, times their scales. `expert`: its number among weight_scales"""
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
    # The scales of a step are loaded in the step before it, under its product: the compiler does so with operands only.
    of_rows, of_weight = tl.load(row_scale, inside_m, 0), tl.load(weight_scale)
    for k in range(0, length, BLOCK_K):
        a = rows.load([row, k])
        if TRANSPOSED:
            b = weights.load([shift, column, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = weights.load([shift, k, column]).reshape(BLOCK_K, BLOCK_N)
        factor = of_rows * of_weight
        following = k // BLOCK + 1
        has_following = k + BLOCK_K < length
        of_rows = tl.load(row_scale + following, inside_m & has_following, 0)
        of_weight = tl.load(weight_scale + following, has_following, 0)
        total += tl.dot(a, b) * factor[:, None]
    return total


# Numbers that change from step to step must not cause a compilation.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "first",
        "step",
        "weight_scale_step",
        "weight_scale_stride",
        "first_expert",
        "copy_first",
        "copy_step",
    ]
)
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
    first_expert,
    copies,
    copy_shifts,
    copy_first,
    copy_step,
    num_own,
    LOOPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOWN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Compute one tile. With LOOPS each program computes several, and the rows before first_expert are skipped."""
    n_tiles = tl.cdiv(columns, BLOCK_N)
    if LOOPS:
        skipped = tl.load(ends + first_expert - 1)
        _, _, row_tiles = _row_tiles(ends + first_expert, num_rows, experts, skipped, EXPERTS, BLOCK_M)
        num_tiles = tl.sum(row_tiles) * n_tiles
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            expert, begin, end, number = find_tile(
                tile, ends + first_expert, num_rows, experts, n_tiles, skipped, EXPERTS, BLOCK_M
            )
            i, j = place_tile(number, tl.cdiv(end - begin, BLOCK_M), n_tiles, DOWN)
            row, column = begin + i * BLOCK_M, j * BLOCK_N
            shift = first + expert * step if shifts is None else tl.load(shifts + expert)
            if scales is not None:
                total = _scaled_products(
                    rows,
                    weights,
                    shift,
                    scales,
                    weight_scales,
                    scale_addresses,
                    weight_scale_step,
                    weight_scale_stride,
                    expert,
                    row,
                    column,
                    end,
                    length,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    TRANSPOSED,
                )
            else:
                total = _products(rows, weights, shift, row, column, length, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
            _store_tile(
                total, out, bias, row_weights, first_expert + expert, row, column, end, columns, BLOCK_M, BLOCK_N
            )
    else:
        expert, begin, end, number = find_tile(tl.program_id(0), ends, num_rows, experts, n_tiles, 0, EXPERTS, BLOCK_M)
        if expert >= experts:
            return
        i, j = place_tile(number, tl.cdiv(end - begin, BLOCK_M), n_tiles, DOWN)
        row, column = begin + i * BLOCK_M, j * BLOCK_N
        if scales is not None:
            tl.static_assert(copies is None, "copies have scales of their own, so they have a launch of their own")
            shift = first + expert * step if shifts is None else tl.load(shifts + expert)
            total = _scaled_products(
                rows,
                weights,
                shift,
                scales,
                weight_scales,
                scale_addresses,
                weight_scale_step,
                weight_scale_stride,
                expert,
                row,
                column,
                end,
                length,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                TRANSPOSED,
            )
        else:
            if copies is None or expert < num_own:
                shift = first + expert * step if shifts is None else tl.load(shifts + expert)
                matrices = weights
            else:  # redundant copies of experts are further away than a descriptor reaches, so they have their own
                copy = expert - num_own
                shift = copy_first + copy * copy_step if copy_shifts is None else tl.load(copy_shifts + copy)
                matrices = copies
            total = _products(rows, matrices, shift, row, column, length, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        _store_tile(total, out, bias, row_weights, expert, row, column, end, columns, BLOCK_M, BLOCK_N)


@triton.jit
def _store_tile(
    total, out, bias, row_weights, expert, row, column, end, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add the bias to a tile of `_multiply`, and store it."""
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if bias is not None:
        added = tl.load(bias + expert * columns + column + n, column + n < columns, 0).to(tl.float32)[None, :]
        if row_weights is not None:
            added = tl.load(row_weights + row + m, row + m < end, 0)[:, None] * added
        total += added
    inside = (row + m < end)[:, None] & (column + n < columns)[None, :]
    to = out + row.to(tl.int64) * columns + column + (m[:, None] * columns + n[None, :])
    tl.store(to, total.to(out.dtype.element_ty), inside)


_launch_multiply, _launch_ends = Launcher(_multiply), Launcher(_write_ends)
