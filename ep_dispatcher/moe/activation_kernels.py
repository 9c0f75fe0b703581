"""The Triton kernels of activations: each program computes one row, in float32, by the formulas of activation.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_dispatcher.float8 import QuantizedRows
from ep_dispatcher.moe.activation import Activation, ActivationGrads
from ep_dispatcher.moe.block_scales import BLOCK, quantize_blocks
from ep_dispatcher.moe.kernel_launch import Configuration, Launcher, next_power_of_2

# Columns that a step computes, and warps of a program. On an H200 gradients and what is quantized with them take 0.94
# of the time of 1024 columns and 4 warps if rows have 768 or 1536, and 1.03 with 2048; gradients alone 0.96 to 1.05.
STEP, WARPS = 1024, 4
GRAD_STEP, GRAD_WARPS = 512, 2


def activate(hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation) -> Tensor:
    num_rows, columns = hidden.shape[0], hidden.shape[1] // activation.pair
    out = hidden.new_empty(num_rows, columns)
    if num_rows:
        configuration = _activation_configuration(activation)
        inputs = hidden, row_weights, ends
        _launch_activate((num_rows, 1, 1), configuration, *inputs, out, columns, ends.shape[0])
    return out


def can_quantize(activation: Activation, columns: int) -> bool:
    """Return whether activate_grad can quantize: with a gate no block may lie in both halves of a row."""
    return not activation.gated or columns % BLOCK.value == 0


def activate_grad(
    grad: Tensor,
    hidden: Tensor,
    row_weights: Tensor,
    ends: Tensor,
    activation: Activation,
    grad_out: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    with_activated: bool = False,
    quantized: QuantizedRows | None = None,
) -> ActivationGrads:
    """Compute grouped_gemm.activate_grad.

    with_activated   as there
    quantized        gets the gradient of rows, quantized from what is rounded; only where can_quantize returns True
    """
    assert quantized is None or can_quantize(activation, grad.shape[1])
    grads = ActivationGrads(
        torch.empty_like(hidden), torch.empty_like(row_weights), torch.empty_like(grad) if with_activated else None
    )
    if hidden.shape[0]:
        num_experts = ends.shape[0]
        _launch_activate_grad(
            (hidden.shape[0], 1, 1),
            _grad_configuration(activation, next_power_of_2(num_experts)),
            grad,
            hidden,
            row_weights,
            ends,
            *grads,
            *(quantized or (None, None)),
            grad.shape[1],
            grad_out,
            bias,
            0 if bias is None else bias.shape[1],
            num_experts,
        )
    return grads


@functools.cache
def _activation_configuration(activation: Activation) -> Configuration:
    return Configuration(constants_of(activation) | dict(STEP=STEP), num_warps=WARPS)


@functools.cache
def _grad_configuration(activation: Activation, experts: int) -> Configuration:
    constants = constants_of(activation) | dict(EXPERTS=experts, STEP=GRAD_STEP)
    return Configuration(constants, num_warps=GRAD_WARPS)


def constants_of(activation: Activation | None) -> dict[str, Any]:
    """Return the constexpr parameters of an activation, which are its fields. Without one they are None.

    The activation itself cannot be a parameter, because some versions of Triton make a plain tuple of it.
    """
    names = map(str.upper, Activation._fields)
    return dict.fromkeys(names) if activation is None else dict(zip(names, activation))


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


# Each returns a value and its derivative; the compiler drops what is not used.
@triton.jit
def activation_value(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BETA: tl.constexpr):
    if LIMIT is not None:
        inside = x <= LIMIT
        x = tl.minimum(x, LIMIT)
    if FUNCTION == "silu":
        scaled = x
        if ALPHA != 1:
            scaled = ALPHA * x
        sigmoid = tl.sigmoid(scaled)
        value = x * sigmoid
        slope = sigmoid * (1 + scaled * (1 - sigmoid))
    elif FUNCTION == "gelu":
        erf = tl.erf(x * 0.7071067811865476)
        value = x * (1 + erf) * 0.5
        slope = (1 + erf) * 0.5 + x * tl.exp(-x * x * 0.5) * 0.3989422804014327
    elif FUNCTION == "gelu_tanh":
        tanh = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        value = x * (1 + tanh) * 0.5
        slope = (1 + tanh) * 0.5 + x * (1 - tanh * tanh) * 0.3989422804014327 * (1 + 0.134145 * x * x)
    elif FUNCTION == "squared_relu":
        positive = tl.maximum(x, 0.0)
        value = positive * positive
        slope = 2 * positive
    else:
        sigmoid = tl.sigmoid(x)
        tanh = _tanh(x / BETA)
        value = BETA * tanh * sigmoid
        slope = (1 - tanh * tanh) * sigmoid + value * (1 - sigmoid)
    if LIMIT is not None:
        slope = tl.where(inside, slope, 0.0)
    return value, slope


@triton.jit
def linear_value(up, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, LINEAR_BETA: tl.constexpr):
    slope = tl.full(up.shape, 1.0, tl.float32)
    if FUNCTION == "situ":
        tanh = _tanh(up / LINEAR_BETA)
        up = LINEAR_BETA * tanh
        slope = 1 - tanh * tanh
    if LIMIT is not None:
        slope = tl.where(tl.abs(up) <= LIMIT, slope, 0.0)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if OFFSET != 0:
        up += OFFSET
    return up, slope


@triton.jit
def _activate(
    hidden,
    row_weights,
    ends,
    out,
    columns,
    experts,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + experts - 1):
        return
    weight = tl.load(row_weights + row)
    hidden += row * columns * (2 if GATED else 1)
    for first in range(0, columns, STEP):
        i = first + tl.arange(0, STEP)
        gate = tl.load(hidden + i, i < columns, 0).to(tl.float32)
        value, _ = activation_value(gate, FUNCTION, ALPHA, LIMIT, BETA)
        if GATED:
            up = tl.load(hidden + columns + i, i < columns, 0).to(tl.float32)
            up, _ = linear_value(up, FUNCTION, LIMIT, OFFSET, LINEAR_BETA)
            value = value * up
        tl.store(out + row * columns + i, (value * weight).to(out.dtype.element_ty), i < columns)


@triton.jit
def _put_gradient(value, out, quantized, scales, begin, first, columns, STEP: tl.constexpr):
    """Store STEP entries of a row's gradient, and quantize them where there is memory for it.

    begin: 0, or the first entry of the second half. first: of these entries in their half, which has `columns`
    """
    i = first + tl.arange(0, STEP)
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + begin + i, rounded, i < columns)
    if quantized is not None:
        blocks = tl.reshape(rounded.to(tl.float32), (STEP // BLOCK, BLOCK))
        entries, scale = quantize_blocks(blocks, quantized.dtype.element_ty)
        tl.store(quantized + begin + i, tl.reshape(entries, (STEP,)), i < columns)
        block = first // BLOCK + tl.arange(0, STEP // BLOCK)
        tl.store(scales + begin // BLOCK + block, scale, block < tl.cdiv(columns, BLOCK))


@triton.jit
def _activate_grad(
    grad,
    hidden,
    row_weights,
    ends,
    out,
    grad_weights,
    activated,
    quantized,
    scales,
    columns,
    grad_out,
    bias,
    wide,
    experts,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + experts - 1):
        tl.store(grad_weights + row, 0.0)
        return
    weight = tl.load(row_weights + row)
    total = tl.zeros((STEP,), tl.float32)
    width = columns * (2 if GATED else 1)
    hidden += row * width
    out += row * width
    if activated is not None:
        activated += row * columns
    if quantized is not None:
        quantized += row * width
        scales += row * tl.cdiv(width, BLOCK)
    for first in range(0, columns, STEP):
        i = first + tl.arange(0, STEP)
        gate = tl.load(hidden + i, i < columns, 0).to(tl.float32)
        upstream = tl.load(grad + row * columns + i, i < columns, 0).to(tl.float32)
        value, slope = activation_value(gate, FUNCTION, ALPHA, LIMIT, BETA)
        if GATED:
            up = tl.load(hidden + columns + i, i < columns, 0).to(tl.float32)
            up, up_slope = linear_value(up, FUNCTION, LIMIT, OFFSET, LINEAR_BETA)
            product = value * up
            total += upstream * value * up
            upstream *= weight
            _put_gradient(upstream * value * up_slope, out, quantized, scales, columns, first, columns, STEP)
            upstream *= up
        else:
            product = value
            total += upstream * value
            upstream *= weight
        _put_gradient(upstream * slope, out, quantized, scales, 0, first, columns, STEP)
        if activated is not None:
            tl.store(activated + i, (product * weight).to(activated.dtype.element_ty), i < columns)
    if bias is not None:
        e = tl.arange(0, EXPERTS)
        expert = tl.sum((tl.load(ends + e, e < experts, 0x7FFFFFFF) <= row).to(tl.int32))
        for first in range(0, wide, STEP):
            i = first + tl.arange(0, STEP)
            upstream = tl.load(grad_out + row * wide + i, i < wide, 0).to(tl.float32)
            total += upstream * tl.load(bias + expert * wide + i, i < wide, 0).to(tl.float32)
    tl.store(grad_weights + row, tl.sum(total))


_launch_activate, _launch_activate_grad = Launcher(_activate), Launcher(_activate_grad)
