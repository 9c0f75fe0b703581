"""Masked ranks: the others go on without a rank that is late, dead or masked by hand, and can let it in again."""

import os
import signal
import time
from dataclasses import replace
from threading import Timer
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on, on_ranks, sparsely
from lib.errors import assert_refused, error_of
from lib.faults import Death, act_in, die_in, hurry, meet, operations_so_far, tell, wait_for
from lib.round_trip import HIDDEN, MAX_TOKENS, NUM_EXPERTS, NUM_TOPK, device, inputs, make_buffer
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import reference
from ep_dispatcher.tools.testing import same_bits

NUM_RANKS, LIMIT_S, LONG_S = 4, 2.0, 60.0
CUDA_LIMIT_S = 4.0  # ranks may share a GPU, and take turns
LOCAL, ROWS = NUM_EXPERTS // NUM_RANKS, NUM_RANKS * MAX_TOKENS
UNMASKED = [0] * NUM_RANKS


def make_masking_buffer(engine: str, timeout_s: float = LONG_S) -> ep.Buffer:
    if engine == "cuda":  # loads the kernels, so that no rank is late for that
        with make_buffer(engine=engine) as buffer:
            for _ in range(2):
                out = buffer.dispatch(*inputs(buffer.topology.rank, device=device(buffer))[:2], layout="decode")
                weights = torch.ones(out.handle.num_tokens, NUM_TOPK, device=device(buffer))
                buffer.combine(out.x, out.handle, weights=weights)
            buffer.check()
    return make_buffer(engine=engine, ranks_per_node=NUM_RANKS, timeout_s=timeout_s, mask_late_ranks=True)


def mask_of(*ranks: int) -> list[int]:
    return [int(rank in ranks) for rank in range(NUM_RANKS)]


class Step(NamedTuple):
    """What a rank gets of one dispatch and combine."""

    counts: Tensor
    rows: Tensor
    sums: Tensor


