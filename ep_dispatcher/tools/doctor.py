"""Prints what was found on this machine, what a Buffer will use, and how to get what is missing.

    python -m ep_dispatcher.doctor [--all] [--json] [--no-run]   exit code 0: a Buffer can be made here; 1: it cannot

It also runs as a file (`python ep_dispatcher/tools/doctor.py`, as `make doctor` does), so that it works even if the
package cannot be imported; ep_dispatcher/_built.py starts it in this way. Therefore only probes import modules from
outside the standard library, and their errors become findings.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

OWN = Path(__file__).resolve().parents[1]  # where the doctor's own files are
PACKAGE = OWN  # the package to examine; tests examine others
TORCH_MINIMUM = (2, 9)
DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED of cuda.h
TRANSPORTS = ("ibrc", "ucx", "libfabric", "ibdevx")  # of NVSHMEM between hosts
ROOT = Path("/")  # of /sys and /dev

OK, OPTIONAL, ERROR = "ok", "optional", "error"
NO_GPUS, NOT_INSTALLED = "none", "not installed"


@dataclass(frozen=True)
class Finding:
    what: str
    state: str  # ok, or missing: optional if only some uses need it, error if no Buffer can be made without it
    found: str
    matters: str = ""  # if not ok: what does not work without it
    fix: str = ""  # if not ok: a command, or advice
    use: str = ""  # the only use that needs it, such as BUILDING; "" for all uses


@dataclass(frozen=True)
class Probe:
    what: str
    look: Callable[[], str]  # returns what was found, or raises
    state: str  # this and the next two go into the finding if `look` raises
    matters: str
    fix: str
    use: str = ""

    def run(self) -> Finding:
        fix = self.fix
        try:
            return Finding(self.what, OK, self.look(), use=self.use)
        except Unusable as error:
            found, fix = str(error), error.fix or fix
        except Exception as error:  # of any kind: one broken thing must not end the report
            found = f"{type(error).__name__}: {error}"
        return Finding(self.what, self.state, found, self.matters, fix, self.use)


class Unusable(Exception):
    """Raised by a probe if something is missing or does not work. Its text becomes ``Finding.found``.

    ``fix`` says what to do about it, if that depends on what was found. Otherwise the probe's ``fix`` is printed.
    """

    def __init__(self, found: str, fix: str = ""):
        super().__init__(found)
        self.fix = fix


def _run(*command: str, timeout_s: float = 20.0) -> str:
    """Return the standard output of a command. Raise Unusable, with its message, if it fails, is missing or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unusable(str(error)) from error
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
        status = f"killed by signal {-result.returncode}" if result.returncode < 0 else f"exit code {result.returncode}"
        raise Unusable(f"{Path(command[0]).name}: {lines[-1] if lines else status}")
    return result.stdout


