"""The symmetric memory of a buffer of the CUDA engine: a region on every rank, and the means to reach the others.

``PeerRegions`` are in PyTorch's symmetric memory. With the peer wire all ranks of a host map each other's regions, and
the wire between virtual nodes is stores through NVLink. With the NCCL wire only the ranks of a node do.
``SuspendableRegions`` are the same in memory that can be unmapped and mapped again (device_memory.py).

The ranks of a node may be on several hosts that NVLink joins (nvlink.py). From 2.9 on PyTorch's symmetric memory then
passes fabric handles instead of file descriptors, as ``SuspendableRegions`` do.

``NvshmemRegions`` are in NVSHMEM's symmetric heap. The ranks of a node map each other's, and the wire between nodes is
NVSHMEM's.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import PrefixStore

from ep_dispatcher import _C_cuda, checks, envs, nvshmem_library
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.engines.cuda.device_memory import DeviceMemory, close, load_driver, page_bytes
from ep_dispatcher.engines.cuda.fabric_handles import FabricHandles
from ep_dispatcher.engines.descriptors import Descriptors
from ep_dispatcher.engines.rendezvous import rendezvous
from ep_dispatcher.gather import GRACE_S, PeersLate
from ep_dispatcher.memory import round_up
from ep_dispatcher.threads import StoreHangs, in_thread
from ep_dispatcher.topology import Topology

logger = logging.getLogger(__name__)
T = TypeVar("T")


class PeerRegions:
    """``memory``: uint8 [num_bytes], the region of this rank; ``addresses``: of every rank's region, as mapped here.

    ``rail``: addresses of the rail peers' regions by node, 0 for those that are not mapped here.
    ``name``: of memory beside the buffer's own, used once for each buffer.
    """

    compiled = _C_cuda
    allocates_together = False  # whether `allocate` waits for the other ranks

    def __init__(self, config: EngineConfig, wire: str, name: str = ""):
        topology = config.topology
        self._config, self.wire, self._name = config, wire, name
        # The ranks that map each other's regions, and this rank's place among them.
        self._members = topology.node_ranks if wire == "NCCL" else tuple(range(topology.num_ranks))
        self._place = self._members.index(topology.rank)
        self.rail_pes: list[int] = []

    def prepare(self, num_bytes: int, flag_bytes: int) -> None:
        """Note the sizes of a region. Its first ``flag_bytes`` are flags."""
        self._num_bytes, self._flag_bytes = num_bytes, flag_bytes

    def allocate(self) -> None:
        # Not symmetric_memory.empty: its memory may return to a pool, and a slow peer with the old mapping could then
        # write into a later buffer. This memory lives as long as a peer has it mapped.
        allocate = symmetric_memory._SymmetricMemory.empty_strided_p2p
        device = torch.device("cuda", torch.cuda.current_device())
        self.memory = allocate((self._num_bytes,), (1,), torch.uint8, device)

    def attach(self) -> None:
        config, members = self._config, self._members
        addresses = [self.memory.data_ptr()]
        if len(members) > 1:
            name = f"ep_dispatcher/{config.buffer_id}{self._name}"  # used once
            store = PrefixStore(f"from {members[0]}{self._name}", config.store)
            among = Topology(self._place, (tuple(range(len(members))),))
            with self._naming_members():
                self._symmetric = rendezvous(self.memory, among, store, name, config.timeout_s)
            addresses = list(self._symmetric.buffer_ptrs)
        self._keep(addresses)

    def _keep(self, addresses: list[int]) -> None:
        """Note where the members' regions are mapped here."""
        self.addresses = [0] * self._config.topology.num_ranks
        for rank, address in zip(self._members, addresses, strict=True):
            self.addresses[rank] = address

    @contextmanager
    def _naming_members(self) -> Iterator[None]:
        """Name late members by their rank in the buffer, not by their place among the members."""
        try:
            yield
        except PeersLate as error:
            raise PeersLate(str(error), [self._members[place] for place in error.ranks]) from error

    @property
    def rail(self) -> list[int]:
        return [self.addresses[rank] for rank in self._config.topology.rail]

    def free(self, is_sound: bool) -> None:
        self.__dict__.pop("_symmetric", None)
        self.__dict__.pop("memory", None)

    def abandon(self) -> None:
        """Free the memory after a failure to make the buffer."""
        self.free(is_sound=False)


