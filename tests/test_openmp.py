"""The CPU engine takes the OpenMP library of PyTorch, whatever its name, and needs none."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ep_dispatcher import _C_cpu

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

# Loads the module without PyTorch, as it would be found out which library it takes.
WITHOUT_PYTORCH = f"""
import ctypes, importlib.util, sys
for library in sys.argv[1:]:
    ctypes.CDLL(library)
spec = importlib.util.spec_from_file_location("_C_cpu", {_C_cpu.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.openmp_library())
"""
FUNCTIONS = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"


def library(path: Path, *needs: Path, functions: tuple[str, ...] = ()) -> Path:
    """Compile a library of this name that has these functions, which do nothing, and needs other libraries."""
    source = path.with_suffix(".c")
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
    flags = ["-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-soname,{path.name}", f"-Wl,-rpath,{path.parent}"]
    subprocess.run(["cc", *flags, source, *needs, "-o", path], check=True)
    return path


def taken(*libraries: Path, **environment: str) -> str:
    """The OpenMP library that the module takes in a process that has loaded these, and not PyTorch."""
    command = [sys.executable, "-I", "-S", "-c", WITHOUT_PYTORCH, *map(str, libraries)]
    env = os.environ | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_a_process_has_one_openmp_library():
    code = "import ep_dispatcher; from ep_dispatcher import _C_cpu; print(_C_cpu.openmp_library()); "
    code += "print(open('/proc/self/maps').read())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    taken, _, maps = said.partition("\n")
    found = {os.path.realpath(path) for path in re.findall(r"\s(/\S*/lib(?:gomp|omp|iomp)\S*)$", maps, re.MULTILINE)}
    assert found == {os.path.realpath(taken)}


@needs_compiler
def test_a_library_with_a_name_of_its_own_is_found_through_pytorch(tmp_path):
    """As in PyTorch's wheels: only PyTorch's library needs it, and other modules do not see it."""
    openmp = library(tmp_path / "libgomp-0123abcd.so.1", functions=FUNCTIONS)
    torch = library(tmp_path / "libtorch_cpu.so", openmp)
    assert taken(torch) == str(openmp)


@needs_compiler
def test_without_an_openmp_library_there_is_one_thread(tmp_path):
    """The system's is hidden by one that lacks a function."""
    library(tmp_path / "libgomp.so.1", functions=FUNCTIONS[:2])
    assert taken(LD_LIBRARY_PATH=str(tmp_path)) == ""
