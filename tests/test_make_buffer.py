"""Making a buffer: ranks that come late, fail, die or are interrupted. All ranks get one outcome, in time."""

import contextlib
import dataclasses
import importlib
import json
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from round_trip import CONFIG, inputs, make_buffer, round_trip
from test_errors import assert_refused, construct, error_of
from test_faults import assert_nothing_left, number_of_files_and_threads, settles

import ep_dispatcher as ep
from ep_dispatcher import _C_cpu, checks, engines, envs, gather
from ep_dispatcher.tools.testing import RankPool

LIMIT_S = 2.0
SLACK_S = 20.0  # a loaded machine; a wait that knows no limit is longer
LONG_S = 60.0  # a limit that no test should wait for
PLACES = {  # what each step calls
    "configuration": "ep_dispatcher.buffer.host_id",
    "memory": "ep_dispatcher._C_cpu.Engine",
    "memory of the other ranks": "ep_dispatcher._C_cpu.Engine",
    "connections between nodes": "ep_dispatcher.engines.cpu.engine.Rail",
}
STEPS = list(PLACES)


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def wait_for(*names: str) -> None:
    default_store().wait(list(names), timedelta(seconds=LONG_S))


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
    usual = _C_cpu.Engine

    class Unattached:
        def __init__(self, *args):
            self._engine = usual(*args)

        def attach(self, *args):
            act()
            return self._engine.attach(*args)

        def __getattr__(self, name):
            return getattr(self._engine, name)

    with pytest.MonkeyPatch.context() as patch:
        module, _, attribute = PLACES.get(step, step).rpartition(".")
        function = getattr(importlib.import_module(module), attribute)
        faulty = Unattached if step == STEPS[2] else lambda *args, **kwargs: act() or function(*args, **kwargs)
        patch.setattr(f"{module}.{attribute}", faulty)
        yield


def fail(kind: type[BaseException] = MemoryError) -> None:
    raise kind("no more of it")


# ---- a rank that does not come in time ------------------------------------------------------------------------------


@pytest.mark.parametrize("victim,ranks_per_node,members", [(0, 4, [0, 1, 2, 3]), (1, 2, [1, 3]), (3, 1, [0, 2, 3])])
@on_ranks(4)
def test_a_late_rank_is_named_by_all_others(rank, victim, ranks_per_node, members):
    group = None if len(members) == dist.get_world_size() else dist.new_group(members)
    if rank in members:
        rank, others = members.index(rank), [r for r in range(len(members)) if members[r] != victim]
        victim = members.index(victim)
        name = f"late/{group and group.group_name}"

        def make():
            return make_buffer(group, ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)

        dist.barrier(group)
        if rank == victim:
            wait_for(*(f"{name}/{other}" for other in others))
            error = late_error(make, after_s=LIMIT_S)  # it does not hang
            assert error.late_ranks == tuple(others)
        else:
            error = late_error(make, after_s=LIMIT_S)
            assert error.late_ranks == (victim,) and error.phase == "configuration" and error.rank == rank
            assert f"rank {rank} waited {error.waited_s:.1f} s for rank {victim}. No rank has this" in str(error)
            default_store().set(f"{name}/{rank}", "")
        dist.barrier(group)
        for _ in range(2):
            with make_buffer(group, ranks_per_node=ranks_per_node) as buffer:  # the next attempt of all ranks
                round_trip(buffer)
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
            default_store().set(f"{name}/{rank}", "")
        error = late_error(lambda: make_buffer(hidden=64 if rank == 2 else 128, timeout_s=LONG_S))
        assert error.late_ranks == (2,) and error.waited_s < LONG_S / 2
        if rank == 2:
            assert "rank 2 came too late" in str(error)
        with make_buffer() as buffer:
            round_trip(buffer)


