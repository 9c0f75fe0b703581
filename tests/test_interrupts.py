"""A waiting rank can be interrupted: by signals, whose handlers run at once, and by destroy() from another thread."""

import copy
import os
import signal
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from conftest import on, on_ranks
from round_trip import device, inputs, make_buffer, outputs, round_trip
from test_faults import mappings

import ep_dispatcher as ep

LIMIT_S = 30.0  # of the operations; what is tested takes milliseconds
SOON_S = 5.0  # on a machine under load
NUM_ROWS = 4096  # more than any rank receives


@contextmanager
def handler(number: int, function):
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def after(seconds: float, function):
    """Call the function in another thread, and join that."""
    timer = threading.Timer(seconds, function)
    timer.start()
    try:
        yield
    finally:
        timer.join()


class Turns:
    """Lets a rank wait until another one has reached a point."""

    def __init__(self, buffer: ep.Buffer, name: str):
        self._store, self._key = dist.distributed_c10d._get_default_store(), f"turn/{buffer.id}/{name}"

    def reached(self) -> None:
        self._store.set(self._key, "")

    def wait(self) -> None:
        self._store.wait([self._key], timedelta(seconds=LIMIT_S))


def operation_of(buffer: ep.Buffer, rank: int, name: str):
    """One operation, as a call without arguments that waits for it, and its epoch."""
    given = inputs(rank, device=device(buffer))
    if name != "combine":
        rows = NUM_ROWS if name == "dispatch of fixed rows" else None
        return lambda: buffer.dispatch(*given, max_recv_rows=rows).event.synchronize(), 1
    out = buffer.dispatch(*given)
    y = outputs(rank, len(out.x), device=device(buffer))
    return lambda: buffer.combine(y, out.handle).event.synchronize(), 2


WAITS = pytest.mark.parametrize(
    "engine,ranks_per_node,name",
    [on("cpu", nodes, name) for nodes in (2, 1) for name in ("dispatch", "combine")]
    + [on("cuda", 2, name) for name in ("dispatch", "dispatch of fixed rows")],
)


def expect_late_peer(operation) -> None:
    """Rank 0 is gone: rank 1 is not to wait for its limit."""
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as caught:
        for _ in range(2):  # rank 0 may have completed its part of the first
            operation()
    assert caught.value.late_ranks == (0,) and time.monotonic() - begin < LIMIT_S / 2


# ---- signals --------------------------------------------------------------------------------------------------------


def interrupt_by_keyboard(rank: int, engine: str, ranks_per_node: int, name: str) -> float:
    """Rank 0 waits for rank 1 and is interrupted; how long that took."""
    buffer = make_buffer(engine=engine, ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
    operation, epoch = operation_of(buffer, rank, name)
    turns, sent = Turns(buffer, "interrupted"), []
    if rank == 1:
        turns.wait()
        expect_late_peer(operation)
        buffer.destroy()
        return 0.0

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with handler(signal.SIGINT, signal.default_int_handler), after(0.5, send):
        with pytest.raises(KeyboardInterrupt):
            operation()
    where = f"in {name}, epoch {epoch}, " if engine == "cpu" else ".*"
    with pytest.raises(RuntimeError, match=f"gave up {where}by KeyboardInterrupt") as caught:
        operation()
    assert not isinstance(caught.value, ep.PeerTimeoutError)
    buffer.destroy()
    turns.reached()
    assert not mappings()
    return time.monotonic() - sent[0]


@WAITS
def test_a_keyboard_interrupt_ends_a_wait(pools, engine, ranks_per_node, name):
    assert pools(2).run(interrupt_by_keyboard, engine, ranks_per_node, name)[0] < SOON_S


def handle_signals_while_waiting(rank: int, ranks_per_node: int, name: str) -> int:
    """Rank 1 comes only after rank 0's handler has run three times in its wait, and all sums are right."""
    with make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S) as buffer:
        operation, _ = operation_of(buffer, rank, name)
        turns, handled = Turns(buffer, "handled"), threading.Semaphore(0)
        if rank == 1:
            turns.wait()
            operation()
            round_trip(buffer)
            return 0
        seen = []

        def send() -> None:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGUSR2)
                assert handled.acquire(timeout=LIMIT_S)
            turns.reached()

        def handle(*_) -> None:
            seen.append(time.monotonic())
            handled.release()

        with handler(signal.SIGUSR2, handle), after(0.3, send):
            operation()
        round_trip(buffer)
        return len(seen)


