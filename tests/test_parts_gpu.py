"""moe_mlp in two parts on GPUs: the bits of one step after the other, memory of two streams, an end to every wait."""

import contextlib
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import on
from gpu_layer import (
    ENOUGH,
    LIMIT_S,
    assert_graph,
    go_back,
    layer_inputs,
    make_buffer,
    raise_out_of_memory,
    run_layer,
    run_with_sums,
)
from test_parts import NAMES
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher.moe import overlap as overlapping
from ep_dispatcher.tools.testing import device_of

NODES = [(2, 1), (4, 2), (2, 2)]  # ranks, ranks per node


def both_ways(rank: int, kinds: list[str], ranks_per_node: int, dtype: torch.dtype = torch.bfloat16) -> None:
    device_of("cuda", rank)
    with make_buffer(ranks_per_node=ranks_per_node, dtype=dtype) as buffer:
        enough = ENOUGH * dist.get_world_size()
        for step, kind in enumerate(kinds):
            num_tokens = 0 if (rank + step) % 5 == 4 else 2900 - 577 * rank - 41 * step
            given = layer_inputs(rank, kind, num_tokens, step, dtype)
            assert ep.why_no_overlap(buffer, num_parts=2) is None
            plain = run_layer(buffer, given, overlap=False, num_parts=2)
            for options in ({}, dict(max_recv_rows=enough)):
                found = run_layer(buffer, given, num_parts=2, **options)
                for name, a, b in zip(NAMES, plain, found):
                    assert torch.equal(a, b), f"step {step}, {kind}, {options}: {name} differs"
            one_part = run_layer(buffer, given, overlap=False, num_parts=1)
            for name, a, b in zip(NAMES, one_part, plain):
                largest = float(a.abs().max()) if a.numel() else 0.0
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * max(1.0, largest), msg=name)
        buffer.check()


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks, ranks_per_node", NODES)
def test_the_bits_of_one_part_after_the_other(pools, engine, num_ranks, ranks_per_node):
    """Whatever the routing, and whatever the tokens of the ranks; none among them."""
    pools(num_ranks).run(both_ways, ["uniform", "hot", "few", "one expert", "uniform", "uniform"], ranks_per_node)


@pytest.mark.parametrize("engine", [on("cuda")])
def test_float16(pools, engine):
    pools(2).run(partial(both_ways, dtype=torch.float16), ["uniform", "few"], 1)


def same_rows(rank: int) -> None:
    device_of("cuda", rank)
    with make_buffer(ranks_per_node=1) as buffer, torch.no_grad():
        for kind in ("uniform", "hot", "few"):
            x, idx, *others = layer_inputs(rank, kind, 2900 - 577 * rank, seed=1)
            one, two = (ep.moe_mlp(buffer, x, idx, *others, num_parts=number) for number in (1, 2))
            assert torch.equal(one, two), kind


@pytest.mark.parametrize("engine", [on("cuda")])
def test_a_forward_has_the_bits_of_one_part(pools, engine):
    """A row of the result is the same sum, whatever the tile that it is in."""
    pools(2).run(same_rows)


def fill_what_is_free() -> None:
    """Write NaN to memory that a layer has freed."""
    for size in (1 << 16, 1 << 20, 1 << 23):
        torch.full((size,), float("nan"), device="cuda")


