"""CUDA graphs of whole layers with redundant experts: the bits of the same steps without a graph."""

import pytest
import torch
from conftest import exhaustive, on_ranks
from lib.autograd import normal
from lib.balance import copies_of_homes, make_skewed_case
from lib.dispatch_combine import Case, Inputs, make_buffer
from lib.experts import given_to

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import balance_so_far, same_bits

NUM_STEPS = 4
NAMES = ("y", "x", *(f"{name} of layer {number}" for number in (1, 2) for name in ("topk_weights", "w1", "w2")))


def inputs_of_steps(num_ranks: int) -> tuple[Case, list[Inputs]]:
    """The same sizes in every step. In each the experts of another rank are hot."""
    options = dict(tokens="few chunks", dtype=torch.bfloat16)
    cases = [make_skewed_case(num_ranks, num_ranks, seed=5 * number, **options) for number in range(NUM_STEPS)]
    case = cases[0][0]
    for number, (_, inputs) in enumerate(cases):
        for idx in inputs.topk_idx:
            idx[:] = torch.where(idx >= 0, (idx + number * case.experts_per_rank) % case.num_experts, -1)
    return case, [inputs for _, inputs in cases]


def given_in_steps(rank: int, engine: str, case: Case, inputs: list[Inputs]) -> list[list[torch.Tensor]]:
    """For each step topk_idx, the gradient of y, x, and topk_weights, w1 and w2 of two layers."""
    steps = []
    for number, one in enumerate(inputs):
        x, topk_idx, topk_weights, w1, w2 = given_to(rank, engine, case, one)
        grad_y = normal(x.shape, 60 + 10 * number + rank, x.dtype).to(x.device)
        layers = [topk_weights, w1, w2, topk_weights.flip(1), -w1, 2 * w2]
        steps.append([topk_idx, grad_y, x, *(t * (1 + number / 4) for t in layers)])
    return steps


def two_layers(buffer: ep.Buffer, topk_idx: torch.Tensor, grad_y: torch.Tensor, *leaves: torch.Tensor):
    """Forward and backward. The second layer uses the slots of the first before the first one's backward."""
    y = leaves[0]
    for of_layer in (leaves[1:4], leaves[4:]):
        y = ep.moe_mlp(buffer, y, topk_idx, *of_layer, max_recv_rows=buffer.max_recv_rows())
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]


def fresh(given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of what a step is given, whose leaves require gradients."""
    return [t.clone().requires_grad_(n >= 2) for n, t in enumerate(given)]


def replayable(engine: str, step):
    """Return a function that repeats a step: by a CUDA graph of it, or on CPUs by a call. The step runs here first."""
    if engine == "cpu":
        step()
        return step
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = step()

    def replay():
        graph.replay()
        return captured

    return replay


@pytest.mark.parametrize("num_ranks, redundant", [(2, 1), exhaustive(4, 2)])
@on_ranks()
def test_replays_have_the_bits_of_steps_without_a_graph(rank, engine, num_ranks, redundant):
    """Routing, weights, rows and gradients change from one replay to the next, which follow each other at once."""
    case, inputs = inputs_of_steps(num_ranks)
    steps = given_in_steps(rank, engine, case, inputs)
    with make_buffer(case, engine, inputs[0].most_tokens, redundant_experts_per_rank=redundant) as buffer:
        buffer.balancer().smallest_copy = 1
        copies = [copies_of_homes(one.topk_idx, buffer.balancer().sizes) for one in inputs]
        buffer.stats()
        static = fresh(steps[0])
        replay = replayable(engine, lambda: two_layers(buffer, *static))
        buffer.check()
        balance_so_far(buffer)

        replayed = []
        for given in steps[1:] + steps[:1]:
            with torch.no_grad():
                for t, value in zip(static, given, strict=True):
                    t.copy_(value)
            replayed.append([t.clone() for t in replay()])
        buffer.check()
        of_replays = balance_so_far(buffer)
        eager = [two_layers(buffer, *fresh(given)) for given in steps[1:] + steps[:1]]
        buffer.check()
        of_steps = balance_so_far(buffer)

    for number, (found, expected) in enumerate(zip(replayed, eager, strict=True)):
        for name, one, other in zip(NAMES, found, expected, strict=True):
            assert one.isfinite().all() and one.any(), (number, name)
            assert same_bits(one, other), (number, name)
    assert len({tuple(one) for one in copies}) > 1, "other ranks' experts have copies"
    assert of_replays.num_copies == 2 * sum(map(sum, copies)) and of_replays.num_microbatches == 2 * NUM_STEPS
    assert of_steps.bytes_pushed > 0 or not sum(one[rank] for one in copies)
    times = dict(push_ns=0, pull_ns=0)
    assert of_replays._replace(**times) == of_steps._replace(**times), "replays count as steps do"
    assert of_steps.push_ns > 0 and of_steps.pull_ns > 0
    assert engine == "cpu" or of_replays.push_ns == of_replays.pull_ns == 0, "events in a graph have no times"
