"""The rank capacity of a job, and how it grows when more rows arrive than it has room for.

    with capacity.watched() as found:   # one try of a step's schedule; overflow.py runs it
        ...                             # a dispatch with too many rows gives zeros on all ranks, and is noted
    if found: capacity.grown = ...      # after all ranks of the job have agreed

Elsewhere too many rows stay an error. The capacity is one factor for all layers: layers that need more than they were
configured for get it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ep_dispatcher.errors import TooFewRowsError


@dataclass(frozen=True, order=True)
class Overflow:
    """Too many rows in a dispatch."""

    factor: float  # that is enough: rows / (the buffer's tokens per rank x choices of a token)
    rows: int  # the most that a rank needs
    layer: int  # 0: it has no number


grown = 0.0  # the factor that the job has grown to, the same on all its ranks; 0: as configured
found: list[Overflow] | None = None  # in the try under way; None: there is none


@contextlib.contextmanager
def watched() -> Iterator[list[Overflow]]:
    """Yield a list of what overflows meanwhile, instead of raising it."""
    global found
    found = noted = list[Overflow]()
    try:
        yield noted
    finally:
        found = None


def note(error: ValueError, num_choices: int) -> bool:
    """Return whether this error was noted, because the step will run again. Else it has to be raised."""
    if found is None or not isinstance(error, TooFewRowsError):
        return False
    found.append(Overflow(error.needed_rows / num_choices, error.needed_rows, error.label))
    return True
