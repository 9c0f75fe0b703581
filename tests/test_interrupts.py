"""A waiting rank can be interrupted: by signals, whose handlers run at once, and by destroy() from another thread."""

import copy
import os
import signal
import threading
import time

import pytest
from conftest import exhaustive, on, on_ranks
from lib.faults import mappings, tell, wait_for
from lib.interrupts import after, handler, interrupt_this_process
from lib.round_trip import device, inputs, make_buffer, outputs, round_trip

import ep_dispatcher as ep

LIMIT_S = 60.0  # of the operations
SOON_S = 20.0  # on a machine under load; what is tested takes milliseconds
NUM_ROWS = 4096  # more than any rank receives


def operation_of(buffer: ep.Buffer, name: str):
    """One operation, as a call without arguments that waits for it, and its epoch."""
    rank = buffer.topology.rank
    given = inputs(rank, device=device(buffer))
    if name != "combine":
        rows = NUM_ROWS if name == "dispatch of fixed rows" else None
        return lambda: buffer.dispatch(*given, max_recv_rows=rows).event.synchronize(), 1
    out = buffer.dispatch(*given)
    y = outputs(rank, len(out.x), device=device(buffer))
    return lambda: buffer.combine(y, out.handle).event.synchronize(), 2


WAITS = pytest.mark.parametrize(
    "engine,ranks_per_node,name",
    [
        on("cpu", 2, "dispatch"),
        on("cpu", 1, "combine"),
        exhaustive("cpu", 2, "combine"),
        exhaustive("cpu", 1, "dispatch"),
    ]
    + [on("cuda", 2, name) for name in ("dispatch", "dispatch of fixed rows")],
)


def expect_late_peer(buffer: ep.Buffer, operation) -> None:
    """When rank 0 is gone, rank 1 does not wait for its limit."""
    wait_for(f"gone/{buffer.id}")
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as caught:
        for _ in range(2):  # rank 0 may have completed its part of the first
            operation()
    assert caught.value.late_ranks == (0,) and time.monotonic() - begin < SOON_S
    buffer.destroy()


# ---- signals --------------------------------------------------------------------------------------------------------


@WAITS
@on_ranks(2)
def test_a_keyboard_interrupt_ends_a_wait(rank, engine, ranks_per_node, name):
    """Rank 0 waits for rank 1 and is interrupted."""
    buffer = make_buffer(engine=engine, ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
    operation, epoch = operation_of(buffer, name)
    if rank == 1:
        return expect_late_peer(buffer, operation)
    begin = time.monotonic()
    with handler(signal.SIGINT, signal.default_int_handler), after(0.5, interrupt_this_process):
        with pytest.raises(KeyboardInterrupt):
            operation()
    where = f"in {name}, epoch {epoch}, " if engine == "cpu" else ".*"
    with pytest.raises(RuntimeError, match=f"gave up {where}by KeyboardInterrupt") as caught:
        operation()
    assert not isinstance(caught.value, ep.PeerTimeoutError)
    buffer.destroy()
    tell(f"gone/{buffer.id}")
    assert not mappings() and time.monotonic() - begin < SOON_S


@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_an_operation_goes_on_after_a_signal_handler(rank, ranks_per_node, name):
    """Rank 1 comes only after rank 0's handler has run three times in its wait, and all sums are right."""
    with make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S) as buffer:
        operation, _ = operation_of(buffer, name)
        handled = threading.Semaphore(0)

        def send() -> None:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGUSR2)
                assert handled.acquire(timeout=LIMIT_S)
            tell(f"handled/{buffer.id}")

        if rank == 0:
            with handler(signal.SIGUSR2, lambda *_: handled.release()), after(0.3, send):
                operation()
        else:
            wait_for(f"handled/{buffer.id}")
            operation()
        round_trip(buffer)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_a_signal_handler_may_destroy_the_buffer(rank: int, ranks_per_node: int) -> None:
    buffer = make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
    round_trip(buffer)
    if rank == 0:
        with handler(signal.SIGUSR2, lambda *_: buffer.destroy()):
            with after(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR2)):
                with pytest.raises(RuntimeError, match="destroyed, by another thread or a signal handler"):
                    buffer.dispatch(*inputs(rank))
        assert buffer.is_destroyed and not mappings()
        tell(f"gone/{buffer.id}")
    else:
        wait_for(f"gone/{buffer.id}")
        buffer.destroy()


