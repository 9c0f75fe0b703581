"""An exchange between ranks by itself: what it leaves in the store, and how a rank leaves it."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from conftest import on_ranks
from lib.faults import LONG_S, default_store, settles

import ep_dispatcher as ep
from ep_dispatcher import gather
from ep_dispatcher.gather import Gather, History
from ep_dispatcher.stores import STORE_S

ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 2)  # the other rank never comes


@on_ranks(3)
def test_no_keys_are_left_but_the_number_of_the_round(rank):
    """Also after rounds that a rank left when the others had taken the last step already."""
    history = History("ep_dispatcher/test/keys")
    group, numbers = dist.group.WORLD, []

    def meet(steps: int, fails: bool = False) -> None:
        with Gather(group, LONG_S, history=history) as exchange:
            for step in range(steps):
                assert exchange(f"step {step}", lambda: rank) == [0, 1, 2]
            if fails and rank == 1:
                raise KeyboardInterrupt

    def count() -> None:
        dist.barrier()
        numbers.append(default_store().num_keys())
        dist.barrier()

    count()
    meet(3)
    count()
    for steps in (1, 3):
        if rank == 1:
            with pytest.raises(KeyboardInterrupt):
                meet(steps, fails=True)
        else:
            meet(steps)
        dist.barrier()
    meet(2)
    count()
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 1]


@on_ranks(3)
def test_a_rank_that_leaves_between_two_steps_ends_the_next_one_at_once(rank):
    """The first step is complete, and stays so."""
    history = History("ep_dispatcher/test/between")
    with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
        with Gather(dist.group.WORLD, LONG_S, history=history) as exchange:
            assert exchange("first", lambda: rank) == [0, 1, 2]
            if rank == 1:
                raise KeyboardInterrupt("enough")
            exchange("second", lambda: rank)
    assert rank == 1 or str(caught.value).endswith("phase 'second': rank 1 left: KeyboardInterrupt: enough")


def test_the_error_of_a_rank_is_the_cause_when_others_do_not_come(monkeypatch):
    store, error = dist.HashStore(), MemoryError("no more of it")
    monkeypatch.setattr(gather, "connection", lambda: store)

    def fail() -> None:
        raise error

    with pytest.raises(ep.PeerTimeoutError) as caught, Gather(ALONE, 0.2, history=History("prefix")) as exchange:
        exchange("call", fail)
    assert caught.value.late_ranks == (1,) and caught.value.__cause__ is error


def test_a_thread_that_the_store_held_back_writes_nothing_when_its_rank_has_left(monkeypatch):
    """The other ranks would find a message of a rank that is elsewhere."""
    store, answers, held = dist.HashStore(), threading.Event(), []

    def connection() -> dist.Store:
        held.append(threading.current_thread())
        answers.wait(LONG_S)
        return store

    monkeypatch.setattr(gather, "connection", connection)
    monkeypatch.setattr(gather, "drop_connection", lambda: None)
    monkeypatch.setattr(gather, "STORE_S", STORE_S / 10)
    with pytest.raises(ep.PeerTimeoutError, match="did not answer"):
        with Gather(ALONE, 0.1, history=History("prefix")) as exchange:
            exchange("call", lambda: None)
    answers.set()
    assert settles(lambda: [sum(thread.is_alive() for thread in held)], [0])
    assert held and not store.check(["prefix/0/0/0"])
