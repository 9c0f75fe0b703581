"""Kernels that may never end: NVSHMEM's own waits have no limit, and ignore the flags of this package.

Such waits are a put into a full queue, a fence and a quiet. If a rank or a link dies during one, that warp stays
inside. Other warps of the kernel wait for peers with a limit, and report who is late. The host uses this report:

    stuck = StuckKernels(engine.late)
    while not stream.query():
        if stuck.found():        # the report is GRACE_S old, and the stream still has work
            ...                  # raise the error now; free nothing, which the kernel may still write
"""

from __future__ import annotations

import time
from collections.abc import Callable

GRACE_S = 2.0  # from the report of a late rank; kernels that are not stuck end within milliseconds
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
