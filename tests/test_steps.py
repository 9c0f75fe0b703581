"""Many steps on one buffer, and many buffers at once: no growth, no interference, the same bits every time."""

import hashlib
import random
import time
from collections.abc import Iterator

import pytest
import torch
from conftest import exhaustive, on_ranks
from lib import dispatch_combine as grid
from lib.dispatch_combine import Case, Inputs, Received, assert_step, expected_of, expert_rows, make_inputs, to
from lib.steps import resources

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import ROUTINGS, device_of, make_routing, same_bits, with_negative_zeros

NUM_STEPS = 200
WARM_UP = 50
MAX_TOKENS = 40


def add_to(digest, *tensors) -> None:
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def step_inputs(case: Case, step: int, rank: int):
    """Routing and number of tokens change with every step; every rank has a step without tokens now and then."""
    rng = random.Random(1000 * step + rank)
    num_tokens = 0 if rng.random() < 0.1 else rng.randint(1, MAX_TOKENS)
    kind = ROUTINGS[step % len(ROUTINGS)]
    topk_idx, weights = make_routing(kind, num_tokens, case.num_experts, case.num_topk, seed=1000 * step + rank)
    x = torch.randn(num_tokens, case.hidden, generator=torch.Generator().manual_seed(1000 * step + rank))
    return with_negative_zeros(x.to(case.dtype), seed=step), topk_idx, weights


def train(rank: int, engine: str, case: Case, pauses: int):
    """Forward and backward ``NUM_STEPS`` times; ``pauses`` seeds random delays, so that ranks arrive in any order."""
    device, rng, digest = device_of(engine, rank), random.Random(pauses + rank), hashlib.sha256()
    with grid.make_buffer(case, engine, MAX_TOKENS) as buffer:
        for step in range(NUM_STEPS):
            x, topk_idx, weights = (t.to(device) for t in step_inputs(case, step, rank))
            x, weights = x.requires_grad_(), weights.requires_grad_()
            time.sleep(rng.choice([0, 0, 0, 0.002]))
            out = ep.dispatch(buffer, x, topk_idx, weights, layout=case.layout, expert_alignment=case.alignment)
            time.sleep(rng.choice([0, 0, 0, 0.002]))
            y = out.x * out.topk_weights[:, None].flatten(1).sum(1, keepdim=True)
            result = ep.combine(buffer, y.to(case.dtype), out.handle)
            result.square().sum().backward()
            add_to(digest, out.x, out.topk_weights, result, x.grad, weights.grad)
            if step == WARM_UP:
                before = resources()
        return digest.hexdigest(), before, resources()


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks_per_node,layout", [(4, "expert"), (2, "rank"), (2, "expert"), (1, "rank")])
def test_steps_do_not_grow_and_repeat_their_bits(pools, engine, ranks_per_node, layout):
    alignment = 8 if layout == "expert" else 1
    case = Case(4, ranks_per_node, torch.bfloat16, num_topk=3, experts_per_rank=3, layout=layout, alignment=alignment)
    first, second = (pools(4).run(train, engine, case, pauses) for pauses in (1, 2))
    for rank, ((digest, before, after), (again, *_)) in enumerate(zip(first, second)):
        assert digest == again, f"rank {rank}: two runs differ"
        for name, allowed in {"private": 1 << 19, "shared": 1 << 19, "files": 0, "mappings": 4}.items():
            assert after[name] - before[name] <= allowed, f"rank {rank}: {name} went from {before} to {after}"
    assert len({digest for digest, *_ in first}) == 4, "the ranks should have seen different tokens"


def make_and_destroy(rank: int, engine: str, case: Case):
    given, seen = to(device_of(engine, rank), step_inputs(case, 0, rank)), []
    for _ in range(12):
        with grid.make_buffer(case, engine, MAX_TOKENS) as buffer:
            out = buffer.dispatch(*given)
            buffer.combine(out.x, out.handle)
        del buffer, out
        seen.append(resources())
    return seen[3], seen[-1]


@pytest.mark.parametrize("ranks_per_node", [exhaustive(2), 1])
def test_destroyed_buffers_leave_nothing(pools, engine, ranks_per_node):
    for before, after in pools(2).run(make_and_destroy, engine, Case(2, ranks_per_node)):
        assert after["files"] <= before["files"] and after["mappings"] <= before["mappings"] + 4
        assert after["private"] - before["private"] < 2 << 20 and after["shared"] - before["shared"] < 1 << 20


def fixed_rows(case: Case) -> int | None:
    return None if case.recv == "counted" else 500


