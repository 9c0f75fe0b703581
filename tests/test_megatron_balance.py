"""--ep-dispatcher-redundant-experts-per-rank: Megatron's layer with copies of hot experts, and without."""

import contextlib

import pytest
import torch
from conftest import exhaustive
from lib.megatron_experts import EP4, GROUPED, GROUPED_GEMMS, MOE_ACT, make_grouped_layer, switched_on
from lib.megatron_layer import (
    assert_agree,
    checkpointed,
    environment,
    error_of,
    make_config,
    make_layer,
    on_ranks,
    outcome,
    tokens_of,
)
from lib.megatron_main_grad import GLOO_TAKES_LISTS, ddp_of, iterations
from lib.megatron_recompute import Microbatch

import ep_dispatcher as ep
from ep_dispatcher.balance import balancer

FLAG = "--ep-dispatcher-redundant-experts-per-rank"


@contextlib.contextmanager
def copies(redundant: int | None = 1):
    """Layers with experts in grouped GEMMs, and copies of any size. Yield what the rank prints."""
    with (
        switched_on(GROUPED_GEMMS) as printed,
        environment(redundant_experts_per_rank=redundant),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(balancer, "SMALLEST_COPY", 1)
        yield printed


def counted(layer) -> ep.statistics.BalanceStats:
    """What balancing has done in this layer's buffer since the first call, which begins to count."""
    buffer = layer.token_dispatcher.buffer
    buffer.check()
    stats = buffer.stats()
    assert stats is not None and stats.balance is not None
    return stats.balance


@pytest.mark.parametrize(
    "settings",
    [
        {},
        MOE_ACT,
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        exhaustive(dict(moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True)),
    ],
    ids=str,
)
@on_ranks(4, layout=EP4)
def test_outputs_and_gradients_are_those_without_copies(rank, settings):
    results = []
    for redundant in (None, 1):
        with copies(redundant):
            layer = make_grouped_layer(make_config(**GROUPED, **settings))
            run = checkpointed(layer) if settings.get("recompute_granularity") == "full" else layer
            Microbatch(layer, tokens_of(rank), run).backward(may_wait=True)
            if redundant:
                layer.token_dispatcher.buffer.stats()
            results.append(Microbatch(layer, tokens_of(rank, 1), run).backward(may_wait=True))
            if redundant:
                found = counted(layer)
                assert found.num_copies > 0 and found.imbalance_after < found.imbalance_before, found
    assert_agree(results[1], results[0])


@on_ranks(4, layout=EP4)
def test_several_microbatches_in_flight(rank):
    """As pipelines run them: each has the bits of itself alone."""
    with copies():
        layers = [make_layer(make_config(), number) for number in (1, 2)]

        def run(x):
            y = layers[0](x)[0]
            return layers[1](y)

        def backward(microbatch):
            for layer in layers:
                layer.zero_grad()
            found = microbatch.backward(may_wait=True)
            return found | {f"first {name}": p.grad for name, p in layers[0].named_parameters()}

        alone = [backward(Microbatch(layers[1], tokens_of(rank, number), run)) for number in range(3)]
        for order in ((1, 0, 2), (2, 1, 0)):
            flying = [Microbatch(layers[1], tokens_of(rank, number), run) for number in range(3)]
            for number in order:
                for name, one in backward(flying[number]).items():
                    assert one is alone[number][name] or torch.equal(one, alone[number][name]), (order, number, name)


@GLOO_TAKES_LISTS
@on_ranks(4, layout=EP4)
def test_main_grad(rank):
    """Gradients of copies are in main_grad before Megatron's DistributedDataParallel reduces it."""
    results = []
    for redundant in (None, 1):
        config = make_config(**GROUPED)
        config.gradient_accumulation_fusion = True
        with copies(redundant):
            layer = make_grouped_layer(config)
            results.append(iterations(ddp_of(layer, config), rank))
    assert_agree(results[1], results[0])


@on_ranks(4, layout=EP4)
def test_a_rank_capacity_factor_limits_rows_with_copies(rank):
    """The limit that is too small for the hot rank is enough with copies, and no host waits."""
    with copies(None):
        layer = make_layer(make_config())
        layer(tokens_of(rank))
    with copies():
        layer = make_layer(make_config())
        layer(tokens_of(rank))
        layer.token_dispatcher.buffer.stats()
        wanted = outcome(layer, tokens_of(rank, 1))
        found = counted(layer)
        before, after = (found.fullest_before, found.fullest_after)
        assert after < before
        factor = (after + before) / 2 * 4 / found.rows  # between the two
        with environment(rank_capacity_factor=factor, max_tokens_per_rank=24):
            assert_agree(outcome(layer, tokens_of(rank, 1)), wanted)


@on_ranks(4, layout=EP4)
def test_what_does_not_go_with_copies_is_refused_by_name(rank):
    for settings, reason in (
        (dict(delay_wgrad_compute=True), "delay_wgrad_compute"),
        (dict(overlap_moe_expert_parallel_comm=True), "overlap_moe_expert_parallel_comm"),
    ):
        with copies():
            config = make_config(**GROUPED)
            vars(config).update(settings)
            layer = make_grouped_layer(config)
            text = error_of(lambda layer=layer: layer(tokens_of(rank)))
            assert text.startswith("layer 1 cannot have redundant copies") and reason in text and FLAG in text, text
    with copies(), environment(experts="megatron"):
        assert "grouped GEMMs" in error_of(lambda: make_layer(make_config()))
    with copies(), environment(overlap=True):
        assert "--ep-dispatcher-overlap" in error_of(lambda: make_layer(make_config()))


@on_ranks(4, layout=EP4)
def test_one_rank_that_cannot_have_copies_is_an_error_of_all(rank):
    with copies():
        layer = make_layer(make_config())
        if rank == 2:
            layer.experts.local_experts[0].linear_fc1.register_forward_hook(lambda *given: None)
        text = error_of(lambda: layer(tokens_of(rank)))
        assert ("hooks" if rank == 2 else "on another rank") in text, text
    with copies():  # a change after the first pass
        layer = make_layer(make_config())
        layer(tokens_of(rank))
        layer.experts.local_experts[0].linear_fc1.register_forward_hook(lambda *given: None)
        text = error_of(lambda: layer(tokens_of(rank)), RuntimeError)
        assert text.startswith("layer 1 has had redundant copies of experts on all ranks"), text
