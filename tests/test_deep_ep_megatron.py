"""Megatron-core's own "deepep" backend, unmodified, with our module in DeepEP's place."""

import pytest
import torch
from conftest import exhaustive
from lib.deep_ep_case import install
from lib.megatron_layer import (
    Layout,
    assert_agree,
    device,
    grads_of,
    make_config,
    make_layer,
    random,
    tokens_of,
    use_layout,
)

from ep_dispatcher.tools.testing import RankPool

RANKS, STEPS = 4, 3
FLEX = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
BOTH = ("alltoall", "allgather")
CASES = {
    "ep4": (Layout(ep=4), dict(), BOTH),
    "ep2-tp2-etp2": (Layout(ep=2, tp=2, etp=2), dict(), ("allgather",)),  # gloo gathers no uneven rows for alltoall
    "drop": (Layout(ep=4), dict(moe_expert_capacity_factor=0.5), BOTH),
    "recompute": (Layout(ep=4), dict(recompute_granularity="selective", recompute_modules=["moe"]), BOTH),
    "fp64 router": (Layout(ep=4), dict(moe_router_dtype="fp64", moe_router_topk=3), BOTH),
}
FIRST = ("ep4", "ep2-tp2-etp2")


@pytest.fixture(scope="module")
def pool():
    """Ranks of this file alone: Megatron looks for deep_ep once, when it is imported."""
    with RankPool(RANKS, timeout_s=120) as pool:
        pool.run(install)  # of another file: this one imports Megatron
        yield pool


def train(rank: int, layout: Layout, settings: dict, dispatcher: str) -> dict[str, torch.Tensor | None]:
    """A few steps of gradient descent on an MoE layer: losses, outputs, gradients of inputs and weights."""
    use_layout(layout)
    from ep_dispatcher.integrations.megatron import unregister

    unregister()  # Megatron as it is
    from megatron.core.transformer.moe import fused_a2a

    assert fused_a2a.Buffer.__module__ == "ep_dispatcher.integrations.deep_ep.buffer"
    if dispatcher == "deepep":
        layer = make_layer(make_config("alltoall", **settings, **FLEX))
        assert type(layer.token_dispatcher._comm_manager).__name__ == "_DeepepManager"
    else:
        layer = make_layer(make_config(dispatcher, **settings))
    results, target = {}, random(1, seed=7)
    for step in range(STEPS):
        x = tokens_of(rank, step).requires_grad_()
        output = layer(x)[0]
        loss = (output - target).square().mean()
        layer.zero_grad()
        loss.backward()
        results |= {f"loss {step}": loss.detach(), f"output {step}": output.detach(), f"input gradient {step}": x.grad}
        results |= {f"gradient {step} of {name}": grad for name, grad in grads_of(layer).items()}
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.1 * parameter.grad
    fused_a2a._buffer = None  # of this layout's group, which the next layout destroys
    assert output.device.type == device().type
    return results


@pytest.mark.parametrize("name", [*FIRST, *(exhaustive(name) for name in CASES if name not in FIRST)])
def test_trains_as_with_megatrons_other_dispatchers(pool, name):
    layout, settings, references = CASES[name]
    ours = pool.run(train, layout, settings, "deepep")
    for other in references:
        theirs = pool.run(train, layout, settings, other)
        for rank in range(RANKS):
            assert_agree(ours[rank], theirs[rank], f"rank {rank}, deepep and {other}")
    assert len({float(ours[0][f"loss {step}"]) for step in range(STEPS)}) == STEPS
