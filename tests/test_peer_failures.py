"""What a failure of torch.distributed means: a late peer, one that has left, or something else. Provoked here."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.faults import LONG_S, act_in
from lib.round_trip import inputs, make_buffer, round_trip
from torch.distributed import FileStore, HashStore, PrefixStore, ProcessGroupGloo, TCPStore

import ep_dispatcher as ep
from ep_dispatcher import stores
from ep_dispatcher.engines.cpu import rail
from ep_dispatcher.engines.cpu.waiter import Message
from ep_dispatcher.engines.late_ranks import find_late_ranks
from ep_dispatcher.engines.rendezvous import OwnKeys
from ep_dispatcher.gather import Gather, History
from ep_dispatcher.gloo import is_closed, wait_limit
from ep_dispatcher.integrations import collectives
from ep_dispatcher.stores import STORE_GONE, wait_for

SHORT = timedelta(milliseconds=200)
LONG = timedelta(seconds=60)
SOON_S = 15.0  # on a machine under load; the limit is longer
TEXTS = ["Wait timeout", "Connection closed by peer"]  # of errors that say so, and are none of a late peer


def error_of(call) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def numbers(count: int = 4) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float32, device="cpu")


# ---- stores ---------------------------------------------------------------------------------------------------------


def serve() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def test_a_wait_is_over_by_our_clock(tmp_path):
    kinds = [serve(), FileStore(f"{tmp_path}/store", 2), HashStore()]
    for store in (*kinds, PrefixStore("prefix", kinds[0])):
        started = time.monotonic()
        assert not wait_for(store, ["no"], 0.2) and 0.2 <= time.monotonic() - started < SOON_S
        store.set("no", "")
        assert wait_for(store, ["no"], 0.0)


def test_a_wait_blocks_no_other_call_on_its_connection():
    store = serve()
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(wait_for, store, ["key"], LONG_S)
        time.sleep(0.1)
        store.set("key", "")
        assert waits.result(SOON_S)


def test_the_server_is_gone():
    server = serve()
    client = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False, timeout=timedelta(seconds=1))
    client.set("key", "value")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(wait_for, client, ["no"], LONG_S)
        time.sleep(0.2)
        started = time.monotonic()
        del server
        assert isinstance(waits.exception(), STORE_GONE) and time.monotonic() - started < SOON_S
    for call in (
        partial(client.get, "key"),
        partial(client.set, "key", "value"),
        partial(client.add, "n", 1),
        partial(client.check, ["key"]),
        partial(client.compare_set, "key", "", "value"),
        partial(client.multi_get, ["key"]),
        client.clone,
    ):
        error = error_of(call)
        assert isinstance(error, STORE_GONE), error
    with pytest.raises(STORE_GONE):
        stores.delete(client, ["key"])


class Unfinished(dist.Store):
    """A store in Python with one method."""

    def set(self, key, value):
        pass


def test_every_other_error_of_a_store_is_none():
    for call in (
        Unfinished().clone,
        lambda: PrefixStore("prefix", Unfinished()).check(["no"]),
        lambda: PrefixStore("prefix", Unfinished()).compare_set("a", "", "b"),
    ):
        error = error_of(call)
        assert not isinstance(error, STORE_GONE), error
    stores.delete(PrefixStore("prefix", Unfinished()), ["a"])  # it cannot, and nobody minds


class Raising(dist.HashStore):
    """A store that is written in Python, and fails."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def check(self, keys):
        raise self.error


@pytest.mark.parametrize("error", [*map(RuntimeError, TEXTS), TimeoutError("late"), ConnectionResetError("closed")])
def test_a_failing_store_is_told_from_a_late_rank_by_the_type_of_its_error(monkeypatch, error):
    """What it says may be anything. As the default store while a buffer is made, and for reports of late ranks."""
    is_gone = isinstance(error, OSError)
    reason = find_late_ranks(Raising(error), 0, [1]).reason
    assert ("did not answer" in reason) if is_gone else (f"failed, by RuntimeError: {error}" in reason)
    store = Raising(error)
    monkeypatch.setattr("ep_dispatcher.gather.PrefixStore", lambda prefix, connection: connection)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    history = History("prefix")
    with pytest.raises(RuntimeError) as caught, Gather(group, 5.0, history=history) as gather:
        gather("call", lambda: None)
    assert isinstance(caught.value, ep.PeerTimeoutError) == is_gone and caught.value.__cause__ is error
    assert is_gone or str(error) in str(caught.value)


# ---- gloo -----------------------------------------------------------------------------------------------------------


def gloo_pair() -> list[ProcessGroupGloo]:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, timedelta(seconds=20)), range(2)))


def assert_limit_is_kept(wait, limit_s: float = 0.2) -> None:
    """It fails, and not before the limit by our clock."""
    started = time.monotonic()
    error_of(lambda: wait(wait_limit(limit_s)))
    assert limit_s <= time.monotonic() - started


