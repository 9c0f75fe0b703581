"""Experts in grouped GEMMs: gradients of weights, where and when Megatron looks for them."""

import gc

import pytest
import torch
from lib.megatron_experts import GROUPED, GROUPED_GEMMS, MODES, TWO_PARTS, make_grouped_layer, switched_on
from lib.megatron_layer import assert_agree, grads_of, make_config, on_ranks, outcome, step, tokens_of
from lib.megatron_main_grad import GLOO_TAKES_LISTS, IN_BUCKETS, ddp_of, iterations, main_grads


@pytest.mark.parametrize(
    "settings, mode",
    [
        pytest.param({}, GROUPED_GEMMS, marks=GLOO_TAKES_LISTS),
        pytest.param(dict(overlap_grad_reduce=False), GROUPED_GEMMS, marks=GLOO_TAKES_LISTS),
        (IN_BUCKETS, GROUPED_GEMMS),
        (IN_BUCKETS, TWO_PARTS),
        pytest.param(IN_BUCKETS | dict(overlap_param_gather=True), GROUPED_GEMMS, marks=GLOO_TAKES_LISTS),
    ],
    ids=["overlapped", "at the end", "several buckets", "two parts", "weights gathered meanwhile"],
)
@on_ranks(4)
def test_gradients_reach_main_grad_and_are_reduced(rank, settings, mode):
    """Megatron's hooks see every weight's gradient once, and 2 ranks, which share it, reduce it."""
    config = make_config(**GROUPED)
    wanted = iterations(ddp_of(make_grouped_layer(config), config, **settings), rank)
    with switched_on(mode):
        config.gradient_accumulation_fusion = True
        layer = make_grouped_layer(config)
        ddp = ddp_of(layer, config, **settings)
        accumulated: list = []
        for weight in layer.experts.parameters():
            weight.register_post_accumulate_grad_hook(accumulated.append)
        got = iterations(ddp, rank, overwritten=list(layer.experts.parameters()))
        assert not accumulated, "autograd has nothing to do with these weights"
        assert all(w.grad_added_to_main_grad for w in layer.experts.parameters())
        assert not layer.router.weight.grad_added_to_main_grad
    assert_agree(got, wanted)
    assert all(got[name].any() for name in got if "experts" in name)


@pytest.mark.parametrize("fused", [True, False])
@MODES
@on_ranks(4)
def test_delayed_gradients_of_weights_wait_for_backward_dw(rank, mode, fused):
    config = make_config(**GROUPED)
    wanted = iterations(ddp_of(make_grouped_layer(config), config, **IN_BUCKETS), rank)
    with switched_on(mode):
        config.delay_wgrad_compute, config.gradient_accumulation_fusion = True, fused
        layer = make_grouped_layer(config)
        ddp = ddp_of(layer, config, delay_wgrad_compute=True, **IN_BUCKETS)
        last = layer.experts.linear_fc2.weight0

        def between():
            before = last.main_grad.clone()
            layer.backward_dw()
            assert not torch.equal(last.main_grad, before), "written by backward_dw"

        got = iterations(ddp, rank, between)
    assert_agree(got, wanted)


