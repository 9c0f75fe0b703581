"""Runs a program over a wire, in processes of its own."""

import subprocess
import sys

from lib.commands import ROOT, environment

LIMIT_S = 300


def run_wire(name: str, settings: dict[str, str], *args: int | str) -> None:
    """Run nvshmem_wire.py or nccl_wire.py: these libraries, and CUDA, read their settings once in a process."""
    command = [sys.executable, str(ROOT / f"tests/{name}_wire.py"), *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(**settings), timeout=LIMIT_S)
    print(result.stdout)  # pytest -s shows how long each part took
    assert result.returncode == 0 and result.stdout.endswith("all: right\n"), (result.stdout + result.stderr)[-5000:]
