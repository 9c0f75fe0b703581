"""Messages between nodes: torch.distributed (gloo) among the ranks of one rail."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

CONNECT_TIMEOUT = timedelta(seconds=120)


class RailLate(Exception):
    """A message of ``rank`` did not come, or could not be delivered, in time."""

    def __init__(self, phase: str, rank: int):
        super().__init__(phase, rank)
        self.phase, self.rank = phase, rank


class Rail:
    """Point-to-point messages to the rank with this rank's local index on every other node.

    It is a process group of its own, outside torch.distributed's registry: making it is collective among the ranks
    of the rail alone, and it goes away with its buffer.
    """

    def __init__(self, store: Store, ranks: tuple[int, ...], node: int):
        self.ranks, self.node = ranks, node
        self.others = [(node + i) % len(ranks) for i in range(1, len(ranks))]  # every node starts at a different one
        self.bytes_sent = [0] * len(ranks)
        self._group = None
        if self.others:
            prefix = PrefixStore(f"rail{ranks[0]}", store)
            self._group = ProcessGroupGloo(prefix, node, len(ranks), CONNECT_TIMEOUT)
        self._sends: list = []
        self._receives: list = []

    def send(self, phase: str, node: int, message: memoryview, tag: int) -> None:
        """Start to send; ``message`` must not change until ``flush``."""
        if message.nbytes:
            self.bytes_sent[node] += message.nbytes
            self._sends.append((self._start("send", phase, node, message, tag), phase, node))

    def receive(self, phase: str, node: int, message: memoryview, tag: int):
        """Start to receive into ``message``; give the result to ``wait``."""
        if not message.nbytes:
            return None
        work = self._start("recv", phase, node, message, tag)
        self._receives.append(work)
        return work, phase, node

    def _start(self, operation: str, phase: str, node: int, message: memoryview, tag: int):
        try:
            data = torch.frombuffer(message, dtype=torch.uint8)
            return getattr(self._group, operation)([data], node, tag)
        except RuntimeError as error:  # the peer's end of the connection is closed
            raise RailLate(phase, self.ranks[node]) from error

    def wait(self, pending, deadline: float) -> None:
        """Until the message has come, or RailLate at ``deadline`` (time.monotonic())."""
        if pending is None:
            return
        work, phase, node = pending
        try:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:  # gloo says no more: too late, or the peer's end of the connection is closed
            raise RailLate(phase, self.ranks[node]) from error

    def flush(self, deadline: float) -> None:
        """Until everything sent has left."""
        while self._sends:
            self.wait(self._sends.pop(), deadline)
        self._receives.clear()

    def abort(self) -> None:
        """Give up every message under way: nothing reads or writes the memory of a send or receive any more."""
        for work in [*self._receives, *(work for work, _, _ in self._sends)]:
            try:
                work.wait(timedelta(milliseconds=1))  # gloo closes the connections of the group when a wait times out
            except RuntimeError:
                pass
        self._receives.clear()
        self._sends.clear()

    def close(self) -> None:
        self.abort()
        self._group = None
