"""Measures where the time of one MoE layer goes: host, host waits and kernels, by step of the layer.

    found = profile_layer(layer, forward, backward, 5)   # backward(forward()) is one pass
    print(table({"alltoall": ..., "ep_dispatcher": found}))

A kernel belongs to the step that launched it, whenever it ran. A host wait is a call that returns only when the device
has reached a certain point. Profiling slows the host down, so compare profiles with each other only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ep_dispatcher.integrations.megatron import plugin

# The steps of a forward pass, in their order.
FORWARD = ("router", *plugin.STEPS[:3], "experts", *plugin.STEPS[3:])
REST, BACKWARD, WHOLE = "rest of forward", "backward", "whole"
ROWS = (*FORWARD, REST, BACKWARD, WHOLE)
PREFIX = "moe layer: "
WAITS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "ep_dispatcher.dispatch.wait for counts",
)


@dataclass
class Times:
    """Microseconds of one step, on the average of all profiled passes."""

    host: float = 0.0  # from begin to end, including waits
    waits: float = 0.0  # of the host for the device
    kernels: float = 0.0  # the sum over all kernels that the step launched


@dataclass
class Profile:
    steps: dict[str, Times]  # ROWS -> its times
    idle: float  # microseconds of a pass in which the device ran nothing; 0 without a device


@contextlib.contextmanager
def _named_steps(layer: Any) -> Iterator[None]:
    """Give profilers the steps of the layer by name."""
    from ep_dispatcher.integrations.megatron.grouped_experts.megatron_experts import register_forward

    owners = [(layer.router, "forward", "router"), (layer.experts, "forward", "experts")]
    owners += [(layer.token_dispatcher, name, name) for name in plugin.STEPS]
    for owner, method, step in owners:
        setattr(owner, method, record_function(PREFIX + step)(getattr(owner, method)))
    register_forward(layer.experts.forward)
    try:
        yield
    finally:
        for owner, method, _ in owners:
            delattr(owner, method)  # the class has the method itself


def profile_layer(layer: Any, forward: Callable[[], Any], backward: Callable[[Any], None], num_passes: int) -> Profile:
    """Profile ``backward(forward())`` as often as asked. Collective, if the layer is. Run it once before."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with _named_steps(layer), profile(activities=activities) as found:
        for _ in range(num_passes):
            with record_function(PREFIX + WHOLE):
                with record_function(PREFIX + REST):
                    output = forward()
                with record_function(PREFIX + BACKWARD):
                    backward(output)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
    return summarize(found.events(), num_passes)


def summarize(events: Iterable[Any], num_passes: int) -> Profile:
    """Return the times of each step from a profiler's events (torch.autograd.profiler_util.FunctionEvent)."""
    events = list(events)
    on_host = [e for e in events if e.device_type == DeviceType.CPU]
    windows = [(e.name.removeprefix(PREFIX), e.time_range) for e in on_host if e.name.startswith(PREFIX)]
    steps = {name: Times() for name in ROWS}
    for name, window in windows:
        steps[name].host += window.end - window.start

    def innermost(time: float) -> str | None:
        """Return the step that the host was in; another thread may have been at work for it."""
        inside = [(w.start, -w.end, name) for name, w in windows if w.start <= time < w.end]
        return max(inside)[2] if inside else None

    for event in on_host:
        kernels = sum(kernel.duration for kernel in event.kernels)
        waits = event.time_range.end - event.time_range.start if event.name in WAITS else 0
        step = innermost(event.time_range.start) if kernels or waits else None
        if step is None:
            continue
        for name in {step, WHOLE}:
            steps[name].waits += waits if step != WHOLE else 0  # the wait at the end of a pass is the profile's own
            steps[name].kernels += kernels
    # The rest of a forward is in no step. A recompute runs steps in the backward, which do not count for the forward.
    forwards = [w for name, w in windows if name == REST]
    for name, window in windows:
        if name in FORWARD and any(w.start <= window.start < w.end for w in forwards):
            steps[REST].host -= window.end - window.start
    for times in steps.values():
        times.host, times.waits, times.kernels = (t / num_passes for t in (times.host, times.waits, times.kernels))
    return Profile(steps, _idle(events, [w for name, w in windows if name == WHOLE]) / num_passes)


def _idle(events: list[Any], passes: list[Any]) -> float:
    """Return the microseconds of the passes in which no kernel and no copy ran; 0 if there were none at all."""
    ran = [e for e in events if e.device_type != DeviceType.CPU and not e.name.startswith((PREFIX, "ep_dispatcher."))]
    busy = sorted((e.time_range.start, e.time_range.end) for e in ran)
    idle = 0.0
    for one in passes if busy else ():
        until = one.start
        for start, end in busy:
            idle += max(0.0, min(start, one.end) - until)
            until = max(until, min(end, one.end))
        idle += one.end - until
    return idle


def table(sides: dict[str, Profile]) -> str:
    """Return the profiles beside each other, one line per step."""
    kinds = ("host", "waits", "kernels")
    width = max(map(len, ROWS))
    lines = ["Microseconds of one forward and backward on this rank, while it is profiled:"]
    lines.append(" " * (width + 2) + "".join(f"{name:>{10 * len(kinds)}}" for name in sides))
    lines.append(f"  {'step':{width}}" + "".join(f"{kind:>10}" for kind in kinds) * len(sides))
    for row in ROWS:
        times = [getattr(side.steps[row], kind) for side in sides.values() for kind in kinds]
        lines.append(f"  {row:{width}}" + "".join(f"{time:10.0f}" for time in times))
    lines += [
        f"  the device ran nothing for {side.idle:.0f} us with {name}" for name, side in sides.items() if side.idle
    ]
    return "\n".join(lines)