def _load(name: str) -> ModuleType:
    """Import one file of this package, without the package itself, which imports PyTorch."""
    paths = (OWN / f"{name}.py", OWN / name / "__init__.py")
    path = next((path for path in paths if path.exists()), paths[0])
    spec = importlib.util.spec_from_file_location(f"_doctor_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # for a file, whether it is there or not
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed(*names: str) -> str:
    """Return name and version of the first of these that is installed."""
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            pass
    raise Unusable(NOT_INSTALLED)


def find_megatron() -> str:
    """Return the version of Megatron-core. 0.19 imports Triton and does not require it, nor do PyTorch's CPU wheels."""
    found = installed("megatron-core")
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if numbers >= (0, 19) and not importlib.util.find_spec("triton"):
        raise Unusable(f"{found}, which cannot be imported without Triton: pip install triton")
    return found


LOAD = """import importlib.util, sys

def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""
LOAD_MODULE = LOAD + "load(*sys.argv[1:])"
LOAD_NVSHMEM = f"""import torch  # first, as in a buffer: it has a copy of NVSHMEM
{LOAD}
library = load("nvshmem_library", sys.argv[3])
try:
    load(*sys.argv[1:3])
finally:
    print(library.one_version(sys.argv[2]))"""


def find_package() -> str:
    hidden = _load("_built").hidden_folders(PACKAGE)
    hides = f" (it hides {', '.join(map(str, hidden))})" if hidden else ""
    return f"{_load('_version').__version__} in {PACKAGE}{hides}, with {sys.executable}"


def find_module(engine: str) -> str:
    """Load a compiled module in a process of its own: without the package, and at no risk for this process."""
    name, built = f"_C_{engine}", _load("_built")
    try:
        path = built.find(name, PACKAGE)
    except built.NotBuilt as missing:
        fix = how_to_get_cuda() if engine == "cuda" and not missing.hidden else missing.fix
        raise Unusable(missing.found, "" if engine == "nvshmem" else fix) from missing
    csrc, folders = PACKAGE.parent / "csrc", ["common", engine, *(["cuda"] if engine == "nvshmem" else [])]
    sources = [s for folder in folders for s in (*(csrc / folder).rglob("*.*"), csrc / f"bindings_{folder}.cpp")]
    stale = [s.name for s in sources if s.exists() and s.stat().st_mtime > path.stat().st_mtime]
    if stale:
        raise Unusable(f"older than csrc/ ({', '.join(sorted(stale)[:3])})")
    if engine != "nvshmem":
        _run(sys.executable, "-c", LOAD_MODULE, name, str(path))
        return path.name
    library = str(PACKAGE / "nvshmem_library.py")
    version = _run(sys.executable, "-c", LOAD_NVSHMEM, name, str(path), library, timeout_s=60.0)
    return f"{path.name}, NVSHMEM {version.strip()}"


def find_torch() -> str:
    import torch

    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < TORCH_MINIMUM:
        raise Unusable(f"{torch.__version__} is older than {TORCH_MINIMUM[0]}.{TORCH_MINIMUM[1]}")
    built_for = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"{torch.__version__}, {built_for}"


def find_gloo() -> str:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise Unusable("this PyTorch was built without it")
    return "available"


def find_shared_memory() -> str:
    """Do what two ranks of a node do: one makes a memfd and passes it through a Unix socket, the other one reads it."""
    fd = os.memfd_create("ep_dispatcher_doctor")
    try:
        os.write(fd, b"seen")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # the kernel chooses a name
            listener.listen()
            listener.settimeout(30)
            command = [sys.executable, "-c", READ_MEMORY, bytes(listener.getsockname()).hex()]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as peer:
                with listener.accept()[0] as connection:
                    socket.send_fds(connection, [b"m"], [fd])
                seen = peer.communicate(timeout=30)[0].strip()
    finally:
        os.close(fd)
    if seen != "seen":
        raise Unusable(f"a peer process received a memfd, but read {seen!r} from it")
    return "memfd works, and a peer process receives it through a Unix socket"


READ_MEMORY = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(bytes.fromhex(sys.argv[1]))
    _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    print(os.pread(fds[0], 4, 0).decode())
"""


def find_memory() -> str:
    (available_kib,) = re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    limited = "" if text == "max" else f", limited to {int(text) / 2**30:.1f} GiB in this control group"
    return f"{int(available_kib) / 2**20:.1f} GiB available{limited}"


def find_cores() -> str:
    cores, threads = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    found = f"{cores} usable of {os.cpu_count()}, OMP_NUM_THREADS {threads or 'unset'}"
    if not threads and cores > 1:
        raise Unusable(found)
    return found


def find_switches() -> str:
    envs, given, wrong = _load("envs"), [], []
    for switch in envs.SWITCHES:
        if os.environ.get(switch.name):
            try:
                given.append(f"{switch.name}={switch()}")
            except ValueError as error:
                wrong.append(str(error))
    if wrong:
        raise Unusable("; ".join(wrong))
    return ", ".join(given) or "none set"


def find_unknown_switches() -> str:
    envs = _load("envs")
    unknown = [f"{name} (meant: {', '.join(envs.nearest(name)) or 'unknown'})" for name in envs.unknown()]
    if unknown:
        raise Unusable(", ".join(unknown))
    return "none set"


def first_program(*names: str | None) -> str:
    """Return the path of the first of these that can be run."""
    for path in map(shutil.which, filter(None, names)):
        if path:
            return path
    raise Unusable("not found")


def find_compiler() -> str:
    given = os.environ.get("CXX", "").partition(" ")[0]
    return _run(first_program(given, "g++", "c++", "clang++"), "--version").partition("\n")[0]


def find_nvcc() -> str:
    nvcc = _load("tools/nvcc")
    path = nvcc.find()
    if path is None:
        raise Unusable(f"not in {nvcc.PLACES}", nvcc.FIX)
    release = re.search(r"release [\d.]+", _run(path, "--version"))
    return f"{release.group() if release else 'release unknown'}, {path}"


def how_to_get_cuda() -> str:
    """Return how to get the module of the CUDA engine with what is on this machine."""
    nvcc = _load("tools/nvcc")
    path = nvcc.find()
    return f"{BUILD_CUDA}, with {path}" if path else f"{nvcc.FIX}; then {BUILD_CUDA}"


def find_gpus() -> str:
    import torch

    capability = _load("capability")
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") and "GPU" in _run("nvidia-smi", "-L"):
            raise Unusable("nvidia-smi lists GPUs, but this PyTorch cannot use them")
        raise Unusable(NO_GPUS)
    devices = range(torch.cuda.device_count())
    capabilities = [torch.cuda.get_device_capability(i) for i in devices]
    names = [
        f"{torch.cuda.get_device_name(i)} (compute capability {'.'.join(map(str, capabilities[i]))})" for i in devices
    ]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if not any(map(capability.runs_on, capabilities)):
        raise Unusable(f"{listed}: the CUDA engine needs compute capability {capability.CAPABILITIES}")
    return listed


def nvlink_pairs(topology: str) -> dict[tuple[int, int], bool]:
    """Return whether NVLink joins each pair of GPUs, from the output of `nvidia-smi topo -m`."""
    cells = {}
    for line in re.sub(r"\x1b\[\d*m", "", topology).splitlines():
        row = line.split()
        if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and not row[1].startswith("GPU"):  # not the heading
            cells[int(row[0][3:])] = row[1:]
    return {(a, b): cells[a][b].startswith("NV") for a, b in combinations(sorted(cells), 2)}


def find_nvlink() -> str:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        raise Unusable(f"{count} GPUs, and NVLink joins two or more")
    try:
        pairs, source = nvlink_pairs(_run("nvidia-smi", "topo", "-m")), "nvidia-smi topo"
    except Unusable:
        pairs, source = {}, ""
    if not pairs:  # peer access may also go over PCIe
        source = "from peer access, because nvidia-smi does not tell"
        pairs = {(a, b): torch.cuda.can_device_access_peer(a, b) for a, b in combinations(range(count), 2)}
    apart = [f"{a}-{b}" for (a, b), joined in pairs.items() if not joined]
    if apart:
        raise Unusable(f"not between GPUs {', '.join(apart[:8])}{', ...' if len(apart) > 8 else ''} ({source})")
    return f"between all of {count} GPUs ({source})"


def find_nvshmem() -> str:
    """Look where setup.py does: NVSHMEM_HOME before the wheel."""
    home = os.environ.get("NVSHMEM_HOME")
    if not home:
        return installed("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
    if not Path(home, "include", "nvshmem.h").exists():
        raise Unusable(f"NVSHMEM_HOME={home} has no include/nvshmem.h")
    header = Path(home, "include", "non_abi", "nvshmem_version.h")
    text = header.read_text() if header.exists() else ""
    numbers = re.findall(r"define NVSHMEM_VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION (\d+)", text)
    return f"version {'.'.join(numbers) or 'unknown'}, NVSHMEM_HOME={home}"


def find_rdma() -> str:
    cards = sorted((ROOT / "sys/class/infiniband").glob("*"))
    if not cards:
        raise Unusable("none in /sys/class/infiniband")
    links: dict[str, list[str]] = {}
    for port in sorted((ROOT / "sys/class/infiniband").glob("*/ports/*")):
        if "ACTIVE" in (port / "state").read_text():
            links.setdefault((port / "link_layer").read_text().strip(), []).append(port.parts[-3])
    if not links:
        raise Unusable(f"{', '.join(card.name for card in cards)}: no port is active")
    found = "; ".join(f"{layer}: {', '.join(names)}" for layer, names in links.items())
    if not list((ROOT / "dev/infiniband").glob("uverbs*")):
        raise Unusable(f"{found}; but this process has no /dev/infiniband/uverbs*")
    return found


def find_transport() -> str:
    """Find NVSHMEM's transport between hosts, from its own switches, and check that its requirements are met."""
    name = os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "").lower()
    if name and name not in TRANSPORTS:
        problem = "nothing can leave a host" if name == "none" else "there is no such transport"
        raise Unusable(f"NVSHMEM_REMOTE_TRANSPORT={name}: {problem}; the transports are {', '.join(TRANSPORTS)}")
    needed = {"NVSHMEM": find_nvshmem, "RDMA network cards": find_rdma}
    if name == "libfabric":  # it has other cards too
        del needed["RDMA network cards"]
    lacking = []
    for what, look in needed.items():
        try:
            look()
        except Unusable as error:
            lacking.append(f"{what} ({error})")
    transport = name or "ibrc, the default"
    if lacking:
        raise Unusable(f"{transport}, which lacks {' and '.join(lacking)}")
    problem = _load("nvshmem_library").ibgda_problem(ROOT)
    switch = os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "").lower()
    if problem and switch in ("", "0", "n", "no", "f", "false", "off"):
        return f"{transport}; IBGDA is off: {problem}"
    return f"{transport}; kernels post by IBGDA (NVSHMEM_IB_ENABLE_IBGDA={switch or '1, which a buffer sets'})"


