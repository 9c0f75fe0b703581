"""Making a buffer: ranks that come late, fail, die or are interrupted. All ranks get one outcome, in time."""

import contextlib
import dataclasses
import json
import os
import pickle
import pkgutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on_ranks, sparsely
from lib.errors import assert_refused, construct, error_of
from lib.faults import (
    ActsIn,
    assert_nothing_left,
    default_store,
    number_of_files_and_threads,
    settles,
    store_on_rank_0,
    tell,
    wait_for,
)
from lib.interrupts import after, handler, interrupt_this_process
from lib.round_trip import CONFIG, check_new_buffer, inputs, make_buffer, round_trip

import ep_dispatcher as ep
from ep_dispatcher import checks, engines, envs, gather, memory, stores
from ep_dispatcher.buffer_arguments import BufferArguments
from ep_dispatcher.memory import Shape
from ep_dispatcher.threads import StoreHangs
from ep_dispatcher.topology import Topology

LIMIT_S = 2.0
SLACK_S = 20.0  # a loaded machine; a wait that knows no limit is longer
LONG_S = 60.0  # a limit that no test should wait for
PLACES = {  # what each step calls
    "configuration": "ep_dispatcher.buffer_arguments.host_id",
    "memory": "ep_dispatcher._C_cpu.Engine",
    "memory of the other ranks": "ep_dispatcher._C_cpu.Engine",
    "connections between nodes": "ep_dispatcher.engines.cpu.engine.Rail",
}
STEPS = list(PLACES)
GLOO = "ep_dispatcher.engines.cpu.rail.ProcessGroupGloo"  # inside the last step
READ = "ep_dispatcher.gather.read_decision"  # the end of a step: the others are in the next one


def late_error(make, *, after_s: float = 0.0) -> ep.PeerTimeoutError:
    """The PeerTimeoutError that ``make`` raises in time, about ``after_s`` later: a rank that began earlier ends it."""
    started = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as caught:
        make()
    assert after_s / 2 < time.monotonic() - started < after_s + SLACK_S
    error = caught.value
    assert (error.operation, error.epoch) == ("buffer", 0) and str(error).startswith("making a buffer, phase '")
    assert "destroy()" not in str(error), "there is none"
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error) and vars(copied) == vars(error)
    return error


@contextlib.contextmanager
def fault(step: str, act):
    """This rank calls act() before one of the steps."""
    place = PLACES.get(step, step)
    usual = pkgutil.resolve_name(place)

    def faulty(*args, **kwargs):
        if step == STEPS[2]:
            return ActsIn(usual(*args), "attach", act)
        act()
        return usual(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, faulty)
        yield


def failing(rank: int, step: str, kind: type[BaseException] = MemoryError):
    """Rank 1 fails in a step; for ``with``."""

    def fail() -> None:
        raise kind("no more of it")

    return fault(step, fail) if rank == 1 else contextlib.nullcontext()


# ---- a rank that does not come in time ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "victim,ranks_per_node,members,step",
    [
        (0, 4, [0, 1, 2, 3], None),
        exhaustive(1, 2, [1, 3], None),
        exhaustive(3, 1, [0, 2, 3], None),
        *(exhaustive(2, 2, [0, 1, 2, 3], step) for step in STEPS),
        *(sparsely((2, 2, [0, 1, 2, 3], step) for step in (GLOO, READ))),
    ],
)
@on_ranks(4)
def test_a_late_rank_is_named_by_all_others(rank, victim, ranks_per_node, members, step):
    """It stops before it begins, or in a step. Also where a rank of its rail waits for it, and is late for the rest."""
    group = None if len(members) == dist.get_world_size() else dist.new_group(members)
    if rank in members:
        rank, others = members.index(rank), [r for r in range(len(members)) if members[r] != victim]
        victim = members.index(victim)
        name = f"late/{step}/{group and group.group_name}"
        make = lambda: make_buffer(group, ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)  # noqa: E731
        stop = lambda: wait_for(*(f"{name}/{other}" for other in others))  # noqa: E731
        dist.barrier(group)  # so that nobody is late for an earlier step
        if rank != victim:
            error = late_error(make, after_s=LIMIT_S)
            assert error.late_ranks == (victim,) and error.rank == rank, str(error)
            assert error.phase == {None: STEPS[0], GLOO: STEPS[3], READ: STEPS[1]}.get(step, step)
            assert f"rank {rank} waited {error.waited_s:.1f} s for rank {victim}. No rank has this" in str(error)
            tell(f"{name}/{rank}")
        elif step is None:
            stop()
            assert late_error(make, after_s=LIMIT_S).late_ranks == tuple(others)  # it does not hang
        else:
            with fault(step, stop):
                error = late_error(make)
            if step in (*STEPS[1:], READ):  # that it entered the round at all they can see only later
                assert error.late_ranks == (victim,) and f"rank {victim} came too late" in str(error)
        dist.barrier(group)
        for _ in range(2):
            check_new_buffer(group, ranks_per_node=ranks_per_node)  # the next attempt of all ranks
        assert_nothing_left()
    dist.barrier()


