"""Regions that ranks of a node map: handles pass, addresses stay, memory goes and comes. A model plays CUDA."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib import driver_model
from lib.cuda_build import needs_module
from lib.driver_model import PAGE, at, descriptors_of_memory
from lib.faults import LONG_S, is_running, settles

from ep_dispatcher.engines.cuda import device_memory
from ep_dispatcher.engines.cuda.fabric_handles import FabricHandles
from ep_dispatcher.gather import Gather
from ep_dispatcher.topology import Topology

POOL = os.getppid()  # in a rank: the names of its sockets are not those of a pool that runs beside this one


def config_of_ranks(
    gather: Gather, buffer_id: int = POOL, ranks_per_node: int | None = None, between_hosts: bool = False
) -> SimpleNamespace:
    """What regions read of an EngineConfig."""
    num_ranks = dist.get_world_size()
    return SimpleNamespace(
        topology=Topology.make(dist.get_rank(), ["one"] * num_ranks, ranks_per_node),
        hosts=tuple(f"host {rank * between_hosts}" for rank in range(num_ranks)),
        store=dist.PrefixStore(f"regions {buffer_id}", dist.distributed_c10d._get_default_store()),
        suspendable=True,
        buffer_id=buffer_id,
        timeout_s=LONG_S,
        gather=gather,
    )


# ---- device memory ---------------------------------------------------------------------------------------------------


@on_ranks(1, fresh=True)
def test_memory_goes_and_comes_at_its_addresses(rank):
    driver = driver_model.install(pages_left=3)
    assert device_memory.page_bytes(0) == PAGE
    memory = device_memory.DeviceMemory(4 * PAGE, 0)
    for turn in range(3):
        fd = memory.create(PAGE, 2 * PAGE)
        view = at(memory.address + PAGE, 2 * PAGE)
        assert bytes(view[:2]) == b"\0\0", "new memory"
        view[0] = turn + 1
        assert os.pread(fd, 1, 0)[0] == turn + 1 and not driver.handles
        os.ftruncate(one := os.memfd_create("driver_model"), PAGE)
        memory.attach(3 * PAGE, PAGE, one)
        os.close(fd)
        os.close(one)
        view.release()
        memory.unmap(PAGE)
        memory.unmap(PAGE)  # nothing is there
        memory.unmap(3 * PAGE)
        assert not driver.mapped and driver.reserved == {memory.address: 4 * PAGE}
    with pytest.raises(Exception, match="cuMemCreate: the device has no memory left, and 0.2 MiB are needed"):
        memory.create(0, 4 * PAGE)
    fd = memory.create(0, PAGE)
    with pytest.raises(RuntimeError, match="^cuMemMap: CUDA_ERROR_INVALID_VALUE$"):
        memory.attach(0, PAGE, fd)  # something is there
    with pytest.raises(RuntimeError, match="^cuMemMap: CUDA_ERROR_INVALID_VALUE$"):
        memory.create(4 * PAGE, PAGE)  # outside
    os.close(fd)
    assert not driver.handles and len(driver.mapped) == 1
    del memory  # as free() does
    assert_nothing_left(driver)


@on_ranks(1, fresh=True)
def test_memory_for_other_hosts_is_held_as_long_as_it_is_mapped(rank):
    driver = driver_model.install()
    memory = device_memory.DeviceMemory(4 * PAGE, 0, between_hosts=True)
    for turn in range(3):
        handle = memory.create(PAGE, PAGE)
        assert isinstance(handle, bytes) and len(handle) == 64 and len(driver.handles) == 1
        memory.attach(3 * PAGE, PAGE, handle)
        at(memory.address + PAGE, PAGE)[0] = turn + 1
        assert at(memory.address + 3 * PAGE, PAGE)[0] == turn + 1 and len(driver.handles) == 1
        memory.unmap(PAGE)
        assert not driver.handles and at(memory.address + 3 * PAGE, PAGE)[0] == turn + 1, "a peer has it"
        memory.unmap(3 * PAGE)
        with pytest.raises(RuntimeError, match="^cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_HANDLE$"):
            memory.attach(3 * PAGE, PAGE, handle)
    memory.create(0, PAGE)
    for name in ("cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess"):
        setattr(driver, name, lambda *given: (driver_model.Status.CUDA_ERROR_INVALID_VALUE, None))
        with pytest.raises(RuntimeError, match=f"^{name}: CUDA_ERROR_INVALID_VALUE$"):
            memory.create(PAGE, PAGE)
        assert len(driver.handles) == 1, "only that of the first page"
        delattr(driver, name)
    memory.free()
    assert_nothing_left(driver)
    assert not driver.handles


@on_ranks(1, fresh=True)
def test_whether_memory_can_be_shared_with_other_hosts_is_tried(rank):
    driver = driver_model.install()
    device_memory.try_fabric(0)
    driver.has_imex = False
    with pytest.raises(RuntimeError, match="^cuMemCreate: CUDA_ERROR_NOT_PERMITTED$"):
        device_memory.try_fabric(0)
    assert_nothing_left(driver)
    assert not driver.handles


@needs_module
@on_ranks(2, fresh=True)
def test_a_wrong_number_of_fabric_handles_is_an_error(rank):
    store = dist.PrefixStore("handles", dist.distributed_c10d._get_default_store())
    handles = FabricHandles(store, rank, 2, [b"a" * 64] * (2 - rank))
    dist.barrier()
    with pytest.raises(
        RuntimeError, match=f"^the store has {64 * (1 + rank)} bytes of fabric handles of rank {1 - rank}$"
    ):
        handles.exchange([b"a" * 64] * (2 - rank), LONG_S)


@needs_module
@on_ranks(3, fresh=True)
def test_where_a_rank_lacks_the_package_all_say_what_to_install(rank):
    """First rank 1 lacks it, then all do. The buffer is not made, and all ranks say the same."""
    from ep_dispatcher.engines.cuda import regions

    driver_model.install()
    torch.version.cuda = "12.8"
    for lacking in ([1], [0, 1, 2]):
        if rank in lacking:
            sys.modules["cuda.bindings"] = None
            device_memory._driver.cache_clear()
        with pytest.raises(ValueError) as caught, Gather(dist.group.WORLD, LONG_S) as gather:
            regions.regions_of(config_of_ranks(gather), "peer")
        text = str(caught.value)
        assert text.startswith("suspendable is True, ") and "pip install 'cuda-bindings==12.*'" in text
        assert text.endswith("(on rank 1)") == (len(lacking) == 1)


# ---- regions ---------------------------------------------------------------------------------------------------------


def make(num_bytes: int, flag_bytes: int, buffer_id: int = POOL, wire: str = "peer", **config):
    """Regions as CudaEngine makes them."""
    from ep_dispatcher.engines.cuda import regions

    regions._tensor_at = lambda address, num_bytes, device: None
    with Gather(dist.group.WORLD, LONG_S) as gather:
        made = regions.regions_of(config_of_ranks(gather, buffer_id, **config), wire)
        assert type(made) is regions.SuspendableRegions
        made.prepare(num_bytes, flag_bytes)
        gather("memory", made.allocate)
        gather("memory of the other ranks", made.attach, waits_for_peers=True)
    return made


def write_and_read(made, offset: int, value: int) -> None:
    """Every rank writes to every region that it maps; all read what was written."""
    members = [rank for rank, address in enumerate(made.addresses) if address]
    for member in members:
        at(made.addresses[member] + offset + dist.get_rank(), 1)[0] = value + dist.get_rank()
    dist.barrier()
    for member in members:
        assert [at(made.addresses[member] + offset + r, 1)[0] for r in members] == [value + r for r in members]
    dist.barrier()


def take_again(made) -> None:
    dist.barrier()
    made.take()
    dist.barrier()
    made.attach_again()
    dist.barrier()


def assert_nothing_left(driver: driver_model.Driver) -> None:
    assert not driver.mapped and not driver.reserved and not descriptors_of_memory()


@needs_module
@pytest.mark.parametrize("between_hosts", [False, True], ids=["one host", "several hosts"])
@pytest.mark.parametrize(
    "num_bytes,flag_bytes,kept,whole",  # the last two in pages
    [
        (5 * PAGE + 64, 100, 1, 6),
        (5 * PAGE, PAGE + 8, 2, 5),
        (4000, 64, 1, 1),  # nothing but the page of the flags
    ],
)
@on_ranks(3, fresh=True)
def test_regions_keep_their_flags_and_addresses(rank, num_bytes, flag_bytes, kept, whole, between_hosts):
    driver = driver_model.install()
    first = make(3 * PAGE, 8, buffer_id=-POOL, between_hosts=between_hosts)
    made = make(num_bytes, flag_bytes, between_hosts=between_hosts)
    num_held = 3 * between_hosts  # both parts of the first region, and the flags of the other
    num_ranks = dist.get_world_size()
    addresses = list(made.addresses)
    write_and_read(made, 0, 10)
    write_and_read(made, num_bytes - 8, 20)
    mapped_before = sum(driver.mapped.values())
    for turn in range(20):
        made.give_back()
        assert mapped_before - sum(driver.mapped.values()) == num_ranks * (whole - kept) * PAGE, "of every rank"
        assert descriptors_of_memory() == len(driver.handles) == num_held, "nothing else holds the memory"
        for address in addresses:  # what is kept
            assert list(at(address, num_ranks)) == [10 + r for r in range(num_ranks)]
        take_again(made)
        assert made.addresses == addresses and sum(driver.mapped.values()) == mapped_before
        if turn % 7 == 0:
            write_and_read(made, num_bytes - 8, 30 + turn)
    made.give_back()
    made.free(is_sound=True)  # while it is suspended
    write_and_read(first, PAGE, 99)
    first.free(is_sound=True)
    assert_nothing_left(driver)


@needs_module
@pytest.mark.parametrize("between_hosts", [False, True], ids=["one host", "several hosts"])
@on_ranks(4, fresh=True)
def test_nodes_share_nothing(rank, between_hosts):
    """With the NCCL wire a rank maps the regions of its node alone, also again after a suspend."""
    driver = driver_model.install()
    made = make(3 * PAGE, 8, wire="nccl", ranks_per_node=2, between_hosts=between_hosts)
    node = [2 * (rank // 2), 2 * (rank // 2) + 1]
    assert [r for r, address in enumerate(made.addresses) if address] == node
    assert [bool(address) for address in made.rail] == [n == rank // 2 for n in range(2)]
    for turn in range(3):
        write_and_read(made, PAGE, 10 * turn)
        made.give_back()
        take_again(made)
    made.free(is_sound=True)
    assert_nothing_left(driver)


@needs_module
@pytest.mark.parametrize("between_hosts", [False, True], ids=["one host", "several hosts"])
@on_ranks(3, fresh=True)
def test_where_a_rank_finds_no_memory_all_can_try_again(rank, between_hosts):
    driver = driver_model.install()
    made = make(3 * PAGE, 8, between_hosts=between_hosts)
    made.give_back()
    before = dict(driver.mapped)
    for _ in range(3):
        driver.pages_left = 1 if rank == 1 else 100
        dist.barrier()
        if rank == 1:
            with pytest.raises(torch.OutOfMemoryError):
                made.take()
        else:
            made.take()
        made.drop()
        assert driver.mapped == before and descriptors_of_memory() == len(driver.handles) == between_hosts
        dist.barrier()
    driver.pages_left = 100
    take_again(made)
    write_and_read(made, 2 * PAGE, 5)
    made.free(is_sound=True)


@needs_module
@on_ranks(3, fresh=True, allow_dead={1})
def test_memory_of_a_rank_that_has_ended_can_still_be_written(rank):
    """It lives while a peer has it mapped, and no longer."""
    driver_model.install()
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    made = make(3 * PAGE, 8)
    write_and_read(made, PAGE, 1)
    if rank == 1:
        os._exit(1)
    assert settles(lambda: [is_running(pids[1])], [False])
    at(made.addresses[1] + PAGE, 1)[0] = 2  # nobody's data
    made.free(is_sound=False)
