"""Exchange between ranks that make, suspend or resume a buffer: with a time limit, to one outcome for all.

It goes through the store.

    with Gather(group, timeout_s) as gather:
        configs = gather("configuration", own_config)   # every rank's result in rank order, or one error on every rank
        addresses = gather("memory", create)

**Rounds.** One buffer is made in one round, and each call is a step of it. The first step of a round is open to all
ranks of the group. The store has the number of the open round. The ranks do not count rounds themselves: a rank that
timed out or never called would count differently. A rank that times out closes the round, and nobody can join it.

**Decisions.** Every step is decided once, by an atomic compare_set of its key: "complete", by the rank that arrives
last; "late", by the first rank whose limit is over; or "stopped", by a rank that leaves with an error. All ranks read
the same decision, so no rank keeps a buffer that another rank has abandoned.

**Late ranks.** A rank that arrives after the others timed out opens a new round and waits there for its limit. If the
others meet it there with their next attempt, they are one buffer ahead of it. Every rank brings its number of attempts
with this group; where the numbers differ, all ranks raise the same error and continue from the largest number. So
buffers that do not belong together are never paired, and the next attempt of all ranks works.

**Keys.** The last rank to leave a round deletes its keys. An abandoned round keeps two keys for late ranks; the
next complete round deletes them, because by then every rank has left the old one.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from ep_dispatcher.errors import PeerTimeoutError

T = TypeVar("T")

# Seconds beyond the limit: for peers to report whom they wait for, and for the store to answer.
GRACE_S = 2.0
STORE_S = 3.0
MAX_WAIT_S = 10 * 86400.0  # PyTorch counts a wait in milliseconds, in 32 bits


class PeersLate(RuntimeError):
    """Raised inside a step by a rank that waited for ``ranks`` until its limit."""

    def __init__(self, text: str, ranks: Sequence[int]):
        super().__init__(text)
        self.ranks = tuple(ranks)


class _Offer(NamedTuple):
    """The outcome of one rank's step, as the other ranks get it."""

    attempts: int  # of the rank with this group
    result: Any  # of ``produce``; if kind is PeersLate, the ranks that it waited for
    kind: type[RuntimeError | ValueError] | None = None  # of the error
    text: str | None = None  # of the error


class StoreHangs(RuntimeError):
    """A call to the store, or one that needs it, did not return."""


