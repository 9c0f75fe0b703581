"""Activation recompute finds its plan again: by the routing, on all ranks together, with microbatches in flight."""

import contextlib

import pytest
import torch
from megatron_layer import (
    assert_agree,
    environment,
    grads_of,
    make_config,
    make_layer,
    on_gpu,
    on_ranks,
    random,
    tokens_of,
)

import ep_dispatcher as ep
from ep_dispatcher.integrations.megatron.recompute import RecomputePlans

MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@contextlib.contextmanager
def dispatches():
    """A list that grows by "planned" or "reused" with every ``ep.dispatch`` of this rank; backwards do not call it."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        dispatch = ep.dispatch

        def count(*args, handle=None, **kwargs):
            seen.append("planned" if handle is None else "reused")
            return dispatch(*args, handle=handle, **kwargs)

        patch.setattr(ep, "dispatch", count)
        yield seen


class Microbatch:
    """A forward pass whose backward comes later."""

    def __init__(self, layer, x):
        self.layer, self.x = layer, x.clone().requires_grad_()
        if layer.config.recompute_granularity == "full":
            from megatron.core.tensor_parallel import checkpoint

            self.output = checkpoint(lambda x: layer(x)[0], False, self.x)
        else:
            self.output = layer(self.x)[0]

    def backward(self) -> dict:
        """Return the output and all gradients of this microbatch alone."""
        self.layer.zero_grad()
        (self.output * random(*self.output.shape, seed=7)).sum().backward()
        return {"output": self.output.detach(), "input gradient": self.x.grad} | grads_of(self.layer)


def one_by_one(xs, change=lambda layer: None) -> list[dict]:
    """Every microbatch alone through a layer without recompute."""
    layer = make_layer(make_config())
    change(layer)
    return [Microbatch(layer, x).backward() for x in xs]


EVEN = [[(0, 12), (1, 12), (2, 12)]] * 2
# The first two microbatches of a rank are the same tokens: their routings are equal.
TWINS = [[(0, 12), (0, 12), (2, 12)]] * 2
# Equal on rank 0 alone; rank 1 has other tokens, or fewer.
TWINS_ON_RANK_0 = [[(0, 12), (0, 12), (2, 12)], [(0, 12), (1, 12), (2, 12)]]
SIZES_ON_RANK_1 = [[(0, 12), (0, 12), (0, 12)], [(0, 12), (0, 7), (0, 3)]]
# Rank 1 has none: each of its microbatches has the same routing.
EMPTY_ON_RANK_1 = [[(0, 12), (0, 12), (2, 12)], [(0, 0), (0, 0), (0, 0)]]
EMPTY_AND_OTHER = [[(0, 12), (1, 12), (2, 12)], [(0, 0), (0, 0), (0, 0)]]
ALL_EMPTY = [[(0, 0), (0, 0), (0, 0)]] * 2


GRANULARITY = pytest.mark.parametrize("settings", [MOE, FULL], ids=["moe", "full"])


@GRANULARITY
@pytest.mark.parametrize(
    "tokens, order, expected",
    [
        (EVEN, "AaBbCc", "prprpr"),
        (EVEN, "ABCabc", "ppprrr"),
        (EVEN, "ABaCbc", "pprprr"),
        (TWINS, "ABCabc", "ppprrr"),
        (TWINS_ON_RANK_0, "ABCabc", "ppprrr"),
        (SIZES_ON_RANK_1, "ABCabc", "ppprrr"),
        (EMPTY_ON_RANK_1, "ABCabc", "ppprrr"),
        (EMPTY_AND_OTHER, "ABaCbc", "pprprr"),
        (ALL_EMPTY, "ABCabc", "ppprrr"),
        # In another order the plans that are older than the one found are forgotten, and planned again.
        (TWINS_ON_RANK_0, "ABbaCc", "pprppr"),
        (EMPTY_AND_OTHER, "ABCcba", "ppprpp"),
        (SIZES_ON_RANK_1, "ABCbca", "ppprrp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@on_ranks()
def test_a_recompute_finds_its_plan(rank, tokens, order, expected, settings):
    """``order``: microbatches by letter, a capital for the forward. ``expected``: p or r per dispatch of a letter."""
    run_order(rank, tokens, order, expected, settings)


def run_order(rank: int, tokens: list, order: str, expected: str, settings: dict) -> None:
    xs = [tokens_of(rank, step, length) for step, length in tokens[rank]]
    wanted = one_by_one(xs)
    layer = make_layer(make_config(**settings))
    found, flying = {}, {}
    with dispatches() as seen:
        for letter in order:
            number = "abc".index(letter.lower())
            if letter.isupper():
                flying[number] = Microbatch(layer, xs[number])
            else:
                found[number] = flying[number].backward()
    assert "".join(one[0] for one in seen) == ("p" * len(expected) if on_gpu() else expected), seen
    for number in range(len(xs)):
        assert_agree(found[number], wanted[number], f"microbatch {number} of {len(xs)}")
    assert not layer.token_dispatcher._plans._kept, "a plan is kept that nobody comes back for"


@GRANULARITY
@pytest.mark.parametrize("order", ["AaBbCc", "ABCabc"])
@on_ranks()
def test_a_recompute_without_a_plan_plans_anew(rank: int, order: str, settings: dict):
    """What runs on a GPU, where no plan is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecomputePlans, "keep", lambda *args: None)
        run_order(rank, EMPTY_ON_RANK_1, order, "p" * len(order), settings)


