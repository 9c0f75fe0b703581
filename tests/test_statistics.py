"""Buffer.stats(): tokens of each expert and waits, without a wait of the host. And its sums over the ranks of a job."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on, on_ranks
from lib.commands import torchrun
from lib.errors import error_of
from lib.round_trip import MAX_TOKENS, NUM_EXPERTS, device, expected, inputs, make_buffer, round_trip

import ep_dispatcher as ep
from ep_dispatcher.integrations.job_stats import JobStats, JobSums
from ep_dispatcher.statistics import NUM_LABELS

NUM_RANKS = 3


def arrived(buffer: ep.Buffer) -> ep.Stats:
    """What calls return for all work so far, added up: on GPUs a copy is not there at once."""
    results = [buffer.stats()]
    if buffer.engine == "cuda":
        torch.cuda.synchronize()
        results.append(buffer.stats())
    first, *others = [one for one in results if one is not None]
    for one in others:
        parts = ("tokens_per_expert", "dispatch_wait_ns", "combine_wait_ns")
        first = ep.Stats(
            *(getattr(first, part) + getattr(one, part) for part in parts), first.num_calls + one.num_calls
        )
    return first


def tokens_of(buffer: ep.Buffer, seed: int) -> torch.Tensor:
    return expected(buffer, seed=seed)[0].tokens_per_expert


def same_counts(stats: ep.Stats, right: dict[int, torch.Tensor]) -> bool:
    """Whether tokens have arrived with these labels, and no others."""
    tokens = stats.tokens_per_expert
    assert tokens.dtype == torch.int64 and tokens.device.type == "cpu" and len(tokens) == NUM_LABELS
    wanted = torch.zeros_like(tokens)
    for label, counts in right.items():
        wanted[label] = counts
    return torch.equal(tokens, wanted)


@pytest.mark.parametrize("ranks_per_node", [3, exhaustive(1)])
@pytest.mark.parametrize("max_recv_rows", [None, NUM_RANKS * MAX_TOKENS * 4])
@on_ranks(NUM_RANKS)
def test_tokens_are_counted_once_by_label(rank, engine, max_recv_rows, ranks_per_node):
    """New plans count: not dispatches with a handle, backwards, or what came before the first call."""
    with make_buffer(engine=engine, ranks_per_node=ranks_per_node) as buffer:
        round_trip(buffer, seed=7, max_recv_rows=max_recv_rows)
        assert buffer.stats() is None, "the first call begins"
        round_trip(buffer, seed=1, max_recv_rows=max_recv_rows)
        buffer.label = 5
        round_trip(buffer, seed=2, max_recv_rows=max_recv_rows)
        round_trip(buffer, seed=3, max_recv_rows=max_recv_rows)
        x, topk_idx, topk_weights = inputs(rank, seed=4, device=device(buffer))
        buffer.label = NUM_LABELS + 44
        handle = buffer.plan(topk_idx, max_recv_rows=max_recv_rows)
        out = ep.dispatch(buffer, x.requires_grad_(), topk_weights=topk_weights, handle=handle)
        ep.combine(buffer, out.x, out.handle).float().sum().backward()
        stats = arrived(buffer)
        one, two, three, four = (tokens_of(buffer, seed) for seed in (1, 2, 3, 4))
        assert same_counts(stats, {0: one, 5: two + three, NUM_LABELS - 1: four})
        assert stats.num_calls == (1 if engine == "cpu" else stats.num_calls)
        for waits in (stats.dispatch_wait_ns, stats.combine_wait_ns):
            assert waits.dtype == torch.int64 and waits.shape == (NUM_RANKS,) and waits.min() >= 0 == waits[rank]
        buffer.label = 0
        round_trip(buffer, seed=1, max_recv_rows=max_recv_rows)
        assert same_counts(arrived(buffer), {0: one}), "since the last result"
        nothing = arrived(buffer)
        assert not nothing.tokens_per_expert.any() and not nothing.dispatch_wait_ns.any()
        buffer.label = None
        assert buffer.label == 0, "for every way to call an operation"


@on_ranks(NUM_RANKS)
def test_the_late_rank_stands_out(rank, engine):
    with make_buffer(engine=engine) as buffer:
        buffer.stats()
        round_trip(buffer)
        arrived(buffer)
        dist.barrier()
        if rank == 1:
            time.sleep(0.3)
        round_trip(buffer)
        waits = arrived(buffer).dispatch_wait_ns
        if rank != 1:
            assert waits.argmax() == 1 and waits[1] > 0.2e9
        else:
            assert waits.max() < 0.2e9


@pytest.mark.parametrize("hook", [False, True])
@on_ranks(NUM_RANKS)
def test_decode_layout_counts(rank, engine, hook):
    with make_buffer(engine=engine) as buffer:
        buffer.stats()
        x, topk_idx, _ = inputs(rank, seed=1, device=device(buffer))
        out = buffer.dispatch(x, topk_idx, layout="decode", return_hook=hook)
        out.hook()
        assert same_counts(arrived(buffer), {0: tokens_of(buffer, 1)})


@on_ranks(NUM_RANKS)
def test_a_dispatch_with_too_few_rows_counts_nothing(rank, engine):
    """Its outputs are zeros on all ranks, and the step with it is skipped or repeated by the caller."""
    with make_buffer(engine=engine) as buffer:
        buffer.stats()
        with pytest.raises(ep.TooFewRowsError):
            buffer.dispatch(*inputs(rank, device=device(buffer)), max_recv_rows=1)
            buffer.check()
        round_trip(buffer, seed=2)
        assert same_counts(arrived(buffer), {0: tokens_of(buffer, 2)})


@on_ranks(NUM_RANKS)
def test_asynchronous_operations_and_inference_mode(rank, engine):
    """The copy comes after operations in the buffer's own stream. Totals that were made in inference mode go on."""
    with make_buffer(engine=engine) as buffer:
        with torch.inference_mode():
            buffer.stats()
        out = buffer.dispatch(*inputs(rank, seed=1, device=device(buffer)), async_finish=True)
        stats = arrived(buffer)
        out.event.wait()
        with torch.inference_mode():
            buffer.dispatch(*inputs(rank, seed=2, device=device(buffer)))
        assert same_counts(stats, {0: tokens_of(buffer, 1)})
        assert same_counts(arrived(buffer), {0: tokens_of(buffer, 2)})