def in_thread(call: Callable[[], T], limit_s: float) -> T:
    """Return what ``call`` returns in a thread of its own; StoreHangs after ``limit_s``.

    A call to a store whose host hangs never returns. And a signal handler, such as Ctrl-C's, runs while this waits.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors.pop()
    if not results:
        raise StoreHangs(f"torch.distributed, or the host of its store, did not answer in {limit_s:.1f} s")
    return results.pop()


def wait_limit(limit_s: float) -> timedelta:
    """``limit_s`` as PyTorch takes it."""
    return timedelta(seconds=min(limit_s, MAX_WAIT_S))


@dataclass
class History:
    """The record of a group in this process: of the buffers that it makes, or of one buffer later on."""

    prefix: str  # of the keys
    attempts: int = 0  # rounds that this rank began
    leftovers: list[str] = field(default_factory=list)  # keys of abandoned rounds


_histories: WeakKeyDictionary[ProcessGroup, History] = WeakKeyDictionary()
# Connections to a default store that no round uses now. They are kept because the store's host looks up the name of
# every new peer, and answers nobody meanwhile: without a name server that takes seconds.
_idle: WeakKeyDictionary[Store, list[Store]] = WeakKeyDictionary()


def _connect() -> tuple[Store, list[Store]]:
    """A connection to the default store for one round alone, and where to put it back.

    A wait on it blocks no other call of this process.
    """
    shared = dist.distributed_c10d._get_default_store()
    idle = _idle.setdefault(shared, [])
    try:
        return idle.pop(), idle
    except IndexError:
        return shared.clone(), idle  # type: ignore[attr-defined]  # PyTorch's stubs lack it


def _history_of(group: ProcessGroup) -> History:
    if group not in _histories:
        # Subgroups that are split off at once can have the same name.
        ranks = hashlib.sha1(repr(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]
        _histories[group] = History(f"ep_dispatcher/make/{group.group_name}/{ranks}")
    return _histories[group]


def count_attempt(group: ProcessGroup) -> None:
    """Count a buffer that this rank abandoned before the first step: other ranks may have reached that step."""
    _history_of(group).attempts += 1


class Gather:
    """One round: the steps in which the ranks of ``group`` make one buffer, each with the limit ``limit_s``.

    Or, with the ``history`` of a buffer, the steps of an ``operation`` on it. Errors name the operation.
    """

    def __init__(
        self, group: ProcessGroup, limit_s: float, *, operation: str = "buffer", history: History | None = None
    ):
        self._rank, self._size, self._limit_s = group.rank(), group.size(), limit_s
        self._operation = operation
        self._history = _history_of(group) if history is None else history
        self._history.attempts += 1
        self._store: Store | None = None
        self._put_back: Callable[[], None] = lambda: None
        self._round: int | None = None
        self._step = -1  # the last one that this rank began
        self._together = False  # all ranks raise the error that this one raises
        self._given_up = False
        self._store_is_gone = False
        self._left = False  # from then on no thread of this rank may write to the store

    def __call__(self, phase: str, produce: Callable[[], T], *, waits_for_peers: bool = False) -> list[T]:
        """Return every rank's result of ``produce``. If it fails on a rank, raise the same error on every rank.

        A ValueError stays one, any other Exception becomes a RuntimeError with its name. Raises PeerTimeoutError when
        a rank does not arrive. ``waits_for_peers``: so does ``produce``, with the same limit (see PeersLate).
        """
        self._step += 1
        started = time.monotonic()
        offer = self._make_offer(produce)
        waited_for: tuple[int, ...] = offer.result if offer.kind is PeersLate else ()
        limit_s = GRACE_S if waited_for else self._limit_s + GRACE_S * waits_for_peers
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            message = pickle.dumps(tuple(offer))  # a plain tuple: another version can load it too
            decision, offers = in_thread(partial(self._exchange, message, limit_s), limit_s + GRACE_S + STORE_S)
        except RuntimeError as error:  # the store is gone, and with it the answer to who is late
            self._given_up = self._store_is_gone = True
            raise self._timeout(phase, waited_for or others, started) from error
        if "late" in decision:
            self._given_up = True
            raise self._timeout(phase, decision["late"] or waited_for or others, started)
        self._together = True
        if "stopped" in decision:
            what = "making a buffer" if self._operation == "buffer" else self._operation
            raise RuntimeError(f"{what}, phase '{phase}': rank {decision['stopped']} left: {decision['by']}")
        attempts = [offer.attempts for offer in offers]
        self._history.attempts = max(attempts)
        behind = [rank for rank, number in enumerate(attempts) if number < max(attempts)]
        if behind:
            raise self._timeout(phase, behind, started)
        self._raise_failures(phase, offers, started)
        self._together = False
        return [offer.result for offer in offers]

    def _make_offer(self, produce: Callable[[], T]) -> _Offer:
        """Call ``produce`` and return the outcome."""
        try:
            result = produce()
        except PeersLate as late:
            return _Offer(self._history.attempts, late.ranks, PeersLate, str(late))
        except ValueError as error:
            return _Offer(self._history.attempts, None, ValueError, str(error))
        except Exception as error:
            return _Offer(self._history.attempts, None, RuntimeError, f"{type(error).__name__}: {error}")
        return _Offer(self._history.attempts, result)

    def _raise_failures(self, phase: str, offers: list[_Offer], started: float) -> None:
        """Raise the first rank's error, if any rank has one. Otherwise PeerTimeoutError if any rank waited in vain."""
        failed = {rank: offer for rank, offer in enumerate(offers) if offer.kind not in (None, PeersLate)}
        if failed:
            rank, first = next(iter(failed.items()))
            assert first.kind is not None  # since it failed
            everywhere = len(failed) == self._size and len({offer.text for offer in failed.values()}) == 1
            raise first.kind(first.text if everywhere else f"{first.text} (on rank {rank})")
        waited = {rank: offer.result for rank, offer in enumerate(offers) if offer.kind is PeersLate}
        if waited:
            named = sorted(set().union(*waited.values()))
            raise self._timeout(phase, [rank for rank in named if rank not in waited] or named, started)

    def _timeout(self, phase: str, late_ranks: Sequence[int], started: float) -> PeerTimeoutError:
        return PeerTimeoutError(self._operation, 0, phase, self._rank, late_ranks, time.monotonic() - started)

    @contextmanager
    def same_on_all_ranks(self) -> Iterator[None]:
        """Inside, a ValueError needs no exchange: all ranks compute it from what they have gathered."""
        try:
            yield
        except ValueError:
            self._together = True
            raise

    def __enter__(self) -> Gather:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        try:
            if self._round is not None and not self._store_is_gone:
                in_thread(partial(self._leave, error), STORE_S)
        except RuntimeError:  # the store is gone, and the keys with it
            pass
        finally:
            self._store, self._put_back = None, lambda: None

    # ---- calls to the store, all in threads of their own ----------------------------------------------------------

    def _key(self, step: int, name: str | int) -> str:
        return f"{self._round}/{step}/{name}"

    def _exchange(self, message: bytes, limit_s: float) -> tuple[dict, list[_Offer]]:
        """Bring this rank's offer, pickled. Return the decision and, when it is "complete", every rank's offer."""
        if self._store is None:
            connection, idle = _connect()
            self._put_back = partial(idle.append, connection)
            self._store = PrefixStore(self._history.prefix, connection)
            self._round = self._store.add("round", 0)
        step, store = self._step, self._store
        self._raise_if_left()
        store.set(self._key(step, self._rank), message)  # type: ignore[arg-type]  # bytes too, which the stubs lack
        if store.add(self._key(step, "arrived"), 1) == self._size:
            decision = self._decide(store, step, {"complete": True})
        else:
            decision = self._await_decision(store, step, limit_s)
        if "complete" not in decision:
            return decision, []
        messages = store.multi_get([self._key(step, rank) for rank in range(self._size)])
        return decision, [_Offer(*pickle.loads(each)) for each in messages]

    def _await_decision(self, store: Store, step: int, limit_s: float) -> dict:
        key, late = self._key(step, "decision"), []
        for wait_s in (limit_s, GRACE_S):  # again if all have arrived and the last one is about to decide
            try:
                store.wait([key], wait_limit(wait_s))
            except RuntimeError:  # too late, or the store is gone: then the next call fails too
                self._raise_if_left()
                late = [rank for rank in range(self._size) if not store.check([self._key(step, rank)])]
                if late:
                    break
            else:
                self._raise_if_left()  # the key may be deleted, and a get would wait for it
                return json.loads(store.get(key))
        return self._decide(store, step, {"late": late})

    def _decide(self, store: Store, step: int, decision: dict) -> dict:
        """Decide a step and return the decision, which is an earlier one if there is any. Then no rank can join."""
        if step == 0 and self._round is not None:
            store.compare_set("round", str(self._round), str(self._round + 1))
        return json.loads(store.compare_set(self._key(step, "decision"), "", json.dumps(decision)))

    def _raise_if_left(self) -> None:
        if self._left:
            raise StoreHangs("this rank has left the round")

    def _leave(self, error: BaseException | None) -> None:
        """Say so where the other ranks would wait for this one, and delete keys."""
        store: Store | None
        store, step, leftovers = self._store, self._step, self._history.leftovers
        assert store is not None  # since the round was joined
        own = [self._key(s, self._rank) for s in range(step + 1)]
        if self._given_up:
            leftovers += [self._key(s, name) for s in range(step + 1) for name in ("arrived", "decision")]
            for key in own:
                store.delete_key(key)
        elif error is not None and not self._together:
            # On this round's own connection a thread may be waiting. A complete step cannot be stopped: the next can.
            connection, idle = _connect()
            store, by = PrefixStore(self._history.prefix, connection), f"{type(error).__name__}: {error}"
            for s in (step, step + 1):
                leftovers += [self._key(s, name) for name in (self._rank, "arrived", "decision")]
                if "complete" not in self._decide(store, s, {"stopped": self._rank, "by": by}):
                    break
            idle.append(connection)
            return
        else:
            for key in own[:-1] + leftovers:
                store.delete_key(key)
            leftovers.clear()
            if store.add(f"{self._round}/left", 1) == self._size:
                for key in (*(self._key(step, rank) for rank in range(self._size)), f"{self._round}/left"):
                    store.delete_key(key)
                for s in range(step + 1):
                    store.delete_key(self._key(s, "arrived"))
                    store.delete_key(self._key(s, "decision"))
        self._put_back()
