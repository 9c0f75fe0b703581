"""Activation recompute uses the plans of its forward passes: without a host wait or a collective, in any order."""

import contextlib
import gc
import sys
import types
from functools import partial, partialmethod

import pytest
import torch
from conftest import engine_classes, exhaustive
from lib.megatron_layer import (
    assert_agree,
    assert_same_bits,
    checkpointed,
    environment,
    error_of,
    grads_of,
    make_config,
    make_layer,
    on_gpu,
    on_ranks,
    outcome,
    step,
    tokens_of,
)
from lib.megatron_recompute import MOE, Microbatch
from torch.utils._python_dispatch import TorchDispatchMode

import ep_dispatcher as ep
from ep_dispatcher import recompute
from ep_dispatcher.integrations.megatron import register, unregister
from ep_dispatcher.integrations.megatron.dispatcher.recompute import Checkpointed

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@contextlib.contextmanager
def dispatches():
    """A list that grows by "p" (planned) or "r" (reused) with every ``ep.dispatch``; backwards do not call it."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        dispatch = ep.dispatch

        def count(*args, handle=None, **kwargs):
            seen.append("p" if handle is None else "r")
            return dispatch(*args, handle=handle, **kwargs)

        patch.setattr(ep, "dispatch", count)
        yield seen


def plans_kept() -> int:
    gc.collect()
    return sum(type(one) is recompute.SavedPlan for one in gc.get_objects())


def one_by_one(xs) -> list[dict]:
    """Every microbatch alone through a layer without recompute."""
    layer = make_layer(make_config())
    return [outcome(layer, x) for x in xs]


EVEN = [[(0, 12), (1, 12), (2, 12)]] * 2
# The first two microbatches are the same tokens: their routings are equal.
TWINS = [[(0, 12), (0, 12), (2, 12)]] * 2
UNEVEN = [[(0, 12), (0, 12), (0, 12)], [(0, 12), (0, 7), (0, 3)]]
EMPTY_ON_RANK_1 = [[(0, 12), (1, 12), (2, 12)], [(0, 0), (0, 0), (0, 0)]]

GRANULARITY = pytest.mark.parametrize("settings", [MOE, FULL], ids=["moe", "full"])


@GRANULARITY
@pytest.mark.parametrize(
    "tokens, order, more",
    [
        (EVEN, "AaBbCc", {}),
        exhaustive(EVEN, "ABaCbc", {}),  # 1F1B
        (EVEN, "ABCcba", {}),
        exhaustive(TWINS, "ABCabc", {}),
        (UNEVEN, "ABCbca", {}),
        exhaustive(EMPTY_ON_RANK_1, "ABbaCc", {}),
        (UNEVEN, "ABCabc", dict(variable_seq_lengths=True)),  # nor do ranks agree on sizes in a recompute
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@on_ranks()
def test_a_recompute_uses_the_plan_of_its_forward_pass(rank, tokens, order, more, settings):
    """``order``: microbatches by letter, a capital for the forward pass."""
    xs = [tokens_of(rank, step, length) for step, length in tokens[rank]]
    wanted = one_by_one(xs)
    layer = make_layer(make_config(**settings, **more))
    found, flying = {}, {}
    with dispatches() as seen:
        for letter in order:
            number = "abc".index(letter.lower())
            if letter.isupper():
                flying[number] = Microbatch(layer, xs[number])
            else:
                found[number] = flying.pop(number).backward()
    assert seen == ["p" if letter.isupper() else "r" for letter in order]
    for number in range(len(xs)):
        assert_same_bits(found[number], wanted[number])
    assert not plans_kept(), "a plan is kept that nobody comes back for"


@on_ranks()
def test_in_a_checkpoint_of_the_caller_too(rank):
    from torch.utils.checkpoint import checkpoint

    x = tokens_of(rank)
    (wanted,) = one_by_one([x])
    layer = make_layer(make_config())
    run = partial(checkpoint, layer, use_reentrant=False, context_fn=ep.recompute_contexts)
    flying = Microbatch(layer, x, run)
    with dispatches() as seen:
        assert_same_bits(flying.backward(), wanted)
    assert seen == ["r"] and not plans_kept()


class Observer(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank_1", ["in parts", "observed", "changed"])
@on_ranks()
def test_parts_use_the_plans_of_their_forward_pass(rank: int, monkeypatch, rank_1: str):
    """The experts run dispatch and combine, in two parts of the tokens. Rank 1 may do so in other ways."""
    from lib.megatron_experts import OVERLAP, switched_on, two_parts

    xs = [tokens_of(rank, step) for step in range(2)]
    wanted = one_by_one(xs)
    has_plan = []

    def note(run, engine, request):
        has_plan.append(request.plan is not None)
        return run(engine, request)

    with contextlib.ExitStack() as stack:
        stack.enter_context(two_parts())
        stack.enter_context(switched_on(OVERLAP))
        layer = make_layer(make_config(**MOE))
        layer(xs[0])  # all ranks find that they can run so
        if rank == 1 and rank_1 == "observed":
            stack.enter_context(Observer())
        if rank == 1 and rank_1 == "changed":
            layer.experts.local_experts[0].linear_fc1.register_forward_hook(lambda *given: None)
        for kind in engine_classes():
            monkeypatch.setattr(kind, "dispatch", partialmethod(partial(note, kind.dispatch)))
        flying = [Microbatch(layer, x) for x in xs]
        assert has_plan == [False] * 4
        found = [one.backward(may_wait=True) for one in flying]  # loops over experts in float32 do
    assert has_plan == [False] * 4 + [True] * 8, "two dispatches of a recompute, and two of a backward"
    for number in range(2):
        assert_agree(found[number], wanted[number], f"microbatch {number}")


class Two(torch.nn.Module):
    """Two layers, the second one twice."""

    def __init__(self, settings: dict):
        super().__init__()
        self.layers = torch.nn.ModuleList(make_layer(make_config(**settings), number) for number in (3, 4))

    def forward(self, x):
        for layer in (*self.layers, self.layers[1]):
            x = layer(x)[0]
        return x, None


@pytest.mark.parametrize(
    "settings, outer", [({}, True), (MOE, False), (MOE, True)], ids=["around all", "of each", "both"]
)
@on_ranks()
def test_layers_in_one_checkpoint_and_checkpoints_in_checkpoints(rank: int, settings: dict, outer: bool):
    results = []
    for inner, is_around in (({}, False), (settings, outer)):
        layers = Two(inner)
        with dispatches() as seen:
            found = step(checkpointed(layers) if is_around else layers, tokens_of(rank))
        results.append(found | grads_of(layers))
    assert seen == ["p"] * 3 + ["r"] * 3 * (outer + bool(settings))  # each checkpoint around a layer runs it again
    assert_same_bits(results[1], results[0])


@GRANULARITY
@on_ranks()
def test_other_experts_in_a_recompute_are_an_error_that_names_layer_and_microbatch(rank: int, settings: dict):
    """On rank 1 alone: on a CPU at once, on a GPU from a later operation or check()."""
    layer = make_layer(make_config(**settings), layer_number=3)
    flying = [Microbatch(layer, tokens_of(rank, step)) for step in range(2)]
    buffer = layer.token_dispatcher.buffer
    flying.pop(0).backward()
    if rank == 1:
        layer.router.weight.data.neg_()

    def act() -> None:
        flying[0].backward()
        buffer.check()

    if rank == 1:
        text = error_of(act)
        buffer.destroy()  # so that rank 0 does not wait for this rank
        assert text.startswith("layer 3, microbatch 2, recompute: topk_idx["), text
    elif on_gpu():
        with contextlib.suppress(ep.PeerTimeoutError):  # unless rank 1 comes as far as check()
            act()
    else:
        assert error_of(act, ep.PeerTimeoutError).startswith("layer 3, microbatch 2: ")


@GRANULARITY
@on_ranks()
def test_another_number_of_tokens_in_a_recompute_is_an_error(rank: int, monkeypatch, settings: dict):
    layer = make_layer(make_config(**settings), layer_number=3)
    flying = Microbatch(layer, tokens_of(rank))
    route = layer.router.forward
    monkeypatch.setattr(layer.router, "forward", lambda *given, **options: [t[:-1] for t in route(*given, **options)])
    monkeypatch.setattr(type(layer.token_dispatcher), "dispatch_preprocess", without_checks)
    text = error_of(flying.backward)
    monkeypatch.undo()
    assert text.startswith("layer 3, microbatch 1, recompute: topk_idx is 23 tokens, but has to be 24 tokens"), text
    Microbatch(layer, tokens_of(rank)).backward()  # nothing was sent


def without_checks(dispatcher, hidden_states, routing_map, probs):
    dispatcher.hidden_shape = hidden_states.shape
    dispatcher.topk_idx = routing_map.long().topk(2)[1]
    return hidden_states.flatten(0, -2)[:-1], probs.gather(1, dispatcher.topk_idx)


@on_ranks()
def test_a_graph_that_writes_every_routing_to_the_same_memory(rank: int):
    """As Megatron's CUDA graphs do: the plan's own routing must survive the next microbatch."""
    layer = make_layer(make_config(**MOE))
    layer.token_dispatcher._keeps_copies = True
    flying = Microbatch(layer, tokens_of(rank))
    layer.token_dispatcher.topk_idx.fill_(-1)
    with dispatches() as seen:
        flying.backward()
    layer.token_dispatcher.buffer.check()
    assert seen == ["r"]


@on_ranks()
def test_evaluation_in_between_leaves_no_plans(rank: int):
    layer = make_layer(make_config(**MOE))
    xs = [tokens_of(rank, step) for step in range(3)]
    wanted = one_by_one(xs)

    def evaluate(steps: int) -> None:
        with torch.no_grad():
            for step in range(steps):
                layer(tokens_of(rank, step))  # the tokens of training, too

    evaluate(3)
    with torch.inference_mode():
        layer(xs[0])
    assert not plans_kept()
    with dispatches() as seen:
        flying = [Microbatch(layer, x) for x in xs]
        evaluate(50)
        assert plans_kept() == len(xs)
        for number, one in enumerate(flying):
            assert_same_bits(one.backward(), wanted[number])
            evaluate(1)
    assert seen == ["p"] * 53 + ["r", "p"] * 3


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
        results = [Microbatch(layer, x).backward() for x in xs]
        wanted = one_by_one(xs)
    for number in range(2):
        assert torch.equal(results[number]["output"], inferred[number])
        assert_agree(results[number], wanted[number], f"microbatch {number}")


@on_ranks()
def test_a_recompute_after_the_buffers_are_gone_plans_anew(rank: int):
    from ep_dispatcher.integrations.megatron import destroy_buffers

    layer = make_layer(make_config(**MOE))
    flying = Microbatch(layer, tokens_of(rank))
    destroy_buffers()
    with dispatches() as seen:
        flying.output.sum().backward()
    assert seen == ["p"] and layer.token_dispatcher._where == "layer 1, recompute after microbatch 1"


@on_ranks()
def test_without_recompute_no_plan_is_kept(rank: int):
    other = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    for settings in ({}, other):
        layer = make_layer(make_config(**settings))
        output = layer(tokens_of(rank).requires_grad_())[0]
        assert not plans_kept()
        output.sum().backward()


@on_ranks()
def test_transformer_engines_checkpoint_too(rank: int, monkeypatch):
    """Megatron calls it for FP8. It stands for itself here: reentrant, and it looks into modules."""
    te = types.ModuleType("transformer_engine.pytorch.distributed")
    given: list = []

    def checkpoint(function, *args, **kwargs):
        given.append(function)
        return function(*args, **kwargs)

    te.checkpoint = checkpoint
    pytorch = types.ModuleType("transformer_engine.pytorch")
    pytorch.distributed = te
    for module in (types.ModuleType("transformer_engine"), pytorch, te):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    unregister()
    assert any(text.startswith(f"{te.__name__}.checkpoint: ") for text in register().replaced)
    module = torch.nn.Identity()
    assert te.checkpoint(lambda x, *, y: x + y, 1, y=2) == 3 and te.checkpoint(module, 4) == 4
    unregister()
    assert te.checkpoint is checkpoint
    assert [type(one) for one in given] == [Checkpointed, torch.nn.Identity]
