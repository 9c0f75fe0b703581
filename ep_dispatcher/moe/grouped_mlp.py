"""A layer of experts on rows that lie expert by expert: two grouped GEMMs, as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_dispatcher import checks
from ep_dispatcher.float8 import QuantizedRows
from ep_dispatcher.moe import float8_gemm, grouped_gemm
from ep_dispatcher.moe.activation import SWIGLU, Activation
from ep_dispatcher.moe.gradients import clear_unused_rows
from ep_dispatcher.moe.matrices import Matrices, QuantizedMatrices, shape_of


class Parameters(NamedTuple):
    """The parameters of all experts, or tensors for their gradients: each a tensor per expert, or one of them all."""

    w1: Matrices
    w2: Matrices
    b1: Matrices | None = None
    b2: Matrices | None = None

    def flat(self) -> list[Tensor]:
        """Return the tensors, in order."""
        found: list[Tensor] = []
        for one in self:
            if one is not None:
                found += [one] if isinstance(one, Tensor) else one
        return found

    def like(self, tensors: Sequence[Any]) -> Parameters:
        """Return these tensors, or whatever there is for each, in the form of this."""
        rest = iter(tensors)

        def of(one: Matrices | None) -> Any:
            if one is None or isinstance(one, Tensor):
                return None if one is None else next(rest)
            return list(islice(rest, len(one)))

        return Parameters(*map(of, self))

    def empty_like(self) -> Parameters:
        """Return plain tensors like the parameters, with rows side by side, as kernels write them.

        Those of each field lie in one piece of memory. A parameter itself may have other strides.
        """

        def empty(one: Matrices | None) -> Any:
            if one is None:
                return None
            if isinstance(one, Tensor):
                return torch.empty(one.shape, dtype=one.dtype, device=one.device)
            like = one[0]  # may be quantised
            return list(torch.empty(len(one), *like.shape, dtype=like.dtype, device=like.device).unbind(0))

        return Parameters(*map(empty, self))


# write(grads, accumulate): write the gradients into these tensors, or add them to what is there.
WriteGrads = Callable[[Parameters, bool], None]
Float8 = tuple[QuantizedMatrices, QuantizedMatrices]  # w1 and w2, quantised


@dataclass(frozen=True, eq=False)
class Mlp:
    """What a forward pass needs beside its rows: the parameters, and who takes their gradients."""

    parameters: Parameters
    activation: Activation = SWIGLU
    keep_activated: bool = True
    take_grads: Callable[[WriteGrads], Tensor | None] | None = None
    anchor: Tensor | None = None
    float8: Float8 | None = None

    def inputs(self, *others: Tensor) -> tuple[Tensor | None, ...]:
        """Return the last inputs of an autograd node after `others`: an anchor or None, then parameters.

        Parameters are inputs where autograd looks after their gradients. Otherwise an anchor lets the backward run
        where nothing but the parameters wants a gradient.
        """
        if self.take_grads is None:
            return None, *self.parameters.flat()
        if self.anchor is None and not any(t.requires_grad for t in others):
            return (torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True),)
        return (self.anchor,)

    def saved(self, tensors: Sequence[Tensor]) -> Parameters:
        """Return the parameters, those that autograd has kept if it keeps them."""
        return self.parameters.like(tensors) if tensors else self.parameters

    def gradients(self, write: WriteGrads, tensors: Sequence[Tensor], wanted: bool) -> Sequence[Tensor | None]:
        """Let the gradients of the parameters be written. Return those of `inputs`."""
        if self.take_grads is not None:
            return [self.take_grads(write)]
        if not wanted:
            return [None] * (1 + len(tensors))
        grads = self.saved(tensors).empty_like()
        write(grads, False)
        return [None, *grads.flat()]


def grouped_mlp(
    sets: Sequence[tuple[Tensor | tuple[Tensor, Tensor], Tensor, Tensor]], parameters: Parameters, **options: Any
) -> Sequence[Tensor]:
    """Run every expert on its rows, of one or two sets. Return [num_rows, hidden] of the rows' dtype for each set.

        hidden = w1[e] @ rows[r] + b1[e]                           e: the expert of row r
        out[r] = w2[e] @ (row_weights[r] * activation(hidden)) + row_weights[r] * b2[e]

    sets            for each, rows, row_weights and ends:
      rows          [num_rows, hidden], expert by expert
      row_weights   float32 [num_rows]
      ends          int32 [num_experts] on the rows' device: the end of each expert's rows. Rows at or behind ends[-1]
                    are neither read nor written
    parameters      of the rows' dtype, as torch.nn.Linear has them, for each expert:
      w1, w2        [pair * intermediate, hidden], pair is 2 for an activation with a gate, else 1;
                    [hidden, intermediate]
      b1, b2        [pair * intermediate] and [hidden], or None
    options         fields of Mlp:
    activation      default: SWIGLU
    keep_activated  False: the backward computes the activation again, and num_rows * intermediate values less are kept
    take_grads      called once in every backward with write(grads, accumulate). It calls that then or later, on tensors
                    of its choice, in float32 or the rows' dtype. Autograd then sees no gradient of the parameters, and
                    runs nothing for each of them. None: they get their gradients from autograd
    anchor          a tensor that autograd sees instead of the parameters: its gradient is what take_grads returns
    float8          w1 and w2 quantised, whose values are used instead by float8_gemm's GEMMs. The backward reads
                    them too. Rows are bfloat16, and quantised here, or a pair of ep.dispatch, whose anchor gets the
                    gradient of the dequantised rows. Results are bfloat16. On a GPU hidden and intermediate are
                    multiples of 16

    GEMMs accumulate in float32, add the bias and round once; the activation is computed in float32, weighted, and
    rounded once. It is one node of autograd, so gradients of parameters are written once: sums over the rows of the
    first set, then over those of the second. Gradients reach rows and row_weights too. There are no second derivatives.
    On a GPU the host waits for nothing.

    With float8 rows, the activation (from float32), and gradients of results and of hidden are quantised. Gradients of
    weights are of bfloat16: of those gradients, of the activation and of the dequantised rows. For the backward the
    quantised rows and hidden are kept; the activation never is.

    Raises ValueError where the dtypes of rows and parameters differ, and for pairs without float8 or of another form.
    """
    given = list[Any]()
    for rows, row_weights, ends in sets:
        if isinstance(rows, tuple):
            if options.get("float8") is None:
                checks.refuse("sets has quantised rows, which need float8")
            float8_gemm.check_pair("sets", rows, parameters.w1[0].shape[1])
            given += [getattr(rows, "anchor", None), row_weights, ends, rows[0].detach(), rows[1]]
        else:
            given += [rows, row_weights, ends, None, None]
    dtype = torch.bfloat16 if given[0] is None else given[0].dtype
    mlp = checked_mlp(dtype, parameters, **options)
    return _GroupedMlp.apply(mlp, len(sets), *given, *mlp.inputs(*(t for t in given if t is not None)))


def checked_mlp(dtype: torch.dtype, parameters: Parameters, **options: Any) -> Mlp:
    """Return the Mlp for rows of this dtype, with grouped_mlp's options. ValueError if the parameters have another."""
    mlp = Mlp(parameters, **options)
    if mlp.float8 is not None and dtype != torch.bfloat16:
        checks.refuse(f"float8 is given with rows of {dtype}, but needs torch.bfloat16 or quantised ones")
    for name, one in parameters._asdict().items():
        if one is not None and one[0].dtype != dtype:
            checks.fail(name, one[0].dtype, f"{dtype}, as the rows have it")
    for name, quantised, one in zip(("w1", "w2"), mlp.float8 or (), parameters):
        assert one is not None  # w1 or w2
        sizes = [(len(matrices), *shape_of(matrices)) for matrices in (quantised.rows, one)]
        if sizes[0] != sizes[1]:
            given, allowed = (f"{number} matrices {shape}" for number, *shape in sizes)
            checks.refuse(f"float8 has {name} of {given}, but the parameters have {allowed}")
    return mlp


