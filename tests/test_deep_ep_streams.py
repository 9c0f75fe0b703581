"""In which stream an operation runs that a program wants to overlap, and what waits for what. No GPU is needed."""

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ep_dispatcher.integrations.deep_ep import events
from ep_dispatcher.integrations.deep_ep.events import CommStream, EventHandle, EventOverlap
from ep_dispatcher.integrations.deep_ep.row_conversion import Rows


@dataclass
class Streams:
    """Stands for CUDA's streams: notes what happens, in order."""

    notes: list[str] = field(default_factory=list)
    current: list[SimpleNamespace] = field(default_factory=list)

    def make(self, name: str) -> SimpleNamespace:
        stream = SimpleNamespace(name=name)
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

    def tensor(self, name: str) -> mock.Mock:
        tensor = mock.Mock(spec=torch.Tensor, is_cuda=True)
        tensor.record_stream = lambda stream: self.notes.append(f"{stream.name} keeps {name}")
        return tensor


@pytest.fixture
def streams(monkeypatch) -> Streams:
    streams = Streams()
    streams.current.append(streams.make("caller"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: streams.current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: streams.make("comm"))
    monkeypatch.setattr(events, "in_stream", streams.use)
    return streams


STEPS = ["comm waits for event of caller", "comm keeps x", "comm runs", "caller keeps y", "event of comm"]


@pytest.mark.parametrize(
    "before, async_finish, notes",
    [
        (False, False, ["caller runs"]),
        (False, True, ["event of caller", *STEPS]),
        (True, True, STEPS),
        (True, False, [*STEPS, "caller waits for event of comm"]),
    ],
)
def test_what_waits_for_what(streams, before, async_finish, notes):
    previous = EventOverlap(EventHandle() if before else None)
    streams.notes.clear()
    with CommStream().operation((streams.tensor("x"), None), previous, async_finish) as operation:
        streams.notes.append(f"{streams.current[-1].name} runs")
        operation.hand_over(streams.tensor("y"), None)
    assert streams.notes == notes
    if async_finish:
        with operation.event:
            streams.notes.append("other work")
        assert streams.notes[-2:] == ["other work", "caller waits for event of comm"]
    else:
        with pytest.raises(ValueError, match="^event is None"):
            operation.event.current_stream_wait()


def test_rows_are_copied_only_when_they_are_asked_for():
    """Which is inside the operation: outside, the copies would be in a stream that it does not wait for."""
    x = torch.arange(64 * 128).view(64, 128)
    for given in ((x.to(torch.uint8), x[:, :1].int()), x.to(torch.uint8)):
        rows = Rows(given)
        assert rows._data is None
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
