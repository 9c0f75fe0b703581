"""Samples of the host's stack: whose code runs while the host launches work for a GPU.

A signal looks at the stack from time to time. A sample stands for the time since the one before, because a signal waits
until a call in C returns. An owner is that of the innermost function that is its own. Code in C counts for the Python
function that called it.
"""

from __future__ import annotations

import collections
import signal
import time
from pathlib import Path
from types import FrameType

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
        self._seconds = 1e-6 * sample_us
        self._before = 0.0
        self.samples: list[Sample] = []
        signal.signal(signal.SIGALRM, self._note)

    def __enter__(self) -> None:
        self._before = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, self._seconds, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _note(self, _: int, frame: FrameType | None) -> None:
        now, stack = time.perf_counter(), []
        while frame is not None:
            stack.append((file_of(frame), frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        self.samples.append((now - self._before, stack))
        self._before = now


def file_of(frame: FrameType) -> str:
    """Return the file of a frame's module, from its package on. Folders around a package may have any names."""
    module = frame.f_globals.get("__name__", "__main__")
    return Path(frame.f_code.co_filename).name if module == "__main__" else f"{module.replace('.', '/')}.py"


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
