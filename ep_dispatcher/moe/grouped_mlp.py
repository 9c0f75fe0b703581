"""The MLPs of all experts on rows that are sorted by expert: two grouped GEMMs, as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.float8 import QuantizedRows
from ep_dispatcher.moe import float8_gemm, grouped_gemm
from ep_dispatcher.moe.activation import SWIGLU, Activation
from ep_dispatcher.moe.expert_matrices import ExpertMatrices, QuantizedMatrices, matrix_shape, num_matrices
from ep_dispatcher.moe.gradients import clear_unused_rows
from ep_dispatcher.observers import light_apply, once_differentiable


class Parameters(NamedTuple):
    """The parameters of all experts, or tensors for their gradients.

    Each field is one tensor of all experts, or a sequence of one tensor per expert.
    """

    w1: ExpertMatrices
    w2: ExpertMatrices
    b1: ExpertMatrices | None = None
    b2: ExpertMatrices | None = None

    def flat(self) -> list[Tensor]:
        """Return the tensors of all fields, in order."""
        tensors: list[Tensor] = []
        for field in self:
            if isinstance(field, Tensor):
                tensors.append(field)
            elif field is not None:
                tensors += field
        return tensors

    def unflatten(self, values: Sequence[Any]) -> Parameters:
        """Return `values`, one for each tensor of `flat`, as fields of the same structure as here."""
        remaining = iter(values)
        fields: list[Any] = []
        for field in self:
            if field is None:
                fields.append(None)
            elif isinstance(field, Tensor):
                fields.append(next(remaining))
            else:
                fields.append(list(islice(remaining, len(field))))
        return Parameters(*fields)

    def empty_like(self) -> Parameters:
        """Allocate contiguous tensors for gradients, as kernels write them.

        The tensors of one field lie side by side in one piece of memory. A parameter itself may have other strides.
        """
        fields: list[Any] = []
        for field in self:
            if field is None:
                fields.append(None)
            elif isinstance(field, Tensor):
                fields.append(torch.empty(field.shape, dtype=field.dtype, device=field.device))
            else:
                first = field[0]  # may be quantized, so not empty_like
                stacked = torch.empty(len(field), *first.shape, dtype=first.dtype, device=first.device)
                fields.append(list(stacked.unbind(0)))
        return Parameters(*fields)


# write(out, accumulate): write the gradients of the parameters into the tensors of `out`, or add them to these.
WriteGrads = Callable[[Parameters, bool], None]
Float8 = tuple[QuantizedMatrices, QuantizedMatrices]  # w1 and w2, quantized


# Each forward pass makes one, and a frozen dataclass takes four times as long to make.
@dataclass(eq=False)
class Mlp:
    """What a forward pass needs besides its rows: the parameters, and how their gradients are taken."""

    parameters: Parameters
    activation: Activation = SWIGLU
    keep_activated: bool = True
    take_grads: Callable[[WriteGrads], Tensor | None] | None = None
    anchor: Tensor | None = None
    float8: Float8 | None = None

    def autograd_inputs(self, *other_inputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the last inputs of an autograd node, after `other_inputs`: an anchor or None, then the parameters.

        The parameters are inputs if autograd handles their gradients. Otherwise an anchor makes the backward run even
        if only the parameters want a gradient.
        """
        if self.take_grads is None:
            return None, *self.parameters.flat()
        if self.anchor is None and not any(t.requires_grad for t in other_inputs):
            return (torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True),)
        return (self.anchor,)

    def saved_parameters(self, saved_tensors: Sequence[Tensor]) -> Parameters:
        """Return the parameters for a backward: `saved_tensors` if autograd has saved them."""
        return self.parameters.unflatten(saved_tensors) if saved_tensors else self.parameters

    def needs_parameter_grads(self, needs_grad: Sequence[bool]) -> bool:
        """Return whether gradients of the parameters are wanted. needs_grad: as autograd says of `autograd_inputs`"""
        return self.take_grads is not None or any(needs_grad[1:])

    def autograd_gradients(
        self, write: WriteGrads, saved_tensors: Sequence[Tensor], needs_parameter_grads: bool
    ) -> Sequence[Tensor | None]:
        """Write the gradients of the parameters, or let take_grads do so. Return those of `autograd_inputs`."""
        if self.take_grads is not None:
            return [self.take_grads(write)]
        if not needs_parameter_grads:
            return [None] * (1 + len(saved_tensors))
        grads = self.saved_parameters(saved_tensors).empty_like()
        write(grads, False)
        return [None, *grads.flat()]


