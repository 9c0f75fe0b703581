"""Passes fabric handles (device_memory.py) between the ranks of several hosts, through the store."""

from __future__ import annotations

from functools import partial

from torch.distributed import Store

from ep_dispatcher.stores import STORE_S
from ep_dispatcher.threads import in_thread

BYTES = 64  # of CUmemFabricHandle


class FabricHandles:
    """One exchange, as of ``Descriptors``. Every rank makes this, with its handles, before the first one exchanges.

    Its key is the same for each exchange of a store: no rank makes the next one before all have ended the last.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, handles: list[bytes]):
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        in_thread(partial(store.set, f"fabric/{rank}", b"".join(handles).hex()), STORE_S)

    def exchange(self, handles: list[bytes], timeout_s: float) -> list[list[bytes]]:
        """Return the handles of all ranks, of this one none. RuntimeError if a rank has not as many as this one."""
        keys = [f"fabric/{rank}" for rank in range(self._num_ranks)]
        of_ranks = []
        for rank, text in enumerate(in_thread(partial(self._store.multi_get, keys), timeout_s)):
            data = bytes.fromhex(text.decode())
            if len(data) != BYTES * len(handles):
                raise RuntimeError(f"the store has {len(data)} bytes of fabric handles of rank {rank}")
            of_ranks.append([data[i : i + BYTES] for i in range(0, len(data), BYTES)] if rank != self._rank else [])
        return of_ranks

    def close(self) -> None:
        """Do nothing: handles in a store hold no memory."""
