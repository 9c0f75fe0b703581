"""Finds nvcc. setup.py, the Makefile and the doctor ask here, so that all of them find the same one.

    python ep_dispatcher/tools/nvcc.py              prints its path; exit code 1 if a build has none
    python ep_dispatcher/tools/nvcc.py --install    first installs it in build/nvcc where that is of use

Others load this file by itself, so it imports the standard library alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# NVIDIA's packages on PyPI: nvcc without a CUDA toolkit. There is none of CUDA 12 among them. nvidia-cuda-nvcc requires
# the others (nvidia-cuda-runtime, nvidia-cuda-crt, nvidia-nvvm), but not the one with <cuda/std/...>.
PACKAGES = ("nvidia-cuda-nvcc==13.*", "nvidia-cuda-cccl==13.*")
OLDEST_DRIVER = 580  # that runs what CUDA 13 has built
# Where --install puts them: a folder of their own, as PyTorch pins versions of some of them.
FOLDER = Path(__file__).resolve().parents[2] / "build" / "nvcc"

PLACES = "PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda or the package nvidia-cuda-nvcc"
FIX = "pip install " + " ".join(f"'{package}'" for package in PACKAGES)
FIX += f" (for GPU drivers from {OLDEST_DRIVER} on), or install the CUDA toolkit (12.4 or newer)"


def find() -> str | None:
    """Return the path of nvcc, or None: from PATH, the variables, /usr/local/cuda, or a package, in this order."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", *_homes_of_packages()]
    paths = [shutil.which("nvcc"), *(shutil.which(os.path.join(home, "bin", "nvcc")) for home in homes if home)]
    return next((path for path in paths if path), None)


def find_for_build() -> str | None:
    """Return the path of the nvcc that a build takes: ``find()``, or None with EP_DISPATCHER_CUDA=0."""
    return None if os.environ.get("EP_DISPATCHER_CUDA", "").strip() == "0" else find()


def _homes_of_packages() -> list[str]:
    """Return the folders of CUDA that packages have made. Build isolation hides the environment's from sys.path."""
    folders = [FOLDER, *map(Path, (*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))]
    return [str(home) for folder in folders for home in sorted(folder.glob("nvidia/cu[0-9]*"))]


def is_useful() -> bool:
    """Return whether to install nvcc: where the CUDA engine is demanded, or a GPU and its driver can run it."""
    wanted = os.environ.get("EP_DISPATCHER_CUDA", "").strip()
    if wanted:
        return wanted == "1"
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True).stdout if shutil.which(query[0]) else ""
    gpus = re.findall(r"^(\d+)[.\d]*, *(\d+)\.(\d+)$", said, re.MULTILINE)
    if not any(_capability().runs_on((int(major), int(minor))) for _, major, minor in gpus):
        return False
    driver = int(gpus[0][0])
    if driver < OLDEST_DRIVER:
        say(
            f"no nvcc: install CUDA 12.4 or newer. PyPI's nvcc is for GPU drivers from {OLDEST_DRIVER} on, not {driver}"
        )
    return driver >= OLDEST_DRIVER


def _capability():
    path = Path(__file__).resolve().parents[1] / "capability.py"
    spec = importlib.util.spec_from_file_location("capability", path)
    assert spec is not None and spec.loader is not None  # for a file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install() -> None:
    """Install nvcc from PyPI if there is none and it is of use."""
    if find() or not is_useful():
        return
    say(f"installing nvcc from PyPI in {FOLDER} (130 MB), as there is none")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1"]
    if subprocess.run([*pip, "--target", str(FOLDER), *PACKAGES], stdout=sys.stderr).returncode:
        say(f"that failed, so the CUDA engine is not built. To get it: {FIX}")


def say(line: str) -> None:
    print(f"== {line}", file=sys.stderr)


def main() -> int:
    installs = sys.argv[1:] == ["--install"]
    if installs:
        install()
    path = find_for_build()
    if path:
        print(path)
    elif not installs:
        print("EP_DISPATCHER_CUDA=0" if find() else f"no nvcc in {PLACES}", file=sys.stderr)
    return 0 if path else 1


if __name__ == "__main__":
    sys.exit(main())
