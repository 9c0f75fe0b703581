"""Says what was found on this machine, what a Buffer will use, and how to get what is missing.

    python -m ep_dispatcher.doctor [--json] [--no-run]       exit code 0: a Buffer can be made here; 1: it cannot

It also runs as a file (`python ep_dispatcher/tools/doctor.py`, as `make doctor` does), so that it works even if the
package cannot be imported. Therefore only probes import what is outside the standard library, and their errors become
findings.
"""

import argparse
import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]
TORCH_MINIMUM = (2, 9)
CUDA_MINIMUM = (9, 0)  # compute capability
DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED of cuda.h
TRANSPORTS = ("ibrc", "ucx", "libfabric", "ibdevx")  # of NVSHMEM between hosts
ROOT = Path("/")  # of /sys and /dev

OK, OPTIONAL, ERROR = "ok", "optional", "error"


@dataclass(frozen=True)
class Finding:
    what: str
    state: str  # ok; optional: missing, but only some uses need it; error: missing, so no Buffer can be made here
    found: str
    matters: str = ""  # if not ok: the uses that need it
    fix: str = ""  # if not ok: a command, or advice


class Unusable(Exception):
    """Raised by a probe if something is missing or does not work. Its text becomes ``Finding.found``."""


def _run(*command: str, timeout_s: float = 20.0) -> str:
    """Return the standard output. Raise Unusable, with the message of the command, if it fails, is missing or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unusable(str(error)) from error
    if result.returncode != 0:
        said = (result.stderr.strip() or result.stdout.strip()).splitlines()
        died = f"killed by signal {-result.returncode}" if result.returncode < 0 else f"exit code {result.returncode}"
        raise Unusable(f"{Path(command[0]).name}: {said[-1] if said else died}")
    return result.stdout


def _version(*names: str) -> str | None:
    """Return name and version of the first of these distributions that is installed."""
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            pass
    return None


def _load(name: str) -> ModuleType:
    """Import one file of this package, without the package itself, which imports PyTorch."""
    paths = (PACKAGE / f"{name}.py", PACKAGE / name / "__init__.py")
    path = next((path for path in paths if path.exists()), paths[0])
    spec = importlib.util.spec_from_file_location(f"_doctor_{name}", path)
    assert spec is not None and spec.loader is not None  # for a file, whether it is there or not
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Probe:
    what: str
    look: Callable[[], "str | Finding"]
    state: str  # this and the next two go into the finding if `look` raises
    matters: str
    fix: str

    def run(self) -> Finding:
        try:
            found = self.look()
        except Unusable as error:
            return Finding(self.what, self.state, str(error), self.matters, self.fix)
        except Exception as error:  # of any kind: one broken thing must not end the report
            return Finding(self.what, self.state, f"{type(error).__name__}: {error}", self.matters, self.fix)
        return Finding(self.what, OK, found) if isinstance(found, str) else found


PROBES: list[Probe] = []
EVERYTHING = "nothing works without it"
ONLY_CUDA = 'only for engine="cuda"'
ONLY_HOSTS = 'only for engine="cuda" on several hosts'
NOT_ON_ONE_NODE = f"{ONLY_HOSTS}: one node does not need it"


def probe(what: str, state: str, matters: str, fix: str) -> Callable:
    def add(look: Callable) -> Callable:
        PROBES.append(Probe(what, look, state, matters, fix))
        return look

    return add


@probe("ep_dispatcher", ERROR, EVERYTHING, "pip install .")
def look_for_package() -> str:
    installed = _version("ep_dispatcher") or "not installed, used from its folder"
    return f"{_load('_version').__version__} in {PACKAGE} ({installed})"


def module_file(name: str) -> Path | None:
    paths = [PACKAGE / (name + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if path.exists()), None)


def load_module(name: str) -> str:
    """Load a module in a process of its own: without the package, and at no risk for this process."""
    path = module_file(name)
    if path is None:
        others = [other.name for other in PACKAGE.glob(f"{name}.*") if other.suffix != ".pyi"]  # a stub is no module
        raise Unusable(f"built only for another Python: {', '.join(others)}" if others else "not built")
    code = (
        "import importlib.util as util, sys; spec = util.spec_from_file_location(*sys.argv[1:]); "
        "spec.loader.exec_module(util.module_from_spec(spec))"
    )
    _run(sys.executable, "-c", code, name, str(path))
    csrc, engine = PACKAGE.parent / "csrc", name.removeprefix("_C_")
    folders = {"nvshmem": ("common", "cuda", "nvshmem")}.get(engine, ("common", engine))
    sources = [s for folder in folders for s in (csrc / folder).rglob("*.*")]
    sources += [s for folder in folders for s in csrc.glob(f"bindings_{folder}.cpp")]
    stale = [s.name for s in sources if s.stat().st_mtime > path.stat().st_mtime]
    if stale:
        raise Unusable(f"older than csrc/ ({', '.join(sorted(stale)[:3])})")
    return path.name


@probe("compiled module cpu", ERROR, EVERYTHING, "make setup (or: pip install .)")
def look_for_cpu_module() -> str:
    return load_module("_C_cpu")


@probe(
    "compiled module cuda",
    OPTIONAL,
    ONLY_CUDA,
    "install the CUDA toolkit (nvcc 12.4 or newer), then EP_DISPATCHER_CUDA=1 make setup, which says what is wrong",
)
def look_for_cuda_module() -> str:
    return load_module("_C_cuda")


@probe(
    "compiled module nvshmem",
    OPTIONAL,
    ONLY_HOSTS,
    "with nvcc and NVSHMEM (below): EP_DISPATCHER_NVSHMEM=1 pip install --no-build-isolation -e .",
)
def look_for_nvshmem_module() -> str:
    return load_module("_C_nvshmem")


@probe("Python", ERROR, EVERYTHING, "install Python 3.10 or newer")
def look_for_python() -> str:
    return f"{sys.version.split()[0]}, {sys.executable}"


@probe("PyTorch", ERROR, EVERYTHING, "pip install 'torch>=2.9'")
def look_for_torch() -> str:
    import torch

    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < TORCH_MINIMUM:
        raise Unusable(f"{torch.__version__} is older than {TORCH_MINIMUM[0]}.{TORCH_MINIMUM[1]}")
    built_for = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"{torch.__version__}, {built_for}"


@probe("gloo", ERROR, "ranks find each other by it", "pip install 'torch>=2.9' (its wheels have gloo)")
def look_for_gloo() -> str:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise Unusable("this PyTorch was built without it")
    return "available"


@probe(
    "shared memory",
    ERROR,
    "ranks of one node exchange rows by it",
    "run all ranks of a host as one user in one container, on Linux, with /proc mounted",
)
def look_for_shared_memory() -> str:
    """Do as two ranks of one node: one makes a memfd, the other opens it under /proc and reads."""
    fd = os.memfd_create("ep_dispatcher_doctor")
    try:
        os.write(fd, b"seen")
        path = f"/proc/{os.getpid()}/fd/{fd}"
        seen = _run(sys.executable, "-c", "import sys; print(open(sys.argv[1], 'rb').read().decode())", path).strip()
    finally:
        os.close(fd)
    if seen != "seen":
        raise Unusable(f"a peer process read {seen!r} from {path}")
    return "memfd works, and a peer process opens it through /proc"


@probe("memory", OPTIONAL, "shared memory counts against it", "mount /proc")
def look_for_memory() -> str:
    (available_kib,) = re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    available_gib = int(available_kib) / 2**20
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    limited = "" if text == "max" else f", limited to {int(text) / 2**30:.1f} GiB in this control group"
    return f"{available_gib:.1f} GiB available{limited}"


@probe("cores", OPTIONAL, "speed", "")
def look_for_cores() -> str | Finding:
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    found = f"{cores} usable of {os.cpu_count()}, OMP_NUM_THREADS {threads or 'unset'}"
    if threads or cores == 1:
        return found
    matters = "speed of several ranks on one host: each starts as many threads as there are cores"
    fix = "export OMP_NUM_THREADS=<cores divided by ranks> (torchrun sets it to 1)"
    return Finding("cores", OPTIONAL, found, matters, fix)


@probe("switches", ERROR, "every Buffer that leaves the argument at its default", "set or unset them as said")
def look_for_switches() -> str | Finding:
    envs = _load("envs")
    bad, given = [], []
    for switch in envs.SWITCHES:
        if os.environ.get(switch.name):
            try:
                given.append(f"{switch.name}={switch.read()}")
            except ValueError as error:
                bad.append(str(error))
    if bad:
        raise Unusable("; ".join(bad))
    unknown = envs.unknown()
    if unknown:
        close = [nearest for name in unknown for nearest in envs.nearest(name)]
        fix = f"unset {' '.join(unknown)}" + (f" (meant: {', '.join(close)}?)" if close else "")
        return Finding("switches", OPTIONAL, f"no such switch: {', '.join(unknown)}", "it has no effect", fix)
    return ", ".join(given) or "none set"


@probe("C++ compiler", OPTIONAL, "only for building from source", "apt-get install g++")
def look_for_compiler() -> str:
    names = [os.environ.get("CXX", "").partition(" ")[0], "g++", "c++", "clang++"]
    path = next((path for path in map(shutil.which, filter(None, names)) if path), None)
    if path is None:
        raise Unusable("no g++, c++ or clang++ found")
    return _run(path, "--version").partition("\n")[0]


@probe("nvcc", OPTIONAL, "only for building the cuda module", "install the CUDA toolkit, or set CUDA_HOME")
def look_for_nvcc() -> str:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]  # as setup.py
    paths = [shutil.which("nvcc"), *(shutil.which(os.path.join(home, "bin", "nvcc")) for home in homes if home)]
    path = next((path for path in paths if path), None)
    if path is None:
        raise Unusable("not found")
    release = re.search(r"release [\d.]+", _run(path, "--version"))
    return f"{release.group() if release else 'release unknown'}, {path}"


@probe("GPUs", OPTIONAL, ONLY_CUDA, "a GPU of compute capability 9.0 or newer, and a PyTorch built for CUDA")
def look_for_gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") and "GPU" in _run("nvidia-smi", "-L"):
            raise Unusable("nvidia-smi lists GPUs, but this PyTorch cannot use them")
        raise Unusable("none")
    count = torch.cuda.device_count()
    capabilities = [torch.cuda.get_device_capability(i) for i in range(count)]
    names = [f"{torch.cuda.get_device_name(i)} (compute capability {c[0]}.{c[1]})" for i, c in enumerate(capabilities)]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if max(capabilities) < CUDA_MINIMUM:
        raise Unusable(f"{listed}: older than compute capability {CUDA_MINIMUM[0]}.{CUDA_MINIMUM[1]}")
    return listed


@probe(
    "cuda-bindings",
    OPTIONAL,
    f"{ONLY_CUDA} and suspendable=True",
    "pip install 'cuda-bindings==13.*' (12.* for CUDA 12)",
)
def look_for_cuda_bindings() -> str:
    return installed("cuda-bindings")


def nvlink_pairs(topology: str) -> dict[tuple[int, int], bool]:
    """Return whether NVLink joins each pair of GPUs, from the output of `nvidia-smi topo -m`."""
    cells = {}
    for line in re.sub(r"\x1b\[\d*m", "", topology).splitlines():
        row = line.split()
        if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and not row[1].startswith("GPU"):  # not the heading
            cells[int(row[0][3:])] = row[1:]
    return {(a, b): cells[a][b].startswith("NV") for a, b in combinations(sorted(cells), 2)}


@probe("NVLink", OPTIONAL, 'only for several ranks with engine="cuda"', "GPUs joined by NVLink")
def look_for_nvlink() -> str:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        raise Unusable(f"{count} GPUs, so none")
    try:
        pairs, source = nvlink_pairs(_run("nvidia-smi", "topo", "-m")), "nvidia-smi topo"
    except Unusable:
        pairs, source = {}, ""
    if not pairs:  # peer access may also go over PCIe
        source = "unknown to nvidia-smi; from peer access"
        pairs = {(a, b): torch.cuda.can_device_access_peer(a, b) for a, b in combinations(range(count), 2)}
    apart = [f"{a}-{b}" for (a, b), joined in pairs.items() if not joined]
    if apart:
        raise Unusable(f"not between GPUs {', '.join(apart[:8])}{', ...' if len(apart) > 8 else ''} ({source})")
    return f"between all of {count} GPUs ({source})"


@probe(
    "NVSHMEM",
    OPTIONAL,
    f"{ONLY_HOSTS}: to build and to run its module",
    "pip install nvidia-nvshmem-cu13 (cu12 for CUDA 12), or set NVSHMEM_HOME; then build again with "
    "EP_DISPATCHER_NVSHMEM=1",
)
def look_for_nvshmem() -> str:
    """Look where setup.py does: NVSHMEM_HOME before the wheel."""
    home = os.environ.get("NVSHMEM_HOME")
    if home:
        if not Path(home, "include", "nvshmem.h").exists():
            raise Unusable(f"NVSHMEM_HOME={home} has no include/nvshmem.h")
        header = Path(home, "include", "non_abi", "nvshmem_version.h")
        text = header.read_text() if header.exists() else ""
        numbers = re.findall(r"define NVSHMEM_VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION (\d+)", text)
        return f"version {'.'.join(numbers) or 'unknown'}, NVSHMEM_HOME={home}"
    wheel = _version("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
    if wheel is None:
        raise Unusable("neither the wheel nor NVSHMEM_HOME")
    return wheel


@probe(
    "RDMA network cards",
    OPTIONAL,
    ONLY_HOSTS,
    "InfiniBand or RoCE cards with a link; in a container also their devices (--device /dev/infiniband)",
)
def look_for_rdma() -> str:
    cards = sorted((ROOT / "sys/class/infiniband").glob("*"))
    if not cards:
        raise Unusable("none in /sys/class/infiniband")
    links: dict[str, list[str]] = {}
    for card in cards:
        for port in sorted(card.glob("ports/*")):
            if "ACTIVE" in (port / "state").read_text():
                links.setdefault((port / "link_layer").read_text().strip(), []).append(card.name)
    if not links:
        raise Unusable(f"{', '.join(card.name for card in cards)}: no port is active")
    found = "; ".join(f"{layer}: {', '.join(names)}" for layer, names in links.items())
    if not list((ROOT / "dev/infiniband").glob("uverbs*")):
        raise Unusable(f"{found}; but this process has no /dev/infiniband/uverbs*")
    return found


@probe(
    "NVSHMEM transport",
    OPTIONAL,
    NOT_ON_ONE_NODE,
    "unset NVSHMEM_REMOTE_TRANSPORT, or set it to one of these",
)
def look_for_transport() -> str | Finding:
    """Find NVSHMEM's transport between hosts, from its own switches, and check that its requirements are met."""
    name = os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "").lower()
    if name and name not in TRANSPORTS:
        said = "nothing leaves a host" if name == "none" else "no such transport"
        raise Unusable(f"NVSHMEM_REMOTE_TRANSPORT={name}: {said}; there are {', '.join(TRANSPORTS)}")
    taken = name or "ibrc, the default"
    needed = ["NVSHMEM"] if name == "libfabric" else ["NVSHMEM", "RDMA network cards"]  # libfabric has other cards too
    lacking = [found for found in (probe.run() for probe in PROBES if probe.what in needed) if found.state != OK]
    if lacking:
        missing = " and ".join(f"{found.what} ({found.found})" for found in lacking)
        fix = "; and ".join(f"for {found.what}: {found.fix}" for found in lacking)
        return Finding("NVSHMEM transport", OPTIONAL, f"{taken}, lacks {missing}", NOT_ON_ONE_NODE, fix)
    switch = os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "").lower()
    if switch in ("", "0", "n", "no", "f", "false", "off"):
        return f"{taken}; IBGDA is off (NVSHMEM_IB_ENABLE_IBGDA=1 lets kernels post by themselves)"
    return f"{taken}; kernels post by IBGDA (NVSHMEM_IB_ENABLE_IBGDA={switch})"


