"""What Buffer.stats() says of pushes and pulls of redundant copies: their bytes, and how long they take."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import on, on_ranks
from lib.balance import copies_of_homes, make_skewed_case
from lib.dispatch_combine import make_buffer
from lib.experts import MAX_TOKENS, given_to
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher.balance import move_clock
from ep_dispatcher.balance.move_clock import MoveClock
from ep_dispatcher.balance.slots import Slots
from ep_dispatcher.tools.testing import balance_so_far

SLOW_S = 0.1


def leaves_of(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["forward", "backward", "recomputed"])
@on_ranks(4)
def test_bytes_are_those_of_the_copies_of_own_experts(rank, engine, how, dtype):
    """A forward, a backward and a recompute push once each. A backward pulls float32 gradients of all parameters."""
    case, inputs = make_skewed_case(4, 2, dtype)
    given = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1
        buffer.stats()
        leaves = leaves_of(given)
        run = partial(ep.moe_mlp, buffer)
        if how == "recomputed":  # with the plan of the forward
            y = checkpoint(run, *leaves, use_reentrant=False, context_fn=ep.recompute_contexts)
        else:
            y = run(*leaves)
        if how != "forward":
            y.float().square().sum().backward()
        buffer.check()
        found = balance_so_far(buffer)
        nothing = balance_so_far(buffer)
        copies = copies_of_homes(inputs.topk_idx, buffer.balancer().sizes)
    elements = copies[rank] * (given[3][0].numel() + given[4][0].numel())
    pushes = {"forward": 1, "backward": 2, "recomputed": 3}[how]
    assert sum(copies) == found.num_copies > 0
    assert found.bytes_pushed == pushes * elements * dtype.itemsize
    assert found.bytes_pulled == (0 if how == "forward" else elements * 4)
    assert found.push_ns > 0 and (found.pull_ns > 0) == (how != "forward")
    assert nothing == (0,) * (len(nothing) - 1) + (4,), "since the last result"


@pytest.mark.parametrize("slow", ["push", "pull"])
@on_ranks(2)
def test_times_are_those_of_the_moves(rank, engine, slow):
    """Each of two pushes, or of the two pulls of a backward (of w1 and of w2), takes a tenth of a second longer."""
    case, inputs = make_skewed_case(2, 2, torch.bfloat16)
    given = given_to(rank, engine, case, inputs)
    move = getattr(Slots, slow)

    def slowly(*arguments):
        if engine == "cuda":
            torch.cuda._sleep(int(3e8))  # clock cycles: more than a tenth of a second
        else:
            time.sleep(SLOW_S)
        move(*arguments)

    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1
        ep.moe_mlp(buffer, *leaves_of(given)).float().sum().backward()  # compiles kernels
        buffer.check()
        buffer.stats()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slots, slow, slowly)
            ep.moe_mlp(buffer, *leaves_of(given)).float().sum().backward()
        buffer.check()
        found = balance_so_far(buffer)
    slow_ns, other_ns = (found.push_ns, found.pull_ns) if slow == "push" else (found.pull_ns, found.push_ns)
    assert slow_ns > 2 * SLOW_S * 1e9 > other_ns > 0, found


@pytest.mark.parametrize("engine", [on("cuda")])
@on_ranks(2)
def test_no_host_waits_to_measure(rank, engine):
    """Not in passes that begin while events of the pass before are under way."""
    case, inputs = make_skewed_case(2, 2, torch.bfloat16)
    given = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1
        buffer.stats()

        def run():
            leaves = leaves_of(given)
            y = ep.moe_mlp(buffer, *leaves, max_recv_rows=300)
            torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], y.detach())

        run()
        buffer.check()
        balance_so_far(buffer)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        buffer.check()
        found = balance_so_far(buffer)
    assert found.num_microbatches == 3 and found.push_ns > 0 and found.pull_ns > 0


@on_ranks(2)
def test_a_buffer_that_does_not_count_measures_nothing(rank, engine):
    case, inputs = make_skewed_case(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoveClock, "measure", lambda *arguments: pytest.fail("it measures"))
        with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
            buffer.balancer().smallest_copy = 1
            ep.moe_mlp(buffer, *leaves_of(given_to(rank, engine, case, inputs))).sum().backward()
            buffer.check()


# ---- the clock of a GPU, with events that pass when the test says so -------------------------------------------------


class Event:
    """Stands for torch.Event: its time is that of its latest record, in milliseconds."""

    made: list["Event"] = []
    now_ms, passed_ms = 0.0, 0.0  # of the host, and of the stream

    def __init__(self, device: str, enable_timing: bool):
        assert device == "cuda" and enable_timing
        self.made.append(self)

    def record(self) -> None:
        self.ms = Event.now_ms

    def query(self) -> bool:
        return self.ms <= Event.passed_ms

    def elapsed_time(self, end: "Event") -> float:
        assert self.query() and end.query(), "the host would wait"
        return end.ms - self.ms


@pytest.fixture
def gpu_clock(monkeypatch) -> MoveClock:
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: False)
    monkeypatch.setattr(move_clock, "torch", SimpleNamespace(cuda=cuda, Event=Event))
    Event.made, Event.now_ms, Event.passed_ms = [], 0.0, 0.0
    return MoveClock(torch.device("cuda"))


def launch(clock: MoveClock, move: move_clock.Move, ms: float) -> None:
    with clock.measure(move):
        Event.now_ms += ms


def test_events_are_used_again(gpu_clock):
    """There are as many as moves are under way, in a run that nobody reads too, and no time is lost."""
    for _ in range(1000):
        launch(gpu_clock, "push", 2)
        launch(gpu_clock, "pull", 3)
        Event.passed_ms = Event.now_ms - 5 * 4  # the device is four steps behind
    assert len(Event.made) <= 2 * 2 * 6
    Event.passed_ms = Event.now_ms
    gpu_clock.call = 1
    assert gpu_clock.take(before=1) == (2000 * 10**6, 3000 * 10**6)
    assert gpu_clock.take(before=1) == (0, 0)


def test_moves_count_with_the_copy_of_the_sums_behind_them(gpu_clock):
    """Not with an earlier one that arrives later. A move that has not ended by then counts in the next result."""
    launch(gpu_clock, "push", 1)
    gpu_clock.call = 1
    launch(gpu_clock, "push", 10)
    gpu_clock.call = 2
    launch(gpu_clock, "pull", 100)
    Event.passed_ms = 11
    gpu_clock.call = 3
    assert gpu_clock.take(before=1) == (1 * 10**6, 0)
    assert gpu_clock.take(before=3) == (10 * 10**6, 0)
    Event.passed_ms = 111
    assert gpu_clock.take(before=4) == (0, 100 * 10**6)


def test_a_capture_records_nothing(gpu_clock, monkeypatch):
    monkeypatch.setattr(move_clock.torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Event, "query", lambda event: pytest.fail("a query ends a capture"))
    launch(gpu_clock, "push", 1)
    assert not Event.made