def full_step(rank: int, engine: str, case: Case, inputs: Inputs, buffer: ep.Buffer) -> Iterator:
    """Dispatch, combine and the results, with a pause after each operation where something else can run."""
    device = device_of(engine, rank)
    x, topk_idx, topk_weights = (t.clone() for t in inputs.on(rank, device))
    options = dict(layout=case.layout, expert_alignment=case.alignment, max_recv_rows=fixed_rows(case))
    out = buffer.dispatch(x, topk_idx, topk_weights, **options)
    x.fill_(float("nan"))  # the caller may do with its tensors what it likes, however late the other ranks are
    topk_idx.fill_(0)
    topk_weights.fill_(float("nan"))
    yield
    y, weights = to(device, expert_rows(case, out, rank))
    combined = buffer.combine(y, out.handle, topk_weights=weights)
    y.fill_(float("nan"))
    weights.fill_(float("nan"))
    yield
    yield Received.of(out), (combined.x, combined.topk_weights)


def interleave(rank: int, engine: str, cases: list[Case], buffer_of: list[int], order: list[int]) -> None:
    """Advance the steps in ``order``, where several of them may share a buffer."""
    device_of(engine, rank)
    inputs = [make_inputs(case, seed=i) for i, case in enumerate(cases)]
    buffers, results = {}, [None] * len(cases)
    for case, b in zip(cases, buffer_of):
        if b not in buffers:
            buffers[b] = grid.make_buffer(case, engine, MAX_TOKENS)
    steps = [full_step(rank, engine, case, given, buffers[b]) for case, given, b in zip(cases, inputs, buffer_of)]
    for i in order:
        if rank == i % 3:
            time.sleep(0.005)  # somebody is always late
        results[i] = next(steps[i])
    for b in reversed(buffers):
        buffers[b].destroy()
    for i, (case, given) in enumerate(zip(cases, inputs)):
        assert_step(results[i], expected_of(case, given, fixed_rows(case))[rank], f"rank {rank}, step {i}")


@on_ranks(4)
def test_buffers_do_not_disturb_each_other(rank, engine):
    """Four buffers of different shapes in one process, their operations interleaved."""
    cases = [
        Case(4, 2, torch.bfloat16, num_topk=3, hidden=1000, tokens="uneven"),
        Case(4, 4, torch.float32, num_topk=1, hidden=64, layout="rank"),
        Case(4, 1, torch.float16, num_topk=8, experts_per_rank=8, alignment=8, routing="masked"),
        Case(4, 2, torch.bfloat16, num_topk=2, hidden=512, layout="rank", routing="skewed", tokens="uneven"),
    ]
    interleave(rank, engine, cases, buffer_of=[0, 1, 2, 3], order=[0, 1, 2, 0, 3, 1, 3, 2, 3, 2, 1, 0])


@pytest.mark.parametrize("recv", ["counted", "spare"])
@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
@on_ranks(4)
def test_handles_outlive_later_dispatches(rank, engine, ranks_per_node, recv):
    """Several steps of one buffer are under way at once; the last dispatched is the first combined."""
    shape = dict(num_topk=3, experts_per_rank=3, dtype=torch.bfloat16, recv=recv)
    cases = [
        Case(4, ranks_per_node, **shape, tokens="uneven"),
        Case(4, ranks_per_node, **shape, layout="rank", routing="masked"),
        Case(4, ranks_per_node, **shape, alignment=8, routing="skewed"),
        Case(4, ranks_per_node, **shape, routing="empty"),
    ]
    interleave(rank, engine, cases, buffer_of=[0, 0, 0, 0], order=[0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3])


@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
@on_ranks(4)
def test_fast_ranks_do_not_overtake_slow_ones(rank, engine, ranks_per_node):
    """Nothing but one kind of operation in a row, so that fast ranks run ahead of slow ones as far as they may."""
    device, case = device_of(engine, rank), Case(4, ranks_per_node, num_topk=3, experts_per_rank=3, hidden=4096)
    topk_idx = step_inputs(case, 0, rank)[1].to(device)
    values = torch.arange(30, dtype=case.dtype, device=device)
    x = torch.full((topk_idx.shape[0], case.hidden), 100.0 * rank, dtype=case.dtype, device=device)
    with grid.make_buffer(case, engine, MAX_TOKENS) as buffer:
        out = buffer.dispatch(x, topk_idx)
        first = out.x.clone()
        dispatched = [buffer.dispatch(x + value, topk_idx).x for value in values]
        again = [buffer.dispatch(x + value, handle=out.handle).x for value in values]
        total = buffer.combine(torch.ones_like(first), out.handle).x
        combined = [buffer.combine(torch.ones_like(first) * value, out.handle).x for value in values]
    wrong = [f"dispatch {i}" for i, value in enumerate(values) if not same_bits(dispatched[i], first + value)]
    wrong += [f"cached dispatch {i}" for i, value in enumerate(values) if not same_bits(again[i], first + value)]
    wrong += [f"combine {i}" for i, value in enumerate(values) if not same_bits(combined[i], total * value)]
    assert not wrong and int(total[:, 0].sum()) == int((topk_idx >= 0).sum())
