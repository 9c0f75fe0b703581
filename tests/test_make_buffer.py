"""Making a buffer: ranks that come late, fail, die or are interrupted. All ranks get one outcome, in time."""

import dataclasses
import json
import os
import pickle
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from round_trip import CONFIG, inputs, make_buffer, round_trip
from test_errors import error_of
from test_faults import assert_nothing_left, number_of_files_and_threads, settles

import ep_dispatcher as ep
from ep_dispatcher import checks, engines, envs, gather
from ep_dispatcher.engines.cpu import engine as cpu_engine
from ep_dispatcher.tools.testing import RankPool

LIMIT_S = 2.0
SLACK_S = 20.0  # a loaded machine; a wait that knows no limit is longer
LONG_S = 60.0  # a limit that no test should wait for
STEPS = ["configuration", "memory", "memory of the other ranks", "connections between nodes"]


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


class Fault:
    """Make this rank do something else at one of the steps."""

    def __init__(self, step: str, act):
        self._patch, self._step, self._act = pytest.MonkeyPatch(), step, act

    def __enter__(self):
        if self._step == "configuration":
            self._replace("ep_dispatcher.buffer.host_id")
        elif self._step == "memory":
            self._replace("ep_dispatcher._C_cpu.Engine")
        elif self._step == "memory of the other ranks":
            make, act = cpu_engine._C_cpu.Engine, self._act

            class Unattached:
                def __init__(self, *args):
                    self._engine = make(*args)

                def attach(self, *args):
                    act()
                    return self._engine.attach(*args)

                def __getattr__(self, name):
                    return getattr(self._engine, name)

            self._patch.setattr("ep_dispatcher._C_cpu.Engine", Unattached)
        else:
            self._replace(self._step if "." in self._step else "ep_dispatcher.engines.cpu.engine.Rail")

    def _replace(self, name: str) -> None:
        module, _, attribute = name.rpartition(".")
        usual = getattr(__import__(module, fromlist=[attribute]), attribute)

        def faulty(*args, **kwargs):
            self._act()
            return usual(*args, **kwargs)

        self._patch.setattr(name, faulty)

    def __exit__(self, *exc_info):
        self._patch.undo()


# ---- a rank that does not come in time ------------------------------------------------------------------------------


def come_late(rank: int, victim: int, ranks_per_node: int, members: list[int]) -> None:
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


@pytest.mark.parametrize("victim,ranks_per_node,members", [(0, 4, [0, 1, 2, 3]), (1, 2, [1, 3]), (3, 1, [0, 2, 3])])
def test_a_late_rank_is_named_by_all_others(pools, victim, ranks_per_node, members):
    pools(4).run(come_late, victim, ranks_per_node, members)


def come_in_another_attempt(rank: int, turn: int) -> None:
    """Rank 2 makes its first buffer when the others make their second, which is another one."""
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
        assert "rank 2 came too late; the others gave up waiting for rank 2" in str(error)
    with make_buffer() as buffer:
        round_trip(buffer)


def test_buffers_of_different_attempts_are_not_paired(pools):
    for turn in range(2):  # once more, with a history
        pools(3).run(come_in_another_attempt, turn)


def be_slow(rank: int, step: str, ranks_per_node: int) -> None:
    """Rank 2 stops inside a step until the others have given up."""
    make = lambda: make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)  # noqa: E731
    name = f"slow/{step}/{ranks_per_node}"
    dist.barrier()  # so that nobody is late for an earlier step
    if rank == 2:
        with Fault(step, lambda: wait_for(*(f"{name}/{other}" for other in (0, 1, 3)))):
            error = late_error(make)
        if step in STEPS[1:]:  # that it entered the round at all they can see only later
            assert error.late_ranks == (2,) and "rank 2 came too late" in str(error)
    else:
        error = late_error(make, after_s=LIMIT_S)
        assert error.late_ranks == (2,), str(error)
        assert error.phase == (STEPS[3] if "." in step else step)
        default_store().set(f"{name}/{rank}", "")
    dist.barrier()
    with make_buffer(ranks_per_node=ranks_per_node) as buffer:
        round_trip(buffer)
    assert_nothing_left()


@pytest.mark.parametrize("step", [*STEPS, "ep_dispatcher.engines.cpu.rail.ProcessGroupGloo"])
def test_a_rank_that_is_slow_in_a_step(pools, step):
    """Also where another rank of its rail waits for it, and is itself late for the rest."""
    pools(4).run(be_slow, step, 2)


def give_limits(rank: int) -> None:
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


