"""The rendezvous of PyTorch's symmetric memory, also for ranks that have had different numbers of them."""

from __future__ import annotations

import re

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)
from torch.distributed import Store

from ep_dispatcher.topology import Topology


class Renumbered(Store):
    """A store in which the first number in a key, whatever it is, becomes 0, the next one 1, and so on.

    PyTorch numbers its exchanges per process, over all groups. A rank that has been in more groups than another one
    would ask for other keys than that sets, and both would wait for ever.
    """

    def __init__(self, store: Store):
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        return re.sub(r"\d+", lambda found: str(self._numbers.setdefault(found[0], len(self._numbers))), key, count=1)

    def set(self, key, value):
        self._store.set(self._key(key), value)

    def get(self, key):
        return self._store.get(self._key(key))

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def add(self, key, number):
        return self._store.add(self._key(key), number)

    def check(self, keys):
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys, *timeout):
        self._store.wait([self._key(key) for key in keys], *timeout)


def rendezvous(memory: Tensor, topology: Topology, store: Store, name: str) -> _SymmetricMemory:
    """Collective: the memory of all ranks. ``store`` is theirs alone, ``name`` used once."""
    store = Renumbered(store)  # lives as long as it is asked: C++ alone does not keep what Python adds to it
    group = dist.ProcessGroup(store, topology.rank, topology.num_ranks)
    _SymmetricMemory.set_group_info(name, topology.rank, topology.num_ranks, store)  # where PyTorch 2.9 looks it up
    _register_process_group(name, group)  # where later versions do
    try:
        return _SymmetricMemory.rendezvous(memory, name)
    finally:
        _unregister_process_group(name)
