"""Profiler ranges: ``ep_dispatcher.dispatch`` around an operation, ``ep_dispatcher.dispatch.pull`` around a step of it.

    with profile_operation("dispatch") as ranges:
        ranges.step("stage")     # lasts until the next step, or the end of the operation
        ...
        ranges.step("pull")

They are PyTorch's record_function. torch.profiler shows them; Nsight Systems shows them as NVTX ranges if the program
runs under ``torch.autograd.profiler.emit_nvtx()``. A record_function takes 10 us even without a profiler, so none is
made then: a step is an empty call of 0.05 us.
"""

from __future__ import annotations

import torch
from torch.profiler import record_function


class NoProfilerRanges:
    """Stands for ranges while no profiler is on."""

    def __enter__(self) -> NoProfilerRanges:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, name: str) -> None:
        pass


class ProfilerRanges(NoProfilerRanges):
    """The range of one operation, and the range of its current step."""

    def __init__(self, operation: str):
        self._name = f"ep_dispatcher.{operation}"
        self._operation = record_function(self._name)
        self._step: record_function | None = None

    def __enter__(self) -> ProfilerRanges:
        self._operation.__enter__()
        return self

    def step(self, name: str) -> None:
        """End the previous step, and begin this one."""
        self._end_step()
        self._step = record_function(f"{self._name}.{name}")
        self._step.__enter__()

    def __exit__(self, *_: object) -> None:
        self._end_step()
        self._operation.__exit__(None, None, None)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)


NO_PROFILER_RANGES = NoProfilerRanges()


def profile_operation(operation: str) -> NoProfilerRanges:
    """Return the ranges of one operation. They do nothing unless a profiler is on in this thread."""
    return ProfilerRanges(operation) if torch.autograd._profiler_enabled() else NO_PROFILER_RANGES
