"""A layer of SwiGLU experts on rows that lie expert by expert: two grouped GEMMs, as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_dispatcher import checks, grouped_gemm
from ep_dispatcher.grouped_gemm import Matrices

# write(of_w1, of_w2, accumulate): write the gradients into these tensors, one per expert, or add them to what is there.
WriteGrads = Callable[[Matrices, Matrices, bool], None]


@dataclass(frozen=True, eq=False)
class _Call:
    """What a forward pass needs beside the tensors that autograd keeps."""

    w1: Matrices
    w2: Matrices
    keep_activated: bool
    take_grads: Callable[[WriteGrads], Tensor | None] | None


def grouped_swiglu_mlp(
    rows: Tensor,
    row_weights: Tensor,
    ends: Tensor,
    w1: Matrices,
    w2: Matrices,
    *,
    keep_activated: bool = True,
    take_grads: Callable[[WriteGrads], Tensor | None] | None = None,
    anchor: Tensor | None = None,
) -> Tensor:
    """Run every expert on its rows. Return [num_rows, hidden] of the rows' dtype.

        gate, up = w1[e] @ rows[r]                                 e: the expert of row r
        out[r] = w2[e] @ (row_weights[r] * silu(gate) * up)

    rows            [num_rows, hidden], expert by expert
    row_weights     float32 [num_rows]
    ends            int32 [num_experts] on the rows' device: the end of each expert's rows. Rows at or behind ends[-1]
                    are neither read nor written
    w1              for each expert [2 * intermediate, hidden] of the rows' dtype, as torch.nn.Linear has it: a tensor
                    each, or one tensor of them all
    w2              for each expert [hidden, intermediate], likewise
    keep_activated  False: the backward computes the activation again, and num_rows * intermediate values less are kept
    take_grads      called once in every backward with write(of_w1, of_w2, accumulate). It calls that then or later, on
                    tensors of its choice, in float32 or the rows' dtype. Autograd then sees no gradient of w1 and w2,
                    and runs nothing for each of them. None: they get their gradients from autograd
    anchor          a tensor that autograd sees instead of w1 and w2: its gradient is what take_grads returns

    GEMMs accumulate in float32 and round once; the activation is computed in float32, weighted, and rounded once.
    Gradients reach rows, row_weights, w1 and w2. There are no second derivatives. On a GPU the host waits for nothing.

    Raises ValueError where the dtypes of rows and weights differ.
    """
    for name, weight in (("w1", w1[0]), ("w2", w2[0])):
        if weight.dtype != rows.dtype:
            checks.fail(name, weight.dtype, f"{rows.dtype}, as the rows have it")
    call = _Call(w1, w2, keep_activated, take_grads)
    if take_grads is None:
        weights = (w1, w2) if isinstance(w1, Tensor) else (*w1, *w2)
        return _GroupedSwigluMlp.apply(rows, row_weights, ends, None, call, *weights)
    if anchor is None and not (rows.requires_grad or row_weights.requires_grad):
        anchor = torch.empty(0, requires_grad=True)  # nothing but the weights wants a gradient, and the backward runs
    return _GroupedSwigluMlp.apply(rows, row_weights, ends, anchor, call)


class _GroupedSwigluMlp(torch.autograd.Function):
    """Both GEMMs and the activation. Parameters that take_grads looks after are no inputs: autograd knows none."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, row_weights: Tensor, ends: Tensor, anchor: Tensor | None, call: _Call, *weights: Tensor
    ) -> Tensor:
        hidden = grouped_gemm.linear(rows, call.w1, ends)
        activated = grouped_gemm.weighted_swiglu(hidden, row_weights, ends)
        out = grouped_gemm.linear(activated, call.w2, ends)
        ctx.call = call
        ctx.save_for_backward(rows, row_weights, ends, hidden, activated if call.keep_activated else None, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, row_weights, ends, hidden, activated, *weights = ctx.saved_tensors
        call: _Call = ctx.call
        w1, w2 = call.w1, call.w2
        if len(weights) == 2 and isinstance(w1, Tensor):
            w1, w2 = weights
        elif weights:
            w1, w2 = weights[: len(w1)], weights[len(w1) :]
        grad = grad.contiguous()
        of_activated = grouped_gemm.linear_grad_rows(grad, w2, ends)
        of_hidden, of_row_weights = grouped_gemm.weighted_swiglu_grad(of_activated, hidden, row_weights, ends)
        of_rows = grouped_gemm.linear_grad_rows(of_hidden, w1, ends) if ctx.needs_input_grad[0] else None

        def write(of_w1: Matrices, of_w2: Matrices, accumulate: bool) -> None:
            kept = activated if call.keep_activated else grouped_gemm.weighted_swiglu(hidden, row_weights, ends)
            grouped_gemm.linear_grad_weights(grad, kept, ends, of_w2, accumulate=accumulate)
            grouped_gemm.linear_grad_weights(of_hidden, rows, ends, of_w1, accumulate=accumulate)

        of_anchor: Tensor | None = None
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if call.take_grads is not None:
            of_anchor = call.take_grads(write)
        elif any(ctx.needs_input_grad[5:]):
            of_w1, of_w2 = empty_grads(w1), empty_grads(w2)
            write(of_w1, of_w2, False)
            of_weights = [of_w1, of_w2] if isinstance(of_w1, Tensor) else [*of_w1, *of_w2]  # type: ignore[list-item]
        return of_rows, of_row_weights, None, of_anchor, None, *of_weights


def empty_grads(weights: Matrices) -> Matrices:
    """Return tensors like the weights, all of them in one piece of memory."""
    if isinstance(weights, Tensor):
        return torch.empty_like(weights)
    return weights[0].new_empty(len(weights), *weights[0].shape).unbind(0)
