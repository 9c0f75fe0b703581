"""The streams of operations, and their events."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

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
    PyTorch. So before memory of a side stream is freed, make that stream wait for the readers
    (``SideStream.order_memory``).
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


def current_stream(device: int) -> torch.Stream:
    """Return the current stream of a device. PyTorch makes a new object for it in each call, in Python."""
    return _stream_at(device, torch._C._cuda_getCurrentRawStream(device))


@functools.lru_cache(256)
def _stream_at(device: int, address: int) -> torch.Stream:  # the address of the current stream
    return torch.accelerator.current_stream(device)


_NO_SCOPE = nullcontext()


def on_device(index: int) -> AbstractContextManager[None]:
    """Return a scope in which a device is the current one. Mostly it is already."""
    return _NO_SCOPE if torch._C._cuda_getDevice() == index else torch.cuda.device(index)


def in_stream(stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    """Return torch.cuda.stream(stream). It takes the host 1 us instead of 20 where the device is the current one.

    In PyTorch a stream is a scope too. But it keeps in itself what it has replaced, so threads cannot share it.
    """
    is_on_device = torch._C._cuda_getDevice() == stream.device_index
    return _StreamScope(stream) if is_on_device else torch.cuda.stream(stream)


class _StreamScope(AbstractContextManager[None]):
    """Makes a stream of the current device the current stream."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        torch._C._cuda_setStream(*self._before)


class SideStream:
    """The side stream of the current stream, which is the main one: for operations beside kernels of experts.

    Both are known by their addresses, and events are made in compiled code: those of torch.cuda are made in Python,
    which takes the host 10 to 20 us each.
    """

    def __init__(self, compiled: Any, device: int):
        self._compiled, self._device, self._stream = compiled, device, side_stream(device)
        self._address, self._main_address = self._stream.cuda_stream, torch._C._cuda_getCurrentRawStream(device)

    def current(self) -> AbstractContextManager[None]:
        """Return a scope in which it is the current stream."""
        return in_stream(self._stream)

    def follow_main(self) -> None:
        """Let it wait for all that the main stream has been given so far."""
        self._compiled.order_streams(self._device, self._main_address, self._address)

    def main_follows(self) -> None:
        """Let the main stream wait for all that it has been given so far."""
        self._compiled.order_streams(self._device, self._address, self._main_address)

    def record_event(self) -> torch.Event:
        """Return an event behind all that it has been given so far. Call it inside of ``with current()``."""
        return torch.accelerator.current_stream(self._device).record_event()

    def main_waits(self, event: torch.Event) -> None:
        """Let the main stream wait for an event. Call it while the main stream is the current one."""
        torch.accelerator.current_stream(self._device).wait_event(event)

    def order_memory(self) -> None:
        """Let it wait for the current stream, so that memory freed from here on is reused after that one's kernels.

        Two main streams may share a side stream, and gradients may be written after the layer. While a graph is
        captured the side stream does not wait, because no join would follow. There the next layer of the same main
        stream waits, and nobody else gets that memory, because it belongs to the graph.
        """
        if not torch.cuda.is_current_stream_capturing():
            current = torch._C._cuda_getCurrentRawStream(self._device)
            self._compiled.order_streams(self._device, current, self._address)


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
    """Orders the operations of one engine one after the other, whatever streams they run in.

    Where a stream is known by its address only, no object of PyTorch is made for it, which takes the host 10 us.
    """

    _device: torch.device
    _device_index: int
    _compiled: Any  # the compiled module in use: _C_cuda or _C_nvshmem, which have the same interface
    _stream: torch.Stream | None = None  # the stream of the last operation
    _stream_address = 0  # its address
    _own_stream: torch.cuda.Stream | None = None
    _caller: torch.Stream | None = None  # the stream that will wait for an asynchronous operation

    @contextmanager
    def asynchronous(self, *inputs: object) -> Iterator[None]:
        """Run operations inside in a stream of the buffer's own, after all work so far in the current stream."""
        self._caller = torch.accelerator.current_stream(self._device_index)
        if self._own_stream is None:
            self._own_stream = torch.cuda.Stream(self._device, priority=-1)
        self.order(self.current_address(), self._own_stream.cuda_stream)
        for value in inputs:
            for t in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(t, Tensor) and t.is_cuda:
                    t.record_stream(self._own_stream)
        try:
            with in_stream(self._own_stream):
                yield
        finally:
            self._caller = None

    def side_stream(self) -> SideStream:
        """Return the stream for operations beside kernels of experts in the current stream."""
        return SideStream(self._compiled, self._device_index)

    def current_address(self) -> int:
        """Return the address of the current stream."""
        return torch._C._cuda_getCurrentRawStream(self._device_index)

    def order(self, earlier: int, later: int) -> None:
        """Let a stream wait for all that another one has been given so far. Both are addresses."""
        self._compiled.order_streams(self._device_index, earlier, later)

    def join(self) -> None:
        current = self.current_address()
        if self._stream is not None and self._stream_address != current:
            self.order(self._stream_address, current)

    def follow(self) -> None:
        with on_device(self._device_index):
            self._follow()
            self._keep_stream()

    def _keep_stream(self) -> None:
        """Keep the current stream as that of the last operation."""
        self._stream = torch.accelerator.current_stream(self._device_index)
        self._stream_address = self.current_address()

    def _follow(self) -> None:
        """Make the current stream wait for the last operation."""
        # In a capture a stream cannot wait for earlier work, only for streams of the same capture.
        if not torch.cuda.is_current_stream_capturing() or self._is_captured():
            self.join()

    def _is_captured(self) -> bool:
        """Return whether the stream of the last operation is being captured."""
        if self._stream is None or self._stream_address == 0:  # the default stream is never captured; do not ask it
            return False
        return self._compiled.is_captured(self._stream_address)

    def idle(self) -> bool:
        return self._stream is None or self._stream.query()

    def _record_on_caller_stream(self, outputs: Received | Combined) -> None:
        """Keep the memory of outputs, which belongs to the buffer's own stream, until the caller's stream is done."""
        assert self._caller is not None  # of an asynchronous operation
        for t in outputs:
            if t is not None and t.is_cuda:
                t.record_stream(self._caller)
