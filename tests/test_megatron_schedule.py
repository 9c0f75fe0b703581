"""Schedules that cut a layer into nodes and run microbatches through them in turn (1F1B overlap)."""

import itertools

import pytest
from lib.megatron_layer import (
    OURS,
    assert_agree,
    grads_of,
    make_config,
    make_layer,
    on_ranks,
    tokens_of,
)
from lib.megatron_schedule import ONE_AFTER_THE_OTHER, OVERLAPPED, loss_grad, run_nodes

SETTINGS = [
    {},
    dict(moe_shared_expert_intermediate_size=40),
    dict(moe_expert_capacity_factor=1.3, moe_pad_expert_input_to_capacity=True, moe_router_dtype="fp32"),
]


ALL_FORWARD_FIRST = "0F0 0F1 0F2 0F3 1F0 1F1 1F2 1F3 2F0 2F1 2F2 2F3 0B3 0B2 0B1 0B0 1B3 1B2 1B1 1B0 2B3 2B2 2B1 2B0"


ORDERS = [ONE_AFTER_THE_OTHER, ALL_FORWARD_FIRST, OVERLAPPED]


@pytest.mark.parametrize(
    "dispatcher, settings, order",
    [*itertools.product([OURS], SETTINGS, ORDERS), ("alltoall", {}, ONE_AFTER_THE_OTHER)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
@on_ranks()
def test_nodes_of_the_overlap_schedule_agree_with_the_whole_layer(rank, dispatcher, settings, order):
    """Megatron's own dispatcher too: a failure is not that of what stands for streams and events on a CPU."""
    run_nodes(rank, dispatcher, settings, order)


@on_ranks()
def test_inputs_that_are_needed_are_not_freed(rank: int):
    """What the schedule frees: nothing that ours, the router or the shared experts still need."""
    from megatron.core.models.gpt import fine_grained_callables as owner

    if not hasattr(owner, "should_free_input"):  # 0.19
        from megatron.core.models.common import utils as owner
    own = owner.should_free_input.__wrapped__
    rest = [4] if own.__code__.co_argcount == 4 else []

    def freed(free, dispatcher: str) -> list[str]:
        names = ("moe_dispatch", "mlp", "moe_combine")
        return [name for name in names if free(name, True, make_config(dispatcher), *rest)]

    assert freed(owner.should_free_input, OURS) == ["moe_combine"]
    assert freed(owner.should_free_input, "alltoall") == freed(own, "alltoall")


@on_ranks()
def test_a_partial_graph_that_ends_after_preprocess(rank: int):
    """A graph that ends after preprocess: its outputs and the attributes named come back, and the rest runs on."""
    layer = make_layer(make_config(**SETTINGS[1]))
    dispatcher = layer.token_dispatcher
    results = []
    for replayed in (False, True):
        layer.zero_grad()
        x = tokens_of(rank).requires_grad_()
        probs, routing_map = layer.router(x)
        tokens, weights = dispatcher.dispatch_preprocess(x, routing_map, probs)
        if replayed:
            captured = {name: getattr(dispatcher, name).detach().clone() for name in dispatcher.cudagraph_attrs}
            other = tokens_of(rank, 9)
            dispatcher.dispatch_preprocess(other, *reversed(layer.router(other)))  # in between, as another microbatch
            for name, value in captured.items():
                setattr(dispatcher, name, value)
        rows, counts, permuted_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(tokens, weights))
        output = dispatcher.combine_preprocess(layer.experts(rows, counts, permuted_probs)[0])
        output = dispatcher.combine_postprocess(dispatcher.token_combine(output))
        (output * loss_grad(x)).sum().backward()
        results.append({"output": output.detach(), "input gradient": x.grad} | grads_of(layer))
    assert dispatcher.cudagraph_attrs and results[0]["router.weight"].any()
    assert_agree(results[1], results[0])