@on_ranks(3)
def test_buffers_of_different_attempts_are_not_paired(rank):
    """Rank 2 makes its first buffer when the others make their second, which is another one."""
    for turn in range(2):  # once more, with a history
        name = f"again/{turn}"
        dist.barrier()
        if rank == 2:
            wait_for(f"{name}/0", f"{name}/1")
        else:
            assert late_error(lambda: make_buffer(timeout_s=LIMIT_S), after_s=LIMIT_S).late_ranks == (2,)
            tell(f"{name}/{rank}")
        error = late_error(lambda: make_buffer(hidden=64 if rank == 2 else 128, timeout_s=LONG_S))
        assert error.late_ranks == (2,) and error.waited_s < LONG_S / 2
        if rank == 2:
            assert "rank 2 came too late" in str(error)
        check_new_buffer()


@on_ranks(4)
def test_the_shortest_limit_ends_the_wait_of_all(rank):
    limit_s = (LONG_S, LIMIT_S, LONG_S, 1.0)[rank]
    if rank == 3:
        wait_for("limits/0", "limits/1", "limits/2")
        assert late_error(lambda: make_buffer(timeout_s=limit_s)).late_ranks == (0, 1, 2)
    else:
        error = late_error(lambda: make_buffer(timeout_s=limit_s))
        assert error.late_ranks == (3,) and error.waited_s < LONG_S / 2
        tell(f"limits/{rank}")
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ep_dispatcher.envs.timeout_s", dataclasses.replace(envs.timeout_s, default=LIMIT_S))
        if rank == 0:  # a wrong limit is no limit at all: the default one is
            error = late_error(lambda: make_buffer(timeout_s="soon"), after_s=LIMIT_S)
            assert error.late_ranks == (1, 2, 3)
    dist.barrier()
    if rank:
        late_error(lambda: make_buffer(timeout_s=0.5))
    dist.barrier()
    check_new_buffer()


# ---- a rank that fails ----------------------------------------------------------------------------------------------


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    "step,kind",
    [
        (STEPS[0], ValueError),
        (STEPS[0], MemoryError),
        (STEPS[1], ValueError),
        (STEPS[1], Odd),
        (STEPS[2], MemoryError),
        (STEPS[3], MemoryError),
        (STEPS[1], KeyboardInterrupt),
        (STEPS[2], KeyboardInterrupt),
    ],
)
@on_ranks(4)
def test_an_exception_on_one_rank_is_raised_on_all(rank, step, kind):
    """The rank that failed has the cause. An interrupt stays one there, and the others learn that the rank has left."""
    started = time.monotonic()
    with pytest.raises(BaseException) as caught, failing(rank, step, kind):
        # When they connect, the others wait for it until their limit.
        make_buffer(ranks_per_node=2, timeout_s=LIMIT_S if step == STEPS[3] else LONG_S)
    assert time.monotonic() - started < LONG_S / 2
    text = f"{type(caught.value).__name__}: {caught.value}"
    if kind is not KeyboardInterrupt:
        named = "" if kind is ValueError else "RuntimeError: "
        assert text == f"{named}{kind.__name__}: no more of it (on rank 1)"
    elif rank == 1:
        assert text == "KeyboardInterrupt: no more of it"
    else:
        assert text == f"RuntimeError: making a buffer, phase '{step}': rank 1 left: KeyboardInterrupt: no more of it"
    if type(caught.value) is RuntimeError:
        assert isinstance(caught.value.__cause__, kind if rank == 1 else type(None))
    check_new_buffer(ranks_per_node=2)


