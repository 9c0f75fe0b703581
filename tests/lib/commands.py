"""Commands as a user types them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**own: str) -> dict[str, str]:
    """The variables of a command: the tester's own ones win, and the project can be imported."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | own


def run_module(*command: str, timeout_s: float = 600) -> tuple[int, str, str]:
    """``python -m`` and ``command``, with the project importable: exit code, output, errors.

    When the time is up, or the test is interrupted, everything that it has started is killed.
    """
    run, pipe = [sys.executable, "-m", *command], subprocess.PIPE
    with subprocess.Popen(
        run, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True
    ) as process:
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


def compile_header(
    header: Path, program: str, folder: Path, *flags: str, empty: tuple[str, ...], change: tuple[str, str] | None = None
) -> Path:
    """Compile tests/`program`.cpp, which runs the text of a kernel's header on the CPU. Return where it lies.

    `change`: text of the header and what stands there instead. `empty`: headers in csrc/cuda that it includes, and that
    the program plays itself.
    """
    text = header.read_text()
    if change is not None:
        assert text.count(change[0]) == 1
        text = text.replace(*change)
    for path, content in {header: text, **{ROOT / "csrc/cuda" / name: "#pragma once\n" for name in empty}}.items():
        copy = folder / path.relative_to(ROOT / "csrc")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(content)
    built = folder / program
    sources = ["-I", folder, "-I", ROOT / "csrc", ROOT / "tests" / f"{program}.cpp", "-o", built]
    subprocess.run(["c++", "-std=c++17", *flags, *sources], check=True, timeout=300)
    return built
