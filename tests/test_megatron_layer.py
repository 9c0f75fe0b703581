"""The same MoELayer of Megatron-core with our dispatcher and with its own: outputs and every gradient agree."""

import itertools
from collections import defaultdict

import pytest
import torch
from conftest import sparsely
from lib.megatron_layer import (
    EXPERTS,
    OURS,
    Case,
    assert_agree,
    error_of,
    make_config,
    make_layer,
    on_ranks,
    outcome,
    random,
    run_layer,
    tokens_of,
)
from lib.megatron_layer_cases import (
    ALLGATHER,
    ALLTOALL,
    CAPACITY,
    CASES,
    EP2,
    EP4,
    ETP2,
    GATE,
    PAD,
    RECOMPUTE,
    SHARED,
    TP2_EP4,
    TP2_ETP2,
    TWO_NODES,
    UNEVEN,
)


def compare(rank: int, case: Case) -> None:
    ours = run_layer(rank, case, OURS)
    for reference in case.references:
        assert_agree(ours, run_layer(rank, case, reference), f"{OURS} and {reference}")


# One layout after the other: forming groups takes longer than most cases.
@pytest.mark.parametrize("name", sparsely(sorted(CASES, key=lambda name: str(CASES[name].layout))))
@on_ranks(4, None)
def test_layer_agrees_with_megatrons_own_dispatchers(rank, name):
    compare(rank, CASES[name])


@on_ranks(4, EP4)
def test_megatrons_own_router_takes_no_empty_tensor(rank: int):
    """So a rank without tokens needs another router. Where this fails, docs/megatron.md can promise more."""
    layer = make_layer(make_config(), own_router=True)
    layer.router(tokens_of(rank, length=1))
    assert "0 elements" in error_of(lambda: layer.router(tokens_of(rank, length=0)), RuntimeError)


def grid() -> list[Case]:
    """Every 37th possible combination: each pair of values of two features that can go together is among them."""
    cases = []
    for layout, topk, capacity, shared, recompute, uneven, dtype, nodes in itertools.product(
        (EP4, EP2, TP2_EP4, ETP2, TP2_ETP2),
        (1, 2, 5),
        ({}, CAPACITY, PAD),
        ({}, SHARED, GATE),
        ({}, RECOMPUTE),
        (False, True),
        (None, "fp32", "fp64"),
        ({}, TWO_NODES),
    ):
        padded, etp = capacity is PAD, layout.etp > 1
        if uneven and (padded or etp or (layout.tp > 1 and shared)):
            continue  # Megatron's own dispatchers need equal numbers of tokens there
        if etp and shared is GATE and not padded:
            continue  # no reference: overlap is for alltoall alone
        settings = dict(moe_router_topk=topk, moe_router_pre_softmax=topk == 1, moe_router_dtype=dtype)
        references = ALLGATHER if etp and not padded else ALLTOALL
        lengths = UNEVEN[layout] if uneven else None
        cases.append(Case(layout, settings | capacity | shared | recompute, references, lengths, nodes))
    return cases[::37]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", grid(), ids=lambda case: f"{case.layout}")
@on_ranks(4, None)
def test_combinations_agree(rank, case):
    compare(rank, case)


def squared_error(result, exact) -> dict[str, float]:
    """Summed over all tensors of a kind, relative to the squares of the exact ones."""
    errors, squares = defaultdict(float), defaultdict(float)
    for name, wanted in exact.items():
        kind = next((k for k in ("output", "input", "router", "local_experts", "shared") if k in name), name)
        got = result[name]
        if wanted is not None:
            errors[kind] += float((got.double() - wanted.double()).square().sum())
            squares[kind] += float(wanted.double().square().sum())
    return {kind: errors[kind] / squares[kind] for kind in errors}


@pytest.mark.parametrize("settings", [{}, GATE, RECOMPUTE | CAPACITY], ids=["plain", "gate", "recompute-capacity"])
@on_ranks(4, EP4)
def test_bfloat16_is_no_further_from_float32_than_megatrons_own(rank, monkeypatch, settings):
    case = Case(settings=settings | dict(moe_router_dtype="fp32", moe_router_topk=4))
    bfloat16 = dict(bf16=True, params_dtype=torch.bfloat16)
    # What differs then is arithmetic alone: float32 weights and tokens that are bfloat16 numbers, the same routing.
    monkeypatch.setattr("lib.megatron_layer.random", lambda *shape, **given: random(*shape, **given).bfloat16().float())
    exact = run_layer(rank, case, "alltoall")
    runs = [run_layer(rank, case, dispatcher, **bfloat16) for dispatcher in (OURS, "alltoall")]
    ours, theirs = (squared_error(run, exact) for run in runs)
    assert {"output", "input", "router", "local_experts"} <= ours.keys()
    for kind in ours:
        # Two roundings of the same numbers by different orders: alike on average. 1e-7 is a hundredth of one unit.
        assert ours[kind] <= 1.1 * theirs[kind] + 1e-7, f"{kind}: ours {ours[kind]:.1e}, theirs {theirs[kind]:.1e}"
        assert ours[kind] < 1e-3


