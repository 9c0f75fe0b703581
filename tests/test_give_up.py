"""A rank that gives up: who is blamed, what it leaves behind, and what it takes to get there."""

import json
import pickle
import threading
import time
from types import SimpleNamespace

import pytest
from conftest import exhaustive, on_ranks
from lib.errors import assert_refused
from lib.faults import act_in, operations_so_far, tell, wait_for
from lib.round_trip import device, inputs, make_buffer, round_trip

import ep_dispatcher as ep
from ep_dispatcher.engines.cpu import rail
from ep_dispatcher.engines.cpu.waiter import Message
from ep_dispatcher.engines.late_ranks import GRACE_S, find_late_ranks
from ep_dispatcher.tools.testing import same_bits


class Words(dict):
    """A store in this process, with what other ranks have said."""

    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)


class HangingStore(Words):
    """Its host was stopped: no question is ever answered."""

    def check(self, keys):
        time.sleep(3600)


def word(waits, gone=(), operation="", epoch=0) -> str:
    return json.dumps(dict(waits=waits, gone=list(gone), operation=operation, epoch=epoch))


def test_a_store_that_hangs_does_not_hang_the_rank():
    begin = time.monotonic()
    chain = find_late_ranks(HangingStore(), 0, [2, 1])
    assert chain.late_ranks == [1, 2] and "did not answer" in chain.reason
    assert time.monotonic() - begin < GRACE_S + 60  # the store hangs for an hour


def test_a_message_that_gloo_does_not_give_up_is_given_up(monkeypatch):
    """The owner of a message waited for as long as gloo did, whatever its deadline."""
    monkeypatch.setattr(rail, "_STUCK_S", 0.3)
    ends = threading.Event()
    work = SimpleNamespace(wait=lambda limit: ends.wait(60))
    mine, begin = rail.Rail(None, (5,), 0, timeout_s=1), time.monotonic()
    message = Message(work, "sums between nodes", 0, memoryview(bytearray(8)), deadline=begin + 0.2)
    with pytest.raises(rail.RailLate) as caught:
        mine._finish(message, is_near=False)
    assert caught.value.rank == 5 and 0.5 <= time.monotonic() - begin < 30
    ends.set()
    mine.abort()


def test_the_chain_of_those_who_wait_ends_at_those_who_say_nothing():
    words = {"1": word([3]), "2": word([1, 5])}  # 0 waits for 1 and 2; these say for whom they wait themselves
    store = Words(words)
    assert find_late_ranks(store, 0, [1, 2]).late_ranks == [3, 5]
    assert json.loads(store["0"])["waits"] == [1, 2]


@pytest.mark.parametrize(
    "report",
    [
        "",
        "[]",
        "{",
        "[" * 10_000,
        "3",
        *(
            json.dumps({**json.loads(word([3])), field: other})
            for field in json.loads(word([]))
            for other in (None, {})
        ),
        word([-1]),
        word(["3"]),
        word([1.5]),
        word([3] * 100_000),
        json.dumps(json.loads(word([3])) | {"more": 1}),
    ],
)
def test_what_is_no_report_is_said_and_not_followed(report):
    """Whoever can connect to the store can write there."""
    chain = find_late_ranks(Words({"1": report}), 0, [1])
    assert chain.late_ranks == [1] and "is no report of rank 1" in chain.reason and len(chain.reason) < 300


def test_ranks_of_this_node_name_the_others_of_a_late_one():
    words = {"1": word([3]), "4": word([5])}  # 0 and 1 are a node, 2 and 3 another one
    assert find_late_ranks(Words(words), 0, [2], beside=[0, 1]).late_ranks == [2, 3]
    assert find_late_ranks(Words({}), 0, [2], beside=[0, 1]).late_ranks == [2], (
        "a rank beside that has said nothing is not late"
    )
    assert find_late_ranks(Words({"1": word([0]), "2": word([0])}), 0, [2], beside=[0, 1]).late_ranks == [0]


def test_nobody_listens_for_ranks_that_have_left():
    begin = time.monotonic()
    chain = find_late_ranks(Words({}), 0, [1, 2], gone=[1, 2])
    assert chain.late_ranks == [1, 2] and "Ranks 1, 2 have left" in chain.reason
    chain = find_late_ranks(Words({"1": word([3], gone=[3])}), 0, [1])  # rank 0 cannot see rank 3 itself
    assert chain.late_ranks == [3] and "Rank 3 has left" in chain.reason
    assert time.monotonic() - begin < GRACE_S


def test_a_chain_that_ends_at_the_asking_rank_names_it():
    words = {str(peer): word([3], operation="dispatch", epoch=5) for peer in range(3)}
    chain = find_late_ranks(Words(words), 3, [0, 1, 2], operation="dispatch", epoch=5)
    assert chain.late_ranks == [3]
    error = ep.PeerTimeoutError("dispatch", 5, "rows", 3, chain.late_ranks, 0.0, chain.reason)
    assert "rank 3 came too late: the other ranks have given up waiting for it" in str(error)
    assert "rank 0" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_rank_that_may_be_compiling_is_advice_unless_more_is_known():
    """Compilation takes minutes on one rank, while the others wait in an operation."""
    late = ep.PeerTimeoutError("combine", 5, "partial sums", 0, [3], 100.0)
    assert "compiling" in str(late) and "EP_DISPATCHER_TIMEOUT_S" in str(late)
    left = find_late_ranks(Words({}), 0, [3], gone=[3])
    for operation, reason in (("combine", left.reason), ("suspend", ""), ("unmask", ""), ("buffer", "")):
        assert "compiling" not in str(ep.PeerTimeoutError(operation, 5, "rows", 0, [3], 100.0, reason)), operation


