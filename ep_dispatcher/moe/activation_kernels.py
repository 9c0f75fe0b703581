"""The Triton kernels of activations: each program computes one row, in float32, by the formulas of activation.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.kernel_launch import Configuration, Launcher, next_power_of_2

COLUMNS = 1024  # that a step computes


def activate(hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation) -> Tensor:
    num_rows, columns = hidden.shape[0], hidden.shape[1] // activation.pair
    out = hidden.new_empty(num_rows, columns)
    if num_rows:
        configuration = _activation_configuration(activation)
        inputs = hidden, row_weights, ends
        _launch_activate((num_rows, 1, 1), configuration, *inputs, out, columns, ends.shape[0])
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
        num_experts = ends.shape[0]
        _launch_activate_grad(
            (hidden.shape[0], 1, 1),
            _activation_configuration(activation, EXPERTS=next_power_of_2(num_experts)),
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
            num_experts,
        )
    return out, grad_weights


@functools.cache
def _activation_configuration(activation: Activation, **constants: int) -> Configuration:
    return Configuration(constants_of(activation) | dict(BLOCK=COLUMNS) | constants)


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
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + experts - 1):
        return
    weight = tl.load(row_weights + row)
    hidden += row * columns * (2 if GATED else 1)
    for first in range(0, columns, BLOCK):
        i = first + tl.arange(0, BLOCK)
        gate = tl.load(hidden + i, i < columns, 0).to(tl.float32)
        value, _ = activation_value(gate, FUNCTION, ALPHA, LIMIT, BETA)
        if GATED:
            up = tl.load(hidden + columns + i, i < columns, 0).to(tl.float32)
            up, _ = linear_value(up, FUNCTION, LIMIT, OFFSET, LINEAR_BETA)
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
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + experts - 1):
        tl.store(grad_weights + row, 0.0)
        return
    weight = tl.load(row_weights + row)
    total = tl.zeros((BLOCK,), tl.float32)
    pair = columns * (2 if GATED else 1)
    hidden += row * pair
    out += row * pair
    for first in range(0, columns, BLOCK):
        i = first + tl.arange(0, BLOCK)
        gate = tl.load(hidden + i, i < columns, 0).to(tl.float32)
        upstream = tl.load(grad + row * columns + i, i < columns, 0).to(tl.float32)
        value, slope = activation_value(gate, FUNCTION, ALPHA, LIMIT, BETA)
        if GATED:
            up = tl.load(hidden + columns + i, i < columns, 0).to(tl.float32)
            up, up_slope = linear_value(up, FUNCTION, LIMIT, OFFSET, LINEAR_BETA)
            total += upstream * value * up
            upstream *= weight
            tl.store(out + columns + i, (upstream * value * up_slope).to(out.dtype.element_ty), i < columns)
            upstream *= up
        else:
            total += upstream * value
            upstream *= weight
        tl.store(out + i, (upstream * slope).to(out.dtype.element_ty), i < columns)
    if bias is not None:
        e = tl.arange(0, EXPERTS)
        expert = tl.sum((tl.load(ends + e, e < experts, 0x7FFFFFFF) <= row).to(tl.int32))
        for first in range(0, wide, BLOCK):
            i = first + tl.arange(0, BLOCK)
            upstream = tl.load(grad_out + row * wide + i, i < wide, 0).to(tl.float32)
            total += upstream * tl.load(bias + expert * wide + i, i < wide, 0).to(tl.float32)
    tl.store(grad_weights + row, tl.sum(total))


_launch_activate, _launch_activate_grad = Launcher(_activate), Launcher(_activate_grad)