def many_steps(rank: int, ranks_per_node: int, counted: bool) -> None:
    """Other routings and other memory at each step, and no host waits. New tensors are filled with NaN in between."""
    device_of("cuda", rank)
    with make_buffer(ranks_per_node=ranks_per_node) as buffer:
        options = {} if counted else dict(max_recv_rows=ENOUGH * dist.get_world_size())
        kinds = ("uniform", "few", "hot")
        given = [layer_inputs(rank, kinds[n % 3], 2900 - 577 * rank - 300 * (n % 4), n) for n in range(6)]
        plain = [run_layer(buffer, one, overlap=False, num_parts=2) for one in given]
        found = []
        for step in range(18):
            x, idx, *others = given[step % 6]
            leaves = [t.detach().clone().requires_grad_() for t in (x, *others)]
            y = ep.moe_mlp(buffer, leaves[0], idx.clone(), *leaves[1:], **options)
            fill_what_is_free()
            go_back(y)
            found.append([y.detach(), *(leaf.grad for leaf in leaves)])
            fill_what_is_free()
        for step, values in enumerate(found):
            for name, a, b in zip(NAMES, plain[step % 6], values):
                assert torch.equal(a, b), f"step {step}: {name} differs"
        buffer.check()


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("num_ranks, ranks_per_node", [(2, 1), (4, 2)])
def test_many_steps_in_a_row(pools, engine, num_ranks, ranks_per_node, counted):
    """By default: layers between nodes run in two parts."""
    pools(num_ranks).run(many_steps, ranks_per_node, counted)


def in_two_streams(rank: int, counted: bool) -> None:
    """Layers in two streams in turn. Only the buffer orders these: each has memory and a side stream of its own."""
    device_of("cuda", rank)
    with make_buffer(ranks_per_node=1) as buffer:
        options = {} if counted else dict(max_recv_rows=ENOUGH * dist.get_world_size())
        given = [layer_inputs(rank, kind, 2900 - 577 * rank, n) for n, kind in enumerate(("uniform", "few", "hot"))]
        plain = [run_layer(buffer, one, overlap=False, num_parts=2) for one in given]
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in range(2)], []
        for step in range(12):
            with torch.cuda.stream(streams[step % 2]):
                found.append(run_layer(buffer, given[step % 3], num_parts=2, **options))
                torch.full((1 << 23,), float("nan"), device="cuda")
        torch.cuda.synchronize()
        for step, values in enumerate(found):
            for name, a, b in zip(NAMES, plain[step % 3], values):
                assert torch.equal(a, b), f"step {step}: {name} differs"
        buffer.check()


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("counted", [True, False])
def test_layers_in_two_streams(pools, engine, counted):
    pools(2).run(in_two_streams, counted)


def in_a_graph(rank: int, ranks_per_node: int, num_parts: int) -> None:
    device_of("cuda", rank)
    runs = [dict(overlap=overlap) for overlap in (False, True)]
    with make_buffer(ranks_per_node=ranks_per_node) as buffer:
        # 2049 tokens: enough to overlap in one part too
        assert_graph(rank, buffer, 2049, runs, num_steps=2, num_parts=num_parts)


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks, ranks_per_node, num_parts", [*((*nodes, 2) for nodes in NODES), (2, 1, 1)])
def test_a_graph_of_forward_and_backward(pools, engine, num_ranks, ranks_per_node, num_parts):
    pools(num_ranks).run(in_a_graph, ranks_per_node, num_parts)


def without_a_wait(rank: int) -> None:
    device_of("cuda", rank)
    with make_buffer(ranks_per_node=1) as buffer:
        given = layer_inputs(rank, "uniform", 2500, seed=0)
        options = dict(max_recv_rows=ENOUGH * dist.get_world_size(), num_parts=2)
        plain = run_layer(buffer, given, **options)
        torch.cuda.set_sync_debug_mode("error")  # raises where the host waits
        try:
            found = run_layer(buffer, given, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(a, b) for a, b in zip(plain, found))


@pytest.mark.parametrize("engine", [on("cuda")])
def test_the_host_waits_for_nothing(pools, engine):
    pools(2).run(without_a_wait)


