"""The rendezvous of PyTorch's symmetric memory, and the stores through which PyTorch exchanges addresses for it.

``rendezvous`` relies on these facts. They are not documented, but read in StoreExchange of PyTorch 2.9 and 2.13
(CUDASymmetricMemoryUtils.hpp):

- Every key is "kind of memory/number of the exchange/rank", for a barrier without the rank. So the number of the
  exchange is the first number in it. It counts the exchanges of the process over all groups, so it may be replaced.
- C++ calls set, get, multi_get, add, check and wait of a store made in Python, and builds barrier() from them. Their
  errors end the rendezvous.
- 2.9 finds the store by the name given to set_group_info; later versions by the name of the registered process group.

Between its exchanges PyTorch passes descriptors through sockets of the host, without a time limit. A rank that stops
just there is not noticed. Fabric handles (nvlink.py) take one more exchange through the store.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group
from torch.distributed import Store

from ep_dispatcher.gather import PeersLate
from ep_dispatcher.stores import STORE_GONE, STORE_S, delete, wait_for
from ep_dispatcher.threads import in_thread
from ep_dispatcher.topology import Topology


class OwnKeys(Store):
    """A store on top of another one. It records the keys that this rank has set.

    Keep a reference as long as C++ may call it: C++ does not keep the Python part of a store alive.
    """

    def __init__(self, store: Store):
        super().__init__()
        self._store = store
        self._set: set[str] = set()

    def delete_keys(self) -> None:
        """Delete the keys of this rank. Call it when all ranks have read them."""
        keys, self._set = self._set, set()
        with suppress(*STORE_GONE):  # if the store is gone, so are the keys
            in_thread(partial(delete, self._store, keys), STORE_S)

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
    """A store that renumbers exchanges: the first number that it sees in a key becomes 0, the next one 1, and so on.

    PyTorch numbers its exchanges per process, over all groups. If one rank has been in more groups than another, each
    would wait forever for keys that the other does not set. No wait lasts longer than ``timeout_s`` after the store was
    made, whatever limit PyTorch gives.
    """

    def __init__(self, store: Store, timeout_s: float):
        super().__init__(store)
        self._numbers: dict[str, int] = {}
        self._end = time.monotonic() + timeout_s
        self.has_waited_in_vain = False

    def _key(self, key: str) -> str:
        return re.sub(r"\d+", lambda found: str(self._numbers.setdefault(found[0], len(self._numbers))), key, count=1)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        limit_s = self._end - time.monotonic()
        if timeout and timeout[0] > timedelta(0):
            limit_s = min(limit_s, timeout[0].total_seconds())
        if not wait_for(self._store, [self._key(key) for key in keys], limit_s):
            self.has_waited_in_vain = True
            raise RuntimeError(f"{', '.join(keys)}: not in the store within the limit")


def rendezvous(memory: Tensor, topology: Topology, store: Store, name: str, timeout_s: float) -> _SymmetricMemory:
    """Map the memory of all ranks. Collective. Only these ranks may use ``store``, and ``name`` is used once.

    Raises PeersLate if a rank does not arrive within ``timeout_s``.
    """
    store = Renumbered(store, timeout_s)
    group = dist.ProcessGroup(store, topology.rank, topology.num_ranks)
    _SymmetricMemory.set_group_info(name, topology.rank, topology.num_ranks, store)
    _register_process_group(name, group)  # type: ignore[arg-type]  # GroupName is a str, and is not in 2.9
    try:
        return _SymmetricMemory.rendezvous(memory, name)
    except Exception as error:  # of PyTorch or the store
        if not (store.has_waited_in_vain or isinstance(error, STORE_GONE)):
            raise
        raise PeersLate(str(error), [r for r in range(topology.num_ranks) if r != topology.rank]) from error
    finally:
        _unregister_process_group(name)  # type: ignore[arg-type]  # as above
