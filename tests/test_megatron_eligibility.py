"""Experts in grouped GEMMs: which layers keep Megatron's own way, and how they say so."""

import operator

import torch
from lib.megatron_eligibility import hook
from lib.megatron_experts import GROUPED, TEColumnParallelGroupedLinear, make_grouped_layer, said, switched_on
from lib.megatron_layer import (
    assert_agree,
    environment,
    error_of,
    make_config,
    make_layer,
    on_ranks,
    step,
    tokens_of,
    with_graphs,
)

from ep_dispatcher.integrations.megatron import plugin, register, unregister
from ep_dispatcher.integrations.megatron.grouped_experts import eligibility, experts


class Wrapped(TEColumnParallelGroupedLinear):
    pass


FC1 = "experts.linear_fc1"


def promote_one(layer):
    for weight in layer.experts.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.bfloat16)
    weight.main_grad = weight.main_grad.float()


def transpose_one(layer):
    weight = layer.experts.linear_fc1.weight0
    weight.data = weight.data.t().contiguous().t()


def strange_wrapper(layer):
    layer.config.gradient_accumulation_fusion = True
    for weight in layer.experts.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False


def derive(layer):
    layer.experts.__class__ = type("InferenceGroupedMLP", (type(layer.experts),), {})


def clamp_fused(layer):
    layer.config.activation_func_clamp_value, layer.config.bias_activation_fusion = 7.0, True


def setting(name, value, owner="config"):
    return lambda layer: setattr(operator.attrgetter(owner)(layer), name, value)


REASONS = [
    (setting("activation_func", torch.nn.functional.relu), "activation_func is relu"),
    (setting("fp8", "e4m3"), "fp8 is e4m3 with the recipe delayed, not e4m3 with blockwise"),
    (clamp_fused, "activation_func_clamp_value is set, but the fused SwiGLU of this Megatron does not clamp"),
    (setting("moe_mlp_glu_interleave_size", 8), "moe_mlp_glu_interleave_size is 8"),
    (setting("use_te_activation_func", True), "use_te_activation_func is True"),
    (lambda layer: with_graphs(layer.config, "local", "moe"), "CUDA graphs contain the experts"),
    (derive, "its experts are InferenceGroupedMLP"),
    (setting("__class__", Wrapped, FC1), "its linear layers are Wrapped"),
    (setting("lora", torch.nn.Parameter(torch.zeros(1)), FC1), "TEColumnParallelGroupedLinear has other parameters"),
    (setting("te_quant_params", object(), FC1), "TEColumnParallelGroupedLinear has a quantization of its own"),
    (lambda layer: hook(layer.experts.linear_fc2), "TERowParallelGroupedLinear has hooks (forward_hooks)"),
    (setting("__fsdp_param__", True, f"{FC1}.weight0"), "Megatron's FSDP holds its weights"),
    (lambda layer: layer.experts.linear_fc2.double(), "its weights have different dtypes or devices"),
    (transpose_one, "linear_fc1.weight0 has shape [96, 32] and strides [1, 96], and is not contiguous"),
    (promote_one, "its main_grads have different dtypes"),
    (strange_wrapper, "its gradients do not belong to Megatron's DistributedDataParallel"),
]


FUSED_SWIGLU = "megatron.core.fusions.fused_bias_swiglu.weighted_bias_swiglu_impl"


@on_ranks()
def test_layers_that_keep_megatrons_way_are_named_with_their_reasons(rank: int, monkeypatch):
    monkeypatch.setattr(FUSED_SWIGLU, lambda x, bias, weights: None)
    with switched_on() as printed:
        layers = [make_grouped_layer(make_config("alltoall", **GROUPED), n) for n in range(1, len(REASONS) + 1)]
        for layer, (change, _) in zip(layers, REASONS):
            change(layer)
        layers += [make_layer(make_config("alltoall", activation_func=torch.tanh), number) for number in (17, 18)]
        layers += [make_layer(make_config("alltoall"), number) for number in (19, 20)]
        layers[18].config.fine_grained_activation_offloading, layers[18].config.offload_modules = True, ["moe_act"]
        assert [experts.decide_grouped(layer.experts) for layer in layers] == [False] * 19 + [True]
        line = said(printed)
    head, _, others = line.partition(". Megatron's own way: ")
    assert rank > 0 or head.startswith("ep_dispatcher runs the experts of 1 of 20 MoE layers in grouped GEMMs (")
    reasons = [f"layer {number}: {reason}" for number, (_, reason) in enumerate(REASONS, 1)]
    reasons += ["layer 17, 18: activation_func is tanh", "layer 19: offload_modules has moe_act"]
    for found, wanted in zip(others.split("; "), reasons, strict=True) if rank == 0 else ():
        assert found.startswith(wanted), (found, wanted)


