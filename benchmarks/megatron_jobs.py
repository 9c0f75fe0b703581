"""Jobs of Megatron-LM that benchmarks compare: how one is described and started, and what its log says.

Ranks of jobs without ep_dispatcher import this file too, so it imports nothing of the package.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = "ep_dispatcher.integrations.megatron"
# What pretrain_gpt.py prints in every --log-interval: "iteration 10/ 1500 | name: number | name: number | ...".
ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|(.*)")
ENTRY = re.compile(r"\s*([^|:]+): +([\d.Ee+-]+|nan|inf) \|")
MILLISECONDS, LOSS, NORM = "elapsed time per iteration (ms)", "lm loss", "grad norm"


@dataclass
class Job:
    name: str
    variables: dict[str, str]
    arguments: list[str]
    launcher: str | None  # the module that runs the script

    @classmethod
    def parse(cls, text: str) -> Job:
        name, colon, rest = text.partition(":")
        words = shlex.split(rest)
        variables = {}
        while words and re.fullmatch(r"\w+=.*", words[0]):
            variable, _, value = words.pop(0).partition("=")
            variables[variable] = value
        launcher = None
        if "ep_dispatcher" in words or any(name.startswith("EP_DISPATCHER_") for name in variables):
            launcher = LAUNCHER
        named = words[:1] == ["-m"]
        if named:
            launcher, words = " ".join(words[1:2]), words[2:]
        if not colon or not re.fullmatch(r"[\w.-]+", name) or (named and not launcher):
            allowed = "'NAME: [VARIABLE=VALUE ...] [-m MODULE] [ARGUMENT ...]'"
            raise argparse.ArgumentTypeError(f"it is {text!r}, but has to be {allowed}")
        return cls(name, variables, words, launcher)

    def environment(self, *folders: Path) -> dict[str, str]:
        """Return the variables of its processes: this process's, then its own, and the folders to import from.

        As for any script of Python, the folders come before PYTHONPATH. That of the job replaces this process's.
        """
        environment = os.environ | self.variables
        paths = [*map(str, folders), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def start(self, ranks: int, script: Path, arguments: list[str], log: Path) -> subprocess.Popen:
        """Start its ranks by torchrun in the folder of the script. ``arguments`` begin with the file that they run."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += ["-m", self.launcher] if self.launcher else []
        folder = script.resolve().parent
        with log.open("w") as output:
            return subprocess.Popen(
                command + arguments,
                env=self.environment(folder),
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM, which `timeout` sends, into SystemExit, so that ``finally`` ends the jobs: they would run on."""
    old = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def read_iterations(log: Path) -> Iterator[dict[str, float]]:
    """Yield the entries of each logged iteration by their names, and its number as "iteration".

    An iteration that was skipped has no losses.
    """
    for number, entries in ITERATION.findall(log.read_text(errors="replace")):
        yield {"iteration": int(number)} | {name: float(value) for name, value in ENTRY.findall(entries)}


@dataclass
class StepTime:
    """Milliseconds of a job's step, in the last iterations of its runs."""

    medians: list[float]  # of each run
    low: float  # 10th percentile of all runs together
    high: float  # 90th percentile

    @classmethod
    def of(cls, runs: list[list[float]], last: int) -> StepTime:
        """``runs``: milliseconds of the iterations of each run, at least one."""
        kept = [run[-last:] for run in runs]
        every = sorted(milliseconds for run in kept for milliseconds in run)
        cut = len(every) // 10
        return cls([statistics.median(run) for run in kept], every[cut], every[-1 - cut])

    @property
    def median(self) -> float:
        return statistics.median(self.medians)
