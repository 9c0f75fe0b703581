"""The activations of experts, between their two GEMMs, with their derivatives in PyTorch's operators.

activation_kernels.py has the same formulas in Triton.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.argument_types import ActivationFunction, ActivationName

FUNCTIONS = get_args(ActivationFunction)


class Activation(NamedTuple):
    """The activation of an expert, computed in float32.

        gated      f(min(gate, limit)) * (clamp(up, -limit, limit) + offset)
        not gated  f(hidden)

    function     "silu"          f(x) = x * sigmoid(alpha * x)
                 "gelu"          f(x) = x * (1 + erf(x / sqrt(2))) / 2, as torch.nn.functional.gelu
                 "gelu_tanh"     its approximation by tanh, as gelu(approximate="tanh")
                 "squared_relu"  f(x) = max(x, 0)^2
                 "situ"          f(x) = beta * tanh(x / beta) * sigmoid(x); up: linear_beta * tanh(up / linear_beta)
    gated        whether the first GEMM gives a pair (gate, up) for each entry
    alpha        only for "silu"; 1.702 makes it the quick GELU
    limit        None: nothing is clamped. Only with a gate
    offset       added to up. Only with a gate
    beta, linear_beta  only for "situ"

    Numbers are finite, and all except the offset are above 0. A number that the function does not read must have its
    default value. Otherwise using the activation is a ValueError.
    """

    function: ActivationFunction = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    beta: float = 4.0
    linear_beta: float = 25.0

    @property
    def pair(self) -> int:
        """Return the number of output entries of the first GEMM for each input entry of the second."""
        return 2 if self.gated else 1


SWIGLU = Activation()
NAMED: dict[ActivationName, Activation] = {
    "swiglu": SWIGLU,
    "geglu": Activation("gelu"),
    "gelu": Activation("gelu", gated=False),
    "squared_relu": Activation("squared_relu", gated=False),
    "situ": Activation("situ"),
}


class ActivationGrads(NamedTuple):
    """Gradients of `activate`, and what it returned where a backward needs that once more."""

    rows: Tensor  # like hidden
    row_weights: Tensor  # float32 [num_rows]
    activated: Tensor | None


# Fields that only one function reads, and that function.
_READ_BY = {"alpha": "silu", "beta": "situ", "linear_beta": "situ"}
_FLOAT32 = torch.finfo(torch.float32)


def check_activation(activation: ActivationName | Activation) -> Activation:
    """Return the activation of this name or description, with plain floats. ValueError if it is not allowed."""
    if not isinstance(activation, Activation):
        if not isinstance(activation, str) or activation not in NAMED:
            names = ", ".join(map(repr, NAMED))
            checks.fail("activation", repr(activation), f"{names}, or an ep.Activation")
        return NAMED[activation]
    checks.one_of("activation.function", activation.function, FUNCTIONS)
    checks.boolean("activation.gated", activation.gated)
    limit = None if activation.limit is None else _check_number("limit", activation.limit)
    if limit is not None and limit > _FLOAT32.max:
        limit = None  # no float32 reaches it, and PyTorch's clamp refuses it
    checked = Activation(
        activation.function,
        activation.gated,
        alpha=_check_number("alpha", activation.alpha),
        limit=limit,
        offset=_check_number("offset", activation.offset),
        beta=_check_number("beta", activation.beta),
        linear_beta=_check_number("linear_beta", activation.linear_beta),
    )
    needs_gate = activation.limit is not None or checked.offset or activation.function == "situ"
    if needs_gate and not activation.gated:
        checks.fail("activation.gated", False, "True with limit, offset or situ")
    for name, function in _READ_BY.items():
        value = getattr(checked, name)
        if activation.function != function and value != Activation._field_defaults[name]:
            raise ValueError(
                f"activation.{name} is {value:g}, but only {function!r} reads it, not {activation.function!r}"
            )
    return checked


def _check_number(name: str, value: Any) -> float:
    """Return a number of Python or NumPy as a float. ValueError if the activation could not be computed with it.

    Kernels are compiled for these numbers, and compute in float32. There no divisor may be 0, and no factor infinite.
    """
    number = math.nan
    is_real = isinstance(value, (int, float)) or isinstance(value, numbers.Real)  # torch.compile knows the first two
    if is_real and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a large int
            number = math.inf
    if name == "offset":
        if not abs(number) <= _FLOAT32.max:
            checks.fail("activation.offset", repr(value), "a number that float32 has")
    elif name == "limit":
        if not _FLOAT32.tiny <= number < math.inf:
            checks.fail("activation.limit", repr(value), f"None, or a number of at least {_FLOAT32.tiny:.3g}")
    elif not _FLOAT32.tiny <= number <= _FLOAT32.max:
        allowed = f"a number from {_FLOAT32.tiny:.3g} to {_FLOAT32.max:.3g}, the positive ones of float32"
        checks.fail(f"activation.{name}", repr(value), allowed)
    return number


def activate(hidden: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """Return the activation of rows [num_rows, pair * n] times their weights, [num_rows, n] of the rows' dtype."""
    gate, up = _split(hidden, activation)
    value = _function(gate, activation)
    if up is not None:
        value = value.mul_(_linear(up, activation))
    return value.mul_(weights[:, None]).to(hidden.dtype)


