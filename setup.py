"""Builds the compiled modules of ep_dispatcher. csrc/ uses no PyTorch, so neither does this file.

CC, CXX and CXXFLAGS choose compiler and further flags; MAX_JOBS bounds the files compiled at once. The CUDA module is
built when nvcc is found; EP_DISPATCHER_CUDA=1 demands it, EP_DISPATCHER_CUDA=0 leaves it out. NVCC_FLAGS adds flags.
The module for several hosts is built when NVSHMEM is found too, in NVSHMEM_HOME or as the package nvidia-nvshmem-cu13
(or cu12); EP_DISPATCHER_NVSHMEM is 1 or 0 likewise. EP_DISPATCHER_STAMPS=1 builds kernels that keep when their steps
end, for benchmarks/time_line.py.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

# No -march=native: a wheel has to run on any machine of its platform.
# Pybind11Extension adds -std=c++17 and -fvisibility=hidden.
# No product is fused with a sum: every machine rounds alike.
COMPILE_FLAGS = ["-O3", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wextra"]
LINK_FLAGS = ["-fopenmp"]
# nvcc compiles and links the whole module, so that it finds its own headers and libraries.
# Code for SM90, and PTX that the driver compiles for what is newer.
ARCHITECTURES = ["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_90,code=compute_90"]
NVCC_FLAGS = ["-O3", "-std=c++17", *ARCHITECTURES, "--expt-relaxed-constexpr", "-Xptxas=-v"]
NVCC_FLAGS += ["-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"]

# The NVSHMEM module links device code of another library. Functions are then compiled apart from the kernels that call
# them, so each has to keep to the registers that the launch bounds of the kernels leave.
NVSHMEM_FLAGS = ["-DEP_WIRE_NVSHMEM", "-rdc=true", "-maxrregcount=128"]

NO_NVCC = "no nvcc in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda"
NVCC_FAILED = "nvcc failed (above). EP_DISPATCHER_CUDA=0 builds without the CUDA engine; with it, a CUDA toolkit that "
NVCC_FAILED += "knows compute_90a and PTX 8.4 (12.4 or newer) is needed: set CUDA_HOME, or put its nvcc first in PATH."

# What a compiler must manage, each with the fix when it does not; the first failure is reported.
COMPILER_CHECKS = [
    ("compile C++17", "int main() { if constexpr (true) return 0; }", "install one: apt-get install g++"),
    ("use OpenMP", "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }", "use g++ (set CC and CXX)"),
    ("find Python.h", "#include <Python.h>\nint main() { return 0; }", "install it: apt-get install python3-dev"),
]


def files(*patterns):
    """Sorted, relative to this file: setuptools refuses absolute sources."""
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


def switch(name):
    """The value of a switch of the build: "", "0" or "1"."""
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise SystemExit(f"{name}: given {value!r}, allowed: 0, 1 or unset")
    return value


def stamp_flags():
    """Flags of nvcc for kernels with stamps (csrc/cuda/stamps.h); none for those without."""
    return ["-DEP_STAMPS"] if switch("EP_DISPATCHER_STAMPS") == "1" else []


def find_nvcc():
    """The path of nvcc, or None to build without the CUDA module."""
    wanted = switch("EP_DISPATCHER_CUDA")
    if wanted == "0":
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    paths = [shutil.which("nvcc"), *(shutil.which(os.path.join(home, "bin", "nvcc")) for home in homes if home)]
    found = next((path for path in paths if path), None)
    if wanted == "1" and found is None:
        raise SystemExit("EP_DISPATCHER_CUDA=1, but there is no nvcc; install the CUDA toolkit, or set CUDA_HOME")
    return found


def find_nvshmem():
    """The folder of NVSHMEM with include/ and lib/, or None to build without its module."""
    wanted = switch("EP_DISPATCHER_NVSHMEM")
    if wanted == "0" or find_nvcc() is None:
        return None
    folders = [os.environ.get("NVSHMEM_HOME")]
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
        folders += spec.submodule_search_locations if spec else []
    except ModuleNotFoundError:
        pass
    found = next((f for f in folders if f and Path(f, "include/nvshmem.h").exists()), None)
    if wanted == "1" and found is None:
        raise SystemExit(
            "EP_DISPATCHER_NVSHMEM=1, but there is no NVSHMEM; pip install nvidia-nvshmem-cu13, or set NVSHMEM_HOME"
        )
    return found


def nvshmem_link_flags(folder):
    """The library of the host is found at run time where it lies now, or where PyTorch has loaded it from."""
    lib = Path(folder, "lib")
    host = max(lib.glob("libnvshmem_host.so*"), key=lambda path: len(path.name)).name
    flags = [f"-L{lib}", "-lnvshmem_device", f"-l:{host}", "-Xlinker=--exclude-libs=libnvshmem_device.a"]
    return [*flags, f"-Xlinker=-rpath={lib}"]


def cccl_folders():
    """Where a CUDA toolkit of version 13 keeps <cuda/std/...>, which NVSHMEM's headers include."""
    home = Path(find_nvcc()).resolve().parent.parent
    return [str(path) for path in (home / "include/cccl", *home.glob("targets/*/include/cccl")) if path.is_dir()]


