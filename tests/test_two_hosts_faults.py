"""Faults between hosts: in time the ranks that are left say who is missing, keep nothing, and go on.

Ranks 0 and 1 are on host 0, ranks 2 and 3 on host 1, and the store is on neither unless a test says so.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, long
from lib.faults import (
    LIMIT_S,
    LONG_S,
    assert_nothing_left,
    hurry,
    is_running,
    make_hasty_buffer,
    settles,
    store_on_rank_0,
)
from lib.round_trip import check_new_buffer, make_buffer, round_trip
from lib.two_hosts import Hosts, HostsPool

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


def notice(buffer: ep.Buffer, run: Callable[[int], object]) -> Seen:
    """Call ``run(step)`` until it is late. Then nothing is left of the buffer."""
    hurry(buffer)
    store_of_test().set(f"operates/{buffer.topology.rank}", "")
    with pytest.raises(ep.PeerTimeoutError) as caught:
        for step in range(1, 100_000):
            started = time.monotonic()
            run(step)
    seen = Seen(set(caught.value.late_ranks), time.monotonic() - started, str(caught.value))
    started = time.monotonic()
    buffer.destroy()
    assert time.monotonic() - started < LATER_S
    assert_nothing_left()
    return seen


def endure(rank: int, left: Collection[int] | None, makes_buffers: bool) -> Seen:
    """Operate until the fault. Then go on among the ranks ``left``, or if None, once it is over, among all."""
    assert_nothing_left()
    buffer = make_hasty_buffer()
    assert buffer.topology.nodes == NODES
    make_another = lambda step: check_new_buffer(timeout_s=LIMIT_S)  # noqa: E731
    seen = notice(buffer, make_another if makes_buffers else lambda step: round_trip(buffer, seed=step))
    if left is None:
        store_of_test().wait(["over"], timedelta(seconds=LONG_S))
    group = None if left is None else dist.new_group(left, use_local_synchronization=True)
    per_node = 1 if left is not None and len(left) == 3 else None  # one host has fewer ranks than the other
    make = partial(make_buffer, group, ranks_per_node=per_node, timeout_s=LONG_S)
    # Some had made one buffer more than others, and an attempt tells only those who meet in it: up to two in vain.
    for attempts_left in reversed(range(3 if makes_buffers else 1)):
        try:
            another = make()
            break
        except ep.PeerTimeoutError:
            if not attempts_left:
                raise
    with another:
        for seed in range(3):
            round_trip(another, seed=seed)
    assert_nothing_left()
    return seen


def run_with(hosts: Hosts, fault: Callable, body: Callable, *args, **options) -> list:
    """Run a body on ranks of the hosts, and ``fault(hosts, pool)`` here once all of them operate."""

    def act() -> None:
        keys = [f"operates/{rank}" for rank in range(pool.num_ranks)]
        pool._store.wait(keys, timedelta(seconds=LONG_S))
        time.sleep(0.3)
        fault(hosts, pool)
        pool._store.set("over", "")

    with HostsPool(hosts, 2, timeout_s=LONG_S) as pool, ThreadPoolExecutor() as thread:
        acts = thread.submit(act)
        try:
            results = pool.run(body, *args, **options)
        finally:
            acts.result()  # its exception is raised here
    assert settles(lambda: [*map(is_running, pool.pids)], [0] * 4)
    return results


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
    seen = run_with(hosts, fault, endure, left, False, allow_dead=gone)
    for rank in left:
        assert seen[rank].late_ranks <= gone and seen[rank].seconds < LIMIT_S + LATER_S, seen
    assert seen[0].late_ranks == seen[1].late_ranks, seen  # so that they agree on the smaller group
    assert settles(lambda: [len(hosts.pids(0))], [0])


def pull_the_cable(hosts: Hosts, seconds: float) -> None:
    hosts.plug(1, False)
    time.sleep(seconds)
    hosts.plug(1, True)


def suspend_a_host(hosts: Hosts, seconds: float) -> None:
    hosts.signal(1, signal.SIGSTOP)
    time.sleep(seconds)
    hosts.signal(1, signal.SIGCONT)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fault,makes_buffers",
    [(pull_the_cable, False), (suspend_a_host, True), long(pull_the_cable, True), long(suspend_a_host, False)],
)
def test_a_host_is_away_and_comes_back(make_hosts, fault, makes_buffers):
    all_notice_s = LIMIT_S + 2 * LATER_S
    seen = run_with(make_hosts(2), lambda hosts, pool: fault(hosts, all_notice_s), endure, None, makes_buffers)
    most_s = LIMIT_S + LATER_S
    if makes_buffers:  # a buffer and its first operations have several waits
        most_s *= 3
    else:  # else one may be a buffer ahead, and then waits for the other too
        assert seen[0].late_ranks == seen[1].late_ranks <= {2, 3}, seen
    for rank in NODES[0]:
        assert seen[rank].late_ranks & {2, 3} and seen[rank].seconds < most_s, seen
    if fault is pull_the_cable:  # they reach nobody, not even the store
        for rank in NODES[1]:
            assert "did not answer" in seen[rank].text and seen[rank].seconds < most_s + 1.5, seen


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [pull_the_cable, suspend_a_host])
def test_a_short_fault_only_takes_time(make_hosts, fault):
    def briefly(hosts: Hosts, pool: HostsPool) -> None:
        fault(hosts, 1)
        time.sleep(4)  # TCP sends again after 1.6 s at the latest

    assert min(run_with(make_hosts(2), briefly, stay_right)) > 0.6


def outlive_the_host_of_the_store(rank: int) -> Seen:
    with store_on_rank_0("host0"):
        buffer = make_hasty_buffer()
    round_trip(buffer)
    return notice(buffer, lambda step: round_trip(buffer, seed=step))


@pytest.mark.exhaustive
def test_the_host_of_the_store_loses_power(make_hosts):
    def fault(hosts: Hosts, pool: HostsPool) -> None:
        hosts.plug(0, False)
        hosts.kill(0)

    _, _, *seen = run_with(make_hosts(2), fault, outlive_the_host_of_the_store, allow_dead={0, 1})
    for one in seen:
        assert one.seconds < LIMIT_S + LATER_S and "did not answer" in one.text, seen
    assert seen[0].late_ranks == {0} or seen[1].late_ranks == {1}, seen
