"""What expert slots have of an expert: which tensors, in which order, and which of them a pass needs.

    weights     w1 and w2, or with float8 the four fields of each (QuantizedMatrices); then the biases that there are
    gradients   those of w1, w2 and the biases, float32

The forward reads float8 matrices as they are, and the backward reads the transposed ones. A push brings only those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from ep_dispatcher.balance.slots import Slots
from ep_dispatcher.moe.expert_matrices import ExpertMatrices, QuantizedMatrices, WithCopies
from ep_dispatcher.moe.grouped_mlp import Float8, Parameters


class ReadWeights(NamedTuple):
    """What GEMMs read: Parameters whose w1 and w2 are QuantizedMatrices if the experts are float8."""

    w1: Any
    w2: Any
    b1: ExpertMatrices | None
    b2: ExpertMatrices | None


def own_weights(parameters: Parameters, float8: Float8 | None) -> ReadWeights:
    w1, w2, b1, b2 = parameters
    return ReadWeights(w1, w2, b1, b2) if float8 is None else ReadWeights(*float8, b1, b2)


def given(parameters: Parameters) -> list[ExpertMatrices]:
    """Return the parameters that there are, as slots have their gradients."""
    return [matrices for matrices in parameters if matrices is not None]


def slot_weights(parameters: Parameters, float8: Float8 | None) -> list[ExpertMatrices]:
    """Return all that slots have of the weights."""
    if float8 is None:
        return given(parameters)
    quantized_w1, quantized_w2 = float8
    return [*quantized_w1, *quantized_w2, *given(parameters)[2:]]


def weights_to_push(
    parameters: Parameters, float8: Float8 | None, *, is_backward: bool
) -> Sequence[ExpertMatrices | None]:
    """Return what a pass needs of slot_weights, and None for the rest."""
    if float8 is None:
        return given(parameters)
    matrices = list[ExpertMatrices | None]()
    for one in float8:
        if is_backward:
            matrices += [None, None, one.transposed, one.transposed_scales]
        else:
            matrices += [one.rows, one.scales, None, None]
    return matrices + given(parameters)[2:]


def weights_in_slots(own: ReadWeights, slots: Slots) -> ReadWeights:
    """Return this rank's slots, by the names of the weights."""
    rest, num_fields = iter(slots.weights), len(QuantizedMatrices._fields)
    w1: Any
    w2: Any
    if isinstance(own.w1, QuantizedMatrices):
        w1, w2 = QuantizedMatrices(*islice(rest, num_fields)), QuantizedMatrices(*islice(rest, num_fields))
    else:
        w1, w2 = next(rest), next(rest)
    b1 = None if own.b1 is None else next(rest)
    return ReadWeights(w1, w2, b1, None if own.b2 is None else next(rest))


def gradients_in_slots(own: Parameters, slots: Slots) -> Parameters:
    """Return the gradients in this rank's slots, by the names of the parameters."""
    rest = iter(slots.gradients)
    w1, w2 = next(rest), next(rest)
    b1 = None if own.b1 is None else next(rest)
    return Parameters(w1, w2, b1, None if own.b2 is None else next(rest))


def with_copies(own: Any, copies: Any) -> Any:
    """Return weights of ReadWeights for all experts of a rank: its own, and behind them those in its slots."""
    if own is None:
        return None
    return own.with_copies(copies) if isinstance(own, QuantizedMatrices) else WithCopies(own, copies)
