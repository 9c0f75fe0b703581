"""What a rank measures of a case. Each measurement is a run of its own, so that the others survive if one fails.

On rank 0 a measurement returns its entries of the case's JSON (``suite.py`` describes them), on other ranks None. The
times in "seconds" are those of the slowest rank of an iteration.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import ep_dispatcher as ep
from ep_dispatcher.tools.benchmark.baseline import AllToAllBaseline
from ep_dispatcher.tools.benchmark.cases import Case
from ep_dispatcher.tools.benchmark.clock import make_clock
from ep_dispatcher.tools.benchmark.ranks import attempt, largest_of, largest_over_ranks, sum_over_ranks
from ep_dispatcher.tools.benchmark.sides import EngineSide, compare, operations_of
from ep_dispatcher.tools.benchmark.wires import wire_bytes

ENGINE, GRAPH = "engine", "engine, CUDA graph"
BASELINES = {"all_to_all": "all_to_all_single", "fast_sum": "all_to_all_single, fast sum"}  # in Case.others -> side
TIMEOUT_S = 20.0  # of an operation: a hang must not take the time of the cases that follow

Calls = dict[str, Callable[[], object]]  # operation -> what is timed


class Measurement:
    """The results of a measurement so far, ``found``, and its clock.

    ``found["passes"]``: how often an operation moves every received row, where ``cases.PASSES`` does not say it.
    """

    def __init__(self, case: Case):
        self.case, self.clock = case, make_clock(case.engine)
        self.found: dict = {"seconds": {}, "passes": {}, "compared": {}, "notes": []}
        self.inputs = case.inputs(dist.get_rank(), self.clock.device)

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks of the benchmark."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def make_buffer(self) -> ep.Buffer:
        """Make a buffer with the sizes of the case. Collective."""
        case = self.case
        return ep.Buffer(
            self.group,
            hidden=case.hidden,
            num_experts=case.experts,
            num_topk=case.topk,
            max_tokens_per_rank=case.tokens,
            dtype=getattr(torch, case.dtype),
            engine=case.engine,
            ranks_per_node=case.ranks_per_node or case.ranks,
            timeout_s=TIMEOUT_S,
            num_sms=case.sms,
        )

    def attempt(self, what: str, call: Callable) -> Any:
        return attempt(what, self.found["notes"], call)

    def time(self, sides: dict[str, Calls]) -> None:
        """Time every operation of every side. Collective."""
        for operation in dict.fromkeys(name for calls in sides.values() for name in calls):
            calls = {side: calls[operation] for side, calls in sides.items() if operation in calls}
            times = self._time_operation(operation, calls)
            if times:
                self.found["seconds"].setdefault(operation, {}).update(times)

    def _time_operation(self, operation: str, calls: Calls) -> dict[str, list[float]]:
        """Return side -> seconds of each iteration, without the sides that fail."""
        iters, warmup = self.case.iters, self.case.warmup
        turn = 1 if self.clock.takes_turns else iters
        times: dict[str, list[float]] = {side: [] for side in calls}
        for done in range(0, iters, turn):
            for side in list(times):
                timed = partial(self.clock.seconds, calls[side], turn, 0 if done else warmup)
                seconds = self.attempt(f"{side}, {operation}", timed)
                if seconds is None:
                    del times[side]
                else:
                    times[side] += [round(s, 9) for s in largest_over_ranks(seconds)]
        return times

    def result(self) -> dict | None:
        del self.inputs
        self.found["usable"] = bool(self.attempt("after it", self.clock.release))
        return self.found if dist.get_rank() == 0 else None


def measurements_of(case: Case) -> list[tuple]:
    """Return the measurements of a case: functions, each with its arguments after the rank."""
    modules = [name for name in case.others if name not in BASELINES]
    return [(measure_engine, case), *((measure_module, case, name) for name in modules)]


def measure_engine(rank: int, case: Case) -> dict | None:
    """Time the engine and the all-to-all that it replaces, compare their results, and count their bytes."""
    measurement = Measurement(case)
    buffer = measurement.make_buffer()
    try:
        measurement.attempt(ENGINE, lambda: _measure_engine(measurement, buffer))
    finally:
        measurement.attempt(f"{ENGINE}, destroy", buffer.destroy)
    return measurement.result()


def _measure_engine(measurement: Measurement, buffer: ep.Buffer) -> None:
    case, inputs, found = measurement.case, measurement.inputs, measurement.found
    needed = len(EngineSide(buffer, case.layout).dispatch(*inputs).x)
    found["received_rows"], found["max_recv_rows"] = sum_over_ranks([needed])[0], largest_of(needed)
    engine = EngineSide(buffer, case.layout, found["max_recv_rows"])
    baselines = {
        side: AllToAllBaseline(measurement.group, case.experts, fast_sum=name == "fast_sum")
        for name, side in BASELINES.items()
        if name in case.others
    }
    sides = {ENGINE: _engine_calls(engine, case, inputs)}
    for side, baseline in baselines.items():
        calls = measurement.attempt(side, partial(operations_of, baseline, *inputs)) or {}
        sides[side] = {name: call for name, call in calls.items() if name in sides[ENGINE]}
    measurement.time(sides)
    for side, baseline in baselines.items():
        compared = measurement.attempt(f"comparison, {side}", partial(compare, engine, baseline, *inputs, case.layout))
        found["compared"] |= {side: compared} if compared else {}
    found["wire_bytes"] = measurement.attempt("bytes", partial(wire_bytes, engine, case, *inputs)) or {}
    if case.graph:
        for operation, call in sides[ENGINE].items():
            replay = measurement.attempt(f"{GRAPH}, {operation}", partial(measurement.clock.capture, call))
            if replay is not None:
                measurement.time({GRAPH: {operation: replay}})


def _engine_calls(engine: EngineSide, case: Case, inputs: tuple) -> Calls:
    calls = operations_of(engine, *inputs)
    if case.has_float8:
        x, topk_idx, topk_weights = inputs
        pair = ep.quantize(x)
        calls["dispatch FP8"] = lambda: engine.dispatch(pair, topk_idx, topk_weights)
        calls["dispatch, quantize"] = lambda: engine.dispatch(x, topk_idx, topk_weights, quantize="e4m3_1x128")
    return {operation: calls[operation] for operation in case.operations if operation in calls}


def measure_module(rank: int, case: Case, name: str) -> dict | None:
    """Run ``measure(measurement)`` of the module ``name``. It times its own sides, and adds to ``measurement.found``.

    If the module cannot be imported, a note says so.
    """
    measurement = Measurement(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, about what is not installed, once per rank
        module = measurement.attempt(f"not measured: {name}", partial(importlib.import_module, name))
        if module is not None:
            measurement.attempt(name, partial(module.measure, measurement))
    return measurement.result()