@on_ranks()
def test_clamped_swiglu_runs_where_megatrons_fused_one_clamps_too(rank: int, monkeypatch):
    """In 0.20; in 0.16 the fused one ignores the limit."""
    monkeypatch.setattr(FUSED_SWIGLU, lambda x, bias, weights, clamp_value=None: None)
    with switched_on():
        layer = make_grouped_layer(make_config(**GROUPED))
        clamp_fused(layer)
        assert experts.decide_grouped(layer.experts)


@on_ranks()
def test_settings_of_newer_versions(rank: int):
    beside = "overlap_dispatch_backward_with_experts_wgrad"
    for kind, settings, reason in [
        ("TEGroupedMLP", {"moe_use_grouped_tensor": True}, "moe_use_grouped_tensor is True"),
        ("TEGroupedMLP", {"expert_gtp_weight_remat_size": 2}, "expert_gtp_weight_remat_size is 2"),
        ("TEGroupedMLP", {beside: True}, None),
        ("TEGroupedMLP", {beside: True, "cuda_graph_impl": "full_iteration"}, None),
        ("TEGroupedMLP", {beside: True, "cuda_graph_impl": "local"}, f"{beside} with CUDA graphs of layers"),
        ("SequentialMLP", {beside: True}, f"{beside} with SequentialMLP"),
    ]:
        config = make_config(**GROUPED)
        for name, value in settings.items():
            setattr(config, name, value)
        assert eligibility._why_not_settings(config, kind) == reason


@on_ranks()
def test_weights_are_gathered_before_they_are_used(rank: int):
    """Another program's pre-hook brings weights: the layer runs Megatron's way, which calls it."""
    config = make_config(**GROUPED)
    with switched_on():
        for make in (make_grouped_layer, make_layer):
            layer = make(config)
            wanted = step(layer, tokens_of(rank))
            for module in layer.experts.modules():
                kept = {p: p.data.clone() for p in module.parameters(recurse=False)}

                def bring(module, *unused, kept=kept):
                    for parameter, value in kept.items():
                        parameter.data.copy_(value)

                module.register_forward_pre_hook(bring)
                for parameter in kept:
                    parameter.data.fill_(float("nan"))
            assert_agree(step(layer, tokens_of(rank)), wanted)


@on_ranks()
def test_a_layer_goes_on_without_the_registration_and_an_unknown_megatron_is_refused(rank: int, monkeypatch):
    """The switch counts when a layer is built. Where Megatron is another, it is refused."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe.experts import SequentialMLP

    for wanted in ("auto", "grouped"):
        with switched_on(), environment(experts=wanted):
            layer = make_layer(make_config())
            grads = step(layer, tokens_of(rank))
        unregister()
        assert_agree(step(layer, tokens_of(rank)), grads)  # a layer that was built goes on, Megatron's way
        register()
    unregister()
    monkeypatch.setattr(SequentialMLP, "forward", lambda self, *given: None)
    monkeypatch.delattr(DistributedDataParallel, "_make_backward_post_hook")
    register(experts="auto")
    text = error_of(lambda: make_layer(make_config()), plugin.UnknownMegatronError)
    assert "SequentialMLP.forward takes ['self', 'given']" in text and "_make_backward_post_hook" in text
    config = make_config()
    config.ep_dispatcher_experts = "megatron"
    make_layer(config)
    unregister()
