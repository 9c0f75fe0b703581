"""The health of an engine, without an engine: one operation at a time, one failure, one abort, one end."""

import os
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


def test_a_healthy_buffer_goes_on():
    aborts = Aborts()
    health = Health(aborts.run)
    for _ in range(3):
        health.raise_if_ended()
        with health.operation("dispatch"):
            assert not health.ended
    assert not health.ended and aborts.count == 0


def test_a_failure_is_a_new_exception_each_time():
    aborts = Aborts()
    health = Health(aborts.run)
    health.end(lambda: RuntimeError("late"))
    errors = [error_of(health.raise_if_ended) for _ in range(2)]
    errors.append(error_of(lambda: fail_inside(health, MemoryError())))
    assert [str(error) for error in errors] == ["late"] * 3 and len(set(map(id, errors))) == 3
    assert health.ended and aborts.count == 1


def test_the_first_failure_stays_unless_it_is_replaced():
    aborts = Aborts()
    health = Health(aborts.run)
    health.end(lambda: RuntimeError("first"))
    health.end(lambda: RuntimeError("second"))
    assert str(error_of(health.raise_if_ended)) == "first"
    health.end(lambda: RuntimeError("with the names"), replace=True)
    assert str(error_of(health.raise_if_ended)) == "with the names"
    assert aborts.count == 1


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), OSError("gone")])
def test_an_abort_that_fails_hides_nothing(error):
    aborts = Aborts(error)
    health = Health(aborts.run)
    assert str(error_of(lambda: fail_inside(health, MemoryError("no memory")))) == "no memory"
    assert "no memory" in str(error_of(health.raise_if_ended)) and aborts.count == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory"), SystemExit(3)])
def test_an_exception_inside_ends_the_use(error):
    aborts = Aborts()
    health = Health(aborts.run)
    assert error_of(lambda: fail_inside(health, error)) is error
    text = f"this buffer gave up in dispatch, epoch 3, by {type(error).__name__}: {error}; destroy() it"
    for ask in (health.raise_if_ended, lambda: fail_inside(health, error)):
        later = error_of(ask)
        assert type(later) is RuntimeError and str(later) == text
    assert aborts.count == 1


def test_a_second_thread_is_refused_and_the_first_goes_on():
    aborts = Aborts()
    health = Health(aborts.run)
    with health.operation("dispatch"):
        refused = []
        thread = threading.Thread(target=lambda: refused.append(error_of(lambda: fail_inside(health, OSError()))))
        thread.start()
        thread.join()
        assert type(refused[0]) is ValueError
        text = "buffer: given while another thread is in an operation on it, allowed: one at a time"
        assert str(refused[0]) == text
        assert str(error_of(lambda: fail_inside(health, OSError()))) == text  # as a signal handler might
    with health.operation("combine"):
        pass
    assert not health.ended and aborts.count == 0


def test_stop_frees_once_and_refuses_all():
    aborts, freed = Aborts(), []
    health = Health(aborts.run)
    for _ in range(2):
        assert health.stop(nothing, lambda: freed.append(aborts.count))
    assert freed == [1] and aborts.count == 1 and health.ended  # the abort first
    for ask in (health.raise_if_ended, lambda: fail_inside(health, OSError())):
        error = error_of(ask)
        assert type(error) is ValueError
        assert str(error) == "buffer: given one that was destroyed, allowed: a living buffer"


def test_stop_after_a_failure_says_that_it_is_destroyed():
    aborts = Aborts()
    health = Health(aborts.run)
    health.end(lambda: RuntimeError("late"))
    health.stop(nothing, nothing)
    assert "one that was destroyed" in str(error_of(health.raise_if_ended)) and aborts.count == 1


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


def test_stop_interrupts_the_thread_inside_and_waits_for_it():
    aborts = Aborts()
    health = Health(aborts.run)
    waiter = Waiter(health, OSError("interrupted"))
    assert health.stop(waiter.go.set, waiter.free)
    assert len(waiter.freed) == 1 and waiter.freed_inside == [] and aborts.count == 1
    waiter.thread.join()
    assert type(waiter.seen) is RuntimeError and "in combine, epoch 8" in str(waiter.seen)
    assert "destroyed, by another thread" in str(waiter.seen) and waiter.seen.__cause__ is waiter.error


def test_stop_waits_for_a_thread_that_completes_its_operation():
    health = Health(nothing)
    waiter = Waiter(health, None)
    assert health.stop(waiter.go.set, waiter.free)
    waiter.thread.join()
    assert waiter.seen is None and waiter.freed_inside == [] and len(waiter.freed) == 1


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


def test_a_signal_handler_may_stop_the_operation_that_it_interrupts():
    aborts, freed = Aborts(), []
    health = Health(aborts.run)

    def interrupted() -> None:
        with health.operation("dispatch"):
            assert not health.stop(nothing, lambda: freed.append(1))
            assert freed == []
            raise OSError("interrupted")

    assert "destroyed, by another thread or a signal handler" in str(error_of(interrupted))
    assert freed == [1] and aborts.count == 1


def test_a_forked_child_has_no_buffer_and_frees_nothing():
    aborts, freed = Aborts(), []
    health = Health(aborts.run)
    with health.operation("dispatch"):  # another thread of the parent may be inside, and is not there in the child
        child = os.fork()
        if child == 0:
            error = error_of(lambda: fail_inside(health, OSError()))
            right = type(error) is ValueError and "forked child" in str(error)
            right = right and not health.stop(nothing, lambda: freed.append(1)) and not freed and not aborts.count
            os._exit(0 if right else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    health.raise_if_ended()