@pytest.mark.parametrize("engine", [on("cuda")])
@on_ranks(NUM_RANKS)
def test_graphs_count_in_each_replay(rank, engine):
    with make_buffer(engine=engine) as buffer:
        buffer.stats()
        given = inputs(rank, seed=1, device=device(buffer))
        options = dict(max_recv_rows=buffer.max_recv_rows())
        buffer.dispatch(*given, **options)
        buffer.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert "capture" in error_of(buffer.stats), "also where nothing of the buffer was captured yet"
            out = buffer.dispatch(*given, **options)
            assert "capture" in error_of(buffer.stats)
        arrived(buffer)
        for _ in range(3):
            graph.replay()
        buffer.check()
        assert same_counts(arrived(buffer), {0: 3 * tokens_of(buffer, 1)})
        del out


@pytest.mark.parametrize("engine", [on("cuda")])
@on_ranks(NUM_RANKS)
def test_a_host_that_is_far_ahead_loses_nothing(rank, engine):
    """Calls return None while the GPU is busy, and start few copies. Then one result has it all."""
    with make_buffer(engine=engine) as buffer:
        buffer.stats()
        given = inputs(rank, seed=1, device=device(buffer))
        options = dict(max_recv_rows=buffer.max_recv_rows())
        buffer.dispatch(*given, **options)
        torch.cuda.synchronize()
        begin = time.monotonic()
        torch.cuda._sleep(int(1e9))  # clock cycles: half a second and more
        results = []
        for _ in range(20):
            buffer.dispatch(*given, **options)
            results.append(buffer.stats())
        assert time.monotonic() - begin < 0.4, "the host has waited"
        torch.cuda.synchronize()
        results += [buffer.stats(), arrived(buffer)]
        results = [one for one in results if one is not None]
        total = sum(one.tokens_per_expert[0] for one in results)
        assert torch.equal(total, 21 * tokens_of(buffer, 1))
        assert sum(one.num_calls for one in results) >= 21


@on_ranks(NUM_RANKS)
def test_what_is_refused(rank, engine):
    with make_buffer(engine=engine) as buffer:
        zeros = torch.zeros(NUM_RANKS, dtype=torch.int64, device=device(buffer))
        buffer.combine_wait_ns = zeros
        assert "combine_wait_ns" in error_of(buffer.stats)
        buffer.combine_wait_ns = None
        assert buffer.stats() is None
        assert "stats()" in error_of(setattr, buffer, "dispatch_wait_ns", zeros)
        buffer.dispatch_wait_ns = None  # it is
        round_trip(buffer)
        assert arrived(buffer).tokens_per_expert.shape[1] == NUM_EXPERTS // NUM_RANKS
    assert "destroyed" in error_of(buffer.stats)


@on_ranks(NUM_RANKS)
def test_ranks_need_not_agree(rank, engine):
    """One rank counts alone; the others go on as before."""
    with make_buffer(engine=engine) as buffer:
        if rank == 2:
            buffer.stats()
        round_trip(buffer, seed=1)
        if rank == 2:
            assert same_counts(arrived(buffer), {0: tokens_of(buffer, 1)})


