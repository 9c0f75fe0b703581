"""The experts of ep.moe_mlp in PyTorch's operators, where the kernels of grouped_gemm do not run or may not be called.

That is on CPUs, with float32, and where something looks at operators, as torch.compile does. Each step is a node of
autograd. Rows behind those of the last expert, which there are with max_recv_rows, are not computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ep_dispatcher import checks
from ep_dispatcher.handle import DispatchOutput
from ep_dispatcher.moe import activation as activations
from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.gradients import clear_unused_rows
from ep_dispatcher.moe.grouped_mlp import Parameters
from ep_dispatcher.moe.matrices import LINE_BYTES


def rows_of(out: DispatchOutput) -> tuple[Any, Tensor, Tensor]:
    """Return rows, or the pair of quantised ones, their weights, and the end of each expert's rows."""
    assert out.topk_weights is not None  # as topk_weights was given
    return out.x, out.topk_weights, out.tokens_per_expert.cumsum(0, dtype=torch.int32)


def padded(parameters: Parameters, pair: int) -> Parameters:
    """Return the parameters as PyTorch's grouped GEMMs take them: with rows of a multiple of 16 bytes.

    So there may be more intermediate entries than given. Their weights and biases are 0, so their activations are 0.
    """
    w1, w2, b1, b2 = parameters
    assert isinstance(w1, Tensor) and isinstance(w2, Tensor)
    intermediate, line = w2.shape[2], LINE_BYTES // w2.itemsize
    missing = -intermediate % line if intermediate else line
    if missing:
        w1 = F.pad(w1.unflatten(1, (pair, intermediate)), (0, 0, 0, missing)).flatten(1, 2)
        w2 = F.pad(w2, (0, missing))
        if b1 is not None:
            assert isinstance(b1, Tensor)
            b1 = F.pad(b1.unflatten(1, (pair, intermediate)), (0, missing)).flatten(1, 2)
    return Parameters(_dense(w1), _dense(w2), b1, b2)


def _dense(weight: Tensor) -> Tensor:
    """Return the weight as PyTorch's grouped GEMMs take it: each matrix by row or by column, no gaps, whole lines.

    On a GPU they refuse an address that is no multiple of 16 bytes.
    """
    _, rows, columns = weight.shape
    of_experts, *of_matrix = weight.stride()
    is_dense = of_experts == rows * columns and of_matrix in ([columns, 1], [1, rows])
    if is_dense and (torch.compiler.is_compiling() or weight.data_ptr() % LINE_BYTES == 0):
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def experts_by_operators(
    out: DispatchOutput, parameters: Parameters, activation: Activation, keep_activated: bool
) -> Tensor:
    """Return the results of the experts by row. The parameters are those of `padded`."""
    w1, w2, b1, b2 = parameters
    rows, row_weights, ends = rows_of(out)
    second = _activated_linear
    if not keep_activated:
        second = partial(checkpoint, _activated_linear, use_reentrant=False, preserve_rng_state=False)
    return second(_grouped_linear(rows, w1, b1, ends, None), row_weights, w2, b2, ends, activation)


def _activated_linear(
    hidden: Tensor, row_weights: Tensor, w2: Any, b2: Any, ends: Tensor, activation: Activation
) -> Tensor:
    """Return the results of the experts, from those of their first GEMM."""
    activated = _WeightedActivation.apply(hidden, row_weights, ends, activation)
    return _grouped_linear(activated, w2, b2, ends, row_weights)


def _grouped_linear(rows: Tensor, weight: Any, bias: Any, ends: Tensor, row_weights: Tensor | None) -> Tensor:
    """Return rows [rows, k] times weight[e].T of each row's expert e, [rows, n]. Rows of no expert are not computed.

    weight: [experts, n, k]; ends: int32 [experts], the end of each expert's rows. bias: [experts, n], added in float32,
    times row_weights if they are given; or None
    """
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and rows.dtype != torch.bfloat16:  # without fullgraph this is no error but a break
        checks.refuse(f"buffer is one of {rows.dtype}, but moe_mlp in a whole graph needs torch.bfloat16")
    if not hasattr(F, "grouped_mm"):  # PyTorch before 2.10
        out = _products_in_turn(rows, weight, ends)
    elif is_compiling:
        out = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    else:
        out = _products()(rows, weight, ends)
    if bias is None:
        return out
    row = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    expert = torch.searchsorted(ends, row, right=True).clamp(max=len(bias) - 1)
    added = bias.float()[expert] if row_weights is None else bias.float()[expert] * row_weights[:, None]
    added = torch.where((row < ends[-1])[:, None], added, 0)  # gradients of rows of no expert are undefined
    return (out.float() + added).to(out.dtype)


def _products_in_turn(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the products, expert by expert."""
    end = ends.tolist()
    with torch.autocast(rows.device.type, enabled=False):  # it casts rows of another dtype too, unlike grouped_mm's
        parts = [rows[b:e] @ w.t() for b, e, w in zip([0, *end], end, weight)]
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - end[-1], weight.shape[1])])


@functools.cache
def _products() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return grouped_mm as torch.compile leaves it alone.

    Else it would compile this alone, behind a break, and fail with other dtypes than bfloat16. Made at the first use,
    because it imports Dynamo, which then holds the default group of that moment.
    """
    return torch.compiler.disable(_GroupedProduct.apply)


class _GroupedProduct(torch.autograd.Function):
    """grouped_mm, with a node of autograd that knows which rows of a gradient are not computed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        grad, grad_rows, grad_weight = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad, weight, offs=ends)
            clear_unused_rows(ends, grad_rows)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad.t(), rows, offs=ends)
        return grad_rows, grad_weight, None


class _WeightedActivation(torch.autograd.Function):
    """The activation of rows, times their weights, in float32. It saves its arguments only, and nothing in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(hidden, row_weights, ends)
        ctx.activation = activation
        return activations.activate(hidden, row_weights, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, row_weights, ends = ctx.saved_tensors
        grads = activations.activate_grad(grad, hidden, row_weights, ctx.activation)
        clear_unused_rows(ends, *grads)
        return *grads, None, None