@pytest.mark.parametrize("step", [*STEPS, "ep_dispatcher.engines.cpu.rail.ProcessGroupGloo"])
@on_ranks(4)
def test_a_rank_that_stops_in_a_step_is_named_by_all_others(rank, step):
    """Also where another rank of its rail waits for it, and is itself late for the rest."""
    make = lambda: make_buffer(ranks_per_node=2, timeout_s=LIMIT_S)  # noqa: E731
    dist.barrier()  # so that nobody is late for an earlier step
    if rank == 2:
        with fault(step, lambda: wait_for(*(f"slow/{step}/{other}" for other in (0, 1, 3)))):
            error = late_error(make)
        if step in STEPS[1:]:  # that it entered the round at all they can see only later
            assert error.late_ranks == (2,) and "rank 2 came too late" in str(error)
    else:
        error = late_error(make, after_s=LIMIT_S)
        assert error.late_ranks == (2,), str(error)
        assert error.phase == (STEPS[3] if "." in step else step)
        default_store().set(f"slow/{step}/{rank}", "")
    dist.barrier()
    with make_buffer(ranks_per_node=2) as buffer:
        round_trip(buffer)
    assert_nothing_left()


@on_ranks(4)
def test_the_shortest_limit_ends_the_wait_of_all(rank):
    limit_s = (LONG_S, LIMIT_S, LONG_S, 1.0)[rank]
    if rank == 3:
        wait_for("limits/0", "limits/1", "limits/2")
        assert late_error(lambda: make_buffer(timeout_s=limit_s)).late_ranks == (0, 1, 2)
    else:
        error = late_error(lambda: make_buffer(timeout_s=limit_s))
        assert error.late_ranks == (3,) and error.waited_s < LONG_S / 2
        default_store().set(f"limits/{rank}", "")
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
    with make_buffer() as buffer:
        round_trip(buffer)


# ---- a rank that fails ----------------------------------------------------------------------------------------------


class Odd(Exception):
    pass


def fail_in(rank: int, step: str, kind: type[BaseException], ranks_per_node: int) -> str:
    """Rank 1 fails. Every rank's error; the rank that failed has the cause."""
    started = time.monotonic()
    try:
        with fault(step, partial(fail, kind)) if rank == 1 else contextlib.nullcontext():
            # When they connect, the others wait for it until their limit.
            make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S if step == STEPS[3] else LONG_S)
        raise AssertionError("no error")
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        assert time.monotonic() - started < LONG_S / 2
        if type(error) is RuntimeError:
            assert isinstance(error.__cause__, kind if rank == 1 else type(None))
    with make_buffer(ranks_per_node=ranks_per_node) as buffer:
        round_trip(buffer)
    return text


@pytest.mark.parametrize(
    "step,kind",
    [
        (STEPS[0], ValueError),
        (STEPS[0], MemoryError),
        (STEPS[1], ValueError),
        (STEPS[1], Odd),
        (STEPS[2], MemoryError),
        (STEPS[3], MemoryError),
    ],
)
def test_an_exception_on_one_rank_is_raised_on_all(pools, step, kind):
    (text,) = set(pools(4).run(fail_in, step, kind, 2))
    named = "ValueError: " if kind is ValueError else f"RuntimeError: {kind.__name__}: "
    assert text == f"{named}no more of it (on rank 1)"


@pytest.mark.parametrize("step", STEPS[1:3])
def test_an_interrupt_inside_a_step_ends_the_wait_of_all(pools, step):
    texts = pools(4).run(fail_in, step, KeyboardInterrupt, 2)
    assert texts.pop(1) == "KeyboardInterrupt: no more of it"
    assert set(texts) == {
        f"RuntimeError: making a buffer, phase '{step}': rank 1 left: KeyboardInterrupt: no more of it"
    }


