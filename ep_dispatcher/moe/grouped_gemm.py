"""Grouped GEMMs: rows that lie expert by expert, times the weights of their expert, wherever those lie.

    linear                rows[r] @ weights[e].T + bias[e]     of the expert e of row r
    linear_grad_rows      grad[r] @ weights[e]
    linear_grad_weights   the sum over e's rows of the outer products grad[r] x rows[r]
    linear_grad_bias      the sum over e's rows of grad[r]
    activate              the activation of each row, times the row's weight; and its gradients

`ends` int32 [num_experts] has the end of each expert's rows; expert e's begin where those of e - 1 end. It stays on the
device: the host waits for nothing. Rows at or behind ends[-1] are neither read nor written. GEMMs take a float32
accumulator and round once. Weights are separate matrices, one per expert. They are used where they lie.

On a GPU these are Triton kernels (`grouped_gemm_kernels`), for bfloat16 and float16. Else they are loops over experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ep_dispatcher.moe import activation as plain
from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.matrices import BiasSet, Matrices, RowSet, shape_of

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def has_kernels(rows: Tensor) -> bool:
    """Whether Triton kernels take these rows. The loops take the others, and wait for `ends` on a GPU."""
    return rows.is_cuda and rows.dtype in KERNEL_DTYPES


def linear(
    rows: Tensor, weights: Matrices, ends: Tensor, bias: Matrices | None = None, row_weights: Tensor | None = None
) -> Tensor:
    """Return [num_rows, n] of the rows' dtype: rows [num_rows, k] times weights[e] [n, k], as nn.Linear has it.

    bias: [n] for each expert, added to the sums in float32. row_weights: float32 [num_rows], factors of the bias
    """
    out = rows.new_empty(rows.shape[0], shape_of(weights)[0])
    if has_kernels(rows):
        options = dict(transposed=True, bias=stack_bias(bias), row_weights=row_weights)
        kernels().multiply(rows, weights, ends, out, **options)
        return out
    for expert, expert_rows in groups(ends):
        torch.mm(rows[expert_rows], weights[expert].t(), out=out[expert_rows])
        if bias is not None:
            added = bias_of(bias, expert, expert_rows, row_weights)
            out[expert_rows] = (out[expert_rows].float() + added).to(out.dtype)
    return out


def bias_of(bias: Matrices, expert: int, expert_rows: slice, row_weights: Tensor | None) -> Tensor:
    """Return what is added to an expert's rows, in float32."""
    added = bias[expert].float()
    return added if row_weights is None else row_weights[expert_rows, None] * added


def stack_bias(bias: Matrices | None) -> Tensor | None:
    """Return the biases of all experts, [num_experts, n]."""
    if bias is None or isinstance(bias, Tensor):
        return None if bias is None else bias.contiguous()
    return torch.stack(tuple(bias))


def linear_grad_rows(grad: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
    """Return [num_rows, k], the gradient of `linear`'s rows: grad [num_rows, n] times weights[e] [n, k]."""
    out = grad.new_empty(grad.shape[0], shape_of(weights)[1])
    if has_kernels(grad):
        kernels().multiply(grad, weights, ends, out, transposed=False)
        return out
    for expert, expert_rows in groups(ends):
        torch.mm(grad[expert_rows], weights[expert], out=out[expert_rows])
    return out


def linear_grad_weights(sets: Sequence[RowSet], out: Matrices, *, accumulate: bool) -> None:
    """Write the gradient of `linear`'s weights, or add it to what is there, into out[e] [n, k] of each expert.

    sets: grad [num_rows, n], rows [num_rows, k] and ends, once or twice. All rows are summed before the sums are
    rounded. out in float32 or the rows' dtype. An expert without rows gets zeros.
    """
    if has_kernels(sets[0][1]):
        kernels().outer_products(sets, out, accumulate=accumulate)
        return
    all_groups = zip(*(groups(ends) for _, _, ends in sets))
    for expert_out, of_sets in zip(out, all_groups):
        grad, rows = (torch.cat([one[i][group] for one, (_, group) in zip(sets, of_sets)]) for i in (0, 1))
        with torch.autocast(rows.device.type, enabled=False):  # it does not cast the other products, which have out=
            grad_weights = grad.t() @ rows
        _write(expert_out, grad_weights, accumulate)


def linear_grad_bias(sets: Sequence[BiasSet], out: Matrices, *, accumulate: bool) -> None:
    """Write the gradient of `linear`'s bias, or add it to what is there, into out[e] [n] of each expert.

    sets: grad [num_rows, n], ends, and row_weights float32 [num_rows] or None, once or twice. All rows are summed in
    float32 before the sums are rounded. out in float32 or the rows' dtype. An expert without rows gets zeros.
    """
    if has_kernels(sets[0][0]):
        kernels().bias_grads(sets, out, accumulate=accumulate)
        return
    sums = torch.zeros(len(out), out[0].shape[0], dtype=torch.float32, device=out[0].device)
    for grad, ends, row_weights in sets:
        for expert, expert_rows in groups(ends):
            weighted = grad[expert_rows].float()
            if row_weights is not None:
                weighted = weighted * row_weights[expert_rows, None]
            sums[expert] += weighted.sum(0)
    for expert_out, expert_sum in zip(out, sums):
        _write(expert_out, expert_sum, accumulate)


def activate(hidden: Tensor, row_weights: Tensor, ends: Tensor, activation: Activation) -> Tensor:
    """Return [num_rows, i] of the rows' dtype: the activation of hidden [num_rows, i or 2 * i], times row_weights.

    row_weights float32 [num_rows]. Computed in float32, rounded once.
    """
    if has_kernels(hidden):
        return kernels().activate(hidden, row_weights, ends, activation)
    return plain.activate(hidden, row_weights, activation)


def activate_grad(
    grad: Tensor,
    hidden: Tensor,
    row_weights: Tensor,
    ends: Tensor,
    activation: Activation,
    grad_out: Tensor | None = None,
    bias: Matrices | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `activate`'s rows, like hidden, and of its row_weights, float32 [num_rows].

    grad [num_rows, i]. The gradient of row_weights is 0 behind ends[-1]. grad_out, bias: of the `linear` that follows,
    where row_weights are factors of its bias: that gradient of row_weights is added.
    """
    if has_kernels(hidden):
        return kernels().activate_grad(grad, hidden, row_weights, ends, activation, grad_out, stack_bias(bias))
    grad_rows, grad_weights = plain.activate_grad(grad, hidden, row_weights, activation)
    if bias is not None:
        assert grad_out is not None
        for expert, expert_rows in groups(ends):
            grad_weights[expert_rows] += grad_out[expert_rows].float() @ bias[expert].float()
    grad_weights[int(ends[-1]) :] = 0
    return grad_rows, grad_weights


def _write(out: Tensor, grad: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(grad)
    else:
        out.copy_(grad)


def groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert and its rows."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(begin, end)
        begin = end


@functools.cache
def kernels():
    """The module of the Triton kernels: imported where a GPU needs it, because Triton comes with PyTorch for GPUs."""
    from ep_dispatcher.moe import grouped_gemm_kernels

    return grouped_gemm_kernels