def find_gpudirect() -> str:
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if (ROOT / "sys/module" / module).exists():
            return f"{module} is loaded"
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Unusable("cannot be told: no nvidia_peermem, and no GPU driver to ask about dma-buf") from None
    count, shares = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise Unusable("cannot be told: no nvidia_peermem, and the driver finds no GPU to ask about dma-buf")
    for ordinal in range(count.value):  # a CUdevice is its ordinal
        if cuda.cuDeviceGetAttribute(ctypes.byref(shares), DMA_BUF_SUPPORTED, ordinal) or shares.value != 1:
            raise Unusable("neither nvidia_peermem nor dma-buf")
    return "the GPUs share memory by dma-buf; whether the network cards accept it cannot be told here"


def find_transformer_engine() -> str:
    found, te = installed("transformer-engine"), _load("te_version")
    if te.graphs_lose_gradients():
        raise Unusable(f"{found}: {te.FAULT}", TE_GRAPHS_FIX)
    return found


# Uses that not every machine has. Findings for uses that a machine does not have are printed only with --all.
BUILDING, GPUS, NVSHMEM = "building from source", "GPUs", "NVSHMEM"
MEGATRON, MEGATRON_GPUS = "Megatron-core", "Megatron-core on GPUs"

EVERYTHING = "nothing works without it"
BUILD = "make setup, or pip install -e ."
ONLY_CUDA = 'only for engine="cuda"'
ONLY_HOSTS = 'only for engine="cuda" on several hosts with NVSHMEM'
ONLY_MEGATRON = "only for models of Megatron-core"
BUILD_CUDA = "EP_DISPATCHER_CUDA=1 make setup, or EP_DISPATCHER_CUDA=1 pip install -e . in the sources"
SUSPENDABLE = f"{ONLY_CUDA} and suspendable=True"
GPUS_FIX = "a GPU of compute capability 9.0 or newer, and a PyTorch for CUDA"
BINDINGS_FIX = "pip install 'cuda-bindings==13.*' (12.* for CUDA 12)"
NVSHMEM_FIX = "pip install nvidia-nvshmem-cu13 (cu12 for CUDA 12), or set NVSHMEM_HOME; then build again with "
NVSHMEM_FIX += "EP_DISPATCHER_NVSHMEM=1 pip install --no-build-isolation -e ."
MEMORY_FIX = "run all ranks of a host as one user in one container, on Linux, with /proc mounted"
CARDS_FIX = "InfiniBand or RoCE cards with a link; in a container also their devices (--device /dev/infiniband)"
TRANSPORT_FIX = "see NVSHMEM and RDMA network cards; unset NVSHMEM_REMOTE_TRANSPORT, or set it to one of these"
GPUDIRECT_FIX = "modprobe nvidia_peermem on the host, or the open kernel modules of the driver, which have dma-buf"
TE_FIX = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.14' (with CUDA)"
TE_GRAPHS_FIX = (
    "none with the Megatron plug-in, whose register() prevents it; elsewhere Transformer Engine 2.14 or newer"
)
THREADS_FIX = "export OMP_NUM_THREADS=<cores divided by ranks> (torchrun sets it to 1)"
PROBES = [
    Probe("ep_dispatcher", find_package, ERROR, EVERYTHING, "pip install ."),
    Probe("compiled module cpu", partial(find_module, "cpu"), ERROR, EVERYTHING, BUILD),
    Probe("compiled module cuda", partial(find_module, "cuda"), OPTIONAL, ONLY_CUDA, BUILD_CUDA, GPUS),
    Probe("compiled module nvshmem", partial(find_module, "nvshmem"), OPTIONAL, ONLY_HOSTS, NVSHMEM_FIX, NVSHMEM),
    Probe("Python", lambda: sys.version.split()[0], ERROR, EVERYTHING, "install Python 3.10 or newer"),
    Probe("PyTorch", find_torch, ERROR, EVERYTHING, "pip install 'torch>=2.9'"),
    Probe("gloo", find_gloo, ERROR, "ranks find each other with it", "pip install 'torch>=2.9' (its wheels have gloo)"),
    Probe("shared memory", find_shared_memory, ERROR, "ranks of one node exchange rows in it", MEMORY_FIX),
    Probe("memory", find_memory, OPTIONAL, "shared memory takes part of it", "mount /proc"),
    Probe("cores", find_cores, OPTIONAL, "speed: each rank starts as many threads as there are cores", THREADS_FIX),
    Probe("switches", find_switches, ERROR, "a Buffer cannot be made with a wrong value", "set or unset them"),
    Probe("unknown switches", find_unknown_switches, OPTIONAL, "they have no effect", "unset them, or correct them"),
    Probe("C++ compiler", find_compiler, OPTIONAL, "only for building from source", "apt-get install g++", BUILDING),
    Probe("nvcc", find_nvcc, OPTIONAL, "only for building the cuda module", "install the CUDA toolkit", BUILDING),
    Probe("GPUs", find_gpus, OPTIONAL, ONLY_CUDA, GPUS_FIX, GPUS),
    Probe("cuda-bindings", partial(installed, "cuda-bindings"), OPTIONAL, SUSPENDABLE, BINDINGS_FIX, GPUS),
    Probe("NVLink", find_nvlink, OPTIONAL, f"{ONLY_CUDA} with several ranks", "GPUs joined by NVLink", GPUS),
    Probe("NVSHMEM", find_nvshmem, OPTIONAL, f"{ONLY_HOSTS}, to build and to run its module", NVSHMEM_FIX, NVSHMEM),
    Probe("RDMA network cards", find_rdma, OPTIONAL, ONLY_HOSTS, CARDS_FIX, NVSHMEM),
    Probe("NVSHMEM transport", find_transport, OPTIONAL, ONLY_HOSTS, TRANSPORT_FIX, NVSHMEM),
    Probe("GPUDirect RDMA", find_gpudirect, OPTIONAL, f"{ONLY_HOSTS}, for the network cards", GPUDIRECT_FIX, NVSHMEM),
    Probe("megatron-core", find_megatron, OPTIONAL, ONLY_MEGATRON, "pip install 'ep_dispatcher[megatron]'", MEGATRON),
    Probe(
        "Transformer Engine",
        find_transformer_engine,
        OPTIONAL,
        f"{ONLY_MEGATRON} with layers of Transformer Engine",
        TE_FIX,
        MEGATRON_GPUS,
    ),
    Probe(
        "apex",
        partial(installed, "apex"),
        OPTIONAL,
        f"{ONLY_MEGATRON}, for fused layers",
        "build it from source",
        MEGATRON_GPUS,
    ),
]


