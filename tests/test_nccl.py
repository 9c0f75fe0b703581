"""The NCCL wire: every bit is that of the definition, over NVLink and over sockets; who may use it."""

import contextlib
import os
import threading
import time
from types import SimpleNamespace

import nccl_wire
import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on_ranks
from lib.cuda_build import needs_module
from lib.errors import assert_refused
from lib.faults import LONG_S
from lib.nvshmem import run_wire

import ep_dispatcher as ep
from ep_dispatcher import engines
from ep_dispatcher.gather import Gather
from ep_dispatcher.topology import Topology

LIMIT_S = 3.0
SETTINGS = dict(EP_DISPATCHER_WIRE="nccl")
SOCKETS = SETTINGS | dict(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
SHARED_GPU = os.environ.get("EP_TEST_SHARED_GPU") == "1"
on_gpus = [
    pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}"),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 and not SHARED_GPU, reason="fewer than 2 GPUs, and no EP_TEST_SHARED_GPU=1"
    ),
]
# Ranks of a node share a GPU. That needs NVIDIA's MPS, or it takes long.
SHARES_GPU = pytest.mark.skipif(not SHARED_GPU, reason="no EP_TEST_SHARED_GPU=1")
SPLITS = [pytest.param(2, 1, marks=on_gpus), pytest.param(4, 2, marks=[*on_gpus, SHARES_GPU])]
QUICK = ("routing", "graph", "rows")


@pytest.mark.parametrize("part", nccl_wire.PARTS)
@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_over_nvlink(num_ranks, ranks_per_node, part):
    """Over sockets where all nodes share a GPU."""
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
        case = nccl_wire.Case(num_ranks, ranks_per_node, **nccl_wire.nodes.SMALL)
        nccl_wire.PARTS[part](pool, case)


@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS[:1])
def test_graphs_outlive_a_suspend(num_ranks, ranks_per_node):
    run_wire("nccl", SETTINGS | dict(NCCL_GRAPH_REGISTER="0"), num_ranks, ranks_per_node, "suspend")


# ---- the communicator, with a stand-in for NCCL ---------------------------------------------------------------------


class StandIn:
    """A communicator of NCCL.

    ``fails``, ``hangs``: the step, and the ranks on which it fails, or does not return before ``back`` is set
    """

    fails: tuple[str, tuple[int, ...]] = ("", ())
    hangs: tuple[str, tuple[int, ...]] = ("", ())
    back = threading.Event()
    made: list["StandIn"] = []

    def __init__(self):
        self.freed: list[bool] = []
        self.steps: list[str] = []
        StandIn.made.append(self)

    @staticmethod
    def make_id() -> bytes:
        return b"id of %d" % dist.get_rank()

    def take(self, step: str) -> None:
        if step == StandIn.hangs[0] and dist.get_rank() in StandIn.hangs[1]:
            StandIn.back.wait(30)
        if step == StandIn.fails[0] and dist.get_rank() in StandIn.fails[1]:
            raise RuntimeError(f"NCCL, {step}: remote process exited")
        self.steps.append(step)
        if self.freed:
            raise RuntimeError("NCCL: the communicator was freed while it was made")

    def join(self, comm_id: bytes, rank: int, num_ranks: int, max_ctas: int) -> None:
        self.made_with = (comm_id, rank, num_ranks, max_ctas)
        self.take("join")

    def connect(self) -> None:
        self.take("connect")

    def free(self, aborts: bool) -> None:
        self.freed.append(aborts)


def make_rail(gpus: str, ranks_per_node: int, limit_s: float = LONG_S):
    """A rail as CudaEngine makes it, on these GPUs."""
    from ep_dispatcher.engines.cuda import nccl

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
    nccl._C_cuda, nccl.END_S = SimpleNamespace(NcclComm=StandIn), 30.0  # the machine may be busy
    topology = Topology.make(rank, ["host"] * num_ranks, ranks_per_node)
    dist.barrier()  # all have what they import
    with Gather(dist.group.WORLD, limit_s) as gather:
        return nccl.NcclRail(SimpleNamespace(topology=topology, gather=gather, timeout_s=limit_s, nccl_sms=4), [*gpus])


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
        assert order == ["before"] and StandIn.made[-1].freed == [not sound]


@needs_module
@on_ranks(4, fresh=True)
def test_a_gpu_of_two_nodes_is_refused(rank):
    assert "with a GPU that two of the ranks [0, 2]" in assert_refused("EP_DISPATCHER_WIRE", make_rail, "ABAB", 2)
    make_rail("AABB", 2).free()  # ranks of a node may share one
    os.environ["NCCL_HOSTID"] = f"node {rank // 2}"  # to NCCL these are two GPUs
    make_rail("ABAB", 2).free()


@needs_module
@pytest.mark.parametrize(
    "step,hanging", [exhaustive("join", (1, 3)), ("join", (3,)), ("connect", (1, 3)), exhaustive("connect", (3,))]
)
@on_ranks(4, fresh=True)
def test_a_communicator_that_never_starts(rank, step, hanging):
    """A rank hangs inside NCCL, or all of its rail do. All say so in time, and free what they have, once.

    What comes back from NCCL later is not used: it learns that it was freed.
    """
    StandIn.hangs = (step, hanging)
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as caught:
        make_rail("ABCD", 2, LIMIT_S)
    assert time.monotonic() - begin < LIMIT_S + 8
    assert {1, 3} & set(caught.value.late_ranks) and caught.value.phase == "NCCL's start"
    (comm,) = StandIn.made
    assert comm.freed == [True]
    before = list(comm.steps)
    StandIn.back.set()
    time.sleep(0.5)
    assert comm.freed == [True] and comm.steps == before + [step] * (rank in hanging)


@needs_module
@pytest.mark.parametrize("step", ["join", "connect"])
@on_ranks(4, fresh=True)
def test_a_communicator_that_fails_on_one_rank(rank, step):
    """All ranks raise it, and free theirs."""
    StandIn.fails = (step, (2,))
    with pytest.raises(RuntimeError, match=rf"NCCL, {step}: remote process exited \(on rank 2\)"):
        make_rail("ABCD", 2)
    assert [comm.freed for comm in StandIn.made] == [[True]]


@needs_module
@on_ranks(2, fresh=True)
def test_it_is_freed_even_if_the_abort_of_the_rank_fails(rank):
    """After a sticky error of CUDA the copies of an abort raise. NCCL's kernels have to end all the same."""
    from ep_dispatcher.engines.cuda.engine import _abort

    def fails():
        raise RuntimeError("CUDA error")

    for run in (lambda: None, fails):
        rail = make_rail("AB", 1)
        with pytest.raises(RuntimeError) if run is fails else contextlib.nullcontext():
            _abort(SimpleNamespace(run=run, wait=fails), rail)
        assert StandIn.made[-1].freed == [True]
