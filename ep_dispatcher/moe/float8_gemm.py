"""Grouped GEMMs of float8 operands, and what quantises them, as Transformer Engine's blockwise recipe and DeepSeek-V3.

    rows, gradients, activations    a scale for 1 x 128 entries of a row
    weights                         a scale for 128 x 128 entries
    operands of weight gradients    a scale for 128 rows x 1 column, in a transposed copy: QuantizedColumns

Scales are float32 powers of two that multiply: value = entry * scale. The last block of an axis may be shorter. A GEMM
adds up 128 products at a time in float32, times both scales, and rounds once. FP8 tensor cores read both operands along
the axis of the sum only, so a matrix that is needed both ways has a transposed copy.

`ends` and rows behind ends[-1] are those of grouped_gemm. On a GPU these are Triton kernels. Else they are loops over
experts, which define the results; of an activation quantised entries may differ by a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.float8 import BLOCK, E4M3_MAX, QuantizedRows, dequantize, next_power_of_two, quantize
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.grouped_gemm import Matrices, groups, stack_bias, write

LINE = 16  # on a GPU rows and matrices have a multiple of so many columns
E4M3 = torch.float8_e4m3fn


class QuantizedMatrices(NamedTuple):
    """Matrices [n, k], one per expert, and their transposed copies, all wherever they lie.

    The scales of an expert are float32 [ceil(n / 128), ceil(k / 128)], or have more columns that nobody reads. Those of
    all experts have the same strides.
    """

    rows: Matrices  # float8_e4m3fn [n, k] each, contiguous
    scales: Matrices
    transposed: Matrices  # the same values, [k, n]
    transposed_scales: Matrices

    def t(self) -> QuantizedMatrices:
        """Return the transposed matrices: nothing is copied."""
        return QuantizedMatrices(self.transposed, self.transposed_scales, self.rows, self.scales)


class QuantizedColumns(NamedTuple):
    """Rows of experts, transposed. Each expert's begin at a multiple of 128; zeros follow them up to the next one."""

    values: Tensor  # float8_e4m3fn [columns, 128 * num_blocks]
    scales: Tensor  # float32 [num_blocks, columns]


ColumnSet = tuple[QuantizedColumns, QuantizedColumns, Tensor]  # grad, rows and ends of linear_grad_weights


class HiddenGrads(NamedTuple):
    """Results of `activate_grad`."""

    pair: QuantizedRows  # the gradient of hidden
    columns: QuantizedColumns  # the same gradient
    activated: QuantizedColumns  # `activate`'s result
    grad_row_weights: Tensor  # float32 [num_rows]
    exact: Tensor | None  # the gradient of hidden in bfloat16


def has_kernels(rows: Tensor) -> bool:
    """Whether Triton kernels take these rows."""
    return rows.is_cuda


