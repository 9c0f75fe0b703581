"""In which stream an operation runs that a program wants to overlap, and what waits for what. No GPU is needed."""

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from ep_dispatcher.integrations.deep_ep.events import CommStream, EventHandle, EventOverlap
from ep_dispatcher.integrations.deep_ep.rows import Rows


@dataclass
class Streams:
    """Stands for CUDA's streams: notes what happens, in order."""

    notes: list[str] = field(default_factory=list)
    current: list[SimpleNamespace] = field(default_factory=list)

    def make(self, name: str) -> SimpleNamespace:
        stream = SimpleNamespace(name=name)
        stream.wait_stream = lambda other: self.notes.append(f"{name} waits for {other.name}")
        stream.wait_event = lambda event: self.notes.append(f"{name} waits for event of {event}")
        stream.record_event = lambda: (self.notes.append(f"event of {name}"), name)[1]
        return stream

    @contextlib.contextmanager
    def use(self, stream):
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def tensor(self, name: str) -> SimpleNamespace:
        def keep(stream):
            self.notes.append(f"{stream.name} keeps {name}")

        return SimpleNamespace(is_cuda=True, record_stream=keep)


@pytest.fixture
def streams(monkeypatch) -> Streams:
    streams = Streams()
    streams.current.append(streams.make("caller"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: streams.make("comm"))
    monkeypatch.setattr(torch.cuda, "stream", streams.use)
    return streams


def run(streams: Streams, **options) -> EventOverlap:
    with CommStream().operation((streams.tensor("x"), None), **options) as operation:
        streams.notes.append(f"{streams.current[-1].name} runs")
        operation.hand_over(streams.tensor("y"), None)
    return operation.event


def test_without_overlap_it_runs_in_the_callers_stream(streams):
    for previous in (None, EventOverlap()):
        event = run(streams, previous_event=previous, async_finish=False)
        assert streams.notes.pop() == "caller runs" and not streams.notes and event.event is None


def test_async_finish_waits_for_the_callers_work_and_leaves_an_event(streams):
    event = run(streams, previous_event=None, async_finish=True)
    wanted = ["comm waits for caller", "comm keeps x", "comm runs", "caller keeps y", "event of comm"]
    assert streams.notes == wanted
    event.current_stream_wait()
    assert streams.notes[len(wanted) :] == ["caller waits for event of comm"]


def test_a_previous_event_is_waited_for_instead(streams):
    before = EventOverlap(EventHandle())
    event = run(streams, previous_event=before, async_finish=True)
    assert streams.notes[:3] == ["event of caller", "comm waits for event of caller", "comm keeps x"]
    with event:
        streams.notes.append("other work")
    assert streams.notes[-2:] == ["other work", "caller waits for event of comm"]


def test_without_async_finish_the_caller_waits(streams):
    event = run(streams, previous_event=EventOverlap(EventHandle()), async_finish=False)
    assert streams.notes[-3:] == ["comm runs", "caller keeps y", "caller waits for comm"] and event.event is None
    with pytest.raises(ValueError, match="^event: given None"):
        event.current_stream_wait()


def test_rows_are_copied_only_when_they_are_asked_for():
    """Which is inside the operation: outside, the copies would be in a stream that it does not wait for."""
    x = torch.arange(64 * 128).view(64, 128)
    for given in ((x.to(torch.uint8), x[:, :1].int()), x.to(torch.uint8)):
        rows = Rows(given)
        assert "data" not in vars(rows)
        first = rows.data
        assert rows.data is first


def test_an_error_inside_is_raised(streams):
    with pytest.raises(KeyError), CommStream().operation((streams.tensor("x"),), None, True):
        raise KeyError
    assert streams.current[-1].name == "caller"


def test_a_cpu_has_no_streams():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    event = EventHandle()
    event.current_stream_wait()
    with pytest.raises(NotImplementedError, match="no streams"):
        CommStream().stream()
