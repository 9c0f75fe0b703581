"""Activation recompute finds its plan again: by the routing, on all ranks together, with microbatches in flight."""

import contextlib

import pytest
import torch
from megatron_layer import (
    NO_MEGATRON,
    Layout,
    assert_agree,
    environment,
    grads_of,
    make_config,
    make_layer,
    megatron_pool,
    on_gpu,
    random,
    tokens_of,
    use_layout,
)

import ep_dispatcher as ep

pytest.importorskip("megatron.core", reason=NO_MEGATRON)

NOTHING_KEPT = pytest.mark.skipif(on_gpu(), reason="on a GPU a recompute plans anew")
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

    def __init__(self, layer, x, checkpointed: bool = False):
        self.x = x.clone().requires_grad_()
        if checkpointed:
            from megatron.core.tensor_parallel import checkpoint

            self.output = checkpoint(lambda x: layer(x)[0], False, self.x)
        else:
            self.output = layer(self.x)[0]

    def backward(self) -> None:
        (self.output * random(*self.output.shape, seed=7)).sum().backward()

    def tensors(self) -> dict:
        return {"output": self.output.detach(), "input gradient": self.x.grad}


def one_by_one(xs, change=None, layer=None) -> list[dict]:
    """Every microbatch alone through a layer without recompute, with its gradients of the parameters."""
    layer = layer or make_layer(make_config())
    if change is not None:
        change(layer)
    results = []
    for x in xs:
        layer.zero_grad()
        one = Microbatch(layer, x)
        one.backward()
        results.append(one.tensors() | grads_of(layer))
    return results


def run_order(rank: int, tokens: list, order: str, expected: str, settings: dict) -> None:
    """``order``: microbatches by letter, a capital for the forward. ``expected``: p or r per dispatch of a letter."""
    use_layout(Layout(ep=2))
    xs = [tokens_of(rank, step, length) for step, length in tokens[rank]]
    wanted = one_by_one(xs)
    layer = make_layer(make_config(**settings))
    one_at_a_time, flying = {}, {}
    with dispatches() as seen:
        for letter in order:
            number = "abc".index(letter.lower())
            if letter.isupper():
                flying[number] = Microbatch(layer, xs[number], checkpointed=settings["recompute_granularity"] == "full")
            else:
                layer.zero_grad()
                flying[number].backward()
                one_at_a_time[number] = flying[number].tensors() | grads_of(layer)
    if on_gpu():
        expected = "p" * len(expected)
    assert "".join(one[0] for one in seen) == expected, seen
    for number in range(len(xs)):
        assert one_at_a_time[number].keys() == wanted[number].keys()
        assert_agree(one_at_a_time[number], wanted[number], f"microbatch {number} of {len(xs)}")
    assert not layer.token_dispatcher._plans._kept, "a plan is kept that nobody comes back for"


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


@pytest.mark.parametrize("settings", [MOE, FULL], ids=["moe", "full"])
@pytest.mark.parametrize(
    "tokens,order,expected",
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
def test_a_recompute_finds_its_plan(tokens, order, expected, settings):
    megatron_pool(2).run(run_order, tokens, order, expected, settings)


def plan_anew(rank: int, order: str, settings: dict) -> None:
    """What runs on a GPU, where no plan is kept."""
    from ep_dispatcher.integrations.megatron.recompute import RecomputePlans

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecomputePlans, "keep", lambda *args: None)
        run_order(rank, EMPTY_ON_RANK_1, order, "p" * len(order), settings)


@pytest.mark.parametrize("settings", [MOE, FULL], ids=["moe", "full"])
@pytest.mark.parametrize("order", ["AaBbCc", "ABCabc"])
def test_a_recompute_without_a_plan_plans_anew(order, settings):
    megatron_pool(2).run(plan_anew, order, settings)


def change_routing(rank: int, changed_rank: int, settings: dict) -> None:
    use_layout(Layout(ep=2))

    def change(layer):
        if rank == changed_rank:
            layer.router.weight.data.neg_()

    xs = [tokens_of(rank, step) for step in range(2)]
    before, after = one_by_one(xs), one_by_one(xs, change)
    layer = make_layer(make_config(**settings))
    with dispatches() as seen:
        flying = [Microbatch(layer, x, checkpointed=settings["recompute_granularity"] == "full") for x in xs]
        change(layer)
        for number, one in enumerate(flying):
            layer.zero_grad()
            one.backward()
            grads = after[number] | {"output": before[number]["output"]}  # the output is of the first pass
            assert_agree(one.tensors() | grads_of(layer), grads, f"microbatch {number}")
    assert seen == ["planned"] * 4, seen
    dispatcher = layer.token_dispatcher
    assert dispatcher._num_forwards == 2 and dispatcher._where == "layer 1, recompute after microbatch 2"


