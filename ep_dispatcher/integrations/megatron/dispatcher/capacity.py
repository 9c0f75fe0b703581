"""The rank capacity of a job, and what a rank knows of steps that need more rows than it has room for.

    with capacity.job().watch() as found:   # the schedule of a step; skipped_step.py runs it
        ...                               # a dispatch with too many rows gives zeros on all ranks, and is noted

Outside of a schedule too many rows are an error. The capacity is one factor for all layers: layers that need more than
they were configured for get it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from ep_dispatcher.errors import TooFewRowsError
from ep_dispatcher.integrations.megatron.dispatcher import registration


@dataclass(frozen=True, order=True)
class Overflow:
    """Too many rows in a dispatch. Rows of a rank = the buffer's tokens per rank x choices of a token x factor."""

    factor: float  # that is enough
    rows: int  # the most that a rank needs
    layer: int  # 0: it has no number
    most: int  # the factor that is enough for any routing: the ranks of the group


@dataclass
class Job:
    """The capacity, and the step under way. ``grown``, ``pending`` and ``num_skipped`` are the same on all ranks."""

    grown: float = 0.0  # the factor that the job has grown to; 0: as configured
    found: list[Overflow] | None = None  # in the schedule under way; None: there is none
    # Not None: Megatron's optimizers skip their steps until the next schedule that trains, and others raise this.
    pending: TooFewRowsError | None = None
    is_skipped: bool = False  # whether an optimizer has done so
    last_was_skipped: bool = False  # whether the optimizer step before the schedule under way was skipped
    num_skipped: int = 0
    num_optimizer_calls: int = 0  # of graphs.num_optimizer_calls, before the schedule under way
    kept: Any = None  # skipped_step.Kept: what to put back if this step is skipped
    # Facts of a schedule's models (skipped_step.Models), by the first of them.
    models: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)
    optimizers: WeakSet[Any] = field(default_factory=WeakSet)  # Megatron's, of this rank

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Overflow]]:
        """Yield a list of what overflows meanwhile, instead of raising it."""
        self.found = noted = list[Overflow]()
        try:
            yield noted
        finally:
            self.found = None


def job() -> Job:
    return registration.part(Job)


def note(error: ValueError, num_choices: int, num_ranks: int) -> bool:
    """Return whether this error was noted, because a schedule is under way. Else it has to be raised."""
    found = job().found
    if found is None or not isinstance(error, TooFewRowsError):
        return False
    factor = min(error.needed_rows / num_choices, num_ranks)
    found.append(Overflow(factor, error.needed_rows, error.label, num_ranks))
    return True