class SuspendableRegions(PeerRegions):
    """PeerRegions that can be freed and mapped again at the same addresses.

    In the addresses of each rank the regions of all members lie one after the other. A region has two parts. The first
    has the flags, and stays. The second has all large arrays, and is freed while the buffer is suspended.
    """

    def __init__(self, config: EngineConfig, wire: str):
        super().__init__(config, wire)
        self._between_hosts = len({config.hosts[rank] for rank in self._members}) > 1
        self._exchanges = 0  # exchanges of handles that have ended: the same on all ranks
        self._exchange: Descriptors | FabricHandles | None = None  # the next one
        self._handles: list[Any] = []  # of this rank's new memory, until all ranks have it
        config.gather("cuda-bindings", load_driver)  # one rank may lack it

    def allocate(self) -> None:
        device = torch.cuda.current_device()
        page = page_bytes(device, self._between_hosts)
        kept, self._stride = round_up(self._flag_bytes, page), round_up(self._num_bytes, page)
        rest = self._stride - kept
        self._first = [(0, kept)]  # parts: (first byte in a region, bytes)
        self._second = [(kept, rest)] if rest else []  # a small buffer has none
        self._space = DeviceMemory(len(self._members) * self._stride, device, self._between_hosts)
        self._keep([self._space.address + place * self._stride for place in range(len(self._members))])
        self._create(self._first + self._second)
        own = self.addresses[self._config.topology.rank]
        self.memory = _tensor_at(own, self._num_bytes, torch.device("cuda", device))

    def attach(self) -> None:
        self._attach(self._first + self._second)

    def give_back(self) -> None:
        """Unmap the second part of all regions. No rank may use any of them."""
        for begin, _ in self._second:
            for place in range(len(self._members)):
                self._space.unmap(place * self._stride + begin)

    def take(self) -> None:
        """Allocate memory for this rank's second part. If any rank finds none, all call ``drop``."""
        self._create(self._second)

    def drop(self) -> None:
        self._end_exchange()
        self.give_back()

    def attach_again(self) -> None:
        self._attach(self._second)

    def _create(self, parts: list[tuple[int, int]]) -> None:
        """Allocate parts of this rank's region. Prepare to pass them on: from now on other ranks may ask for them."""
        for begin, num_bytes in parts:
            self._handles.append(self._space.create(self._place * self._stride + begin, num_bytes))
        if self._between_hosts:
            store = PrefixStore(f"from {self._members[0]}", self._config.store)
            self._exchange = FabricHandles(store, self._place, len(self._members), self._handles)
        else:
            secret = f"ep_dispatcher/{self._config.buffer_id}/{self._members[0]}/{self._exchanges}"
            self._exchange = Descriptors(secret, self._config.topology.rank, self._members)

    def _attach(self, parts: list[tuple[int, int]]) -> None:
        """Map these parts of the other members' regions. All have created theirs."""
        assert self._exchange is not None  # since `_create`
        of_members: list[list[Any]] = self._exchange.exchange(self._handles, self._config.timeout_s)
        try:
            for place, handles in enumerate(of_members):
                for (begin, num_bytes), handle in zip(parts, handles):
                    self._space.attach(place * self._stride + begin, num_bytes, handle)
        finally:
            close(itertools.chain.from_iterable(of_members))
            self._end_exchange()

    def _end_exchange(self) -> None:
        self._exchanges += 1
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
        handles, self._handles = self._handles, []
        close(handles)

    def free(self, is_sound: bool) -> None:
        """Unmap all. Memory lives on while a peer has it mapped, so late stores of the peer harm nobody's data."""
        self._end_exchange()
        self.__dict__.pop("memory", None)
        space = self.__dict__.pop("_space", None)
        if space is not None:
            space.free()


