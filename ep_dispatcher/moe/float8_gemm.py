"""Grouped GEMMs of float8 operands, quantized as in Transformer Engine's blockwise recipe and in DeepSeek-V3.

    rows, gradients, activations    one scale for 1 x 128 entries of a row
    weights                         one scale for 128 x 128 entries

Scales are float32 powers of two that multiply: value = entry * scale. The last block of an axis may be shorter. A GEMM
adds 128 products in float32, multiplies the sum by both scales, goes on to the next 128, and rounds once at the end.
FP8 tensor cores read both operands along the axis of the sum only, so a matrix that is needed both ways has a
transposed copy.

Gradients of weights are computed by grouped_gemm, in bfloat16. On an H100 float8 took 1.2 to 1.3 times as long with up
to 1024 rows per expert, because main_grad is read and written either way, and the operands had to be quantized along
columns.

`ends`, and rows from ends[-1] on, are treated as in grouped_gemm. On a GPU these are Triton kernels
(`float8_gemm_kernels`) and, for most GEMMs on GPUs of compute capability 9.0, a compiled one (`hopper_gemm`). Otherwise
they are loops over experts, which define the results. Quantized entries of activations may differ from those by one
step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.float8 import BLOCK, E4M3_MAX, QuantizedRows, dequantize, next_power_of_two, quantize
from ep_dispatcher.moe import grouped_gemm, hopper_gemm
from ep_dispatcher.moe.activation import Activation, ActivationGrads
from ep_dispatcher.moe.expert_matrices import ExpertMatrices, QuantizedMatrices, matrix_shape, num_matrices
from ep_dispatcher.moe.grouped_gemm import rows_by_expert, stack_bias, weighted_bias

E4M3 = torch.float8_e4m3fn


def has_kernels(rows: Tensor) -> bool:
    """Return whether the Triton kernels take these rows."""
    return rows.is_cuda


def check_pair(argument: str, pair: tuple[Tensor, Tensor], columns: int) -> None:
    """Raise ValueError unless a pair is contiguous, and is what ep.quantize returns for rows of `columns` columns."""
    rows, scales = pair
    num_rows = rows.shape[0]
    rows_shape, scales_shape = (num_rows, columns), (num_rows, checks.num_scales(columns))
    has_right_dtypes = rows.dtype == E4M3 and scales.dtype == torch.float32
    has_right_shapes = rows.shape == rows_shape and scales.shape == scales_shape
    if not (has_right_dtypes and has_right_shapes and rows.is_contiguous() and scales.is_contiguous()):
        given = " and ".join(f"{t.dtype} {[*t.shape]} with strides {[*t.stride()]}" for t in pair)
        checks.fail(argument, given, f"{E4M3} {[*rows_shape]} and torch.float32 {[*scales_shape]}, contiguous")


def linear(
    pair: tuple[Tensor, Tensor],
    weights: QuantizedMatrices,
    ends: Tensor,
    bias: ExpertMatrices | None = None,
    row_weights: Tensor | None = None,
    *,
    out: Tensor | None = None,
    first_expert: int = 0,
) -> Tensor:
    """Return bfloat16 [num_rows, n]: rows [num_rows, k] times weights[e] [n, k], plus bias[e].

    pair: rows and scales, float32 [num_rows, ceil(k / 128)]. All other arguments are those of grouped_gemm.linear
    """
    rows, scales = pair
    if out is None:
        out = rows.new_empty(rows.shape[0], matrix_shape(weights.rows)[0], dtype=torch.bfloat16)
    if has_kernels(rows):
        stacked_bias = stack_bias(bias)
        options: dict[str, Any] = dict(bias=stacked_bias, row_weights=row_weights, scales=scales)
        for part in weights.split():  # one launch reads the scales of one part
            arguments = pair, part, ends, out, stacked_bias, row_weights
            if first_expert or not hopper_gemm.multiply_float8(*arguments):
                options |= dict(weight_scales=part.scales, first_expert=first_expert)
                grouped_gemm.kernels().multiply(rows, part.rows, ends, out, transposed=True, **options)
            first_expert += num_matrices(part.rows)
        return out
    for i, (expert, expert_rows) in zip(range(num_matrices(weights.rows)), rows_by_expert(ends, first_expert)):
        weight = weights.rows[i]
        weight_scales = weights.scales[i].repeat_interleave(BLOCK, 0)[: weight.shape[0]]
        total = _scaled_product(rows[expert_rows], scales[expert_rows], weight, weight_scales)
        if bias is not None:
            total += weighted_bias(bias, expert, expert_rows, row_weights)
        out[expert_rows] = total.to(out.dtype)
    return out


def linear_grad_rows(
    pair: tuple[Tensor, Tensor],
    weights: QuantizedMatrices,
    ends: Tensor,
    *,
    out: Tensor | None = None,
    first_expert: int = 0,
) -> Tensor:
    """Return bfloat16 [num_rows, k], the gradient of `linear`'s dequantized rows. pair: the gradient of its result"""
    return linear(pair, weights.t(), ends, out=out, first_expert=first_expert)


