"""EP_DISPATCHER_TRACE=1: one line on stderr for every operation.

    ep_dispatcher trace: rank 1, dispatch, epoch 7, 0.412 ms, bytes: 0 inter_node_bytes_sent, ...

The bytes are those of ``Buffer.counters()`` for this operation, summed over ranks. One write per line keeps the lines
of several ranks whole.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

Counters = dict[str, list[int]]  # Buffer.counters()


class Trace:
    """Writes the lines of one buffer."""

    def __init__(self, rank: int):
        self._rank = rank
        self._totals: dict[str, int] = {}  # after the previous operation

    def write(self, operation: str, epoch: int, elapsed_ms: float, counters: Counters) -> None:
        totals = {name: sum(by_rank) for name, by_rank in counters.items()}
        moved = ", ".join(f"{total - self._totals.get(name, 0)} {name}" for name, total in totals.items())
        self._totals = totals
        where = f"rank {self._rank}, {operation}, epoch {epoch}"
        sys.stderr.write(f"ep_dispatcher trace: {where}, {elapsed_ms:.3f} ms, bytes: {moved}\n")
        sys.stderr.flush()


class _Launched(NamedTuple):
    """One operation in a stream, until its line is written."""

    operation: str
    begin: torch.cuda.Event
    end: torch.cuda.Event
    state: Tensor  # as the operation left it
    copied: torch.cuda.Event  # after which `state` may be read


class StreamTrace:
    """Writes the line of each operation in a stream, some time after it is complete. The host never waits for it.

        with stream_trace.operation("dispatch"):   # write the lines of earlier ones, and time this one by events
            launch(...)
        stream_trace.write_complete()              # where the host has waited for another reason

    ``state``: uint8, the memory in which kernels count. ``read(copy)``: the epoch and the counters in a copy of it.
    Times are those of the stream, waits for peers included. Captures and replays of CUDA graphs write no line: a replay
    runs no host code.
    """

    def __init__(self, trace: Trace, state: Tensor, read: Callable[[Tensor], tuple[int, Counters]]):
        self._trace, self._state, self._read = trace, state, read
        self._launched: deque[_Launched] = deque()

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        self.write_complete()
        begin, end, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        yield
        end.record()
        state = torch.empty_like(self._state, device="cpu", pin_memory=self._state.is_cuda)
        state.copy_(self._state, non_blocking=True)
        copied.record()
        self._launched.append(_Launched(name, begin, end, state, copied))

    def write_complete(self) -> None:
        """Write the lines of the operations that are complete, oldest first."""
        while self._launched and self._launched[0].copied.query():
            done = self._launched.popleft()
            epoch, counters = self._read(done.state)
            self._trace.write(done.operation, epoch, done.begin.elapsed_time(done.end), counters)