class RecomputedActivation(torch.nn.Module):
    """What TEGroupedMLP, which needs Transformer Engine, does with recompute_modules=["moe_act"]."""

    def __init__(self, experts):
        super().__init__()
        self.local_experts = experts.local_experts

    def forward(self, rows, tokens_per_expert, probs):
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

        split = tokens_per_expert.tolist()
        assert rows.shape[0] == sum(split) and probs.shape == rows.shape[:1]
        wide = [e.linear_fc1(r)[0] for e, r in zip(self.local_experts, rows.split(split))]
        checkpoint = CheckpointWithoutOutput(fp8=None)

        def activate(wide, probs):
            gate, up = wide.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up * probs.unsqueeze(-1)

        inner = checkpoint.checkpoint(activate, torch.cat(wide), probs)
        output = torch.cat([e.linear_fc2(r)[0] for e, r in zip(self.local_experts, inner.split(split))])
        checkpoint.discard_output_and_register_recompute(output)
        return output, None


@pytest.mark.parametrize("lengths", [(12, 12, 12, 12), (12, 0, 5, 1)])
@on_ranks(4, EP4)
def test_recompute_of_the_activation(rank: int, lengths: tuple[int, ...]):
    results = []
    for recompute in (False, True):
        layer = make_layer(make_config())
        if recompute:
            layer.experts = RecomputedActivation(layer.experts)
        results.append(outcome(layer, tokens_of(rank, length=lengths[rank])))
    assert_agree(results[1], results[0])


GROUPED_TENSOR = "moe_use_grouped_tensor"  # 0.20; older versions get its answers


@pytest.mark.parametrize("recipe,multiple", [("delayed", 16), ("mxfp8", 32), (GROUPED_TENSOR, 256)])
@on_ranks(4, EP4)
def test_rows_are_padded_for_experts_that_need_it(rank: int, monkeypatch, recipe: str, multiple: int):
    from megatron.core.transformer.moe import moe_utils

    config = make_config()
    monkeypatch.setenv("EP_DISPATCHER_MAX_TOKENS_PER_RANK", "32")
    if recipe != GROUPED_TENSOR:
        config.fp8, config.fp8_recipe = "e4m3", recipe
    elif not hasattr(config, GROUPED_TENSOR):
        monkeypatch.setattr(moe_utils, "get_align_size_for_quantization", lambda config: 256)
        monkeypatch.setattr(moe_utils, "skip_routed_expert_padding", None, raising=False)
    setattr(config, GROUPED_TENSOR, recipe == GROUPED_TENSOR)
    dispatcher = make_layer(config).token_dispatcher
    assert dispatcher.expert_alignment == multiple
    x = tokens_of(rank)
    routing_map = torch.zeros(x[..., 0].numel(), EXPERTS, dtype=torch.bool, device=x.device)
    routing_map[:, [0, 5]] = True  # rank 0 and rank 2, two experts without tokens among theirs
    probs = torch.rand(routing_map.shape, requires_grad=True, device=x.device)
    sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map, probs))
    rows, counts, permuted_probs = dispatcher.dispatch_postprocess(*sent)
    assert rows is sent[0] and permuted_probs is sent[1], "postprocess copies nothing"
    assert dispatcher.combine_preprocess(rows) is rows
    filled = -(-96 // multiple) * multiple
    assert counts.dtype == torch.int64 and counts.tolist() == {0: [filled, 0], 2: [0, filled]}.get(rank, [0, 0])
    assert (counts is dispatcher.rows_per_expert) == (recipe == GROUPED_TENSOR), "which are counts on the device"
    assert rows.shape[0] == permuted_probs.shape[0] == int(counts.sum())
    assert permuted_probs.requires_grad and permuted_probs.dtype == torch.float32
    dispatcher.token_combine(rows)
    # 97 rows: one token more on the last rank
    length = 25 if rank == 3 else 24
    x, routing_map = x.flatten(0, 1), routing_map[:1].expand(length, -1)
    probs = torch.rand(length, EXPERTS, device=x.device) + 0.5
    x = torch.cat([x, x[:1] + 1])[:length]
    sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map, probs))
    rows, counts, permuted_probs = dispatcher.dispatch_postprocess(*sent)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
    filled = -(-97 // multiple) * multiple
    assert counts.tolist() == {0: [filled, 0], 2: [0, filled]}.get(rank, [0, 0])
    if rank in (0, 2):
        assert (rows[:97] != 0).any(1).all() and not rows[97:].any()
        assert (permuted_probs[:97] > 0).all() and not permuted_probs[97:].any()
    assert torch.equal(output, 2 * x)
