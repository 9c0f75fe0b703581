"""Faults between hosts: in time the ranks that are left say who is missing, keep nothing, and go on.

Ranks 0 and 1 are on host 0, ranks 2 and 3 on host 1, and the store is on neither unless a test says so.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive
from round_trip import make_buffer, round_trip
from test_faults import LIMIT_S, LONG_S, assert_nothing_left, hurry, is_running, make_hasty_buffer, settles
from two_hosts import Hosts, HostsPool

import ep_dispatcher as ep

LATER_S = 5.0  # how much later than the limit an error may come
NODES = ((0, 1), (2, 3))


class Seen(NamedTuple):
    late_ranks: set[int]
    seconds: float  # until the error came
    text: str


def store_of_test() -> dist.Store:
    """The default store without the prefixes of the group, as the test has it."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def go_on(run: Callable[[int], object], num_steps: int) -> Seen:
    """Call ``run(step)`` until it is late."""
    for step in range(1, num_steps):
        started = time.monotonic()
        try:
            run(step)
        except ep.PeerTimeoutError as error:
            return Seen(set(error.late_ranks), time.monotonic() - started, str(error))
    raise AssertionError("nobody noticed the fault")


def endure(rank: int, left: Collection[int] | None, makes_buffers: bool) -> Seen:
    """Operate until the fault. Then go on among the ranks ``left``, or if None, once it is over, among all."""
    assert_nothing_left()
    buffer = make_hasty_buffer()
    assert buffer.topology.nodes == NODES
    hurry(buffer)

    def make_another(step: int) -> None:
        with make_buffer(timeout_s=LIMIT_S) as another:
            round_trip(another, seed=step)

    store_of_test().set(f"operates/{rank}", "")
    seen = go_on(make_another if makes_buffers else lambda step: round_trip(buffer, seed=step), 100_000)
    started = time.monotonic()
    buffer.destroy()
    assert time.monotonic() - started < LATER_S
    assert_nothing_left()
    if left is None:
        store_of_test().wait(["over"], timedelta(seconds=LONG_S))
    group = None if left is None else dist.new_group(left, use_local_synchronization=True)
    per_node = 1 if left is not None and len(left) == 3 else None  # one host has fewer ranks than the other
    with make_buffer(group, ranks_per_node=per_node, timeout_s=LONG_S) as buffer:
        for seed in range(3):
            round_trip(buffer, seed=seed)
    assert_nothing_left()
    return seen


def run_with(pool: HostsPool, fault: Callable[[], None], body: Callable, *args, **options) -> list:
    """Run a body on the ranks, and ``fault()`` here once all of them operate."""
    failures = []

    def act() -> None:
        try:
            keys = [f"operates/{rank}" for rank in range(pool.num_ranks)]
            pool._store.wait(keys, timedelta(seconds=LONG_S))
            time.sleep(0.3)
            fault()
            pool._store.set("over", "")
        except Exception as error:  # the test raises it
            failures.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        return pool.run(body, *args, **options)
    finally:
        thread.join()
        assert not failures


def a_rank_dies(hosts: Hosts, pool: HostsPool) -> None:
    os.kill(pool.pids[3], signal.SIGKILL)


def a_host_loses_power(hosts: Hosts, pool: HostsPool) -> None:
    hosts.plug(1, False)  # so that its system says no farewell
    hosts.kill(1)


def a_host_ends(hosts: Hosts, pool: HostsPool) -> None:
    hosts.kill(1)


@pytest.mark.parametrize(
    "fault,gone", [(a_host_loses_power, {2, 3}), exhaustive(a_host_ends, {2, 3}), exhaustive(a_rank_dies, {3})]
)
def test_survivors_name_the_dead_and_go_on(make_hosts, fault, gone):
    hosts, left = make_hosts(2), sorted({0, 1, 2, 3} - gone)
    with HostsPool(hosts, 2, timeout_s=LONG_S) as pool:
        pids = pool.pids
        seen = run_with(pool, lambda: fault(hosts, pool), endure, left, False, allow_dead=gone)
    for rank in left:
        assert seen[rank].late_ranks <= gone and seen[rank].seconds < LIMIT_S + LATER_S, seen
    assert seen[0].late_ranks == seen[1].late_ranks, seen  # so that they agree on the smaller group
    assert settles(lambda: [len(hosts.pids(0)), *map(is_running, pids)], [0] * 5)


