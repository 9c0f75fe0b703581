"""Clocks that time a call, on a host and on a GPU. The ranks begin every timed call together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ep_dispatcher.tools.benchmark.harness import captured
from ep_dispatcher.tools.benchmark.ranks import sum_over_ranks

FLUSHED_BYTES = 128 << 20  # more than the L2 cache of an H200 (60 MB)
HEAD_START_CYCLES = 2_000_000  # about a millisecond: longer than the host takes to launch the timed call


def make_clock(engine: str) -> HostClock | DeviceClock:
    """Return the clock of an engine, with the device of its tensors."""
    return DeviceClock() if engine == "cuda" else HostClock()


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Part:
    """A call that is a part of more work: a clock times it without what it runs before and after."""

    call: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing

    def __call__(self) -> None:
        """Do all of the work."""
        self.before()
        self.call()
        self.after()


def part_of(call: Callable[[], object]) -> Part:
    """Return what is timed of a call: all of it, unless it is a part."""
    return call if isinstance(call, Part) else Part(call)


class HostClock:
    """Time on a processor. Other processes disturb it, so the sides take turns, and all suffer alike."""

    device = torch.device("cpu")
    takes_turns = True

    def seconds(self, call: Callable[[], object], iters: int, warmup: int) -> list[float]:
        """Return the seconds of ``iters`` calls on this rank, after ``warmup`` calls that are not timed."""
        times, part = [], part_of(call)
        for iteration in range(-warmup, iters):
            part.before()
            dist.barrier()
            begin = time.perf_counter()
            part.call()
            if iteration >= 0:
                times.append(time.perf_counter() - begin)
            part.after()
        return times

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        raise NotImplementedError("there are CUDA graphs on GPUs alone")

    def release(self) -> bool:
        """Free the memory of the last case. Return True if the device is still usable."""
        return True


class DeviceClock:
    """Time by events around the call, in the current stream. Collective.

    Before the events the stream clears the L2 cache, waits until the host is ahead, and meets the other ranks. So the
    time includes neither the host's launches nor a late rank. If the call itself makes the host wait for the device, as
    a dispatch without max_recv_rows does, the time includes that.
    """

    takes_turns = False

    def __init__(self):
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=self.device)
        self._meeting = torch.zeros(1, dtype=torch.float32, device=self.device)
        dist.all_reduce(self._meeting)  # the first one starts NCCL

    def seconds(self, call: Callable[[], object], iters: int, warmup: int) -> list[float]:
        for _ in range(warmup):
            call()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times, part = [], part_of(call)
        gc.disable()  # it takes longer than the head start of the host
        try:
            for _ in range(iters):
                part.before()
                self._flushed.zero_()
                torch.cuda._sleep(HEAD_START_CYCLES)
                dist.all_reduce(self._meeting)
                begin.record()
                part.call()
                end.record()
                part.after()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
        finally:
            gc.enable()
        return times

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a call that replays a CUDA graph of ``call``."""
        # Nothing of another rank is under way while this one captures.
        return captured(call, meet=lambda: sum_over_ranks([0]))[0].replay

    def release(self) -> bool:
        del self._flushed, self._meeting
        gc.collect()
        torch.cuda.synchronize()  # raises the error of a kernel, if there was one
        torch.cuda.empty_cache()
        return True
