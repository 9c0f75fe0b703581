"""The NCCL wire: every bit is that of the definition, over NVLink and over sockets; who may use it."""

import os
import threading
import time
from types import SimpleNamespace

import nccl_wire
import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from test_cuda_build import needs_module
from test_errors import assert_refused
from test_nvshmem import run_wire

import ep_dispatcher as ep
from ep_dispatcher import engines
from ep_dispatcher.gather import Gather
from ep_dispatcher.topology import Topology

LIMIT_S = 3.0
SETTINGS = dict(EP_DISPATCHER_WIRE="nccl")
SOCKETS = SETTINGS | dict(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
on_gpus = [
    pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs: NCCL takes one for each node"),
]
# Ranks of a node share a GPU. That needs NVIDIA's MPS, or it takes long.
SHARES_GPU = pytest.mark.skipif(os.environ.get("EP_TEST_SHARED_GPU") != "1", reason="no EP_TEST_SHARED_GPU=1")
SPLITS = [pytest.param(2, 1, marks=on_gpus), pytest.param(4, 2, marks=[*on_gpus, SHARES_GPU])]
QUICK = ("routing", "graph", "rows")


@pytest.mark.parametrize("part", nccl_wire.PARTS)
@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_over_nvlink(num_ranks, ranks_per_node, part):
    run_wire("nccl", SETTINGS, num_ranks, ranks_per_node, part)


@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_over_sockets(num_ranks, ranks_per_node):
    """As between hosts without an InfiniBand card."""
    run_wire("nccl", SOCKETS, num_ranks, ranks_per_node, *QUICK)


@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS[:1])
def test_with_one_queue_of_the_gpu(num_ranks, ranks_per_node):
    """Megatron asks for it. The side stream has a queue of its own all the same."""
    run_wire("nccl", SETTINGS | dict(CUDA_DEVICE_MAX_CONNECTIONS="1"), num_ranks, ranks_per_node, *QUICK)


@pytest.mark.parametrize("part", QUICK)
@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_between_two_hosts(make_hosts, monkeypatch, num_ranks, ranks_per_node, part):
    """Through a network of this machine, by default: without EP_DISPATCHER_WIRE."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("EP_DISPATCHER_WIRE", raising=False)
    with nccl_wire.start(num_ranks, ranks_per_node, make_hosts(2)) as pool:
        case = nccl_wire.Case(num_ranks, ranks_per_node, **nccl_wire.test_nodes.SMALL)
        nccl_wire.PARTS[part](pool, case)


@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS[:1])
def test_graphs_outlive_a_suspend(num_ranks, ranks_per_node):
    run_wire("nccl", SETTINGS | dict(NCCL_GRAPH_REGISTER="0"), num_ranks, ranks_per_node, "suspend")


# ---- the communicator, with a stand-in for NCCL ---------------------------------------------------------------------


class StandIn:
    """A communicator of NCCL. ``hangs``: ranks whose start never returns."""

    hangs: tuple[int, ...] = ()
    freed: list[bool]

    def __init__(self, comm_id: bytes, rank: int, num_ranks: int, max_ctas: int):
        if dist.get_rank() in StandIn.hangs:
            threading.Event().wait(30)
        self.made_with = (comm_id, rank, num_ranks, max_ctas)
        StandIn.freed = []

    @staticmethod
    def make_id() -> bytes:
        return b"id of %d" % dist.get_rank()

    def free(self, aborts: bool) -> None:
        StandIn.freed.append(aborts)


def make_rail(gpus: str, ranks_per_node: int):
    """A rail as CudaEngine makes it, on these GPUs."""
    from ep_dispatcher.engines.cuda import nccl

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
    nccl._C_cuda, nccl.END_S = SimpleNamespace(NcclComm=StandIn), 30.0  # the machine may be busy
    topology = Topology.make(rank, ["host"] * num_ranks, ranks_per_node)
    with Gather(dist.group.WORLD, LIMIT_S) as gather:
        return nccl.NcclRail(SimpleNamespace(topology=topology, gather=gather, timeout_s=LIMIT_S, nccl_sms=4), [*gpus])


@needs_module
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@on_ranks(4, fresh=True)
def test_ranks_join_the_communicator_of_their_rail(rank, ranks_per_node):
    rail = make_rail("ABCD", ranks_per_node)
    place = rank % ranks_per_node
    assert rail._comm.made_with == (b"id of %d" % place, rank // ranks_per_node, 4 // ranks_per_node, 4)
    for sound in (False, True):
        rail = make_rail("ABCD", ranks_per_node)
        rail.is_sound = sound
        order: list[str] = []
        rail.free(lambda order=order: order.append("before"))
        rail.free(lambda order=order: order.append("again"))
        assert order == ["before"] and StandIn.freed == [not sound]


@needs_module
@on_ranks(4, fresh=True)
def test_a_gpu_of_two_nodes_is_refused(rank):
    assert "with a GPU that two of the ranks [0, 2]" in assert_refused("EP_DISPATCHER_WIRE", make_rail, "ABAB", 2)
    make_rail("AABB", 2).free()  # ranks of a node may share one


@needs_module
@on_ranks(4, fresh=True)
def test_a_communicator_that_never_starts(rank):
    """Rank 3 hangs inside NCCL, or all who wait for it do."""
    StandIn.hangs = (1, 3)
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError):
        make_rail("ABCD", 2)
    assert time.monotonic() - begin < LIMIT_S + 8
