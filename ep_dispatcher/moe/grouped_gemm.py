"""Grouped GEMMs: each row is multiplied by the weights of its expert. Rows are sorted by expert.

    linear                rows[r] @ weights[e].T + bias[e]     of the expert e of row r
    linear_grad_rows      grad[r] @ weights[e]
    linear_grad_weights   the sum over e's rows of the outer products grad[r] x rows[r]
    linear_grad_bias      the sum over e's rows of grad[r]
    activate              the activation of each row, times the row's weight; and its gradients

`ends` int32 [num_experts] holds the end of each expert's rows; the rows of expert e begin where those of e - 1 end. It
stays on the device, so the host waits for nothing. Rows at or after ends[-1] are neither read nor written. GEMMs
accumulate in float32 and round once. Weights are one matrix per expert, and are read where they lie, without a copy.

On a GPU these are Triton kernels (`grouped_gemm_kernels`, `weight_grad_kernels`, `activation_kernels`) for bfloat16 and
float16, and for GEMMs compiled ones where those are faster (`hopper_gemm`). Otherwise they are loops over experts. What
uses them is in three files: grouped_mlp.py has the two GEMMs of an expert as one node of autograd, float8_gemm.py has
GEMMs of float8 operands, and pytorch_experts.py does without any of this, in PyTorch's operators.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.moe import activation as activations
from ep_dispatcher.moe import hopper_gemm
from ep_dispatcher.moe.activation import Activation, ActivationGrads
from ep_dispatcher.moe.expert_matrices import BiasGradInputs, ExpertMatrices, WeightGradInputs, matrix_shape

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_ROW_DTYPES = (*KERNEL_DTYPES, torch.float8_e4m3fn)  # of rows that go to a Triton kernel of this package


def has_kernels(rows: Tensor) -> bool:
    """Return whether the Triton kernels take these rows. Loops take all others, and on a GPU they wait for `ends`."""
    return rows.is_cuda and rows.dtype in KERNEL_DTYPES


def ends_of(counts: Tensor, rows: Tensor) -> Tensor:
    """Return `ends` for experts with these numbers of rows, int64 [num_experts], on the device of the rows.

    On a GPU it is one kernel, where PyTorch launches two: one converts the counts.
    """
    if counts.is_cuda and rows.is_cuda and rows.dtype in _ROW_DTYPES:
        return kernels().ends_of(counts)
    return counts.cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)


def linear(
    rows: Tensor,
    weights: ExpertMatrices,
    ends: Tensor,
    bias: ExpertMatrices | None = None,
    row_weights: Tensor | None = None,
    *,
    out: Tensor | None = None,
    first_expert: int = 0,
) -> Tensor:
    """Return [num_rows, n] of the rows' dtype: rows [num_rows, k] times weights[e] [n, k], laid out as in nn.Linear.

    bias: [n] for each expert, added to the sums in float32. row_weights: float32 [num_rows], multiplies the bias
    out: gets the results; None: new memory. first_expert: the expert of weights[0], while bias has all experts. Rows of
    other experts than those of weights are left out
    """
    if out is None:
        out = rows.new_empty(rows.shape[0], matrix_shape(weights)[0])
    if has_kernels(rows):
        _multiply(rows, weights, ends, out, True, first_expert, bias=stack_bias(bias), row_weights=row_weights)
        return out
    for weight, (expert, expert_rows) in zip(weights, rows_by_expert(ends, first_expert)):
        torch.mm(rows[expert_rows], weight.t(), out=out[expert_rows])
        if bias is not None:
            bias_rows = weighted_bias(bias, expert, expert_rows, row_weights)
            out[expert_rows] = (out[expert_rows].float() + bias_rows).to(out.dtype)
    return out


def _multiply(
    rows: Tensor, weights: ExpertMatrices, ends: Tensor, out: Tensor, transposed: bool, first_expert: int, **biases: Any
) -> None:
    """Call the faster one of the two kernels on a GPU."""
    if first_expert or not hopper_gemm.multiply(rows, weights, ends, out, transposed=transposed, **biases):
        kernels().multiply(rows, weights, ends, out, transposed=transposed, first_expert=first_expert, **biases)


def weighted_bias(bias: ExpertMatrices, expert: int, expert_rows: slice, row_weights: Tensor | None) -> Tensor:
    """Return the bias of one expert in float32, times the weights of its rows if there are any."""
    expert_bias = bias[expert].float()
    return expert_bias if row_weights is None else row_weights[expert_rows, None] * expert_bias


def stack_bias(bias: ExpertMatrices | None) -> Tensor | None:
    """Return the biases of all experts as one tensor [num_experts, n]."""
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        return bias.contiguous()
    return torch.stack(tuple(bias))


def linear_grad_rows(
    grad: Tensor, weights: ExpertMatrices, ends: Tensor, *, out: Tensor | None = None, first_expert: int = 0
) -> Tensor:
    """Return [num_rows, k], the gradient of `linear`'s rows: grad [num_rows, n] times weights[e] [n, k].

    out, first_expert: as in `linear`
    """
    if out is None:
        out = grad.new_empty(grad.shape[0], matrix_shape(weights)[1])
    if has_kernels(grad):
        _multiply(grad, weights, ends, out, False, first_expert)
        return out
    for weight, (_, expert_rows) in zip(weights, rows_by_expert(ends, first_expert)):
        torch.mm(grad[expert_rows], weight, out=out[expert_rows])
    return out


def linear_grad_weights(
    sets: Sequence[WeightGradInputs],
    out: ExpertMatrices,
    *,
    accumulate: bool,
    first_expert: int = 0,
    held: Tensor | None = None,
) -> None:
    """Write the gradient of `linear`'s weights into out[e] [n, k] of each expert, or add it to what out holds.

    sets: one or two sets of grad [num_rows, n], rows [num_rows, k] and ends. The rows of both sets are summed before
    the sums are rounded. out has float32 or the rows' dtype. An expert without rows gets zeros.
    first_expert: the expert of out[0]. There may be more experts behind those of out.
    held: int32 [len(out), 3], contiguous. Where held[e, 0] is negative, out[e] is of no use, and may stay as it is
    """
    _, first_rows, _ = sets[0]
    if has_kernels(first_rows):
        is_usual = not first_expert and held is None
        if not is_usual or not hopper_gemm.write_weight_grads(sets, out, accumulate):
            gradient_kernels().outer_products(sets, out, accumulate=accumulate, first_expert=first_expert, held=held)
        return
    expert_grads: list[list[Tensor]] = [[] for _ in out]  # for each expert, the parts of all sets
    expert_inputs: list[list[Tensor]] = [[] for _ in out]
    for grad, rows, ends in sets:
        for i, (_, expert_rows) in zip(range(len(out)), rows_by_expert(ends, first_expert)):
            expert_grads[i].append(grad[expert_rows])
            expert_inputs[i].append(rows[expert_rows])
    for expert_out, grads, inputs in zip(out, expert_grads, expert_inputs):
        # Autocast would cast this product; the other ones have an `out=`, so it leaves them alone.
        with torch.autocast(first_rows.device.type, enabled=False):
            grad_weights = torch.cat(grads).t() @ torch.cat(inputs)
        _write(expert_out, grad_weights, accumulate)


def linear_grad_bias(
    sets: Sequence[BiasGradInputs], out: ExpertMatrices, *, accumulate: bool, first_expert: int = 0
) -> None:
    """Write the gradient of `linear`'s bias into out[e] [n] of each expert, or add it to what out holds.

    sets: one or two sets of grad [num_rows, n], ends, and row_weights float32 [num_rows] or None. The rows of both sets
    are summed in float32 before the sums are rounded. out has float32 or the rows' dtype. An expert without rows gets
    zeros. first_expert: as in `linear_grad_weights`.
    """
    first_grad, _, _ = sets[0]
    if has_kernels(first_grad):
        gradient_kernels().bias_grads(sets, out, accumulate=accumulate, first_expert=first_expert)
        return
    sums = torch.zeros(len(out), out[0].shape[0], dtype=torch.float32, device=out[0].device)
    for grad, ends, row_weights in sets:
        for expert_sum, (_, expert_rows) in zip(sums, rows_by_expert(ends, first_expert)):
            weighted = grad[expert_rows].float()
            if row_weights is not None:
                weighted = weighted * row_weights[expert_rows, None]
            expert_sum += weighted.sum(0)
    for expert_out, expert_sum in zip(out, sums):
        _write(expert_out, expert_sum, accumulate)


def activate(hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation) -> Tensor:
    """Return [num_rows, i] of the rows' dtype: the activation of hidden [num_rows, i or 2 * i], times row_weights.

    row_weights float32 [num_rows]. Computed in float32, rounded once.
    """
    if has_kernels(hidden):
        return activation_kernels().activate(hidden, row_weights, ends, activation)
    return activations.activate(hidden, row_weights, activation)


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
) -> ActivationGrads:
    """Return the gradients of `activate`'s rows and row_weights.

    grad [num_rows, i]. The gradient of row_weights is 0 from ends[-1] on. grad_out, bias: those of the `linear` that
    follows, if its bias is multiplied by row_weights too. Then the gradient from there is added.
    with_activated: compute the result of `activate` again, with the same bits
    """
    if has_kernels(hidden):
        inputs = grad, hidden, row_weights, ends, activation, grad_out, stack_bias(bias)
        return activation_kernels().activate_grad(*inputs, with_activated=with_activated)
    grad_rows, grad_weights = activations.activate_grad(grad, hidden, row_weights, activation)
    if bias is not None:
        assert grad_out is not None
        for expert, expert_rows in rows_by_expert(ends):
            grad_weights[expert_rows] += grad_out[expert_rows].float() @ bias[expert].float()
    grad_weights[int(ends[-1]) :] = 0
    activated = activate(hidden, row_weights, ends, activation) if with_activated else None
    return ActivationGrads(grad_rows, grad_weights, activated)


def _write(out: Tensor, grad: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(grad)
    else:
        out.copy_(grad)


def rows_by_expert(ends: Tensor, first_expert: int = 0) -> Iterator[tuple[int, slice]]:
    """Yield each expert from first_expert on, and the slice of its rows."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if expert >= first_expert:
            yield expert, slice(begin, end)
        begin = end


@functools.cache
def kernels():
    """Return the module of the Triton kernels. Only GPUs import it, because Triton comes with PyTorch for GPUs."""
    from ep_dispatcher.moe import grouped_gemm_kernels

    return grouped_gemm_kernels


@functools.cache
def gradient_kernels():
    """Return the module of the Triton kernels of gradients of weights and biases, likewise."""
    from ep_dispatcher.moe import weight_grad_kernels

    return weight_grad_kernels


@functools.cache
def activation_kernels():
    """Return the module of the Triton kernels of activations, likewise."""
    from ep_dispatcher.moe import activation_kernels

    return activation_kernels
