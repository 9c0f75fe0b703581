"""What `pip install .` and a source distribution contain, and that building needs no PyTorch."""

import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from conftest import exhaustive

pytest.importorskip("pybind11")
pytest.importorskip("setuptools")
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
VERSION = re.search('"(.*)"', (ROOT / "ep_dispatcher/_version.py").read_text()).group(1)
# Runs a build hook as pip does, where PyTorch cannot be imported.
HOOK = """
import sys
sys.modules["torch"] = None
import setuptools.build_meta
print(getattr(setuptools.build_meta, sys.argv[1])(sys.argv[2]))
"""


def run(*command, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | environment
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )


def program(path: Path, text: str) -> Path:
    """Write a program that stands for another one."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def before_path(folder: Path) -> str:
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def copy_of(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder / "copy", ignore=shutil.ignore_patterns("build", "*.so"))
    return folder / "copy"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """An unpacked source distribution, made from a copy of this folder."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "copy"
    for name in ("csrc", "ep_dispatcher"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, copy)
    result = run(sys.executable, "-c", HOOK, "build_sdist", folder, cwd=copy)
    assert result.returncode == 0, result.stderr
    with tarfile.open(folder / result.stdout.split()[-1]) as archive:
        archive.extractall(folder)
    return folder / f"ep_dispatcher-{VERSION}"


@pytest.fixture(scope="module")
def unpacked(source) -> Path:
    """The wheel of the CPU engine, from the source distribution. One for GPUs too is built by CI (.ci/wheels.py)."""
    folder = source.parent / "wheel"
    result = run(sys.executable, "-c", HOOK, "build_wheel", folder, cwd=source, EP_DISPATCHER_CUDA="0")
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def names(folder: Path, pattern: str) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob(pattern) if "__pycache__" not in p.parts}


def test_the_source_distribution_has_all_of_csrc(source):
    for pattern in ("*.h", "*.cpp", "*.cu", "*.cuh"):
        assert names(source / "csrc", pattern) == names(ROOT / "csrc", pattern)


@pytest.mark.exhaustive
def test_the_wheel_has_every_module_and_nothing_else(unpacked):
    expected = {f"ep_dispatcher/{name}" for name in names(ROOT / "ep_dispatcher", "*.py")}
    expected |= {f"ep_dispatcher/{name}" for name in ("py.typed", *names(ROOT / "ep_dispatcher", "*.pyi"))}
    expected.add(f"ep_dispatcher/_C_cpu{importlib.machinery.EXTENSION_SUFFIXES[0]}")
    found = {name for name in names(unpacked, "*") if (unpacked / name).is_file() and ".dist-info" not in name}
    assert found == expected


@pytest.mark.exhaustive
def test_the_compiled_module_loads_without_any_other_package(unpacked):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import _C_cpu; print('torch' in sys.modules)"
    result = run(sys.executable, "-I", "-S", "-c", code, unpacked / "ep_dispatcher", cwd=unpacked)
    assert result.stdout.strip() == "False", result.stderr


@pytest.mark.exhaustive
def test_metadata(unpacked):
    (file,) = unpacked.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(file.read_text())
    assert metadata["Version"] == VERSION
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    torch, numpy = (requirement for requirement in requirements if requirement.marker is None)
    assert (torch.name, str(numpy)) == ("torch", "numpy")  # and no other: whoever has them installs nothing more
    needed = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": "test"})}
    assert needed == {"torch", "numpy", "pytest", "pytest-xdist", "hypothesis"}  # an installed megatron-core stays
    for version in ("2.9.0", "2.9.1+cu128", "2.11.0+cu130", "2.13.0+cpu", "2.9.0a0+50eac811a6.nv25.9"):
        assert torch.specifier.contains(version, prereleases=True), version
    assert not torch.specifier.contains("2.8.0", prereleases=True)
    assert metadata["Requires-Python"] == ">=3.10" and metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.parametrize("address", ["", "https://example.org/x/blob/main"])
