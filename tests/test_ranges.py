"""Profiler ranges: what a profiler sees of an operation, and that nothing is made when nobody profiles."""

import pytest
import torch
from test_dispatch_combine import Case, make_buffer, make_inputs
from torch.profiler import ProfilerActivity, profile

import ep_dispatcher as ep
from ep_dispatcher.engines import ranges

DISPATCH = ["check", "route", "stage", "count", "send lists", "send", "plan", "pull", "finish"]
CACHED = ["check", "stage", "send", "pull", "finish"]
COMBINE = ["check", "push", "send", "push", "sum", "finish"]


def seen_by_a_profiler(rank: int) -> list[tuple[str, list[str]]]:
    """Each operation's range and the ranges right inside it, in the order of time."""
    case = Case(2, 1)
    inputs = make_inputs(case)
    with make_buffer(case, "cpu", 64) as buffer:
        x, topk_idx, weights = inputs.x[rank].requires_grad_(), inputs.topk_idx[rank], inputs.topk_weights[rank]
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            out = ep.dispatch(buffer, x, topk_idx, weights)
            ep.combine(buffer, out.x, out.handle).sum().backward()
    ours = [event for event in profiler.events() if event.name.startswith("ep_dispatcher.")]
    ours.sort(key=lambda event: event.time_range.start)
    operations = [event for event in ours if event.name.count(".") == 1]
    steps = [event for event in ours if event.name.count(".") == 2]
    assert len(operations) + len(steps) == len(ours)
    for before, after in zip(operations, operations[1:]):
        assert before.time_range.end <= after.time_range.start
    result = []
    for operation in operations:
        inside = [step for step in steps if step.cpu_parent is operation]
        for step in inside:
            assert operation.time_range.start <= step.time_range.start <= step.time_range.end
            assert step.time_range.end <= operation.time_range.end
        assert all(step.name.startswith(f"{operation.name}.") for step in inside)
        result.append((operation.name, [step.name.rpartition(".")[2] for step in inside]))
    assert sum(len(inside) for _, inside in result) == len(steps), "every step is inside an operation"
    return result


def test_a_profiler_sees_operations_and_their_steps(pools):
    dispatch, combine = "ep_dispatcher.dispatch", "ep_dispatcher.combine"
    expected = [(dispatch, DISPATCH), (combine, COMBINE), (dispatch, CACHED), (combine, COMBINE)]
    assert pools(2).run(seen_by_a_profiler) == [expected] * 2


def ranges_of_a_mistake(rank: int) -> list[str]:
    case = Case(1, 1)
    inputs = make_inputs(case)
    with make_buffer(case, "cpu", 64) as buffer:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with pytest.raises(ValueError, match="max_recv_rows"):
                buffer.dispatch(inputs.x[0], inputs.topk_idx[0], max_recv_rows=0)
            with torch.profiler.record_function("after"):
                pass
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.cpu_parent is None and event.name.startswith(("ep_", "after"))]


def test_an_error_ends_the_ranges(pools):
    assert pools(1).run(ranges_of_a_mistake) == [["ep_dispatcher.dispatch", "after"]]


def test_without_a_profiler_nothing_is_made(monkeypatch):
    def refuse(name):
        raise AssertionError(f"a range {name} that nobody sees")

    monkeypatch.setattr(ranges, "record_function", refuse)
    with ranges.ranges_of("dispatch") as seen:
        seen.step("stage")
    assert seen is ranges.NO_RANGES
