"""How a call is timed, on a host and on a GPU. The ranks begin every measured call together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ep_dispatcher.benchmark.ranks import sum_over_ranks

FLUSHED_BYTES = 128 << 20  # more than the L2 cache of an H200 (60 MB)
HEAD_START_CYCLES = 2_000_000  # about a millisecond: longer than the host takes to launch what is measured


def make_clock(engine: str) -> HostClock | DeviceClock:
    """Return the clock of an engine: where its tensors live, and how a call is timed."""
    return DeviceClock() if engine == "cuda" else HostClock()


class HostClock:
    """Times of a processor that other processes disturb: the sides take turns, so that all of them are disturbed."""

    device = torch.device("cpu")
    takes_turns = True

    def seconds(self, call: Callable[[], object], iters: int, warmup: int) -> list[float]:
        """Of ``iters`` calls on this rank, after ``warmup`` calls that are not timed."""
        times = []
        for iteration in range(-warmup, iters):
            dist.barrier()
            begin = time.perf_counter()
            call()
            if iteration >= 0:
                times.append(time.perf_counter() - begin)
        return times

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        raise NotImplementedError("there are CUDA graphs on GPUs alone")

    def release(self) -> bool:
        """Give back what the last case used; True when the device can go on."""
        return True


class DeviceClock:
    """Events around the call, in the current stream.

    Collective. Before the events the stream clears the L2 cache, waits long enough for the host to run ahead, and meets
    the other ranks, so that neither the host's launches nor a late rank is measured. (A call that itself waits for the
    device, as one without max_recv_rows, is measured with that.)
    """

    takes_turns = False

    def __init__(self):
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=self.device)
        self._meeting = torch.zeros(1, device=self.device)
        dist.all_reduce(self._meeting)  # the first one starts NCCL

    def seconds(self, call: Callable[[], object], iters: int, warmup: int) -> list[float]:
        for _ in range(warmup):
            call()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        with _no_garbage_collection():
            for _ in range(iters):
                self._flushed.zero_()
                torch.cuda._sleep(HEAD_START_CYCLES)
                dist.all_reduce(self._meeting)
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
        return times

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """A call that replays a CUDA graph of ``call``."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        sum_over_ranks([0])  # nothing of another rank is under way while this one captures
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def release(self) -> bool:
        del self._flushed, self._meeting
        gc.collect()
        torch.cuda.synchronize()  # raises what a kernel left behind
        torch.cuda.empty_cache()
        return True


@contextmanager
def _no_garbage_collection():
    """A collection takes longer than the host is ahead."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