@pytest.mark.parametrize("step,late,others", [(STEPS[1], READ, [0, 1, 3]), (STEPS[2], STEPS[2], [1])])
@on_ranks(4)
def test_a_rank_is_late_when_another_has_left(rank, step, late, others):
    """Rank 2 reads that the first step is complete when the others have left the second; it maps memory of one gone."""
    stop = lambda: wait_for(*(f"left/{step}/{other}" for other in others))  # noqa: E731
    with fault(late, stop) if rank == 2 else failing(rank, step, KeyboardInterrupt):
        with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
            make_buffer(timeout_s=LONG_S)
    tell(f"left/{step}/{rank}")
    assert rank == 1 or "rank 1 left: KeyboardInterrupt" in str(caught.value)
    check_new_buffer()


@pytest.mark.parametrize("step", [STEPS[0], STEPS[2]])
@on_ranks(3)
def test_ctrl_c_while_it_waits(rank, step):
    make = lambda: make_buffer(ranks_per_node=1, timeout_s=LONG_S)  # noqa: E731
    name = f"interrupt/{step}"
    if rank == 2:
        with fault(step, lambda: wait_for(f"{name}/0", f"{name}/1")):
            with pytest.raises((ep.PeerTimeoutError, RuntimeError)):
                # It is the only one in the first step, and the first to know of none of the others.
                make_buffer(ranks_per_node=1, timeout_s=LIMIT_S if step == "configuration" else LONG_S)
    elif rank == 0:
        begin = time.monotonic()
        with handler(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
            with after(1.5, interrupt_this_process):
                make()
        assert time.monotonic() - begin < LONG_S / 2
        tell(f"{name}/0")
    else:
        with pytest.raises(RuntimeError, match="rank 0 left: KeyboardInterrupt"):
            make()
        tell(f"{name}/1")
    dist.barrier()
    check_new_buffer(ranks_per_node=1)
    assert_nothing_left()


# ---- the host of the store ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@on_ranks(3, fresh=True, allow_dead={0})
def test_the_host_of_the_store_is_gone(rank, how):
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    with store_on_rank_0():
        check_new_buffer()
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), how)
            return
        error = late_error(lambda: make_buffer(timeout_s=LIMIT_S))
        assert 0 in error.late_ranks
    if how == signal.SIGSTOP:
        tell(f"out/{rank}")
        if rank == 1:
            wait_for("out/1", "out/2")
            os.kill(pids[0], signal.SIGCONT)


# ---- what is left ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks_per_node", [exhaustive(4), 1])
@on_ranks(4)
def test_keys_of_the_store_are_deleted_and_connections_to_it_used_again(rank, ranks_per_node):
    numbers = []

    def count() -> None:
        dist.barrier()
        numbers.append(default_store().num_keys())
        dist.barrier()

    def make():
        make_buffer(ranks_per_node=ranks_per_node, timeout_s=LONG_S).destroy()

    make()
    count()
    connection = stores.connection()
    for _ in range(3):
        make()
    count()
    for step in STEPS[:3]:
        with failing(rank, step), pytest.raises(RuntimeError):
            make()
    assert "hidden" in error_of(make_buffer, hidden=128 if rank else 64)
    assert "ranks_per_node" in error_of(make_buffer, ranks_per_node=3)
    count()
    make()
    assert stores.connection() is connection is not default_store(), "the connection was not used again"
    if rank:
        late_error(lambda: make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S))
    dist.barrier()
    if not rank:
        late_error(lambda: make_buffer(ranks_per_node=ranks_per_node, timeout_s=0.5))
    dist.barrier()
    with fault(STEPS[2], dist.barrier) if rank == 1 else contextlib.nullcontext():
        late_error(lambda: make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S))
    if rank != 1:
        dist.barrier()
    with failing(rank, STEPS[2], KeyboardInterrupt), pytest.raises((RuntimeError, KeyboardInterrupt)):
        make()
    make()
    count()
    assert len(set(numbers)) == 1, numbers


