"""Regions in NVSHMEM's heap: ranks agree on them, also after one of them has failed. A stand-in plays NVSHMEM."""

import itertools
import logging
import os
import sys
import threading
import time
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on_ranks
from lib.cuda_build import needs_module
from lib.faults import LONG_S

import ep_dispatcher as ep
from ep_dispatcher import nvshmem_library
from ep_dispatcher.gather import Gather
from ep_dispatcher.nvshmem_library import IBGDA
from ep_dispatcher.topology import Topology

LIMIT_S = 4.0
pytestmark = needs_module


class StandIn(ModuleType):
    """NVSHMEM of one rank: addresses are 1000, 2000, ...; PE 0 reaches all others, at 1 more each, others only PE 0."""

    def __init__(self, rank: int, num_ranks: int, pe: int | None = None):
        super().__init__("ep_dispatcher._C_nvshmem")
        self.pe, self.num_ranks, self.hangs = rank if pe is None else pe, num_ranks, threading.Event()
        self.running, self.addresses, self.quiets = False, itertools.count(1000, 1000), 0
        self.__file__ = __file__  # it has this text: _C_nvshmem is built with NVSHMEM 3.4.5

    def is_running(self):
        return self.running

    def make_id(self):
        return b"id"

    def start(self, id_of_world, rank, num_ranks):
        assert id_of_world == b"id"
        self.running, self.has_ibgda = True, os.environ.get(IBGDA)

    def own_pe(self):
        return self.pe

    def num_pes(self):
        return self.num_ranks

    def allocate(self, num_bytes):
        if self.hangs.is_set():
            time.sleep(3600)
        return next(self.addresses)

    def address_at(self, address, pe):
        return address + pe if 0 in (pe, self.pe) else 0

    def quiet(self):
        self.quiets += 1


def play(rank: int, pe: int | None = None) -> StandIn:
    """Put the stand-in where the engine looks for the module, in this process alone."""
    from ep_dispatcher.engines.cuda import regions

    torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
    torch.cuda.device = lambda device: nullcontext()
    regions._tensor_at = lambda address, num_bytes, device: torch.zeros(1)
    module = StandIn(rank, dist.get_world_size(), pe)
    sys.modules["ep_dispatcher._C_nvshmem"] = ep._C_nvshmem = module
    return module


def make(num_bytes: int, limit_s: float = LONG_S):
    """Regions as CudaEngine makes them."""
    from ep_dispatcher.engines.cuda.regions import NvshmemRegions

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    topology = Topology.make(rank, ["host"] * num_ranks, 1)
    with Gather(dist.group.WORLD, limit_s) as gather:
        gather("configuration", lambda: None)
        regions = NvshmemRegions(SimpleNamespace(topology=topology, gather=gather, timeout_s=limit_s))
        regions.prepare(num_bytes, 8)
        try:
            gather("memory", regions.allocate, waits_for_peers=True)
            gather("memory of the other ranks", regions.attach)
        except BaseException:
            regions.abandon()
            raise
    return regions


@on_ranks(2, fresh=True)
def test_memory_is_kept_for_the_next_buffer(rank):
    module = play(rank)
    first, second = make(64), make(64)
    assert first.rail_pes == [0, 1] and first.addresses == [1000 * (rank == 0), 1000 * (rank == 1)]
    assert second.addresses[rank] == 2000
    for regions in (first, second)[:: 1 if rank == 0 else -1]:  # ranks may destroy in any order
        regions.free(is_sound=True)
    assert module.quiets == 2
    assert make(64).addresses[rank] == 1000, "the same memory on all ranks"
    third = make(128)
    assert third.addresses[rank] == 3000, "of another size"
    third.free(is_sound=False)
    assert make(128).addresses[rank] == 4000, "what an error left behind is not used again"


@on_ranks(2, fresh=True)
def test_another_device_is_refused(rank):
    """NVSHMEM's memory is on the device that it was started on."""
    play(rank)
    make(64)
    torch.cuda.current_device = lambda: 0 if rank == 0 else 3
    with pytest.raises(ValueError, match="current device is cuda:3"):
        make(64)


@on_ranks(3, fresh=True)
def test_rail_peers_are_mapped_where_both_ranks_reach_each_other(rank):
    """The rail peers that a rank reaches, by address; the last rank reaches none. Then those where both do."""
    from ep_dispatcher.engines.cuda.regions import mapped_rail

    module = play(rank)
    if rank == 2:
        module.address_at = lambda address, pe: 0
    regions = make(64)
    assert regions.addresses == [1000 * (r == rank) for r in range(3)], "other nodes are not for signals of the host"
    with Gather(dist.group.WORLD, LONG_S) as gather:
        mapped = gather("reach", lambda: [address != 0 for address in regions.rail])
    right = [
        ([1000, 1001, 1002], [1000, 1001, 0]),  # rank 2 only puts: so does rank 0 to it
        ([1000, 1000, 0], [1000, 1000, 0]),  # NVLink does not join ranks 1 and 2
        ([0, 0, 1000], [0, 0, 1000]),
    ]
    assert (regions.rail, mapped_rail(regions._config.topology, regions.rail, mapped)) == right[rank]