def what_is_used() -> dict[str, str]:
    """Return what serves a Buffer with default arguments, by use."""
    built = _load("_built")
    try:
        built.find("_C_cpu", PACKAGE)
        from ep_dispatcher import engines, envs

        engine, ranks_per_node, wire = engines.choose(envs.engine()), envs.ranks_per_node(), envs.wire()
    except built.NotBuilt:
        return {"engine": "none: nothing is built"}
    except Exception as error:  # as for the probes
        return {"engine": f"none: {type(error).__name__}: {error}"}
    node = f"{ranks_per_node} ranks (EP_DISPATCHER_RANKS_PER_NODE)" if ranks_per_node else "the ranks of one host"
    used = {"engine": engine}
    if engine == "cpu" and (problem := engines.cuda_problem()):
        used["why not cuda"] = problem
    used["a node is"] = node
    if engine == "cpu":
        return used | {"inside a node": "shared memory (memfd)", "between nodes": "torch.distributed (gloo)"}
    nvshmem = next(probe for probe in PROBES if probe.what == "compiled module nvshmem").run()
    wires = {
        "auto": "PyTorch's NCCL, but NVLink between virtual nodes of one host",  # engines/cuda/regions.py chooses it
        "peer": "NVLink, by EP_DISPATCHER_WIRE=peer: all ranks have to be on one host",
        "nccl": "PyTorch's NCCL, by EP_DISPATCHER_WIRE=nccl",
    }
    between = wires.get(wire, f"NVSHMEM, by EP_DISPATCHER_WIRE={wire}")
    if wire.startswith("nvshmem") and nvshmem.state != OK:
        between = f"nothing, all ranks have to be on one host: {nvshmem.what} {nvshmem.found}"
    return used | {"inside a node": "NVLink peer memory", "between nodes": between}


