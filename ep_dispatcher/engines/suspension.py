"""suspend() and resume(): two steps, which all ranks take together, on both engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ep_dispatcher.engines.health import Health
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.gather import Gather

_PHASES = {"suspend": ("operations under way", "memory"), "resume": ("memory", "memory of the other ranks")}
_ADVICE = {"suspend": "", "resume": "; the buffer stays suspended: free memory, then call resume() again on all ranks"}


def change(
    name: str,
    meet: Callable[[], Gather],
    health: Health,
    first: Callable[[], Any],
    then: Callable[[list[Any]], None],
    undo: Callable[[], None] = lambda: None,
) -> None:
    """Suspend or resume, in an exchange between the ranks that ``meet`` opens.

        "suspend": first() completes the operations under way and raises their errors; then() gives memory back
        "resume":  first() allocates memory; then() maps that of the other ranks

    ``then`` gets what ``first`` has returned on all ranks, which is something that JSON has. If ``first`` fails on any
    rank, all ``undo`` it and raise the same error, and the buffer stays as it was. A failure of ``then``, a late rank
    or an interrupt ends the buffer's use. After a suspend no rank has the memory any more.
    """
    suspended, (phase, next_phase) = name == "resume", _PHASES[name]
    own: list[Exception] = []  # errors of this rank

    def attempt() -> tuple[Any, tuple[bool, str] | None]:
        """Return the result, and the failure if there is one: whether it is a ValueError, and its text."""
        try:
            return first(), None
        except (ValueError, RuntimeError) as error:  # all ranks raise it
            own.append(error)
            return None, (isinstance(error, ValueError), str(error))

    with health.operation(name, suspended=suspended), meet() as gather:
        try:
            gather("call", lambda: None)  # from here on an interrupt ends the waits of the other ranks
            attempts = gather(phase, attempt, waits_for_peers=True)
            failed = [(rank, failure) for rank, (_, failure) in enumerate(attempts) if failure is not None]
            if failed:
                undo()
            else:
                gather(next_phase, partial(then, [result for result, _ in attempts]), waits_for_peers=True)
                health.suspended = not suspended
        except PeerTimeoutError as late:
            kind, args, _ = late.__reduce__()
            health.end(partial(kind, *args))
            raise
        if own and isinstance(own[0], PeerTimeoutError):  # of an earlier operation; it has ended the buffer
            raise own[0]
    if failed:
        rank, (is_mistake, text) = failed[0]
        everywhere = len(failed) == len(attempts) and all(failure == failed[0][1] for _, failure in failed)
        text = f"{name}: {text}" + ("" if everywhere else f" (on rank {rank})") + _ADVICE[name]
        raise ValueError(text) if is_mistake else RuntimeError(text)
