"""A thread that waits for gloo in place of its owner.

gloo cannot tell whether a message has arrived, and a wait that times out closes the group's connections. So a thread in
such a wait would run no signal handler, and see no request of other threads, until the message arrives. The owner waits
for a lock instead, which both can interrupt. That costs tens of microseconds, so only long waits do it.
"""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from queue import SimpleQueue

from torch.distributed import Work

from ep_dispatcher import threads
from ep_dispatcher.gloo import wait_limit


class Message:
    """One message under way. An exception may keep it alive, but not its work, connection and memory."""

    def __init__(self, work: Work, phase: str, node: int, memory: memoryview, deadline: float):
        self.work: Work | None = work
        self.memory: memoryview | None = memory
        self.phase, self.node, self.deadline = phase, node, deadline
        self.error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def complete(self) -> None:
        """Wait for gloo. Nothing can interrupt this."""
        assert self.work is not None
        try:
            self.work.wait(wait_limit(max(self.deadline - time.monotonic(), 0.001)))
        except Exception as error:  # the owner raises it
            self.error = error.with_traceback(None)
        self.memory = None
        self._done.release()

    def done(self, timeout_s: float) -> bool:
        """Return whether ``complete`` has ended in another thread, after at most ``timeout_s``. Signal handlers run."""
        done = self._done.acquire(timeout=timeout_s)
        if done:
            self._done.release()
        return done


class Waiter:
    """Completes messages in order, in a thread of its own. The thread ends with ``close()``, or with the waiter."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        end = partial(self._messages.put, None)
        self._thread = threads.start(partial(_run, self._messages), "rail", stop=end)
        weakref.finalize(self, end).atexit = False

    def add(self, message: Message) -> None:
        self._messages.put(message)

    def close(self, timeout_s: float) -> None:
        """End the thread. The connections of its messages must be closed."""
        self._messages.put(None)
        self._thread.join(timeout_s)


def _run(messages: SimpleQueue[Message | None]) -> None:
    while (message := messages.get()) is not None:
        message.complete()
        del message  # else its memory would stay until the next one