def each_its_own_way(rank: int, ranks_per_node: int) -> None:
    """Ranks with overlap beside ranks without. Not all inputs want gradients."""
    device_of("cuda", rank)
    with make_buffer(ranks_per_node=ranks_per_node) as buffer:
        for step, wanted in enumerate(((0, 1, 2, 3), (2, 3), (0,), ())):
            x, idx, *others = layer_inputs(rank, "uniform", 2500 if (rank + step) % 2 else 3, seed=step)
            results = []
            for overlap in (False, True, (rank + step) % 2 == 0):
                leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, *others))]
                y = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], overlap=overlap, num_parts=2)
                if wanted:
                    go_back(y)
                results.append([y.detach(), *(t.grad for t in leaves if t.grad is not None)])
                assert len(results[-1]) == 1 + len(wanted)
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), wanted
        buffer.check()


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks, ranks_per_node", [(2, 1), (4, 2)])
def test_ranks_that_choose_differently(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(each_its_own_way, ranks_per_node)


def main_grads(rank: int) -> None:
    """As Megatron's experts: a tensor for each expert, and gradients added to float32 sums."""
    device_of("cuda", rank)
    results = []
    with make_buffer(ranks_per_node=1) as buffer:
        x, idx, weights, *stacks = layer_inputs(rank, "uniform", 2500 - 300 * rank, seed=3)
        w1, w2 = ([w.clone() for w in stack] for stack in stacks)
        for overlap in (False, True):
            for keep_activated in (True, False):
                options = dict(keep_activated=keep_activated, overlap=overlap)
                found, write = run_with_sums(overlapping.mlp_in_parts, buffer, x, idx, weights, w1, w2, **options)
                write()
                results.append(found)
        buffer.check()
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result))


@pytest.mark.parametrize("engine", [on("cuda")])
def test_gradients_that_are_added_elsewhere(pools, engine):
    pools(2).run(main_grads)


