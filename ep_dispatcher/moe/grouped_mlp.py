"""A layer of SwiGLU experts on rows that lie expert by expert: two grouped GEMMs, as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_dispatcher import checks
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.grouped_gemm import Matrices

# write(grad_w1, grad_w2, accumulate): write the gradients into these tensors, one per expert, or add to what is there.
WriteGrads = Callable[[Matrices, Matrices, bool], None]


@dataclass(frozen=True, eq=False)
class Call:
    """What a forward pass needs beside the tensors that autograd keeps: the weights, and who takes their gradients."""

    w1: Matrices
    w2: Matrices
    keep_activated: bool
    take_grads: Callable[[WriteGrads], Tensor | None] | None
    anchor: Tensor | None

    def inputs(self, *others: Tensor) -> tuple[Tensor | None, ...]:
        """Return the last inputs of an autograd node after `others`: an anchor or None, then weights.

        Weights are inputs where autograd looks after their gradients. Otherwise an anchor lets the backward run where
        nothing but the weights wants a gradient.
        """
        if self.take_grads is None:
            return None, *((self.w1, self.w2) if isinstance(self.w1, Tensor) else (*self.w1, *self.w2))
        if self.anchor is None and not any(t.requires_grad for t in others):
            return (torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True),)
        return (self.anchor,)

    def saved(self, weights: Sequence[Tensor]) -> tuple[Matrices, Matrices]:
        """Return w1 and w2, of those that autograd has kept if it keeps them."""
        if not weights:
            return self.w1, self.w2
        if isinstance(self.w1, Tensor):
            return weights[0], weights[1]
        return weights[: len(self.w1)], weights[len(self.w1) :]

    def gradients(self, write: WriteGrads, weights: Sequence[Tensor], wanted: bool) -> Sequence[Tensor | None]:
        """Let the gradients of the weights be written. Return those of `inputs`."""
        if self.take_grads is not None:
            return [self.take_grads(write)]
        if not wanted:
            return [None] * (1 + len(weights))
        grad_w1, grad_w2 = map(empty_grads, self.saved(weights))
        write(grad_w1, grad_w2, False)
        return [None, *((grad_w1, grad_w2) if isinstance(grad_w1, Tensor) else (*grad_w1, *grad_w2))]


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
    take_grads      called once in every backward with write(grad_w1, grad_w2, accumulate). It calls that then or later,
                    on tensors of its choice, in float32 or the rows' dtype. Autograd then sees no gradient of w1 and w2,
                    and runs nothing for each of them. None: they get their gradients from autograd
    anchor          a tensor that autograd sees instead of w1 and w2: its gradient is what take_grads returns

    GEMMs accumulate in float32 and round once; the activation is computed in float32, weighted, and rounded once.
    Gradients reach rows, row_weights, w1 and w2. There are no second derivatives. On a GPU the host waits for nothing.

    Raises ValueError where the dtypes of rows and weights differ.
    """
    options: dict[str, Any] = dict(keep_activated=keep_activated, take_grads=take_grads, anchor=anchor)
    return grouped_swiglu_mlp_of_sets([(rows, row_weights, ends)], w1, w2, **options)[0]


def grouped_swiglu_mlp_of_sets(
    sets: Sequence[tuple[Tensor, Tensor, Tensor]],
    w1: Matrices,
    w2: Matrices,
    *,
    keep_activated: bool = True,
    take_grads: Callable[[WriteGrads], Tensor | None] | None = None,
    anchor: Tensor | None = None,
) -> Sequence[Tensor]:
    """``grouped_swiglu_mlp`` of one or two sets: rows, row_weights, ends. It is one node of autograd.

    So gradients of weights are written once: sums over the rows of the first set, then over those of the second.
    """
    call = checked_call(sets[0][0].dtype, w1, w2, keep_activated, take_grads, anchor)
    given = [t for one in sets for t in one]
    return _GroupedSwigluMlp.apply(call, len(sets), *given, *call.inputs(*given))


def checked_call(
    dtype: torch.dtype,
    w1: Matrices,
    w2: Matrices,
    keep_activated: bool,
    take_grads: Callable[[WriteGrads], Tensor | None] | None,
    anchor: Tensor | None,
) -> Call:
    """Return the Call of rows of this dtype. ValueError where the weights have another one."""
    for name, weight in (("w1", w1[0]), ("w2", w2[0])):
        if weight.dtype != dtype:
            checks.fail(name, weight.dtype, f"{dtype}, as the rows have it")
    return Call(w1, w2, keep_activated, take_grads, anchor)


