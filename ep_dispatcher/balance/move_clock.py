"""How long the pushes and pulls of this rank take, without a wait of the host."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch

Move = Literal["push", "pull"]


class _Timed(NamedTuple):
    """A push or pull that was launched on a GPU, and the ``call`` before it."""

    move: Move
    call: int
    begin: torch.Event
    end: torch.Event


class MoveClock:
    """Sums of nanoseconds, each for the moves between two calls of ``Buffer.stats()``.

        with clock.measure("push"):
            slots.push(copies, parameters)
        push_ns, pull_ns = clock.take(before=3)     # of moves before call 3

    On GPUs events of the current stream measure. They are read once the stream has passed them, at the latest by the
    next move, and then used again. So there are as many as moves are under way.

    call   the number of the latest call
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self.call = 0
        self._sums: defaultdict[int, Counter[Move]] = defaultdict(Counter)  # by call
        self._under_way: deque[_Timed] = deque()
        self._unused: list[tuple[torch.Event, torch.Event]] = []
        self._lock = threading.Lock()  # a backward runs in another thread

    @contextmanager
    def measure(self, move: Move) -> Iterator[None]:
        """Measure a move. It is not measured while a CUDA graph is captured, since events in a graph have no times."""
        if not self._on_gpu:
            began_ns = time.monotonic_ns()
            yield
            with self._lock:
                self._sums[self.call][move] += time.monotonic_ns() - began_ns
        elif torch.cuda.is_current_stream_capturing():
            yield
        else:
            with self._lock:
                self._read_events()
                begin, end = self._unused.pop() if self._unused else (_timing_event(), _timing_event())
            begin.record()
            yield
            end.record()
            self._under_way.append(_Timed(move, self.call, begin, end))

    def take(self, before: int) -> tuple[int, int]:
        """Return the nanoseconds of pushes and of pulls before that call, and count them no more.

        A move that has not ended counts in a later result.
        """
        found: Counter[Move] = Counter()
        with self._lock:
            self._read_events()
            for call in [call for call in self._sums if call < before]:
                found += self._sums.pop(call)
        return found["push"], found["pull"]

    def _read_events(self) -> None:
        """Add up the moves that have ended. The host does not wait. The caller has the lock."""
        while self._under_way and self._under_way[0].end.query():
            move, call, begin, end = self._under_way.popleft()
            self._sums[call][move] += round(begin.elapsed_time(end) * 1e6)  # of milliseconds
            self._unused.append((begin, end))


def _timing_event() -> torch.Event:
    """Return an event of GPUs. It is not of torch.cuda, because that records in Python, ten times as slowly."""
    return torch.Event("cuda", enable_timing=True)