class BesideDispatch(torch.autograd.Function):
    """What a MoELayer of 0.18 and newer does before its dispatch, with overlap_dispatch_backward_with_experts_wgrad."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.layer.backward_dw()
        return None, grad


@MODES
@on_ranks()
def test_gradients_of_weights_beside_the_backward_of_dispatch(rank, mode):
    """Experts that run the dispatch themselves write them at once: its backward runs under their GEMMs."""
    config = make_config(**GROUPED)
    wanted = iterations(ddp_of(make_grouped_layer(config), config, **IN_BUCKETS), rank)
    with switched_on(mode):
        config.overlap_dispatch_backward_with_experts_wgrad = config.gradient_accumulation_fusion = True
        layer = make_grouped_layer(config)
        send, backward_dw, last, delays = layer.dispatch, layer.backward_dw, layer.experts.linear_fc2.weight0, []

        def look(*given, **options):
            before = last.main_grad.clone()
            backward_dw(*given, **options)
            delays.append(not torch.equal(last.main_grad, before))

        layer.backward_dw = look
        if not hasattr(layer, "setup_delayed_wgrad_for_dispatch_backward_overlap"):
            layer.dispatch = lambda x, probs: send(BesideDispatch.apply(layer, x), probs)
        got = iterations(ddp_of(layer, config, **IN_BUCKETS), rank)
        assert delays == [mode == GROUPED_GEMMS] * 4
    assert_agree(got, wanted)


@MODES
@on_ranks()
def test_delayed_gradients_of_several_microbatches_come_oldest_first(rank, mode):
    """As in 1F1B; without a DistributedDataParallel they are in .grad."""
    config = make_config(**GROUPED)
    xs = [tokens_of(rank, number) for number in range(3)]
    layer = make_grouped_layer(config)
    oldest = outcome(layer, xs[0])["experts.linear_fc1.weight0"]
    for x in xs[1:]:
        step(layer, x.clone())
    wanted = grads_of(layer)
    with switched_on(mode):
        config.delay_wgrad_compute = True
        layer = make_grouped_layer(config)
        for x in xs[:2]:
            step(layer, x.clone())
        assert layer.experts.linear_fc1.weight0.grad is None
        layer.backward_dw()
        torch.testing.assert_close(layer.experts.linear_fc1.weight0.grad, oldest)
        step(layer, xs[2].clone())
        for _ in range(3):  # at the last one nothing waits any more
            layer.backward_dw()
        assert_agree(grads_of(layer), wanted)


@MODES
@on_ranks()
def test_main_grad_without_a_wrapper(rank, mode):
    wanted = main_grads(make_grouped_layer(make_config(**GROUPED)), tokens_of(rank), tokens_of(rank, 1))
    with switched_on(mode):
        layer = make_grouped_layer(make_config(**GROUPED))
        layer.config.gradient_accumulation_fusion = True
        got = main_grads(layer, tokens_of(rank), tokens_of(rank, 1))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@on_ranks()
def test_main_grad_may_be_replaced_or_move(rank):
    """The next backward finds it: its memory was freed and allocated again, or it is another tensor."""
    with switched_on() as printed:
        config = make_config(**GROUPED)
        config.gradient_accumulation_fusion = True
        layer = make_grouped_layer(config)
        weights = list(layer.experts.parameters())
        memory = torch.zeros(sum(weight.numel() for weight in weights))
        for weight, part in zip(weights, memory.split([weight.numel() for weight in weights])):
            weight.main_grad = part.view(weight.shape)
        step(layer, tokens_of(rank))
        before = memory.clone()
        memory.untyped_storage().resize_(0)
        in_the_way = torch.ones_like(before)
        memory.untyped_storage().resize_(before.nbytes)
        memory.zero_()
        step(layer, tokens_of(rank))
        assert before.any() and torch.equal(memory, before) and (in_the_way == 1).all()
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight)
        step(layer, tokens_of(rank))
        assert torch.equal(torch.cat([weight.main_grad.flatten() for weight in weights]), before)
        assert torch.equal(memory, before)
        assert rank or "1 of 1 MoE layers" in printed.getvalue()


@on_ranks()
def test_a_layer_may_be_dropped_before_its_backward(rank: int):
    """The graph has all that the gradients need."""
    config = make_config(**GROUPED)
    config.gradient_accumulation_fusion = True
    with switched_on():
        layer = make_grouped_layer(config)
        weights = list(layer.experts.parameters())
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight)
        out = layer(tokens_of(rank))[0].sum()
        del layer
        gc.collect()
        out.backward()
    assert any(weight.main_grad.any() for weight in weights)