def test_the_shortest_limit_ends_the_wait_of_all(pools):
    pools(4).run(give_limits)


# ---- a rank that fails ----------------------------------------------------------------------------------------------


class Odd(Exception):
    pass


def fail_in(rank: int, step: str, kind: type[BaseException], ranks_per_node: int) -> str:
    def fail():
        raise kind("no more of it")

    started = time.monotonic()
    make = lambda: make_buffer(ranks_per_node=ranks_per_node, timeout_s=LONG_S)  # noqa: E731
    try:
        if rank == 1:
            with Fault(step, fail):
                make()
        else:
            make()
        raise AssertionError("no error")
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        assert time.monotonic() - started < LONG_S / 2
    with make_buffer(ranks_per_node=ranks_per_node) as buffer:
        round_trip(buffer)
    return text


@pytest.mark.parametrize(
    "step,kind",
    [(STEPS[0], ValueError), (STEPS[0], MemoryError), (STEPS[1], ValueError), (STEPS[1], Odd), (STEPS[2], MemoryError)],
)
def test_an_exception_on_one_rank_is_raised_on_all(pools, step, kind):
    (text,) = set(pools(4).run(fail_in, step, kind, 2))
    named = "ValueError: " if kind is ValueError else f"RuntimeError: {kind.__name__}: "
    assert text == f"{named}no more of it (on rank 1)"


def fail_to_connect(rank: int) -> str:
    def fail():
        raise MemoryError("no more of it")

    with pytest.raises(RuntimeError) as caught:
        if rank == 1:
            with Fault(STEPS[3], fail):
                make_buffer(ranks_per_node=2, timeout_s=LIMIT_S)
        else:
            make_buffer(ranks_per_node=2, timeout_s=LIMIT_S)
    with make_buffer(ranks_per_node=2) as buffer:
        round_trip(buffer)
    return str(caught.value)


def test_the_cause_is_named_and_not_the_rank_that_waited_for_it(pools):
    assert set(pools(4).run(fail_to_connect)) == {"MemoryError: no more of it (on rank 1)"}


@pytest.mark.parametrize("step", STEPS[1:3])
def test_an_interrupt_inside_a_step_ends_the_wait_of_all(pools, step):
    texts = pools(4).run(fail_in, step, KeyboardInterrupt, 2)
    assert texts.pop(1) == "KeyboardInterrupt: no more of it"
    assert set(texts) == {
        f"RuntimeError: making a buffer, phase '{step}': rank 1 left: KeyboardInterrupt: no more of it"
    }


def interrupt_a_wait(rank: int, step: str) -> None:
    make = lambda: make_buffer(ranks_per_node=1, timeout_s=LONG_S)  # noqa: E731
    sent: list[float] = []
    name = f"interrupt/{step}"

    def interrupt():
        time.sleep(0.5)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    if rank == 2:
        with Fault(step, lambda: wait_for(f"{name}/0", f"{name}/1")):
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


@pytest.mark.parametrize("step", [STEPS[0], STEPS[2]])
def test_ctrl_c_while_it_waits(pools, step):
    pools(3).run(interrupt_a_wait, step)


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
    def fail():
        raise MemoryError("no more of it")

    def keys() -> int:
        dist.barrier()
        number = default_store().num_keys()
        dist.barrier()
        return number

    def make():
        make_buffer(ranks_per_node=ranks_per_node, timeout_s=LONG_S).destroy()

    make()
    numbers = [keys()]
    for _ in range(3):
        make()
    numbers.append(keys())
    for step in STEPS[:3]:
        with Fault(step, fail if rank == 1 else lambda: None), pytest.raises(RuntimeError):
            make()
    assert "hidden" in error_of(make_buffer, hidden=128 if rank else 64)
    assert "ranks_per_node" in error_of(make_buffer, ranks_per_node=3)
    numbers.append(keys())
    if rank:
        late_error(lambda: make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S))
    dist.barrier()
    if not rank:
        late_error(lambda: make_buffer(ranks_per_node=ranks_per_node, timeout_s=0.5))
    dist.barrier()
    make()
    numbers.append(keys())
    return numbers


@pytest.mark.parametrize("ranks_per_node", [4, 1])
def test_keys_are_deleted(pools, ranks_per_node):
    for numbers in pools(4).run(count_keys, ranks_per_node):
        assert len(set(numbers)) == 1, numbers


