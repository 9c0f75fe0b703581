"""Ranks that come late and ranks that die: the others say who, in time, leave nothing behind and can go on."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from conftest import ENGINES, exhaustive, on, on_ranks
from lib.faults import (
    LIMIT_S,
    LONG_S,
    SLACK_S,
    Death,
    act_in,
    assert_given_up,
    assert_names,
    assert_nothing_left,
    die_in,
    hurry,
    is_running,
    make_hasty_buffer,
    mappings,
    meet,
    number_of_files_and_threads,
    settles,
    store_on_rank_0,
    tell,
    wait_for,
)
from lib.round_trip import check_new_buffer, device, inputs, make_buffer, outputs, round_trip

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import RankPool

NUM_RANKS = 4


def here(cases: list[tuple], others: list[tuple] = ()) -> list:
    """Select the cases of the engines that are tested, the first value of each; ``others`` are exhaustive."""
    return [on(*case) for case in cases if case[0] in ENGINES] + [
        exhaustive(*case) for case in others if case[0] in ENGINES
    ]


# ---- what is left in this process -----------------------------------------------------------------------------------


@contextmanager
def pool_that_leaves_nothing() -> Iterator[RankPool]:
    """A pool; then none of its processes, and no name in shared memory that is theirs."""
    names = set(os.listdir("/dev/shm"))
    with RankPool(NUM_RANKS, timeout_s=LONG_S) as pool:
        yield pool
    assert not any(map(is_running, pool.pids))
    new = set(os.listdir("/dev/shm")) - names
    assert not [name for name in new if "ep_dispatcher" in name or any(str(pid) in name for pid in pool.pids)]


# ---- what survivors do ----------------------------------------------------------------------------------------------


def rounds(buffer: ep.Buffer, first_seed: int = 1):
    """Operations, correct as long as all ranks are there, one at each step."""
    rank = buffer.topology.rank
    for seed in range(first_seed, first_seed + 3):
        yield
        out = buffer.dispatch(*inputs(rank, seed=seed, device=device(buffer)))
        out.event.synchronize()
        yield
        buffer.combine(outputs(rank, len(out.x), seed=seed, device=device(buffer)), out.handle).event.synchronize()


def expect_timeout(operations) -> ep.PeerTimeoutError:
    """The error that the first operation without its peer raises, in time."""
    started = time.monotonic()
    try:
        for _ in operations:
            started = time.monotonic()
    except ep.PeerTimeoutError as error:
        seconds = time.monotonic() - started
        assert seconds < LIMIT_S + SLACK_S, f"the error came after {seconds:.1f} s"
        return error
    raise AssertionError("no operation noticed it")


# ---- a rank that is late --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine,ranks_per_node,victim,operation",
    here(
        [
            ("cpu", 4, 1, "dispatch"),
            ("cpu", 2, 3, "combine"),
            ("cuda", 4, 1, "dispatch"),
            ("cuda", 4, 1, "combine"),
            ("cuda", 2, 3, "dispatch"),
            ("cuda", 2, 0, "combine"),
            ("cuda", 1, 2, "dispatch"),
        ],
        others=[
            ("cpu", 1, 2, "dispatch"),
            ("cpu", 4, 1, "combine"),
            ("cpu", 2, 3, "dispatch"),
            ("cpu", 1, 2, "combine"),
        ],
    ),
)
@on_ranks(NUM_RANKS)
def test_a_late_rank_is_named_by_all_others(rank, engine, ranks_per_node, victim, operation):
    """Also by those that wait for it only because they wait for another one: other node, other rail."""
    assert_nothing_left()
    limit = dict(timeout_s=LONG_S) if rank == victim else {}
    buffer = make_hasty_buffer(engine=engine, ranks_per_node=ranks_per_node, **limit)
    round_trip(buffer)
    operations, epoch = rounds(buffer), 3 if operation == "dispatch" else 4
    for _ in range(epoch - 2):
        next(operations)
    hurry(buffer, LONG_S if rank == victim else LIMIT_S)
    if rank == victim:  # sleeps until the others have given up and gone
        wait_for(*(f"awake/{buffer.id}/{other}" for other in range(NUM_RANKS) if other != victim))
        error = expect_timeout(operations)  # it does not wait for ranks that have said that they gave up
        if engine == "cpu":
            assert error.late_ranks == (rank,) and f"rank {rank} came too late" in str(error)
    else:
        error = expect_timeout(operations)
        assert_names(error, rank, victim, [epoch])
        assert_given_up(buffer, error)
    assert engine == "cuda" or len(mappings()) >= ranks_per_node
    buffer.destroy()
    assert_nothing_left()
    tell(f"awake/{buffer.id}/{rank}")
    check_new_buffer(engine=engine, ranks_per_node=ranks_per_node, timeout_s=LONG_S)
    waited_s = [0.0] * NUM_RANKS
    dist.all_gather_object(waited_s, 0.0 if rank == victim else error.waited_s)
    assert max(waited_s) > LIMIT_S - 0.5, "nobody waited for the late rank; others may follow the first that gives up"


# ---- a rank that dies -----------------------------------------------------------------------------------------------


def outlive(rank: int, victim: int, pid: int, death: Death, engine: str, ranks_per_node: int) -> bool:
    assert_nothing_left()
    before = number_of_files_and_threads()
    buffer = make_hasty_buffer(engine=engine, ranks_per_node=ranks_per_node)
    round_trip(buffer)
    operations, epoch = rounds(buffer), 3 if death.operation == "dispatch" else 4
    for _ in range(epoch - 2):
        next(operations)
    hurry(buffer)
    if rank == victim:
        die_in(buffer, death)
    elif death.step == "begin":
        assert settles(lambda: [is_running(pid)], [False])  # its connections are closed
    error = expect_timeout(operations)
    # A rank may have all that it needs of an operation in which another one dies, and notice in the next.
    assert_names(error, rank, victim, [epoch] if death.step == "begin" else [epoch, epoch + 1])
    assert_given_up(buffer, error)
    buffer.destroy()
    assert_nothing_left()
    del operations
    if engine == "cpu":  # CUDA keeps some of its own
        assert settles(number_of_files_and_threads, before), "connections or threads are left"
    survivors = [other for other in range(NUM_RANKS) if other != victim]
    group = dist.new_group(survivors, use_local_synchronization=True)
    options = dict(engine=engine, ranks_per_node=1 if ranks_per_node == 1 else None, timeout_s=LONG_S)
    with make_buffer(group, **options) as buffer:
        assert buffer.topology.num_ranks == NUM_RANKS - 1
        for seed in range(3):
            round_trip(buffer, seed=seed)
    assert_nothing_left()
    return True


@pytest.mark.parametrize(
    "engine,ranks_per_node,victim,death",
    here(
        [
            ("cpu", 4, 3, Death("dispatch", "stage")),
            ("cpu", 4, 0, Death("combine")),
            ("cpu", 2, 1, Death("dispatch", "pull", 2)),
            ("cpu", 2, 3, Death("combine", "reduce")),
            ("cpu", 1, 1, Death("dispatch", "outgoing_lists", 2)),
            ("cpu", 1, 2, Death("combine", "sum")),
            ("cuda", 4, 0, Death("dispatch", "prepare")),
            ("cuda", 4, 2, Death("dispatch", "pull")),
            ("cuda", 4, 1, Death("combine", "combine")),
            ("cuda", 2, 3, Death("dispatch", "pull")),
            ("cuda", 2, 0, Death("combine", "combine")),
            ("cuda", 1, 1, Death("dispatch", "prepare")),
        ],
        others=[
            ("cpu", 4, 0, Death("dispatch")),
            ("cpu", 4, 3, Death("combine", "push")),
            ("cpu", 1, 3, Death("dispatch")),
            ("cpu", 2, 0, Death("dispatch", "counts_arrived")),
            ("cpu", 4, 1, Death("dispatch", "count")),
            ("cpu", 4, 2, Death("dispatch", "pull")),
            ("cpu", 4, 1, Death("combine", "sum")),
            ("cpu", 2, 3, Death("dispatch")),
            ("cpu", 2, 2, Death("combine")),
            ("cpu", 1, 0, Death("combine")),
        ],
    ),
    ids=str,
)
def test_a_dead_rank_is_named_and_outlived(engine, ranks_per_node, victim, death):
    with pool_that_leaves_nothing() as pool:
        seen = pool.run(outlive, victim, pool.pids[victim], death, engine, ranks_per_node, allow_dead={victim})
        assert seen.pop(victim) is None and all(seen)


@on_ranks(3, fresh=True, allow_dead={0})
def test_the_host_of_the_store_dies(rank):
    with store_on_rank_0():
        buffer = make_hasty_buffer()
    round_trip(buffer)
    hurry(buffer)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    error = expect_timeout(rounds(buffer))
    assert_names(error, rank, 0, [3])
    buffer.destroy()
    assert_nothing_left()


def die_together(rank: int, ranks_per_node: int) -> None:
    """Every rank is in the same step when the first one dies: a rank that still had to wait would report the dead."""
    buffer = make_buffer(ranks_per_node=ranks_per_node, timeout_s=LONG_S)
    round_trip(buffer)
    assert mappings()
    die_in(buffer, Death("dispatch", "stage"))
    act_in(buffer, "stage", lambda: meet("die"))
    for _ in rounds(buffer):
        pass


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_nothing_is_left_when_all_ranks_die(ranks_per_node):
    with pool_that_leaves_nothing() as pool:
        assert all(map(is_running, pool.pids))
        assert pool.run(die_together, ranks_per_node, allow_dead=range(NUM_RANKS)) == [None] * NUM_RANKS
        assert pool.closed


# ---- nobody is late -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
@on_ranks(NUM_RANKS)
def test_destroy_frees_memory_files_and_connections(rank, ranks_per_node):
    for _ in range(2):  # what is started once and for all is started here
        check_new_buffer(ranks_per_node=ranks_per_node)
    time.sleep(0.2)
    before = number_of_files_and_threads()
    for seed in range(5):
        buffer, kept = make_buffer(ranks_per_node=ranks_per_node), make_buffer(ranks_per_node=ranks_per_node)
        assert len(mappings()) == 2 * ranks_per_node
        round_trip(kept, seed=seed)
        buffer.destroy()
        assert len(mappings()) == ranks_per_node
        round_trip(kept, seed=seed)
        kept.destroy()
        assert_nothing_left()
    assert settles(number_of_files_and_threads, before), "connections or threads are left"
