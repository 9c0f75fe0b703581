"""The experts of ep.moe_mlp in PyTorch's own operators, for where the kernels of grouped_gemm cannot be used.

That is on CPUs, with float32, and where something looks at operators, as torch.compile does. Each step is a node of
autograd. With max_recv_rows there may be rows after those of the last expert. They are not computed.
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
from ep_dispatcher.moe.expert_matrices import LINE_BYTES
from ep_dispatcher.moe.gradients import clear_unused_rows
from ep_dispatcher.moe.grouped_mlp import Parameters


def expert_inputs(out: DispatchOutput) -> tuple[Any, Tensor, Tensor]:
    """Return the rows of a dispatch, a pair if quantized, their weights, and the end of each expert's rows."""
    assert out.topk_weights is not None  # because the dispatch was given topk_weights
    return out.x, out.topk_weights, out.tokens_per_expert.cumsum(0, dtype=torch.int32)


def pad_parameters(parameters: Parameters, pair: int) -> Parameters:
    """Return the parameters as PyTorch's grouped GEMMs need them: each row has a multiple of 16 bytes.

    This may add intermediate entries. Their weights and biases are 0, so their activations are 0 too.
    """
    w1, w2, b1, b2 = parameters
    assert isinstance(w1, Tensor) and isinstance(w2, Tensor)
    intermediate, line = w2.shape[2], LINE_BYTES // w2.itemsize
    padding = -intermediate % line if intermediate else line
    if padding:
        w1 = F.pad(w1.unflatten(1, (pair, intermediate)), (0, 0, 0, padding)).flatten(1, 2)
        w2 = F.pad(w2, (0, padding))
        if b1 is not None:
            assert isinstance(b1, Tensor)
            b1 = F.pad(b1.unflatten(1, (pair, intermediate)), (0, padding)).flatten(1, 2)
    return Parameters(_dense(w1), _dense(w2), b1, b2)


def _dense(weight: Tensor) -> Tensor:
    """Return the weight as PyTorch's grouped GEMMs need it: matrices without gaps, each stored by row or by column.

    On a GPU they refuse an address that is not a multiple of 16 bytes.
    """
    _, rows, columns = weight.shape
    expert_stride, *matrix_strides = weight.stride()
    is_dense = expert_stride == rows * columns and matrix_strides in ([columns, 1], [1, rows])
    if is_dense and (torch.compiler.is_compiling() or weight.data_ptr() % LINE_BYTES == 0):
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def run_pytorch_experts(
    out: DispatchOutput, parameters: Parameters, activation: Activation, keep_activated: bool
) -> Tensor:
    """Return the result of each row's expert. The parameters come from `pad_parameters`."""
    w1, w2, b1, b2 = parameters
    rows, row_weights, ends = expert_inputs(out)
    hidden = _grouped_linear(rows, w1, b1, ends, None)
    activated_linear = _activated_linear
    if not keep_activated:
        activated_linear = partial(checkpoint, _activated_linear, use_reentrant=False, preserve_rng_state=False)
    return activated_linear(hidden, row_weights, w2, b2, ends, activation)


def _activated_linear(
    hidden: Tensor, row_weights: Tensor, w2: Any, b2: Any, ends: Tensor, activation: Activation
) -> Tensor:
    """Run the activation and the second GEMM of the experts on the results of the first."""
    activated = _WeightedActivation.apply(hidden, row_weights, ends, activation)
    return _grouped_linear(activated, w2, b2, ends, row_weights)


def _grouped_linear(rows: Tensor, weight: Any, bias: Any, ends: Tensor, row_weights: Tensor | None) -> Tensor:
    """Return [rows, n]: rows [rows, k] times weight[e].T of each row's expert e.

    Rows without an expert are not computed.

    weight: [experts, n, k]. ends: int32 [experts], the end of each expert's rows. bias: [experts, n] or None. It is
    added in float32, multiplied by row_weights unless they are None.
    """
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and rows.dtype != torch.bfloat16:  # without fullgraph this causes a graph break, not an error
        checks.refuse(f"buffer is one of {rows.dtype}, but moe_mlp in a whole graph needs torch.bfloat16")
    if not hasattr(F, "grouped_mm"):  # PyTorch before 2.10
        out = _products_one_by_one(rows, weight, ends)
    elif is_compiling:
        out = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    else:
        out = _uncompiled_grouped_product()(rows, weight, ends)
    if bias is None:
        return out
    row = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    expert = torch.searchsorted(ends, row, right=True).clamp(max=len(bias) - 1)
    row_bias = bias.float()[expert]
    if row_weights is not None:
        row_bias = row_bias * row_weights[:, None]
    row_bias = torch.where((row < ends[-1])[:, None], row_bias, 0)  # gradients of rows without an expert are undefined
    return (out.float() + row_bias).to(out.dtype)


def _products_one_by_one(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute the products with one GEMM per expert."""
    end = ends.tolist()
    begin = [0, *end]
    with torch.autocast(rows.device.type, enabled=False):  # unlike grouped_mm, `@` would cast rows of another dtype
        products = [rows[begin[e] : end[e]] @ weight[e].t() for e in range(len(end))]
    num_unused_rows = rows.shape[0] - end[-1]
    return torch.cat([*products, rows.new_zeros(num_unused_rows, weight.shape[1])])


@functools.cache
def _uncompiled_grouped_product() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return grouped_mm in a form that torch.compile does not trace.

    Otherwise torch.compile would compile it by itself after a graph break, and fail with dtypes other than bfloat16. It
    is made at its first use, because that imports Dynamo, which then holds the default group of that moment.
    """
    return torch.compiler.disable(_GroupedProduct.apply)


class _GroupedProduct(torch.autograd.Function):
    """grouped_mm with a backward that knows which rows of a gradient are not computed."""

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
    """The activation of rows times their weights, in float32. It saves only its arguments, so nothing in float32."""

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
