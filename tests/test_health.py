"""The health of an engine, without an engine: one operation at a time, one failure, one abort, one end."""

import threading
import time

import pytest

from ep_dispatcher.engines.health import Health

LONG_S = 30.0  # nothing here waits so long, unless it fails


class Aborts:
    """Counts how often this rank aborted."""

    def __init__(self, error: Exception | None = None):
        self.count, self.error = 0, error

    def run(self) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error


def error_of(call) -> BaseException:
    with pytest.raises(BaseException) as caught:  # callers look at it
        call()
    return caught.value


def fail_inside(health: Health, error: BaseException) -> None:
    with health.operation("dispatch") as operation:
        operation.name += ", epoch 3"
        raise error


def nothing() -> None:
    pass


def refused(health: Health) -> str:
    """What a thread is told that begins an operation."""
    error = error_of(lambda: fail_inside(health, OSError()))
    assert type(error) is ValueError
    return str(error)


def test_a_healthy_buffer_goes_on():
    aborts = Aborts()
    health = Health(aborts.run)
    for _ in range(3):
        health.raise_if_ended()
        with health.operation("dispatch"):
            assert not health.ended
    assert not health.ended and aborts.count == 0


def test_the_first_failure_stays_unless_it_is_replaced():
    """It is a new exception each time."""
    aborts = Aborts()
    health = Health(aborts.run)
    health.end(lambda: RuntimeError("first"))
    health.end(lambda: RuntimeError("second"))
    errors = [error_of(health.raise_if_ended) for _ in range(2)]
    errors.append(error_of(lambda: fail_inside(health, MemoryError())))
    assert [str(error) for error in errors] == ["first"] * 3 and len(set(map(id, errors))) == 3
    health.end(lambda: RuntimeError("with the names"), replace=True)
    assert str(error_of(health.raise_if_ended)) == "with the names"
    assert health.ended and aborts.count == 1


@pytest.mark.parametrize("abort", [None, RuntimeError("CUDA error"), OSError("gone")])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory"), SystemExit(3)])
def test_an_exception_inside_ends_the_use(error, abort):
    """An abort that fails hides nothing."""
    aborts = Aborts(abort)
    health = Health(aborts.run)
    assert error_of(lambda: fail_inside(health, error)) is error
    for ask in (health.raise_if_ended, lambda: fail_inside(health, error)):
        later = error_of(ask)
        assert type(later) is RuntimeError
        assert f"in dispatch, epoch 3, by {type(error).__name__}: {error}" in str(later)
    assert aborts.count == 1


@pytest.mark.parametrize("failed", [False, True])
def test_stop_frees_once_and_refuses_all(failed):
    aborts, freed = Aborts(), []
    health = Health(aborts.run)
    if failed:
        health.end(lambda: RuntimeError("late"))
    for _ in range(2):
        assert health.stop(nothing, lambda: freed.append(aborts.count))
    assert freed == [1] and aborts.count == 1 and health.ended  # the abort first
    assert "one that was destroyed" in refused(health) and type(error_of(health.raise_if_ended)) is ValueError


class Waiter:
    """A thread inside an operation, which raises ``error`` (or returns) once it is let go."""

    def __init__(self, health: Health, error: Exception | None):
        self.health, self.error, self.seen, self.freed_inside = health, error, None, None
        self.inside, self.go = threading.Event(), threading.Event()
        self.freed: list[float] = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        assert self.inside.wait(LONG_S)

    def run(self) -> None:
        try:
            with self.health.operation("combine") as operation:
                operation.name += ", epoch 8"
                self.inside.set()
                assert self.go.wait(LONG_S)
                time.sleep(0.1)  # what is freed too early is freed now
                self.freed_inside = list(self.freed)
                if self.error is not None:
                    raise self.error
        except Exception as error:
            self.seen = error

    def free(self) -> None:
        self.freed.append(time.monotonic())


@pytest.mark.parametrize("error", [OSError("interrupted"), None])
def test_stop_interrupts_the_thread_inside_and_waits_for_it(error):
    """It may complete its operation all the same."""
    aborts = Aborts()
    health = Health(aborts.run)
    waiter = Waiter(health, error)
    assert health.stop(waiter.go.set, waiter.free)
    waiter.thread.join()
    assert len(waiter.freed) == 1 and waiter.freed_inside == [] and aborts.count == 1
    if error is None:
        assert waiter.seen is None
        return
    assert type(waiter.seen) is RuntimeError and waiter.seen.__cause__ is error
    assert all(words in str(waiter.seen) for words in ("in combine, epoch 8", "destroyed, by another thread"))


def test_two_threads_that_stop_both_return_when_all_is_free():
    health = Health(nothing)
    waiter = Waiter(health, None)
    seen = []
    stops = [
        threading.Thread(target=lambda: seen.append((health.stop(nothing, waiter.free), len(waiter.freed))))
        for _ in range(2)
    ]
    for thread in stops:
        thread.start()
    waiter.go.set()
    for thread in (*stops, waiter.thread):
        thread.join()
    assert seen == [(True, 1)] * 2


def test_a_thread_that_never_leaves_frees_when_it_does():
    health = Health(nothing)
    waiter = Waiter(health, None)
    assert not health.stop(nothing, waiter.free, timeout_s=0.05)
    assert waiter.freed == []
    waiter.go.set()
    waiter.thread.join()
    assert len(waiter.freed) == 1