def connections(rank: int) -> list[list]:
    """To the store, that no round uses, after each of some buffers."""
    from ep_dispatcher.gather import _idle

    found = []
    for i in range(4):
        with Fault(STEPS[1], (lambda: 1 / 0) if i == 2 and rank else lambda: None):
            try:
                make_buffer(timeout_s=LONG_S).destroy()
            except RuntimeError:
                pass
        found.append([id(connection) for connection in _idle[default_store()]])
    return found


def test_connections_to_the_store_are_used_again(pools):
    """The store's host answers nobody while it looks up the name of a new peer."""
    for found in pools(2).run(connections):
        assert found[0] and all(each == found[0] for each in found), found


def fail_often(rank: int, ranks_per_node: int) -> None:
    def fail():
        raise OSError("no more of it")

    def make(step: str) -> Exception:
        with Fault(step, fail if rank == 1 else lambda: None), pytest.raises(RuntimeError) as caught:
            make_buffer(ranks_per_node=ranks_per_node)
        return caught.value

    for step in STEPS[:3]:
        make(step)
    before = number_of_files_and_threads()
    kept = [make(STEPS[1 + i % 2]) for i in range(20)]
    assert_nothing_left()
    assert settles(number_of_files_and_threads, before), "files, connections or threads are left"
    del kept


@pytest.mark.parametrize("ranks_per_node", [3, 1])
def test_failures_leave_nothing(pools, ranks_per_node):
    """Also while the exceptions are kept, with all that they refer to."""
    pools(3).run(fail_often, ranks_per_node)


# ---- many groups ----------------------------------------------------------------------------------------------------


def make_in_threads(rank: int) -> None:
    """Two threads make buffers on two groups at a time, on every rank in another order."""
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
    failures = []

    def make(group, delay_s: float) -> None:
        try:
            time.sleep(delay_s)
            for seed in range(5):
                with make_buffer(group) as buffer:
                    round_trip(buffer, seed=seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make, args=(group, 0.3 * ((rank + i) % 2))) for i, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_groups_at_the_same_time(pools):
    pools(3).run(make_in_threads)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def too_large(rank: int, changes: dict) -> str:
    message = error_of(make_buffer, **changes)
    with make_buffer() as buffer:
        round_trip(buffer)
    return message


@pytest.mark.parametrize(
    "hidden,tokens",
    [(2**30, 2**31 - 1), (2**29, 2**31 - 1), (2**30, 2**20), (8, 2**31 - 1), (8192, 2**31 - 1)],
)
def test_sizes_beyond_any_memory(pools, hidden, tokens):
    (message,) = set(pools(2).run(too_large, dict(hidden=hidden, max_tokens_per_rank=tokens)))
    assert message.startswith(f"max_tokens_per_rank: given {tokens} with hidden={hidden}"), message
    if hidden == 8:  # small rows: their number is what is too large
        slots = tokens * 2
        assert message.endswith(f"which makes {slots} partial sums, allowed: at most {2**31 - 1} of them")
        return
    row = hidden * 2 + 4 * CONFIG["num_topk"]
    needed = 2 * (tokens + 2 * tokens) * row
    assert f"more than {needed} bytes" in message and f"at most {2**46} bytes" in message
    allowed = int(message.partition("allowed: at most ")[2].split()[0])
    sizes = dict(num_nodes=1, ranks_per_node=2, hidden=hidden, num_topk=CONFIG["num_topk"], dtype=torch.bfloat16)
    checks.buffer_size(max_tokens_per_rank=min(allowed, 2**29), **sizes)
    if allowed < 2**29:
        error_of(checks.buffer_size, max_tokens_per_rank=allowed + 1, **sizes)


def give_numpy(rank: int) -> None:
    given = {name: kind(value) for (name, value), kind in zip(CONFIG.items(), (np.int64, np.int32, np.uint8, np.int16))}
    with make_buffer(**given, ranks_per_node=np.int64(1), num_sms=np.int64(3)) as buffer:
        round_trip(buffer)
        assert type(buffer.config.hidden) is int and type(buffer.config.num_sms) is int
        rows = int(buffer.dispatch(*inputs(rank)).rows_per_expert.sum())
        alignment = dict(expert_alignment=np.int64(4), max_recv_rows=np.int32(rows + 100))
        for dispatch in (buffer.dispatch, lambda *args, **options: ep.dispatch(buffer, *args, **options)):
            out = dispatch(*inputs(rank), **alignment)
            assert out.x.shape[0] == rows + 100 and not (out.rows_per_expert % 4).any()


def test_integers_of_numpy_are_integers(pools):
    pools(2).run(give_numpy)


