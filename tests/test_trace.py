"""What an operation tells: lines of EP_DISPATCHER_TRACE, of streams with a stand-in for a GPU, and profiler ranges."""

import os
import re
from contextlib import redirect_stderr
from unittest.mock import Mock

import pytest
import torch
from conftest import on_ranks
from lib.dispatch_combine import Case, make_buffer, make_inputs
from lib.errors import error_of
from torch.profiler import ProfilerActivity, profile, record_function

import ep_dispatcher as ep
from ep_dispatcher.engines import profiler_ranges
from ep_dispatcher.engines.trace import StreamTrace, Trace

LINE = re.compile(r"ep_dispatcher trace: rank (\d+), (\w+), epoch (\d+), (\d+\.\d{3}) ms, bytes: (.*)\n")


@pytest.mark.parametrize("value", ["1", "0"])
@on_ranks(2)
def test_the_cpu_engine_writes_a_line_per_operation(rank, value):
    """If it is asked to."""
    case = Case(2, 1)
    inputs = make_inputs(case)
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(Mock()) as stderr:
        patch.setitem(os.environ, "EP_DISPATCHER_TRACE", value)
        with make_buffer(case, "cpu", 64) as buffer:
            out = ep.dispatch(buffer, inputs.x[rank].requires_grad_(), inputs.topk_idx[rank])
            first = {name: sum(by_rank) for name, by_rank in buffer.counters().items()}
            ep.combine(buffer, out.x, out.handle).sum().backward()
    parts = [LINE.fullmatch(write.args[0]).groups() for write in stderr.write.call_args_list]
    if value == "0":
        assert not parts
        return
    operations = ("dispatch", 1), ("combine", 2), ("dispatch", 3), ("combine", 4)
    assert [(int(r), operation, int(epoch)) for r, operation, epoch, *_ in parts] == [(rank, *o) for o in operations]
    moved = [dict(reversed(part.split(" ")) for part in line[4].split(", ")) for line in parts]
    assert {name: int(number) for name, number in moved[0].items()} == first
    sent = [int(operation["inter_node_bytes_sent"]) for operation in moved]
    assert sent[0] > 0 and sent[1] > 0 and sent[2] == sent[0], "this operation's, not all"


class Event:
    """A stand-in for an event. The first ``done`` ones that were recorded are complete."""

    recorded, done, capturing = 0, 0, False

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        assert not Event.capturing, "events must not be asked during a capture"
        return self.number <= Event.done

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "only of a complete operation"
        return float(end.number - self.number)


@pytest.fixture
def traces(monkeypatch) -> StreamTrace:
    for name in ("recorded", "done", "capturing"):
        monkeypatch.setattr(Event, name, 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Event.capturing)

    def read(copy):
        epoch, total = copy.view(torch.int64).tolist()
        return epoch, {"bytes": [total]}

    return StreamTrace(Trace(3), torch.zeros(16, dtype=torch.uint8), read)


def run(traces: StreamTrace, name: str, epoch: int, total: int) -> None:
    with traces.operation(name):
        traces._state.view(torch.int64)[:] = torch.tensor([epoch, total])


def test_lines_of_streams_come_when_operations_are_complete(traces, capsys):
    run(traces, "dispatch", 1, 100)
    run(traces, "combine", 2, 150)
    assert capsys.readouterr().err == "", "nothing is complete, and nobody waits"
    Event.done = 3  # the three events of the dispatch
    traces.write_complete()
    assert capsys.readouterr().err == "ep_dispatcher trace: rank 3, dispatch, epoch 1, 1.000 ms, bytes: 100 bytes\n"
    Event.done = 6
    run(traces, "dispatch", 3, 400)
    assert capsys.readouterr().err == "ep_dispatcher trace: rank 3, combine, epoch 2, 1.000 ms, bytes: 50 bytes\n"


def test_a_captured_operation_has_no_line_and_asks_nothing(traces, capsys):
    run(traces, "dispatch", 1, 100)
    Event.done, Event.capturing = 3, True
    run(traces, "combine", 2, 150)
    assert Event.recorded == 3 and capsys.readouterr().err == ""


def test_a_failed_launch_has_no_line(traces, capsys):
    with pytest.raises(ValueError), traces.operation("dispatch"):
        raise ValueError("x")
    Event.done = 10
    traces.write_complete()
    assert capsys.readouterr().err == ""


DISPATCH = ["check", "route", "stage", "count", "send lists", "send", "plan", "pull", "finish"]
CACHED = ["check", "stage", "send", "pull", "finish"]
COMBINE = ["check", "push", "send", "push", "sum", "finish"]


@on_ranks(2)
def test_a_profiler_sees_operations_and_their_steps(rank):
    """In the order of time, and every step inside its operation."""
    inputs = make_inputs(Case(2, 1))
    with make_buffer(Case(2, 1), "cpu", 64) as buffer:
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
    seen = []
    for operation in operations:
        inside = [step for step in steps if step.cpu_parent is operation]
        for step in inside:
            assert operation.time_range.start <= step.time_range.start <= step.time_range.end
            assert step.time_range.end <= operation.time_range.end
        assert all(step.name.startswith(f"{operation.name}.") for step in inside)
        seen.append((operation.name, [step.name.rpartition(".")[2] for step in inside]))
    assert sum(len(inside) for _, inside in seen) == len(steps)
    dispatch, combine = "ep_dispatcher.dispatch", "ep_dispatcher.combine"
    assert seen == [(dispatch, DISPATCH), (combine, COMBINE), (dispatch, CACHED), (combine, COMBINE)]


@on_ranks(1)
def test_an_error_ends_the_ranges(rank):
    inputs = make_inputs(Case(1, 1))
    with make_buffer(Case(1, 1), "cpu", 64) as buffer, profile(activities=[ProfilerActivity.CPU]) as profiler:
        error_of(buffer.dispatch, inputs.x[0], inputs.topk_idx[0], max_recv_rows=0)
        with record_function("after"):
            pass
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events if event.cpu_parent is None and event.name.startswith(("ep_", "after"))]
    assert names == ["ep_dispatcher.dispatch", "after"]


def test_without_a_profiler_nothing_is_made(monkeypatch):
    def refuse(name):
        raise AssertionError(f"a range {name} that nobody sees")

    monkeypatch.setattr(profiler_ranges, "record_function", refuse)
    with profiler_ranges.profile_operation("dispatch") as seen:
        seen.step("stage")
    assert seen is profiler_ranges.NO_PROFILER_RANGES
