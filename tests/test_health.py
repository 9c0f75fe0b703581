"""The health of an engine, without an engine: one operation at a time, one failure, one abort, one end."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock, call

import pytest

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
    health = Health(abort := Mock())
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
    health = Health(abort := Mock(side_effect=abort_fails))
    assert error_of(lambda: fail_inside(health, error)) is error
    for ask in (health.raise_if_ended, lambda: fail_inside(health, error)):
        later = error_of(ask)
        assert type(later) is RuntimeError
        assert f"in dispatch, epoch 3, by {type(error).__name__}: {error}" in str(later)
    assert abort.call_count == 1


@pytest.mark.parametrize("failed", [False, True])
def test_stop_frees_once_and_refuses_all(failed):
    calls = Mock()
    health = Health(calls.abort)
    if failed:
        health.end(lambda: RuntimeError("late"))
    for _ in range(2):
        health.stop(calls.interrupt, calls.free)
    assert calls.mock_calls == [call.abort(), call.free()] and health.ended
    for ask in (health.raise_if_ended, lambda: fail_inside(health, OSError())):
        later = error_of(ask)
        assert type(later) is ValueError and "one that was destroyed" in str(later)


class Waiter:
    """A thread inside an operation, which raises ``error`` (or returns) once it is let go; its outcome is ``left``."""

    def __init__(self, health: Health, error: Exception | None = None):
        self.inside, self.go, self.free, threads = threading.Event(), threading.Event(), Mock(), ThreadPoolExecutor(1)
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
    health = Health(abort := Mock())
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
    health = Health(Mock())
    waiter = Waiter(health)
    with ThreadPoolExecutor() as threads:
        stop = lambda: (health.stop(Mock(), waiter.free), waiter.free.call_count)  # noqa: E731
        stops = [threads.submit(stop) for _ in range(2)]
        waiter.go.set()
        assert [each.result(LONG_S) for each in stops] == [(None, 1)] * 2
    waiter.left.result(LONG_S)
