"""Families of activations, and what each computes."""

import torch
import torch.nn.functional as F

import ep_dispatcher as ep
from ep_dispatcher.moe.activation import NAMED

FAMILIES = {
    **NAMED,
    "gpt-oss": ep.Activation("silu", alpha=1.702, limit=1.0, offset=1.0),
    "DeepSeek-V4": ep.Activation("silu", limit=1.5),
    "gelu_tanh": ep.Activation("gelu_tanh", gated=False),
    "clamped situ": ep.Activation("situ", limit=1.0, beta=2.0, linear_beta=3.0),
}


def right(hidden: torch.Tensor, act: ep.Activation) -> torch.Tensor:
    """The activation of the last dimension, in PyTorch's own functions.

    Without clamp, whose gradient at the limit is 1 before PyTorch 2.14, as here, and 0 since.
    """
    gate, up = hidden.chunk(2, dim=-1) if act.gated else (hidden, torch.ones_like(hidden))
    if act.limit is not None:
        gate = gate.where(gate <= act.limit, act.limit)
    function = {
        "silu": lambda x: x * torch.sigmoid(act.alpha * x),
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "squared_relu": lambda x: F.relu(x).square(),
        "situ": lambda x: act.beta * torch.tanh(x / act.beta) * torch.sigmoid(x),
    }
    if act.function == "situ":
        up = act.linear_beta * torch.tanh(up / act.linear_beta)
    if act.limit is not None:
        up = up.where(up.abs() <= act.limit, act.limit * up.sign())
    return function[act.function](gate) * (up + act.offset)
