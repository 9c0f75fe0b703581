"""An installation that cannot be used says what is wrong and what to do, and the doctor starts in it."""

import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ep_dispatcher

PACKAGE = Path(ep_dispatcher.__file__).parent
MODULE = f"_C_cpu{importlib.machinery.EXTENSION_SUFFIXES[0]}"
FOR_ANOTHER_PYTHON = "_C_cpu.cpython-27-x86_64-linux-gnu.so"
WORKS = ("-c", "import ep_dispatcher; print(ep_dispatcher.__file__)")


@pytest.fixture
def installation(tmp_path):
    """``installation(name, module, content)``: a folder with the package and a compiled module, its own or another."""

    def make(name: str, module: str = "", content: bytes | None = None, is_checkout: bool = False) -> Path:
        package = tmp_path / name / "ep_dispatcher"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        if module:
            (package / module).write_bytes((PACKAGE / MODULE).read_bytes() if content is None else content)
        if is_checkout:
            (package.parent / "setup.py").touch()
        return package.parent

    return make


def python(*command: str, cwd: Path, installed: Path | None = None) -> subprocess.CompletedProcess:
    """Run Python in a folder, which it looks into first; then into that of ``installed``."""
    env = os.environ | {"PYTHONPATH": str(installed or "")}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=180)


def findings(*command: str, cwd: Path, installed: Path | None = None) -> dict[str, dict]:
    """What the doctor finds where no Buffer can be made, by name."""
    result = python(*command, "--json", "--no-run", cwd=cwd, installed=installed)
    assert result.returncode == 1 and not result.stderr, result.stderr
    report = json.loads(result.stdout)
    assert report["used"]["engine"].startswith("none")
    return {finding["what"]: finding for finding in report["findings"]}


def check(cwd: Path, found: str, fix: str, installed: Path | None = None) -> None:
    """An import, the doctor as a module and the doctor as a file say the same."""
    result = python(*WORKS, cwd=cwd, installed=installed)
    assert result.returncode != 0 and found in result.stderr and fix in result.stderr, result.stderr
    for command in (("-m", "ep_dispatcher.doctor"), ("ep_dispatcher/tools/doctor.py",)):
        finding = findings(*command, cwd=cwd, installed=installed)["compiled module cpu"]
        assert finding["state"] == "error" and found in finding["found"] and fix in finding["fix"]


@pytest.mark.exhaustive
def test_sources_that_hide_an_installed_package(installation):
    """As after `pip install .` in the checkout. Elsewhere the installed package works."""
    sources, installed = installation("sources", is_checkout=True), installation("installed", MODULE)
    check(sources, f"hides the package that is installed in {installed}", "start Python in another folder", installed)
    (sources.parent / "elsewhere").mkdir()
    result = python(*WORKS, cwd=sources.parent / "elsewhere", installed=installed)
    assert result.returncode == 0 and result.stdout.startswith(str(installed)), result.stderr


def test_sources_that_are_not_built(installation):
    check(installation("sources", is_checkout=True), "not built", "make setup, or pip install -e .")


@pytest.mark.exhaustive
def test_a_build_for_another_python(installation):
    sources = installation("sources", FOR_ANOTHER_PYTHON, is_checkout=True)
    check(sources, f"another Python than this {sys.version_info[0]}.{sys.version_info[1]}", "make setup")
    installed = installation("installed", FOR_ANOTHER_PYTHON)
    check(installed, FOR_ANOTHER_PYTHON, "pip install --force-reinstall")


def test_a_module_that_cannot_be_loaded(installation):
    sources = installation("sources", MODULE, b"no library", is_checkout=True)
    result = python(*WORKS, cwd=sources)
    assert result.returncode != 0 and "cannot be loaded here" in result.stderr and "make setup" in result.stderr
    finding = findings("-m", "ep_dispatcher.doctor", cwd=sources)["compiled module cpu"]
    assert finding["state"] == "error" and "ImportError" in finding["found"] and "make setup" in finding["fix"]


def test_other_programs_do_not_start_the_doctor(installation):
    result = python("-m", "ep_dispatcher.bench", cwd=installation("sources"))
    assert result.returncode != 0 and not result.stdout and "not built" in result.stderr