def grouped_mlp(
    sets: Sequence[tuple[Tensor | tuple[Tensor, Tensor], Tensor, Tensor]], parameters: Parameters, **options: Any
) -> Sequence[Tensor]:
    """Run every expert on its rows of one or two sets. Return [num_rows, hidden] of the rows' dtype for each set.

        hidden = w1[e] @ rows[r] + b1[e]                           e: the expert of row r
        out[r] = w2[e] @ (row_weights[r] * activation(hidden)) + row_weights[r] * b2[e]

    sets            each set is rows, row_weights and ends:
      rows          [num_rows, hidden], sorted by expert
      row_weights   float32 [num_rows]
      ends          int32 [num_experts] on the rows' device: the end of each expert's rows. Rows at or after ends[-1]
                    are neither read nor written
    parameters      in the rows' dtype and laid out as in torch.nn.Linear, for each expert:
      w1, w2        [pair * intermediate, hidden], where pair is 2 for an activation with a gate, otherwise 1;
                    [hidden, intermediate]
      b1, b2        [pair * intermediate] and [hidden], or None
    options         fields of Mlp:
    activation      default: SWIGLU
    keep_activated  False: the backward computes the activation again, so num_rows * intermediate fewer values are kept
    take_grads      called once in every backward with write(out, accumulate). It calls `write` once, then or later, on
                    tensors of its choice, in float32 or the rows' dtype. Autograd then sees no gradient of the
                    parameters, and runs nothing for each of them. None: autograd handles their gradients
    anchor          a tensor that autograd sees instead of the parameters: its gradient is what take_grads returns
    float8          w1 and w2 quantized. The GEMMs of float8_gemm read these instead, also in the backward. Rows are
                    either bfloat16, and are quantized here, or a pair of ep.dispatch, whose anchor gets the gradient of
                    the dequantized rows. Results are bfloat16. On a GPU hidden and intermediate must be multiples of 16

    GEMMs accumulate in float32, add the bias and round once; the activation is computed in float32, weighted, and
    rounded once. It is one node of autograd, so gradients of parameters are written once: sums over the rows of the
    first set, then over those of the second. Gradients reach rows and row_weights too. There are no second derivatives.
    On a GPU the host waits for nothing.

    With float8 the rows are quantized, and so are the activation (from float32), and the gradients of results and of
    hidden. Gradients of weights are computed in bfloat16, from these gradients, the activation and the dequantized
    rows. The quantized rows and hidden are saved for the backward; the activation never is.

    Raises ValueError if the dtypes of rows and parameters differ, for pairs without float8, and for malformed pairs.
    """
    row_inputs = list[Any]()  # _INPUTS_PER_SET entries for each set
    for rows, row_weights, ends in sets:
        if isinstance(rows, tuple):
            if options.get("float8") is None:
                checks.refuse("sets has quantized rows, which need float8")
            float8_gemm.check_pair("sets", rows, parameters.w1[0].shape[1])
            row_inputs += [getattr(rows, "anchor", None), row_weights, ends, rows[0].detach(), rows[1]]
        else:
            row_inputs += [rows, row_weights, ends, None, None]
    dtype = torch.bfloat16 if row_inputs[0] is None else row_inputs[0].dtype
    mlp = make_mlp(dtype, parameters, **options)
    last_inputs = mlp.autograd_inputs(*(t for t in row_inputs if t is not None))
    return _apply_grouped_mlp(mlp, len(sets), *row_inputs, *last_inputs)


def make_mlp(dtype: torch.dtype, parameters: Parameters, **options: Any) -> Mlp:
    """Return the Mlp for rows of this dtype, with grouped_mlp's options. ValueError if the parameters do not match."""
    mlp = Mlp(parameters, **options)
    if mlp.float8 is not None and dtype != torch.bfloat16:
        checks.refuse(f"float8 is given with rows of {dtype}, but needs torch.bfloat16 or quantized ones")
    for name, parameter in zip(Parameters._fields, parameters):
        if parameter is not None and parameter[0].dtype != dtype:
            checks.fail(name, parameter[0].dtype, f"{dtype}, the dtype of the rows")
    for name, quantized, parameter in zip(("w1", "w2"), mlp.float8 or (), parameters):
        assert parameter is not None  # w1 or w2
        given = num_matrices(quantized.rows), matrix_shape(quantized.rows)
        expected = num_matrices(parameter), matrix_shape(parameter)
        if given != expected:
            checks.refuse(
                f"float8 has {name} of {given[0]} matrices {[*given[1]]}, but the parameters have {expected[0]} "
                f"matrices {[*expected[1]]}"
            )
    return mlp


class SavedForward(NamedTuple):
    """The tensors of one forward pass over a set of rows that its backward needs."""

    rows: Tensor
    row_weights: Tensor
    ends: Tensor
    hidden: Tensor
    activated: Tensor | None  # None: the backward computes it again
    scales: Tensor | None = None  # of float8 rows