def for_a_while(undo: Callable[[], None]) -> None:
    """All ranks must notice."""
    time.sleep(LIMIT_S + 2 * LATER_S)
    undo()


def the_cable_is_pulled(hosts: Hosts) -> None:
    hosts.plug(1, False)
    for_a_while(lambda: hosts.plug(1, True))


def a_host_is_suspended(hosts: Hosts) -> None:
    hosts.signal(1, signal.SIGSTOP)
    for_a_while(lambda: hosts.signal(1, signal.SIGCONT))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [the_cable_is_pulled, a_host_is_suspended])
@pytest.mark.parametrize("makes_buffers", [False, True])
def test_a_host_is_away_and_comes_back(make_hosts, fault, makes_buffers):
    hosts = make_hosts(2)
    with HostsPool(hosts, 2, timeout_s=LONG_S) as pool:
        seen = run_with(pool, lambda: fault(hosts), endure, None, makes_buffers)
    for rank in NODES[0]:
        assert seen[rank].late_ranks <= {2, 3} and seen[rank].seconds < LIMIT_S + LATER_S, seen
    assert seen[0].late_ranks == seen[1].late_ranks, seen
    if fault is the_cable_is_pulled:  # they reach nobody, not even the store
        for rank in NODES[1]:
            assert "did not answer" in seen[rank].text and seen[rank].seconds < LIMIT_S + LATER_S + 1, seen


def stay_right(rank: int) -> float:
    """Operate with a long limit, and return how long the slowest turn took: operations, and a question to all ranks."""
    slowest = 0.0
    with make_hasty_buffer() as buffer:
        store_of_test().set(f"operates/{rank}", "")
        for seed in range(1, 100_000):
            started = time.monotonic()
            round_trip(buffer, seed=seed)
            is_over = torch.tensor(int(store_of_test().check(["over"])))
            dist.all_reduce(is_over, dist.ReduceOp.MIN)
            slowest = max(slowest, time.monotonic() - started)
            if is_over:
                return slowest
    raise AssertionError("the test has not ended the fault")


def pull_for_a_second(hosts: Hosts) -> None:
    hosts.plug(1, False)
    time.sleep(1)
    hosts.plug(1, True)
    time.sleep(4)  # TCP sends again after 1.6 s at the latest


def suspend_for_a_second(hosts: Hosts) -> None:
    hosts.signal(1, signal.SIGSTOP)
    time.sleep(1)
    hosts.signal(1, signal.SIGCONT)
    time.sleep(0.5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [pull_for_a_second, suspend_for_a_second])
def test_a_short_fault_only_takes_time(make_hosts, fault):
    hosts = make_hosts(2)
    with HostsPool(hosts, 2, timeout_s=LONG_S) as pool:
        slowest = run_with(pool, lambda: fault(hosts), stay_right)
    assert min(slowest) > 0.6


def outlive_the_host_of_the_store(rank: int) -> Seen:
    """Rank 0 hosts the store, as under torchrun."""
    if rank == 0:
        store = dist.TCPStore("host0", 0, is_master=True, wait_for_workers=False)
    port = [store.port if rank == 0 else None]
    dist.broadcast_object_list(port)
    if rank != 0:
        store = dist.TCPStore("host0", port[0], is_master=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        buffer = make_hasty_buffer()
    round_trip(buffer)
    hurry(buffer)
    store_of_test().set(f"operates/{rank}", "")
    seen = go_on(lambda step: round_trip(buffer, seed=step), 100_000)
    started = time.monotonic()
    buffer.destroy()
    assert time.monotonic() - started < LATER_S
    assert_nothing_left()
    return seen


@pytest.mark.exhaustive
def test_the_host_of_the_store_loses_power(make_hosts):
    hosts = make_hosts(2)

    def fault() -> None:
        hosts.plug(0, False)
        hosts.kill(0)

    with HostsPool(hosts, 2, timeout_s=LONG_S) as pool:
        _, _, *seen = run_with(pool, fault, outlive_the_host_of_the_store, allow_dead={0, 1})
    for one in seen:
        assert one.seconds < LIMIT_S + LATER_S and "did not answer" in one.text, seen
    assert seen[0].late_ranks == {0} or seen[1].late_ranks == {1}, seen
