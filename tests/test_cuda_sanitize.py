"""compute-sanitizer on a small case: no access out of bounds, no hazard in shared memory, no wrong barrier."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from lib.commands import ROOT, environment

from ep_dispatcher import engines

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
pytestmark = [
    pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}"),
    pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer"),
]
TOOLS = {  # options, and what a tool says when it has found nothing
    # PyTorch asks CUDA for things that it may refuse, and goes on: these are no errors.
    "memcheck": (["--report-api-errors", "no"], "ERROR SUMMARY: 0 errors"),
    # In combine, warps hand rows to each other by an arrival of one lane behind __syncwarp, which the tool does not
    # follow: it reports every row, and most of that no more once every lane arrives for itself, which takes longer.
    "racecheck": (["--kernel-name", "regex=(dispatch|place)_kernel"], "RACECHECK SUMMARY: 0 hazards displayed"),
    # Barriers of a block: it finds too few by itself, because they lie in dynamic shared memory.
    "synccheck": (["--num-cuda-barriers", "1024"], "ERROR SUMMARY: 0 errors"),
}
LIMIT_S = 150
FIRST_RIGHT = {"racecheck": (2026, 4)}  # versions before it report races between warps that a named barrier orders


def version() -> tuple[int, ...]:
    said = subprocess.run([SANITIZER, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.search(r"Version (\d+)\.(\d+)", said).groups()))


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(1, 1), (2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_to_complain_about(tool, num_ranks, ranks_per_node, tmp_path):
    least = FIRST_RIGHT.get(tool, (0,))
    if version() < least:
        pytest.skip(f"{tool} of compute-sanitizer {version()} is not asked, of {least} it is")
    env = {"GLOO_SOCKET_IFNAME": "lo"} | environment()
    options, clean = TOOLS[tool]
    command = [SANITIZER, "--tool", tool, *options, sys.executable, str(ROOT / "tests/sanitize.py")]
    ranks, logs = [], [tmp_path / f"rank{rank}.log" for rank in range(num_ranks)]
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                output = dict(stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
                arguments = (str(rank), str(num_ranks), str(ranks_per_node), str(tmp_path / "meet"))
                ranks.append(subprocess.Popen([*command, *arguments], **output))
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.2)
        for rank, (process, log) in enumerate(zip(ranks, logs)):
            said = log.read_text()
            assert process.poll() is not None, f"still running after {LIMIT_S} s: {said[-3000:]}"
            assert process.returncode == 0 and f"rank {rank} of {num_ranks}: right" in said, said[-5000:]
            assert clean in said, said[:5000]
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
