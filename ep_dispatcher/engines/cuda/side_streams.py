"""Streams for operations beside kernels of experts. All engines share them, and their memory in PyTorch's cache."""

from __future__ import annotations

import torch

POOL = 32  # streams of high priority that PyTorch has for each device; it returns them in turn
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device, and address of the main stream


def side_stream(device: int) -> torch.cuda.Stream:
    """Return the side stream of the current, main stream. It has a higher priority.

    Up to 32 main streams of a device have one each; further ones share them. A caller may have the same stream from
    PyTorch. So before memory of a side stream is freed, let that stream wait for the readers (parts.py).
    """
    main = device, torch._C._cuda_getCurrentRawStream(device)
    if main not in _streams:
        taken = {main[1], *(side.cuda_stream for (of, _), side in _streams.items() if of == device)}
        for _ in range(POOL):
            _streams[main] = torch.cuda.Stream(device, priority=-1)
            if _streams[main].cuda_stream not in taken:
                break
    return _streams[main]