class NvshmemRegions:
    """Like PeerRegions, but ``addresses`` is 0 for ranks of other nodes.

    ``rail`` has the addresses that NVLink reaches.

    The first buffer of a process starts NVSHMEM for its ranks, or joins one that is running; later buffers must have
    the same ranks. Memory of its heap is allocated and freed by all ranks together. So memory of a destroyed buffer is
    kept for the next one of the same size.
    """

    wire = "NVSHMEM"
    allocates_together = True

    def __init__(self, config: EngineConfig):
        self._config = config
        self._device = torch.cuda.current_device()
        self._pes: list[int] = []  # by rank
        self._region: SimpleNamespace | None = None
        self._libraries = config.gather("NVSHMEM's module", self._load)  # one rank may lack it

    def _load(self) -> tuple[str, bool]:
        """Return the version of NVSHMEM, and whether this rank can have IBGDA switched on."""
        try:
            from ep_dispatcher import _C_nvshmem
        except ImportError as error:
            if error.path:
                nvshmem_library.one_version(error.path)
            raise ValueError(
                f"group has ranks that need the NVSHMEM wire, which cannot be used here ({error}): give ranks of one "
                "host; `python -m ep_dispatcher.doctor` says what is missing"
            ) from None
        self.compiled: ModuleType = _C_nvshmem
        version = nvshmem_library.one_version(str(_C_nvshmem.__file__))
        return version, not _C_nvshmem.is_running() and not nvshmem_library.ibgda_problem()

    @property
    def rail_pes(self) -> list[int]:
        return [self._pes[rank] for rank in self._config.topology.rail]

    def prepare(self, num_bytes: int, flag_bytes: int) -> None:
        """Start NVSHMEM, or join it, and look for memory of an earlier buffer on all ranks. Collective."""
        config, c = self._config, self.compiled
        num_ranks, rank = config.topology.num_ranks, config.topology.rank
        versions, can_post = zip(*self._libraries)
        with config.gather.same_on_all_ranks():
            if len(set(versions)) > 1:
                checks.refuse(f"NVSHMEM has versions {', '.join(versions)} on the ranks: all hosts need the same")
        if all(can_post):
            os.environ[nvshmem_library.IBGDA] = "1"  # NVSHMEM reads it when it starts
            if rank == 0:
                text = "ep_dispatcher: every rank has a card for IBGDA, so NVSHMEM starts with %s=1; 0 leaves it off"
                logger.warning(text, nvshmem_library.IBGDA)

        def offer() -> tuple[bool, str, int, list[int]]:
            if _process.out_of_step:
                raise RuntimeError(_process.out_of_step)
            if _process.has_joined and _process.device != self._device:
                given = f"cuda:{self._device}, and cuda:{_process.device} when NVSHMEM was started"
                checks.refuse(f"the current device is {given}: with the NVSHMEM wire a process has one device")
            id_of_world = c.make_id().hex() if rank == 0 and not c.is_running() else ""
            numbers = [r.number for r in _process.kept if r.num_bytes == num_bytes]
            return c.is_running(), id_of_world, _process.next_number, numbers

        running, ids, next_numbers, numbers = zip(*config.gather("NVSHMEM", offer))
        with config.gather.same_on_all_ranks():
            if len(set(running)) > 1:
                checks.refuse("some ranks of group use NVSHMEM already and others do not: either all may, or none")

        def start() -> tuple[int, int]:
            if not running[rank] or not _process.has_joined:
                self._call(c.start, bytes.fromhex("" if running[rank] else ids[0]), rank, num_ranks)
                _process.has_joined, _process.device = True, self._device
            return c.own_pe(), c.num_pes()

        found = config.gather("NVSHMEM's start", start, waits_for_peers=True)
        self._pes = [pe for pe, _ in found]
        with config.gather.same_on_all_ranks():
            if any(num_pes != num_ranks for _, num_pes in found) or sorted(self._pes) != list(range(num_ranks)):
                given = f"{num_ranks} ranks that are {self._pes} of the {found[0][1]} in NVSHMEM"
                checks.refuse(f"group has {given}: with the NVSHMEM wire a process has one group of ranks")
        common = set.intersection(*map(set, numbers))
        self._region = next((r for r in _process.kept if common and r.number == min(common)), None)
        if self._region is not None:
            _process.kept.remove(self._region)
        _process.next_number = max(next_numbers)
        self._num_bytes = num_bytes

    def allocate(self) -> None:
        """Allocate memory, unless that of an earlier buffer was found. Collective."""
        if self._region is None:
            number, _process.next_number = _process.next_number, _process.next_number + 1
            address = self._call(self.compiled.allocate, self._num_bytes)
            self._region = SimpleNamespace(number=number, num_bytes=self._num_bytes, address=address)
        self.memory = _tensor_at(self._region.address, self._num_bytes, torch.device("cuda", self._device))

    def attach(self) -> None:
        topology, region, address_at = self._config.topology, self._region, self.compiled.address_at
        assert region is not None  # since `allocate`
        self.addresses = [0] * topology.num_ranks
        for rank in topology.node_ranks:
            own = rank == topology.rank
            self.addresses[rank] = region.address if own else address_at(region.address, self._pes[rank])
            if not self.addresses[rank]:
                raise RuntimeError(f"NVSHMEM does not reach the memory of rank {rank}, which is on this node")
        self.rail = [address_at(region.address, self._pes[rank]) for rank in topology.rail]
        self.rail[topology.node] = region.address

    def free(self, is_sound: bool) -> None:
        """Keep the memory for the next buffer, unless there was an error: stores may still be on their way to it."""
        region, self._region = self._region, None
        self.__dict__.pop("memory", None)
        if region is not None and is_sound:
            with torch.cuda.device(self._device):
                self.compiled.quiet()
            _process.kept.append(region)

    def abandon(self) -> None:
        """Keep the memory after a failure to make the buffer: nobody has written to it."""
        region, self._region = self._region, None
        self.__dict__.pop("memory", None)
        if region is not None:
            _process.kept.append(region)

    def _call(self, call: Callable[..., T], *arguments: object) -> T:
        """Call NVSHMEM, which waits for the other ranks without a limit. So call it in another thread, with a limit.

        If it does not return in time, that thread stays inside, and would answer the next call of other ranks. So this
        process uses NVSHMEM no more.
        """

        def with_device() -> T:
            torch.cuda.set_device(self._device)
            return call(*arguments)

        timeout_s, topology = self._config.timeout_s, self._config.topology
        _process.out_of_step = "NVSHMEM is out of step since a buffer could not be made: start new processes"
        try:
            result = in_thread(with_device, timeout_s + GRACE_S)
        except StoreHangs as error:
            others = [rank for rank in range(topology.num_ranks) if rank != topology.rank]
            raise PeersLate(f"NVSHMEM waited {timeout_s} s for other ranks", others) from error
        except Exception:  # raised by the call, so it has returned
            _process.out_of_step = ""
            raise
        _process.out_of_step = ""
        return result