@GRANULARITY
@pytest.mark.parametrize("changed_rank", [0, 1])
@on_ranks()
def test_a_routing_that_changed_on_one_rank_is_planned_anew(rank: int, changed_rank: int, settings: dict):
    def change(layer):
        if rank == changed_rank:
            layer.router.weight.data.neg_()

    xs = [tokens_of(rank, step) for step in range(2)]
    before, after = one_by_one(xs), one_by_one(xs, change)
    layer = make_layer(make_config(**settings))
    with dispatches() as seen:
        flying = [Microbatch(layer, x) for x in xs]
        change(layer)
        for number, one in enumerate(flying):
            wanted = after[number] | {"output": before[number]["output"]}  # the output is of the first pass
            assert_agree(one.backward(), wanted, f"microbatch {number}")
    assert seen == ["planned"] * 4, seen
    dispatcher = layer.token_dispatcher
    assert dispatcher._num_forwards == 2 and dispatcher._where == "layer 1, recompute after microbatch 2"


@pytest.mark.skipif(on_gpu(), reason="on a GPU a recompute plans anew")
@on_ranks()
def test_evaluation_in_between_confuses_nothing_and_takes_no_memory(rank: int):
    layer = make_layer(make_config(**MOE))
    xs = [tokens_of(rank, step) for step in range(3)]
    wanted = one_by_one(xs)

    def evaluate(steps: int, first: int = 100) -> None:
        with torch.no_grad():
            for step in range(steps):
                layer(tokens_of(rank, first + step))
        assert 0 < len(layer.token_dispatcher._plans._kept) <= 4, "plans of evaluation steps pile up"

    def train(between: int, expected: list[str], *numbers: int) -> None:
        flying = [Microbatch(layer, xs[number]) for number in numbers]
        if between:
            evaluate(between)
        for number, one in zip(numbers, flying):
            assert_agree(one.backward(), wanted[number], f"microbatch {number}")
        assert seen == expected
        del seen[:]

    with dispatches() as seen:
        evaluate(3)
        train(1, ["planned"] * 5 + ["reused"], 0)
        train(50, ["planned"] * 54, 0, 1)  # so many that the plans of both are forgotten
        evaluate(1, 2)  # the same tokens as in training: its plan is found, and is as good
        train(0, ["planned"] * 2 + ["reused"], 2)


@GRANULARITY
@pytest.mark.parametrize("nodes", [{}, dict(EP_DISPATCHER_RANKS_PER_NODE="1")], ids=["one node", "two nodes"])
@on_ranks()
def test_training_after_inference_on_the_same_tokens(rank: int, settings: dict, nodes: dict):
    """Log-probabilities of the batch, then training steps on the same tokens: the routings are equal."""
    with environment(**nodes):
        xs = [tokens_of(rank, step) for step in range(2)]
        layer = make_layer(make_config(**settings))
        with torch.inference_mode():  # also the first use of the buffer
            inferred = [layer(x)[0] for x in xs]
        assert not layer.token_dispatcher._plans._kept
        results = [Microbatch(layer, x).backward() for x in xs]
        wanted = one_by_one(xs)
    for number in range(2):
        assert torch.equal(results[number]["output"], inferred[number])
        assert_agree(results[number], wanted[number], f"microbatch {number}")


@on_ranks()
def test_without_recompute_no_plan_is_kept(rank: int):
    other = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    for settings in ({}, other):
        layer = make_layer(make_config(**settings))
        with torch.no_grad():
            layer(tokens_of(rank))
        assert not layer.token_dispatcher._plans._kept


@on_ranks()
def test_as_many_plans_are_kept_as_a_pipeline_has_in_flight_of_one_layer(rank: int):
    config = make_config(**MOE)
    for pipeline, group, most in [(1, None, 4), (4, None, 10), (2, 8, 18)]:
        config.pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage = pipeline, group
        assert RecomputePlans.make(config)._kept.maxlen == most
