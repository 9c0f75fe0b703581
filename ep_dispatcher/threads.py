"""Calls of PyTorch in threads of their own, with a limit, and the end of these threads before Python's.

A call to a store whose host hangs never returns. While a thread waits in one, Python's signal handlers run in another.

When Python ends, it lets daemon threads run on, and ends each where it comes back from a call into C++. The destructors
there do not stand that: the process aborts ("terminate called without an active exception"). So every such thread of
this package is started here, and ``atexit`` waits for it.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

EXIT_S = 10.0  # how long the end of the process waits for the threads: a call to a host that hangs may never return

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
    for stop in list(_threads.values()):
        if stop is not None:
            stop()
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
