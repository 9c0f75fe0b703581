"""Calls to the store of torch.distributed. What their failure means is decided by our clock and the type of the error.

We ask whether a key is there, and sleep in between: so a wait is over when our own limit is. A wait inside the store
would say so only in the text of its error, and would block all other calls on its connection meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore

from ep_dispatcher.threads import raise_if_ending

STORE_S = 3.0  # seconds for the store to answer
_LONGEST_SLEEP_S = 0.1

# The errors of a store whose host has ended, hangs, or cannot be reached. The first two are those of a store that is
# written in Python, and of ``in_thread``. Any other error of a store says something else.
STORE_GONE = (TimeoutError, ConnectionError, DistNetworkError)

_connections: WeakKeyDictionary[Store, Store] = WeakKeyDictionary()


def connection() -> Store:
    """Return this package's own connection to the default store, made at first use.

    A thread of the user may wait for a key on the default connection of a TCPStore, and nobody else can use it
    meanwhile. The own one is kept, because the store's host looks up the name of every new peer and answers nobody
    until then: without a name server that takes seconds.

    Stores of other kinds are shared. PyTorch counts each FileStore that is freed as a worker that has left, and the
    last one deletes the file: other ranks may still need it. Where the disk is full, freeing one hangs or ends the
    process. A store that is written in Python has no second connection.
    """
    shared = root = dist.distributed_c10d._get_default_store()
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    if not isinstance(root, TCPStore):
        return shared
    if shared not in _connections:
        _connections[shared] = shared.clone()  # type: ignore[attr-defined]  # PyTorch's stubs lack it
    return _connections[shared]


def drop_connection() -> None:
    """Make a new connection at the next use: a call on this one has failed, or has not returned."""
    _connections.pop(dist.distributed_c10d._get_default_store(), None)


def wait_for(store: Store, keys: list[str], limit_s: float, before_each: Callable[[], object] = lambda: None) -> bool:
    """Return whether all keys are there before ``limit_s`` is over. ``before_each`` question it may raise an error.

    It sleeps for a tenth of the time that it has waited: the answer comes at most so much later.
    """
    started = time.monotonic()
    while not store.check(keys):
        waited_s = time.monotonic() - started
        if waited_s >= limit_s:
            return False
        time.sleep(min(waited_s / 10, _LONGEST_SLEEP_S, limit_s - waited_s))
        before_each()
    return True


def delete(store: Store, keys: Iterable[str]) -> None:
    """Delete keys, if the store can: one that is written in Python cannot."""
    for key in keys:
        raise_if_ending()
        try:
            store.delete_key(key)
        except STORE_GONE:
            raise
        except RuntimeError:  # the method is missing
            return


# ---- what a message says: whoever can connect to the store can also write there -------------------------------------


def read_json(message: bytes, most_bytes: int) -> Any:
    """Return the value in a message; None if it is longer than ``most_bytes``, or no JSON."""
    try:
        return json.loads(message) if len(message) <= most_bytes else None
    except (ValueError, RecursionError):
        return None


def are_ranks(value: Any, num_ranks: int | None = None) -> bool:
    """Return whether a value from a message is a list of ranks. num_ranks: how many there are, if it is known."""
    return type(value) is list and all(
        type(rank) is int and rank >= 0 and (num_ranks is None or rank < num_ranks) for rank in value
    )