# ---- sums over a job ------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_sums_over_a_job(rank, engine):
    """Two groups with a buffer each, of two layers. A destroyed buffer is left out."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[rank % 2]
    sums = JobSums()
    sums.grow(3, NUM_EXPERTS)
    with make_buffer(group, engine=engine) as buffer:
        with make_buffer(group, engine=engine) as gone:
            sums.start(gone)
        round_trip(buffer, seed=5)
        sums.start(buffer)
        sums.begin(steps=2)
        round_trip(buffer, seed=1)
        sums.begin(steps=2)
        before = settled(sums)
        assert before.steps == 4 and int(before.rows.sum()) > 0 == int(before.rows[1:].sum()), "two sums in one result"
        for label, seed in ((1, 1), (2, 2), (7, 3)):  # there is no room for label 7
            buffer.label = label
            round_trip(buffer, seed=seed)
        with sums.paused():
            round_trip(buffer, seed=4)
        sums.begin(steps=5)
        found = settled(sums)
        mine = [tokens_of(buffer, seed) for seed in (1, 2)]
    of_all = [None] * 4
    dist.all_gather_object(of_all, (buffer.rank, mine))
    rows = torch.tensor([[0] * 4, *([int(tokens[n].sum()) for _, tokens in of_all] for n in (0, 1))])
    half = NUM_EXPERTS // 2
    experts = torch.zeros(3, NUM_EXPERTS, dtype=torch.int64)
    for at, tokens in of_all:
        experts[1:, at * half : (at + 1) * half] += torch.stack(tokens)
    assert found.steps == 5 and torch.equal(found.rows, rows) and torch.equal(found.experts, experts)
    assert found.groups.tolist() == [0, 1, 0, 1] and found.waited.shape == found.waited_for.shape == (4,)
    imbalance = rows.double()[1:].reshape(2, 2, 2)  # layer, rank in the group, group
    assert torch.equal(found.rank_imbalance()[1:], imbalance.amax(1) / imbalance.mean(1))
    assert found.rank_imbalance()[0].isnan().all(), "no rows"
    scalars = found.scalars()
    assert scalars["ep_dispatcher/worst_layer"] in (1, 2)
    assert scalars["ep_dispatcher/busiest_rank_over_mean_worst_layer"] == found.rank_imbalance()[1:].max()
    assert scalars["ep_dispatcher/most_waited_for_rank"] == found.waited_for.argmax()


def settled(sums: JobSums):
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return sums.newest()


def test_figures_without_rows_are_left_out():
    zeros = torch.zeros(2, 4, dtype=torch.int64)
    found = JobStats(1, zeros, zeros, zeros[0], zeros[0], zeros[0] - 1)
    assert found.scalars() == {} and found.rank_imbalance().shape == (2, 0)


@on_ranks(2)
def test_a_larger_buffer_is_left_out_of_sums(rank):
    """Ranks whose part of the experts has room must not go on alone."""
    sums = JobSums()
    assert "grow()" in error_of(lambda: sums.begin(1))
    sums.grow(1, NUM_EXPERTS)
    with make_buffer(engine="cpu") as small, make_buffer(engine="cpu", num_experts=2 * NUM_EXPERTS) as large:
        for buffer in (small, large):
            sums.start(buffer)
            x, topk_idx, _ = inputs(rank, seed=1)
            buffer.dispatch(x, topk_idx)
        sums.begin(steps=1)
        found = settled(sums)
        assert int(found.experts.sum()) == int(found.rows.sum()) > 0
        everyone = [None] * 2
        dist.all_gather_object(everyone, int(tokens_of(small, 1).sum()))
        assert found.rows[0].tolist() == everyone


def test_scalars_are_those_of_a_step():
    """Two steps of two ranks, of which the first has waited 4 ms for the other one."""
    found = JobStats(
        steps=2,
        rows=torch.tensor([[0, 0], [30, 10]]),
        experts=torch.tensor([[0, 0, 0, 0], [30, 0, 5, 5]]),
        waited_for=torch.tensor([0, 4_000_000]),
        waited=torch.tensor([4_000_000, 0]),
        groups=torch.tensor([0, 0]),
    )
    assert {name.removeprefix("ep_dispatcher/"): value for name, value in found.scalars().items()} == {
        "busiest_rank_over_mean": 1.5,
        "busiest_rank_over_mean_worst_layer": 1.5,
        "worst_layer": 1,
        "busiest_expert_over_mean": 3.0,
        "most_waited_for_rank": 1,
        "waits_for_it_ms": 2.0,
        "waits_ms_per_rank": 1.0,
    }


@pytest.mark.exhaustive
def test_the_example_draws_what_it_is_made_of(tmp_path):
    """Its last steps have the load on the first rank's experts, and the third rank late."""
    chart = tmp_path / "chart.png"
    code, printed, errors = torchrun(4, "examples/watch_experts.py", "--steps", "12", "--out", str(chart))
    assert code == 0, errors
    found = {name: float(value) for name, value in re.findall(r"ep_dispatcher/(\w+) +([\d.]+)", printed)}
    assert found["busiest_rank_over_mean"] > 2 and found["busiest_expert_over_mean"] > 3
    assert found["most_waited_for_rank"] == 2 and found["waits_for_it_ms"] > 40
    assert chart.stat().st_size > 10_000
