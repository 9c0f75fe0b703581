"""Streams that follow each other, and the scope that makes one the current stream: with stand-ins, and on a GPU."""

import types
from collections.abc import Iterator

import pytest
import torch

from ep_dispatcher.engines.cuda import streams
from ep_dispatcher.engines.cuda.streams import SideStream, Streams, in_stream

MAIN, SIDE = (7, 0, 1), (9, 0, 1)  # id, index and type of a device
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Machine:
    """A device whose streams have their ids as addresses, and a log of what streams wait for."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.current, self.log, self.captured, self.device = MAIN, [], set(), 0
        for name, function in dict(
            _cuda_getDevice=lambda: self.device,
            _cuda_getCurrentStream=lambda device: self.current,
            _cuda_getCurrentRawStream=lambda device: self.current[0],
            _cuda_setStream=lambda *stream: setattr(self, "current", stream),
        ).items():
            patch.setattr(torch._C, name, function, raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current[0] in self.captured)
        patch.setattr(torch.accelerator, "current_stream", lambda device: self.current)

    def order_streams(self, device: int, earlier: int, later: int) -> None:
        self.log.append((later, earlier))

    def is_captured(self, stream: int) -> bool:
        return stream in self.captured


@pytest.fixture
def machine(monkeypatch) -> Iterator[Machine]:
    streams._stream_at.cache_clear()
    yield Machine(monkeypatch)
    streams._stream_at.cache_clear()  # of streams that were none


def stream_of(parts: tuple[int, int, int]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**dict(zip(("stream_id", "device_index", "device_type"), parts)))


def test_a_scope_makes_a_stream_the_current_one(machine, monkeypatch):
    side = stream_of(SIDE)
    with in_stream(side):
        assert machine.current == SIDE
        with in_stream(stream_of(MAIN)), in_stream(side):
            assert machine.current == SIDE
        assert machine.current == SIDE
    assert machine.current == MAIN
    with pytest.raises(KeyError), in_stream(side):
        raise KeyError
    assert machine.current == MAIN
    machine.device = 1
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: ("PyTorch's", stream))
    assert in_stream(side) == ("PyTorch's", side), "it restores the device too"


def test_operations_of_an_engine_follow_each_other(machine):
    one = Streams()
    one._compiled, one._device_index = machine, 0
    one.join()
    one.follow()
    one.follow()
    assert machine.log == [], "in one stream"
    with in_stream(stream_of(SIDE)):
        one.follow()
        one.join()
    assert machine.log == [(9, 7)] and one._stream == SIDE
    one.join()
    assert machine.log == [(9, 7), (7, 9)]
    machine.captured.add(7)
    one.follow()
    assert machine.log[2:] == [], "a capture cannot wait for earlier work"
    machine.captured.add(9)
    with in_stream(stream_of(SIDE)):
        one.follow()
    assert machine.log[2:] == [(9, 7)], "but for streams of the same capture"


def test_a_side_stream_and_its_main_stream_wait_for_each_other(machine, monkeypatch):
    stream = stream_of(SIDE)
    stream.cuda_stream = SIDE[0]
    monkeypatch.setattr(streams, "side_stream", lambda device: stream)
    one = Streams()
    one._compiled, one._device_index = machine, 0
    side = one.side_stream()
    with side.current():
        assert machine.current == SIDE
        side.follow_main()
        side.main_follows()
    assert machine.log == [(9, 7), (7, 9)]
    machine.current = (8, 0, 1)
    side.order_memory()
    assert machine.log[2:] == [(9, 8)], "the stream that reads the memory, not the main one"
    machine.captured.add(8)
    side.order_memory()
    assert machine.log[3:] == [], "a wait behind the join would leave the capture without a join"


@needs_gpu
def test_a_main_stream_waits_for_events_of_its_side_stream():
    """Each wait is for what the side stream was given before the event, also in a graph."""
    from ep_dispatcher import _C_cuda

    first, second, sums = (torch.zeros(1 << 20, device="cuda") for _ in range(3))

    def add() -> None:
        side, events = SideStream(_C_cuda, 0), []
        side.follow_main()
        for number in (first, second):
            with side.current():
                torch.cuda._sleep(1_000_000)
                number.add_(1)
                events.append(side.record_event())
        for number, event in zip((first, second), events):
            side.main_waits(event)
            sums.add_(number)
        side.main_follows()
        side.order_memory()

    for _ in range(10):
        add()
    assert (sums.cpu() == 110).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add()
    for number in (first, second, sums):
        number.zero_()
    for _ in range(10):
        graph.replay()
    assert (sums.cpu() == 110).all()


@needs_gpu
def test_a_stream_waits_for_what_another_one_was_given():
    """Many times in turn, without a wait of the host: all waits use one event."""
    from ep_dispatcher import _C_cuda

    side, number = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
    addresses = torch.cuda.current_stream().cuda_stream, side.cuda_stream

    def take_turns() -> None:
        for _ in range(40):
            number.mul_(2).add_(1)
            _C_cuda.order_streams(0, addresses[0], addresses[1])
            with in_stream(side):
                assert torch.cuda.current_stream() == side
                torch.cuda._sleep(100_000)
                number.mul_(-1).sub_(1)
            _C_cuda.order_streams(0, addresses[1], addresses[0])

    expected = torch.zeros(1)
    for _ in range(40):
        expected.mul_(2).add_(1).mul_(-1).sub_(1)
    take_turns()
    assert (number.cpu() == expected).all()
    addresses, graph = None, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        addresses = torch.cuda.current_stream().cuda_stream, side.cuda_stream
        take_turns()
        assert _C_cuda.is_captured(addresses[0])
    number.zero_()
    graph.replay()
    assert (number.cpu() == expected).all() and not _C_cuda.is_captured(addresses[1])
    addresses = torch.cuda.current_stream().cuda_stream, side.cuda_stream
    number.zero_()
    take_turns()
    assert (number.cpu() == expected).all(), "after a capture too"


def test_the_object_of_a_stream_is_made_once(machine):
    made = [streams.current_stream(0) for machine.current in (MAIN, SIDE, MAIN, SIDE)]
    assert made == [MAIN, SIDE, MAIN, SIDE]
    before = streams._stream_at.cache_info().misses
    assert streams.current_stream(0) is machine.current and streams._stream_at.cache_info().misses == before
