"""The streams of operations, and their events."""

from __future__ import annotations

from typing import Protocol

import torch

from ep_dispatcher.engines.base import ExplainsErrors
from ep_dispatcher.errors import PeerTimeoutError

# Streams beside kernels of experts. All engines share them, and their memory in PyTorch's cache.
POOL = 32  # streams of high priority that PyTorch has for each device; it returns them in turn
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device, and address of the main stream


def side_stream(device: int) -> torch.cuda.Stream:
    """Return the side stream of the current, main stream. It has a higher priority.

    Up to 32 main streams of a device have one each; further ones share them. A caller may have the same stream from
    PyTorch. So before memory of a side stream is freed, let that stream wait for the readers (moe/overlap.py).
    """
    main = device, torch._C._cuda_getCurrentRawStream(device)
    if main not in _streams:
        taken = {main[1], *(side.cuda_stream for (of, _), side in _streams.items() if of == device)}
        for _ in range(POOL):
            _streams[main] = torch.cuda.Stream(device, priority=-1)
            if _streams[main].cuda_stream not in taken:
                break
    return _streams[main]


class _InStreams(Protocol):
    """What an event asks of the engine."""

    def join(self) -> None: ...

    def synchronize(self) -> None: ...

    def idle(self) -> bool: ...


class StreamEvent:
    """The event of an operation in a stream. A wait for it may include later operations of the same buffer."""

    def __init__(self, engine: _InStreams, owner: ExplainsErrors):
        self._engine, self._owner = engine, owner

    def wait(self) -> None:
        """Let the current stream wait for the operation."""
        self._engine.join()

    def synchronize(self) -> None:
        """Let the host wait for the operation; raise errors found on the device.

        After a ValueError the buffer stays usable if all ranks call this before their next operation.
        """
        try:
            self._engine.synchronize()
        except (PeerTimeoutError, ValueError) as error:
            raise self._owner.explained(error)  # noqa: B904  # it has its cause

    def query(self) -> bool:
        """Return whether the operation is complete."""
        return self._engine.idle()
