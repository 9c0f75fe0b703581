"""Messages between nodes: torch.distributed (gloo) among the ranks of one rail."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

CONNECT_TIMEOUT = timedelta(seconds=120)


class RailLate(Exception):
    """A message of ``rank`` did not come, or could not be delivered, in time."""

    def __init__(self, phase: str, rank: int):
        super().__init__(phase, rank)
        self.phase, self.rank = phase, rank


@dataclass(eq=False)
class Message:
    """One message under way. A kept exception keeps it too, but not the work, with its connection and its memory."""

    work: Work | None
    phase: str
    node: int


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
        self._sends: list[Message] = []
        self._receives: list[Message] = []

    def send(self, phase: str, node: int, message: memoryview, tag: int) -> None:
        """Start to send; ``message`` must not change until ``flush``."""
        if message.nbytes:
            self.bytes_sent[node] += message.nbytes
            self._sends.append(self._start("send", phase, node, message, tag))

    def receive(self, phase: str, node: int, message: memoryview, tag: int) -> Message | None:
        """Start to receive into ``message``; give the result to ``wait``."""
        if not message.nbytes:
            return None
        self._receives.append(self._start("recv", phase, node, message, tag))
        return self._receives[-1]

    def _start(self, operation: str, phase: str, node: int, message: memoryview, tag: int) -> Message:
        try:
            data = torch.frombuffer(message, dtype=torch.uint8)
            return Message(getattr(self._group, operation)([data], node, tag), phase, node)
        except RuntimeError as error:  # the peer's end of the connection is closed
            raise RailLate(phase, self.ranks[node]) from error

    def wait(self, message: Message | None, deadline: float) -> None:
        """Until the message has come, or RailLate at ``deadline`` (time.monotonic())."""
        if message is None:
            return
        try:
            message.work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:  # gloo says no more: too late, or the peer's end of the connection is closed
            raise RailLate(message.phase, self.ranks[message.node]) from error
        message.work = None
        for under_way in (self._sends, self._receives):
            if message in under_way:
                under_way.remove(message)

    def flush(self, deadline: float) -> None:
        """Until everything sent has left."""
        while self._sends:
            self.wait(self._sends[-1], deadline)

    def abort(self) -> None:
        """Give up every message under way and the connections: peers find that out at once, and nothing reads or writes
        the memory of a send or receive any more."""
        for message in (*self._receives, *self._sends):
            try:
                # When a wait times out gloo closes the group's connections.
                message.work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass
            message.work = None
        self._receives.clear()
        self._sends.clear()
        self._group = None
