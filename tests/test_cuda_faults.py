"""Faults that only GPUs have: kernels that keep a rank, a process killed while its kernels run, errors found late."""

import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.cuda_faults import spin
from lib.faults import LIMIT_S, SLACK_S, assert_given_up, assert_names
from lib.round_trip import NUM_EXPERTS, device, expected, inputs, make_buffer, outputs, round_trip

import ep_dispatcher as ep
from ep_dispatcher import engines
from ep_dispatcher.tools.testing import RankPool, same_bits

pytestmark = pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}")
NUM_ROWS = 200  # enough for every rank


# ---- a kernel that keeps a rank -------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_rank_that_is_delayed_for_less_than_the_limit(rank):
    """Another rank is late in every operation, by less than the limit."""
    with make_buffer(engine="cuda", timeout_s=20) as buffer:
        right, right_sum = expected(buffer, max_recv_rows=NUM_ROWS)
        given, y = inputs(rank, device=device(buffer)), outputs(rank, NUM_ROWS, device=device(buffer))
        for late in range(3):
            if rank == late:
                spin(0.5)
            out = buffer.dispatch(*given, max_recv_rows=NUM_ROWS)
            if rank == (late + 1) % 3:
                spin(0.5)
            total = buffer.combine(y, out.handle).x
            assert same_bits(out.x.cpu(), right.x) and same_bits(total.cpu(), right_sum)


def overslept(rank: int, victim: int, operation: str) -> None:
    buffer = make_buffer(engine="cuda", timeout_s=LIMIT_S)
    round_trip(buffer)
    given = inputs(rank, device=device(buffer))
    if operation == "combine":
        out = buffer.dispatch(*given, max_recv_rows=NUM_ROWS)
        y = outputs(rank, NUM_ROWS, device=device(buffer))
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    if rank == victim:
        spin(LIMIT_S + 4)
    with pytest.raises(ep.PeerTimeoutError) as caught:
        if operation == "combine":
            buffer.combine(y, out.handle).event.synchronize()
        for _ in range(2):  # the late one may have all that it needs of the operation that the others gave up
            buffer.dispatch(*given, max_recv_rows=NUM_ROWS).event.synchronize()
    seconds, error = time.monotonic() - begin, caught.value
    if rank == victim:
        assert error.waited_s < LIMIT_S - 0.5, "it waits for ranks that have said that they gave up"
    else:
        assert_names(error, rank, victim, [4 if operation == "combine" else 3])
        assert LIMIT_S - 0.5 < seconds < LIMIT_S + SLACK_S
    assert_given_up(buffer, error)
    buffer.destroy()
    if rank != victim:
        group = dist.new_group([r for r in range(4) if r != victim], use_local_synchronization=True)
        with make_buffer(group, engine="cuda") as smaller:
            for seed in range(20):  # the late one wakes meanwhile, and writes where the old buffer was
                round_trip(smaller, seed=seed % 4)
                time.sleep(0.2)
    with make_buffer(engine="cuda") as again:  # of all ranks
        round_trip(again)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_rank_that_is_delayed_for_more_than_the_limit(operation):
    with RankPool(4, timeout_s=60) as pool:
        pool.run(overslept, 2, operation)


def oversleep_a_replay(rank: int, victim: int, max_tokens: int) -> None:
    """All kernels blame the victim: its own waits for sums of ranks that have given up on it."""
    buffer = make_buffer(engine="cuda", timeout_s=LIMIT_S, max_tokens_per_rank=max_tokens)
    x, topk_idx, weights = (t[:16] for t in inputs(rank, device=device(buffer)))
    out = buffer.dispatch(x, topk_idx, layout="decode")
    combine = partial(buffer.combine, torch.zeros_like(out.x), out.handle, weights=weights)
    combine()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combine()
    dist.barrier()
    if rank == victim:
        spin(LIMIT_S + 4)
    graph.replay()
    torch.cuda.synchronize()
    operation, _, epoch, late, _ = buffer._engine._c.late()
    assert (operation, epoch, list(late)) == ("combine", 3, [victim])
    with pytest.raises(ep.PeerTimeoutError):
        buffer.check()
    buffer.destroy()


@pytest.mark.parametrize("max_tokens", [16, 17])  # with 64 tokens of all ranks sums are tagged words
def test_a_replayed_combine_that_is_late_names_its_own_rank(max_tokens):
    with RankPool(4, timeout_s=60) as pool:
        pool.run(oversleep_a_replay, 2, max_tokens)


def keep_the_stream(rank: int) -> None:
    """Rank 1 never comes. On rank 0 a long kernel stands for one that NVSHMEM keeps."""
    from ep_dispatcher.engines.cuda import engine as cuda
    from ep_dispatcher.engines.cuda import stuck_kernels

    buffer = make_buffer(engine="cuda", timeout_s=LIMIT_S)
    round_trip(buffer)
    if rank == 1:
        dist.barrier()
        buffer.destroy()
        return
    buffer._engine._stuck = stuck_kernels.StuckKernels(buffer._engine._c.late)
    begin = time.monotonic()
    buffer.dispatch(*inputs(rank, device=device(buffer)), max_recv_rows=NUM_ROWS)
    spin(LIMIT_S + 20)
    with pytest.raises(ep.PeerTimeoutError, match="NVSHMEM waits in it without a limit") as caught:
        buffer.check()
    assert_names(caught.value, 0, 1, [3])
    buffer.destroy()
    assert time.monotonic() - begin < LIMIT_S + 2 * stuck_kernels.GRACE_S + 3, "destroy() has not waited for the kernel"
    assert not torch.cuda.current_stream().query() and len(cuda._stuck_engines) == 1
    dist.barrier()