# The state of NVSHMEM in this process.
_process = SimpleNamespace(
    has_joined=False,  # the module here uses it
    device=-1,  # the current one when it joined
    kept=[],  # memory of destroyed buffers
    next_number=0,  # of a region; the same on all ranks
    out_of_step="",  # why it cannot be used any more
)


def _tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] of memory that PyTorch has not allocated."""
    interface = dict(shape=(num_bytes,), typestr="|u1", data=(address, False), version=3, strides=None)
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), dtype=torch.uint8, device=device)


def mapped_rail(topology: Topology, rail: list[int], mapped: list[list[bool]]) -> list[int]:
    """Return the addresses in ``rail`` of rail peers that reach this rank's region too, 0 for the others.

    ``mapped``: by rank and node, whether the rank reaches the region of its rail peer there. A pair must use the same
    means in both directions: the receiver of a put waits in another way than the receiver of a store.
    """
    return [address if mapped[rank][topology.node] else 0 for rank, address in zip(topology.rail, rail, strict=True)]


def wire_of(config: EngineConfig) -> str:
    """Choose the wire, peer for one node. ValueError if the wire that was asked for cannot serve these ranks."""
    if config.topology.num_nodes == 1:
        return "peer"
    wire, num_hosts = envs.wire(), len(set(config.hosts))
    if wire == "auto":
        wire = "nccl" if num_hosts > 1 else "peer"
    if wire == "peer" and num_hosts > 1:
        checks.fail("EP_DISPATCHER_WIRE", "peer, for ranks on several hosts", "nccl, nvshmem or auto")
    return wire


def regions_of(config: EngineConfig, wire: str) -> PeerRegions | NvshmemRegions:
    """Return the memory for this wire. ValueError if it cannot be suspended, but should be."""
    if wire in ("peer", "nccl"):
        kind = SuspendableRegions if config.suspendable else PeerRegions
        return kind(config, "NCCL" if wire == "nccl" else wire)
    if config.suspendable:
        checks.refuse(
            "suspendable is True, but NVSHMEM cannot map its memory again at the same addresses: set "
            "EP_DISPATCHER_WIRE=nccl, or peer where all ranks are on one host"
        )
    return NvshmemRegions(config)