@pytest.mark.parametrize("ranks_per_node", [3, 1])
@on_ranks(3)
def test_failures_leave_nothing(rank, ranks_per_node):
    """Also while the exceptions are kept, with all that they refer to."""

    def make(step: str) -> Exception:
        with failing(rank, step), pytest.raises(RuntimeError) as caught:
            make_buffer(ranks_per_node=ranks_per_node)
        return caught.value

    for step in STEPS[:3]:
        make(step)
    before = number_of_files_and_threads()
    kept = [make(STEPS[1 + i % 2]) for i in range(20)]
    assert_nothing_left()
    assert settles(number_of_files_and_threads, before), "files, connections or threads are left"
    del kept


# ---- many groups ----------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_two_threads_make_buffers_on_two_groups(rank):
    """At a time, and on every rank in another order."""
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]

    def make(group, delay_s: float) -> None:
        time.sleep(delay_s)
        for seed in range(5):
            with make_buffer(group) as buffer:
                round_trip(buffer, seed=seed)

    with ThreadPoolExecutor() as threads:
        list(threads.map(make, groups, [0.3 * ((rank + i) % 2) for i in range(2)]))  # exceptions are raised here


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hidden,tokens",
    [(2**30, 2**31 - 1), (2**29, 2**31 - 1), (2**30, 2**20), (8, 2**31 - 1), (8192, 2**31 - 1)],
)
def test_sizes_beyond_any_memory_are_refused_with_the_largest_ones(pools, hidden, tokens):
    (message,) = set(pools(2).run(construct, [dict(hidden=hidden, max_tokens_per_rank=tokens)] * 2))
    assert message.startswith(f"max_tokens_per_rank is {tokens} with hidden={hidden}"), message
    allowed = int(message.partition("at most ")[2].split()[0])
    if hidden == 8:  # small rows: the number of partial sums is what is too large
        allowed //= 2
    shape = Shape(1, 2, CONFIG["num_experts"], CONFIG["num_topk"], min(allowed, 2**29), hidden, torch.bfloat16)
    memory.check_size(shape)
    if allowed < 2**29:
        error_of(memory.check_size, dataclasses.replace(shape, max_tokens_per_rank=allowed + 1))


@on_ranks(2)
def test_integers_of_numpy_are_integers(rank):
    given = {name: kind(value) for (name, value), kind in zip(CONFIG.items(), (np.int64, np.int32, np.uint8, np.int16))}
    with make_buffer(**given, ranks_per_node=np.int64(1), num_sms=np.int64(3)) as buffer:
        round_trip(buffer)
        assert type(buffer.config.hidden) is int and type(buffer.config.num_sms) is int
        rows = int(buffer.dispatch(*inputs(rank)).rows_per_expert.sum())
        alignment = dict(expert_alignment=np.int64(4), max_recv_rows=np.int32(rows + 100))
        for dispatch in (buffer.dispatch, lambda *args, **options: ep.dispatch(buffer, *args, **options)):
            out = dispatch(*inputs(rank), **alignment)
            assert out.x.shape[0] == rows + 100 and not (out.rows_per_expert % 4).any()


@pytest.mark.parametrize("value", [True, np.True_, np.float64(3), 3.0, "3", None, torch.tensor(3)], ids=repr)
def test_other_things_are_no_integers(value):
    assert_refused("hidden", checks.integer, "hidden", value, 1)


