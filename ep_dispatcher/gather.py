"""Exchange between ranks that make, suspend or resume a buffer: with a time limit, to one outcome for all.

It goes through the store, as plain data (JSON): whoever can connect to the store can also write there.

    with Gather(group, timeout_s) as gather:
        configs = gather("configuration", own_config)   # every rank's result in rank order, or one error on every rank
        addresses = gather("memory", create)

**Rounds.** One buffer is made in one round, and each call is a step of it. The first step of a round is open to all
ranks of the group. The store has the number of the open round. The ranks do not count rounds themselves: a rank that
timed out or never called would count differently. A rank that times out closes the round, and nobody can join it.

**Decisions.** Every step is decided once, by an atomic compare_set of its key: "complete", by the rank that arrives
last; "late", by the first rank whose limit is over; or "stopped", by a rank that leaves with an error. If all have
arrived, and the last one is gone before it decides, the first rank whose limit is over decides "complete". All ranks
read the same decision, so no rank keeps a buffer that another rank has abandoned.

**Late ranks.** A rank that arrives after the others timed out opens a new round and waits there for its limit. If the
others meet it there with their next attempt, they are one buffer ahead of it. Every rank brings its number of attempts
with this group; where the numbers differ, all ranks raise the same error and continue from the largest number. So
buffers that do not belong together are never paired, and the next attempt of all ranks works.

**Keys.** The last rank to leave a round deletes its keys. An abandoned round keeps for late ranks two keys a step, and
the messages of its complete steps; the next complete round deletes them, because by then every rank has left it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from ep_dispatcher._version import __version__
from ep_dispatcher.errors import PeerTimeoutError, is_peer_failure
from ep_dispatcher.threads import StoreHangs, await_at_exit, in_thread, raise_if_ending

T = TypeVar("T")

# Seconds beyond the limit: for peers to report whom they wait for, and for the store to answer.
GRACE_S = 2.0
STORE_S = 3.0
MAX_WAIT_S = 10 * 86400.0  # PyTorch counts a wait in milliseconds, in 32 bits
MAX_BYTES = 2**20  # of a message
MAX_TEXT = 2**16  # of an error in it


class PeersLate(RuntimeError):
    """Raised inside a step by a rank that waited for ``ranks`` until its limit."""

    def __init__(self, text: str, ranks: Sequence[int]):
        super().__init__(text)
        self.ranks = tuple(ranks)


# The errors that travel by name, and are raised by all ranks. PeersLate is the third.
_KINDS: dict[str, type[RuntimeError | ValueError]] = {"RuntimeError": RuntimeError, "ValueError": ValueError}
_LATE = PeersLate.__name__


class _Offer(NamedTuple):
    """The outcome of one rank's step, as the other ranks get it."""

    attempts: int  # of the rank with this group
    result: Any = None  # of ``produce``; if kind is PeersLate, the ranks that it waited for
    kind: str | None = None  # of the error
    text: str | None = None  # of the error


def _read_offer(message: bytes, own: _Offer, num_ranks: int) -> _Offer | None:
    """Return the offer in a message; None if it is none, or if its result has another form than that of ``own``."""
    try:
        fields = json.loads(message) if len(message) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        return None
    if type(fields) is not list or len(fields) != len(_Offer._fields):
        return None
    offer = _Offer(*fields)
    if offer.kind is None:
        is_sound = offer.text is None and (own.kind is not None or _alike(offer.result, own.result))
    else:
        is_sound = type(offer.kind) is str and offer.kind in (*_KINDS, _LATE) and type(offer.text) is str
        is_sound &= _are_ranks(offer.result, num_ranks) if offer.kind == _LATE else offer.result is None
    return offer if is_sound and type(offer.attempts) is int and offer.attempts >= 0 else None


