"""Layers in flight, as Megatron's schedules run them."""

import types
from functools import partial

import torch

from lib.megatron_layer import (
    OURS,
    SEQUENCE,
    assert_agree,
    device,
    difference,
    grads_of,
    make_config,
    random,
    set_weights,
    step,
    tokens_of,
)

WHOLE = dict(bias_dropout_fusion=False, masked_softmax_fusion=False, hidden_dropout=0.0, attention_dropout=0.0)


def causal_mask():
    return torch.ones(1, 1, SEQUENCE, SEQUENCE, device=device()).triu(1).bool()


def make_transformer_layer(dispatcher: str, settings: dict):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    config = make_config(dispatcher, **WHOLE, **settings)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer = build_module(spec, config=config, layer_number=1)
    set_weights(layer, layer.mlp)
    return layer.to(device())


def nodes_of(layer) -> list:
    """A layer's nodes for one microbatch: attention and router, dispatch, experts, combine."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

    unused = "rotary_pos_emb rotary_pos_cos rotary_pos_sin packed_seq_params sequence_len_offset context padding_mask"
    chunk = types.SimpleNamespace(
        attention_mask=causal_mask(),
        model=types.SimpleNamespace(decoder=types.SimpleNamespace(final_layernorm=None)),
        **dict.fromkeys(unused.split()),
    )
    stream = torch.cuda.current_stream
    plan = TransformerLayerSchedulePlan(layer, torch.cuda.Event(), chunk, stream(), stream(), {})
    first = getattr(plan, "attn", None) or plan.pre_dispatch_computation  # 0.19 renamed it
    return [first, plan.moe_dispatch, plan.mlp, plan.moe_combine]


class Flight:
    """A microbatch on its way through the nodes of a layer, one node a step."""

    def __init__(self, layer, x):
        self.nodes, self.x, self.value, self.grad = nodes_of(layer), x.clone().requires_grad_(), None, None

    def forward(self, number: int) -> None:
        self.value = self.nodes[number].forward(self.x if number == 0 else self.value)
        if number == 3:
            self.output, self.value = self.value.detach().clone(), None

    def backward(self, number: int) -> None:
        self.grad = self.nodes[number].backward(loss_grad(self.x) if number == 3 else self.grad)


def loss_grad(x):
    return random(*x.shape, seed=7)


def plain(layer, xs) -> dict:
    """The whole layer on one microbatch after the other."""
    layer.zero_grad()
    run, results = partial(layer, attention_mask=causal_mask()), {}
    for number, x in enumerate(xs):
        results |= {f"{name} {number}": one for name, one in step(run, x.clone()).items()}
    return results | grads_of(layer)


# A forward step F or a backward step B of microbatch 0, 1 or 2, with the node's number. As in Megatron's
# TransformerLayerSchedulePlan.run, which runs the backward of one microbatch beside the forward of another.
ONE_AFTER_THE_OTHER = "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0 1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"

OVERLAPPED = "0F0 0F1 0F2 0F3 1F0 0B3 1F1 0B2 1F2 0B1 1F3 0B0 2F0 1B3 2F1 1B2 2F2 1B1 2F3 1B0 2B3 2B2 2B1 2B0"


def run_nodes(rank: int, dispatcher: str, settings: dict, order: str) -> None:
    layer = make_transformer_layer(dispatcher, settings)
    steps = order.split()
    xs = [tokens_of(rank, number) for number in range(1 + max(int(one[0]) for one in steps))]
    wanted = plain(layer, xs)
    if dispatcher == OURS:  # first of all the whole layer is right
        for name, tensor in plain(make_transformer_layer("alltoall", settings), xs).items():
            assert difference(wanted[name], tensor) < 1e-5, name
        assert layer.mlp.token_dispatcher.layer_number == 1
    layer.zero_grad()
    flights = [Flight(layer, x) for x in xs]
    for flight, direction, node in steps:
        run = flights[int(flight)].forward if direction == "F" else flights[int(flight)].backward
        run(int(node))
    got = {f"output {n}": f.output for n, f in enumerate(flights)}
    got |= {f"input gradient {n}": f.grad for n, f in enumerate(flights)}
    assert_agree(got | grads_of(layer), wanted)
