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
    package = Path(__file__).resolve().parents[2]

    def field(path: str, name: str) -> str:
        text = Path(path).read_text() if Path(path).exists() else ""
        found = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
        return found[1] if found else "unknown"

    def first_line(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=package, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"
        return done.stdout.partition("\n")[0] if done.returncode == 0 else "unknown"

    modules = {path.name.partition(".")[0]: path.read_bytes() for path in sorted(package.glob("_C_*.so"))}
    machine = {
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": field("/proc/meminfo", "MemTotal"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": first_line(os.environ.get("CXX", "c++"), "--version"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git_commit": build or first_line("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "modules": {name: hashlib.sha256(content).hexdigest()[:12] for name, content in modules.items()},
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
    }
    if machine["gpus"]:
        has_nccl = torch.distributed.is_nccl_available()
        machine["driver"] = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        machine["cuda"] = torch.version.cuda
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none"
    return machine
