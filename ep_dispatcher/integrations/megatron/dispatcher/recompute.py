"""Makes Megatron's checkpoints keep the plans of a forward pass for its recompute (ep_dispatcher/recompute.py).

Megatron has two kinds of checkpoints, its own and Transformer Engine's. ``register()`` lets both call their function as
a ``Checkpointed``. The dispatcher keeps its plans itself, because it knows the layer and the microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ep_dispatcher.recompute import checkpoint_runs


class Checkpointed:
    """A function as a checkpoint calls it: once in the forward pass, then in recomputes."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._run, self._recompute = checkpoint_runs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, self._run = self._run, self._recompute
        with run:
            return self._function(*args, **kwargs)


def is_under_way() -> bool:
    """Return whether this forward pass is part of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def wrap_checkpoint_forward(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap CheckpointFunction.forward."""

    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return old(ctx, Checkpointed(run_function), *args)

    return forward


def wrap_te_checkpoint(old: Callable[..., Any]) -> Any:
    """Wrap ``checkpoint`` of Transformer Engine. It looks into modules, so a module stays as it is."""

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_module = isinstance(function, torch.nn.Module)
        return old(function if is_module else Checkpointed(function), *args, **kwargs)

    return checkpoint
