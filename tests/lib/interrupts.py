"""Signals to this process at a chosen time."""

import os
import signal
import threading
from contextlib import contextmanager


@contextmanager
def handler(number: int, function):
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def after(seconds: float, function):
    """Call the function in another thread, and join that."""
    timer = threading.Timer(seconds, function)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def interrupt_this_process() -> None:
    os.kill(os.getpid(), signal.SIGINT)
