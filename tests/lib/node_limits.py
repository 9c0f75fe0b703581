"""Buffer.max_tokens_to_node: steps with limits that are just enough, and with limits that are too small."""

import random
from collections.abc import Iterator

import pytest
import torch

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of
from lib import dispatch_combine as grid
from lib import nodes
from lib.dispatch_combine import Case, Inputs, expert_rows, to
from lib.nodes import NUM_ROWS, NUM_TOKENS

CLOSE = 1.2  # how much more than the rows that cross may be sent


def some_nodes(case: Case, num_tokens: list[int], seed: int) -> Inputs:
    """Every token has experts on about half of the nodes only."""
    given = nodes.make_inputs(case, num_tokens, "uniform", seed)
    num_nodes = case.num_ranks // case.ranks_per_node
    for rank, idx in enumerate(given.topk_idx):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        scores = torch.rand(len(idx), num_nodes, case.num_experts // num_nodes, generator=generator)
        kept = torch.rand(len(idx), num_nodes, generator=generator) < 0.5
        kept[torch.arange(len(idx)), torch.randint(num_nodes, (len(idx),), generator=generator)] = True
        scores[~kept] = -1
        idx.copy_(scores.flatten(1).topk(case.num_topk).indices)
    return given


def most_to_a_node(case: Case, given: Inputs) -> list[int]:
    """The most tokens of each rank for one other node."""
    return [max(nodes.least_rows(case, idx, rank)) for rank, idx in enumerate(given.topk_idx)]


def steps_of(case: Case, num_steps: int) -> Iterator[tuple[int, Inputs, int, int | None]]:
    """Yield the number of a step, its inputs, the limit that it needs, and max_recv_rows of odd ranks."""
    for step in range(num_steps):
        rng = random.Random(step)
        num_tokens = [rng.choice([0, 1, 33, 256, 257, NUM_TOKENS, NUM_TOKENS]) for _ in range(case.num_ranks)]
        given = some_nodes(case, num_tokens, step)
        yield step, given, max(1, *most_to_a_node(case, given)), rng.choice([NUM_ROWS, NUM_ROWS, None])


def change_routing(rank: int, engine: str, case: Case, num_steps: int) -> None:
    """Limits that are just enough change no bit: of dispatch, combine, what a handle does, and gradients."""
    device = device_of(engine, rank)
    with grid.make_buffer(case, engine, NUM_TOKENS) as buffer:
        for step, given, most, rows_of_odd in steps_of(case, num_steps):
            where, rows = f"step {step}, at most {most}", rows_of_odd if rank % 2 else NUM_ROWS
            buffer.max_tokens_to_node = most
            x, idx, weights = given.on(rank, device)
            x, weights = x.requires_grad_(), weights.requires_grad_()
            out = ep.dispatch(buffer, x, idx, weights, max_recv_rows=rows)
            again = buffer.dispatch(x.detach(), None, weights.detach(), handle=out.handle)
            buffer.check()
            nodes.assert_equal(again.x, out.x, f"{where}: the cached dispatch")
            y, row_weights = to(device, expert_rows(case, out, rank))
            combined = buffer.combine(y, out.handle, topk_weights=row_weights)
            buffer.max_tokens_to_node = None if step % 2 else 1  # what was made with the old limit keeps it
            gradients = torch.autograd.grad((out.x, out.topk_weights), (x, weights), (y, row_weights))
            buffer.check()
            nodes.assert_equal(gradients, (combined.x, combined.topk_weights), f"{where}: gradients")
            nodes.assert_step(case, rank, given, out, combined, rows, where)


def too_many_to_node(rank: int, engine: str, case: Case, num_steps: int) -> None:
    """Every other dispatch needs a larger limit. All ranks say so, and the buffer goes on."""
    device, last = device_of(engine, rank), None
    with grid.make_buffer(case, engine, NUM_TOKENS) as buffer:
        for step in range(num_steps):
            num_tokens = [NUM_TOKENS] * (case.num_ranks - 1) + [0 if step % 3 == 2 else NUM_TOKENS]
            given = some_nodes(case, num_tokens, step)
            x, idx, weights = given.on(rank, device)
            tokens = most_to_a_node(case, given)
            most, worst = max(tokens), tokens.index(max(tokens))
            buffer.max_tokens_to_node, buffer.label = most - 1, step
            with pytest.raises(ep.TooFewRowsError) as caught:
                buffer.dispatch(x, idx, weights, max_recv_rows=NUM_ROWS if rank == 0 or step % 2 else None)
                buffer.check()
            error = caught.value
            assert (error.argument, error.needed_rows, error.label) == ("max_tokens_to_node", most, step), error
            assert f"max_tokens_to_node is {most - 1}, which is too small" in str(error), error
            assert f"rank {worst} has {most} tokens for another node" in str(error), error
            assert f"{most} is enough" in str(error), error
            if last is not None and step % 2:
                y, handle, expected = last
                nodes.assert_equal(buffer.combine(y, handle).x, expected, f"step {step}: the combine after it")
            if step % 2:
                buffer.dispatch(x, idx, weights)  # its messages are exact: no limit
            buffer.max_tokens_to_node = most
            out = buffer.dispatch(x, idx, weights, max_recv_rows=NUM_ROWS)
            y, row_weights = to(device, expert_rows(case, out, rank))
            combined = buffer.combine(y, out.handle, topk_weights=row_weights)
            buffer.check()
            nodes.assert_step(case, rank, given, out, combined, NUM_ROWS, f"step {step}")
            last = y, out.handle, buffer.combine(y, out.handle).x


def replay(rank: int, engine: str, case: Case) -> None:
    """A graph keeps the limit of its capture, also where a replay needs more."""
    first = some_nodes(case, [NUM_TOKENS] * case.num_ranks, 0)
    with grid.make_buffer(case, engine, NUM_TOKENS) as buffer:
        buffer.max_tokens_to_node = NUM_TOKENS * 9 // 10
        step = nodes.CapturedStep(buffer, *first.on(rank, device_of(engine, rank)))
        buffer.max_tokens_to_node = None
        for seed in range(1, 7):
            needs_more = seed % 3 == 0
            given = some_nodes(case, [NUM_TOKENS] * case.num_ranks, seed)
            if needs_more:  # all tokens have an expert on every node
                given = nodes.make_inputs(case, [NUM_TOKENS] * case.num_ranks, "uniform", seed)
                num_nodes = case.num_ranks // case.ranks_per_node
                for topk_idx in given.topk_idx:
                    topk_idx[:, :2] = torch.tensor([0, case.num_experts // num_nodes])
                    topk_idx[:, 2:] = -1
            step.replay(rank, given)
            if needs_more:
                with pytest.raises(ep.TooFewRowsError, match="max_tokens_to_node is"):
                    buffer.check()
                continue
            buffer.check()
            step.assert_same_without_graph(f"replay {seed}")


def send_little(rank: int, engine: str, num_ranks: int, num_topk: int, nodes_of_token: int, captures: bool) -> None:
    """With a limit of 1.1 times the mean or a little more, little more is sent than what crosses.

    256 experts, one rank per node. Every token has experts on at most ``nodes_of_token`` nodes.
    """
    case = Case(num_ranks, 1, dtype=torch.bfloat16, num_topk=num_topk, experts_per_rank=256 // num_ranks, hidden=512)
    device, num_tokens = device_of(engine, rank), 2048
    given = nodes.make_inputs(case, [num_tokens] * num_ranks, "uniform", 0)
    for source, idx in enumerate(given.topk_idx):
        generator = torch.Generator().manual_seed(source)
        scores = torch.rand(num_tokens, num_ranks, case.experts_per_rank, generator=generator)
        best = torch.rand(num_tokens, num_ranks, generator=generator).topk(nodes_of_token).indices
        scores[torch.ones(num_tokens, num_ranks, dtype=torch.bool).scatter_(1, best, False)] = -1
        idx.copy_(scores.flatten(1).topk(num_topk).indices)
    crossing = [sum(nodes.least_rows(case, idx, source)) for source, idx in enumerate(given.topk_idx)]
    mean = sum(crossing) / num_ranks / (num_ranks - 1)
    with grid.make_buffer(case, engine, num_tokens) as buffer:
        buffer.max_tokens_to_node = max(round(1.1 * mean), *most_to_a_node(case, given))
        x, idx, _ = given.on(rank, device)

        def step():
            out = buffer.dispatch(x, idx, layout="rank", max_recv_rows=buffer.max_recv_rows("rank"))
            return out, buffer.combine(out.x, out.handle)

        run = step
        if captures:
            step()
            buffer.check()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            run = graph.replay
        _, sent, _ = nodes.sent_by(buffer, run)
        buffer.check()
    row_bytes = 2 * case.hidden
    back = sum(nodes.least_rows(case, idx, source)[rank] for source, idx in enumerate(given.topk_idx))
    least = (crossing[rank] + back) * row_bytes
    assert 0.99 * least <= sum(sent) <= CLOSE * least, f"{sum(sent) / least:.3f} times the rows that cross"