def self_test() -> None:
    """Run one rank with identity experts: every token comes back once per chosen expert, summed."""
    import torch
    import torch.distributed as dist

    import ep_dispatcher as ep

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.arange(5 * 64, dtype=torch.float32, device="cpu").reshape(5, 64)
    topk_idx = torch.tensor([[0, 1], [3, -1], [2, 0], [-1, -1], [1, 3]], dtype=torch.int64, device="cpu")
    sizes: dict[str, Any] = dict(hidden=64, num_experts=4, num_topk=2, max_tokens_per_rank=5)
    # ranks_per_node=1, because EP_DISPATCHER_RANKS_PER_NODE is meant for jobs of more ranks.
    buffer = ep.Buffer(dist.group.WORLD, **sizes, dtype=torch.float32, ranks_per_node=1, timeout_s=20.0)
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


CALL_SELF_TEST = "from ep_dispatcher.tools.doctor import self_test; self_test()"


def run_self_test() -> str:
    """Run ``self_test`` in a process of its own, which may crash or hang."""
    code = f"import sys; sys.path.insert(0, sys.argv[1]); {CALL_SELF_TEST}"
    _run(sys.executable, "-c", code, str(PACKAGE.parent), timeout_s=120)
    return "dispatch and combine on one rank give the right results"


