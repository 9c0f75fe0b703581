"""Which ranks share a node, and which share a rail."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from ep_dispatcher import checks


def host_id() -> str:
    """Return an id that two processes share if they can pass each other memory.

    They need one kernel, one network namespace for their sockets, and one process namespace to notice each other's end.
    """
    namespaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return " ".join((Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *namespaces))


def process_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """Return the process group of a mesh of one dimension, and a group as it is. ValueError for anything else."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            given = f"a DeviceMesh of {group.ndim} dimensions{f' {names}' if names else ''}"
            example = names[-1] if names else "name"
            checks.fail("group", given, f'one of one dimension, such as mesh["{example}"]')
        group = group.get_group() if group.get_coordinate() else None  # None on other ranks
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        checks.refuse("this process is not a member of group")
    if not isinstance(group, ProcessGroup):
        checks.fail(
            "group",
            f"of type {type(group).__name__}",
            "a torch.distributed.ProcessGroup, or a DeviceMesh of one dimension",
        )
    return group


def registered_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """Return the group if torch.distributed knows it, or else the one that it holds: a wrapper forwards to that.

    Programs that drop a group's memory and make the group again later give such wrappers to Megatron. The wrapped group
    has the name and the ranks, and it is another one after it was made again. ValueError if there is none.
    """
    group = process_group(group)
    known, inner = dist.distributed_c10d._world.pg_map, group
    while inner not in known:
        held = [value for value in getattr(inner, "__dict__", {}).values() if isinstance(value, ProcessGroup)]
        if len(held) != 1:
            checks.refuse(
                f"group is a {type(group).__name__} of {group.size()} ranks that torch.distributed does not know: "
                "give a group of "
                "init_process_group or new_group, or a wrapper that holds one such group"
            )
        inner = held[0]
    return inner


class GroupReference:
    """A weak reference to a registered group, which torch.distributed holds until destroy_process_group.

    A group that something else holds keeps its threads after that. If one of them still has a Python object to free
    when Python ends, the process aborts ("terminate called without an active exception").
    """

    def __init__(self, group: ProcessGroup):
        self._reference = weakref.ref(group)

    def group(self) -> ProcessGroup:
        """Return the group. ValueError after destroy_process_group."""
        group = self._reference()
        if group is None:
            checks.refuse(
                "the process group of this buffer is gone: destroy_process_group() has destroyed it; make a new buffer "
                "on another group"
            )
        return group


@dataclass(frozen=True)
class Topology:
    """``nodes[n]`` are the ranks of node n in ascending order; all nodes have the same size."""

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    @staticmethod
    def make(rank: int, host_of: list[str], ranks_per_node: int | None, place: str = "host") -> Topology:
        """Group the ranks into nodes of ``ranks_per_node`` consecutive ranks, or (None) one node per host.

        Raises ValueError when the ranks cannot be split so. It calls what ``host_of`` names a ``place``.
        """
        num_ranks = len(host_of)
        if ranks_per_node is not None:
            if ranks_per_node < 1 or num_ranks % ranks_per_node:
                checks.fail("ranks_per_node", ranks_per_node, f"a divisor of the number of ranks ({num_ranks})")
            nodes = [tuple(range(r, r + ranks_per_node)) for r in range(0, num_ranks, ranks_per_node)]
            for node in nodes:
                if len({host_of[r] for r in node}) > 1:
                    raise ValueError(
                        f"ranks_per_node is {ranks_per_node}, but ranks {list(node)} do not share one {place}: it "
                        "has to put "
                        f"only ranks of one {place} into a node"
                    )
        else:
            hosts = list(dict.fromkeys(host_of))
            nodes = [tuple(r for r in range(num_ranks) if host_of[r] == host) for host in hosts]
            if len({len(node) for node in nodes}) > 1:
                raise ValueError(
                    f"group has {place}s of {[len(node) for node in nodes]} ranks, but each has to have the same "
                    "number; "
                    "or give ranks_per_node, a size that divides each of them"
                )
        return Topology(rank, tuple(nodes))

    @property
    def num_ranks(self) -> int:
        return len(self.nodes) * len(self.nodes[0])

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def ranks_per_node(self) -> int:
        return len(self.nodes[0])

    @cached_property
    def node(self) -> int:
        return next(n for n, ranks in enumerate(self.nodes) if self.rank in ranks)

    @cached_property
    def local_rank(self) -> int:
        return self.nodes[self.node].index(self.rank)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node, this one included."""
        return self.nodes[self.node]

    @property
    def rail(self) -> tuple[int, ...]:
        """The ranks with this rank's local index, by node."""
        return tuple(ranks[self.local_rank] for ranks in self.nodes)
