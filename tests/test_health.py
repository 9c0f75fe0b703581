"""The health of an engine, without an engine: one operation at a time, one failure, one abort, one end."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock, call

import pytest

from ep_dispatcher.engines import health as health_module
from ep_dispatcher.engines.health import Health

LONG_S = 30.0  # nothing here waits so long, unless it fails


def error_of(ask) -> BaseException:
    with pytest.raises(BaseException) as caught:  # callers look at it
        ask()
    return caught.value


def fail_inside(health: Health, error: BaseException) -> None:
    with health.operation("dispatch") as operation:
        operation.name += ", epoch 3"
        raise error


def test_the_first_failure_stays_unless_it_is_replaced():
    """It is a new exception each time."""
    health = Health(abort := Mock(), LONG_S)
    for _ in range(3):
        with health.operation("dispatch"):
            assert not health.ended
    assert not abort.called
    health.end(lambda: RuntimeError("first"))
    health.end(lambda: RuntimeError("second"))
    errors = [error_of(health.raise_if_ended) for _ in range(2)]
    errors.append(error_of(lambda: fail_inside(health, MemoryError())))
    assert [str(error) for error in errors] == ["first"] * 3 and len(set(map(id, errors))) == 3
    health.end(lambda: RuntimeError("with the names"), replace=True)
    assert str(error_of(health.raise_if_ended)) == "with the names"
    assert health.ended and abort.call_count == 1


@pytest.mark.parametrize("abort_fails", [None, RuntimeError("CUDA error"), OSError("gone")])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory"), SystemExit(3)])
def test_an_exception_inside_ends_the_use(error, abort_fails):
    """An abort that fails hides nothing."""
    health = Health(abort := Mock(side_effect=abort_fails), LONG_S)
    assert error_of(lambda: fail_inside(health, error)) is error
    for ask in (health.raise_if_ended, lambda: fail_inside(health, error)):
        later = error_of(ask)
        assert type(later) is RuntimeError
        assert f"in dispatch, epoch 3, by {type(error).__name__}: {error}" in str(later)
    assert abort.call_count == 1


@pytest.mark.parametrize("failed", [False, True])
def test_stop_frees_once_and_refuses_all(failed):
    calls = Mock()
    health = Health(calls.abort, LONG_S)
    if failed:
        health.end(lambda: RuntimeError("late"))
    for _ in range(2):
        health.stop(calls.interrupt, calls.free)
    assert calls.mock_calls == [call.abort(), call.free()] and health.ended
    for ask in (health.raise_if_ended, lambda: fail_inside(health, OSError())):
        later = error_of(ask)
        assert type(later) is ValueError and "buffer was destroyed" in str(later)


class Waiter:
    """A thread inside an operation, which raises ``error`` (or returns) once it is let go; its outcome is ``left``."""

    def __init__(self, health: Health, error: Exception | None = None):
        self.inside, self.go, self.free = threading.Event(), threading.Event(), Mock()
        threads = ThreadPoolExecutor(1, "waiter")
        self.left = threads.submit(self.run, health, error)
        assert self.inside.wait(LONG_S)

    def run(self, health: Health, error: Exception | None) -> None:
        with health.operation("combine") as operation:
            operation.name += ", epoch 8"
            self.inside.set()
            assert self.go.wait(LONG_S)
            time.sleep(0.1)  # what is freed too early is freed now
            assert not self.free.called
            if error is not None:
                raise error


@pytest.mark.parametrize("error", [OSError("interrupted"), None])
def test_stop_interrupts_the_thread_inside_and_waits_for_it(error):
    """It may complete its operation all the same."""
    health = Health(abort := Mock(), LONG_S)
    waiter = Waiter(health, error)
    health.stop(waiter.go.set, waiter.free)
    seen = waiter.left.exception(LONG_S)
    assert waiter.free.call_count == abort.call_count == 1
    if error is None:
        assert seen is None
    else:
        assert type(seen) is RuntimeError and seen.__cause__ is error
        assert all(words in str(seen) for words in ("in combine, epoch 8", "destroyed, by another thread"))


def test_two_threads_that_stop_both_return_when_all_is_free():
    health = Health(Mock(), LONG_S)
    waiter = Waiter(health)
    with ThreadPoolExecutor() as threads:
        stop = lambda: (health.stop(Mock(), waiter.free), waiter.free.call_count)  # noqa: E731
        stops = [threads.submit(stop) for _ in range(2)]
        waiter.go.set()
        assert [each.result(LONG_S) for each in stops] == [(None, 1)] * 2
    waiter.left.result(LONG_S)


# ---- freeing that fails, and threads that do not leave --------------------------------------------------------------


def lost(*_) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("error", [OSError("interrupted"), None])
def test_an_error_of_freeing_reaches_the_thread_that_destroys(error):
    """It was raised in the thread inside, and then nobody woke the thread in stop(), which waited for ever.

    On a GPU every error that stays with the context does that, because freeing begins with a synchronisation.
    """
    health = Health(Mock(), LONG_S)
    waiter = Waiter(health, error)
    waiter.free.side_effect = lost
    with pytest.raises(RuntimeError, match="illegal memory access"):
        health.stop(waiter.go.set, waiter.free)
    seen = waiter.left.exception(LONG_S)
    assert seen is None if error is None else "destroyed, by another thread" in str(seen)
    health.stop(waiter.go.set, waiter.free)  # does nothing
    assert waiter.free.call_count == 1


def test_an_error_of_freeing_wakes_all_that_wait():
    """One of three threads gets it, and the others return."""
    health = Health(Mock(), LONG_S)
    waiter = Waiter(health)
    waiter.free.side_effect = lost
    with ThreadPoolExecutor() as threads:
        stops = [threads.submit(health.stop, Mock(), waiter.free) for _ in range(3)]
        while health._num_waiting < 3:
            time.sleep(0.01)
        waiter.go.set()
        errors = [each.exception(LONG_S) for each in stops]
    assert [str(each) for each in errors if each is not None] == [str(error_of(lost))]
    assert waiter.left.exception(LONG_S) is None and waiter.free.call_count == 1


@pytest.mark.parametrize("error", [MemoryError("no memory"), None])
def test_an_error_of_freeing_in_the_thread_inside(error, caplog):
    """As where a signal handler destroys. The error of the operation comes first, and the other one is logged."""
    health, free = Health(abort := Mock(), LONG_S), Mock(side_effect=lost)

    def run() -> None:
        with health.operation("dispatch"):
            health.stop(Mock(), free)
            assert not free.called
            if error is not None:
                raise error

    seen = error_of(run)
    assert free.call_count == abort.call_count == 1
    if error is None:
        assert "illegal memory access" in str(seen)
    else:
        assert seen.__cause__ is error and "illegal memory access" in caplog.text
    health.stop(Mock(), free)
    assert free.call_count == 1


def test_stop_frees_also_where_it_cannot_interrupt():
    """On a lost GPU the copy that interrupts fails. The thread inside finds the error too, and leaves."""
    health = Health(abort := Mock(), LONG_S)
    waiter = Waiter(health, OSError("lost"))

    def interrupt() -> None:
        waiter.go.set()
        lost()

    with pytest.raises(RuntimeError, match="illegal memory access"):
        health.stop(interrupt, waiter.free)
    assert waiter.free.call_count == abort.call_count == 1
    assert isinstance(waiter.left.exception(LONG_S), RuntimeError)


def test_freeing_that_is_interrupted_runs_again():
    """A KeyboardInterrupt in it left the memory for good."""
    health, free = Health(abort := Mock(), LONG_S), Mock(side_effect=[KeyboardInterrupt, None])
    with pytest.raises(KeyboardInterrupt):
        health.stop(Mock(), free)
    for _ in range(2):
        health.stop(Mock(), free)
    assert free.call_count == 2 and abort.call_count == 1


def test_stop_has_a_limit(monkeypatch):
    """A thread that never leaves, such as one in a call of the driver that hangs, held stop() for ever."""
    monkeypatch.setattr(health_module, "LEAVE_S", 0.2)
    health = Health(abort := Mock(), 0.1)
    waiter = Waiter(health)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"gave up after 0\.3 s\. Thread 'waiter_0' is still in combine, epoch 8"):
        health.stop(Mock(), waiter.free)
    assert time.monotonic() - begin < LONG_S / 2 and not waiter.free.called and not abort.called
    waiter.go.set()
    waiter.left.result(LONG_S)
    assert waiter.free.call_count == abort.call_count == 1  # in the thread that was inside
    health.stop(Mock(), waiter.free)
    assert waiter.free.call_count == 1


def test_stop_has_a_limit_while_another_thread_frees(monkeypatch):
    """Nor does anybody wait for that thread at the lock: an operation is refused at once."""
    monkeypatch.setattr(health_module, "LEAVE_S", 0.2)
    health, freeing, go = Health(Mock(), 0.1), threading.Event(), threading.Event()

    def free() -> None:
        freeing.set()
        assert go.wait(LONG_S)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(health.stop, Mock(), free)
        assert freeing.wait(LONG_S)
        with pytest.raises(RuntimeError, match="Another thread is still freeing"):
            health.stop(Mock(), free)
        health.end(lambda: RuntimeError("late"))
        assert "buffer was destroyed" in str(error_of(lambda: fail_inside(health, OSError())))
        assert not first.done()
        go.set()
        first.result(LONG_S)


def test_a_signal_handler_may_destroy_while_this_thread_frees():
    health, calls = Health(Mock(), LONG_S), []

    def free() -> None:
        calls.append("free")
        health.stop(Mock(), free)  # as a handler does between two lines here

    health.stop(Mock(), free)
    assert calls == ["free"]
