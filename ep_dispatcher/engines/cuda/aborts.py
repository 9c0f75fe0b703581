"""The abort of a rank of the CUDA engine, from the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch


class Aborts:
    """Abort this rank from the host: its kernels end soon, and the peers' kernels wait for it no longer.

    own_flag  address of the uint32 that this rank's kernels poll
    flags     addresses of the flag ``aborted`` of this rank, uint64 [num_words], in every region that it reaches
    named()   ranks that a kernel has waited for in vain

    ``flags`` get a bit for each late rank: those of ``named()``, or this rank itself if there are none.
    """

    def __init__(
        self,
        device: torch.device,
        copy: Callable[[int, int, int, int], None],
        own_flag: int,
        flags: list[int],
        num_words: int,
        rank: int,
    ):
        self._copy, self._own_flag, self._flags, self._rank = copy, own_flag, flags, rank
        self.named: Callable[[], Iterable[int]] = tuple
        self._one = torch.ones(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._late = torch.zeros(num_words, dtype=torch.int64, device="cpu", pin_memory=True)
        self._stream = torch.cuda.Stream(device)  # copies here need not wait for the kernels under way

    def end_kernels(self) -> None:
        """Let this rank's kernels end soon, and those launched later at once. Tell no peer."""
        with torch.cuda.device(self._stream.device):
            self._copy(self._own_flag, self._one.data_ptr(), 4, self._stream.cuda_stream)

    def free(self) -> None:
        """Let go of the memory, once nothing runs any more."""
        self._own_flag, self._flags, self.named = 0, [], tuple

    def run(self) -> None:
        for i, word in enumerate(rank_set(self.named() or [self._rank], len(self._late))):
            self._late[i] = word
        one, late, stream = self._one.data_ptr(), self._late.data_ptr(), self._stream.cuda_stream
        rest = 8 * (len(self._late) - 1)
        # Copy, and launch no kernels: these might have to wait for a multiprocessor.
        with torch.cuda.device(self._stream.device):
            if self._own_flag:
                self._copy(self._own_flag, one, 4, stream)
            for flag in self._flags:
                if rest:
                    self._copy(flag + 8, late + 8, rest, stream)
                self._copy(flag, late, 8, stream)  # last: it says that the others are there

    def wait(self, limit_s: float = 1.0) -> None:
        """Wait until the last abort is written, but not for ever: the memory of a rank may be gone."""
        end = time.monotonic() + limit_s
        while not self._stream.query() and time.monotonic() < end:
            time.sleep(1e-3)


def rank_set(ranks: Iterable[int], num_words: int) -> list[int]:
    """Return so many int64 with a bit for each rank, as RankSet in csrc/cuda/sync/wait.cuh: bit 0 is always set."""
    bits = sum((2 << rank for rank in set(ranks)), 1)
    return [
        int.from_bytes((bits >> 64 * word & 2**64 - 1).to_bytes(8, "little"), "little", signed=True)
        for word in range(num_words)
    ]