@pytest.mark.parametrize(
    "what,first,again",
    [
        ("module", "ValueError: group has ranks that need the NVSHMEM wire", "ValueError: "),
        exhaustive("mixture", "ValueError: NVSHMEM has device library 3.4.5", "ValueError: "),
        ("hosts", "ValueError: NVSHMEM has versions 3.4.5, 3.8.0 on the ranks", "ValueError: "),
        ("world", "ValueError: group has 2 ranks that are [0, 0] of the 2 in NVSHMEM", "ValueError: "),
        exhaustive("hang", "PeerTimeoutError: making a buffer, phase 'memory'", "RuntimeError: "),
    ],
)
@on_ranks(2, fresh=True)
def test_what_fails_on_one_rank_fails_alike_on_all(rank, what, first, again):
    module = play(rank, pe=0 if what == "world" else None)
    if what == "module" and rank == 1:
        sys.modules["ep_dispatcher._C_nvshmem"] = None
        del ep._C_nvshmem
    if what == "mixture" and rank == 1:
        nvshmem_library.loaded_versions = lambda: {"/pytorch/lib/libnvshmem_host.so.3": "3.8.0"}
    if what == "hosts" and rank == 1:
        nvshmem_library.one_version = lambda module_file: "3.8.0"
    if what == "hang" and rank == 1:
        module.hangs.set()
    dist.barrier()  # both have what they import
    begin = time.monotonic()
    for text in (first, again):
        with pytest.raises(Exception) as caught:
            make(64, LIMIT_S)
        assert f"{type(caught.value).__name__}: {caught.value}".startswith(text), caught.value
        assert time.monotonic() - begin < (LIMIT_S + 15 if what == "hang" else LIMIT_S)
        module.hangs.clear()
    assert module.running == (what in ("world", "hang"))


@pytest.mark.parametrize("has_card", [[True, True], [True, False]])
@on_ranks(2, fresh=True)
def test_ibgda_is_switched_on_before_the_start_where_all_ranks_have_a_card(rank, has_card):
    module, said = play(rank), []
    os.environ.pop(IBGDA, None)
    nvshmem_library.ibgda_problem = lambda: "" if has_card[rank] else "no card"
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ep_dispatcher.engines.cuda.regions").addHandler(handler)
    make(64)
    make(64)
    assert module.has_ibgda == os.environ.get(IBGDA) == ("1" if all(has_card) else None)
    assert len(said) == (all(has_card) and rank == 0) and all(f"{IBGDA}=1" in text for text in said)


@pytest.mark.parametrize(
    "wire,num_hosts,num_nodes,suspendable,chosen",
    [
        ("auto", 1, 1, False, "PeerRegions"),
        ("auto", 1, 2, False, "PeerRegions"),
        ("nvshmem", 1, 1, False, "PeerRegions"),
        ("nvshmem", 1, 2, False, "NvshmemRegions"),
        ("auto", 2, 2, False, "PeerRegions"),
        ("auto", 2, 1, False, "PeerRegions"),  # a node of two hosts
        ("peer", 2, 1, True, "SuspendableRegions"),
        ("auto", 4, 2, True, "SuspendableRegions"),
        ("nvshmem", 2, 2, False, "NvshmemRegions"),
        ("auto", 1, 1, True, "SuspendableRegions"),
        ("auto", 1, 2, True, "SuspendableRegions"),
        ("nvshmem", 1, 1, True, "SuspendableRegions"),
        ("nvshmem", 1, 2, True, None),
        ("auto", 2, 2, True, "SuspendableRegions"),
        ("nvshmem", 2, 2, True, None),
        ("nccl", 2, 2, False, "PeerRegions"),
        ("nccl", 1, 2, True, "SuspendableRegions"),
        ("nccl", 1, 1, False, "PeerRegions"),
    ],
)
def test_the_wire_and_suspendable_choose_the_memory(monkeypatch, wire, num_hosts, num_nodes, suspendable, chosen):
    from ep_dispatcher.engines.cuda import regions

    monkeypatch.setenv("EP_DISPATCHER_WIRE", wire)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gathered: list[str] = []
    config = SimpleNamespace(
        topology=Topology(0, tuple((2 * n, 2 * n + 1) for n in range(num_nodes))),
        hosts=tuple(f"host {rank * num_hosts // (2 * num_nodes)}" for rank in range(2 * num_nodes)),
        suspendable=suspendable,
        gather=lambda phase, produce: gathered.append(phase),
    )
    if chosen is None:
        with pytest.raises(ValueError, match="^suspendable is True, but NVSHMEM cannot"):
            regions.regions_of(config, regions.wire_of(config))
        assert not gathered, "all ranks see it by themselves"
    else:
        made = regions.regions_of(config, regions.wire_of(config))
        assert type(made).__name__ == chosen
        if chosen != "NvshmemRegions":
            is_nccl = num_nodes > 1 and (wire == "nccl" or num_hosts > 1)
            assert made.wire == ("NCCL" if is_nccl else "peer")
            if suspendable:
                assert made._between_hosts == (num_hosts > (num_nodes if is_nccl else 1))
            assert made._members == ((0, 1) if is_nccl else tuple(range(2 * num_nodes)))
        steps = {"PeerRegions": [], "SuspendableRegions": ["cuda-bindings"], "NvshmemRegions": ["NVSHMEM's module"]}
        assert gathered == steps[chosen]
