"""Exchange between ranks that make, suspend or resume a buffer: with a time limit, to one outcome for all.

    with Gather(group, timeout_s) as gather:
        configs = gather("configuration", own_config)   # every rank's result in rank order, or one error on every rank
        addresses = gather("memory", create)

The ranks meet in a *round*, and each call is a *step* of it. These keys of the store are all there is:

    round                      the number of the open round; the first decision in a round closes it
    {round}/{step}/{rank}      what a rank brings (offers.py): the number of its attempts, and a result or an error
    {round}/{step}/decision    whether the step is complete, or who is late, or who left and why
    {round}/left               how many ranks have left a round that all of them took to its end

**Decisions.** A step is decided once, by compare_set: complete, by a rank that finds the keys of all ranks; late, by
the first rank whose limit is over, unless all have arrived meanwhile; or ended, by a rank that leaves with an error.
All ranks read the same decision, so no rank keeps a buffer that another rank has abandoned.

**Attempts.** A rank that arrives after the others gave up opens a new round and waits there for its limit. If the
others meet it there with their next attempt, they are one buffer ahead of it. So where the numbers of attempts differ,
all ranks raise the same error and continue from the largest number: then the next attempt of all ranks works. Where
nobody may try again (``History.is_in_step``), such a rank joins the round that it has missed, and reads its decision.

**Cleaning up.** A rank deletes what it has written once all ranks are in a later step, also of a later round: then
nobody reads it any more. The last rank to leave a round deletes the keys of its last step.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from ep_dispatcher._version import __version__
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.offers import ERRORS, LATE, MAX_TEXT, Decision, Offer, read_decision, read_offer
from ep_dispatcher.stores import STORE_GONE, STORE_S, connection, delete, drop_connection, wait_for
from ep_dispatcher.threads import StoreHangs, await_at_exit, in_thread

T = TypeVar("T")

GRACE_S = 2.0  # seconds beyond the limit, for peers to report whom they wait for


class PeersLate(RuntimeError):
    """Raised inside a step by a rank that waited for ``ranks`` until its limit."""

    def __init__(self, text: str, ranks: Sequence[int]):
        super().__init__(text)
        self.ranks = tuple(ranks)


class Stopped(Exception):
    """Raised in the thread of an exchange once the buffer is destroyed."""


@dataclass
class History:
    """The record of a group in this process: of the buffers that it makes, or of one buffer later on."""

    prefix: str  # of the keys
    attempts: int = 0  # rounds that this rank began
    is_in_step: bool = False  # every rank takes part in every round: one that comes after its end has missed it
    written: list[str] = field(default_factory=list)  # keys that this rank has not deleted yet


_histories: WeakKeyDictionary[ProcessGroup, History] = WeakKeyDictionary()


def _history_of(group: ProcessGroup) -> History:
    if group not in _histories:
        # Subgroups that are split off at once can have the same name.
        ranks = hashlib.sha1(repr(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]
        _histories[group] = History(f"ep_dispatcher/make/{group.group_name}/{ranks}")
    return _histories[group]


def count_attempt(group: ProcessGroup) -> None:
    """Count a buffer that this rank abandoned before the first step: other ranks may have reached that step."""
    _history_of(group).attempts += 1


class Members(NamedTuple):
    """The rank of this process in a group, and the size of that group, which may have been destroyed meanwhile."""

    rank: int
    size: int


class Gather:
    """One round: the steps in which the ranks of ``group`` make one buffer, each with the limit ``limit_s``.

    Or, with the ``history`` of a buffer, the steps of an ``operation`` on it by its members. Errors name the operation.
    Once ``is_stopped()``, because somebody has destroyed the buffer, this rank waits no longer, and leaves.
    """

    def __init__(
        self,
        group: ProcessGroup | Members,
        limit_s: float,
        *,
        operation: str = "buffer",
        history: History | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ):
        self._rank, self._size = group if isinstance(group, Members) else (group.rank(), group.size())
        self._limit_s = limit_s
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._operation, self._is_stopped = operation, is_stopped
        if history is None:
            assert not isinstance(group, Members), "only a group has a history of its own"
            history = _history_of(group)
        self._history = history
        self._history.attempts += 1
        self._store: Store | None = None  # from the first step on, and then the round
        self._round = 0
        self._step = -1  # the last one that this rank began
        self._is_complete = False  # that step, as far as this rank knows
        self._others_wait = False  # for this rank: they do not know that it raises an error
        self._has_left = False  # from then on no thread of this rank may write to the store

    def __call__(self, phase: str, produce: Callable[[], T], *, waits_for_peers: bool = False) -> list[T]:
        """Return every rank's result of ``produce``. If it fails on a rank, raise the same error on every rank.

        The result is what JSON has: numbers, strings, None, lists and dicts. Tuples arrive as lists. A ValueError stays
        one, any other Exception becomes a RuntimeError with its name. Raises PeerTimeoutError when a rank does not
        arrive. ``waits_for_peers``: so does ``produce``, with the same limit (see PeersLate).
        """
        self._step += 1
        self._is_complete, self._others_wait = False, True
        started = time.monotonic()
        own, own_error = self._make_offer(produce)
        message = json.dumps(own)
        waited_for = own.result if own.kind == LATE else ()
        limit_s = GRACE_S if waited_for else self._limit_s + GRACE_S * waits_for_peers
        end_s = limit_s + STORE_S + GRACE_S * (not waits_for_peers)  # in any case 5 s after the buffer's limit
        try:
            decision, messages = in_thread(partial(self._exchange, message, limit_s), end_s)
        except STORE_GONE as error:  # and with the store the answer to who is late
            drop_connection()
            self._others_wait = False  # or nobody can tell them
            reason = "The store did not answer, so this rank does not know who is late."
            raise self._timeout(phase, waited_for or self._others, started, reason) from error
        except Stopped:
            raise RuntimeError("the buffer was destroyed meanwhile") from None
        except Exception as error:  # it says something else, and keeps its text
            raise RuntimeError(
                f"{self._doing(phase)}: the store of the default process group failed, by {type(error).__name__}: "
                f"{error} (ep_dispatcher calls its add, check, compare_set, get, multi_get and set)"
            ) from error
        self._is_complete, self._others_wait = not decision.ranks, False
        if decision.left_by:
            raise RuntimeError(f"{self._doing(phase)}: rank {decision.ranks[0]} left: {decision.left_by}")
        if decision.ranks:
            raise self._timeout(phase, decision.ranks, started) from own_error
        offers = self._read_offers(phase, own, message, messages)
        attempts = [offer.attempts for offer in offers]
        self._history.attempts = max(attempts)
        behind = [rank for rank, number in enumerate(attempts) if number < max(attempts)]
        if behind:
            raise self._timeout(phase, behind, started)
        self._raise_failures(phase, offers, own_error, started)
        self._others_wait = True
        return [offer.result for offer in offers]

    def _make_offer(self, produce: Callable[[], object]) -> tuple[Offer, Exception | None]:
        """Call ``produce``. Return the outcome, and the error if it raised one."""
        attempts = self._history.attempts
        try:
            offer = Offer(attempts, produce())
            json.dumps(offer)
            return offer, None
        except PeersLate as late:
            return Offer(attempts, late.ranks, LATE, str(late)[:MAX_TEXT]), late
        except ValueError as error:
            return Offer(attempts, None, "ValueError", str(error)[:MAX_TEXT]), error
        except Exception as error:  # every rank raises it, as it does a ValueError
            return Offer(attempts, None, "RuntimeError", f"{type(error).__name__}: {error}"[:MAX_TEXT]), error

    def _read_offers(self, phase: str, own: Offer, message: str, messages: list[bytes]) -> list[Offer]:
        """Return every rank's offer. All ranks raise an error if a message is none."""
        if messages[self._rank] != message.encode():
            self._others_wait = True  # the others cannot see it
            raise RuntimeError(
                f"{self._doing(phase)}: somebody has changed this rank's message in the store of the default process "
                f"group, to {messages[self._rank][:100]!r}"
            )
        offers = []
        for rank, each in enumerate(messages):
            offer = read_offer(each, own, self._size)
            if offer is None:
                raise RuntimeError(
                    f"{self._doing(phase)}: the store has no message of ep_dispatcher {__version__} from rank {rank}, "
                    f"but {len(each)} bytes of something else: {each[:100]!r}"
                )
            offers.append(offer)
        return offers

    def _raise_failures(self, phase: str, offers: list[Offer], own_error: Exception | None, started: float) -> None:
        """Raise the first rank's error, if any rank has one. Otherwise PeerTimeoutError if any rank waited in vain."""
        failed = {rank: offer for rank, offer in enumerate(offers) if offer.kind in ERRORS}
        if failed:
            rank, first = next(iter(failed.items()))
            everywhere = len(failed) == self._size and len({offer.text for offer in failed.values()}) == 1
            text = f"{first.text}" if everywhere else f"{first.text} (on rank {rank})"
            raise ERRORS[str(first.kind)](text) from (own_error if rank == self._rank else None)
        waited = {rank: offer.result for rank, offer in enumerate(offers) if offer.kind == LATE}
        if waited:
            named = sorted(set().union(*waited.values()))
            late = [rank for rank in named if rank not in waited]
            raise self._timeout(phase, late or named, started) from own_error

    def _doing(self, phase: str) -> str:
        return f"{'making a buffer' if self._operation == 'buffer' else self._operation}, phase '{phase}'"

    def _timeout(self, phase: str, late: Sequence[int], started: float, reason: str = "") -> PeerTimeoutError:
        return PeerTimeoutError(self._operation, 0, phase, self._rank, late, time.monotonic() - started, reason)

    @contextmanager
    def same_on_all_ranks(self) -> Iterator[None]:
        """Inside, a ValueError needs no exchange: all ranks compute it from what they have gathered."""
        try:
            yield
        except ValueError:
            self._others_wait = False
            raise

    def __enter__(self) -> Gather:
        self._wait_no_longer = await_at_exit(threading.get_ident())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._has_left = True
        try:
            if self._store is not None:
                in_thread(partial(self._leave, self._store, error), STORE_S)
        except STORE_GONE:  # then so are the keys
            pass
        except Exception:  # the first error matters more
            if error is None:
                raise
        finally:
            self._store = None
            self._wait_no_longer()

    # ---- calls to the store, all in threads of their own ----------------------------------------------------------

    def _key(self, step: int, name: str | int) -> str:
        return f"{self._round}/{step}/{name}"

    def _exchange(self, message: str, limit_s: float) -> tuple[Decision, list[bytes]]:
        """Bring this rank's message. Return the decision and, when the step is complete, every rank's message."""
        if self._store is None:
            joined = PrefixStore(self._history.prefix, connection())
            opened = joined.add("round", 0)
            self._round = self._history.attempts - 1 if self._history.is_in_step else opened
            self._store = joined
        store, step = self._store, self._step
        keys = [self._key(step, rank) for rank in range(self._size)]
        self._raise_if_over()
        self._history.written.append(keys[self._rank])
        store.set(keys[self._rank], message)
        key = self._key(step, "decision")
        if store.check(keys):
            decision = self._decide(store, step, Decision([]))
        elif wait_for(store, [key], limit_s, self._raise_if_over):
            decision = read_decision(store.get(key), self._size)
        else:
            late = [rank for rank in range(self._size) if not store.check([keys[rank]])]
            decision = self._decide(store, step, Decision(late))
        return decision, [] if decision.ranks else store.multi_get(keys)

    def _decide(self, store: Store, step: int, decision: Decision) -> Decision:
        """Decide a step and return the decision, which is an earlier one if there is any. Then no rank can join."""
        if step == 0:
            store.compare_set("round", str(self._round), str(self._round + 1))
        key = self._key(step, "decision")
        self._history.written.append(key)
        return read_decision(store.compare_set(key, "", json.dumps(decision)), self._size)

    def _raise_if_over(self) -> None:
        if self._has_left:
            raise StoreHangs("this rank has left the round")
        if self._is_stopped():
            raise Stopped

    def _leave(self, store: Store, error: BaseException | None) -> None:
        """If the others wait for this rank, say that it leaves. If all have come to this step, delete keys."""
        if error is not None and self._others_wait:
            left = Decision([self._rank], f"{type(error).__name__}: {error}"[:MAX_TEXT])
            if not self._decide(store, self._step, left).ranks:  # a complete step cannot be ended: the next one can
                self._decide(store, self._step + 1, left)
        elif self._is_complete:
            left_key = f"{self._round}/left"
            last = [self._key(self._step, name) for name in (*range(self._size), "decision")] + [left_key]
            written = self._history.written
            delete(store, [key for key in written if key not in last])
            self._history.written = [key for key in written if key in last] + [left_key]
            if store.add(left_key, 1) == self._size:
                delete(store, last)
