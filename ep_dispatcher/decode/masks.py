"""Masked ranks, for both engines. A rank that another one has masked is out, until all ranks unmask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ep_dispatcher import checks
from ep_dispatcher.engines.health import Health
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.gather import Gather

WHY = "The others have masked it, and go on: unmask() on all ranks lets it in again. Or"


class Masks:
    """End a buffer's use on a masked rank, and unmask all ranks."""

    def __init__(self, health: Health):
        self._health = health
        self.is_out = False  # this rank has found that a peer has masked it

    def end(self, operation: str, epoch: int, phase: str, rank: int, waited_s: float) -> Callable[[], Exception]:
        """End the buffer's use on this rank, which others have masked. Return a function that makes the error."""
        error = partial(PeerTimeoutError, operation, epoch, phase, rank, [rank], waited_s, WHY)
        self.is_out = True
        self._health.end(error)
        return error

    def unmask(self, meet: Callable[[], Gather], settle: Callable[[], int], reset: Callable[[int], None]) -> None:
        """Unmask all ranks of the group. ``meet`` opens an exchange between them.

        ``settle`` completes the operations under way, and returns this rank's epoch. Once all have settled, ``reset``
        gets the last epoch of all ranks. No rank begins an operation before all have reset. If a rank does not arrive,
        nothing changes. A later failure ends the buffer on all ranks.
        """

        def settled() -> int:
            if self._health.is_busy:
                checks.refuse("buffer is in use by another thread: one operation at a time")
            self._health.raise_if_ended(ended=self.is_out)
            return settle()

        def begin_again(epoch: int) -> None:
            with self._health.operation("unmask", ended=self.is_out):
                reset(epoch)

        with meet() as gather:
            epochs = gather("call", settled, waits_for_peers=True)
            try:
                # Those of the CPU engine have 32 bits, and may wrap around.
                last = max(epochs, key=lambda epoch: (epoch - epochs[0] + 2**31) % 2**32)
                gather("masks", partial(begin_again, last))
                gather("masks of the other ranks", lambda: None)
            except BaseException as error:  # some ranks may have reset, and others not
                failure = partial(
                    RuntimeError, f"this buffer gave up in unmask, by {type(error).__name__}; destroy() it"
                )
                self._health.end(failure, replace=True)
                if isinstance(error, Exception):
                    raise failure() from error
                raise
            if self.is_out:
                self.is_out = False
                self._health.recover()
