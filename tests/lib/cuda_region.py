"""The region of a rank of the CUDA engine, as its host reads and writes it while kernels run."""

from __future__ import annotations

import torch

import ep_dispatcher as ep


class Region:
    """The regions of all ranks, by copies that need no multiprocessor. Offsets are bytes from their start.

    at: offsets of arrays by name, and sizes (``region_offsets`` of the compiled module)
    """

    def __init__(self, buffer: ep.Buffer):
        engine = buffer.live_engine()
        self._copy, self._addresses = engine._compiled.copy, engine._regions.addresses
        self.config = engine._c_config
        self.at = engine._compiled.region_offsets(self.config)
        self._stream = torch.cuda.Stream()

    def write(self, rank: int, offset: int, value: int) -> None:
        """Write an int32 to the region of a rank, and wait until it is there."""
        numbers = torch.tensor([value], dtype=torch.int32, device="cpu", pin_memory=True)
        self._copy(self._addresses[rank] + offset, numbers.data_ptr(), numbers.nbytes, self._stream.cuda_stream)
        self._stream.synchronize()

    def read(self, rank: int, offset: int) -> int:
        """Return an int64 of the region of a rank."""
        numbers = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._copy(numbers.data_ptr(), self._addresses[rank] + offset, numbers.nbytes, self._stream.cuda_stream)
        self._stream.synchronize()
        return int(numbers)