class Kept(NamedTuple):
    """What a backward needs of the rows of one forward pass."""

    rows: Tensor
    row_weights: Tensor
    ends: Tensor
    hidden: Tensor
    activated: Tensor | None  # None: computed again


class RowGrads(NamedTuple):
    """Gradients in a backward pass, by row."""

    grad_out: Tensor
    grad_hidden: Tensor
    grad_row_weights: Tensor
    grad_rows: Tensor | None


def run_rows(rows: Tensor, row_weights: Tensor, ends: Tensor, call: Call) -> tuple[Tensor, Kept]:
    """Run every expert on its rows. Return the results, and what the backward needs."""
    hidden = grouped_gemm.linear(rows, call.w1, ends)
    activated = grouped_gemm.weighted_swiglu(hidden, row_weights, ends)
    out = grouped_gemm.linear(activated, call.w2, ends)
    return out, Kept(rows, row_weights, ends, hidden, activated if call.keep_activated else None)


def grads_of_rows(grad_out: Tensor, kept: Kept, w1: Matrices, w2: Matrices, wants_rows: bool) -> RowGrads:
    """Return all gradients but those of the weights."""
    grad_activated = grouped_gemm.linear_grad_rows(grad_out, w2, kept.ends)
    grad_hidden, grad_row_weights = grouped_gemm.weighted_swiglu_grad(
        grad_activated, kept.hidden, kept.row_weights, kept.ends
    )
    grad_rows = grouped_gemm.linear_grad_rows(grad_hidden, w1, kept.ends) if wants_rows else None
    return RowGrads(grad_out, grad_hidden, grad_row_weights, grad_rows)


def write_grads(sets: Sequence[tuple[Kept, RowGrads]], grad_w1: Matrices, grad_w2: Matrices, accumulate: bool) -> None:
    """Write the gradients of the weights, or add them to what is there. They are sums over one or two sets of rows."""

    def write(grad_weights: Matrices, all_rows: list[grouped_gemm.RowSet]) -> None:
        first, *more = all_rows
        grouped_gemm.linear_grad_weights(*first, grad_weights, accumulate=accumulate, more=more[0] if more else None)

    write(grad_w2, [(grads.grad_out, _activated(kept), kept.ends) for kept, grads in sets])
    write(grad_w1, [(grads.grad_hidden, kept.rows, kept.ends) for kept, grads in sets])


def _activated(kept: Kept) -> Tensor:
    if kept.activated is not None:
        return kept.activated
    return grouped_gemm.weighted_swiglu(kept.hidden, kept.row_weights, kept.ends)


_PER_SET = 3  # tensors that a set is given: rows, row_weights, ends


class _GroupedSwigluMlp(torch.autograd.Function):
    """Both GEMMs and the activation. Parameters that take_grads looks after are no inputs: autograd knows none."""

    @staticmethod
    def forward(ctx: Any, call: Call, num_sets: int, *given: Any) -> tuple[Tensor, ...]:
        """given: rows, row_weights and ends of each set; an anchor or None; weights"""
        weights = given[_PER_SET * num_sets + 1 :]
        results, saved = list[Tensor](), list[Tensor | None]()
        for i in range(num_sets):
            rows, row_weights, ends = given[_PER_SET * i : _PER_SET * (i + 1)]
            out, kept = run_rows(rows, row_weights, ends, call)
            results.append(out)
            saved += kept
        ctx.call = call
        ctx.save_for_backward(*saved, *weights)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_results: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        num_fields, num_sets = len(Kept._fields), len(grad_results)
        weights = saved[num_fields * num_sets :]
        call: Call = ctx.call
        w1, w2 = call.saved(weights)
        sets, grads_given = list[tuple[Kept, RowGrads]](), list[Tensor | None]()
        for i, grad_out in enumerate(grad_results):
            kept = Kept(*saved[num_fields * i : num_fields * (i + 1)])
            grads = grads_of_rows(grad_out.contiguous(), kept, w1, w2, ctx.needs_input_grad[2 + _PER_SET * i])
            sets.append((kept, grads._replace(grad_rows=None)))
            grads_given += [grads.grad_rows, grads.grad_row_weights, None]
        wanted = any(ctx.needs_input_grad[2 + _PER_SET * num_sets + 1 :])
        return None, None, *grads_given, *call.gradients(partial(write_grads, sets), weights, wanted)


def empty_grads(weights: Matrices) -> Matrices:
    """Return tensors like the weights, all of them in one piece of memory."""
    if isinstance(weights, Tensor):
        return torch.empty_like(weights)
    return weights[0].new_empty(len(weights), *weights[0].shape).unbind(0)
