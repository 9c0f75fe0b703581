"""Lets an activation recompute use the plan of its forward pass.

A checkpoint runs a function without gradients, and again with them when the backward reaches it. ``register()`` makes
the functions of both checkpoints that Megatron has, its own and Transformer Engine's, a ``Checkpointed``. It keeps the
plans of the first run, and gives each to the same layer in the second. So a plan belongs to a layer and a microbatch,
in whatever order backwards come. It lives as long as the graph of its microbatch; a forward pass without a backward,
as in evaluation, leaves none.

No host compares routings, and no ranks agree: the engine finds a recompute that chooses other experts
(``Engine.compare_routing``).
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import operation
from ep_dispatcher.errors import OtherRoutingError

if TYPE_CHECKING:
    from ep_dispatcher.integrations.megatron.buffers import MegatronBuffer


@dataclass(frozen=True, eq=False)
class Kept:
    """The plan of a forward pass."""

    topk_idx: Tensor  # that it was made from
    layer: int
    microbatch: int
    buffer: MegatronBuffer
    handles: list[ep.Handle]  # one, or one for each part of the tokens (deferred.py)

    def compare(self, topk_idx: Tensor) -> None:
        """Find a routing that is not this plan's. On a GPU the error comes later, as that of a wrong topk_idx."""
        if type(topk_idx) is Tensor:  # else no engine reads it
            operation.compare_routing(self.buffer, self.topk_idx, topk_idx, (self.layer, self.microbatch))


class Checkpointed:
    """A function as a checkpoint calls it: once in the forward pass, then in recomputes."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self.plans: defaultdict[object, deque[Kept]] = defaultdict(deque)  # by dispatcher, in order of use
        self.has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = _running()
        _thread.running = (*outer, self)
        try:
            return self._function(*args, **kwargs)
        finally:
            _thread.running, self.has_run = outer, True


_thread = threading.local()  # a backward runs in threads of autograd


def _running() -> tuple[Checkpointed, ...]:
    """Return the functions that run in this thread, the innermost last."""
    return getattr(_thread, "running", ())


def is_expected() -> bool:
    """Return whether a checkpoint runs this forward pass for the first time."""
    return not torch.compiler.is_compiling() and any(not one.has_run for one in _running())


def keep(dispatcher: object, kept: Kept) -> None:
    """Keep a plan for the recompute of this forward pass."""
    for one in _running():
        if not one.has_run:
            one.plans[dispatcher].append(kept)


def take(dispatcher: object) -> Kept | None:
    """Return the plan that this dispatcher made in the forward pass of which this is a recompute, or None.

    A checkpoint inside a recompute runs for the first time: its own recompute will need the plan again.
    """
    if torch.compiler.is_compiling():
        return None
    for one in reversed(_running()):
        if one.has_run and (plans := one.plans[dispatcher]):
            kept = plans.popleft()
            if kept.buffer.is_destroyed:
                return None
            keep(dispatcher, kept)
            return kept
    return None


def under_way() -> bool:
    """Return whether this forward pass is part of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def explained(error: ValueError) -> ValueError:
    """Return the error. If a recompute has chosen other experts, return one that names layer and microbatch."""
    if not isinstance(error, OtherRoutingError):
        return error
    layer, microbatch = error.where
    return OtherRoutingError(f"layer {layer}, microbatch {microbatch}, recompute: {error}", error.where)


def in_megatrons_checkpoints(old: Callable[..., Any]) -> Any:
    """Wrap CheckpointFunction.forward."""

    @functools.wraps(old)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return old(ctx, Checkpointed(run_function), *args)

    return staticmethod(forward)


def in_transformer_engines_checkpoints(old: Callable[..., Any]) -> Any:
    """Wrap ``checkpoint`` of Transformer Engine. It looks into modules, so a module stays as it is."""

    @functools.wraps(old)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_module = isinstance(function, torch.nn.Module)
        return old(function if is_module else Checkpointed(function), *args, **kwargs)

    return checkpoint
