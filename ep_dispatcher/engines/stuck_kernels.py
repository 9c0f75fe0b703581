"""Kernels that may never end: NVSHMEM's own waits have no limit, and look at no flag of this package.

A put into a full queue, a fence and a quiet are such waits. If a rank or a link dies under one of them, that warp stays
inside. Other warps of the kernel wait for peers with a limit, and report who is late. The host goes by this report:

    stuck = StuckKernels(engine.late)
    while not stream.query():
        if stuck.found():        # the report is GRACE_S old, and the stream still has work
            ...                  # raise the error now; free nothing, which the kernel may still write
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

GRACE_S = 2.0  # from the report of a late rank; other kernels end within milliseconds
LOOK_S = 1.0  # how often the thread looks
REASON = (
    "A kernel has not ended since: NVSHMEM waits in it without a limit. Only the end of this process ends it, and its "
    "memory stays in use until then."
)


class StuckKernels:
    """Whether a kernel runs on, long after one has reported a late rank. ``late()`` returns None before the report."""

    def __init__(self, late: Callable[[], object]):
        self._late = late
        self._since: float | None = None  # when the report was first seen

    def found(self) -> bool:
        """Return whether the report is old enough. Read memory of the host alone."""
        if self._since is None:
            if self._late() is None:
                return False
            self._since = time.monotonic()
        return time.monotonic() - self._since > GRACE_S


class Watched(Protocol):
    def has_stuck_kernel(self) -> bool | None:
        """None: nobody need ask again."""


def watch(engine: Watched) -> threading.Thread:
    """Log an error when a kernel of the engine is stuck, from a thread: the program may wait for the GPU by itself."""
    thread = threading.Thread(target=_look, args=(weakref.ref(engine),), daemon=True, name="ep_dispatcher watch")
    thread.start()
    return thread


def _look(engine_ref: Callable[[], Watched | None]) -> None:
    while True:
        time.sleep(LOOK_S)
        engine = engine_ref()
        stuck = None if engine is None else engine.has_stuck_kernel()
        del engine  # it must not live on for this thread
        if stuck:
            logger.error("ep_dispatcher: a rank is late or gone. %s", REASON)
        if stuck is not False:
            return
