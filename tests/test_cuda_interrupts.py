"""A host that waits for the CUDA engine can be interrupted, and a watchdog can free a rank that hangs."""

import os
import signal
import time

import pytest
from conftest import on
from round_trip import device, inputs, make_buffer
from test_interrupts import LIMIT_S, SOON_S, Turns, after, handler

import ep_dispatcher as ep

NUM_ROWS = 4096  # more than any rank receives
cuda = pytest.mark.parametrize("engine", [on("cuda")])


def expect_late_peer(buffer: ep.Buffer, given) -> None:
    """Rank 0 is gone: rank 1 is not to wait for its limit."""
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as caught:
        for _ in range(2):  # rank 0 may have completed its part of the first
            buffer.dispatch(*given, max_recv_rows=NUM_ROWS).event.synchronize()
    assert caught.value.late_ranks == (0,) and time.monotonic() - begin < LIMIT_S / 2
    buffer.destroy()


def interrupt_by_keyboard(rank: int, engine: str, counted: bool) -> float:
    """Rank 0 waits for rank 1 and is interrupted. Returns how long it takes to be free."""
    buffer = make_buffer(engine=engine, timeout_s=LIMIT_S)
    given, turns, sent = inputs(rank, device=device(buffer)), Turns(buffer, "interrupted"), []
    if rank == 1:
        turns.wait()
        expect_late_peer(buffer, given)
        return 0.0

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with handler(signal.SIGINT, signal.default_int_handler), after(0.5, send):
        with pytest.raises(KeyboardInterrupt):
            buffer.dispatch(*given, max_recv_rows=None if counted else NUM_ROWS).event.synchronize()
    with pytest.raises(RuntimeError, match="gave up .*by KeyboardInterrupt"):
        buffer.dispatch(*given)
    buffer.destroy()
    turns.reached()
    return time.monotonic() - sent[0]


@cuda
@pytest.mark.parametrize("counted", [True, False])
def test_a_keyboard_interrupt_ends_a_wait(pools, engine, counted):
    assert pools(2).run(interrupt_by_keyboard, engine, counted)[0] < SOON_S


def free_by_a_watchdog(rank: int, engine: str, counted: bool) -> float:
    """Another thread of rank 0 destroys the buffer that rank 0 waits with. Returns how long the wait goes on."""
    buffer = make_buffer(engine=engine, timeout_s=LIMIT_S)
    given, turns, called = inputs(rank, device=device(buffer)), Turns(buffer, "destroyed"), []
    if rank == 1:
        turns.wait()
        expect_late_peer(buffer, given)
        return 0.0

    def destroy() -> None:
        called.append(time.monotonic())
        buffer.destroy()

    with after(0.5, destroy):
        with pytest.raises((ValueError, RuntimeError), match="destroyed") as caught:
            buffer.dispatch(*given, max_recv_rows=None if counted else NUM_ROWS).event.synchronize()
        assert not isinstance(caught.value, ep.PeerTimeoutError)
        seconds = time.monotonic() - called[0]
    assert buffer.is_destroyed
    turns.reached()
    return seconds


@cuda
@pytest.mark.parametrize("counted", [True, False])
def test_a_watchdog_frees_a_rank_that_hangs(pools, engine, counted):
    assert pools(2).run(free_by_a_watchdog, engine, counted)[0] < SOON_S
