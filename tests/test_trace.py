"""What an operation tells: lines of EP_DISPATCHER_TRACE, of streams with a stand-in for a GPU, and profiler ranges."""

import os
import re
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from conftest import on_ranks
from test_dispatch_combine import Case, make_buffer, make_inputs
from test_errors import error_of
from torch.profiler import ProfilerActivity, profile, record_function

import ep_dispatcher as ep
from ep_dispatcher.engines import ranges
from ep_dispatcher.engines.trace import StreamTrace, Trace

LINE = re.compile(r"ep_dispatcher trace: rank (\d+), (\w+), epoch (\d+), (\d+\.\d{3}) ms, bytes: (.*)\n")


class Written(StringIO):
    """Keeps what every single call has written."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def write(self, text: str) -> int:
        self.calls.append(text)
        return len(text)


def traced(rank: int, value: str) -> tuple[list[str], dict[str, int]]:
    case = Case(2, 1)
    inputs = make_inputs(case)
    written = Written()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(written):
        patch.setitem(os.environ, "EP_DISPATCHER_TRACE", value)
        with make_buffer(case, "cpu", 64) as buffer:
            out = ep.dispatch(buffer, inputs.x[rank].requires_grad_(), inputs.topk_idx[rank])
            first = {name: sum(by_rank) for name, by_rank in buffer.counters().items()}
            ep.combine(buffer, out.x, out.handle).sum().backward()
    return written.calls, first


def test_the_cpu_engine_writes_a_line_per_operation(pools):
    for rank, (lines, first) in enumerate(pools(2).run(traced, "1")):
        parts = [LINE.fullmatch(line).groups() for line in lines]
        assert [(int(r), operation, int(epoch)) for r, operation, epoch, *_ in parts] == [
            (rank, "dispatch", 1),
            (rank, "combine", 2),
            (rank, "dispatch", 3),
            (rank, "combine", 4),
        ]
        moved = [dict(reversed(part.split(" ")) for part in line[4].split(", ")) for line in parts]
        assert {name: int(number) for name, number in moved[0].items()} == first
        assert int(moved[0]["inter_node_bytes_sent"]) > 0 and int(moved[1]["inter_node_bytes_sent"]) > 0
        assert moved[2]["inter_node_bytes_sent"] == moved[0]["inter_node_bytes_sent"], "this operation's, not all"


def test_without_the_switch_nothing_is_written(pools):
    assert [lines for lines, _ in pools(2).run(traced, "0")] == [[], []]


class Stream:
    """A stand-in for a stream: ``done`` events of it are complete."""

    def __init__(self):
        self.recorded, self.done, self.capturing = 0, 0, False

    def event(self, enable_timing: bool = False) -> "Event":
        return Event(self)


class Event:
    def __init__(self, stream: Stream):
        self.stream, self.number = stream, None

    def record(self) -> None:
        self.stream.recorded += 1
        self.number = self.stream.recorded

    def query(self) -> bool:
        assert not self.stream.capturing, "events must not be asked during a capture"
        return self.number <= self.stream.done

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "only of a complete operation"
        return float(end.number - self.number)


@pytest.fixture
def stream(monkeypatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.capturing)
    return stream


@pytest.fixture
def state() -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


@pytest.fixture
def traces(stream, state) -> StreamTrace:
    def read(copy):
        epoch, total = copy.view(torch.int64).tolist()
        return epoch, {"bytes": [total]}

    return StreamTrace(Trace(3), state, read)


def run(traces: StreamTrace, state: torch.Tensor, name: str, epoch: int, total: int) -> None:
    with traces.operation(name):
        state.view(torch.int64)[:] = torch.tensor([epoch, total])


def test_lines_of_streams_come_when_operations_are_complete(stream, state, traces, capsys):
    run(traces, state, "dispatch", 1, 100)
    run(traces, state, "combine", 2, 150)
    assert capsys.readouterr().err == "", "nothing is complete, and nobody waits"
    stream.done = 3  # the three events of the dispatch
    traces.write_complete()
    assert capsys.readouterr().err == "ep_dispatcher trace: rank 3, dispatch, epoch 1, 1.000 ms, bytes: 100 bytes\n"
    stream.done = 6
    run(traces, state, "dispatch", 3, 400)
    assert capsys.readouterr().err == "ep_dispatcher trace: rank 3, combine, epoch 2, 1.000 ms, bytes: 50 bytes\n"


def test_a_captured_operation_has_no_line_and_asks_nothing(stream, state, traces, capsys):
    run(traces, state, "dispatch", 1, 100)
    stream.done, stream.capturing = 3, True
    run(traces, state, "combine", 2, 150)
    assert stream.recorded == 3 and capsys.readouterr().err == ""


def test_a_failed_launch_has_no_line(stream, state, traces, capsys):
    with pytest.raises(ValueError):
        with traces.operation("dispatch"):
            raise ValueError("x")
    stream.done = 10
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

    monkeypatch.setattr(ranges, "record_function", refuse)
    with ranges.ranges_of("dispatch") as seen:
        seen.step("stage")
    assert seen is ranges.NO_RANGES
