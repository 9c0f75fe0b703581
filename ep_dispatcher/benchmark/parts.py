"""A rank's part of a case. Each part is a run of its own, so that one that fails does not take the others with it.

A part returns, on rank 0 alone, what it adds to the case's JSON (``suite.py`` says what that is); the times in
"seconds" are those of the slowest rank of an iteration.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import ep_dispatcher as ep
from ep_dispatcher.benchmark.baseline import AllToAllBaseline
from ep_dispatcher.benchmark.cases import OTHERS, Case
from ep_dispatcher.benchmark.clock import make_clock
from ep_dispatcher.benchmark.ranks import attempt, largest_over_ranks, sum_over_ranks
from ep_dispatcher.benchmark.sides import EngineSide, compare, operations_of
from ep_dispatcher.benchmark.wires import wire_bytes

ENGINE, GRAPH, ALL_TO_ALL, MEGATRON, DEEP_EP = (
    "engine",
    "engine, CUDA graph",
    "all_to_all_single",
    "Megatron alltoall",
    "DeepEP",
)
TIMEOUT_S = 20.0  # of an operation: a hang must not eat the time of the cases that follow


class Part:
    """What a part has found, and the clock that it goes by."""

    def __init__(self, case: Case):
        self.case, self.clock = case, make_clock(case.engine)
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self.found: dict = {"seconds": self.seconds, "notes": []}
        self.inputs = case.inputs(dist.get_rank(), self.clock.device)

    def attempt(self, what: str, call: Callable):
        return attempt(what, self.found["notes"], call)

    def time(self, side: str, operation: str, call: Callable[[], object]) -> None:
        timed = partial(self.clock.seconds, call, self.case.iters, self.case.warmup)
        seconds = self.attempt(f"{side}, {operation}", timed)
        if seconds is not None:
            self.seconds.setdefault(operation, {})[side] = [round(s, 9) for s in largest_over_ranks(seconds)]

    def time_all(self, side: str, calls: dict[str, Callable[[], object]]) -> None:
        for operation, call in calls.items():
            self.time(side, operation, call)

    def result(self) -> dict | None:
        self.inputs = ()
        self.found["usable"] = bool(self.attempt("after it", self.clock.release))
        return self.found if dist.get_rank() == 0 else None


def measure_engine(rank: int, case: Case) -> dict | None:
    """The engine, the all-to-all that a user writes otherwise, whether they agree, and what they move."""
    part = Part(case)
    buffer = ep.Buffer(
        dist.group.WORLD,
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
    try:
        part.attempt("engine", lambda: _measure_engine(part, buffer))
    finally:
        part.attempt("engine, destroy", buffer.destroy)
    return part.result()


def _measure_engine(part: Part, buffer: ep.Buffer) -> None:
    case, inputs, found = part.case, part.inputs, part.found
    needed = buffer.dispatch(*inputs, layout=case.layout).x.shape[0]
    most = int(largest_over_ranks([needed])[0])
    found["received_rows"], found["max_recv_rows"] = sum_over_ranks([needed])[0], most
    engine = EngineSide(buffer, case.layout, most)
    calls = engine_calls(engine, case, part.inputs)
    part.time_all(ENGINE, calls)
    baseline = None
    if "all_to_all" in case.others:
        baseline = AllToAllBaseline(dist.group.WORLD, case.experts)
        others = part.attempt(ALL_TO_ALL, lambda: operations_of(baseline, *inputs)) or {}
        part.time_all(ALL_TO_ALL, {name: call for name, call in others.items() if name in calls})
        compared = part.attempt("comparison", lambda: compare(engine, baseline, *inputs, case.layout))
        found["compared"] = {ALL_TO_ALL: compared} if compared else {}
    moved = part.attempt("bytes", lambda: wire_bytes(engine, baseline, case.ranks_per_node or case.ranks, *inputs))
    found["wire_bytes"] = moved or {}
    if case.graph:
        for operation, call in calls.items():
            replay = part.attempt(f"{GRAPH}, {operation}", partial(part.clock.capture, call))
            if replay is not None:
                part.time(GRAPH, operation, replay)


def engine_calls(engine: EngineSide, case: Case, inputs: tuple) -> dict[str, Callable[[], object]]:
    calls = operations_of(engine, *inputs)
    if case.has_float8:
        x, topk_idx, topk_weights = inputs
        pair = ep.quantize(x)
        calls["dispatch FP8"] = lambda: engine.dispatch(pair, topk_idx, topk_weights)
        calls["dispatch, quantize"] = lambda: engine.dispatch(x, topk_idx, topk_weights, quantize="e4m3_1x128")
    return {operation: calls[operation] for operation in case.operations if operation in calls}


def measure_megatron(rank: int, case: Case) -> dict | None:
    """Megatron's own dispatcher and ours in Megatron: all six steps with experts that return what they get."""
    part = Part(case)
    missing = _why_missing("megatron.core") or _why_missing("ep_dispatcher.integrations.megatron")
    if missing is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's, about what is not installed, once per rank
            part.attempt("Megatron", lambda: _measure_megatron(part))
    else:
        part.found["notes"].append(f"Megatron: {missing}")
    return part.result()


def _measure_megatron(part: Part) -> None:
    megatron = importlib.import_module("ep_dispatcher.integrations.megatron.benchmark")
    case = part.case
    settings = dict(hidden=case.hidden, num_experts=case.experts, num_topk=case.topk, num_sms=case.sms)
    with megatron.dispatchers(dist.group.WORLD, dtype=getattr(torch, case.dtype), **settings) as made:
        part.found["megatron"] = made.version
        for name, steps in {ENGINE: made.ours, MEGATRON: made.theirs}.items():
            calls = part.attempt(f"{name} in Megatron", partial(steps.operations, *part.inputs))
            part.time_all(name, calls or {})
        compared = part.attempt("comparison in Megatron", lambda: made.compare(*part.inputs))
        part.found["compared"] = {MEGATRON: compared} if compared else {}


def measure_deep_ep(rank: int, case: Case) -> dict | None:
    part = Part(case)
    missing = _why_missing("deep_ep")
    if missing is None:
        part.attempt(DEEP_EP, lambda: _measure_deep_ep(part))
    else:
        part.found["notes"].append(f"{DEEP_EP}: {missing}")
    return part.result()


def _measure_deep_ep(part: Part) -> None:
    deep_ep = importlib.import_module("ep_dispatcher.benchmark.deep_ep")
    with deep_ep.make_side(dist.group.WORLD, part.case) as side:
        part.found["deep_ep"] = side.version
        calls = side.operations(*part.inputs)
        part.time_all(DEEP_EP, {name: call for name, call in calls.items() if name in part.case.operations})


def _why_missing(module: str) -> str | None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ImportError:  # of a parent
        found = False
    return None if found else f"not measured, {module} cannot be imported here"


PARTS = dict(zip(OTHERS[1:], (measure_megatron, measure_deep_ep)))


def parts_of(case: Case) -> list[Callable]:
    return [measure_engine, *(PARTS[name] for name in case.others if name in PARTS)]
