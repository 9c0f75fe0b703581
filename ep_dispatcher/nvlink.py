"""How far NVLink reaches: to the GPUs of a host, or to those of several hosts, as in GB200 and GB300 NVL72.

NVML, NVIDIA's management library, says which NVLink domain a GPU is in: which cluster, and which clique of it. GPUs of
a domain can map each other's memory by fabric handles, if their processes have an IMEX channel.
"""

from __future__ import annotations

import ctypes

import torch

from ep_dispatcher import checks
from ep_dispatcher.engines.cuda.device_memory import try_fabric
from ep_dispatcher.gather import Gather
from ep_dispatcher.memory import MAX_LOCAL
from ep_dispatcher.topology import Topology

_NVML = "libnvidia-ml.so.1"
_SUCCESS, _NOT_SUPPORTED = 0, 3  # of nvmlReturn_t
_STATES = ("not supported", "not started", "in progress", "completed")


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t of nvml.h."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


def own_domain() -> tuple[str, str]:
    """Return the NVLink domain of the current GPU, "" if there is none or it is not known; and what fails, or ""."""
    device, domain = torch.cuda.current_device(), ""
    try:
        domain = _domain(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        if domain:
            try_fabric(device)
    except (ImportError, OSError, RuntimeError) as error:  # an answer too: then nodes are hosts
        return domain, str(error)
    return domain, ""


def _domain(uuid: str) -> str:
    """Ask NVML for the domain of a GPU. OSError if there is no NVML, RuntimeError if it does not know."""
    nvml = ctypes.CDLL(_NVML)
    if not hasattr(nvml, "nvmlDeviceGetGpuFabricInfoV"):  # it came before the first GPUs with such domains
        return ""

    def call(name: str, *arguments: object) -> bool:
        status = getattr(nvml, name)(*arguments)
        if status not in (_SUCCESS, _NOT_SUPPORTED):
            raise RuntimeError(f"{name} returned {status}")
        return status == _SUCCESS

    call("nvmlInit_v2")
    try:
        gpu, info = ctypes.c_void_p(), _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
        call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(gpu))
        if not call("nvmlDeviceGetGpuFabricInfoV", gpu, ctypes.byref(info)) or info.state == 0:
            return ""
    finally:
        call("nvmlShutdown")
    if info.state != 3 or info.status != _SUCCESS:
        state = _STATES[info.state] if info.state < len(_STATES) else info.state
        raise RuntimeError(f"NVLink's fabric has the state {state}, and the status {info.status}")
    return f"{bytes(info.cluster).hex()}.{info.clique}" if any(info.cluster) else ""


def find_nodes(
    gather: Gather, rank: int, hosts: list[str], ranks_per_node: int | str | None, engine: str
) -> tuple[Topology, str]:
    """Return the nodes of a buffer, and why they are hosts where they should be larger, or "". Collective.

    Nodes are the hosts. With the CUDA engine they are the NVLink domains that span several hosts; where ranks cannot
    use these, or do not fill them evenly, nodes are the hosts again. With "nvlink" this is a ValueError.
    """
    demanded, per_node = ranks_per_node == "nvlink", ranks_per_node if isinstance(ranks_per_node, int) else None
    if engine != "cuda" or len(set(hosts)) == 1:
        with gather.same_on_all_ranks():
            return Topology.make(rank, hosts, per_node), ""
    domains = gather("NVLink domains", own_domain)
    hosts_of: dict[str, set[str]] = {"": set(hosts)}  # where a domain is not known, it may span all hosts
    for host, (domain, _) in zip(hosts, domains, strict=True):
        hosts_of.setdefault(domain, set()).add(host)
    spans = {domain for domain, on in hosts_of.items() if len(on) > 1}
    problems = [f"rank {r}: {problem}" for r, (domain, problem) in enumerate(domains) if problem and domain in spans]
    with gather.same_on_all_ranks():
        try:
            if problems:
                checks.refuse(
                    f"ranks_per_node is 'nvlink', but NVLink cannot be used on {problems[0]}: give None or an integer"
                )
            joined = [domain if domain in spans and domain else host for host, (domain, _) in zip(hosts, domains)]
            topology = Topology.make(rank, joined, per_node, "NVLink domain")
            neighbours = [r for node in topology.nodes for r in node] == list(range(topology.num_ranks))
            if not neighbours or topology.ranks_per_node > MAX_LOCAL:
                nodes = f"NVLink domains of the ranks {list(topology.nodes)}"
                checks.refuse(f"group has {nodes}, but each has to be of neighbouring ranks, at most {MAX_LOCAL}")
            return topology, ""
        except ValueError as error:
            if demanded:
                raise
            why_hosts = "" if per_node else problems[0] if problems else str(error)
            return Topology.make(rank, hosts, per_node), why_hosts
