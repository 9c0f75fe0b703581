"""A bar of the steps in a terminal, and lines that stay above it."""

from __future__ import annotations

import math
import statistics
from types import TracebackType
from typing import Any

LINES = 20  # of a run, whatever its number of steps
RECENT = 20  # steps that the bar's tokens per second are of


def is_line_due(step: int, num_steps: int) -> bool:
    """Return whether a line is printed after this step, counted from 1: after the first, the last and some between."""
    return step in (1, num_steps) or step % math.ceil(num_steps / LINES) == 0


class Progress:
    """A bar with steps, loss, tokens per second and time left. There are lines alone without a terminal or tqdm.

        with Progress(num_steps, tokens_per_step, shows=rank == 0) as progress:
            for step in range(num_steps):
                ...
                progress.step(bits_per_byte, seconds)
                progress.say("a line")

    The bar begins with the second step: what the first one prints does not meet it, and the time left does not count
    what is made once.
    """

    def __init__(self, num_steps: int, tokens_per_step: int, *, shows: bool):
        self._num_steps, self._tokens_per_step, self._shows = num_steps, tokens_per_step, shows
        self._seconds: list[float] = []  # of the last steps
        self._bar: Any = None

    def step(self, bits_per_byte: float, seconds: float) -> None:
        """Move the bar. seconds: those of this step."""
        if not self._shows:
            return
        self._seconds = [*self._seconds, seconds][-RECENT:]
        if len(self._seconds) == 1:
            self._bar = _make_bar(self._num_steps)
        elif self._bar is not None:
            self._bar.update()
        if self._bar is not None:
            speed = self._tokens_per_step / statistics.median(self._seconds)
            self._bar.set_postfix_str(f"{bits_per_byte:.2f} bits per byte, {speed:,.0f} tokens/s", refresh=False)

    def say(self, text: str) -> None:
        """Print a line, on the rank that shows the bar."""
        if self._bar is not None:
            self._bar.clear()
        if self._shows:
            print(text, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _make_bar(num_steps: int) -> Any:
    """Return a bar after the first step, or None without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    form = "{percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} steps{postfix}, {remaining} left"
    # disable=None: no bar where nobody sees it move, as in a file.
    return tqdm(total=num_steps, initial=1, bar_format=form, dynamic_ncols=True, leave=False, disable=None)
