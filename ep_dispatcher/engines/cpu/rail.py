"""Messages between nodes: torch.distributed (gloo) among the ranks of one rail."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from functools import partial

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from ep_dispatcher.engines.cpu.waiter import Message, Waiter
from ep_dispatcher.gather import GRACE_S, PeersLate
from ep_dispatcher.gloo import NO_TAG, is_closed, wait_limit
from ep_dispatcher.stores import STORE_GONE
from ep_dispatcher.threads import StoreHangs, in_thread

_LOOK_S = 0.02  # how often a waiting rank checks for an interrupt
_SPIN_S = 0.0002  # then another thread waits
_STUCK_S = 5.0  # after the deadline of a message: gloo does not keep its limit
_ROOM = 32 * 1024  # bytes that a socket takes before its receiver reads
_NOTHING = b"\xff" * 8  # in a receiver's memory until a message begins to arrive; no message begins with it

_rails: weakref.WeakSet[Rail] = weakref.WeakSet()


class RailLate(Exception):
    """A message of ``rank`` did not arrive, or could not be delivered, in time."""

    def __init__(self, phase: str, rank: int):
        super().__init__(phase, rank)
        self.phase, self.rank = phase, rank


class Interrupted(Exception):
    """Another thread wants this one to stop waiting."""


class Rail:
    """Point-to-point messages to the rail peers of this rank, one on every other node.

    A rail is a process group outside torch.distributed's registry, which lives as long as its buffer. Making it is
    collective among the ranks of the rail; PeersLate if that takes longer than ``timeout_s``. ``deadline``
    (time.monotonic()) is that of the operation under way. One thread at a time may use it, except for ``interrupt``.
    """

    deadline = 0.0
    _waiter: Waiter | None = None  # from the first long wait on
    _interrupted = False

    def __init__(self, store: Store, ranks: tuple[int, ...], node: int, timeout_s: float):
        self.ranks, self.node = ranks, node
        self.others = [(node + i) % len(ranks) for i in range(1, len(ranks))]  # every node starts at a different one
        self.bytes_sent = [0] * len(ranks)  # of rows and sums
        self.list_bytes_sent = [0] * len(ranks)  # of counts and lists
        self.waited_ns = [0] * len(ranks)  # for messages of each node, in total
        self._group: ProcessGroupGloo | None = None
        if self.others:
            prefix = PrefixStore(f"rail{ranks[0]}", store)
            connect = partial(ProcessGroupGloo, prefix, node, len(ranks), wait_limit(timeout_s))
            started = time.monotonic()
            try:
                self._group = in_thread(connect, timeout_s + GRACE_S)
            except StoreHangs as error:  # gloo did not keep its own limit: this rank itself is stuck
                raise PeersLate(str(error), [ranks[node]]) from error
            except Exception as error:  # of gloo or the store
                if time.monotonic() - started < timeout_s and not isinstance(error, STORE_GONE):
                    raise
                raise PeersLate(str(error), [ranks[n] for n in self.others]) from error
        self._sends: list[Message] = []
        self._receives: list[Message] = []
        _rails.add(self)

    def send(self, phase: str, node: int, message: memoryview, tag: int, *, is_list: bool = False) -> None:
        """Start to send; ``message`` must not change until ``flush``."""
        if message.nbytes:
            (self.list_bytes_sent if is_list else self.bytes_sent)[node] += message.nbytes
            self._sends.append(self._start("send", phase, node, message, tag))

    def receive(self, phase: str, node: int, message: memoryview, tag: int) -> Message | None:
        """Start to receive into ``message``; give the result to ``wait``."""
        if not message.nbytes:
            return None
        message[: len(_NOTHING)] = _NOTHING
        self._receives.append(self._start("recv", phase, node, message, tag))
        return self._receives[-1]

    def _start(self, operation: str, phase: str, node: int, message: memoryview, tag: int) -> Message:
        try:
            data = torch.frombuffer(message, dtype=torch.uint8)
            work = getattr(self._group, operation)([data], node, tag)
            return Message(work, phase, node, message, self.deadline)
        except RuntimeError as error:  # a closed connection, if it is
            if not self._is_late(node, self.deadline):
                raise
            raise RailLate(phase, self.ranks[node]) from error

    def wait(self, message: Message | None) -> None:
        """Wait until the message has arrived; RailLate at the deadline. Signal handlers run, and may raise."""
        if message is None:
            return
        begin = time.monotonic_ns()
        spin_end = time.monotonic() + _SPIN_S
        memory = message.memory
        assert memory is not None  # until the message is complete
        while not (begun := memory[: len(_NOTHING)] != _NOTHING) and time.monotonic() < spin_end:
            os.sched_yield()
        self._finish(message, is_near=begun)
        self.waited_ns[message.node] += time.monotonic_ns() - begin

    def flush(self) -> None:
        """Wait until all sends have left. All receives must be complete.

        A peer begins to receive before it sends, so every peer has begun to receive. Small messages have left, or will
        at once. Large ones still need the peer and the network.
        """
        for message in [*self._sends]:
            self._finish(message, is_near=message.memory is not None and message.memory.nbytes <= _ROOM)

    def _finish(self, message: Message, is_near: bool) -> None:
        if is_near:
            message.complete()
        else:
            if self._waiter is None:
                self._waiter = Waiter()
            self._waiter.add(message)
        while not message.done(_LOOK_S):
            if self._interrupted:
                raise Interrupted
            if time.monotonic() > message.deadline + _STUCK_S:
                raise RailLate(message.phase, self.ranks[message.node])
        if message.error is not None:
            if not self._is_late(message.node, message.deadline):
                raise message.error
            raise RailLate(message.phase, self.ranks[message.node]) from message.error
        message.work = None
        for under_way in (self._sends, self._receives):
            if message in under_way:
                under_way.remove(message)

    def _is_late(self, node: int, deadline: float) -> bool:
        """Return whether an error of gloo means a late peer, or one that has left (gloo.py)."""
        group = self._group
        return time.monotonic() >= deadline or group is None or is_closed(group, node)

    def interrupt(self) -> None:
        """[any thread] Make each wait raise Interrupted, now and later."""
        self._interrupted = True

    def abort(self) -> None:
        """Drop every message under way, and the connections. Peers notice at once, and nothing accesses the memory of
        a send or receive any more."""
        if self._receives or self._sends:
            self._close_connections()
        if self._waiter is not None:
            self._waiter.close(timeout_s=5)
        for message in (*self._receives, *self._sends):
            message.work = message.memory = None
        self._receives.clear()
        self._sends.clear()
        self._waiter = self._group = None

    def _close_connections(self) -> None:
        """Let a wait time out. Then gloo closes the group's connections, and all other waits fail."""
        group = self._group
        assert group is not None  # as messages are under way
        receive = group.recv  # type: ignore[attr-defined]  # PyTorch's stubs lack it
        for node in self.others:
            try:
                receive([torch.empty(1, dtype=torch.uint8, device="cpu")], node, NO_TAG).wait(wait_limit(0.001))
            except RuntimeError:  # as intended; or only this connection was closed already
                if not is_closed(group, node):
                    raise

    def forget(self) -> None:
        """Never free the parent's connections in a forked child: a destructor would wait for gloo's thread, which is
        not there."""
        for thing in (self._group, *(message.work for message in (*self._receives, *self._sends))):
            if thing is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _forget_all() -> None:
    for rail in list(_rails):
        rail.forget()


os.register_at_fork(after_in_child=_forget_all)