def _alike(one: Any, other: Any) -> bool:
    """Return whether two results have the same form. None may stand for anything but a dict."""
    if isinstance(one, dict) or isinstance(other, dict):
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return not other or all(_alike(element, other[min(i, len(other) - 1)]) for i, element in enumerate(one))
    return one is None or other is None or type(one) is type(other) or {type(one), type(other)} == {int, float}


def _are_ranks(value: Any, num_ranks: int) -> bool:
    return type(value) is list and all(type(rank) is int and 0 <= rank < num_ranks for rank in value)


def _read_decision(message: bytes, num_ranks: int) -> dict[str, Any]:
    """Return the decision in a message: one of the three that ``Gather._decide`` writes. ValueError if it is none."""
    try:
        decision = json.loads(message)
    except (ValueError, RecursionError):
        decision = None
    if isinstance(decision, dict):
        if decision == {"complete": True}:
            return decision
        if decision.keys() == {"late"} and _are_ranks(decision["late"], num_ranks):
            return decision
        if decision.keys() == {"stopped", "by"} and _are_ranks([decision["stopped"]], num_ranks):
            return decision
    raise ValueError(f"{message[:100]!r} is no decision of ep_dispatcher {__version__}")


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

    A wait on it blocks no other call of this process. A store without clone(), as one written in Python, is shared.
    So is a FileStore, because PyTorch counts each one that is freed as a worker that has left, and the last one deletes
    the file: other ranks may still need it. Where the disk is full, freeing one hangs or ends the process.
    """
    shared = dist.distributed_c10d._get_default_store()
    if _is_file(shared):
        return shared, []
    idle = _idle.setdefault(shared, [])
    try:
        return idle.pop(), idle
    except IndexError:
        pass
    try:
        return shared.clone(), idle  # type: ignore[attr-defined]  # PyTorch's stubs lack it
    except RuntimeError as error:  # a plain one, if the method is missing
        if is_peer_failure(error):
            raise
        return shared, []


def _is_file(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


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
        self._own_error: Exception | None = None  # of ``produce``
        self._round: int | None = None
        self._step = -1  # the last one that this rank began
        self._together = False  # all ranks raise the error that this one raises
        self._given_up = False
        self._store_is_gone = False
        self._left = False  # from then on no thread of this rank may write to the store

    def __call__(self, phase: str, produce: Callable[[], T], *, waits_for_peers: bool = False) -> list[T]:
        """Return every rank's result of ``produce``. If it fails on a rank, raise the same error on every rank.

        The result is what JSON has: numbers, strings, None, lists and dicts. Tuples arrive as lists. A ValueError stays
        one, any other Exception becomes a RuntimeError with its name. Raises PeerTimeoutError when a rank does not
        arrive. ``waits_for_peers``: so does ``produce``, with the same limit (see PeersLate).
        """
        self._step += 1
        started = time.monotonic()
        own, message = self._make_offer(produce)
        waited_for: tuple[int, ...] = own.result if own.kind == _LATE else ()
        limit_s = GRACE_S if waited_for else self._limit_s + GRACE_S * waits_for_peers
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            end_s = limit_s + STORE_S + GRACE_S * (not waits_for_peers)  # in any case 5 s after the buffer's limit
            decision, messages = in_thread(partial(self._exchange, message, limit_s), end_s)
        except Exception as error:  # of the store: only a time-out or a closed connection is a late peer
            if is_peer_failure(error):  # and with the store the answer to who is late is gone
                self._given_up = self._store_is_gone = True
                reason = "The store did not answer, so this rank does not know who is late."
                raise self._timeout(phase, waited_for or others, started, reason) from error
            raise RuntimeError(
                f"{self._doing(phase)}: the store of the default process group failed, by {type(error).__name__}: "
                f"{error} (ep_dispatcher calls its add, check, compare_set, get, multi_get, set and wait)"
            ) from error
        self._given_up = "complete" not in decision
        if "late" in decision:
            raise self._timeout(phase, decision["late"] or waited_for or others, started)
        if "stopped" in decision:
            raise RuntimeError(f"{self._doing(phase)}: rank {decision['stopped']} left: {decision['by']}")
        self._together = True
        if messages[self._rank] != message.encode():
            self._together = False
            raise RuntimeError(
                f"{self._doing(phase)}: somebody has changed this rank's message in the store of the default process "
                f"group, to {messages[self._rank][:100]!r}"
            )
        offers = self._read_offers(phase, own, messages)
        attempts = [offer.attempts for offer in offers]
        self._history.attempts = max(attempts)
        behind = [rank for rank, number in enumerate(attempts) if number < max(attempts)]
        if behind:
            raise self._timeout(phase, behind, started)
        self._raise_failures(phase, offers, started)
        self._together = False
        return [offer.result for offer in offers]

    def _make_offer(self, produce: Callable[[], T]) -> tuple[_Offer, str]:
        """Call ``produce`` and return the outcome, also as a message."""
        attempts, self._own_error = self._history.attempts, None
        try:
            offer = _Offer(attempts, produce())
            return offer, json.dumps(offer)
        except PeersLate as late:
            offer = _Offer(attempts, late.ranks, _LATE, str(late)[:MAX_TEXT])
        except Exception as error:  # every rank raises it
            self._own_error = error
            is_mistake = isinstance(error, ValueError)
            text = str(error) if is_mistake else f"{type(error).__name__}: {error}"
            kind = ValueError if is_mistake else RuntimeError
            offer = _Offer(attempts, None, kind.__name__, text[:MAX_TEXT])
        return offer, json.dumps(offer)

    def _read_offers(self, phase: str, own: _Offer, messages: list[bytes]) -> list[_Offer]:
        """Return every rank's offer. All ranks raise the same error if a message is none."""
        offers = []
        for rank, each in enumerate(messages):
            offer = _read_offer(each, own, self._size)
            if offer is None:
                raise RuntimeError(
                    f"{self._doing(phase)}: the store has no message of ep_dispatcher {__version__} from rank {rank}, "
                    f"but {len(each)} bytes of something else: {each[:100]!r}"
                )
            offers.append(offer)
        return offers

    def _doing(self, phase: str) -> str:
        return f"{'making a buffer' if self._operation == 'buffer' else self._operation}, phase '{phase}'"

    def _raise_failures(self, phase: str, offers: list[_Offer], started: float) -> None:
        """Raise the first rank's error, if any rank has one. Otherwise PeerTimeoutError if any rank waited in vain."""
        failed = {rank: offer for rank, offer in enumerate(offers) if offer.kind not in (None, _LATE)}
        if failed:
            rank, first = next(iter(failed.items()))
            assert first.kind is not None  # since it failed
            everywhere = len(failed) == self._size and len({offer.text for offer in failed.values()}) == 1
            text = first.text if everywhere else f"{first.text} (on rank {rank})"
            raise _KINDS[first.kind](text) from (self._own_error if rank == self._rank else None)
        waited = {rank: offer.result for rank, offer in enumerate(offers) if offer.kind == _LATE}
        if waited:
            named = sorted(set().union(*waited.values()))
            raise self._timeout(phase, [rank for rank in named if rank not in waited] or named, started)

    def _timeout(self, phase: str, late: Sequence[int], started: float, reason: str = "") -> PeerTimeoutError:
        return PeerTimeoutError(self._operation, 0, phase, self._rank, late, time.monotonic() - started, reason)

    @contextmanager
    def same_on_all_ranks(self) -> Iterator[None]:
        """Inside, a ValueError needs no exchange: all ranks compute it from what they have gathered."""
        try:
            yield
        except ValueError:
            self._together = True
            raise

    def __enter__(self) -> Gather:
        self._wait_no_longer = await_at_exit(threading.get_ident())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._left = True
        try:
            if self._round is not None and not self._store_is_gone:
                in_thread(partial(self._leave, error), STORE_S)
        except Exception as failure:  # if the store is gone, so are the keys; and the first error matters most
            if error is None and not is_peer_failure(failure):
                raise
        finally:
            self._store, self._put_back, self._own_error = None, lambda: None, None
            self._wait_no_longer()

    # ---- calls to the store, all in threads of their own ----------------------------------------------------------

    def _key(self, step: int, name: str | int) -> str:
        return f"{self._round}/{step}/{name}"

    def _exchange(self, message: str, limit_s: float) -> tuple[dict[str, Any], list[bytes]]:
        """Bring this rank's message. Return the decision and, when it is "complete", every rank's message."""
        if self._store is None:
            connection, idle = _connect()
            self._put_back = partial(idle.append, connection)
            self._store = PrefixStore(self._history.prefix, connection)
            self._round = self._store.add("round", 0)
        step, store = self._step, self._store
        self._raise_if_left()
        store.set(self._key(step, self._rank), message)
        if store.add(self._key(step, "arrived"), 1) == self._size:
            decision = self._decide(store, step, {"complete": True})
        else:
            decision = self._await_decision(store, step, limit_s)
        if "complete" not in decision:
            return decision, []
        return decision, store.multi_get([self._key(step, rank) for rank in range(self._size)])

    def _await_decision(self, store: Store, step: int, limit_s: float) -> dict[str, Any]:
        key = self._key(step, "decision")
        try:
            store.wait([key], wait_limit(limit_s))
        except Exception as error:  # too late; or the store is gone, then the next call fails too
            if not is_peer_failure(error):
                raise
            self._raise_if_left()
            late = [rank for rank in range(self._size) if not store.check([self._key(step, rank)])]
            return self._decide(store, step, {"late": late} if late else {"complete": True})
        self._raise_if_left()  # the key may be deleted, and a get would wait for it
        return _read_decision(store.get(key), self._size)

    def _decide(self, store: Store, step: int, decision: dict[str, Any]) -> dict[str, Any]:
        """Decide a step and return the decision, which is an earlier one if there is any. Then no rank can join."""
        if step == 0 and self._round is not None:
            store.compare_set("round", str(self._round), str(self._round + 1))
        decided = store.compare_set(self._key(step, "decision"), "", json.dumps(decision))
        return _read_decision(decided, self._size)

    def _raise_if_left(self) -> None:
        if self._left:
            raise StoreHangs("this rank has left the round")

    def _leave(self, error: BaseException | None) -> None:
        """Say so where the other ranks would wait for this one, and delete keys."""
        store: Store | None
        store, step, leftovers = self._store, self._step, self._history.leftovers
        assert store is not None  # since the round was joined
        own = [self._key(s, self._rank) for s in range(step + 1)]
        shared = [self._key(s, name) for s in range(step + 2) for name in ("arrived", "decision")]
        if self._given_up:
            leftovers += own[:-1] + shared  # of complete steps: a late rank may still read them
            delete(store, own[-1:])
        elif error is not None and not self._together:
            # On this round's own connection a thread may be waiting. A complete step cannot be stopped: the next can.
            connection, idle = _connect()
            store, by = PrefixStore(self._history.prefix, connection), f"{type(error).__name__}: {error}"
            leftovers += own + shared
            for s in (step, step + 1):
                if "complete" not in self._decide(store, s, {"stopped": self._rank, "by": by}):
                    break
            idle.append(connection)
            return
        else:
            delete(store, own[:-1] + leftovers)
            leftovers.clear()
            if store.add(f"{self._round}/left", 1) == self._size:
                delete(store, [self._key(step, rank) for rank in range(self._size)] + [f"{self._round}/left", *shared])
        self._put_back()


def delete(store: Store, keys: Iterable[str]) -> None:
    """Delete keys, if the store can: one that is written in Python cannot."""
    for key in keys:
        raise_if_ending()
        try:
            store.delete_key(key)
        except RuntimeError as error:  # the method is missing; only a store that is gone is worth an error
            if is_peer_failure(error):
                raise
            return
