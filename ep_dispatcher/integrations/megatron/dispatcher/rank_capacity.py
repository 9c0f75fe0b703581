"""The rank capacity: how many rows a rank may receive in a layer, and what happens to steps that need more.

    with rank_capacity.state().watch() as overflows:   # skipped_step.py does so around the schedule of a step
        ...                                            # a dispatch with too many rows gives zeros, and is noted

Outside of a schedule too many rows are an error. When the capacity grows, it grows to one factor for all layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from ep_dispatcher.errors import TooFewRowsError, copy_error
from ep_dispatcher.integrations.megatron.dispatcher import arguments, registration

FACTOR_FLAG = arguments.flag("rank_capacity_factor")
MEGATRON_FACTOR_FLAG = arguments.flag_of("moe_expert_rank_capacity_factor")


def factor_of(config) -> float | None:
    """Return the rank capacity factor, ours or Megatron's."""
    ours = arguments.rank_capacity_factor(config)
    return getattr(config, "moe_expert_rank_capacity_factor", None) if ours is None else ours


def max_rows(config, num_tokens: int, expert_tp: int, alignment: int) -> int | None:
    """Return the rows of a rank by --moe-expert-rank-capacity-factor; None without it."""
    factor = getattr(config, "moe_expert_rank_capacity_factor", None)
    if factor is None:
        return None
    return -(-int(num_tokens * config.moe_router_topk * expert_tp * factor) // alignment) * alignment


def max_rows_by_factor(
    factor: float, max_tokens: int, num_ranks: int, choices: int, num_local_experts: int, alignment: int = 1
) -> int:
    """Return the rows of a rank by --ep-dispatcher-rank-capacity-factor.

    They are max_tokens x choices x factor, but never more than the ranks can send with groups that are padded to
    ``alignment``, and rounded up to it. With a factor of num_ranks they are exactly that: then any routing has room.
    """
    rows = num_ranks * max_tokens * min(choices, num_local_experts) + num_local_experts * (alignment - 1)
    if factor < num_ranks:
        rows = min(rows, math.ceil(max_tokens * choices * factor))
    return -(-rows // alignment) * alignment


def explained(error: ValueError, num_choices: int, num_ranks: int) -> ValueError:
    """Return the error. If num_choices x factor allowed too few rows, return one that names a factor that is enough."""
    if not isinstance(error, TooFewRowsError):
        return error
    enough = min(math.ceil(100 * error.needed_rows / num_choices) / 100, num_ranks)
    return copy_error(error, f". {FACTOR_FLAG} {enough:g} is enough for this routing")


@dataclass(frozen=True, order=True)
class Overflow:
    """Too many rows in a dispatch. Rows of a rank = the buffer's tokens per rank x choices of a token x factor."""

    factor: float  # would have been enough
    rows: int  # the most rows that a rank needs
    layer: int  # its number; 0: it has none
    most: int  # the factor that is enough for any routing, which is the number of ranks of the group


@dataclass
class CapacityState:
    """The capacity, and the step under way.

    ``grown_factor``, ``pending_error`` and ``num_skipped`` are the same on all ranks.
    """

    grown_factor: float = 0.0  # the factor that the job has grown to; 0: as configured
    overflows: list[Overflow] | None = None  # of the schedule under way; None: no schedule is under way
    # If not None, Megatron's optimizers skip their steps until the next schedule that trains, and others raise it.
    pending_error: TooFewRowsError | None = None
    has_skipped: bool = False  # whether an optimizer has skipped its step since
    last_was_skipped: bool = False  # whether the optimizer step before the schedule under way was skipped
    num_skipped: int = 0
    num_optimizer_calls: int = 0  # what graphs.num_optimizer_calls returned before the schedule under way
    saved: Any = None  # a skipped_step.SavedState, to be restored if this step is skipped
    # skipped_step.ModelFacts of a schedule's models, by the first model.
    model_facts: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)
    optimizers: WeakSet[Any] = field(default_factory=WeakSet)  # Megatron's, of this rank

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Overflow]]:
        """Yield a list that collects overflows, which would otherwise be raised."""
        overflows: list[Overflow] = []
        self.overflows = overflows
        try:
            yield overflows
        finally:
            self.overflows = None


def state() -> CapacityState:
    return registration.process_wide(CapacityState)


def note_overflow(error: ValueError, num_choices: int, num_ranks: int) -> bool:
    """Note an overflow if a schedule is under way. Return whether that was so; otherwise the error has to be raised."""
    overflows = state().overflows
    if overflows is None or not isinstance(error, TooFewRowsError):
        return False
    factor = min(error.needed_rows / num_choices, num_ranks)
    overflows.append(Overflow(factor, error.needed_rows, error.label, num_ranks))
    return True
