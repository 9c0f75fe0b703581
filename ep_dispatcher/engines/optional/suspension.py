"""The steps of suspend() and resume(), which all ranks take together, on both engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ep_dispatcher.engines.health import Health
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.gather import Gather


def suspend(
    meet: Callable[[], Gather], health: Health, settle: Callable[[], None], give_back: Callable[[], None]
) -> None:
    """Suspend: ``settle`` completes the operations under way and raises their errors, then all ranks ``give_back``.

    When this returns, no rank has the memory any more, so it is free.
    """
    _in_two_steps(meet, health, False, ("operations under way", settle), ("memory", give_back))


def resume(
    meet: Callable[[], Gather],
    health: Health,
    take: Callable[[], None],
    attach: Callable[[], None],
    drop: Callable[[], None],
) -> None:
    """Resume: ``take`` allocates memory, ``attach`` maps that of other ranks. If one gets none, all ``drop`` theirs.

    Then the buffer stays suspended, and all ranks can try again.
    """
    again = "; the buffer stays suspended: free memory, then call resume() again on all ranks"
    _in_two_steps(meet, health, True, ("memory", take), ("memory of the other ranks", attach), drop, again)


def _in_two_steps(
    meet: Callable[[], Gather],
    health: Health,
    suspended: bool,
    first: tuple[str, Callable[[], None]],
    then: tuple[str, Callable[[], None]],
    undo: Callable[[], None] = lambda: None,
    advice: str = "",
) -> None:
    """Go from ``suspended`` to the other state, in an exchange between the ranks that ``meet`` opens.

    If the first step fails on any rank, the buffer stays as it was on all, and all raise the same error. A failure of
    the second step, a late rank or an interrupt ends the buffer's use.
    """
    own: list[Exception] = []  # errors of this rank
    (phase, call), (next_phase, next_call) = first, then

    def attempt() -> tuple[bool, str] | None:
        try:
            call()
        except (ValueError, RuntimeError) as error:  # all ranks raise it
            own.append(error)
            return isinstance(error, ValueError), str(error)
        return None

    name = "resume" if suspended else "suspend"
    with health.operation(name, suspended=suspended), meet() as gather:
        try:
            gather("call", lambda: None)  # from here on an interrupt ends the waits of the other ranks
            failures = gather(phase, attempt, waits_for_peers=True)
            failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
            if failed:
                undo()
            else:
                gather(next_phase, next_call, waits_for_peers=True)
                health.suspended = not suspended
        except PeerTimeoutError as late:
            kind, args, _ = late.__reduce__()
            health.end(partial(kind, *args))
            raise
        if own and isinstance(own[0], PeerTimeoutError):  # of an earlier operation; it has ended the buffer
            raise own[0]
    if failed:
        rank, (is_mistake, text) = failed[0]
        everywhere = len(failed) == len(failures) and all(failure == failed[0][1] for _, failure in failed)
        text = f"{name}: {text}" + ("" if everywhere else f" (on rank {rank})") + advice
        raise ValueError(text) if is_mistake else RuntimeError(text)
