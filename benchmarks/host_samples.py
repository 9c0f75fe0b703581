"""Samples of the host's stack: whose code runs while the host launches work for a GPU.

A signal looks at the stack from time to time. A sample stands for the time since the one before, because a signal waits
until a call in C returns; so a wait for the GPU counts for the line that waits. Looking takes some microseconds, which
no sample counts: files and names are found out later. An owner is that of the innermost function that is its own. Code
in C counts for the Python function that called it.
"""

from __future__ import annotations

import collections
import signal
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

OWNERS = {  # by the package
    "ep_dispatcher": "this dispatcher and its experts",
    "megatron": "Megatron",
    "transformer_engine": "Transformer Engine",
    "deep_ep": "DeepEP or HybridEP",
}
OTHERS = "others"
Place = tuple[str, str, int]  # file from its package on, function, line
Sample = tuple[float, list[Place]]  # seconds, and the stack from the innermost function on


class Sampler:
    """Notes the host's stack from time to time, inside ``with``. Only in the main thread, as signals go there."""

    def __init__(self, sample_us: int):
        self._wait = 1e-6 * sample_us
        self._before = 0.0
        self._is_on = False
        self._noted: list[tuple[float, list[tuple[CodeType, dict[str, Any], int]]]] = []
        signal.signal(signal.SIGALRM, self._note)

    def __enter__(self) -> None:
        self._is_on = True
        self._go_on()

    def __exit__(self, *_: object) -> None:
        self._is_on = False  # a signal may have come that is not noted yet
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _go_on(self) -> None:
        self._before = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, self._wait)  # once: the next signal never comes while this one is noted

    def _note(self, _: int, frame: FrameType | None) -> None:
        seconds, stack = time.perf_counter() - self._before, []
        while frame is not None:
            stack.append((frame.f_code, frame.f_globals, frame.f_lineno))
            frame = frame.f_back
        if self._is_on:
            self._noted.append((seconds, stack))
            self._go_on()

    @property
    def samples(self) -> list[Sample]:
        def place(code: CodeType, names: dict[str, Any], line: int) -> Place:
            return file_of(code, names), code.co_name, line

        return [(seconds, [place(*one) for one in stack]) for seconds, stack in self._noted]


def file_of(code: CodeType, names: dict[str, Any]) -> str:
    """Return the file of a module, from its package on. Folders around a package may have any names.

    names: the module's
    """
    module = names.get("__name__", "__main__")
    return Path(code.co_filename).name if module == "__main__" else f"{module.replace('.', '/')}.py"


def shares(samples: list[Sample], total: float) -> dict[str, dict[str, float]]:
    """Divide ``total`` by the samples: among owners, functions with what they call, and lines without."""
    owners, functions, lines = (collections.Counter[str]() for _ in range(3))
    for seconds, stack in samples:
        owners[next(filter(None, map(owner_of, stack)), OTHERS)] += seconds
        file, function, line = stack[0]
        lines[f"{file}:{line} {function}"] += seconds
        for place in {f"{file} {function}" for file, function, _ in stack}:
            functions[place] += seconds
    unit = total / (sum(seconds for seconds, _ in samples) or 1.0)
    named = dict(owners=owners, functions=functions, lines=lines)
    return {name: {key: n * unit for key, n in counter.most_common(200)} for name, counter in named.items()}


def owner_of(place: Place) -> str | None:
    """Return whose function it is, or None for PyTorch, Triton, and the benchmarks."""
    return OWNERS.get(place[0].partition("/")[0])