@on_ranks(2)
def test_the_wire_is_agreed_on(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISPATCHER_WIRE", ["peer", "nvshmem"][rank])
        assert error_of(make_buffer, engine="cpu").startswith("wire: rank 0 gave peer, rank 1 gave nvshmem")


# ---- what one rank alone is refused, before the ranks allocate together ---------------------------------------------

ONE_ALONE = [  # the argument that the error names, and what one rank gives: options, switches, and a GPU of its own
    ("num_sms", dict(num_sms=1), {}, 132),
    ("num_sms", {}, {}, 1),
    ("EP_DISPATCHER_WIRE", {}, dict(WIRE="ib"), 132),
]


@pytest.mark.skipif("cuda" not in engines.ENGINES, reason="built without the CUDA engine")
@pytest.mark.parametrize("argument,options,switches,num_sms", ONE_ALONE)
@on_ranks(4)
def test_all_ranks_learn_at_once_what_one_is_refused(rank, argument, options, switches, num_sms):
    """Making a buffer of the CUDA engine, as far as that goes without a GPU: to the choice of the memory."""
    if rank != 1:
        options, switches, num_sms = {}, {}, 132

    def choose_memory(config, wire):
        raise AssertionError("this rank waits for the others to allocate")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ep_dispatcher.engines.cuda_problem", lambda: None)
        patch.setattr("ep_dispatcher.engines.cuda.engine.regions_of", choose_memory)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=num_sms, uuid=rank)
        )
        for switch, value in switches.items():
            patch.setenv(f"EP_DISPATCHER_{switch}", value)
        begin, sizes = time.monotonic(), dict(CONFIG, ranks_per_node=2, timeout_s=LONG_S)
        text = assert_refused(argument, ep.Buffer, engine="cuda", **sizes, **options)
    assert text.endswith(" (on rank 1)") and time.monotonic() - begin < LONG_S / 2


@pytest.mark.skipif("cuda" not in engines.ENGINES, reason="built without the CUDA engine")
@pytest.mark.parametrize(
    "given,ranks,wire,few,many",
    [
        (None, 1, "peer", 24, 64),
        (None, 2, "peer", 24, 33),
        (None, 4, "peer", 16, 16),
        (None, 1, "nccl", 24, 61),
        (None, 4, "nccl", 11, 11),
        (40, 1, "peer", 40, 40),
        (12, 8, "nccl", 12, 12),
        (200, 1, "nccl", 127, 127),
    ],
)
def test_multiprocessors_that_fit_on_a_gpu_together(monkeypatch, given, ranks, wire, few, many):
    """Two buffers at once of all ranks have to fit on the GPU. What is given is taken as it is."""
    from ep_dispatcher.engines.cuda.engine import CudaEngine

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    engine = object.__new__(CudaEngine)
    engine._device, engine._topology = None, Topology.make(0, ["host"], None)
    engine.config = SimpleNamespace(num_sms=given, nccl_sms=4)
    assert engine._share_sms(wire, ranks) == dict(expert=0, rank=0, decode=0)
    assert engine._sms == dict(expert=few, rank=few, decode=many)


# ---- what the store holds -------------------------------------------------------------------------------------------


class Trap:
    """A pickle that ends the process that reads it."""

    def __reduce__(self):
        return os._exit, (77,)


def sound(attempts: int = 1, result: object = None, kind: str | None = None, text: str | None = None) -> bytes:
    return json.dumps([attempts, result, kind, text]).encode()


PLANTED = {
    "a pickle": pickle.dumps(Trap()),
    "nothing": b"",
    "half of a message": sound()[:-1],
    "no list": b'{"attempts": 1}',
    "another number of fields": b"[1, null]",
    "no attempts": sound("1"),
    "another result": sound(result={"host": "here"}),
    "an unknown error": sound(kind="SystemExit", text="stop"),
    "an error that is no text": sound(kind="ValueError", text=["stop"]),
    "ranks that are none": sound(kind="PeersLate", text="late", result=[7]),
    "deep": b"[" * 100_000,
    "huge": b"[" + b"1," * 2**21 + b"1]",
}


