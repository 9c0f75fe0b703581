"""Masked ranks: what both engines do alike. A rank that another one has masked is out, until all ranks unmask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ep_dispatcher import checks
from ep_dispatcher.engines.health import Health
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.gather import Gather

WHY = "The others have masked it, and go on: unmask() on all ranks lets it in again. Or"


class Masks:
    """The end of a buffer's use by a mask, and the way back."""

    def __init__(self, health: Health):
        self._health = health
        self._is_out = False

    @property
    def is_out(self) -> bool:
        """Return whether a peer has masked this rank, and it knows."""
        return self._is_out

    def end(self, operation: str, epoch: int, phase: str, rank: int, waited_s: float) -> Callable[[], Exception]:
        """End the buffer's use on this rank, as others have masked it. Return what makes the error."""
        error = partial(PeerTimeoutError, operation, epoch, phase, rank, [rank], waited_s, WHY)
        self._is_out = True
        self._health.end(error)
        return error

    def unmask(self, meet: Callable[[], Gather], settle: Callable[[], int], reset: Callable[[int], None]) -> None:
        """Let all ranks of the group in again. ``meet`` opens a round of the ranks.

        ``settle`` ends what is under way, and returns this rank's epoch. ``reset`` is given the last epoch of all
        ranks, once all have settled, and no rank begins an operation before all have reset. If a rank does not come,
        nothing has changed. What fails later ends the buffer on all ranks.
        """

        def settled() -> int:
            if self._health.is_busy:
                checks.fail("buffer", "while another thread is in an operation on it", "one at a time")
            self._health.raise_if_ended(ended=self._is_out)
            return settle()

        def begin_again(epoch: int) -> None:
            with self._health.operation("unmask", ended=self._is_out):
                reset(epoch)

        with meet() as gather:
            epochs = gather("call", settled, waits_for_peers=True)
            try:
                gather("masks", partial(begin_again, _last(epochs)))
                gather("masks of the other ranks", lambda: None)
            except BaseException as error:  # some ranks may have reset, and others not
                failure = partial(
                    RuntimeError, f"this buffer gave up in unmask, by {type(error).__name__}; destroy() it"
                )
                self._health.end(failure, replace=True)
                if isinstance(error, Exception):
                    raise failure() from error
                raise
            if self._is_out:
                self._is_out = False
                self._health.recover()


def _last(epochs: Sequence[int]) -> int:
    """Return the last of the ranks' epochs. Those of the CPU engine have 32 bits, and may wrap around."""
    first = epochs[0]
    return max(epochs, key=lambda epoch: (epoch - first + 2**31) % 2**32)