SELF_TEST = Probe("self-test", run_self_test, ERROR, EVERYTHING, f"see the whole output: python -c '{CALL_SELF_TEST}'")


def uses_here(findings: list[Finding]) -> set[str]:
    """Return the uses that this machine seems to have, or that this process asks for; "" stands for all uses."""
    by_name = {finding.what: finding for finding in findings}
    uses = {""}
    if by_name["GPUs"].found != NO_GPUS:
        uses.add(GPUS)
    if by_name["megatron-core"].found != NOT_INSTALLED:
        uses |= {MEGATRON, MEGATRON_GPUS} if GPUS in uses else {MEGATRON}
    if by_name["compiled module nvshmem"].state == OK or os.environ.get("EP_DISPATCHER_WIRE", "").startswith("nvshmem"):
        uses.add(NVSHMEM)
    if any(finding.what.startswith("compiled") and finding.state != OK and finding.use in uses for finding in findings):
        uses.add(BUILDING)
    return uses


def report(run: bool = True) -> dict:
    """Run all probes. Never raises. Return {"ok": bool, "findings": [Finding as a dict], "used": {use: what
    serves it}, "uses_here": [the uses of findings that matter on this machine]}."""
    findings = [probe.run() for probe in PROBES]
    used = what_is_used()
    ok = all(finding.state != ERROR for finding in findings) and not used["engine"].startswith("none")
    if run and ok:
        findings.append(SELF_TEST.run())
        ok = findings[-1].state == OK
    here = sorted(uses_here(findings))
    return {"ok": ok, "findings": [asdict(finding) for finding in findings], "used": used, "uses_here": here}


