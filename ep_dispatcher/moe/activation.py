"""The activations of experts, between their two GEMMs, with their derivatives in PyTorch's operators.

grouped_gemm_kernels.py has the same formulas in Triton.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ep_dispatcher import checks

FUNCTIONS = ("silu", "gelu", "gelu_tanh", "squared_relu", "situ")


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
    alpha        of "silu"; 1.702 makes it the quick GELU
    limit        None: nothing is clamped. Only with a gate
    offset       added to up. Only with a gate
    beta, linear_beta  of "situ"
    """

    function: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    beta: float = 4.0
    linear_beta: float = 25.0

    @property
    def pair(self) -> int:
        """Return the entries of the first GEMM for each of the second."""
        return 2 if self.gated else 1


SWIGLU = Activation()
NAMED = {
    "swiglu": SWIGLU,
    "geglu": Activation("gelu"),
    "gelu": Activation("gelu", gated=False),
    "squared_relu": Activation("squared_relu", gated=False),
    "situ": Activation("situ"),
}


def checked(given: str | Activation) -> Activation:
    """Return the activation of this name or description. ValueError if it is not allowed."""
    if not isinstance(given, Activation):
        checks.one_of("activation", given, (*NAMED, "an ep.Activation"))
        return NAMED[given]
    checks.one_of("activation.function", given.function, FUNCTIONS)
    checks.boolean("activation.gated", given.gated)
    for name in ("alpha", "offset", "beta", "linear_beta", "limit"):
        value = getattr(given, name)
        if name == "limit" and value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (name != "offset" and value <= 0):
            checks.fail(f"activation.{name}", repr(value), "a number" if name == "offset" else "a number above 0")
    if not given.gated and (given.limit is not None or given.offset or given.function == "situ"):
        checks.fail("activation.gated", False, "True with limit, offset or situ")
    return given


def activate(hidden: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """Return the activation of rows [num_rows, pair * n] times their weights, [num_rows, n] of the rows' dtype."""
    gate, up = _split(hidden, activation)
    value = _function(gate, activation)[0]
    if up is not None:
        value = value * _linear(up, activation)[0]
    return (value * weights[:, None]).to(hidden.dtype)


def activate_grad(grad: Tensor, hidden: Tensor, weights: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the gradients of `activate`'s rows and weights, from that of its result."""
    gate, up = _split(hidden, activation)
    value, slope = _function(gate, activation)
    grad = grad.float()
    if up is None:
        grad_weights = (grad * value).sum(1)
        return (grad * weights[:, None] * slope).to(hidden.dtype), grad_weights
    linear, linear_slope = _linear(up, activation)
    grad_weights = (grad * value * linear).sum(1)
    grad = grad * weights[:, None]
    return torch.cat((grad * linear * slope, grad * value * linear_slope), dim=1).to(hidden.dtype), grad_weights


def _split(hidden: Tensor, activation: Activation) -> tuple[Tensor, Tensor | None]:
    if not activation.gated:
        return hidden.float(), None
    gate, up = hidden.float().chunk(2, dim=1)
    return gate, up


def _function(x: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return f of the clamped gate, and its derivative."""
    limit, inside = activation.limit, None
    if limit is not None:
        inside, x = x <= limit, x.clamp(max=limit)
    if activation.function == "silu":
        sigmoid = (x if activation.alpha == 1 else activation.alpha * x).sigmoid()
        value, slope = x * sigmoid, sigmoid * (1 + activation.alpha * x * (1 - sigmoid))
    elif activation.function == "gelu":
        value = F.gelu(x)
        slope = (1 + torch.erf(x / math.sqrt(2))) / 2 + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    elif activation.function == "gelu_tanh":
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        tanh = torch.tanh(scale * (x + cubic * x**3))
        value = x * (1 + tanh) / 2
        slope = (1 + tanh) / 2 + x * (1 - tanh * tanh) * scale * (1 + 3 * cubic * x * x) / 2
    elif activation.function == "squared_relu":
        positive = x.relu()
        value, slope = positive * positive, 2 * positive
    else:
        sigmoid, tanh = x.sigmoid(), torch.tanh(x / activation.beta)
        value = activation.beta * tanh * sigmoid
        slope = (1 - tanh * tanh) * sigmoid + value * (1 - sigmoid)
    return value, slope if inside is None else slope * inside


def _linear(up: Tensor, activation: Activation) -> tuple[Tensor, Tensor | float]:
    """Return what multiplies f of the gate, and its derivative."""
    slope: Tensor | float = 1.0
    if activation.function == "situ":
        tanh = torch.tanh(up / activation.linear_beta)
        up, slope = activation.linear_beta * tanh, 1 - tanh * tanh
    if activation.limit is not None:
        slope, up = slope * (up.abs() <= activation.limit), up.clamp(-activation.limit, activation.limit)
    return up + activation.offset if activation.offset else up, slope