def results_of_experts(rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(7000 + 100 * seed + rank)
    return torch.randn(LOCAL, ROWS, HIDDEN, generator=generator).bfloat16()


def expected(rank: int, seed: int, absent: set[int] = frozenset(), sums_without: set[int] | None = None) -> Step:
    """By the definition: absent ranks bring no tokens, and rows of their experts add nothing to the sums."""
    x, topk_idx, weights = (list(each) for each in zip(*(inputs(r, seed=seed) for r in range(NUM_RANKS))))
    sent = []
    for source, idx in enumerate(topk_idx):
        idx = idx.masked_fill(torch.isin(idx // LOCAL, torch.tensor(sorted(sums_without or absent))), -1)
        sent.append(torch.full_like(idx, -1) if source in absent else idx)
    options = dict(num_experts=NUM_EXPERTS, layout="decode")
    received = reference.dispatch(x, sent, None, max_tokens_per_rank=MAX_TOKENS, **options)
    y = [results_of_experts(r, seed).flatten(0, 1) for r in range(NUM_RANKS)]
    combined = reference.combine(y, received, sent, node_of=[0] * NUM_RANKS, factors=weights, **options)
    counts = received[rank].tokens_per_expert
    return Step(counts, received[rank].x.view(LOCAL, ROWS, HIDDEN), combined[rank][0])


def run_step(buffer: ep.Buffer, seed: int, hooked: bool = False) -> Step:
    rank = buffer.topology.rank
    x, topk_idx, weights = inputs(rank, seed=seed, device=device(buffer))
    out = buffer.dispatch(x, topk_idx, layout="decode", return_hook=hooked)
    if hooked:
        out.hook()
    y = results_of_experts(rank, seed).to(device(buffer))
    combined = buffer.combine(y, out.handle, weights=weights, return_hook=hooked)
    if hooked:
        combined.hook()
    return Step(out.tokens_per_expert, out.x, combined.x)


def assert_step(seen: Step, right: Step) -> None:
    assert seen.counts.tolist() == right.counts.tolist(), (seen.counts, right.counts)
    for e, count in enumerate(seen.counts.tolist()):
        assert same_bits(seen.rows[e, :count].cpu(), right.rows[e, :count])
    assert same_bits(seen.sums.cpu(), right.sums)


def check_step(buffer: ep.Buffer, seed: int, absent: set[int] = frozenset(), hooked: bool = False) -> None:
    assert_step(run_step(buffer, seed, hooked), expected(buffer.topology.rank, seed, absent))


def let_all_in(buffer: ep.Buffer, *seeds: int) -> None:
    """From now on the limit is long; every step is right on all ranks."""
    hurry(buffer, LONG_S)
    buffer.unmask()
    assert buffer.mask.tolist() == UNMASKED
    for seed in seeds:
        check_step(buffer, seed)


def error_of_timeout(buffer: ep.Buffer) -> ep.PeerTimeoutError:
    with pytest.raises(ep.PeerTimeoutError) as caught:
        for seed in range(2):
            run_step(buffer, seed)
            buffer.check()
    return caught.value


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("victims", [[2], [0], [0, 1, 3]], ids=str)
@on_ranks(NUM_RANKS)
def test_ranks_that_are_masked_by_hand(rank, engine, victims, hooked):
    """The victims stay away. Then all are let in again, with a handle of before."""
    with make_masking_buffer(engine) as buffer:
        check_step(buffer, 0)
        x, topk_idx, _ = inputs(rank, seed=0, device=device(buffer))
        handle = buffer.dispatch(x, topk_idx, layout="decode").handle
        assert buffer.mask.tolist() == UNMASKED and buffer.mask.dtype == torch.int32
        buffer.check()
        meet(f"checked/{buffer.id}")  # a rank that is masked in an operation may not complete it
        if rank in victims:
            time.sleep(0.3)
        else:
            for victim in victims:
                buffer.mask_rank(victim)
            for seed in range(1, 6):
                check_step(buffer, seed, set(victims), hooked)
            assert buffer.mask.tolist() == mask_of(*victims)
        meet(f"masked/{buffer.id}")
        if rank in victims:
            error = error_of_timeout(buffer)
            assert error.late_ranks == (rank,) and error.rank == rank
            assert f"rank {rank} came too late" in str(error) and "unmask()" in str(error)
            assert str(error_of_timeout(buffer)) == str(error)
        buffer.unmask()
        assert buffer.mask.tolist() == UNMASKED
        again, right = buffer.dispatch(x, handle=handle), expected(rank, 0)
        assert_step(Step(again.tokens_per_expert, again.x, right.sums), right)
        for seed in range(6, 9):
            check_step(buffer, seed)


@pytest.mark.parametrize("victim,operation", [(1, "dispatch"), exhaustive(0, "combine")])
@on_ranks(NUM_RANKS)
def test_a_late_rank_is_masked_and_let_in_again(rank, engine, victim, operation):
    """One rank oversleeps in an operation. The others go on, and let it in again; twice."""
    limit_s = CUDA_LIMIT_S if engine == "cuda" else LIMIT_S
    with make_masking_buffer(engine, limit_s if engine == "cuda" else LONG_S) as buffer:
        for turn in range(2):
            check_step(buffer, 0)
            hurry(buffer, LIMIT_S)
            meet(f"turn {turn}/{buffer.id}")
            x, topk_idx, weights = inputs(rank, seed=1, device=device(buffer))
            begin = time.monotonic()
            if operation == "combine":
                out = buffer.dispatch(x, topk_idx, layout="decode")
                buffer.check()
            if rank == victim:
                wait_for(f"go on/{buffer.id}/{turn}")
                error_of_timeout(buffer)
            elif operation == "dispatch":
                check_step(buffer, 1, {victim})
                assert buffer.mask.tolist() == mask_of(victim)
                assert time.monotonic() - begin > 0.8 * limit_s
            else:
                y = results_of_experts(rank, 1).to(device(buffer))
                combined = buffer.combine(y, out.handle, weights=weights)
                assert same_bits(combined.x.cpu(), expected(rank, 1, sums_without={victim}).sums)
                assert buffer.mask.tolist() == mask_of(victim)
            if rank != victim:
                for seed in range(2, 5):
                    begin = time.monotonic()
                    check_step(buffer, seed, {victim})
                    assert time.monotonic() - begin < limit_s, "it waits for a masked rank"
                tell(f"go on/{buffer.id}/{turn}")
                check_step(buffer, 5, {victim})  # while the late one comes
            let_all_in(buffer, 6)


# ---- ranks that die or stop in the middle ---------------------------------------------------------------------------


DEATHS = [Death("dispatch", step) for step in ("begin", "route", "stage", "count", "finish_plan", "pull", "finish")]
DEATHS += [*(Death("combine", step) for step in ("reuse", "stage", "push", "sum")), Death("combine", "finish", 2)]


@pytest.mark.parametrize("death", sparsely(DEATHS, 12), ids=str)
@on_ranks(NUM_RANKS, fresh=True, allow_dead={2})
def test_a_rank_that_dies_anywhere_is_masked(rank, death):
    """Steps go on without the dead rank. Only the one in which it died may have some of it."""
    buffer, victim = make_masking_buffer("cpu"), 2
    check_step(buffer, 0)
    hurry(buffer, LONG_S)  # a process that is gone is masked at once
    if rank == victim:
        die_in(buffer, death)
    begin = time.monotonic()
    seen, whole, without = run_step(buffer, 1), expected(rank, 1), expected(rank, 1, {victim})
    assert seen.counts.tolist() in (whole.counts.tolist(), without.counts.tolist())
    right = whole if seen.counts.tolist() == whole.counts.tolist() else without
    for e, count in enumerate(seen.counts.tolist()):
        for row, full in zip(seen.rows[e, :count], right.rows[e, :count]):
            assert same_bits(row, full) or (right is whole and not row.any()), "neither the token nor zeros"
    fewer = expected(rank, 1, sums_without={victim}) if right is whole else without
    for t, sums in enumerate(seen.sums):
        assert same_bits(sums, right.sums[t]) or same_bits(sums, fewer.sums[t])
    for seed in range(2, 6):
        check_step(buffer, seed, {victim})
    assert time.monotonic() - begin < LONG_S / 2, "it waits for a dead rank"
    tell(f"alive/{rank}")
    wait_for(*(f"alive/{other}" for other in range(NUM_RANKS) if other != victim))
    assert buffer.mask.tolist() == mask_of(victim)
    buffer.config = replace(buffer.config, timeout_s=LIMIT_S)
    with pytest.raises(ep.PeerTimeoutError) as caught:  # nobody lets a dead rank in
        buffer.unmask()
    assert caught.value.late_ranks == (victim,) and "No mask has changed" in str(caught.value)
    check_step(buffer, 6, {victim})
    buffer.destroy()


STOPS = [death for death in DEATHS if death.step not in ("begin", "route", "reuse")]


@pytest.mark.parametrize("death", sparsely(STOPS, 8), ids=str)
@on_ranks(NUM_RANKS)
def test_a_rank_that_stops_and_goes_on_harms_nobody(rank, death):
    """Rank 1 stops inside an operation, until the others are many operations ahead, and is told."""
    with make_masking_buffer("cpu") as buffer:
        check_step(buffer, 0)
        hurry(buffer, LIMIT_S)
        if rank == 1:
            epochs = []

            def sleep() -> None:
                epochs.append(operations_so_far(buffer))
                wait_for(f"wake/{buffer.id}")

            act_in(buffer, death.step, sleep, death.call)
            error = error_of_timeout(buffer)
            assert [error.epoch] == epochs, "an operation returned what others had overwritten"
            assert "rank 1 came too late" in str(error)
        else:
            run_step(buffer, 1)
            for seed in range(2, 40):
                if seed == 6:
                    tell(f"wake/{buffer.id}")
                check_step(buffer, seed, {1})
        let_all_in(buffer, 40, 41, 42)


@pytest.mark.parametrize("seed", [0, exhaustive(1), exhaustive(2)])
@on_ranks(NUM_RANKS)
def test_a_process_that_is_stopped_at_any_moment(rank, seed):
    """For longer than the limit, while all are at work."""
    victim, pids = 3, [None] * NUM_RANKS
    dist.all_gather_object(pids, os.getpid())
    with make_masking_buffer("cpu") as buffer:
        check_step(buffer, 0)
        hurry(buffer, LIMIT_S)
        if rank == 0:
            Timer(0.05 + 0.0007 * seed, os.kill, (pids[victim], signal.SIGSTOP)).start()
            Timer(2.5 * LIMIT_S, os.kill, (pids[victim], signal.SIGCONT)).start()
        try:
            for step in range(1000):
                run_step(buffer, step % 3)
        except ep.PeerTimeoutError as error:
            assert rank == victim and error.late_ranks == (victim,), str(error)
        else:
            assert rank != victim and buffer.mask.tolist() == mask_of(victim), buffer.mask
        let_all_in(buffer, 0, 1, 2)


@on_ranks(NUM_RANKS)
def test_a_failure_in_unmask_ends_the_buffer_on_all_ranks(rank, engine):
    """Rank 1 fails when all have come: no rank goes on with a mask that others no longer have."""
    with make_masking_buffer(engine) as buffer:
        check_step(buffer, 0)
        if rank == 1:
            unmask = buffer._engine._masks.unmask

            def failing(meet, settle, reset):
                unmask(meet, settle, lambda epoch: reset(epoch) or 1 / 0)

            buffer._engine._masks.unmask = failing
        for call in (buffer.unmask, lambda: run_step(buffer, 1)):
            with pytest.raises(RuntimeError, match="^this buffer gave up in unmask, by "):
                call()


@on_ranks(NUM_RANKS)
def test_epochs_go_on_from_the_last_one(rank):
    """One rank is far behind, and epochs of the CPU engine are about to wrap around."""
    with make_masking_buffer("cpu") as buffer:
        buffer._engine._c.unmask(2**32 - 5 if rank else 2**32 - 12)
        meet(f"set/{buffer.id}")
        buffer.unmask()
        for seed, epoch in enumerate([2**32 - 3, 2**32 - 1, 1, 3, 5]):
            check_step(buffer, seed)
            assert operations_so_far(buffer) == epoch


# ---- what is refused ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_refused(rank, engine):
    with make_buffer(engine=engine) as buffer:
        for call in (lambda: buffer.mask, lambda: buffer.mask_rank(1), buffer.unmask):
            assert_refused("buffer", call)
    with make_buffer(engine=engine, mask_late_ranks=True) as buffer:
        x, topk_idx, weights = inputs(rank, device=device(buffer))
        assert_refused("layout", buffer.dispatch, x, topk_idx, weights)
        assert_refused("layout", buffer.plan, topk_idx)
        for layout in ("expert", "dense"):
            assert_refused("buffer", ep.dispatch, buffer, x, topk_idx, weights, layout=layout)
        for other in (rank, 2):
            assert_refused("rank", buffer.mask_rank, other)
        assert not any(buffer.mask.tolist())
        out = buffer.dispatch(x, topk_idx, layout="decode")
        buffer.combine(out.x, out.handle, weights=weights)
    for wrong in (
        dict(ranks_per_node=1),
        dict(suspendable=True),
        dict(mask_late_ranks=1),
        dict(mask_late_ranks=rank == 0),
    ):
        text = error_of(make_buffer, **(dict(engine=engine, mask_late_ranks=True) | wrong))
        assert text.startswith("mask_late_ranks"), text


@pytest.mark.parametrize("engine", [on("cuda")])
@on_ranks(NUM_RANKS)
def test_graphs(rank, engine):
    """A captured step goes on without a rank that is masked between replays, and with it afterwards."""
    with make_masking_buffer(engine) as buffer:
        x, topk_idx, weights = (t.clone() for t in inputs(rank, seed=0, device=device(buffer)))
        y = results_of_experts(rank, 0).to(device(buffer))

        def step() -> tuple[ep.DispatchOutput, Tensor]:
            out = buffer.dispatch(x, topk_idx, layout="decode")
            return out, buffer.combine(y, out.handle, weights=weights).x

        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out, sums = step()
            mask = buffer.mask

        def check(absent: set[int]) -> None:
            graph.replay()
            buffer.check()
            assert_step(Step(out.tokens_per_expert, out.x, sums), expected(rank, 0, absent))
            assert mask.tolist() == mask_of(*absent)

        check(set())
        meet(f"replayed/{buffer.id}")
        if rank != 1:
            buffer.mask_rank(1)
            for _ in range(3):
                check({1})
        meet(f"masked/{buffer.id}")
        buffer.unmask()
        for _ in range(3):
            check(set())


@on_ranks(NUM_RANKS)
def test_unmask_drops_hooks(rank, engine):
    """What was sent before unmask() and not received is dropped. Its hook does not receive what is sent later."""
    with make_masking_buffer(engine) as buffer:
        x, idx, weights = inputs(rank, device=device(buffer))
        old = buffer.dispatch(x, idx, layout="decode", return_hook=True)
        buffer.unmask()
        new = buffer.dispatch(x, idx, layout="decode", return_hook=True)
        with pytest.raises(ValueError, match="this hook is of an operation before unmask"):
            old.hook()
        with pytest.raises(ValueError, match="hook.. of the dispatch has to be called before"):
            buffer.combine(new.x, new.handle, weights=weights)
        new.hook()
        buffer.combine(new.x, new.handle, weights=weights)
        new.hook()  # a second call does nothing
        buffer.check()
