"""The abort of a rank of the CUDA engine, from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class Aborts:
    """Abort this rank from the host: its kernels end soon, and the peers' kernels wait for it no longer.

    own_flag  address of the uint32 that this rank's kernels poll
    flags     addresses of the uint64 flag ``aborted`` of this rank, in every region that it reaches
    named()   ranks that a kernel has waited for in vain

    The value of ``flags`` has a bit for each late rank: those of ``named()``, or this rank itself if there are none.
    """

    def __init__(
        self,
        device: torch.device,
        copy: Callable[[int, int, int, int], None],
        own_flag: int,
        flags: list[int],
        rank: int,
    ):
        self._copy, self._own_flag, self._flags, self._rank = copy, own_flag, flags, rank
        self.named: Callable[[], Iterable[int]] = tuple
        self._one = torch.ones(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._late = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._stream = torch.cuda.Stream(device)  # copies here need not wait for the kernels under way

    def free(self) -> None:
        """Let go of the memory, once nothing runs any more."""
        self._own_flag, self._flags, self.named = 0, [], tuple

    def run(self) -> None:
        self._late.fill_(rank_bits(self.named() or [self._rank]))
        one, late, stream = self._one.data_ptr(), self._late.data_ptr(), self._stream.cuda_stream
        # Copy, and launch no kernels: these might have to wait for a multiprocessor.
        with torch.cuda.device(self._stream.device):
            if self._own_flag:
                self._copy(self._own_flag, one, 4, stream)
            for flag in self._flags:
                self._copy(flag, late, 8, stream)

    def wait(self) -> None:
        """Wait until the last abort is written."""
        self._stream.synchronize()


def rank_bits(ranks: Iterable[int]) -> int:
    """Return an int64 with a bit for each rank. Ranks are below 64."""
    bits = sum(1 << rank for rank in set(ranks))
    return bits - (bits >> 63 << 64)