def test_a_kernel_that_does_not_end_keeps_nobody():
    with RankPool(2) as pool:
        pool.run(keep_the_stream)


def die_in_flight(rank: int, victim: int, operation: str) -> None:
    """The victim's kernels are launched, and behind one that spins for long, when its process is killed."""
    buffer = make_buffer(engine="cuda", timeout_s=LIMIT_S)
    round_trip(buffer)
    given = inputs(rank, device=device(buffer))
    out = buffer.dispatch(*given, max_recv_rows=NUM_ROWS)
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    if rank == victim:
        spin(LIMIT_S + 4)
    with pytest.raises(ep.PeerTimeoutError) as caught:
        if operation == "combine":
            done = buffer.combine(outputs(rank, NUM_ROWS, device=device(buffer)), out.handle)
        else:
            done = buffer.dispatch(*given, max_recv_rows=NUM_ROWS)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        done.event.synchronize()
    assert time.monotonic() - begin < LIMIT_S + SLACK_S
    error = caught.value
    assert (error.operation, error.epoch, error.rank, error.late_ranks) == (operation, 4, rank, (victim,))
    buffer.destroy()
    group = dist.new_group([r for r in range(4) if r != victim], use_local_synchronization=True)
    with make_buffer(group, engine="cuda") as smaller:
        round_trip(smaller)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_rank_that_dies_while_its_kernels_run(operation):
    with RankPool(4, timeout_s=60) as pool:
        assert pool.run(die_in_flight, 1, operation, allow_dead={1}) == [None] * 4


# ---- errors that come late ------------------------------------------------------------------------------------------


def give_a_handle_alone(rank: int, odd: int) -> str:
    with make_buffer(engine="cuda", timeout_s=30) as buffer:
        round_trip(buffer)
        given = inputs(rank, device=device(buffer))
        for _ in range(3):  # no host waits for these, and what comes behind is still found for itself
            handle = buffer.dispatch(*given, max_recv_rows=NUM_ROWS).handle
        with pytest.raises(ValueError) as caught:
            if rank == odd:
                buffer.dispatch(given[0], None, given[2], handle=handle)
            else:
                buffer.dispatch(*given, max_recv_rows=NUM_ROWS)
            buffer.check()
        round_trip(buffer)
    return str(caught.value)


@pytest.mark.parametrize("odd", [0, 2])
def test_one_rank_gives_a_handle_and_the_others_a_routing(pools, odd):
    for message in (messages := pools(3).run(give_a_handle_alone, odd)):
        assert message.startswith(f"handle: rank {odd or 1} gave ") and "the plan of epoch 5" in message
    assert len(set(messages)) == 1


def find_late(rank: int, slow: int) -> list[str]:
    """Every rank gives too few rows; all but one know it when they come to the combine, which they refuse."""
    messages = []
    with make_buffer(engine="cuda", timeout_s=30) as buffer:
        round_trip(buffer)
        given, y = inputs(rank, device=device(buffer)), outputs(rank, 3, device=device(buffer))
        dist.barrier()
        begin = time.monotonic()
        if rank == slow:
            spin(1)
        out = buffer.dispatch(*given, max_recv_rows=3)
        if rank != slow:
            torch.cuda.synchronize()
        for ask in (
            lambda: buffer.combine(y, out.handle).event.synchronize(),
            lambda: buffer.combine(y, out.handle),
            lambda: buffer.dispatch(*given),
            buffer.check,
        ):
            with pytest.raises(ValueError) as caught:
                ask()
            messages.append(str(caught.value))
        assert time.monotonic() - begin < 15  # the limit is 30: an abort ends the waits
    with make_buffer(engine="cuda") as buffer:
        round_trip(buffer)
    return messages


@pytest.mark.parametrize("slow", [0, 1])
def test_a_mistake_found_by_a_later_operation_ends_the_buffer_on_all_ranks(pools, slow):
    (message,) = {message for messages in pools(3).run(find_late, slow) for message in messages}
    assert message.startswith("max_recv_rows is too small: rank 0 needs") and "destroy() this buffer" in message


@on_ranks(3)
def test_a_wrong_entry_found_by_a_later_operation(rank):
    """Rank 1 alone, and no host waits for counts: it ends the buffer, and the others hear of it."""
    with make_buffer(engine="cuda", timeout_s=30) as buffer:
        x, topk_idx, weights = inputs(rank, device=device(buffer))
        topk_idx[2, 1] = NUM_EXPERTS if rank == 1 else -1
        out = buffer.dispatch(x, topk_idx, weights, max_recv_rows=NUM_ROWS)
        torch.cuda.synchronize()
        begin, errors = time.monotonic(), []
        for _ in range(2):
            with pytest.raises((ValueError, ep.PeerTimeoutError)) as caught:
                buffer.combine(out.x, out.handle).event.synchronize()
            errors.append(getattr(caught.value, "late_ranks", str(caught.value).partition(" is ")[0]))
        assert errors == ["topk_idx[2, 1]" if rank == 1 else (1,)] * 2 and time.monotonic() - begin < 15


@on_ranks(2)
def test_check_finds_what_a_replay_found(rank):
    """A graph whose replay needs more rows than it has; then one that has enough."""
    with make_buffer(engine="cuda") as buffer:
        x, topk_idx, weights = inputs(rank, device=device(buffer))
        round_trip(buffer)  # loads the kernels
        none, graph, stream = torch.full_like(topk_idx, -1), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        static = none.clone()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            buffer.dispatch(x, static, weights, max_recv_rows=3)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
            buffer.check()
            static.copy_(topk_idx)
            graph.replay()
            with pytest.raises(ValueError, match="^max_recv_rows is too small: rank 0 needs"):
                buffer.check()
            static.copy_(none)
            graph.replay()
            buffer.check()
        round_trip(buffer)
