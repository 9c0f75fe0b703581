"""What programs of DeepEP 2 ask a buffer or a group by functions: how many nodes, how many ranks each, a barrier."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import DeviceMesh, ProcessGroup

from ep_dispatcher import checks, engines, envs
from ep_dispatcher.gather import Gather
from ep_dispatcher.nvlink import find_nodes
from ep_dispatcher.topology import Topology, host_id, registered_group

# The nodes that were found for a group, with the EP_DISPATCHER_RANKS_PER_NODE that they were found for.
_found: WeakKeyDictionary[ProcessGroup, tuple[int | str | None, Topology]] = WeakKeyDictionary()


def find_topology(group: ProcessGroup | DeviceMesh, same: dict[str, int] | None = None) -> Topology:
    """Find the nodes of a group. Collective. same: numbers of a caller, a ValueError on all ranks where they differ."""
    group, ranks_per_node = registered_group(group), envs.ranks_per_node()
    with Gather(group, envs.timeout_s()) as gather:
        found = gather("hosts", lambda: (host_id(), engines.choose(envs.engine()), same or {}))
        hosts, names, numbers = (list(of_ranks) for of_ranks in zip(*found, strict=True))
        with gather.same_on_all_ranks():
            checks.require_same(numbers)
        engine = "cpu" if "cpu" in names else "cuda"
        topology, _ = find_nodes(gather, group.rank(), hosts, ranks_per_node, engine)
    _found[group] = ranks_per_node, topology
    return topology


def topology_of(group: ProcessGroup | DeviceMesh) -> Topology:
    """Return the nodes of a group. The first call for a group is collective, as in DeepEP; later ones are local."""
    known = _found.get(registered_group(group))
    if known is None or known[0] != envs.ranks_per_node():
        return find_topology(group)
    return known[1]


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """Return the number of nodes, and of ranks of each, of a group or a buffer."""
    if hasattr(group_or_buffer, "get_physical_domain_size"):
        return group_or_buffer.get_physical_domain_size()
    topology = topology_of(group_or_buffer)
    return topology.num_nodes, topology.ranks_per_node


def get_logical_domain_size(group_or_buffer: Any, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
    """Return the same; without hybrid mode 1 and the number of ranks.

    allow_hybrid_mode  of a group: None stands for True. A buffer has its own
    """
    if hasattr(group_or_buffer, "get_logical_domain_size"):
        return group_or_buffer.get_logical_domain_size()
    if allow_hybrid_mode in (None, True):
        return get_physical_domain_size(group_or_buffer)
    return 1, registered_group(group_or_buffer).size()


def destroy_all_managed_nccl_comm() -> None:
    """Nothing to do: communicators belong to the engine's buffers, and end with them."""


def barrier(
    buffer: Any,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """Call ``buffer.barrier``, of an EPBuffer."""
    buffer.barrier(wait_comm_stream, with_cpu_sync, sequential, context_idx)


def get_comm_stream(buffer: Any) -> torch.cuda.Stream:
    """Return the stream of the buffer's asynchronous operations."""
    return buffer.get_comm_stream()


def check_nvlink_connections(group: ProcessGroup | DeviceMesh) -> None:
    """Nothing to do: the engine finds out which memory it reaches when a buffer is made, and says so if it cannot."""
