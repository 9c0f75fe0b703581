"""Finds what looks at operators or changes tensors: compilers, dispatch modes, transforms, subclasses of Tensor.

Where nothing does, an operation runs without torch.library, which costs the host more time than everything else
together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ep_dispatcher import checks

# The types of arguments, unless one is a subclass of Tensor or a size of a traced graph.
_PLAIN_TYPES = frozenset((Tensor, Parameter, type(None), int, str, bool))
_REVERSE = "reverse mode: backward() or torch.autograd.grad"


def is_observed(arguments: Iterable[object]) -> bool:
    """Return whether something looks at operators: a compiler, a dispatch mode, a transform, a subclass of Tensor."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN_TYPES.issuperset(map(type, arguments))
    )


def needs_no_autograd() -> bool:
    """Return whether neither gradients nor tangents are wanted here, as in a backward."""
    return not torch.is_grad_enabled() and forward_ad._current_level < 0


def refuse_dtensors(**arguments: object) -> None:
    """Refuse DTensors where something is observed: an operator would mix their local parts with other tensors."""
    if not torch.compiler.is_compiling():
        for argument, value in arguments.items():
            checks.dtensor(argument, value)


def refuse_transforms(**arguments: object) -> None:
    """Refuse forward mode and torch.func. Of custom operators PyTorch drops tangents, and has no torch.func.grad."""
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if forward_ad._current_level < 0 and not transformed:
        return
    for argument, value in arguments.items():
        for t in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(t, Tensor) or not t.is_floating_point():
                continue
            if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
                checks.refuse(
                    f"{argument} has a tangent of forward-mode differentiation (torch.func.jvp), but only "
                    f"{_REVERSE} is supported"
                )
            if transformed and t.requires_grad and torch.is_grad_enabled():
                checks.refuse(
                    f"{argument} has a gradient of torch.func (grad, vjp, jacrev), but only {_REVERSE} is supported"
                )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's once_differentiable of a backward, without its torch.no_grad() where gradients are off already.

    They are, unless create_graph is set, and torch.no_grad() takes the host 3 us.
    """
    with_graph = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        return with_graph(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return run


def apply_without_functorch(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for callers that nothing observes.

    It skips what ``apply`` does for torch.func, in Python: a third of the host's time.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def light_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply``, which skips what it does for torch.func where nothing observes."""
    direct = apply_without_functorch(function)

    def apply(*inputs: Any) -> Any:
        return function.apply(*inputs) if is_observed(()) else direct(*inputs)

    return apply