@pytest.mark.parametrize("settings", [MOE, FULL], ids=["moe", "full"])
@pytest.mark.parametrize("changed_rank", [0, 1])
def test_a_routing_that_changed_on_one_rank_is_planned_anew(changed_rank, settings):
    megatron_pool(2).run(change_routing, changed_rank, settings)


def evaluate_in_between(rank: int) -> None:
    use_layout(Layout(ep=2))
    layer = make_layer(make_config(**MOE))
    kept = layer.token_dispatcher._plans._kept

    def evaluate(steps: int) -> None:
        with torch.no_grad():
            for step in range(steps):
                layer(tokens_of(rank, 100 + step))
        assert 0 < len(kept) <= 4, "plans of evaluation steps pile up"

    xs = [tokens_of(rank, step) for step in range(3)]
    wanted = one_by_one(xs)

    def right(numbers: list[int], one_at_a_time: list[dict]) -> None:
        for number, got in zip(numbers, one_at_a_time):
            assert_agree(got, wanted[number], f"microbatch {number}")

    def backward(one: Microbatch) -> dict:
        layer.zero_grad()
        one.backward()
        return one.tensors() | grads_of(layer)

    with dispatches() as seen:
        evaluate(3)
        one = Microbatch(layer, xs[0])
        evaluate(1)  # between a forward and its backward
        right([0], [backward(one)])
        assert seen == ["planned"] * 5 + ["reused"]
        del seen[:]
        flying = [Microbatch(layer, x) for x in xs[:2]]
        evaluate(50)  # so many that the plans of both are forgotten
        right([0, 1], [backward(one) for one in flying])
        assert seen == ["planned"] * 54
        del seen[:]
        # The same tokens as in training: a plan of the evaluation is found, and is as good.
        with torch.no_grad():
            layer(xs[2])
        flying = [Microbatch(layer, xs[2])]
        right([2], [backward(flying[0])])
        assert seen == ["planned"] * 2 + ["reused"]


@NOTHING_KEPT
def test_evaluation_in_between_confuses_nothing_and_takes_no_memory():
    megatron_pool(2).run(evaluate_in_between)


def infer_first(rank: int, settings: dict, nodes: dict) -> None:
    """Log-probabilities of the batch, then training steps on the same tokens: the routings are equal."""
    checkpointed = settings["recompute_granularity"] == "full"
    with environment(**nodes):
        use_layout(Layout(ep=2))
        xs = [tokens_of(rank, step) for step in range(2)]
        layer = make_layer(make_config(**settings))
        with torch.inference_mode():  # also the first use of the buffer
            inferred = [layer(x)[0] for x in xs]
        assert not layer.token_dispatcher._plans._kept
        results = []
        for x, output in zip(xs, inferred):
            layer.zero_grad()
            one = Microbatch(layer, x, checkpointed)
            one.backward()
            results.append(one.tensors() | grads_of(layer))
            assert torch.equal(results[-1]["output"], output)
        use_layout(Layout(ep=2))
        wanted = one_by_one(xs)
    for number in range(2):
        assert_agree(results[number], wanted[number], f"microbatch {number}")


@pytest.mark.parametrize("settings", [MOE, FULL], ids=["moe", "full"])
@pytest.mark.parametrize("nodes", [{}, dict(EP_DISPATCHER_RANKS_PER_NODE="1")], ids=["one node", "two nodes"])
def test_training_after_inference_on_the_same_tokens(settings, nodes):
    megatron_pool(2).run(infer_first, settings, nodes)


def keep_none(rank: int) -> None:
    use_layout(Layout(ep=2))
    other = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    for settings in ({}, other):
        layer = make_layer(make_config(**settings))
        with torch.no_grad():
            layer(tokens_of(rank))
        assert not layer.token_dispatcher._plans._kept
    # As many as a pipeline keeps in flight of one layer.
    from ep_dispatcher.integrations.megatron.recompute import RecomputePlans

    config = make_config(**MOE)
    for pipeline, group, most in [(1, None, 4), (4, None, 10), (2, 8, 18)]:
        config.pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage = pipeline, group
        assert RecomputePlans.make(config)._kept.maxlen == most


def test_without_recompute_no_plan_is_kept():
    megatron_pool(2).run(keep_none)