@probe(
    "GPUDirect RDMA",
    OPTIONAL,
    f"{ONLY_HOSTS}: network cards read and write the memory of GPUs by it",
    "modprobe nvidia_peermem on the host, or the open kernel modules of the driver, which have dma-buf",
)
def look_for_gpudirect() -> str:
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if (ROOT / "sys/module" / module).exists():
            return f"{module} is loaded"
    if not gpus_share_by_dmabuf():
        raise Unusable("neither nvidia_peermem nor dma-buf")
    return "the GPUs share memory by dma-buf; whether the network cards take it cannot be told here"


def gpus_share_by_dmabuf() -> bool:
    """Ask the driver. Raise Unusable if there is none, or no GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Unusable("cannot be told: no nvidia_peermem, and no GPU driver to ask about dma-buf") from None
    count, shares, shared = ctypes.c_int(), ctypes.c_int(), []
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise Unusable("cannot be told: no nvidia_peermem, and the driver finds no GPU to ask about dma-buf")
    for ordinal in range(count.value):  # a CUdevice is its ordinal
        failed = cuda.cuDeviceGetAttribute(ctypes.byref(shares), DMA_BUF_SUPPORTED, ordinal)
        shared.append(failed == 0 and shares.value == 1)
    return all(shared)


def installed(*names: str) -> str:
    version = _version(*names)
    if version is None:
        raise Unusable("not installed")
    return version


@probe("megatron-core", OPTIONAL, "only for Megatron-core models", "pip install megatron-core")
def look_for_megatron() -> str:
    return installed("megatron-core")


@probe(
    "Transformer Engine",
    OPTIONAL,
    "nothing here needs it; Megatron-core uses it for its own layers",
    "pip install --no-build-isolation 'transformer-engine[pytorch]' (with CUDA)",
)
def look_for_transformer_engine() -> str | Finding:
    found, te = installed("transformer-engine"), _load("te_version")
    if te.graphs_lose_gradients():
        matters = "only for --cuda-graph-impl transformer_engine; register() of the Megatron plug-in prevents it"
        return Finding(
            "Transformer Engine", OPTIONAL, f"{found}: {te.FAULT}", matters, "Transformer Engine 2.14 or newer"
        )
    return found


@probe("apex", OPTIONAL, "nothing here needs it; Megatron-core can use its fused layers", "build it from its sources")
def look_for_apex() -> str:
    return installed("apex")


def choose_engine() -> str:
    """Choose as `Buffer` does with default arguments."""
    from ep_dispatcher import engines, envs

    return engines.choose(envs.engine())


def between_hosts(wire: str) -> str:
    """Return the wire of the CUDA engine between nodes, in words. engines/regions.py chooses it."""
    if wire == "peer":
        return "NVLink, by EP_DISPATCHER_WIRE=peer: all ranks have to be on one host"
    try:
        load_module("_C_nvshmem")
    except Unusable as error:
        return f"nothing, all ranks have to be on one host: compiled module nvshmem {error}"
    return "NVSHMEM; NVLink between virtual nodes of one host"


def what_is_used() -> dict[str, str]:
    try:
        envs = _load("envs")
        engine, ranks_per_node, wire = choose_engine(), envs.ranks_per_node(), envs.wire()
    except Exception as error:  # as for the probes
        return {"engine": f"none: {type(error).__name__}: {error}"}
    node = f"{ranks_per_node} ranks (EP_DISPATCHER_RANKS_PER_NODE)" if ranks_per_node else "the ranks of one host"
    if engine == "cpu":
        inside, between = "shared memory (memfd, which needs no /dev/shm)", "torch.distributed (gloo)"
    else:
        inside, between = "NVLink peer memory", between_hosts(wire)
    return {"engine": engine, "a node is": node, "inside a node": inside, "between nodes": between}


RUN_ALONE = "see all of it: python -c 'from ep_dispatcher.tools.doctor import self_test; self_test()'"


def self_test() -> None:
    """Run one rank with identity experts: every token comes back once per chosen expert, summed."""
    import torch
    import torch.distributed as dist

    import ep_dispatcher as ep

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.arange(5 * 64, dtype=torch.float32, device="cpu").reshape(5, 64)
    topk_idx = torch.tensor([[0, 1], [3, -1], [2, 0], [-1, -1], [1, 3]], dtype=torch.int64, device="cpu")
    buffer = ep.Buffer(
        dist.group.WORLD,
        hidden=64,
        num_experts=4,
        num_topk=2,
        max_tokens_per_rank=5,
        dtype=torch.float32,
        ranks_per_node=1,  # EP_DISPATCHER_RANKS_PER_NODE is for jobs of more ranks
        timeout_s=20.0,
    )
    device = torch.device(buffer.engine)  # both engines have the name of their tensors' device
    topk_weights = torch.ones(5, 2, dtype=torch.float32, device=device)
    out = buffer.dispatch(x.to(device), topk_idx.to(device), topk_weights)
    assert isinstance(out.x, torch.Tensor)
    y = buffer.combine(out.x, out.handle).x.cpu()
    buffer.destroy()
    dist.destroy_process_group()
    expected = x * (topk_idx >= 0).sum(1, keepdim=True)
    if not torch.equal(y, expected) or out.tokens_per_expert.tolist() != [2, 2, 1, 2]:
        raise SystemExit(f"wrong result: {out.tokens_per_expert.tolist()} rows, off by {(y - expected).abs().max()}")


def run_self_test() -> Finding:
    """Run ``self_test`` in a process of its own, which may crash or hang."""
    code = "import sys; sys.path[:0] = [sys.argv[1]]; from ep_dispatcher.tools.doctor import self_test; self_test()"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, str(PACKAGE.parent)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
        except subprocess.TimeoutExpired:
            return Finding("self-test", ERROR, "no end after 120 s", EVERYTHING, RUN_ALONE)
    if result.returncode == 0:
        return Finding("self-test", OK, "a Buffer on one rank, dispatch and combine: right")
    said = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
    return Finding("self-test", ERROR, said[0], EVERYTHING, RUN_ALONE)


def report(run: bool = True) -> dict:
    """Return {"ok": bool, "findings": [Finding as a dict], "used": {use: what serves it}}. Never raises."""
    findings = [probe.run() for probe in PROBES]
    used = what_is_used()
    ok = all(finding.state != ERROR for finding in findings) and not used["engine"].startswith("none")
    if run and ok:
        findings.append(run_self_test())
        ok = findings[-1].state == OK
    return {"ok": ok, "findings": [asdict(finding) for finding in findings], "used": used}


def as_text(result: dict) -> str:
    lines = ["found"]
    for finding in result["findings"]:
        mark = {OK: "ok", OPTIONAL: "--", ERROR: "!!"}[finding["state"]]
        lines.append(f"  {mark}  {finding['what']:<23} {finding['found']}")
        for label in ("matters", "fix"):
            if finding[label]:
                lines.append(f"{'':31}{label}: {finding[label]}")
    lines += ["", "a Buffer with default arguments takes"]
    for what, by_what in result["used"].items():
        lines.append(f"  {'!!' if by_what.startswith('none') else '  '}  {what:<23} {by_what}")
    lines += [
        "",
        "A Buffer can be made here." if result["ok"] else "No Buffer can be made here: see the lines marked !!",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ep_dispatcher.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--no-run", action="store_true", help="do not try a Buffer on one rank")
    args = parser.parse_args(arguments)
    result = report(run=not args.no_run)
    print(json.dumps(result, indent=2) if args.json else as_text(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    if Path(sys.path[0]).resolve() == PACKAGE / "tools":  # run as a file, which sees its siblings, not the package
        sys.path[0] = str(PACKAGE.parent)
    sys.exit(main())
