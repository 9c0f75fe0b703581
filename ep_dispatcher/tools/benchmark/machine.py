"""Describes the machine of a benchmark, and formats its JSON."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
from pathlib import Path

import torch


def to_json(run: dict) -> str:
    """Return JSON, indented, but with a list of numbers on one line."""
    text = json.dumps(run, indent=1)
    return re.sub(r"\[[\d.eE+,\s-]+\]", lambda numbers: " ".join(numbers.group().split()), text) + "\n"


def describe_machine(build: str | None = None) -> dict:
    """``build``: name of the build, if git cannot tell it. "modules" has the compiled modules, by their hashes."""

    def field(path: str, name: str) -> str:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            return "unknown"
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")

    def first_line(*command: str, folder: Path | None = None) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        except OSError:
            return "unknown"
        return done.stdout.partition("\n")[0] if done.returncode == 0 else "unknown"

    package = Path(__file__).resolve().parents[2]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": field("/proc/meminfo", "MemTotal"),
        "gpus": gpus,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": first_line(os.environ.get("CXX", "c++"), "--version"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git_commit": build or first_line("git", "describe", "--always", "--dirty", "--abbrev=12", folder=package),
        "modules": {path.name.partition(".")[0]: _sha256(path) for path in sorted(package.glob("_C_*.so"))},
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
    }
    if gpus:
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        machine |= {"driver": first_line(*query), "cuda": torch.version.cuda, "nccl": _nccl_version()}
    return machine


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
