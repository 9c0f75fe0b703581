"""Stores that PyTorch is given to exchange addresses through, and the rendezvous of its symmetric memory.

What ``rendezvous`` relies on in PyTorch (read in StoreExchange of 2.9 and 2.13, CUDASymmetricMemoryUtils.hpp; no
documentation promises it):

- Every key is "kind of memory/number of the exchange/rank", or without the rank for a barrier, so the number of the
  exchange is the first number in it. It counts the exchanges of the process over all groups, so it may be replaced.
- C++ asks a store made in Python through set, get, multi_get, add, check and wait, and barrier() is made of those. What
  they raise ends the rendezvous.
- 2.9 finds the store by the name given to set_group_info; later versions by the name of the registered process group.

Between its exchanges PyTorch passes descriptors through sockets of the host, without a limit of time: a rank that stops
just there is not noticed.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)
from torch.distributed import Store

from ep_dispatcher.gather import STORE_S, PeersLate, in_thread, wait_limit
from ep_dispatcher.topology import Topology


class OwnKeys(Store):
    """Another store, and a record of the keys that this rank set in it.

    Must live as long as C++ may ask it: C++ alone does not keep what Python adds to a store.
    """

    def __init__(self, store: Store):
        super().__init__()
        self._store = store
        self._set: set[str] = set()

    def delete_keys(self) -> None:
        """Delete what this rank set; call it when all ranks have read it."""

        def delete() -> None:
            while self._set:
                self._store.delete_key(self._set.pop())

        try:
            in_thread(delete, STORE_S)
        except RuntimeError:  # the store is gone, and the keys with it
            pass

    def _key(self, key: str) -> str:
        return key

    def set(self, key: str, value: str) -> None:
        self._set.add(self._key(key))
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, number: int) -> int:
        self._set.add(self._key(key))
        return self._store.add(self._key(key), number)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)


class Renumbered(OwnKeys):
    """A store in which the first number in a key, whatever it is, becomes 0, the next one 1, and so on.

    PyTorch numbers its exchanges per process, over all groups. A rank that has been in more groups than another one
    would ask for other keys than that sets, and both would wait for ever. ``timeout_s`` after it was made nothing
    waits any more, whatever limit PyTorch gives.
    """

    def __init__(self, store: Store, timeout_s: float):
        super().__init__(store)
        self._numbers: dict[str, int] = {}
        self._end = time.monotonic() + timeout_s

    def _key(self, key: str) -> str:
        return re.sub(r"\d+", lambda found: str(self._numbers.setdefault(found[0], len(self._numbers))), key, count=1)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        limit = wait_limit(max(self._end - time.monotonic(), 0.001))
        super().wait(keys, min(limit, *timeout) if timeout and timeout[0] > timedelta(0) else limit)


def rendezvous(memory: Tensor, topology: Topology, store: Store, name: str, timeout_s: float) -> _SymmetricMemory:
    """Collective: the memory of all ranks. ``store`` is theirs alone, ``name`` used once.

    Raises PeersLate when a rank does not arrive within ``timeout_s``.
    """
    started, store = time.monotonic(), Renumbered(store, timeout_s)
    group = dist.ProcessGroup(store, topology.rank, topology.num_ranks)
    _SymmetricMemory.set_group_info(name, topology.rank, topology.num_ranks, store)
    _register_process_group(name, group)  # type: ignore[arg-type]  # GroupName is a str, and is not in 2.9
    try:
        return _SymmetricMemory.rendezvous(memory, name)
    except RuntimeError as error:
        if time.monotonic() - started < timeout_s:
            raise
        raise PeersLate(str(error), [r for r in range(topology.num_ranks) if r != topology.rank]) from error
    finally:
        _unregister_process_group(name)  # type: ignore[arg-type]  # as above
