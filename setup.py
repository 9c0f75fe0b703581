"""Builds the compiled modules of ep_dispatcher. csrc/ uses no PyTorch, so neither does this file.

CC, CXX and CXXFLAGS choose compiler and further flags; MAX_JOBS bounds the files compiled at once. The CUDA module is
built when nvcc is found; EP_DISPATCHER_CUDA=1 demands it, EP_DISPATCHER_CUDA=0 leaves it out. NVCC_FLAGS adds flags,
and EP_DISPATCHER_CUDA_ARCHS="90;100" says for which GPUs; unset: for those here, and a wheel for all.
The module for several hosts is built when NVSHMEM is found too, in NVSHMEM_HOME or as the package nvidia-nvshmem-cu13
(or cu12); EP_DISPATCHER_NVSHMEM is 1 or 0 likewise. EP_DISPATCHER_STAMPS=1 builds kernels that keep when their steps
end, for benchmarks/time_line.py.
"""

import functools
import hashlib
import importlib.util
import os
import re
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
from setuptools.command.install_lib import install_lib

# No -march=native: a wheel has to run on any machine of its platform.
# Pybind11Extension adds -std=c++17 and -fvisibility=hidden.
# No product is fused with a sum: every machine rounds alike.
COMPILE_FLAGS = ["-O3", "-ffp-contract=off", "-Wall", "-Wextra"]
LINK_FLAGS = ["-ldl"]  # for a glibc older than 2.34
# nvcc compiles and links the whole module, so that it finds its own headers and libraries.
NVCC_FLAGS = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas=-v"]
NVCC_FLAGS += ["-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
# Kernels use no instruction that only one GPU has, so code for 90 runs on 9.x, that for 100 on 10.x (B200, B300), and
# PTX of the first on all that is newer: there the driver compiles it when a process first uses it. No code for 12.x,
# whose multiprocessors have too little shared memory.
ARCHITECTURES = ["90", "100"]
# But files with this suffix have code for 9.0 alone, and other GPUs never launch it.
HOPPER_SUFFIX, HOPPER_FLAGS = "_sm90a.cu", ["-gencode=arch=compute_90a,code=sm_90a"]

# The NVSHMEM module links device code of another library. Functions are then compiled apart from the kernels that call
# them, so each has to keep to the registers that the launch bounds of the kernels leave.
NVSHMEM_FLAGS = ["-DEP_WIRE_NVSHMEM", "-rdc=true", "-maxrregcount=128"]

# Variables that compilers read by themselves. All others are in their commands.
COMPILER_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")
NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")

# How long nvcc takes for a file on average, and for the longest one: 102 s for nineteen files in one process after the
# other, by nvcc 13.0 on an AMD EPYC (`time`, user).
NVCC_SECONDS, NVCC_LONGEST_SECONDS = 6, 20

NVCC_FAILED = "nvcc failed (above). EP_DISPATCHER_CUDA=0 builds without the CUDA engine; with it, a CUDA toolkit that "
NVCC_FAILED += "knows compute_90 and PTX 8.4 (12.4 or newer) is needed: set CUDA_HOME, or put its nvcc first in PATH."

# What a compiler must manage, each with the fix when it does not; the first failure is reported.
COMPILER_CHECKS = [
    ("compile C++17", "int main() { if constexpr (true) return 0; }", "install one: apt-get install g++"),
    ("find Python.h", "#include <Python.h>\nint main() { return 0; }", "install it: apt-get install python3-dev"),
]


def files(*patterns):
    """Sorted, relative to this file: setuptools refuses absolute sources."""
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


def switch(name):
    """The value of a switch of the build: "", "0" or "1"."""
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise SystemExit(f"{name} is {value!r}, but has to be 0, 1 or unset")
    return value


def measuring_flags():
    """Flags of nvcc for kernels with stamps (csrc/cuda/device/stamps.h)."""
    return ["-DEP_STAMPS"] if switch("EP_DISPATCHER_STAMPS") == "1" else []


def load(name):
    """A file of ep_dispatcher/tools as a module, without the package, which imports PyTorch."""
    path = Path(__file__).resolve().parent / f"ep_dispatcher/tools/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_nvcc():
    """The path of nvcc, or None to build without the CUDA module."""
    wanted = switch("EP_DISPATCHER_CUDA")
    if wanted == "0":
        return None
    found = load("nvcc").find()
    if wanted == "1" and found is None:
        raise SystemExit(f"EP_DISPATCHER_CUDA=1, but there is no nvcc; {load('nvcc').FIX}")
    return found


@functools.cache
def architectures(nvcc):
    """The compute capabilities to compile for, such as ["90", "100"]. Each makes nvcc compile every kernel again."""
    given = os.environ.get("EP_DISPATCHER_CUDA_ARCHS", "").replace(".", "").strip()
    if given:
        if not re.fullmatch(r"\d+[af]?(;\d+[af]?)*", given):
            raise SystemExit(
                f"EP_DISPATCHER_CUDA_ARCHS is {given!r}, but has to be compute capabilities such as 90;100"
            )
        return given.split(";")
    wanted = ARCHITECTURES
    if "bdist_wheel" not in sys.argv:
        smi = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        said = subprocess.run(smi, capture_output=True, text=True).stdout if shutil.which(smi[0]) else ""
        found = {f"{major}0" for major in re.findall(r"^(\d+)\.\d+$", said, re.MULTILINE)}
        wanted = [one for one in ARCHITECTURES if one in found]
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    return [one for one in wanted if f"sm_{one}" in known] or ["90"]


def architecture_flags(nvcc):
    """One -gencode for the first one's code and PTX: a second one would compile every kernel again."""
    first, *others = architectures(nvcc)
    flags = [f"-gencode=arch=compute_{first},code=[sm_{first},compute_{first}]"]
    return flags + [f"-gencode=arch=compute_{one},code=sm_{one}" for one in others]


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


def headers_of(ext):
    """What the files of a module include; of NVSHMEM also its library of device code."""
    if ext.name != NVSHMEM_MODULE:
        return {*ext.depends}
    folder = Path(find_nvshmem())
    found = [*folder.glob("include/**/*.h*"), *folder.glob("lib/libnvshmem_device.a")]
    return {*ext.depends, *map(str, found)}


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


@functools.cache
def version_of(program):
    """The path of a compiler, and what it says of itself."""
    path = shutil.which(program)
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip() if path else ""
    return f"{path}: {said}"


def values_of(variables):
    return [f"{name}={os.environ.get(name, '')}" for name in variables]


@functools.cache  # every object file of a module includes the same headers
def hash_of(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def described(facts, paths):
    """Facts and a hash of every file, as text. pybind11 stands in another folder in every build with isolation."""
    lines = [*facts, *(f"{path}: {hash_of(path)}" for path in sorted(paths))]
    return "\n".join(lines).replace(pybind11.get_include(), f"pybind11 {pybind11.__version__}") + "\n"


def description_of(path):
    """Where it stands what a file of the build is made of."""
    return Path(f"{path}.made_of.txt")


def forget(path):
    description_of(path).unlink(missing_ok=True)


def max_jobs():
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


class InstallLib(install_lib):
    """Installs, also into a wheel, what this build makes. An earlier one may have left more in the build folder."""

    def install(self):
        outputs = self.get_finalized_command("build_py").get_outputs(include_bytecode=False)
        outputs += self.get_finalized_command("build_ext").get_outputs()
        targets = [os.path.join(self.install_dir, os.path.relpath(path, self.build_dir)) for path in outputs]
        for path, target in zip(outputs, targets):
            self.mkpath(os.path.dirname(target))
            self.copy_file(path, target)
        return targets


class BuildExt(build_ext):
    def build_extension(self, ext):
        """Compiles a module, unless the last one that was compiled is made of the same.

        That one is kept, with a description of what it is made of. Times of files say too little: they know nothing of
        switches, flags and compilers, and sources that replace others can be older.
        """
        target = Path(self.get_ext_fullpath(ext.name))
        kept = self.folder("modules", target.name) / target.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        made_of = self.made_of(ext)
        if self.is_there(kept, made_of):
            print(f"ep_dispatcher build: {ext.name} is there from the last build, made of the same", flush=True)
        else:
            forget(kept)
            if ext.name == CPU_MODULE:
                super().build_extension(ext)
                shutil.copy(target, kept)
            else:
                self.link_cuda(ext, self.compile_cuda(ext), kept)
            description_of(kept).write_text(made_of)
        shutil.copy(kept, target)

    def folder(self, *names):
        """A folder of the build that later builds find again."""
        folder = Path(self.get_finalized_command("build").build_base, *names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def is_there(self, path, made_of):
        """Whether an earlier build has left this file, made of the same."""
        description = description_of(path)
        return not self.force and path.exists() and description.exists() and description.read_text() == made_of

    def made_of(self, ext):
        """All that decides how a module comes out, as text: commands, versions, and a hash of every file."""
        facts = [sys.version, f"pybind11 {pybind11.__version__}", f"LDFLAGS={os.environ.get('LDFLAGS', '')}"]
        if ext.name == CPU_MODULE:
            facts += values_of(COMPILER_VARIABLES)
            commands = {name: getattr(self.compiler, name, None) for name in self.compiler.executables}
            facts += [f"{name}: {command}" for name, command in sorted(commands.items())]
            facts += [f"{self.compiler.include_dirs} {ext.include_dirs} {ext.extra_compile_args} {ext.extra_link_args}"]
            facts += [version_of(self.cxx_command()[0])]
        else:
            facts += [*self.facts_of_nvcc(ext), f"{self.python_includes()} {ext.extra_link_args}"]
        return described(facts, {*ext.sources, *headers_of(ext), "setup.py"})

    def cxx_command(self):
        return getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)  # older setuptools have one

    def nvcc_command(self, ext, source=""):
        """nvcc with all flags that compile a file, or link, but for the headers of Python."""
        codes = HOPPER_FLAGS if source.endswith(HOPPER_SUFFIX) else architecture_flags(find_nvcc())
        flags = [*NVCC_FLAGS, *codes, *ext.extra_compile_args]
        command = [find_nvcc(), *flags, *shlex.split(os.environ.get("NVCC_FLAGS", ""))]
        if os.environ.get("CXX"):
            command += ["-ccbin", shlex.split(os.environ["CXX"])[0]]
        return [*command, *(f"-I{path}" for path in ext.include_dirs)]

    def python_includes(self):
        """Flags for the headers that bindings include, and kernels do not."""
        return [f"-I{path}" for path in (pybind11.get_include(), *self.compiler.include_dirs)]

    def facts_of_nvcc(self, ext):
        """What decides how nvcc compiles and links, beside the files and Python's headers."""
        command = self.nvcc_command(ext)
        host = command[command.index("-ccbin") + 1] if "-ccbin" in command else "gcc"
        variables = values_of((*COMPILER_VARIABLES, *NVCC_VARIABLES))
        return [*variables, str(command), version_of(command[0]), version_of(host)]

    def compile_cuda(self, ext):
        """Compiles every file by nvcc, unless it is there from an earlier build. Returns the object files.

        Kernels know nothing of Python, so the builds for all its versions share them.
        """
        folder, jobs = self.folder("objects", ext.name), max_jobs()
        facts, headers = self.facts_of_nvcc(ext), headers_of(ext)
        objects, work = [], []
        for source in ext.sources:
            command, path = [*self.nvcc_command(ext, source), "-c", source], folder / f"{Path(source).name}.o"
            if Path(source).name.startswith("bindings"):
                command += self.python_includes()
                path = path.with_suffix(f".{sys.implementation.cache_tag}.o")
            made_of = described([*facts, str(command)], {source, *headers})
            objects.append(path)
            if not self.is_there(path, made_of):
                work.append((command, path, made_of))
        if work:
            self.say_what_nvcc_does(ext, len(work))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self.compile_file, work))
        return objects

    def compile_file(self, work):
        """Compiles one file, and keeps what ptxas says of its kernels: registers and spills."""
        command, path, made_of = work
        forget(path)
        said = self.run_nvcc([*command, "-o", str(path)])
        path.with_suffix(".ptxas.txt").write_text(said)
        description_of(path).write_text(made_of)

    def link_cuda(self, ext, objects, module):
        """Links a module by nvcc. LDFLAGS are flags of the C++ compiler, as for the CPU module."""
        given = shlex.split(os.environ.get("LDFLAGS", ""))
        given = [f"-Xlinker={flag[4:]}" if flag.startswith("-Wl,") else f"-Xcompiler={flag}" for flag in given]
        command = [*self.nvcc_command(ext), "-shared", *map(str, objects), *ext.extra_link_args, *given]
        self.run_nvcc([*command, "-o", str(module)])

    def say_what_nvcc_does(self, ext, num_files):
        nvcc, jobs = find_nvcc(), max_jobs()
        codes = architectures(nvcc)
        minutes = len(codes) * max(NVCC_SECONDS * num_files / jobs, NVCC_LONGEST_SECONDS) / 60
        release = re.search(r"release [\d.]+", version_of(nvcc))
        compiler = f"{nvcc} ({release[0]})" if release else nvcc
        for line in (
            f"compiling {num_files} files with {compiler}, {min(jobs, num_files)} at a time",
            f"code for compute capability {' and '.join(codes)}, and PTX of the first (EP_DISPATCHER_CUDA_ARCHS)",
            f"takes about {minutes:.1f} minutes, by {NVCC_SECONDS} s a file as measured on a core of an AMD EPYC",
            "EP_DISPATCHER_CUDA=0 builds without it, and then runs on CPUs alone",
        ):
            print(f"ep_dispatcher build: {ext.name}: {line}", flush=True)

    def copy_extensions_to_source(self):
        """Also takes the modules away that this build leaves out; one that was compiled by hand stays, with a line."""
        super().copy_extensions_to_source()
        made = {ext.name for ext in self.extensions}
        for name in {CUDA_MODULE, NVSHMEM_MODULE} - made:
            path = Path(self.get_ext_filename(name))
            if self.editable_mode:
                path.unlink(missing_ok=True)
            elif path.exists():
                print(f"ep_dispatcher build: {path} stays, from an earlier build", flush=True)

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
        command = self.cxx_command()
        self.check_compiler(command)
        version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
        print(f"ep_dispatcher build: Python {sys.version.split()[0]}, compiler {command[0]}: {version}")
        if find_nvcc() is None:
            why = "EP_DISPATCHER_CUDA=0" if switch("EP_DISPATCHER_CUDA") == "0" else f"no nvcc in {load('nvcc').PLACES}"
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
                args = [*command, "-std=c++17", *includes, "-c", str(source), "-o", f"{folder}/check.o"]
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
    headers = files("csrc/*.h", "csrc/common/*.h", "csrc/cpu/*.h", "csrc/cuda/**/*.h")
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
    sources = files("csrc/bindings_cuda.cpp", "csrc/cuda/*.cpp", "csrc/cuda/*/*.cu")
    headers = files("csrc/*.h", "csrc/common/*.h", "csrc/cuda/**/*.h", "csrc/cuda/**/*.cuh")
    include_dirs = ["csrc"]
    cuda = Extension(
        CUDA_MODULE,
        sources,
        depends=headers,
        include_dirs=include_dirs,
        extra_compile_args=measuring_flags(),
        language="c++",
    )
    folder = find_nvshmem()
    if folder is None:
        return [cpu, cuda]
    nvshmem = Extension(
        NVSHMEM_MODULE,
        [*(one for one in sources if not one.endswith(HOPPER_SUFFIX)), *files("csrc/nvshmem/*.cu")],
        depends=[*headers, *files("csrc/nvshmem/*.h")],
        include_dirs=[*include_dirs, f"{folder}/include", *cccl_folders()],
        extra_compile_args=[*NVSHMEM_FLAGS, *measuring_flags()],
        extra_link_args=nvshmem_link_flags(folder),
        language="c++",
    )
    return [cpu, cuda, nvshmem]


def long_description():
    """README.md, for the page of a package index, where links into the repository would lead nowhere.

    With Source in [project.urls] they lead there, else only their text stays, and of pictures nothing.
    """
    source = re.search(r'^Source *= *"(.*?)/*"', Path("pyproject.toml").read_text(), re.MULTILINE)

    def outside(match):
        picture, text, target = match.groups()
        if "://" in target:
            return match[0]
        if source:
            page = "README.md" if target.startswith("#") else ""
            return f"{picture}[{text}]({source[1]}/{page}{target})"
        return "" if picture else text

    parts = re.split(r"^(```.*?^```)", Path("README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"(!?)\[([^\[\]]+)\]\(([^()\s]+)\)", outside, part) for part in parts[::2]]  # not in code
    return "".join(parts)


os.chdir(Path(__file__).resolve().parent)
ParallelCompile("MAX_JOBS").install()
setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExt, "install_lib": InstallLib},
    options={"build_py": {"force": True}},  # copy a module that replaces another, although it may be older
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["ep_dispatcher", "ep_dispatcher.*"]),
)