def _scaled_product(a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor) -> Tensor:
    """Return a @ b.T in float32, [m, n]: a [m, k], b [n, k], with a scale for each row and block of 128."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        for block in range(checks.num_scales(a.shape[1])):
            x, y = (t[:, block * BLOCK : (block + 1) * BLOCK].float() for t in (a, b))
            total += (x @ y.t()) * (scales_a[:, block, None] * scales_b[:, block])
    return total


@torch.no_grad()
def quantize_weights(
    weights: ExpertMatrices, out: QuantizedMatrices | None = None, skip: Tensor | None = None
) -> QuantizedMatrices:
    """Quantize the weights of experts, [n, k] each, in bfloat16 or float32. Each field of the result is one tensor.

    out: where the result is written, that of an earlier call with weights of these shapes; None: it is allocated
    skip: one number on the device; if it is not 0, nothing is written. In a CUDA graph each replay reads it
    """
    quantized = _new_matrices(weights) if out is None else out
    if has_kernels(weights[0]):
        kernels().quantize_weights(weights, quantized, skip)
    elif skip is None or skip.item() == 0:
        _write_matrices(weights, quantized)
    return quantized


def _new_matrices(weights: ExpertMatrices) -> QuantizedMatrices:
    """Allocate the result of quantize_weights."""
    experts, (n, k) = num_matrices(weights), weights[0].shape
    rows = torch.empty(experts, n, k, dtype=E4M3, device=weights[0].device)
    scales = torch.empty(
        experts, checks.num_scales(n), checks.num_scales(k), dtype=torch.float32, device=weights[0].device
    )
    return QuantizedMatrices(rows, scales, rows.new_empty(experts, k, n), scales.new_empty(scales.mT.shape))


def _write_matrices(weights: ExpertMatrices, out: QuantizedMatrices) -> None:
    """Quantize the weights of all experts into `out`."""
    for expert, weight in enumerate(weights):
        n, k = weight.shape
        padded = F.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        amax = blocks.abs().amax((1, 3))
        scales = next_power_of_two((amax / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny))
        rows = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:n, :k].to(E4M3)
        for field, value in zip(out, (rows, scales, rows.mT, scales.mT)):
            field[expert].copy_(value)


def quantize_rows(rows: Tensor, ends: Tensor) -> QuantizedRows:
    """Quantize bfloat16 rows [num_rows, columns], with one scale for 1 x 128 entries."""
    pair = _new_pair(rows, rows.shape[1])
    if has_kernels(rows):
        kernels().quantize(rows, ends, pair)
    else:
        _write_rows(rows, ends, pair)
    return pair


def dequantize_rows(pair: tuple[Tensor, Tensor], ends: Tensor) -> Tensor:
    """Return the rows of a pair in bfloat16. That is exact if the scales are powers of two."""
    rows, scales = pair
    if not has_kernels(rows):
        return dequantize((rows, scales))
    out = torch.empty_like(rows, dtype=torch.bfloat16)
    kernels().dequantize(rows, scales, ends, out)
    return out


def activate(hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation) -> QuantizedRows:
    """Return the result of grouped_gemm.activate, quantized from float32, with one scale for 1 x 128 entries."""
    pair = _new_pair(hidden, hidden.shape[1] // activation.pair)
    if has_kernels(hidden):
        kernels().quantize(hidden, ends, pair, row_weights, activation)
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
    bias: ExpertMatrices | None = None,
    *,
    with_activated: bool = False,
) -> tuple[ActivationGrads, QuantizedRows]:
    """Return grouped_gemm.activate_grad, and its gradient of rows as quantize_rows quantizes it."""
    inputs = grad, hidden, row_weights, ends, activation, grad_out
    if has_kernels(hidden) and grouped_gemm.activation_kernels().can_quantize(activation, grad.shape[1]):
        pair, in_one = _new_pair(hidden, hidden.shape[1]), grouped_gemm.activation_kernels().activate_grad
        return in_one(*inputs, stack_bias(bias), with_activated=with_activated, quantized=pair), pair
    grads = grouped_gemm.activate_grad(*inputs, bias, with_activated=with_activated)
    return grads, quantize_rows(grads.rows, ends)


def _new_pair(rows: Tensor, columns: int) -> QuantizedRows:
    """Allocate float8 rows [num_rows, columns] and their scales."""
    values = rows.new_empty(rows.shape[0], columns, dtype=E4M3)
    return QuantizedRows(values, rows.new_empty(rows.shape[0], checks.num_scales(columns), dtype=torch.float32))


def _write_rows(rows: Tensor, ends: Tensor, out: QuantizedRows) -> None:
    """Quantize the rows of all experts into `out`, with one scale for 1 x 128 entries."""
    end = int(ends[-1])
    values, scales = quantize(rows[:end], checks.POWERS_OF_TWO)
    out.rows[:end] = values
    out.scales[:end] = scales


@functools.cache
def kernels():
    """Return the module of the Triton kernels, which is imported late, as in grouped_gemm."""
    from ep_dispatcher.moe import float8_gemm_kernels

    return float8_gemm_kernels
