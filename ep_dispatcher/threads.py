"""Calls of PyTorch in threads of their own, with a limit, and the end of threads before Python's.

A call to a store whose host hangs never returns. While a thread waits in one, Python's signal handlers run in another.

When Python ends, it lets daemon threads run on, and ends each where it comes back from a call into C++. The destructors
there do not stand that: the process aborts ("terminate called without an active exception"). So every such thread of
this package is started here, and ``atexit`` waits for it. It also waits for a thread of the user that is inside a call
of this package: not only until the call returns, since even freeing a tensor calls C++, but until the thread ends.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")

EXIT_S = 10.0  # how long the end of the process waits for the threads: some may never end

_threads: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object] | None] = weakref.WeakKeyDictionary()
_ending = False


class StoreHangs(TimeoutError):
    """A call to the store, or one that needs it, did not return."""


def start(run: Callable[[], object], name: str, stop: Callable[[], object] | None = None) -> threading.Thread:
    """Call ``run`` in a thread that the end of the process waits for, after ``stop()``."""
    thread = threading.Thread(target=run, daemon=True, name=f"ep_dispatcher {name}")
    _threads[thread] = stop
    thread.start()
    return thread


def await_at_exit(thread_id: int) -> Callable[[], object]:
    """Let the end of the process wait for a thread of the user. Return a function that takes this back."""
    for thread in threading.enumerate():
        if thread.ident == thread_id and thread not in _threads and not isinstance(thread, threading._DummyThread):  # noqa: SLF001
            _threads[thread] = None
            return partial(_threads.pop, thread, None)
    return lambda: None  # it is waited for already, or C++ has started it, and Python cannot wait for it


def in_thread(call: Callable[[], T], limit_s: float) -> T:
    """Return what ``call`` returns in a thread of its own; StoreHangs after ``limit_s``."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # the caller raises it
            errors.append(error)

    start(run, "call").join(limit_s)
    if errors:
        raise errors.pop()
    if not results:
        raise StoreHangs(f"torch.distributed, or the host of its store, did not answer in {limit_s:.1f} s")
    return results.pop()


def raise_if_ending() -> None:
    """Raise StoreHangs if the process ends: a thread with many calls calls this before each of them."""
    if _ending:
        raise StoreHangs("the process ends")


@atexit.register
def _wait_for_all() -> None:
    global _ending
    _ending, end = True, time.monotonic() + EXIT_S
    for thread in _living():
        stop = _threads.get(thread)
        if stop is not None:
            stop()
    while (living := _living()) and (left := end - time.monotonic()) > 0:  # they may start others
        living[0].join(left)


def _living() -> list[threading.Thread]:
    refs = _threads.keyrefs()  # unlike an iterator, this stands it that other threads change the dictionary
    return [thread for ref in refs if (thread := ref()) is not None and thread.is_alive()]
