"""Health of an engine: one operation at a time, the end of the buffer's use, and destroy() during an operation."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from ep_dispatcher import checks, threads

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # how often a watching thread looks
# A thread leaves an operation at the latest after the limit of the operation, and after so many seconds more, in which
# it finds out who is late and closes connections.
LEAVE_S = 10.0


def watch(look: Callable[[], bool], name: str) -> threading.Thread:
    """Call a method of an engine from time to time, in a thread, until it returns True or the engine is gone.

    Meanwhile the main thread may be waiting for the GPU.
    """
    thread = threading.Thread(target=_watch, args=(weakref.WeakMethod(look),), daemon=True, name=name)
    thread.start()
    return thread


def _watch(look_ref: Callable[[], Callable[[], bool] | None]) -> None:
    is_done = False
    while not is_done:
        time.sleep(LOOK_S)
        look = look_ref()
        is_done = look is None or look()
        del look  # this thread must not keep the engine alive


class Operation:
    """One operation, while a thread is inside. ``name`` is for errors; the engine may add the epoch.

    ``suspended``: only a suspended buffer allows it. ``ended``: a buffer that has ended allows it too.

    A class, because a generator with ``contextmanager`` takes the host twice as long.
    """

    __slots__ = ("name", "suspended", "ended", "thread", "_health")

    def __init__(self, health: Health, name: str, suspended: bool, ended: bool):
        self.name, self.suspended, self.ended, self._health = name, suspended, ended, health
        self.thread = threading.get_ident()

    def __enter__(self) -> Operation:
        health = self._health
        health.raise_if_ended(suspended=self.suspended, ended=self.ended)  # a forked child must not take the lock
        try:
            with health._lock:  # noqa: SLF001
                if health._inside is not None:  # noqa: SLF001
                    checks.refuse("buffer is in use by another thread: one operation at a time")
                health._inside = self  # noqa: SLF001
            # Check again: from here on nothing is freed before this operation leaves.
            health.raise_if_ended(suspended=self.suspended, ended=self.ended)
            return self
        except BaseException:  # it is raised again
            health._leave(self, failed=True)  # noqa: SLF001
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._health._end_inside(self, error)  # noqa: SLF001
        finally:
            self._health._leave(self, failed=error is not None)  # noqa: SLF001


class Health:
    """Let one operation run at a time, remember the failure that ended the buffer's use, and abort once.

        health = Health(abort, limit_s)
        with health.operation("dispatch"):   # ValueError while another one runs; any exception ends the buffer's use
            ...
        health.raise_if_ended()              # raises that failure, a new exception each time
        health.stop(interrupt, free)         # destroy(): free() once nobody is inside; waits no longer than limit_s

    While ``suspended`` is set, operations are refused, except those for a suspended buffer.

    ``abort()`` ends the peers' waits for this rank. It is called once, when the buffer's use ends. Its own errors are
    dropped, so that the caller sees the failure; the peers then wait until their limit. The thread that is inside calls
    it, or any thread if none is inside, so it needs no lock. It should not refer to the engine. Otherwise memory of a
    buffer that is dropped without destroy() would stay until the next garbage collection.

    Python's signal handlers may run between any two lines here, and may call destroy(). So the lock is reentrant, and
    an operation first enters, then checks for the end.
    """

    def __init__(self, abort: Callable[[], None], limit_s: float):
        self._abort = abort
        self._limit_s = limit_s  # of an operation
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a thread has left an operation, or has freed
        self._failure: Callable[[], Exception] | None = None  # makes the error that ended the use of the buffer
        self._aborted = False
        self._inside: Operation | None = None
        self.is_stopped = False  # the buffer is destroyed, or about to be
        self.suspended = False
        self._free: Callable[[], None] | None = None  # from stop() on, until it has run
        self._freeing: int | None = None  # the thread that runs it
        self._num_waiting = 0  # threads that wait until they may free

    @property
    def ended(self) -> bool:
        """Return whether the buffer can only be destroyed, or is destroyed."""
        return self.is_stopped or self._failure is not None

    @property
    def waits_to_be_freed(self) -> bool:
        """Return whether memory is still there and no thread is about to free it: stop() has not come so far."""
        return (not self.is_stopped or self._free is not None) and self._inside is None and self._freeing is None

    @property
    def is_busy(self) -> bool:
        """Return whether a thread is inside an operation."""
        return self._inside is not None

    def raise_if_ended(self, *, suspended: bool = False, ended: bool = False) -> None:
        """Raise if the buffer has ended (unless ``ended``), or if it is suspended and should not be, or vice versa."""
        if os.getpid() != self._pid:
            checks.refuse("buffer was made in the parent process and cannot be used after a fork: make a new one here")
        if self.is_stopped:
            checks.refuse("buffer was destroyed")
        failure = self._failure
        if failure is not None and not ended:
            raise failure()
        if self.suspended and not suspended:
            checks.refuse("buffer is suspended: call resume() first")
        if suspended and not self.suspended:
            checks.refuse("buffer is not suspended")

    def end(self, failure: Callable[[], Exception], *, replace: bool = False) -> None:
        """End the buffer's use and abort. The first failure stays, unless a later one comes with ``replace``."""
        with self._lock:
            if self._failure is None or replace:
                self._failure = failure
        self._abort_once()

    def recover(self) -> None:
        """Forget the failure: peers that an abort has signalled wait for this rank again."""
        with self._lock:
            self._failure, self._aborted = None, False

    def operation(self, name: str, *, suspended: bool = False, ended: bool = False) -> Operation:
        """Run one operation, and no other meanwhile. An exception ends the buffer's use."""
        return Operation(self, name, suspended, ended)

    def stop(self, interrupt: Callable[[], None], free: Callable[[], None]) -> None:
        """Refuse all further operations, make the one under way end, abort, and call ``free`` once.

        ``interrupt()`` must make the thread that is inside raise soon, wherever it waits. If it is this thread (a
        signal handler destroys the buffer), it frees when it leaves. A forked child frees nothing: its memory belongs
        to its parent.

        Errors of ``interrupt`` and ``free`` are raised here, whichever way the thread inside has left. If that thread
        does not leave within the limit of an operation and ``LEAVE_S``, this raises RuntimeError, and that thread frees
        when it leaves after all. At the end of the process the limit is ``threads.EXIT_S``.
        """
        if os.getpid() != self._pid:
            return
        this_thread, limit_s = threading.get_ident(), self._limit_s + LEAVE_S
        failure: Exception | None = None
        with self._lock:
            if not self.is_stopped:
                self.is_stopped, self._free = True, free
            inside = self._inside
            if inside is not None:
                if inside.thread != this_thread and not threading.main_thread().is_alive():  # the process ends
                    threads.await_at_exit(inside.thread)
                    limit_s = min(limit_s, threads.EXIT_S)
                try:
                    interrupt()  # with the lock held: what it needs is not freed meanwhile
                except Exception as error:  # a lost device, which the thread inside finds too: wait for it all the same
                    failure = error
                if inside.thread == this_thread:
                    if failure is not None:
                        raise failure
                    return
            # With the lock still held, so that the thread inside leaves freeing to this one.
            self._num_waiting += 1
        self._release(limit_s)
        if failure is not None:
            raise failure

    def _end_inside(self, operation: Operation, error: BaseException) -> None:
        """End the buffer's use after an error inside an operation: for the others this rank is late now."""
        text = f"this buffer gave up in {operation.name}, by {type(error).__name__}: {error}; destroy() it"
        self.end(partial(RuntimeError, text))
        if self.is_stopped and isinstance(error, Exception):
            raise RuntimeError(
                "this buffer was destroyed, by another thread or a signal handler, while this thread was in "
                f"{operation.name}"
            ) from error

    def _leave(self, operation: Operation, failed: bool) -> None:
        """Leave an operation, and free what stop() has left to this thread. failed: the operation raises an error."""
        if self._inside is not operation:  # it never entered; a forked child must not take the lock
            return
        with self._lock:
            self._inside = None
            if not self.is_stopped:  # the usual case
                return
            self._changed.notify_all()
            if self._num_waiting:  # a thread that waits in stop() frees, and raises the errors of that
                return
            self._num_waiting += 1
        try:
            self._release(self._limit_s + LEAVE_S)
        except Exception as error:  # of any kind, from a driver too
            if not failed:
                raise
            # The error of the operation says more than what follows from it.
            logger.error("ep_dispatcher: a destroyed buffer did not free all of its memory.", exc_info=error)

    def _release(self, limit_s: float) -> None:
        """Wait until no thread is inside or frees. Then abort and free, unless another thread has done it.

        The caller has added this thread to ``_num_waiting``. Raises RuntimeError after ``limit_s``.
        """
        this_thread, is_mine = threading.get_ident(), False

        def is_alone() -> bool:
            return self._inside is None and self._freeing in (None, this_thread)

        try:
            with self._lock:
                try:
                    comes_in_time = self._changed.wait_for(is_alone, limit_s)
                finally:
                    self._num_waiting -= 1
                if not comes_in_time:
                    raise RuntimeError(self._not_freed(limit_s))
                if self._free is None or self._freeing is not None:  # it is done; or a signal handler runs in `free`
                    return
                is_mine, self._freeing = True, this_thread
            # Without the lock, because this can take long, and other threads must not wait for the lock meanwhile.
            self._abort_once()
            self._run_free()
        finally:
            if is_mine:
                with self._lock:
                    self._freeing = None
                    self._changed.notify_all()

    def _run_free(self) -> None:
        """Call ``free`` once. After an interrupt in it, or in the abort before it, the next stop() does both again."""
        free = self._free
        if free is None:  # a signal handler has just done it
            return
        try:
            free()
        except Exception:  # it is raised again; freeing once more would fail again
            self._free = None
            raise
        self._free = None

    def _not_freed(self, limit_s: float) -> str:
        """Say what destroy() has waited for in vain, with the lock held."""
        if self._inside is not None:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            where = f"Thread {names.get(self._inside.thread, self._inside.thread)!r} is still in {self._inside.name}"
            return (
                f"destroy() gave up after {limit_s:.1f} s. {where}, although it was interrupted. When it leaves, it "
                "frees the memory of this buffer. Until then other ranks may wait for this one until their limits."
            )
        return f"destroy() gave up after {limit_s:.1f} s. Another thread is still freeing the memory of this buffer."

    def _abort_once(self) -> None:
        with self._lock:
            aborted, self._aborted = self._aborted, True
        if aborted:
            return
        try:
            self._abort()
        except Exception:  # a lost device, a store that is gone: no such error may hide the failure
            pass
        except BaseException:  # an interrupt: the next call aborts
            self._aborted = False
            raise