@pytest.mark.parametrize("step", [STEPS[0], STEPS[2]])
@on_ranks(3)
def test_ctrl_c_while_it_waits(rank, step):
    make = lambda: make_buffer(ranks_per_node=1, timeout_s=LONG_S)  # noqa: E731
    sent: list[float] = []
    name = f"interrupt/{step}"

    def interrupt():
        time.sleep(0.5)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    if rank == 2:
        with fault(step, lambda: wait_for(f"{name}/0", f"{name}/1")):
            with pytest.raises((ep.PeerTimeoutError, RuntimeError)):
                # It is the only one in the first step, and the first to know of none of the others.
                make_buffer(ranks_per_node=1, timeout_s=LIMIT_S if step == "configuration" else LONG_S)
    elif rank == 0:
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                make()
            assert time.monotonic() - sent[0] < 10
            thread.join()
        finally:
            signal.signal(signal.SIGINT, usual)
        default_store().set(f"{name}/0", "")
    else:
        with pytest.raises(RuntimeError, match="rank 0 left: KeyboardInterrupt"):
            make()
        default_store().set(f"{name}/1", "")
    dist.barrier()
    with make_buffer(ranks_per_node=1) as buffer:
        round_trip(buffer)
    assert_nothing_left()


# ---- the host of the store ------------------------------------------------------------------------------------------


def lose_the_store(rank: int, how: signal.Signals) -> None:
    """Rank 0 hosts the store, as it does without torchrun."""
    port = [None]
    if rank == 0:
        hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [hosted.port]
    dist.broadcast_object_list(port)
    usual = default_store()
    store = hosted if rank == 0 else dist.TCPStore("127.0.0.1", port[0], is_master=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        with make_buffer() as buffer:
            round_trip(buffer)
        if rank == 0:
            usual.set("host", str(os.getpid()))
            os.kill(os.getpid(), how)
            return
        usual.wait(["host"], timedelta(seconds=LONG_S))
        error = late_error(lambda: make_buffer(timeout_s=LIMIT_S))
        assert 0 in error.late_ranks
    if how == signal.SIGSTOP:
        usual.set(f"out/{rank}", "")
        if rank == 1:
            usual.wait(["out/1", "out/2"], timedelta(seconds=LONG_S))
            os.kill(int(usual.get("host")), signal.SIGCONT)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_host_of_the_store_is_gone(how):
    with RankPool(3, timeout_s=LONG_S) as pool:
        pool.run(lose_the_store, how, allow_dead={0})


# ---- what is left ---------------------------------------------------------------------------------------------------


def count_keys(rank: int, ranks_per_node: int) -> list[int]:
    def count() -> int:
        dist.barrier()
        number = default_store().num_keys()
        dist.barrier()
        return number

    def make():
        make_buffer(ranks_per_node=ranks_per_node, timeout_s=LONG_S).destroy()

    make()
    numbers, connections = [count()], [*map(id, gather._idle[default_store()])]
    for _ in range(3):
        make()
    numbers.append(count())
    for step in STEPS[:3]:
        with fault(step, fail if rank == 1 else lambda: None), pytest.raises(RuntimeError):
            make()
    assert "hidden" in error_of(make_buffer, hidden=128 if rank else 64)
    assert "ranks_per_node" in error_of(make_buffer, ranks_per_node=3)
    numbers.append(count())
    make()
    assert connections and connections == [*map(id, gather._idle[default_store()])], "connections were not used again"
    if rank:
        late_error(lambda: make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S))
    dist.barrier()
    if not rank:
        late_error(lambda: make_buffer(ranks_per_node=ranks_per_node, timeout_s=0.5))
    dist.barrier()
    make()
    return [*numbers, count()]


@pytest.mark.parametrize("ranks_per_node", [4, 1])
def test_keys_of_the_store_are_deleted_and_connections_to_it_used_again(pools, ranks_per_node):
    for numbers in pools(4).run(count_keys, ranks_per_node):
        assert len(set(numbers)) == 1, numbers