def check_pair(argument: str, pair: tuple[Tensor, Tensor], columns: int) -> None:
    """Raise ValueError unless these are rows of so many columns as ep.quantize returns them, in contiguous memory."""
    rows, scales = pair
    allowed = [rows.shape[0], columns], [rows.shape[0], -(-columns // BLOCK)]
    is_right = rows.dtype == E4M3 and scales.dtype == torch.float32 and rows.is_contiguous() and scales.is_contiguous()
    if not is_right or ([*rows.shape], [*scales.shape]) != allowed:
        given = " and ".join(f"{t.dtype} {[*t.shape]} with strides {[*t.stride()]}" for t in pair)
        checks.fail(argument, given, f"{E4M3} {allowed[0]} and torch.float32 {allowed[1]}, contiguous")


def num_blocks(num_rows: int, num_experts: int) -> int:
    """Return the most blocks of 128 rows that experts can have, each beginning with a block of its own."""
    return num_rows // BLOCK + min(num_experts, num_rows)


def linear(
    pair: tuple[Tensor, Tensor],
    weights: QuantizedMatrices,
    ends: Tensor,
    bias: Matrices | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Return bfloat16 [num_rows, n]: rows [num_rows, k] times weights[e] [n, k], plus bias[e], as grouped_gemm.linear.

    pair: rows and scales, float32 [num_rows, ceil(k / 128)]
    """
    rows, scales = pair
    out = rows.new_empty(rows.shape[0], weights.rows[0].shape[0], dtype=torch.bfloat16)
    if has_kernels(rows):
        stacked = None if bias is None else stack_bias(bias)
        kernels().multiply(rows, scales, weights.rows, weights.scales, ends, out, stacked, row_weights)
        return out
    for expert, group in groups(ends):
        weight = weights.rows[expert]
        weight_scales = weights.scales[expert].repeat_interleave(BLOCK, 0)[: weight.shape[0]]
        total = _scaled_product(rows[group], scales[group], weight, weight_scales)
        if bias is not None:
            added = bias[expert].float()
            total += added if row_weights is None else row_weights[group, None] * added
        out[group] = total.to(out.dtype)
    return out


def linear_grad_rows(pair: tuple[Tensor, Tensor], weights: QuantizedMatrices, ends: Tensor) -> Tensor:
    """Return bfloat16 [num_rows, k], the gradient of `linear`'s dequantised rows, from that of its result."""
    return linear(pair, weights.t(), ends)


def linear_grad_weights(sets: Sequence[ColumnSet], out: Matrices, *, accumulate: bool) -> None:
    """Write the gradient of `linear`'s weights, or add it to what is there, into out[e] [n, k] of each expert.

    sets: the gradient of the result [num_rows, n], the rows [num_rows, k], and ends; once or twice. All rows are summed
    in float32 before the sums are rounded. out in float32 or bfloat16. An expert without rows gets zeros.
    """
    if has_kernels(sets[0][0].values):
        kernels().outer_products(sets, out, accumulate=accumulate)
        return
    sums = torch.zeros(len(out), *out[0].shape, dtype=torch.float32, device=out[0].device)
    for grad, rows, ends in sets:
        block = 0
        for expert, group in groups(ends):
            begin, block = block, block + -(-(group.stop - group.start) // BLOCK)
            a, b = (one.values[:, begin * BLOCK : block * BLOCK] for one in (grad, rows))
            scales_a, scales_b = (one.scales[begin:block].t() for one in (grad, rows))
            sums[expert] += _scaled_product(a, scales_a, b, scales_b)
    for expert_out, expert_sum in zip(out, sums):
        write(expert_out, expert_sum, accumulate)


def _scaled_product(a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor) -> Tensor:
    """Return a @ b.T in float32, [m, n]: a [m, k], b [n, k], with a scale for each row and block of 128."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        for block in range(-(-a.shape[1] // BLOCK)):
            x, y = (t[:, block * BLOCK : (block + 1) * BLOCK].float() for t in (a, b))
            total += (x @ y.t()) * (scales_a[:, block, None] * scales_b[:, block])
    return total


@torch.no_grad()
def quantize_weights(weights: Matrices) -> QuantizedMatrices:
    """Return the weights of experts, [n, k] each in bfloat16 or float32, quantised. Each field is one tensor."""
    experts, (n, k) = len(weights), weights[0].shape
    device = weights[0].device
    n_blocks, k_blocks = -(-n // BLOCK), -(-k // BLOCK)
    rows = torch.empty(experts, n, k, dtype=E4M3, device=device)
    scales = torch.empty(experts, n_blocks, k_blocks, dtype=torch.float32, device=device)
    if has_kernels(rows):
        found = QuantizedMatrices(rows, scales, rows.new_empty(experts, k, n), scales.new_empty(scales.mT.shape))
        quantizers().quantize_weights(weights, found)
        return found
    for expert, weight in enumerate(weights):
        blocks = F.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK)).view(n_blocks, BLOCK, k_blocks, BLOCK)
        amax = blocks.abs().amax((1, 3))
        of_blocks = next_power_of_two((amax / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny))
        rows[expert] = (blocks / of_blocks[:, None, :, None]).flatten(2).flatten(0, 1)[:n, :k].to(E4M3)
        scales[expert] = of_blocks
    return QuantizedMatrices(rows, scales, rows.mT.contiguous(), scales.mT.contiguous())


def quantize_rows(rows: Tensor, ends: Tensor) -> QuantizedRows:
    """Return bfloat16 rows [num_rows, columns] with a scale for 1 x 128 of them."""
    pair = _new_pair(rows, rows.shape[1])
    if has_kernels(rows):
        quantizers().quantize(rows, None, ends, pair, None)
    else:
        _write_rows(rows, ends, pair)
    return pair


def quantize_both(rows: Tensor, ends: Tensor) -> tuple[QuantizedRows, QuantizedColumns]:
    """Return bfloat16 rows with a scale for 1 x 128 of them, and the same rows with a scale for 128 x 1."""
    pair, columns = _new_pair(rows, rows.shape[1]), _new_columns(rows, ends, rows.shape[1])
    if has_kernels(rows):
        quantizers().quantize(rows, None, ends, pair, columns)
    else:
        _write_rows(rows, ends, pair)
        _write_columns(rows, ends, columns)
    return pair, columns


def quantize_columns(pair: tuple[Tensor, Tensor], ends: Tensor) -> QuantizedColumns:
    """Return the dequantised rows of a pair with a scale for 128 x 1 of them."""
    rows, scales = pair
    columns = _new_columns(rows, ends, rows.shape[1])
    if has_kernels(rows):
        quantizers().quantize(rows, scales, ends, None, columns)
    else:
        _write_columns(dequantize((rows, scales), torch.float32), ends, columns)
    return columns


def activate(hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation) -> QuantizedRows:
    """Return grouped_gemm.activate's result, quantised from float32 with a scale for 1 x 128 of [num_rows, i]."""
    pair = _new_pair(hidden, hidden.shape[1] // activation.pair)
    if has_kernels(hidden):
        quantizers().activate(hidden, row_weights, ends, activation, pair)
    else:
        _write_rows(grouped_gemm.activate(hidden.float(), row_weights, ends, activation), ends, pair)
    return pair


def activate_grad(
    grad: Tensor,
    hidden: Tensor,
    row_weights: Tensor,
    ends: Tensor,
    activation: Activation,
    grad_out: Tensor | None = None,
    bias: Matrices | None = None,
    *,
    exact: bool = False,
) -> HiddenGrads:
    """Return grouped_gemm.activate_grad's results and `activate`'s, quantised from float32.

    exact: return the gradient of hidden in bfloat16 too. The others are those of grouped_gemm.activate_grad
    """
    stacked = None if bias is None else stack_bias(bias)
    found = HiddenGrads(
        _new_pair(hidden, hidden.shape[1]),
        _new_columns(hidden, ends, hidden.shape[1]),
        _new_columns(hidden, ends, grad.shape[1]),
        torch.empty_like(row_weights),
        torch.empty_like(hidden) if exact else None,
    )
    if has_kernels(hidden):
        quantizers().activate_grad(grad, hidden, row_weights, ends, activation, grad_out, stacked, found)
        return found
    grad_hidden, grad_row_weights = grouped_gemm.activate_grad(
        grad, hidden.float(), row_weights, ends, activation, grad_out, stacked
    )
    _write_rows(grad_hidden, ends, found.pair)
    _write_columns(grad_hidden, ends, found.columns)
    _write_columns(grouped_gemm.activate(hidden.float(), row_weights, ends, activation), ends, found.activated)
    found.grad_row_weights.copy_(grad_row_weights)
    if found.exact is not None:
        found.exact.copy_(grad_hidden)
    return found


def _new_pair(rows: Tensor, columns: int) -> QuantizedRows:
    """Return memory for float8 rows of so many columns, and their scales."""
    values = rows.new_empty(rows.shape[0], columns, dtype=E4M3)
    return QuantizedRows(values, rows.new_empty(rows.shape[0], -(-columns // BLOCK), dtype=torch.float32))


def _new_columns(rows: Tensor, ends: Tensor, columns: int) -> QuantizedColumns:
    """Return memory for rows of so many columns, transposed, and their scales."""
    blocks = num_blocks(rows.shape[0], len(ends))
    values = rows.new_empty(columns, BLOCK * blocks, dtype=E4M3)
    return QuantizedColumns(values, rows.new_empty(blocks, columns, dtype=torch.float32))


def _write_rows(rows: Tensor, ends: Tensor, out: QuantizedRows) -> None:
    """Quantise 1 x 128 entries at a time."""
    end = int(ends[-1])
    for to, quantised in zip(out, quantize(rows[:end], powers_of_two=True)):
        to[:end] = quantised


def _write_columns(rows: Tensor, ends: Tensor, out: QuantizedColumns) -> None:
    """Quantise 128 rows of an expert x 1 column at a time."""
    block = 0
    for _, group in groups(ends):
        for begin in range(group.start, group.stop, BLOCK):
            chunk = rows[begin : min(begin + BLOCK, group.stop)]
            quantised = quantize(F.pad(chunk.t(), (0, BLOCK - len(chunk))), powers_of_two=True)
            out.values[:, block * BLOCK : (block + 1) * BLOCK] = quantised.rows
            out.scales[block] = quantised.scales[:, 0]
            block += 1


def kernels():
    """The module of the GEMMs' Triton kernels, imported as grouped_gemm's."""
    from ep_dispatcher.moe import float8_gemm_kernels

    return float8_gemm_kernels


def quantizers():
    """The module of the Triton kernels that quantise."""
    from ep_dispatcher.moe import float8_quantize_kernels

    return float8_quantize_kernels
