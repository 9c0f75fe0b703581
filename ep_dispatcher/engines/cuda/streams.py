"""The streams of operations, and their events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ep_dispatcher.request import Combined, Received
from ep_dispatcher.threads import StoreHangs, in_thread

logger = logging.getLogger(__name__)

# How often a waiting host checks for signals, and for destroy() in another thread.
SLICE_S = 0.05
# Side streams, beside the kernels of experts. All engines share them, and their memory in PyTorch's cache.
POOL = 32  # streams of high priority that PyTorch has for each device; it returns them in turn
_side_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device, and address of the main stream


def side_stream(device: int) -> torch.cuda.Stream:
    """Return the side stream of the current stream, the main one. It has a higher priority.

    Up to 32 main streams of a device have one each; further ones share them. A caller may get the same stream from
    PyTorch. So before memory of a side stream is freed, make that stream wait for the readers (moe/overlap.py).
    """
    main_address = torch._C._cuda_getCurrentRawStream(device)
    key = device, main_address
    if key not in _side_streams:
        used_addresses = {main_address}
        for (other_device, _), side in _side_streams.items():
            if other_device == device:
                used_addresses.add(side.cuda_stream)
        for _ in range(POOL):
            _side_streams[key] = torch.cuda.Stream(device, priority=-1)
            if _side_streams[key].cuda_stream not in used_addresses:
                break
    return _side_streams[key]


def wait_for_device(device: torch.device, limit_s: float) -> None:
    """Make the host wait until a GPU is idle. RuntimeError after ``limit_s``.

    ``torch.cuda.synchronize`` has no limit. It would wait for ever for a collective of the user's whose peer is gone.
    """
    try:
        in_thread(partial(torch.cuda.synchronize, device), limit_s)
    except StoreHangs:
        raise RuntimeError(
            f"{device} was still busy after {limit_s:.1f} s, with work that is not this buffer's: its own kernels end "
            "sooner. What else is on the GPU, and does it wait for a rank that is gone?"
        ) from None


def free_when_idle(device: torch.device, free: Callable[[], None], limit_s: float) -> None:
    """Call ``free`` in a thread once a GPU is idle. Wait for that at most ``limit_s``; it may happen later."""

    def run() -> None:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)
        free()

    try:
        in_thread(run, limit_s)
    except StoreHangs:
        text = "ep_dispatcher: %s was still busy after %.1f s. A buffer's memory there is freed when it is idle"
        logger.warning(text, device, limit_s)


class Streams:
    """Orders the operations of one engine one after the other, whatever streams they run in."""

    _device: torch.device
    _device_index: int
    _stream: torch.cuda.Stream | None = None  # the stream of the last operation
    _own_stream: torch.cuda.Stream | None = None
    _caller: torch.cuda.Stream | None = None  # the stream that will wait for an asynchronous operation

    @contextmanager
    def asynchronous(self, *inputs: object) -> Iterator[None]:
        """Run operations inside in a stream of the buffer's own, after all work so far in the current stream."""
        self._caller = torch.cuda.current_stream(self._device)
        if self._own_stream is None:
            self._own_stream = torch.cuda.Stream(self._device, priority=-1)
        self._own_stream.wait_stream(self._caller)
        for value in inputs:
            for t in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(t, Tensor) and t.is_cuda:
                    t.record_stream(self._own_stream)
        try:
            with torch.cuda.stream(self._own_stream):
                yield
        finally:
            self._caller = None

    def side_stream(self) -> torch.cuda.Stream:
        """Return the stream for operations beside kernels of experts in the current stream."""
        return side_stream(self._device_index)

    def join(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)

    def follow(self) -> None:
        with torch.cuda.device(self._device):
            self._follow()
            self._stream = torch.cuda.current_stream()

    def _follow(self) -> None:
        """Make the current stream wait for the last operation."""
        # In a capture a stream cannot wait for earlier work, only for streams of the same capture.
        if not torch.cuda.is_current_stream_capturing() or self._is_captured():
            self.join()

    def _is_captured(self) -> bool:
        """Return whether the stream of the last operation is being captured."""
        if self._stream is None or self._stream.cuda_stream == 0:  # the default stream is never captured; do not ask it
            return False
        with torch.cuda.stream(self._stream):
            return torch.cuda.is_current_stream_capturing()

    def idle(self) -> bool:
        return self._stream is None or self._stream.query()

    def _record_on_caller_stream(self, outputs: Received | Combined) -> None:
        """Keep the memory of outputs, which belongs to the buffer's own stream, until the caller's stream is done."""
        assert self._caller is not None  # of an asynchronous operation
        for t in outputs:
            if t is not None and t.is_cuda:
                t.record_stream(self._caller)