@pytest.mark.parametrize("operation", ["recv", "send"])
def test_gloo_times_out_and_then_its_connections_are_closed(operation):
    one, two = gloo_pair()
    for _ in range(2):  # asking harms no connection
        assert not is_closed(one, 1) and not is_closed(two, 0)
    received = two.recv([numbers()], 0, 0)
    one.send([numbers() + 3], 1, 0).wait()
    received.wait()
    huge = numbers(2**22)  # gloo sends no more than a socket holds, before it is received
    assert_limit_is_kept(getattr(one, operation)([huge], 1, 0).wait)
    assert is_closed(one, 1)
    error_of(lambda: two.recv([numbers()], 0, 0).wait(LONG))  # the peer's end is closed
    assert is_closed(two, 0)


def test_gloo_in_a_collective_and_while_it_connects():
    one, two = gloo_pair()
    assert_limit_is_kept(one.allreduce([numbers()], dist.AllreduceOptions()).wait)
    assert_limit_is_kept(lambda limit: ProcessGroupGloo(HashStore(), 0, 2, limit))
    del two


def test_other_errors_of_gloo_close_no_connection():
    one, _two = gloo_pair()
    error_of(lambda: one.recv([numbers().to_sparse()], 1, 0))
    assert not is_closed(one, 1)


@pytest.mark.parametrize("text", TEXTS)
def test_an_error_on_a_sound_connection_is_raised_as_it_is(text):
    """Between nodes, whatever it says. On a closed connection, or after the deadline, it is that of a late rank."""
    one, two = gloo_pair()
    error = RuntimeError(text)

    def fail(limit: timedelta) -> None:
        raise error

    mine = rail.Rail(None, (5,), 0, timeout_s=1)
    mine.ranks, mine.others, mine._group = (5, 6), [1], one

    def finish(deadline: float) -> BaseException:
        message = Message(SimpleNamespace(wait=fail), "sums between nodes", 1, memoryview(bytearray(8)), deadline)
        return error_of(lambda: mine._finish(message, is_near=True))

    later = time.monotonic() + LONG_S
    assert finish(later) is error
    late = finish(time.monotonic())
    assert isinstance(late, rail.RailLate) and late.rank == 6 and late.__cause__ is error
    mine.deadline = later
    refused = error_of(lambda: mine._start("recv", "sums between nodes", 1, memoryview(bytearray(8)), -1))
    assert not isinstance(refused, rail.RailLate)
    del two
    error_of(lambda: one.recv([numbers()], 1, 0).wait(LONG))  # until it is noticed
    late = finish(later)
    assert isinstance(late, rail.RailLate) and late.__cause__ is error
    mine.abort()


# ---- a peer that is killed ------------------------------------------------------------------------------------------


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@on_ranks(3, fresh=True, allow_dead={1})
def test_a_peer_between_nodes_is_killed(rank):
    """The others notice at once, by the closed connection."""
    buffer = make_buffer(ranks_per_node=1, timeout_s=LONG_S)
    round_trip(buffer)
    if rank == 1:
        act_in(buffer, "pull", end)
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as caught:
        for _ in range(2):
            buffer.dispatch(*inputs(rank))
    assert time.monotonic() - begin < SOON_S
    assert caught.value.late_ranks == (1,)
    buffer.destroy()


@on_ranks(3, fresh=True, allow_dead={1})
def test_a_peer_is_killed_while_it_connects(rank):
    """gloo tries for its whole limit to reach it. An earlier error of gloo stays the cause of what is raised."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            calls, usual = [], OwnKeys.wait
            patch.setattr(OwnKeys, "wait", lambda *args: end() if calls else (calls.append(1), usual(*args)))
        with pytest.raises(ep.PeerTimeoutError) as caught:
            make_buffer(ranks_per_node=1, timeout_s=3.0)
    assert caught.value.late_ranks == (1,) and caught.value.waited_s < SOON_S


@on_ranks(3, fresh=True, allow_dead={1})
def test_a_peer_is_killed_in_an_agreement(rank):
    """Before it come errors that only sound as if a peer were late: they are raised as they are."""
    tensor, group = torch.ones(2, dtype=torch.int64), dist.group.WORLD
    reduce = partial(collectives.all_reduce, tensor, dist.ReduceOp.SUM, group, about="test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISPATCHER_TIMEOUT_S", str(LONG_S))
        reduce()
        assert tensor.tolist() == [3, 3]
        for error in map(RuntimeError, TEXTS):
            with pytest.MonkeyPatch.context() as failing:
                failing.setattr(collectives.dist, "all_reduce", mock.Mock(side_effect=error))
                assert error_of(reduce) is error
        reduce()
        if rank == 1:
            end()
        begin = time.monotonic()
        late = error_of(reduce)
    assert isinstance(late, ep.PeerTimeoutError) and late.late_ranks == (1,), late
    assert time.monotonic() - begin < SOON_S and late.__cause__ is not None
