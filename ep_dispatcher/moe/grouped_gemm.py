"""Grouped GEMMs: rows that lie expert by expert, times the weights of their expert, wherever those lie.

    linear                rows[r] @ weights[e].T               of the expert e of row r
    linear_grad_rows      grad[r] @ weights[e]
    linear_grad_weights   the sum over e's rows of the outer products grad[r] x rows[r]
    weighted_swiglu       silu(gate) * up * weight of each row (gate, up); and its gradients

`ends` int32 [num_experts] has the end of each expert's rows; expert e's begin where those of e - 1 end. It stays on the
device: the host waits for nothing. Rows at or behind ends[-1] are neither read nor written. GEMMs take a float32
accumulator and round once. Weights are separate matrices, one per expert. They are used where they lie.
On a GPU they have to lie at equal distances in one storage, or each GEMM copies them first: `stack_in_place`.

On a GPU these are Triton kernels (`grouped_gemm_kernels`), for bfloat16 and float16. Else they are loops over experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
LINE_BYTES = 16  # the kernels read matrices whose rows begin at multiples of it
Matrices = Sequence[Tensor] | Tensor  # one per expert: a tensor each, or one tensor of them all
RowSet = tuple[Tensor, Tensor, Tensor]  # grad, rows and ends of linear_grad_weights


class Stack(NamedTuple):
    """Matrices [n, k] of one size, as the rows of one matrix: expert e's begin at row `first + e * step`."""

    base: Tensor  # the matrix at the lowest address
    num_rows: int
    first: int
    step: int


def stack_in_place(weights: Matrices) -> Stack | None:
    """Return the weights as one matrix where they lie. None: they do not lie at equal distances in one storage."""
    n, k = weights[0].shape
    if isinstance(weights, Tensor) and weights.is_contiguous():
        return Stack(weights, len(weights) * n, 0, n)
    row_bytes = k * weights[0].element_size()
    if len(weights) == 1:
        return Stack(weights[0], n, 0, n) if weights[0].is_contiguous() else None
    addresses = [weight.data_ptr() for weight in weights]
    distance = addresses[1] - addresses[0]
    # Between them the accelerator may read too, so it all has to be one piece of memory.
    if (
        distance % row_bytes
        or abs(distance) < n * row_bytes
        or any(b - a != distance for a, b in zip(addresses, addresses[1:]))
        or not all(weight.is_contiguous() for weight in weights)
        or weights[0].untyped_storage().data_ptr() != weights[-1].untyped_storage().data_ptr()
    ):
        return None
    step, last = distance // row_bytes, len(weights) - 1
    lowest = weights[0] if step > 0 else weights[-1]
    return Stack(lowest, abs(step) * last + n, 0 if step > 0 else -step * last, step)


def has_kernels(rows: Tensor) -> bool:
    """Whether Triton kernels take these rows. The loops take the others, and wait for `ends` on a GPU."""
    return rows.is_cuda and rows.dtype in KERNEL_DTYPES


def linear(rows: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
    """Return [num_rows, n] of the rows' dtype: rows [num_rows, k] times weights[e] [n, k], as nn.Linear has it."""
    out = rows.new_empty(rows.shape[0], weights[0].shape[0])
    if has_kernels(rows):
        kernels().multiply(rows, weights, ends, out, transposed=True)
        return out
    for expert, expert_rows in _groups(ends):
        torch.mm(rows[expert_rows], weights[expert].t(), out=out[expert_rows])
    return out


def linear_grad_rows(grad: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
    """Return [num_rows, k], the gradient of `linear`'s rows: grad [num_rows, n] times weights[e] [n, k]."""
    out = grad.new_empty(grad.shape[0], weights[0].shape[1])
    if has_kernels(grad):
        kernels().multiply(grad, weights, ends, out, transposed=False)
        return out
    for expert, expert_rows in _groups(ends):
        torch.mm(grad[expert_rows], weights[expert], out=out[expert_rows])
    return out


def linear_grad_weights(
    grad: Tensor, rows: Tensor, ends: Tensor, out: Matrices, *, accumulate: bool, more: RowSet | None = None
) -> None:
    """Write the gradient of `linear`'s weights, or add it to what is there, into out[e] [n, k] of each expert.

    grad [num_rows, n], rows [num_rows, k]; out in float32 or the rows' dtype. An expert without rows gets zeros.
    more: grad, rows and ends once more, of rows behind the first. All are summed before the sums are rounded.
    """
    if has_kernels(rows):
        kernels().outer_products(grad, rows, ends, out, accumulate=accumulate, more=more)
        return
    sets = [(grad, rows, ends)] if more is None else [(grad, rows, ends), more]
    for expert, expert_rows in enumerate(zip(*([one for _, one in _groups(each)] for _, _, each in sets))):
        a, b = ([t[group] for t, group in zip(ts, expert_rows)] for ts in list(zip(*sets))[:2])
        with torch.autocast(rows.device.type, enabled=False):  # it does not cast the other products, which have out=
            grad_weights = (a[0] if more is None else torch.cat(a)).t() @ (b[0] if more is None else torch.cat(b))
        if accumulate:
            out[expert].add_(grad_weights)
        else:
            out[expert].copy_(grad_weights)


def weighted_swiglu(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return [num_rows, i] of the rows' dtype: silu(gate) * up * weight of rows (gate, up) [num_rows, 2 * i].

    weights float32 [num_rows]. Computed in float32, rounded once.
    """
    if has_kernels(rows):
        return kernels().weighted_swiglu(rows, weights, ends)
    return swiglu(rows, weights)


def weighted_swiglu_grad(grad: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weighted_swiglu's rows [num_rows, 2 * i] and weights, float32 [num_rows].

    grad [num_rows, i]. The gradient of the weights is 0 behind ends[-1].
    """
    if has_kernels(rows):
        return kernels().weighted_swiglu_grad(grad, rows, weights, ends)
    grad_rows, grad_weights = swiglu_grad(grad, rows, weights)
    grad_weights[int(ends[-1]) :] = 0
    return grad_rows, grad_weights


def swiglu(rows: Tensor, weights: Tensor) -> Tensor:
    """weighted_swiglu in PyTorch's operators, of all rows there are."""
    gate, up = rows.chunk(2, dim=1)
    return F.silu(gate.float()).mul_(up).mul_(weights[:, None]).to(rows.dtype)


def swiglu_grad(grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """weighted_swiglu_grad likewise."""
    gate, up = rows.float().chunk(2, dim=1)
    grad, sigmoid = grad.float(), gate.sigmoid()
    silu = gate * sigmoid
    grad_weights = (grad * silu * up).sum(1)
    grad = grad * weights[:, None]
    # d silu / d gate = sigmoid * (1 + gate * (1 - sigmoid))
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, grad * silu), dim=1).to(rows.dtype), grad_weights


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert and its rows."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(begin, end)
        begin = end


def kernels():
    """The module of the Triton kernels: imported where a GPU needs it, because Triton comes with PyTorch for GPUs."""
    from ep_dispatcher.moe import grouped_gemm_kernels

    return grouped_gemm_kernels