def later_writes(rank: int) -> None:
    """As with delay_wgrad_compute: gradients of weights are written when another layer has run."""
    device_of("cuda", rank)
    with make_buffer(ranks_per_node=1) as buffer:
        kinds = ("uniform", "few", "hot")
        given = [layer_inputs(rank, kind, 2500 - 300 * rank, n) for n, kind in enumerate(kinds)]
        results = []
        for overlap, most_waiting in ((False, 0), (True, 0), (True, 2)):
            found, waiting = [], []
            for step in range(8):
                x, idx, weights, *stacks = given[step % 3]
                w1, w2 = ([w.clone() for w in stack] for stack in stacks)
                options = dict(overlap=overlap, keep_activated=step % 2 == 0)
                values, write = run_with_sums(overlapping.mlp_in_parts, buffer, x, idx, weights, w1, w2, **options)
                found.append(values)
                waiting.append(write)
                fill_what_is_free()
                while len(waiting) > (most_waiting if step < 7 else 0):
                    write = waiting.pop(0)
                    write()
                    del write  # with the rows that it has read
                    fill_what_is_free()
            results.append(found)
        buffer.check()
    for result in results[1:]:
        for step, (plain, found) in enumerate(zip(results[0], result, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), step


@pytest.mark.parametrize("engine", [on("cuda")])
def test_gradients_that_are_written_behind_other_layers(pools, engine):
    pools(2).run(later_writes)


def recomputed(rank: int) -> None:
    """Two layers, each in a checkpoint: a forward without gradients, and again in the backward."""
    device_of("cuda", rank)
    with make_buffer(ranks_per_node=1) as buffer:
        _, idx, *weights = layer_inputs(rank, "hot", 2500 - 300 * rank, seed=1)
        x = layer_inputs(rank, "uniform", 2500 - 300 * rank, seed=2)[0]
        results = []
        for recomputes, overlap, enough in (
            (False, False, None),
            (True, True, None),
            (True, True, ENOUGH * dist.get_world_size()),
        ):
            for _ in range(2):
                leaves = [t.clone().requires_grad_() for t in (x, *weights)]

                def layer(rows, *others, overlap=overlap, enough=enough):
                    options = dict(overlap=overlap, max_recv_rows=enough, num_parts=2)
                    return rows + ep.moe_mlp(buffer, rows, idx, *others, **options)

                y = leaves[0]
                for _ in range(2):
                    y = checkpoint(layer, y, *leaves[1:], use_reentrant=False) if recomputes else layer(y, *leaves[1:])
                    fill_what_is_free()
                go_back(y)
                fill_what_is_free()
                results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        buffer.check()
    for step, result in enumerate(results):
        for name, a, b in zip(NAMES, results[0], result, strict=True):
            assert torch.equal(a, b), f"{name} of {step}"


@pytest.mark.parametrize("engine", [on("cuda")])
def test_a_recompute(pools, engine):
    pools(2).run(recomputed)


def gpu_mistakes(rank: int) -> None:
    """After a bad entry in either part the buffer goes on."""
    device_of("cuda", rank)
    x, idx, *others = layer_inputs(rank, "uniform", 2100, seed=0)
    with make_buffer(ranks_per_node=1) as buffer:
        for token, of_part in ((17, 17), (1067, 17)):
            wrong = idx.clone()
            wrong[token, 2] = 10_000
            with pytest.raises(ValueError, match=rf"topk_idx\[{of_part}, 2\]: given 10000"):
                ep.moe_mlp(buffer, x, wrong, *others)
            plain, found = run_layer(buffer, (x, idx, *others), overlap=False), run_layer(buffer, (x, idx, *others))
            assert all(torch.equal(a, b) for a, b in zip(plain, found))
    buffer = make_buffer(ranks_per_node=1)
    with pytest.raises((ValueError, RuntimeError), match="max_recv_rows|aborted|given up"):  # found by either operation
        ep.moe_mlp(buffer, x, idx, *others, max_recv_rows=10)
        buffer.check()
    torch.cuda.synchronize()
    with contextlib.suppress(ValueError, RuntimeError):
        buffer.destroy()


@pytest.mark.parametrize("engine", [on("cuda")])
def test_mistakes_are_those_of_dispatch(pools, engine):
    pools(2).run(gpu_mistakes)


def a_late_rank(rank: int, counted: bool) -> float:
    device_of("cuda", rank)
    buffer = make_buffer(timeout_s=LIMIT_S, ranks_per_node=1)
    given = layer_inputs(rank, "uniform", 2100, seed=0)
    run_layer(buffer, given)
    dist.barrier()
    if rank == 1:
        time.sleep(2 * LIMIT_S)
        buffer.destroy()
        return 0.0
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as error:
        run_layer(buffer, given, **({} if counted else dict(max_recv_rows=ENOUGH * 2)))
        buffer.check()
    torch.cuda.synchronize()
    assert error.value.late_ranks == (1,)
    return time.monotonic() - begin


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("counted", [True, False])
def test_a_late_rank_is_named(pools, engine, counted):
    waited = pools(2).run(a_late_rank, counted)
    assert LIMIT_S - 1 < waited[0] < LIMIT_S + 5


def between_the_parts(rank: int) -> None:
    """Rank 0 fails in the experts of B. Rank 1 hears of it before its limit, while rank 0 keeps its buffer."""
    device_of("cuda", rank)
    buffer, given = make_buffer(ranks_per_node=1), layer_inputs(rank, "uniform", 2100, seed=0)
    run_layer(buffer, given)
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        run_rows, calls = overlapping.run_rows, []

        def fail(*args):
            calls.append(args)
            return raise_out_of_memory() if len(calls) == 2 else run_rows(*args)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError, match="made up"):
            patch.setattr(overlapping, "run_rows", fail)
            run_layer(buffer, given)
        with pytest.raises(RuntimeError, match="gave up while it ran the experts of a layer, by OutOfMemoryError"):
            run_layer(buffer, given)
    else:
        with pytest.raises(ep.PeerTimeoutError) as error:
            run_layer(buffer, given)
            buffer.check()
        assert error.value.late_ranks == (0,) and time.monotonic() - begin < 30
    torch.cuda.synchronize()
    dist.barrier()
    buffer.destroy()


@pytest.mark.parametrize("engine", [on("cuda")])
def test_an_error_between_the_parts(pools, engine):
    pools(2).run(between_the_parts)