@dataclass(eq=False)
class GradInputs:
    """What gradients of the parameters are computed from: inputs and gradients of both linear layers, by row."""

    rows: Tensor
    row_weights: Tensor
    ends: Tensor
    activated: Tensor | None
    grad_out: Tensor
    grad_hidden: Tensor
    scales: Tensor | None = None  # of float8 rows

    def take_activated(self) -> Tensor:
        """Return the inputs of the second GEMM, and keep them no longer: rows may need as much memory next."""
        activated, self.activated = self.activated, None
        assert activated is not None
        return activated

    def dequantized_rows(self) -> Tensor:
        """Return the inputs of the first GEMM."""
        if self.scales is None:
            return self.rows
        return float8_gemm.dequantize_rows((self.rows, self.scales), self.ends)


def forward_rows(
    rows: Tensor, row_weights: Tensor, ends: Tensor, mlp: Mlp, scales: Tensor | None = None
) -> tuple[Tensor, SavedForward]:
    """Run every expert on its rows. Return the results, and what the backward needs. scales: those of float8 rows"""
    w1, w2, b1, b2 = mlp.parameters
    if mlp.float8 is not None:
        pair = float8_gemm.quantize_rows(rows, ends) if scales is None else QuantizedRows(rows, scales)
        hidden = float8_gemm.linear(pair, mlp.float8[0], ends, b1)
        quantized = float8_gemm.activate(hidden, row_weights, ends, mlp.activation)
        out = float8_gemm.linear(quantized, mlp.float8[1], ends, b2, row_weights)
        return out, SavedForward(pair.rows, row_weights, ends, hidden, None, pair.scales)
    hidden = grouped_gemm.linear(rows, w1, ends, b1)
    activated = grouped_gemm.activate(hidden, row_weights, ends, mlp.activation)
    out = grouped_gemm.linear(activated, w2, ends, b2, row_weights)
    return out, SavedForward(rows, row_weights, ends, hidden, activated if mlp.keep_activated else None)


def backward_rows(
    grad_out: Tensor,
    saved: SavedForward,
    mlp: Mlp,
    parameters: Parameters,
    needs_grad_rows: bool,
    needs_parameter_grads: bool,
) -> tuple[GradInputs, Tensor | None, Tensor]:
    """Return what `write_parameter_grads` needs, and the gradients of rows and row_weights."""
    w1, w2 = mlp.float8 or parameters[:2]
    gemms, ends = gemms_of(mlp), saved.ends
    grad_activated = gemms.linear_grad_rows(gemm_inputs(grad_out, ends, mlp), w2, ends)
    grad_inputs, grad_hidden, grad_row_weights = activation_backward(
        grad_activated, grad_out, saved, mlp, parameters.b2, needs_grad_rows, needs_parameter_grads
    )
    del grad_activated  # before gradients of rows need more memory
    grad_rows = gemms.linear_grad_rows(grad_hidden, w1, ends) if needs_grad_rows else None
    return grad_inputs, grad_rows, grad_row_weights


def gemms_of(mlp: Mlp) -> ModuleType:
    """Return the module of the GEMMs that these experts need."""
    return grouped_gemm if mlp.float8 is None else float8_gemm


def gemm_inputs(rows: Tensor, ends: Tensor, mlp: Mlp) -> Tensor | QuantizedRows:
    """Return rows as those GEMMs take them."""
    return rows if mlp.float8 is None else float8_gemm.quantize_rows(rows, ends)


def activation_backward(
    grad_activated: Tensor,
    grad_out: Tensor,
    saved: SavedForward,
    mlp: Mlp,
    b2: ExpertMatrices | None,
    needs_grad_rows: bool,
    needs_parameter_grads: bool,
) -> tuple[GradInputs, Tensor | QuantizedRows, Tensor]:
    """Go from the inputs of the second GEMM to the results of the first one.

    Return what `write_parameter_grads` needs, the gradient of the first GEMM's results as the GEMM takes it that gives
    gradients of rows, and the gradient of row_weights.
    """
    inputs = grad_activated, saved.hidden, saved.row_weights, saved.ends, mlp.activation, grad_out, b2
    with_activated = needs_parameter_grads and saved.activated is None
    if mlp.float8 is None or not needs_grad_rows:
        grads = grouped_gemm.activate_grad(*inputs, with_activated=with_activated)
        grad_hidden: Tensor | QuantizedRows = grads.rows
    else:
        grads, grad_hidden = float8_gemm.activate_grad(*inputs, with_activated=with_activated)
    activated = grads.activated if saved.activated is None else saved.activated
    grad_inputs = GradInputs(saved.rows, saved.row_weights, saved.ends, activated, grad_out, grads.rows, saved.scales)
    return grad_inputs, grad_hidden, grads.row_weights