def as_text(result: dict, everything: bool = False) -> str:
    """Return the lines to print. Without ``everything`` these are only about uses that this machine seems to have."""
    shown = [finding for finding in result["findings"] if everything or finding["use"] in result["uses_here"]]
    lines = ["Found:"]
    for finding in shown:
        mark = {OK: "ok", OPTIONAL: "--", ERROR: "!!"}[finding["state"]]
        lines.append(f"  {mark}  {finding['what']:<23} {finding['found']}")
        if finding["matters"]:
            lines.append(f"{'':31}impact: {finding['matters']}")
        if finding["fix"]:
            lines.append(f"{'':31}fix: {finding['fix']}")
    lines += ["", "A Buffer with default arguments uses:"]
    for purpose, used in result["used"].items():
        lines.append(f"  {'!!' if used.startswith('none') else '  '}  {purpose:<23} {used}")
    verdict = "A Buffer can be made here." if result["ok"] else "No Buffer can be made here: see the lines with !!"
    lines += ["", verdict]
    left_out = dict.fromkeys(finding["use"] for finding in result["findings"] if finding not in shown)
    if left_out:
        lines.append(f"Not shown, because they seem to be of no use here: {', '.join(left_out)}. --all shows them.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ep_dispatcher.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also print what seems to be of no use on this machine")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument("--no-run", action="store_true", help="do not try a Buffer on one rank")
    args = parser.parse_args(arguments)
    result = report(run=not args.no_run)
    print(json.dumps(result, indent=2) if args.json else as_text(result, args.all))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    if Path(sys.path[0]).resolve() == PACKAGE / "tools":  # run as a file, which sees its siblings, not the package
        sys.path[0] = str(PACKAGE.parent)
    sys.exit(main())