def activate_grad(grad: Tensor, hidden: Tensor, weights: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the gradients of `activate`'s rows and weights from the gradient of its result."""
    gate, up = _split(hidden, activation)
    value, slope = _function(gate, activation), _function_slope(gate, activation)
    grad = grad.float()
    if up is None:
        grad_weights = (grad * value).sum(1)
        return (grad * weights[:, None] * slope).to(hidden.dtype), grad_weights
    linear = _linear(up, activation)
    grad_weights = (grad * value * linear).sum(1)
    grad = grad * weights[:, None]
    grad_up = grad * value * _linear_slope(up, activation)
    return torch.cat((grad * linear * slope, grad_up), dim=1).to(hidden.dtype), grad_weights


def _split(hidden: Tensor, activation: Activation) -> tuple[Tensor, Tensor | None]:
    if not activation.gated:
        return hidden.float(), None
    gate, up = hidden.float().chunk(2, dim=1)
    return gate, up


def _clamped_gate(gate: Tensor, activation: Activation) -> Tensor:
    return gate if activation.limit is None else gate.clamp(max=activation.limit)


def _function(gate: Tensor, activation: Activation) -> Tensor:
    """Return f of the clamped gate, in new memory."""
    x, function = _clamped_gate(gate, activation), activation.function
    if function == "silu":
        return F.silu(x) if activation.alpha == 1 else x * torch.sigmoid(activation.alpha * x)
    if function in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if function == "gelu_tanh" else "none")
    if function == "squared_relu":
        return x.relu().square()
    return activation.beta * torch.tanh(x / activation.beta) * x.sigmoid()


def _function_slope(gate: Tensor, activation: Activation) -> Tensor:
    """Return the derivative of `_function`."""
    x, function = _clamped_gate(gate, activation), activation.function
    if function == "silu":
        scaled = x if activation.alpha == 1 else activation.alpha * x
        sigmoid = scaled.sigmoid()
        slope = sigmoid * (1 + scaled * (1 - sigmoid))
    elif function == "gelu":
        slope = (1 + torch.erf(x / math.sqrt(2))) / 2 + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    elif function == "gelu_tanh":
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        tanh = torch.tanh(scale * (x + cubic * x**3))
        slope = (1 + tanh) / 2 + x * (1 - tanh * tanh) * scale * (1 + 3 * cubic * x * x) / 2
    elif function == "squared_relu":
        slope = 2 * x.relu()
    else:
        sigmoid, tanh = x.sigmoid(), torch.tanh(x / activation.beta)
        slope = (1 - tanh * tanh) * sigmoid + activation.beta * tanh * sigmoid * (1 - sigmoid)
    return slope if activation.limit is None else slope * (gate <= activation.limit)


def _bounded(up: Tensor, activation: Activation) -> Tensor:
    """Return up, which only SiTU bounds."""
    if activation.function != "situ":
        return up
    return activation.linear_beta * torch.tanh(up / activation.linear_beta)


def _linear(up: Tensor, activation: Activation) -> Tensor:
    """Return the factor by which f(gate) is multiplied."""
    up = _bounded(up, activation)
    if activation.limit is not None:
        up = up.clamp(-activation.limit, activation.limit)
    return up + activation.offset if activation.offset else up


def _linear_slope(up: Tensor, activation: Activation) -> Tensor | float:
    """Return the derivative of `_linear`."""
    slope: Tensor | float = 1.0
    bounded = _bounded(up, activation)
    if activation.function == "situ":
        slope = 1 - (bounded / activation.linear_beta).square()
    return slope if activation.limit is None else slope * (bounded.abs() <= activation.limit)
