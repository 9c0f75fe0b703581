"""The abort of a rank of the CUDA engine, from the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Aborts:
    """Abort this rank from the host: its kernels end soon, and the peers' kernels wait for it no longer.

    ``own_flag``: address of the uint32 that this rank's kernels look at; ``flags``: of this rank's uint64 flag
    ``aborted`` in every region that it reaches.
    """

    def __init__(
        self, device: torch.device, copy: Callable[[int, int, int, int], None], own_flag: int, flags: list[int]
    ):
        self._copy, self._own_flag, self._flags = copy, own_flag, flags
        self._one = torch.ones(1, dtype=torch.int64, pin_memory=True)
        self._stream = torch.cuda.Stream(device)  # copies in it need not wait for the kernels under way

    def free(self) -> None:
        """Let go of the memory, once nothing runs any more."""
        self._own_flag, self._flags = 0, []

    def run(self) -> None:
        one, stream = self._one.data_ptr(), self._stream.cuda_stream
        with torch.cuda.device(
            self._stream.device
        ):  # copies, no kernels: these might have to wait for a multiprocessor
            if self._own_flag:
                self._copy(self._own_flag, one, 4, stream)
            for flag in self._flags:
                self._copy(flag, one, 8, stream)
