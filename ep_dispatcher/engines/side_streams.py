"""Streams for operations beside kernels of experts. All engines use them, and the memory that PyTorch caches there."""

from __future__ import annotations

import torch

POOL = 32  # streams of high priority that PyTorch has for each device; it returns them in turn
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device, and address of the stream that each is beside


def side_stream(device: int) -> torch.cuda.Stream:
    """Return the stream beside the current one, of higher priority.

    Each main stream has one of its own, up to 32 on a device; further ones share them. A caller in PyTorch may have the
    same stream too. So who frees memory of a side stream lets that wait for the readers first (parts.py).
    """
    main = device, torch._C._cuda_getCurrentRawStream(device)
    if main not in _streams:
        taken = {main[1], *(side.cuda_stream for (of, _), side in _streams.items() if of == device)}
        for _ in range(POOL):
            _streams[main] = torch.cuda.Stream(device, priority=-1)
            if _streams[main].cuda_stream not in taken:
                break
    return _streams[main]
