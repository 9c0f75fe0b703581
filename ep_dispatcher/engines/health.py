"""Health of an engine: one operation at a time, the end of the buffer's use, and destroy() during an operation."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from ep_dispatcher import checks, threads

LOOK_S = 1.0  # how often a watching thread looks


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
                    checks.fail("buffer", "while another thread is in an operation on it", "one at a time")
                health._inside = self  # noqa: SLF001
            # Check again: from here on nothing is freed before this operation leaves.
            health.raise_if_ended(suspended=self.suspended, ended=self.ended)
            return self
        except BaseException:  # it is raised again
            health._leave(self)  # noqa: SLF001
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._health._end_inside(self, error)  # noqa: SLF001
        finally:
            self._health._leave(self)  # noqa: SLF001


class Health:
    """Let one operation run at a time, remember the failure that ended the buffer's use, and abort once.

        health = Health(abort)
        with health.operation("dispatch"):   # ValueError while another one runs; any exception ends the buffer's use
            ...
        health.raise_if_ended()              # raises that failure, a new exception each time
        health.stop(interrupt, free)         # destroy(): free() once nobody is inside

    While ``suspended`` is set, operations are refused, except those for a suspended buffer.

    ``abort()`` ends the peers' waits for this rank. It is called once, when the buffer's use ends. Its own errors are
    dropped, so that the caller sees the failure; the peers then wait until their limit. The thread that is inside calls
    it, or any thread if none is inside, so it needs no lock. It should not refer to the engine. Otherwise memory of a
    buffer that is dropped without destroy() would stay until the next garbage collection.

    Python's signal handlers may run between any two lines here, and may call destroy(). So the lock is reentrant, and
    an operation first enters, then checks for the end.
    """

    def __init__(self, abort: Callable[[], None]):
        self._abort = abort
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._failure: Callable[[], Exception] | None = None  # makes the error that ended the use of the buffer
        self._aborted = False
        self._inside: Operation | None = None
        self.is_stopped = False  # the buffer is destroyed, or about to be
        self.suspended = False
        self._free: Callable[[], None] | None = None  # until it has run

    @property
    def ended(self) -> bool:
        """Return whether the buffer can only be destroyed, or is destroyed."""
        return self.is_stopped or self._failure is not None

    @property
    def is_busy(self) -> bool:
        """Return whether a thread is inside an operation."""
        return self._inside is not None

    def raise_if_ended(self, *, suspended: bool = False, ended: bool = False) -> None:
        """Raise if the buffer has ended (unless ``ended``), or if it is suspended and should not be, or vice versa."""
        if os.getpid() != self._pid:
            checks.fail("buffer", "one in a forked child of the process that made it", "a buffer of this process")
        if self.is_stopped:
            checks.fail("buffer", "one that was destroyed", "a living buffer")
        failure = self._failure
        if failure is not None and not ended:
            raise failure()
        if self.suspended and not suspended:
            checks.fail("buffer", "one that is suspended", "a buffer after resume()")
        if suspended and not self.suspended:
            checks.fail("buffer", "one that is not suspended", "a buffer after suspend()")

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
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self.is_stopped:
                self.is_stopped, self._free = True, free
            inside = self._inside
            if inside is not None:
                interrupt()
                if inside.thread != threading.get_ident():
                    if not threading.main_thread().is_alive():  # the process ends
                        threads.await_at_exit(inside.thread)
                    self._changed.wait_for(lambda: self._inside is None)
            if self._inside is None:
                self._release()

    def _end_inside(self, operation: Operation, error: BaseException) -> None:
        """End the buffer's use after an error inside an operation: for the others this rank is late now."""
        text = f"this buffer gave up in {operation.name}, by {type(error).__name__}: {error}; destroy() it"
        self.end(partial(RuntimeError, text))
        if self.is_stopped and isinstance(error, Exception):
            raise RuntimeError(
                "this buffer was destroyed, by another thread or a signal handler, while this thread was in "
                f"{operation.name}"
            ) from error

    def _leave(self, operation: Operation) -> None:
        if self._inside is not operation:  # it never entered; a forked child must not take the lock
            return
        with self._lock:
            self._inside = None
            if self.is_stopped:  # only then does a thread wait for this
                if self._free is not None:
                    self._release()
                self._changed.notify_all()

    def _release(self) -> None:
        """Abort and free, with the lock held and nobody inside."""
        if self._free is not None:
            self._abort_once()
        free, self._free = self._free, None  # only now: after an exception in the abort the next call does both
        if free is not None:
            free()

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
