"""nvcc is found wherever it may be, and `make` installs it only where it is of use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ep_dispatcher.tools import nvcc


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch, tmp_path):
    """No nvcc, no GPU and no switch; build/nvcc is a folder of the test."""
    exists = nvcc.shutil.which
    of_the_system = "/usr/local/cuda/bin/nvcc"
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: None if name == of_the_system else exists(name))
    monkeypatch.setattr(nvcc, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(nvcc.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH", "EP_DISPATCHER_CUDA"):
        monkeypatch.delenv(name, raising=False)


def test_places_and_their_order(monkeypatch, tmp_path):
    assert nvcc.find() is None
    package = program(tmp_path / "purelib/nvidia/cu13/bin/nvcc")
    assert nvcc.find() == str(package)
    own = program(tmp_path / "build/nvidia/cu13/bin/nvcc")
    assert nvcc.find() == str(own)
    for name in ("CUDA_PATH", "CUDA_HOME"):
        toolkit = program(tmp_path / name / "bin/nvcc")
        monkeypatch.setenv(name, str(tmp_path / name))
        assert nvcc.find() == str(toolkit)
    in_path = program(tmp_path / "bin/nvcc")
    assert nvcc.find() == str(in_path)


@pytest.mark.parametrize(
    "gpus, wanted, useful",
    [
        ([], "", False),
        ([], "1", True),
        (["580.65.06, 9.0"], "", True),
        (["580.65.06, 9.0"], "0", False),
        (["580.65.06, 8.0", "580.65.06, 10.3"], "", True),
        (["580.65.06, 8.9"], "", False),
        (["590.1, 12.0"], "", False),
        (["570.124.06, 9.0"], "", False),
        (["NVIDIA-SMI has failed"], "", False),
    ],
)
def test_it_is_installed_where_it_is_of_use(monkeypatch, tmp_path, capsys, gpus, wanted, useful):
    if gpus:
        program(tmp_path / "bin/nvidia-smi", *(f"echo '{gpu}'" for gpu in gpus))
    monkeypatch.setenv("EP_DISPATCHER_CUDA", wanted)
    run, pips = subprocess.run, []

    def installs(command, **options):
        if command[0] != sys.executable:
            return run(command, **options)
        pips.append(command)
        program(tmp_path / "build/nvidia/cu13/bin/nvcc")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(nvcc.subprocess, "run", installs)
    monkeypatch.setattr(sys, "argv", ["nvcc.py", "--install"])
    for _ in range(2):  # the second time it is there
        assert nvcc.main() == (0 if useful else 1)
    assert len(pips) == useful
    if useful:
        assert {"--target", str(tmp_path / "build"), *nvcc.PACKAGES} <= set(pips[0])
    said = capsys.readouterr()
    assert said.out.splitlines() == ([str(tmp_path / "build/nvidia/cu13/bin/nvcc")] * 2 if useful else [])
    assert ("570" in said.err and "install CUDA 12.4" in said.err) == (gpus == ["570.124.06, 9.0"])


def test_a_build_without_the_cuda_engine_has_none(monkeypatch, tmp_path, capsys):
    """`make` compares what it gets here, so this must be what a machine without nvcc gives."""
    path = program(tmp_path / "bin/nvcc")
    monkeypatch.setattr(sys, "argv", ["nvcc.py", "--install"])
    assert nvcc.find_for_build() == nvcc.find() == str(path) and nvcc.main() == 0
    monkeypatch.setenv("EP_DISPATCHER_CUDA", "0")
    assert nvcc.find_for_build() is None and nvcc.find() == str(path) and nvcc.main() == 1
    assert capsys.readouterr().out == f"{path}\n"


def test_a_failing_installation_says_how_to_get_it(monkeypatch, capfd):
    monkeypatch.setenv("EP_DISPATCHER_CUDA", "1")
    monkeypatch.setattr(nvcc, "PACKAGES", ("no-such-package-of-nvcc @ file:///nowhere/nvcc.whl",))
    monkeypatch.setattr(sys, "argv", ["nvcc.py", "--install"])
    assert nvcc.main() == 1
    assert nvcc.FIX in capfd.readouterr().err
    assert not os.path.exists(nvcc.FOLDER / "nvidia")