@pytest.mark.parametrize("what", PLANTED)
@on_ranks(2)
def test_what_is_no_message_is_an_error_that_names_the_rank(rank, what):
    """Rank 1 writes something else in place of its message."""
    usual = gather.Gather._exchange

    def planted(self, message, limit_s):
        return usual(self, PLANTED[what] if rank == 1 else message, limit_s)

    said = "has no message of ep_dispatcher .* from rank 1, but", "somebody has changed this rank's message"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather.Gather, "_exchange", planted)
        with pytest.raises(RuntimeError, match=said[rank]) as caught:
            make_buffer(timeout_s=LONG_S)
        assert len(str(caught.value)) < 600
    dist.barrier()
    check_new_buffer()


OTHERS = [None, True, -1, 2**70, 0.5, "x", [], {}]


def places(value, path=()):
    """The paths to every field of a message, also to those that have fields themselves."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, field in inner:
        yield from places(field, (*path, key))


def with_other(value, path, other):
    if not path:
        return other
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = with_other(copied[path[0]], path[1:], other)
    return copied


@pytest.mark.parametrize("every", [23, exhaustive(1)])
@on_ranks(2)
def test_a_field_that_somebody_has_changed_ends_alike_on_both_ranks(rank, every):
    """Every field of the first messages becomes others, in the store. Both ranks make the buffer or none does, in time.

    A rank once read its own sizes back from there.
    """
    arguments = BufferArguments(
        **CONFIG,
        dtype=torch.bfloat16,
        engine="cpu",
        ranks_per_node=None,
        timeout_s=LONG_S,
        num_sms=None,
        nccl_sms=None,
        suspendable=False,
        mask_late_ranks=False,
        redundant_experts_per_rank=0,
        max_tokens_to_node=None,
    )
    settings = arguments.own_settings(num_ranks=2)
    cases = [(path, other) for path in places([0, settings, None, None]) for other in OTHERS]
    usual, ends = gather.Gather._exchange, set()
    for number, (path, other) in list(enumerate(cases))[::every]:
        changes = [number // every % 2 == rank]

        def exchange(self, message, limit_s, path=path, other=other, changes=changes):
            if changes[0]:
                message, changes[0] = json.dumps(with_other(json.loads(message), path, other)), False
            return usual(self, message, limit_s)

        began, error = time.monotonic(), None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather.Gather, "_exchange", exchange)
            try:
                make_buffer(timeout_s=LONG_S).destroy()
            except (ValueError, RuntimeError) as caught:
                error = f"{type(caught).__name__}: {caught}"
        errors = [None] * 2
        dist.all_gather_object(errors, error)
        assert (errors[0] is None) == (errors[1] is None), (path, other, errors)
        assert time.monotonic() - began < SLACK_S, (path, other, errors)
        ends.add(error is None)
    assert False in ends
    check_new_buffer()


@on_ranks(2)
def test_what_is_no_decision_is_an_error(rank):
    """Somebody else decides the first step, before any rank does."""
    group = dist.new_group([0, 1])
    if rank == 0:
        store = dist.PrefixStore(gather._history_of(group).prefix, default_store())
        for number in range(2):  # if rank 1 has left the first round before rank 0 joins, that opens the second one
            store.set(f"{number}/0/decision", pickle.dumps(Trap()))
    dist.barrier()
    with pytest.raises(RuntimeError, match="is no decision of ep_dispatcher"):
        make_buffer(group, timeout_s=LONG_S)


@on_ranks(3)
def test_the_last_to_arrive_is_gone_before_it_decides(rank):
    """It loses the store at that moment. The others go on to the next step, and name this rank alone."""
    usual = gather.Gather._decide

    def decide(self, store, step, decision):
        if rank == 2 and step == 0 and not decision.ranks:
            raise StoreHangs("the cable is cut")
        return usual(self, store, step, decision)

    dist.barrier()
    if rank == 2:
        time.sleep(LIMIT_S / 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather.Gather, "_decide", decide)
        error = late_error(lambda: make_buffer(timeout_s=LIMIT_S))
    assert error.late_ranks == (2,) if rank < 2 else "did not answer" in str(error)
    assert error.phase == ("configuration" if rank == 2 else "memory")
    dist.barrier()
    check_new_buffer()