@pytest.mark.parametrize("ranks_per_node", [3, 1])
@on_ranks(3)
def test_failures_leave_nothing(rank, ranks_per_node):
    """Also while the exceptions are kept, with all that they refer to."""

    def make(step: str) -> Exception:
        with fault(step, fail if rank == 1 else lambda: None), pytest.raises(RuntimeError) as caught:
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
        for _ in threads.map(make, groups, [0.3 * ((rank + i) % 2) for i in range(2)]):
            pass  # an exception is raised here


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hidden,tokens",
    [(2**30, 2**31 - 1), (2**29, 2**31 - 1), (2**30, 2**20), (8, 2**31 - 1), (8192, 2**31 - 1)],
)
def test_sizes_beyond_any_memory_are_refused_with_the_largest_ones(pools, hidden, tokens):
    (message,) = set(pools(2).run(construct, [dict(hidden=hidden, max_tokens_per_rank=tokens)] * 2))
    assert message.startswith(f"max_tokens_per_rank: given {tokens} with hidden={hidden}"), message
    allowed = int(message.partition("allowed: at most ")[2].split()[0])
    sizes = dict(num_nodes=1, ranks_per_node=2, hidden=hidden, num_topk=CONFIG["num_topk"], dtype=torch.bfloat16)
    if hidden == 8:  # small rows: the number of partial sums is what is too large
        allowed //= 2
    checks.buffer_size(max_tokens_per_rank=min(allowed, 2**29), **sizes)
    if allowed < 2**29:
        error_of(checks.buffer_size, max_tokens_per_rank=allowed + 1, **sizes)


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
def test_the_wire_is_agreed_on_but_some_ranks_may_only_put(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISPATCHER_WIRE", ["nvshmem-puts", "nvshmem"][rank])
        make_buffer(engine="cpu").destroy()
        patch.setenv("EP_DISPATCHER_WIRE", ["peer", "nvshmem"][rank])
        assert error_of(make_buffer, engine="cpu").startswith("wire: rank 0 gave peer, rank 1 gave nvshmem")


# ---- what one rank alone is refused, before the ranks allocate together ---------------------------------------------

ONE_ALONE = [  # the argument that the error names, and what one rank gives: options, switches, and a GPU of its own
    ("num_sms", dict(num_sms=1), {}, 132),
    ("num_sms", {}, {}, 1),
    ("EP_DISPATCHER_RAIL_SMS", {}, dict(RAIL_SMS="4"), 132),
    ("EP_DISPATCHER_WIRE_GBPS", {}, dict(WIRE_GBPS="-1"), 132),
    ("EP_DISPATCHER_WIRE_GBPS", {}, dict(WIRE_GBPS="50"), 132),
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
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=num_sms))
        for switch, value in switches.items():
            patch.setenv(f"EP_DISPATCHER_{switch}", value)
        begin, sizes = time.monotonic(), dict(CONFIG, ranks_per_node=2, timeout_s=LONG_S)
        text = assert_refused(argument, ep.Buffer, engine="cuda", **sizes, **options)
    assert text.endswith(" (on rank 1)") and time.monotonic() - begin < LONG_S / 2


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
    usual = gather.Gather._make_offer

    def planted(self, produce):
        offer, message = usual(self, produce)
        return offer, PLANTED[what] if rank == 1 else message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather.Gather, "_make_offer", planted)
        with pytest.raises(RuntimeError, match="has no message of ep_dispatcher .* from rank 1, but") as caught:
            make_buffer(timeout_s=LONG_S)
        assert len(str(caught.value)) < 600
    dist.barrier()
    with make_buffer() as buffer:
        round_trip(buffer)


@on_ranks(2)
def test_what_is_no_decision_is_an_error(rank):
    """Somebody else decides the first step, before any rank does."""
    group = dist.new_group([0, 1])
    if rank == 0:
        store = dist.PrefixStore(gather._history_of(group).prefix, default_store())
        store.set("0/0/decision", pickle.dumps(Trap()))
    dist.barrier()
    with pytest.raises(RuntimeError, match="is no decision of ep_dispatcher"):
        make_buffer(group, timeout_s=LONG_S)