def test_links_of_an_index_page_lead_somewhere(address, tmp_path):
    """They are relative in README.md; without an address of the repository only their text is left."""
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    project = "[project]\nname = 'ep_dispatcher'\nversion = '1'\ndynamic = ['readme']\n[project.urls]\n"
    (tmp_path / "pyproject.toml").write_text(project + f'Source = "{address}"' * bool(address))
    result = run(sys.executable, "setup.py", "-q", "egg_info", cwd=tmp_path, EP_DISPATCHER_CUDA="0")
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "ep_dispatcher.egg-info/PKG-INFO").read_text()
    links = set(re.findall(r"\]\(([^()\s]+)\)", page))
    assert all("://" in link for link in links) and "docs/megatron.md" in page
    assert address == "" or {f"{address}/docs/megatron.md", f"{address}/README.md#limits"} <= links


@pytest.mark.parametrize("compiler", ["no-such-g++", "false"])
def test_a_missing_compiler_is_named_with_the_fix(source, compiler):
    result = run(sys.executable, "setup.py", "build_ext", cwd=source, CC=compiler, CXX=compiler)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert compiler in result.stderr and "apt-get install g++" in result.stderr


def test_a_broken_nvcc_is_named_with_the_way_around_it(source, tmp_path):
    """Such as one that is too old for the architectures; a compiler that does nothing "builds" the CPU module."""
    said = "nvcc fatal : Unsupported gpu architecture 'compute_90a'"
    nvcc = program(tmp_path / "bin/nvcc", f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    program(tmp_path / "bin/g++", FAKE_COMPILER.format(version=1, log=tmp_path / "log"))
    environment = dict(PATH=before_path(nvcc.parent), EP_DISPATCHER_CUDA="", CC="g++", CXX="g++", MAX_JOBS="1")
    result = run(sys.executable, "setup.py", "build_ext", cwd=copy_of(source, tmp_path), **environment)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert said in result.stderr and "EP_DISPATCHER_CUDA=0 builds without" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("ep_dispatcher: nvcc failed")
    # Of a broken nvcc there is no version.
    before = re.search(r"_C_cuda: compiling (\d+) files with (\S+), (\d+) at a time", result.stdout)
    assert before[2] == str(nvcc) and before[3] == "1" and "takes about" in result.stdout
    assert int(before[1]) > 5 and "EP_DISPATCHER_CUDA=0 builds without" in result.stdout


# Stands for a compiler: what it makes is its command, and a log gets that too.
FAKE_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "release {version}" && exit
[ "$1" = --list-gpu-code ] && echo sm_90 sm_100 && exit
command="$(basename "$0") $*"
while [ $# -gt 1 ]; do
  [ "$1" = -o ] && echo "$command" > "$2" && echo "$2" >> {log}
  shift
done
"""


@pytest.fixture
def fake(source, tmp_path):
    """``fake(**environment)`` builds a wheel in one copy of the sources: its files, and the modules it compiled."""
    copy, log = copy_of(source, tmp_path), tmp_path / "log"

    def compilers(version: int = 1) -> None:
        for name in ("g++", "nvcc", "other-g++"):
            program(tmp_path / "bin" / name, FAKE_COMPILER.format(version=version, log=log))

    def start(*command, **environment: str) -> list[str]:
        """Run with these compilers, and return the modules that were compiled."""
        log.write_text("")
        given = {"CC": "g++", "CXX": "g++", "EP_DISPATCHER_CUDA": "1", "EP_DISPATCHER_NVSHMEM": "0", **environment}
        result = run(sys.executable, *command, cwd=copy, PATH=before_path(tmp_path / "bin"), **given)
        assert result.returncode == 0, result.stdout + result.stderr
        build.objects = sorted(re.findall(r"/(\w+\.(?:cu|cpp))[^/]*\.o$", log.read_text(), re.MULTILINE))  # by nvcc
        return sorted(set(re.findall(r"/(_C_\w+)\.[^/]*so$", log.read_text(), re.MULTILINE)))

    def build(hook: str = "build_wheel", **environment: str) -> tuple[dict[str, str], list[str]]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        compiled = start("-c", HOOK, hook, tmp_path / "out", **environment)
        (wheel,) = (tmp_path / "out").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name).decode() for name in archive.namelist() if ".dist-info" not in name}
        return {re.sub(r"\.[^.]*\.so$", "", name): text for name, text in files.items()}, compiled

    compilers()
    build.copy, build.compilers, build.start = copy, compilers, start
    return build


CPU, CUDA = "ep_dispatcher/_C_cpu", "ep_dispatcher/_C_cuda"


def test_a_wheel_has_what_its_switches_ask_for(fake):
    files, compiled = fake()
    assert {CPU, CUDA} <= files.keys() and compiled == ["_C_cpu", "_C_cuda"]
    files, compiled = fake(EP_DISPATCHER_CUDA="0")
    assert CPU in files and CUDA not in files and compiled == []
    files, compiled = fake()
    assert {CPU, CUDA} <= files.keys() and compiled == []  # nothing has changed since the first build


@pytest.mark.parametrize(
    "change, compiled",
    [
        exhaustive({"NVCC_FLAGS": "-lineinfo"}, ["_C_cuda"]),
        ({"NVCC_APPEND_FLAGS": "-lineinfo"}, ["_C_cuda"]),  # nvcc itself reads it
        exhaustive({"EP_DISPATCHER_STAMPS": "1"}, ["_C_cuda"]),
        exhaustive({"CXXFLAGS": "-g1"}, ["_C_cpu"]),
        ({"LDFLAGS": "-Wl,-O1"}, ["_C_cpu", "_C_cuda"]),
        ({"CXX": "other-g++"}, ["_C_cpu", "_C_cuda"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_flags_and_compilers_compile_again(fake, change, compiled):
    assert fake()[1] == ["_C_cpu", "_C_cuda"]
    files, again = fake(**change)
    assert again == compiled
    (flag,) = change.values()
    if "APPEND" not in next(iter(change)):
        name = next(iter(change)).removeprefix("EP_DISPATCHER_")
        assert (f"-DEP_{name}" if flag == "1" else flag) in files[f"ep_dispatcher/{compiled[0]}"]
    assert fake(**change)[1] == []


@pytest.mark.parametrize(
    "gpus, hook, given, expected",
    [
        ("9.0\n9.0", "build_editable", "", ["90"]),
        ("10.3", "build_editable", "", ["100"]),
        ("12.0", "build_editable", "", ["90"]),  # none of ours: as if there were no GPU
        ("9.0", "build_wheel", "", ["90", "100"]),
        ("9.0", "build_wheel", "10.0; 120", None),
        ("9.0", "build_wheel", "103;120", ["103", "120"]),
    ],
)
def test_code_is_for_the_gpus_here_and_a_wheel_for_all(fake, tmp_path, gpus, hook, given, expected):
    program(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\necho '{gpus}'\n")
    if expected is None:
        with pytest.raises(AssertionError, match="EP_DISPATCHER_CUDA_ARCHS is '100; 120'"):
            fake(hook, EP_DISPATCHER_CUDA_ARCHS=given)
        return
    fake(hook, EP_DISPATCHER_CUDA_ARCHS=given)
    (module,) = fake.copy.glob("build/modules/_C_cuda*/_C_cuda*.so")
    code = re.findall(r"-gencode=arch=compute_(\d+),code=(\S+)", module.read_text())
    (hopper,) = fake.copy.glob("build/objects/*_C_cuda/float8_gemm_sm90a.cu.o")
    assert re.findall(r"-gencode=(\S+)", hopper.read_text()) == ["arch=compute_90a,code=sm_90a"]
    first, *others = expected
    assert code == [(first, f"[sm_{first},compute_{first}]"), *((one, f"sm_{one}") for one in others)]


def test_nvcc_compiles_what_has_changed(fake):
    """A kernel by itself, all for a header; for other flags of the linker nothing."""
    fake()
    every = fake.objects
    assert {"bindings_cuda.cpp", "combine_one_node.cu", "engine.cpp"} <= set(every)
    for change, expected in (("cuda/combine/combine_one_node.cu", ["combine_one_node.cu"]), ("cuda/engine.h", every)):
        (fake.copy / "csrc" / change).write_text("// changed")
        assert "_C_cuda" in fake()[1] and fake.objects == expected
    assert fake(LDFLAGS="-s")[1] == ["_C_cpu", "_C_cuda"] and fake.objects == []


def test_another_version_of_a_compiler_compiles_again(fake):
    fake()
    fake.compilers(version=2)
    assert fake()[1] == ["_C_cpu", "_C_cuda"] and fake()[1] == []


def test_a_wheel_has_the_sources_of_now(fake):
    """Also where one is gone, or replaced by one with an older time, as those of an archive are."""
    (fake.copy / "ep_dispatcher/old.py").write_text("")
    (fake.copy / "ep_dispatcher/errors.py").write_text("1")
    assert "ep_dispatcher/old.py" in fake()[0]
    (fake.copy / "ep_dispatcher/old.py").unlink()
    for name in ("ep_dispatcher/errors.py", "csrc/cpu/plan.cpp"):
        (fake.copy / name).write_text("2")
        os.utime(fake.copy / name, (1e9, 1e9))
    files, compiled = fake()
    assert "ep_dispatcher/old.py" not in files and files["ep_dispatcher/errors.py"] == "2" and compiled == ["_C_cpu"]


def test_builds_in_place_compile_once(fake):
    def in_place() -> list[str]:
        return sorted(path.name.partition(".")[0] for path in (fake.copy / "ep_dispatcher").glob("*.so"))

    command = ("setup.py", "build_ext", "--inplace")
    assert fake.start(*command) == ["_C_cpu", "_C_cuda"] == in_place()
    assert fake.start(*command) == [] == fake("build_editable")[1]
    assert fake.start(*command, EP_DISPATCHER_CUDA="0") == []
    assert in_place() == ["_C_cpu", "_C_cuda"]  # the CPU engine alone was built, by hand
    assert fake("build_editable", EP_DISPATCHER_CUDA="0")[1] == [] and in_place() == ["_C_cpu"]


# Stands for the Python of an environment, and for pip. It logs what it is told. A build with nvcc may fail.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *'version("megatron-core")'*) exit {no_megatron} ;;
  *nvcc.py*) exec {python} "$@" ;;
esac
echo "$EP_DISPATCHER_CUDA: $@" >> {log}
case "$*" in
  *'-e .') echo "  ep_dispatcher build: _C_cuda: takes about an hour" ;;
esac
case "$EP_DISPATCHER_CUDA$*" in
  0*) ;;
  *'-e .')
    [ {nvcc_works} = 1 ] && exit
    echo "x.cu: fatal error: no such thing"
    echo "ep_dispatcher: nvcc failed"
    exit 1 ;;
esac
"""


@pytest.fixture
def make(source, tmp_path):
    """``make(goal, **environment)`` in a fresh copy: the result, and the lines that its Python was called with."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    copy, python, log = copy_of(source, tmp_path), tmp_path / "python", tmp_path / "log"
    shutil.copy(ROOT / "Makefile", copy)
    stamps = copy / "build/make"
    stamps.mkdir(parents=True)
    (stamps / "python").write_text(f"{python}\n")
    (stamps / "torch").touch()

    def run_make(goal: str, no_megatron: int = 0, nvcc_works: int = 1, **environment: str):
        program(
            python, FAKE_PYTHON.format(python=sys.executable, no_megatron=no_megatron, nvcc_works=nvcc_works, log=log)
        )
        log.write_text("")
        result = run("make", goal, cwd=copy, **{"EP_DISPATCHER_CUDA": "", **environment})
        return result, log.read_text().splitlines()

    run_make.copy = copy
    return run_make


def test_make_reads_the_extras_as_pip_takes_them():
    """Also one with a marker, as of Triton: Megatron-core imports it in versions that want Python 3.12 or newer."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", "")
    (code,) = re.findall(r"^OF_EXTRAS = -c '(.*)'$", text, re.MULTILINE)
    needs = ["numpy", 'psutil; extra == "m"', 'triton; python_version >= "3.12" and extra == "m"', 'x>=8; extra == "t"']
    changed = code.replace("from importlib.metadata import requires;", f"requires = lambda name: {needs!r};")
    assert changed != code
    said = subprocess.run([sys.executable, "-c", changed, "m"], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["psutil", 'triton;python_version>="3.12"']


@pytest.mark.parametrize("no_megatron, extras", [(0, "test examples"), (1, "test examples megatron")])
def test_make_installs_megatron_core_only_where_there_is_none(make, no_megatron, extras):
    result, calls = make("setup", no_megatron)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sum(call.endswith(" -e .") for call in calls) == 1
    assert calls[-2].endswith(f"sys.argv)) {extras}") and " -m pip install" in calls[-1]


def test_make_demo_installs_nothing_for_tests(make):
    result, calls = make("demo", 1)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sum(call.endswith(" -e .") for call in calls) == 1 and "examples/train_moe_lm.py" in calls[-1]
    assert not any("sys.argv))" in call for call in calls)  # this Python has matplotlib: it says yes to all


def test_make_builds_again_when_nvcc_appears(make, tmp_path):
    def builds(**environment: str) -> bool:
        result, calls = make("setup", **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        return any(call.endswith(" -e .") for call in calls)

    assert builds() and not builds()
    nvcc = program(tmp_path / "bin/nvcc", "#!/bin/sh\necho release 13\n")
    path = {"PATH": before_path(nvcc.parent)}
    assert builds(**path) and not builds(**path)
    assert builds(**path, EP_DISPATCHER_CUDA="1")


@pytest.fixture
def with_gpus(tmp_path):
    """``with_gpus(bool)``: a PATH with an nvcc, and an nvidia-smi that finds a GPU or none."""

    def path(there: bool) -> str:
        program(tmp_path / "tools/nvcc", "#!/bin/sh\necho release 13\n")
        return before_path(program(tmp_path / "tools/nvidia-smi", f"#!/bin/sh\nexit {int(not there)}\n").parent)

    return path


def test_make_demo_compiles_the_cuda_engine_only_for_a_gpu_or_where_it_is_asked_for(make, with_gpus):
    def switch_of_the_build(goal: str, gpu: bool, **environment: str) -> list[str]:
        result, calls = make(goal, PATH=with_gpus(gpu), **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        return [call.partition(":")[0] for call in calls if call.endswith(" -e .")]

    assert switch_of_the_build("demo", gpu=False) == ["0"]
    assert switch_of_the_build("demo", gpu=False) == []
    assert switch_of_the_build("demo", gpu=True) == [""]
    assert switch_of_the_build("demo-megatron", gpu=False, EP_DISPATCHER_CUDA="1") == ["1"]
    make.copy.joinpath("ep_dispatcher/_C_cuda.cpython.so").touch()
    assert switch_of_the_build("demo", gpu=False) == [""], "it has been compiled, and stays"
    assert switch_of_the_build("demo-megatron", gpu=False) == []


def test_make_goes_on_without_the_cuda_engine_where_nvcc_fails(make, with_gpus):
    result, calls = make("demo", nvcc_works=0, PATH=with_gpus(True))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no such thing" in result.stdout and "without the CUDA engine" in result.stdout
    assert result.stdout.count("\n_C_cuda: takes about an hour\n") == 2  # shown while pip runs, and by itself
    assert [call[0] for call in calls if call.endswith(" -e .")] == [":", "0"]
    assert "examples/train_moe_lm.py" in calls[-1]


def test_make_fails_where_the_cuda_engine_is_demanded(make):
    result, calls = make("demo", nvcc_works=0, EP_DISPATCHER_CUDA="1")
    assert result.returncode != 0 and "ep_dispatcher: nvcc failed" in result.stdout
    assert not any("examples" in call for call in calls)
