"""MoE layers inside CUDA graphs: Megatron's captures and warm-ups, and errors of replays.

- A replay runs no Python, so host work moves out of it. Gradients of experts go to main_grad inside the graph; the
  hooks of DistributedDataParallel run after it (``Experts.after_backward``).
- A replay raises nothing. ``check_after`` raises the errors of the buffers at the end of a step's schedule, before the
  optimizer.
- Megatron's warm-ups run on equal tokens, so one rank would get the rows of all. They send none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs

from ep_dispatcher.integrations.megatron import buffers, limits

NOTE = "a step with CUDA graphs"
_are_used = False  # whether graphs may contain the experts of some layer


def note_layer(config) -> None:
    """Remember whether graphs may contain this layer's experts: then replays are checked."""
    global _are_used
    _are_used |= limits.experts_may_be_captured(config)


def is_capturing() -> bool:
    """Return whether Megatron is making the graphs of its layers: in captures, and in the warm-ups before them."""
    return cuda_graphs.is_graph_capturing()


def stream_is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_warm_up() -> bool:
    """Return whether this forward pass is a warm-up for a capture. Its tokens are equal, and its results unused.

    Megatron's own is_graph_warmup does not serve: in 0.16.1 it stays true after the first warm-up.
    """
    return is_capturing() and not stream_is_captured()


def check_replays() -> None:
    """If graphs may contain operations, wait for those of the step, and raise their errors.

    All ranks of a buffer's group raise. Ranks of other groups do not learn of it: that would take a collective of all.
    """
    if _are_used and not stream_is_captured():
        buffers.check_buffers(NOTE)


def check_after(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a schedule, which runs a step's forward and backward passes: check the replays after it."""

    @functools.wraps(old)
    def run(*args, **kwargs):
        result = old(*args, **kwargs)
        check_replays()
        return result

    return run
