"""Versions of NVSHMEM in one process, and whether IBGDA can serve: what is found and what is refused."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import exhaustive

from ep_dispatcher import nvshmem_library
from ep_dispatcher.nvshmem_library import IBGDA
from ep_dispatcher.tools import doctor

ROOT = Path(__file__).parents[1]
HOST = "libnvshmem_host.so.3"
LOOK = """
import ctypes, os, sys
from ep_dispatcher import nvshmem_library
module, *paths = sys.argv[1:]
libraries = [ctypes.CDLL(path) for path in paths]
if "later" in paths[-1]:
    os.remove(paths[-1])
print(nvshmem_library.loaded_versions())
print(nvshmem_library.one_version(module))
"""


@pytest.fixture
def library(tmp_path):
    """Build a host library of a version: what NVSHMEM's exports for it, or nothing."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")

    def build(folder: str, version: str | None) -> str:
        numbers = ", ".join(f"*{name} = {number}" for name, number in zip("abc", (version or "0.0.0").split(".")))
        name = "nvshmemx_vendor_get_version_info" if version else "nothing"
        source, path = tmp_path / f"{folder}.cpp", tmp_path / folder / "lib" / HOST
        source.write_text(f'extern "C" void {name}(int* a, int* b, int* c) {{ {numbers}; }}')
        path.parent.mkdir(parents=True)
        command = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{folder}-{HOST}", str(source), "-o", str(path)]
        subprocess.run(command, check=True, timeout=60)
        return str(path)

    return build


def built_with(version: str) -> str:
    return f"_C_nvshmem is built with NVSHMEM {version}"


@pytest.fixture
def look(tmp_path):
    def look(device: str, *paths: str) -> subprocess.CompletedProcess:
        module = tmp_path / "module"
        module.write_bytes(b"\x7fELF\0" + built_with(device).encode() + b"\0...")
        command = [sys.executable, "-c", LOOK, str(module), *paths]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    return look


def test_one_version_of_all_libraries(library, look):
    paths = library("ours", "3.4.5"), library("pytorch", "3.4.5"), library("old", None)
    found = look("3.4.5", *paths)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [str(dict(sorted(zip(paths, ("3.4.5", "3.4.5", "unknown"))))), "3.4.5"]


@pytest.mark.parametrize(
    "device,hosts", [("3.8.0", ["3.4.5"]), exhaustive("3.4.5", ["3.4.6"]), exhaustive("3.4.5", ["3.4.5", "3.8.0"])]
)
def test_a_mixture_is_refused_with_the_versions_and_the_fix(library, look, device, hosts):
    paths = [library(f"copy{i}", version) for i, version in enumerate(hosts)]
    found = look(device, *paths)
    error = found.stderr.splitlines()[-1]
    assert found.returncode != 0 and error.startswith(f"ValueError: NVSHMEM has device library {device} "), error
    assert all(f"{version} ({path})" in error for version, path in zip(hosts, paths)), error
    assert f"NVSHMEM_HOME={Path(paths[-1]).parents[1]} " in error


@pytest.mark.exhaustive
def test_what_has_no_version(library, look):
    """A library that was replaced since it was loaded, and a module of an older build."""
    found = look("3.4.5", library("later", "3.4.5"))
    assert found.returncode == 0 and "unknown" in found.stdout, found.stderr
    found = look("", library("pytorch", "3.4.5"))
    assert found.returncode != 0 and "of an older build" in found.stderr


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package of the doctor's, for a module of this test."""
    package = tmp_path / "ep_dispatcher"
    package.mkdir()
    shutil.copy(nvshmem_library.__file__, package)
    monkeypatch.setattr(doctor, "PACKAGE", package)
    monkeypatch.setattr(doctor.importlib.machinery, "EXTENSION_SUFFIXES", [".py", ".so"])
    return package


def doctors_finding() -> doctor.Finding:
    return next(probe for probe in doctor.PROBES if probe.what == "compiled module nvshmem").run()


def test_the_doctor_says_the_same(monkeypatch, package, library):
    """With a module of Python in place of the compiled one."""
    (package / "_C_nvshmem.py").write_text(f"'{built_with('3.4.5')}'")
    assert doctors_finding().found == "_C_nvshmem.py, NVSHMEM 3.4.5"
    monkeypatch.setenv("LD_PRELOAD", library("pytorch", "3.8.0"))
    finding = doctors_finding()
    assert finding.state == "optional" and "ValueError: NVSHMEM has device library 3.4.5" in finding.found, finding


@pytest.mark.exhaustive
@pytest.mark.parametrize("variable", ["LD_PRELOAD", "LD_LIBRARY_PATH"])
def test_a_host_library_too_old_to_load_the_module(monkeypatch, package, library, variable):
    """NVSHMEM 3.4's lacks a variable that a module built with 3.8 needs."""
    source, module = package / "module.cpp", package / "_C_nvshmem.so"
    text = f'extern "C" {{ extern int lacking; const char kBuiltWith[] = "{built_with("3.8.0")}";'
    source.write_text(text + "void* PyInit__C_nvshmem() { lacking = 1; return nullptr; } }")
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(module)], check=True, timeout=60)
    assert doctors_finding().state == "optional" and "undefined symbol: lacking" in doctors_finding().found
    path = library("pytorch", "3.4.5")
    monkeypatch.setenv(variable, path if variable == "LD_PRELOAD" else str(Path(path).parent))
    found = doctors_finding().found
    assert "ValueError: NVSHMEM has device library 3.8.0" in found and "host library 3.4.5 " in found, found
    assert f"NVSHMEM_HOME={Path(path).parents[1]} " in found


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which IBGDA can serve."""
    for name in (IBGDA, "NVSHMEM_REMOTE_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    card = tmp_path / "sys/class/infiniband/rocep1"
    (card / "ports/1").mkdir(parents=True)
    (card / "ports/1/state").write_text("4: ACTIVE\n")
    (card / "device").mkdir()
    (tmp_path / "drivers/mlx5_core").mkdir(parents=True)
    (card / "device/driver").symlink_to(tmp_path / "drivers/mlx5_core")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    monkeypatch.setattr(nvshmem_library, "ctypes", SimpleNamespace(CDLL=lambda name: None))
    return SimpleNamespace(root=tmp_path, card=card, patch=monkeypatch)


def lose_the_driver(machine):
    (machine.root / "drivers/efa").mkdir()
    (machine.card / "device/driver").unlink()
    (machine.card / "device/driver").symlink_to(machine.root / "drivers/efa")


def lose_the_library(machine):
    machine.patch.setattr(nvshmem_library, "ctypes", ctypes)
    machine.patch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: not there")))


@pytest.mark.parametrize(
    "change,said",
    [
        (lambda machine: machine.patch.setenv(IBGDA, "0"), f"{IBGDA}=0 is set"),
        (lambda machine: machine.patch.setenv("NVSHMEM_REMOTE_TRANSPORT", "none"), "TRANSPORT=none is set"),
        (lambda machine: (machine.card / "ports/1/state").write_text("1: DOWN\n"), "active port"),
        (lose_the_driver, "mlx5_core"),
        (lambda machine: (machine.root / "dev/infiniband/uverbs0").unlink(), "uverbs"),
        (lose_the_library, "libmlx5.so.1: not there"),
    ],
)
def test_ibgda_stays_as_it_is(machine, change, said):
    assert nvshmem_library.ibgda_problem(machine.root) == ""
    change(machine)
    assert said in nvshmem_library.ibgda_problem(machine.root)