class BuildExt(build_ext):
    def build_extension(self, ext):
        if ext.name in (CUDA_MODULE, NVSHMEM_MODULE):
            self.build_cuda(ext)
        else:
            super().build_extension(ext)

    def build_cuda(self, ext):
        """Compiles every file and links the module, by nvcc; nothing when the module is newer than its sources.

        A file beside the objects marks a module with stamps. Where it does not fit, all is compiled again.
        """
        target = Path(self.get_ext_fullpath(ext.name))
        sources = [*ext.sources, *ext.depends, "setup.py"]
        folder = Path(self.build_temp, ext.name)
        stamped, mark = bool(stamp_flags()), folder / "stamps.txt"
        is_current = target.exists() and mark.exists() == stamped
        if not self.force and is_current and all(os.path.getmtime(s) < target.stat().st_mtime for s in sources):
            return
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        nvcc = [find_nvcc(), *NVCC_FLAGS, *ext.extra_compile_args, *shlex.split(os.environ.get("NVCC_FLAGS", ""))]
        if os.environ.get("CXX"):
            nvcc += ["-ccbin", shlex.split(os.environ["CXX"])[0]]
        includes = [f"-I{path}" for path in [*ext.include_dirs, *self.compiler.include_dirs]]
        objects = [str(folder / (Path(source).name + ".o")) for source in ext.sources]
        commands = [[*nvcc, *includes, "-c", source, "-o", to] for source, to in zip(ext.sources, objects)]
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(jobs) as pool:
            outputs = list(pool.map(self.run_nvcc, commands))
        (folder / "ptxas.txt").write_text("\n".join(outputs))  # registers and spills of every kernel
        self.run_nvcc([*nvcc, "-shared", *objects, *ext.extra_link_args, "-o", str(target)])
        if stamped:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    @staticmethod
    def run_nvcc(command):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            said = f"{' '.join(command)}\n{result.stdout}{result.stderr}".rstrip()
            raise SystemExit(f"{said}\n\nep_dispatcher: {NVCC_FAILED}")
        return result.stderr

    def build_extensions(self):
        if not sys.platform.startswith("linux"):
            raise SystemExit(f"ep_dispatcher needs Linux (shared memory by memfd); this is {sys.platform}.")
        command = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)  # older setuptools have one
        self.check_compiler(command)
        version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
        print(f"ep_dispatcher build: Python {sys.version.split()[0]}, compiler {command[0]}: {version}")
        if find_nvcc() is None:
            why = "EP_DISPATCHER_CUDA=0" if switch("EP_DISPATCHER_CUDA") == "0" else NO_NVCC
            print(f"ep_dispatcher build: without the CUDA engine: {why}")
        for ext in self.extensions:
            print(f"ep_dispatcher build: {ext.name} from {len(ext.sources)} files: {' '.join(ext.sources)}")
            flags = [*(NVCC_FLAGS if ext.name != CPU_MODULE else []), *ext.extra_compile_args]
            print(f"ep_dispatcher build: {ext.name} flags: {' '.join(flags)}", flush=True)
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


CPU_MODULE, CUDA_MODULE = "ep_dispatcher._C_cpu", "ep_dispatcher._C_cuda"
NVSHMEM_MODULE = "ep_dispatcher._C_nvshmem"


def extensions():
    headers = files("csrc/*.h", "csrc/common/*.h", "csrc/cpu/*.h")
    cpu = Pybind11Extension(
        CPU_MODULE,
        files("csrc/bindings_cpu.cpp", "csrc/cpu/*.cpp", "csrc/common/*.cpp"),
        depends=headers,
        include_dirs=["csrc"],
        cxx_std=17,
        extra_compile_args=[*COMPILE_FLAGS],
        extra_link_args=[*LINK_FLAGS],
    )
    if find_nvcc() is None:
        return [cpu]
    sources = files("csrc/bindings_cuda.cpp", "csrc/cuda/*.cpp", "csrc/cuda/*.cu")
    headers = files("csrc/*.h", "csrc/common/*.h", "csrc/cuda/*.h", "csrc/cuda/*.cuh")
    include_dirs = ["csrc", pybind11.get_include()]
    cuda = Extension(
        CUDA_MODULE,
        sources,
        depends=headers,
        include_dirs=include_dirs,
        extra_compile_args=stamp_flags(),
        language="c++",
    )
    folder = find_nvshmem()
    if folder is None:
        return [cpu, cuda]
    nvshmem = Extension(
        NVSHMEM_MODULE,
        [*sources, *files("csrc/nvshmem/*.cu")],
        depends=[*headers, *files("csrc/nvshmem/*.h")],
        include_dirs=[*include_dirs, f"{folder}/include", *cccl_folders()],
        extra_compile_args=[*NVSHMEM_FLAGS, *stamp_flags()],
        extra_link_args=nvshmem_link_flags(folder),
        language="c++",
    )
    return [cpu, cuda, nvshmem]


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
