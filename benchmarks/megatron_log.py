"""Reads iterations from the output of Megatron-LM's pretrain_gpt.py with --log-interval 1."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([\d.E+-]+)")


class Iteration(NamedTuple):
    number: int  # from 1
    ms: float
    loss: float


def iterations(log: Path) -> list[Iteration]:
    """Return the iterations of a log, in its order."""
    found = LINE.findall(log.read_text(errors="replace"))
    return [Iteration(int(number), float(ms), float(loss)) for number, ms, loss in found]
