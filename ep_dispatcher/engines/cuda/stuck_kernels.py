"""Kernels that may never end: NVSHMEM's own waits have no limit, and ignore the flags of this package.

Such waits are a put into a full queue, a fence and a quiet. If a rank or a link dies during one, that warp stays
inside. Other warps of the kernel wait for peers with a limit, and report who is late. The host uses this report:

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

GRACE_S = 2.0  # from the report of a late rank; kernels that are not stuck end within milliseconds
LOOK_S = 1.0  # how often the thread checks
REASON = (
    "A kernel has not ended since: NVSHMEM waits in it without a limit. Only the end of this process ends it, and its "
    "memory stays in use until then."
)


class StuckKernels:
    """Find out whether a kernel runs on long after the report of a late rank. ``late()`` returns None before it."""

    def __init__(self, late: Callable[[], object]):
        self._late = late
        self._since: float | None = None  # when the report was first seen

    def found(self) -> bool:
        """Return whether the report is old enough. Read only memory of the host."""
        if self._since is None:
            if self._late() is None:
                return False
            self._since = time.monotonic()
        return time.monotonic() - self._since > GRACE_S


class Watched(Protocol):
    def has_stuck_kernel(self) -> bool | None:
        """Return whether a kernel is stuck; None if the answer is final."""


def watch(engine: Watched) -> threading.Thread:
    """Log an error from a thread if a kernel of the engine is stuck: the main thread may be waiting for the GPU."""
    thread = threading.Thread(target=_look, args=(weakref.ref(engine),), daemon=True, name="ep_dispatcher watch")
    thread.start()
    return thread


def _look(engine_ref: Callable[[], Watched | None]) -> None:
    while True:
        time.sleep(LOOK_S)
        engine = engine_ref()
        stuck = None if engine is None else engine.has_stuck_kernel()
        del engine  # this thread must not keep it alive
        if stuck:
            logger.error("ep_dispatcher: a rank is late or gone. %s", REASON)
        if stuck is not False:
            return