def write_parameter_grads(
    sets: Sequence[GradInputs],
    out: Parameters,
    accumulate: bool,
    first_expert: int = 0,
    held: Tensor | None = None,
) -> None:
    """Write the gradients of the parameters into `out`, or add them to what it holds. `sets` serve for one call.

    They are sums over the rows of one or two sets.

    first_expert, held: as in grouped_gemm.linear_grad_weights
    """
    options: dict[str, Any] = dict(first_expert=first_expert, held=held)
    write_second_grads(sets, out, accumulate, **options)
    write_first_grads(sets, out, accumulate, **options)


# In both the lists are not given names: what is computed for one gradient is freed before the next one is computed.
def write_first_grads(
    sets: Sequence[GradInputs],
    out: Parameters,
    accumulate: bool,
    first_expert: int = 0,
    held: Tensor | None = None,
) -> None:
    """Write the gradients of w1 and b1, as write_parameter_grads does."""
    options: dict[str, Any] = dict(accumulate=accumulate, first_expert=first_expert)
    grouped_gemm.linear_grad_weights(
        [(one.grad_hidden, one.dequantized_rows(), one.ends) for one in sets],
        out.w1,
        held=held,
        **options,
    )
    if out.b1 is not None:
        grouped_gemm.linear_grad_bias([(one.grad_hidden, one.ends, None) for one in sets], out.b1, **options)


def write_second_grads(
    sets: Sequence[GradInputs],
    out: Parameters,
    accumulate: bool,
    first_expert: int = 0,
    held: Tensor | None = None,
) -> None:
    """Write the gradients of w2 and b2, as write_parameter_grads does."""
    options: dict[str, Any] = dict(accumulate=accumulate, first_expert=first_expert)
    grouped_gemm.linear_grad_weights(
        [(one.grad_out, one.take_activated(), one.ends) for one in sets],
        out.w2,
        held=held,
        **options,
    )
    if out.b2 is not None:
        grouped_gemm.linear_grad_bias([(one.grad_out, one.ends, one.row_weights) for one in sets], out.b2, **options)


# The inputs of _GroupedMlp: mlp and num_sets; for each set rows (or the anchor of float8 rows), row_weights, ends,
# float8 rows and their scales; then those of Mlp.autograd_inputs, an anchor or None, and the parameters.
_FIRST_ROW_INPUT = 2
_INPUTS_PER_SET = 5


class _GroupedMlp(torch.autograd.Function):
    """Both GEMMs and the activation. With take_grads the parameters are not inputs, so autograd does not see them."""

    @staticmethod
    def forward(ctx: Any, mlp: Mlp, num_sets: int, *inputs: Any) -> tuple[Tensor, ...]:
        parameters = inputs[_INPUTS_PER_SET * num_sets + 1 :]
        results, saved_tensors = list[Tensor](), list[Tensor | None]()
        for i in range(num_sets):
            set_inputs = inputs[_INPUTS_PER_SET * i : _INPUTS_PER_SET * (i + 1)]
            rows, row_weights, ends, float8_rows, scales = set_inputs
            if float8_rows is not None:
                rows = float8_rows
            out, saved = forward_rows(rows, row_weights, ends, mlp, scales)
            results.append(out)
            saved_tensors += saved
        ctx.mlp = mlp
        ctx.save_for_backward(*saved_tensors, *parameters)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_results: Tensor) -> tuple[Tensor | None, ...]:
        saved_tensors: tuple[Tensor, ...] = ctx.saved_tensors
        num_fields, num_sets = len(SavedForward._fields), len(grad_results)
        parameter_tensors = saved_tensors[num_fields * num_sets :]
        mlp: Mlp = ctx.mlp
        parameters = mlp.saved_parameters(parameter_tensors)
        first_mlp_input = _FIRST_ROW_INPUT + _INPUTS_PER_SET * num_sets
        needs_parameter_grads = mlp.needs_parameter_grads(ctx.needs_input_grad[first_mlp_input:])
        sets, grad_row_inputs = list[GradInputs](), list[Tensor | None]()
        for i, grad_out in enumerate(grad_results):
            saved = SavedForward(*saved_tensors[num_fields * i : num_fields * (i + 1)])
            needs_grad_rows = ctx.needs_input_grad[_FIRST_ROW_INPUT + _INPUTS_PER_SET * i]
            grad_inputs, grad_rows, grad_row_weights = backward_rows(
                grad_out.contiguous(), saved, mlp, parameters, needs_grad_rows, needs_parameter_grads
            )
            clear_unused_rows(saved.ends, grad_rows, grad_row_weights)
            sets.append(grad_inputs)
            grad_row_inputs += [grad_rows, grad_row_weights, None, None, None]
        write = partial(write_parameter_grads, sets)
        grad_last_inputs = mlp.autograd_gradients(write, parameter_tensors, needs_parameter_grads)
        return None, None, *grad_row_inputs, *grad_last_inputs


_apply_grouped_mlp = light_apply(_GroupedMlp)
