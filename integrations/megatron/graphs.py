"""MoE layers inside CUDA graphs: Megatron's captures and warm-ups, and the errors that replays have found.

A replay runs no Python. Three things follow:

- What the host does beside kernels, it does elsewhere. Gradients of experts go to main_grad inside the graph; the hooks
  of DistributedDataParallel run after it (``Experts.after_backward``).
- A replay raises nothing. ``check_after`` looks at the errors of the buffers when a step's schedule is over: before the
  optimizer.
- Megatron's warm-ups run on tokens that are all alike, so that one rank would get the rows of all. They send none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs

from ep_dispatcher.integrations.megatron import buffers, limits

NOTE = "a step with CUDA graphs"
_are_used = False  # a layer was built that graphs may contain


def note_layer(config) -> None:
    """Remember that graphs may contain this layer's experts: then replays are looked at."""
    global _are_used
    _are_used |= limits.experts_may_be_captured(config)


def is_capturing() -> bool:
    """Whether Megatron makes the graphs of its layers: in their capture, and in the warm-ups before it."""
    return cuda_graphs.is_graph_capturing()


def stream_is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_warm_up() -> bool:
    """Whether this forward pass warms up for a capture. Its tokens are all alike, and nobody looks at its results.

    Not by Megatron's is_graph_warmup: in 0.16.1 that stays true once it was.
    """
    return is_capturing() and not stream_is_captured()


def check_replays() -> None:
    """Wait for the step's operations where graphs may contain some, and raise what they have found.

    On all ranks of a buffer's group. Ranks of other groups hear nothing: that would take a collective of all.
    """
    if _are_used and not stream_is_captured():
        buffers.check_buffers(NOTE)


def check_after(old: Callable[..., Any]) -> Callable[..., Any]:
    """Of a schedule, which runs a step's forward and backward passes."""

    @functools.wraps(old)
    def run(*args, **kwargs):
        result = old(*args, **kwargs)
        check_replays()
        return result

    return run
