"""Process groups in a wrapper, and groups that torch.distributed does not know."""

import pytest
import torch.distributed as dist
from conftest import on_ranks
from lib.errors import assert_refused
from lib.groups import Reloadable, forwarded
from lib.round_trip import make_buffer, round_trip
from torch.distributed import HashStore, PrefixStore, ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import RankPool
from ep_dispatcher.topology import registered_group


@on_ranks(2)
def test_a_wrapped_group_also_after_it_was_made_again(rank):
    group = Reloadable(dist.new_group([0, 1]))
    for _ in range(2):
        with make_buffer(group) as buffer:
            round_trip(buffer)
        inner = registered_group(group)
        assert inner is group.group and registered_group(inner) is inner
        dist.destroy_process_group(group.group)
        assert_refused("group", make_buffer, group)
        group.group = dist.new_group([0, 1])


@on_ranks(2)
def test_a_group_that_is_not_registered_is_refused(rank):
    assert_refused("group", make_buffer, ProcessGroup(PrefixStore("unknown", HashStore()), rank, 2))
    with make_buffer() as buffer:
        round_trip(buffer)


class InPython(dist.Store):
    """A store that is written in Python: it cannot be cloned, and deletes no keys."""

    def __init__(self, port: int):
        super().__init__()
        self.inner = dist.TCPStore("127.0.0.1", port, is_master=False)

    set, get, add, check = forwarded("inner", "set", "get", "add", "check")
    wait, compare_set, multi_get = forwarded("inner", "wait", "compare_set", "multi_get")


class WithoutAdd(InPython):
    def add(self, key, number):
        raise KeyError("no numbers here")


def use_store(rank: int, port: int, kind: type[InPython]) -> str | None:
    dist.destroy_process_group()
    store = kind(port)  # C++ does not keep the Python part alive
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        for ranks_per_node in (2, 1):
            with make_buffer(ranks_per_node=ranks_per_node) as buffer:
                round_trip(buffer)
    except RuntimeError as error:
        assert not isinstance(error, ep.PeerTimeoutError)
        return f"{type(error.__cause__).__name__}: {error}"
    return None


@pytest.mark.parametrize("kind", [InPython, WithoutAdd])
def test_a_store_written_in_python(kind):
    """Its error blames no rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankPool(2, timeout_s=120) as pool:
        for text in pool.run(use_store, store.port, kind):
            if kind is InPython:
                assert text is None
            else:
                assert text.startswith("KeyError: making a buffer, phase 'configuration': the store of the default ")
                assert "no numbers here" in text