@pytest.mark.parametrize("value", [True, np.True_, np.float64(3), 3.0, "3", None, torch.tensor(3)], ids=repr)
def test_other_things_are_not(value):
    with pytest.raises(ValueError, match="hidden: given .* an integer from 1 to"):
        checks.integer("hidden", value, 1)
    assert checks.integer("hidden", np.int64(3), 1) == 3 and type(checks.integer("hidden", np.int64(3), 1)) is int


def choose_wire(rank: int, wires: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISPATCHER_WIRE", wires[rank])
        try:
            make_buffer(engine="cpu").destroy()
        except ValueError as error:
            return str(error)
        return "made"


def test_some_ranks_may_only_put(pools):
    """The wire is agreed on; whether a rank also stores where NVLink reaches is its own choice."""
    assert pools(2).run(choose_wire, ["nvshmem-puts", "nvshmem"]) == ["made", "made"]
    said = "wire: rank 0 gave peer, rank 1 gave nvshmem; all ranks must give the same"
    assert pools(2).run(choose_wire, ["peer", "nvshmem"]) == [said, said]


# ---- what one rank alone is refused, before the ranks allocate together ---------------------------------------------

ODD = 1
ONE_ALONE = {
    "few": (dict(num_sms=1), {}, 132, "num_sms: given 1, allowed: at least 2 with several nodes"),
    "a small GPU": ({}, {}, 1, "num_sms: given 1, allowed: at least 2 with several nodes"),
    "a removed switch": ({}, dict(RAIL_SMS="4"), 132, "EP_DISPATCHER_RAIL_SMS: given '4', allowed: unset"),
    "the pace": ({}, dict(WIRE_GBPS="-1"), 132, "EP_DISPATCHER_WIRE_GBPS: given '-1', allowed: a number above 0"),
    "no pace": ({}, dict(WIRE_GBPS="50"), 132, "EP_DISPATCHER_WIRE_GBPS: given 50.0, allowed: unset, or a build with"),
}


def make_on_no_gpu(rank: int, name: str) -> tuple[str, float]:
    """Make a buffer of the CUDA engine, as far as that goes without a GPU: to the choice of the memory."""
    options, switches, num_sms, _ = ONE_ALONE[name] if rank == ODD else ({}, {}, 132, "")

    def choose_memory(config):
        raise AssertionError("this rank waits for the others to allocate")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ep_dispatcher.engines.cuda_problem", lambda: None)
        patch.setattr("ep_dispatcher.engines.cuda.engine.regions_of", choose_memory)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=num_sms))
        for switch, value in switches.items():
            patch.setenv(f"EP_DISPATCHER_{switch}", value)
        begin = time.monotonic()
        with pytest.raises(ValueError) as caught:
            ep.Buffer(**CONFIG, engine="cuda", ranks_per_node=2, timeout_s=LONG_S, **options)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.skipif("cuda" not in engines.ENGINES, reason="built without the CUDA engine")
@pytest.mark.parametrize("name", ONE_ALONE)
def test_all_ranks_learn_at_once_what_one_is_refused(pools, name):
    for text, seconds in pools(4).run(make_on_no_gpu, name):
        assert text.startswith(ONE_ALONE[name][-1]) and text.endswith(f" (on rank {ODD})") and seconds < LONG_S / 2


# ---- what the store holds -------------------------------------------------------------------------------------------


class Trap:
    """A pickle that says when it is read."""

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


def plant(rank: int, what: str) -> None:
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


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_no_message_is_an_error_that_names_the_rank(pools, what):
    pools(2).run(plant, what)


def plant_a_decision(rank: int) -> None:
    """Somebody else decides the first step, before any rank does."""
    group = dist.new_group([0, 1])
    if rank == 0:
        store = dist.PrefixStore(gather._history_of(group).prefix, default_store())
        store.set("0/0/decision", pickle.dumps(Trap()))
    dist.barrier()
    with pytest.raises(RuntimeError, match="is no decision of ep_dispatcher"):
        make_buffer(group, timeout_s=LONG_S)


def test_what_is_no_decision_is_an_error(pools):
    pools(2).run(plant_a_decision)


def fail_with_a_cause(rank: int) -> None:
    def act():
        if rank == 1:
            raise KeyError("the cause")

    with Fault("memory", act), pytest.raises(RuntimeError, match="KeyError: 'the cause' .on rank 1.") as caught:
        make_buffer()
    assert isinstance(caught.value.__cause__, KeyError if rank == 1 else type(None))


def test_the_rank_that_failed_has_the_cause(pools):
    pools(2).run(fail_with_a_cause)
