"""Commands as a user types them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_module(*command: str, timeout_s: float = 600) -> tuple[int, str, str]:
    """``python -m`` and ``command``, with the project importable: exit code, output, errors.

    When the time is up, or the test is interrupted, everything that it has started is killed.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    run, pipe = [sys.executable, "-m", *command], subprocess.PIPE
    with subprocess.Popen(run, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too
    return process.returncode, output, errors


def torchrun(num_ranks: int, *command: str, **options) -> tuple[int, str, str]:
    """``run_module`` on ``num_ranks`` ranks; ``command`` is a script or ``-m`` and a module, with its arguments."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    return run_module(*launcher, *command, **options)
