"""Builds the compiled modules of ep_dispatcher. csrc/ uses no PyTorch, so neither does this file.

CC, CXX and CXXFLAGS choose compiler and further flags; MAX_JOBS bounds the files compiled at once.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

# No -march=native: a wheel has to run on any machine of its platform.
# Pybind11Extension adds -std=c++17 and -fvisibility=hidden.
COMPILE_FLAGS = ["-O3", "-fopenmp", "-Wall", "-Wextra"]
LINK_FLAGS = ["-fopenmp"]

# What a compiler must manage, each with the fix when it does not; the first failure is reported.
COMPILER_CHECKS = [
    ("compile C++17", "int main() { if constexpr (true) return 0; }", "install one: apt-get install g++"),
    ("use OpenMP", "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }", "use g++ (set CC and CXX)"),
    ("find Python.h", "#include <Python.h>\nint main() { return 0; }", "install it: apt-get install python3-dev"),
]


def files(*patterns):
    """Sorted, relative to this file: setuptools refuses absolute sources."""
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


class BuildExt(build_ext):
    def build_extensions(self):
        if not sys.platform.startswith("linux"):
            raise SystemExit(f"ep_dispatcher needs Linux (shared memory by memfd); this is {sys.platform}.")
        command = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)  # older setuptools have one
        self.check_compiler(command)
        version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
        print(f"ep_dispatcher build: Python {sys.version.split()[0]}, compiler {command[0]}: {version}")
        for ext in self.extensions:
            print(f"ep_dispatcher build: {ext.name} from {len(ext.sources)} files: {' '.join(ext.sources)}")
            print(f"ep_dispatcher build: {ext.name} flags: {' '.join(ext.extra_compile_args)}", flush=True)
        super().build_extensions()

    def check_compiler(self, command):
        includes = [f"-I{path}" for path in self.compiler.include_dirs]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "check.cpp")
            for what, text, fix in COMPILER_CHECKS:
                source.write_text(text + "\n")
                args = [*command, "-std=c++17", "-fopenmp", *includes, "-c", str(source), "-o", f"{folder}/check.o"]
                try:
                    result = subprocess.run(args, capture_output=True, text=True)
                    failed, reason = result.returncode != 0, result.stderr.strip()
                except OSError as error:
                    failed, reason = True, str(error)
                if failed:
                    raise SystemExit(f"ep_dispatcher: the compiler '{command[0]}' cannot {what}; {fix}\n{reason}")


def extensions():
    headers = files("csrc/common/*.h", "csrc/cpu/*.h")
    return [
        Pybind11Extension(
            "ep_dispatcher._C_cpu",
            files("csrc/bindings_cpu.cpp", "csrc/cpu/*.cpp", "csrc/common/*.cpp"),
            depends=headers,
            include_dirs=["csrc"],
            cxx_std=17,
            extra_compile_args=[*COMPILE_FLAGS],
            extra_link_args=[*LINK_FLAGS],
        )
    ]


def packages():
    """Package names and their folders; integrations/, a package, lies beside ep_dispatcher/ and is installed inside."""
    names, folders = find_packages(include=["ep_dispatcher", "ep_dispatcher.*"]), {}
    if Path("integrations/__init__.py").exists():
        inner = ["ep_dispatcher.integrations." + name for name in find_packages("integrations")]
        names += ["ep_dispatcher.integrations", *inner]
        folders["ep_dispatcher.integrations"] = "integrations"
    return {"packages": names, "package_dir": folders}


os.chdir(Path(__file__).resolve().parent)
ParallelCompile("MAX_JOBS").install()
setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt}, **packages())