def lack_memory() -> None:
    raise MemoryError("no memory")


@pytest.mark.parametrize("ranks_per_node", [3, exhaustive(1)])
@on_ranks(3, fresh=True)
def test_only_the_rank_that_gave_up_is_blamed_and_at_once(rank, engine, ranks_per_node):
    with make_buffer(ranks_per_node=ranks_per_node, engine=engine, timeout_s=100) as buffer:
        given = inputs(rank, device=device(buffer))
        buffer.dispatch(*given)
        buffer.check()
        if rank == 1:
            act_in(buffer, "pull", lack_memory)  # the last step of a dispatch
        if rank == 2:
            time.sleep(1.5)  # slower than the others, and nothing worse

        def dispatch():  # the others may get their rows, and notice in the next operation
            for _ in range(2):
                buffer.dispatch(*given).event.synchronize()

        begin, errors = time.monotonic(), []
        for ask in (dispatch, dispatch, buffer.check):
            with pytest.raises((ep.PeerTimeoutError, RuntimeError, MemoryError)) as caught:
                ask()
            errors.append((type(caught.value).__name__, getattr(caught.value, "late_ranks", None)))
        assert time.monotonic() - begin < 50
        if rank == 1:
            assert errors == [("MemoryError", None), ("RuntimeError", None), ("RuntimeError", None)]
        else:
            assert errors == [("PeerTimeoutError", (1,))] * 3
        if engine == "cpu":
            assert buffer._engine._rail._receives == buffer._engine._rail._sends == []


@on_ranks(1)
def test_a_second_thread_is_told(rank, engine):
    with make_buffer(engine=engine) as buffer:
        with buffer._engine.health.operation("combine"):  # as another thread is in
            with pytest.raises(ValueError, match="^buffer is in use by another thread"):
                buffer.dispatch(*inputs(rank, device=device(buffer)))
        round_trip(buffer)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_other_threads_run_while_a_rank_waits(rank: int, ranks_per_node: int) -> None:
    """Rank 0 waits for rank 1 in a dispatch and in a combine. Rank 1 comes when another thread of rank 0 has run."""
    with make_buffer(ranks_per_node=ranks_per_node, timeout_s=60) as buffer:
        given = inputs(rank)
        out = buffer.dispatch(*given)

        def run_beside(key: str, epoch: int) -> None:
            turns = 0
            while turns < 20:
                time.sleep(0.01)
                turns += operations_so_far(buffer) > epoch  # the next operation has begun
            tell(key)

        for operation in (lambda: buffer.dispatch(*given), lambda: buffer.combine(out.x, out.handle)):
            epoch = operations_so_far(buffer)
            key = f"ran/{buffer.id}/{epoch}"
            if rank == 0:
                thread = threading.Thread(target=run_beside, args=(key, epoch), daemon=True)
                thread.start()
                operation()
                thread.join()
            else:
                wait_for(key)  # fails where rank 0 lets no thread run while it waits
                operation()


def test_a_plan_is_never_larger_than_what_can_be_received():
    from ep_dispatcher import _C_cpu

    config = _C_cpu.Config()
    config.rank_at, config.num_nodes, config.ranks_per_node = [0, 1], 1, 2
    config.num_experts, config.num_topk, config.max_tokens = 8, 4, 16
    for layout, most in ((_C_cpu.Layout.rank, 2 * 16), (_C_cpu.Layout.expert, 2 * 16 * 4)):
        sizes = [_C_cpu.plan_capacity(config, 16, n, layout) for n in (most // 2, most, most + 1, 2**29, 2**31 - 1)]
        assert sizes[0] < sizes[1] == sizes[2] == sizes[3] == sizes[4]


@on_ranks(1)
def test_a_limit_beyond_all_clocks_is_refused(rank):
    for timeout_s in (1e10, 1e300):
        assert_refused("timeout_s", make_buffer, timeout_s=timeout_s)


@on_ranks(4)
def test_after_a_disagreement_inside_a_node_all_nodes_go_on(rank):
    """Ranks 0 and 1, a node, disagree about topk_weights; ranks 2 and 3 are right."""
    with make_buffer(ranks_per_node=2, timeout_s=100) as buffer:
        x, idx, weights = inputs(rank)
        right = buffer.dispatch(x, idx, weights)
        begin = time.monotonic()
        for _ in range(2):
            with pytest.raises(ValueError, match="^topk_weights: .*rank 1 gave None"):
                buffer.dispatch(x, None, None if rank == 1 else weights, handle=right.handle)
        again = buffer.dispatch(x, None, weights, handle=right.handle)
        assert same_bits(again.x, right.x) and same_bits(again.topk_weights, right.topk_weights)
        assert buffer._engine._rail._receives == [] and time.monotonic() - begin < 50
