"""The stores through which ranks exchange where their memory is."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from ep_dispatcher.engines.rendezvous import OwnKeys, Renumbered


def test_ranks_that_count_otherwise_find_each_other():
    shared = HashStore()
    stores = [Renumbered(shared, 60) for _ in range(2)]
    ranks = [PrefixStore("exchange", store) for store in stores]  # asks as PyTorch's own code does
    for turn in range(3):
        keys = [[f"Memory/{number + turn}/{rank}" for rank in range(2)] for number in (0, 17)]
        for rank in range(2):
            ranks[rank].set(keys[rank][rank], f"{turn}, {rank}")
        for rank in range(2):
            assert ranks[rank].multi_get(keys[rank]) == [f"{turn}, {other}".encode() for other in range(2)]
            assert ranks[rank].check(keys[rank])
    assert [ranks[rank].add(f"Memory/{(3, 20)[rank]}", 1) for rank in range(2)] == [1, 2]


def test_two_numbers_that_both_count_keep_apart():
    shared = HashStore()
    store = Renumbered(shared, 60)
    for number in (17, 4, 17):
        store.set(f"Memory/{number}/{number}", str(number))
    assert shared.get("Memory/0/17") == b"17" and shared.get("Memory/1/4") == b"4"
    assert store.check(["Memory/4/4"]) and not store.check(["Memory/5/4"])


@pytest.mark.parametrize("ask", ["get", "multi_get", "wait", "wait for longer"])
def test_nothing_waits_longer_than_the_limit(ask):
    store, started = Renumbered(HashStore(), 0.5), time.monotonic()
    calls = {
        "get": lambda: store.get("Memory/3/1"),
        "multi_get": lambda: store.multi_get(["Memory/3/1"]),
        "wait": lambda: store.wait(["Memory/3/1"]),
        "wait for longer": lambda: store.wait(["Memory/3/1"], timedelta(seconds=300)),
    }
    with pytest.raises(RuntimeError):
        calls[ask]()
    assert 0.4 < time.monotonic() - started < 30
    with pytest.raises(RuntimeError):  # the limit is that of all calls together
        calls[ask]()
    assert time.monotonic() - started < 30


@pytest.mark.skipif(not hasattr(Store, "barrier"), reason="this PyTorch has none")
def test_a_barrier_through_the_store():
    shared, passed = HashStore(), []

    def meet(number: int) -> None:
        store = Renumbered(shared, 60)
        PrefixStore("exchange", store).barrier(f"Memory/{number}", 2, timedelta(seconds=60))
        passed.append(number)

    thread = threading.Thread(target=meet, args=(3,))
    thread.start()
    thread.join(0.2)
    assert not passed
    meet(20)
    thread.join(60)
    assert sorted(passed) == [3, 20]


def test_own_keys_are_deleted_and_no_others():
    shared = HashStore()
    mine, other = OwnKeys(shared), OwnKeys(shared)
    mine.set("a", "1")
    other.set("b", "2")
    mine.add("c", 1)
    assert mine.get("b") == b"2" and mine.check(["a", "b", "c"])
    mine.delete_keys()
    assert not shared.check(["a"]) and shared.check(["b"]) and not shared.check(["c"])