class Kept(NamedTuple):
    """What a backward needs of the rows of one forward pass."""

    rows: Tensor
    row_weights: Tensor
    ends: Tensor
    hidden: Tensor
    activated: Tensor | None  # None: computed again
    scales: Tensor | None = None  # of float8 rows


class RowGrads(NamedTuple):
    """Gradients in a backward pass, by row, that those of parameters are made of."""

    grad_out: Tensor
    grad_hidden: Tensor


def run_rows(
    rows: Tensor, row_weights: Tensor, ends: Tensor, mlp: Mlp, scales: Tensor | None = None
) -> tuple[Tensor, Kept]:
    """Run every expert on its rows. Return the results, and what the backward needs. scales: of float8 rows"""
    w1, w2, b1, b2 = mlp.parameters
    if mlp.float8 is not None:
        pair = float8_gemm.quantize_rows(rows, ends) if scales is None else QuantizedRows(rows, scales)
        hidden = float8_gemm.linear(pair, mlp.float8[0], ends, b1)
        quantised = float8_gemm.activate(hidden, row_weights, ends, mlp.activation)
        out = float8_gemm.linear(quantised, mlp.float8[1], ends, b2, row_weights)
        return out, Kept(pair.rows, row_weights, ends, hidden, None, pair.scales)
    hidden = grouped_gemm.linear(rows, w1, ends, b1)
    activated = grouped_gemm.activate(hidden, row_weights, ends, mlp.activation)
    out = grouped_gemm.linear(activated, w2, ends, b2, row_weights)
    return out, Kept(rows, row_weights, ends, hidden, activated if mlp.keep_activated else None)