# ---- destroy() from another thread ----------------------------------------------------------------------------------


@WAITS
@on_ranks(2)
def test_destroy_ends_another_threads_wait(rank, engine, ranks_per_node, name):
    """As a watchdog does."""
    buffer = make_buffer(engine=engine, ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
    operation, epoch = operation_of(buffer, name)
    if rank == 1:
        return expect_late_peer(buffer, operation)
    left: list[list[str]] = []

    def destroy() -> None:
        buffer.destroy()
        left.append(mappings())

    begin = time.monotonic()
    with after(0.5, destroy):
        where = f"while this thread was in {name}, epoch {epoch}" if engine == "cpu" else "destroyed"
        with pytest.raises((ValueError, RuntimeError), match=where) as caught:
            operation()
        ended = time.monotonic()
    assert (time.monotonic() if engine == "cpu" else ended) - begin < SOON_S
    assert left == [[]], "destroy() returned before all was freed"
    assert not isinstance(caught.value, ep.PeerTimeoutError) and buffer.is_destroyed
    tell(f"gone/{buffer.id}")
    with pytest.raises(ValueError, match="buffer was destroyed"):
        operation()


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_destroy_returns_where_freeing_fails(rank, ranks_per_node):
    """destroy() waited for ever for a thread that had left the operation: its own error of freeing had come between."""
    buffer = make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
    operation, _ = operation_of(buffer, "dispatch")
    if rank == 1:
        return expect_late_peer(buffer, operation)
    connections, errors = buffer._engine._connections, []

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def destroy() -> None:
        with pytest.raises(RuntimeError) as caught:
            buffer.destroy()
        errors.append(str(caught.value))
        buffer.destroy()  # does nothing

    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, after(0.5, destroy):
        patch.setattr(connections, "free", fail)
        with pytest.raises(RuntimeError, match="destroyed, by another thread"):
            operation()
        tell(f"gone/{buffer.id}")  # the abort comes before freeing, so rank 1 need not wait
    assert errors == ["CUDA error: an illegal memory access was encountered"]
    assert buffer.is_destroyed and time.monotonic() - begin < SOON_S
    connections.free()


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_destroy_at_any_moment_of_an_operation(rank, ranks_per_node):
    """Twenty buffers, each destroyed at some moment of its operations."""
    for i in range(20):
        buffer = make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
        with after(0.002 * i + 0.003 * rank, buffer.destroy):
            with pytest.raises((ValueError, RuntimeError), match="destroy") as caught:
                while True:
                    out = buffer.dispatch(*inputs(rank))
                    buffer.combine(outputs(rank, len(out.x)), out.handle)
        assert type(caught.value) in (ValueError, RuntimeError, ep.PeerTimeoutError)
        assert buffer.is_destroyed and not mappings()


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_a_copy_is_destroyed_with_its_original(rank: int, ranks_per_node: int) -> None:
    buffer = make_buffer(ranks_per_node=ranks_per_node)
    twin = copy.copy(buffer)
    round_trip(twin)
    out = twin.dispatch(*inputs(rank))
    buffer.destroy()
    operations = lambda: twin.dispatch(*inputs(rank)), lambda: twin.combine(out.x, out.handle)
    for call in (*operations, twin.check, twin.counters):
        with pytest.raises(ValueError, match="buffer was destroyed"):
            call()
    twin.destroy()
    assert not mappings()