@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_an_operation_goes_on_after_a_signal_handler(pools, ranks_per_node, name):
    assert pools(2).run(handle_signals_while_waiting, ranks_per_node, name) == [3, 0]


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_a_signal_handler_may_destroy_the_buffer(rank: int, ranks_per_node: int) -> None:
    buffer = make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
    round_trip(buffer)
    turns = Turns(buffer, "destroyed")
    if rank == 0:
        with handler(signal.SIGUSR2, lambda *_: buffer.destroy()):
            with after(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR2)):
                with pytest.raises(RuntimeError, match="destroyed, by another thread or a signal handler"):
                    buffer.dispatch(*inputs(rank))
        assert buffer.is_destroyed and not mappings()
        turns.reached()
    else:
        turns.wait()
        buffer.destroy()


# ---- destroy() from another thread ----------------------------------------------------------------------------------


def destroy_a_waiting_buffer(rank: int, engine: str, ranks_per_node: int, name: str) -> float:
    """As a watchdog does; how long the waiting thread and the watchdog took."""
    buffer = make_buffer(engine=engine, ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
    operation, epoch = operation_of(buffer, rank, name)
    turns, times = Turns(buffer, "destroyed"), []
    if rank == 1:
        turns.wait()
        expect_late_peer(operation)
        buffer.destroy()
        return 0.0

    def destroy() -> None:
        times.append(time.monotonic())
        buffer.destroy()
        assert not mappings(), "destroy() returned before all was freed"
        times.append(time.monotonic())

    with after(0.5, destroy):
        where = f"while this thread was in {name}, epoch {epoch}" if engine == "cpu" else "destroyed"
        with pytest.raises((ValueError, RuntimeError), match=where) as caught:
            operation()
        ended = time.monotonic()
    assert not isinstance(caught.value, ep.PeerTimeoutError) and buffer.is_destroyed and len(times) == 2
    turns.reached()
    with pytest.raises(ValueError, match="given one that was destroyed"):
        operation()
    return (times[1] if engine == "cpu" else ended) - times[0]


@WAITS
def test_destroy_ends_another_threads_wait(pools, engine, ranks_per_node, name):
    assert pools(2).run(destroy_a_waiting_buffer, engine, ranks_per_node, name)[0] < SOON_S


def destroy_during_operations(rank: int, ranks_per_node: int) -> set[str]:
    """Twenty buffers, each destroyed at some moment of its operations."""
    seen = set()
    for i in range(20):
        buffer = make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
        with after(0.002 * i + 0.003 * rank, buffer.destroy):
            try:
                while True:
                    out = buffer.dispatch(*inputs(rank))
                    buffer.combine(outputs(rank, len(out.x)), out.handle)
            except (ValueError, RuntimeError) as error:
                seen.add(type(error).__name__)
                assert "destroy" in str(error), error
        assert buffer.is_destroyed and not mappings()
    return seen


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_destroy_at_any_moment_of_an_operation(pools, ranks_per_node):
    for seen in pools(2).run(destroy_during_operations, ranks_per_node):
        assert seen <= {"ValueError", "RuntimeError", "PeerTimeoutError"}


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_a_copy_is_destroyed_with_its_original(rank: int, ranks_per_node: int) -> None:
    buffer = make_buffer(ranks_per_node=ranks_per_node)
    twin = copy.copy(buffer)
    round_trip(twin)
    out = twin.dispatch(*inputs(rank))
    buffer.destroy()
    calls = (
        lambda: twin.dispatch(*inputs(rank)),
        lambda: twin.combine(out.x, out.handle),
        twin.check,
        twin.counters,
    )
    for call in calls:
        with pytest.raises(ValueError, match="buffer: given one that was destroyed, allowed: a living buffer"):
            call()
    twin.destroy()
    assert not mappings()