def grads_of_rows(
    grad_out: Tensor, kept: Kept, mlp: Mlp, parameters: Parameters, wants_rows: bool
) -> tuple[RowGrads, Tensor | None, Tensor]:
    """Return what `write_grads` needs, and the gradients of rows and row_weights."""

    def through(grad: Tensor, number: int) -> Tensor:
        """Return the gradient of the rows of a linear layer."""
        if mlp.float8 is None:
            return grouped_gemm.linear_grad_rows(grad, (parameters.w1, parameters.w2)[number], kept.ends)
        pair = float8_gemm.quantize_rows(grad, kept.ends)
        return float8_gemm.linear_grad_rows(pair, mlp.float8[number], kept.ends)

    grad_hidden, grad_row_weights = grouped_gemm.activate_grad(
        through(grad_out, 1), kept.hidden, kept.row_weights, kept.ends, mlp.activation, grad_out, parameters.b2
    )
    grad_rows = through(grad_hidden, 0) if wants_rows else None
    return RowGrads(grad_out, grad_hidden), grad_rows, grad_row_weights


def write_grads(
    sets: Sequence[tuple[Kept, RowGrads]], activation: Activation, out: Parameters, accumulate: bool
) -> None:
    """Write the gradients of the parameters, or add them to what is there: sums over one or two sets of rows."""

    def activated(kept: Kept) -> Tensor:
        if kept.activated is not None:
            return kept.activated
        return grouped_gemm.activate(kept.hidden, kept.row_weights, kept.ends, activation)

    def rows(kept: Kept) -> Tensor:
        return kept.rows if kept.scales is None else float8_gemm.dequantize_rows((kept.rows, kept.scales), kept.ends)

    grouped_gemm.linear_grad_weights(
        [(grads.grad_out, activated(kept), kept.ends) for kept, grads in sets], out.w2, accumulate=accumulate
    )
    grouped_gemm.linear_grad_weights(
        [(grads.grad_hidden, rows(kept), kept.ends) for kept, grads in sets], out.w1, accumulate=accumulate
    )
    if out.b1 is not None:
        grouped_gemm.linear_grad_bias(
            [(grads.grad_hidden, kept.ends, None) for kept, grads in sets], out.b1, accumulate=accumulate
        )
    if out.b2 is not None:
        grouped_gemm.linear_grad_bias(
            [(grads.grad_out, kept.ends, kept.row_weights) for kept, grads in sets], out.b2, accumulate=accumulate
        )


_PER_SET = 5  # tensors that a set is given: rows, row_weights, ends, float8 rows and their scales


class _GroupedMlp(torch.autograd.Function):
    """Both GEMMs and the activation. Parameters that take_grads looks after are no inputs: autograd knows none."""

    @staticmethod
    def forward(ctx: Any, mlp: Mlp, num_sets: int, *given: Any) -> tuple[Tensor, ...]:
        """given: for each set rows (the anchor of float8 rows), row_weights, ends, float8 rows and scales or None; then
        an anchor or None; parameters"""
        tensors = given[_PER_SET * num_sets + 1 :]
        results, saved = list[Tensor](), list[Tensor | None]()
        for i in range(num_sets):
            rows, row_weights, ends, float8_rows, scales = given[_PER_SET * i : _PER_SET * (i + 1)]
            out, kept = run_rows(rows if float8_rows is None else float8_rows, row_weights, ends, mlp, scales)
            results.append(out)
            saved += kept
        ctx.mlp = mlp
        ctx.save_for_backward(*saved, *tensors)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_results: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        num_fields, num_sets = len(Kept._fields), len(grad_results)
        tensors = saved[num_fields * num_sets :]
        mlp: Mlp = ctx.mlp
        parameters = mlp.saved(tensors)
        sets, grads_given = list[tuple[Kept, RowGrads]](), list[Tensor | None]()
        for i, grad_out in enumerate(grad_results):
            kept = Kept(*saved[num_fields * i : num_fields * (i + 1)])
            wants_rows = ctx.needs_input_grad[2 + _PER_SET * i]
            grads, *of_inputs = grads_of_rows(grad_out.contiguous(), kept, mlp, parameters, wants_rows)
            clear_unused_rows(kept.ends, *of_inputs)
            sets.append((kept, grads))
            grads_given += [*of_inputs, None, None, None]
        wanted = any(ctx.needs_input_grad[2 + _PER_SET * num_sets + 1 :])
        return None, None, *grads_given, *mlp.gradients(partial(write_grads, sets, mlp.activation), tensors, wanted)
