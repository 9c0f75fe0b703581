"""Experts in grouped GEMMs: what Megatron's own experts compute."""

import re
from dataclasses import replace

import pytest
import torch
from conftest import sparsely
from lib.experts import uninitialised_memory_is_nan
from lib.megatron_experts import (
    EP2,
    EP4,
    ETP2,
    GROUPED,
    GROUPED_GEMMS,
    MODES,
    MOE_ACT,
    OVERLAP,
    TWO_PARTS,
    family,
    make_grouped_layer,
    said,
    switched_on,
    two_parts,
)
from lib.megatron_layer import (
    EXPERTS,
    FFN,
    OURS,
    Case,
    assert_agree,
    assert_same_bits,
    environment,
    error_of,
    make_config,
    make_layer,
    on_ranks,
    outcome,
    run_layer,
    step,
    tokens_of,
)
from lib.megatron_layer_cases import CASES, UNEVEN
from lib.megatron_schedule import ONE_AFTER_THE_OTHER, OVERLAPPED, run_nodes

from ep_dispatcher.integrations.megatron.dispatcher import rank_capacity

# ---- SequentialMLP --------------------------------------------------------------------------------------------------

FAMILIES = ("gpt-oss", "clamped SwiGLU", "squared ReLU", "GELU, biases", "tanh GELU", "probabilities on the input")


OWN_CASES = {
    "one expert a rank": Case(settings=dict(num_moe_experts=4)),
    "other width of experts": Case(settings=dict(moe_ffn_hidden_size=24)),
    "limited rows": Case(environment=dict(rank_capacity_factor=4, max_tokens_per_rank=40)),
}
NAMES = ("plain", "no tokens", "capacity", "capacity padded", "router fp64", "recompute moe", "recompute full")
NAMES += ("latent", "shared expert", "shared expert overlapped", "shared expert overlapped, gate, capacity")
NAMES += ("two nodes", *OWN_CASES, "sequence parallel", "expert tensor parallel")  # one layout after the other
RUNS = [(name, OURS, mode) for name in NAMES for mode in (GROUPED_GEMMS, TWO_PARTS)]
RUNS += [(name, OURS, GROUPED_GEMMS) for name in FAMILIES]
RUNS += [("plain", "alltoall", GROUPED_GEMMS)]
RUNS += [(name, "allgather", GROUPED_GEMMS) for name in ("plain", "expert tensor parallel")]


@pytest.mark.parametrize("name, dispatcher, mode", sparsely(RUNS))
@on_ranks(4, None)
def test_a_layer_agrees_with_megatrons_own_experts(rank, name, dispatcher, mode):
    case = Case(settings=family(name), lengths=UNEVEN[EP4]) if name in FAMILIES else (CASES | OWN_CASES)[name]
    settings = {name: given for name, given in case.environment.items() if name != "rank_capacity_factor"}
    wanted = run_layer(rank, replace(case, environment=settings), dispatcher)  # Megatron's experts do not go with it
    with two_parts() as runs, switched_on(OVERLAP if mode == TWO_PARTS else mode) as printed:
        got = run_layer(rank, case, dispatcher)
    recomputed = case.checkpointed or case.settings.get("recompute_granularity") is not None
    assert len(runs) == (0 if mode != TWO_PARTS or case.layout == ETP2 else 2 * (1 + recomputed))
    assert_agree(got, wanted, "grouped and one by one")
    assert "1 of 1 MoE layers in grouped GEMMs" in said(printed) or rank > 0


@on_ranks()
def test_counts_stay_on_the_device(rank: int):
    """Experts that read counts on the host get them there, the others where the kernels are."""

    def counts_of(layer):
        dispatcher, seen = layer.token_dispatcher, []
        layer.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
        postprocess = dispatcher.dispatch_postprocess

        def look(*given):
            seen.extend((dispatcher.handle.rows_on_host, dispatcher.rows_per_expert))
            return postprocess(*given)

        dispatcher.dispatch_postprocess = look
        layer(tokens_of(rank))
        on_host, on_device, given = seen
        assert on_host is not None and on_host is not on_device
        return given is on_device, given is on_host

    assert counts_of(make_layer(make_config())) == (False, True)
    with switched_on():
        assert counts_of(make_layer(make_config())) == (True, False)
        assert counts_of(make_layer(make_config(activation_func=torch.nn.functional.relu))) == (False, True)


@on_ranks(4, EP4)
def test_limited_rows(rank: int):
    """Rows that arrive are as many as the limit, and those beyond the counts count for nothing."""
    case = Case(lengths=(12, 0, 3, 17), environment=dict(max_tokens_per_rank=40))
    x = tokens_of(rank, length=case.lengths[rank])

    def rows_and_counts(**settings):
        layer, seen = make_layer(make_config(**settings)), []
        layer.experts.register_forward_pre_hook(lambda module, inputs: seen.extend((len(inputs[0]), inputs[1])))
        layer(x)
        return seen

    wanted = run_layer(rank, case, OURS)
    with environment(rank_capacity_factor=2.5, **case.environment), switched_on():
        with uninitialised_memory_is_nan():
            assert_agree(run_layer(rank, case, OURS), wanted)
        rows, counts = rows_and_counts()
        assert rows == 200 > int(counts.sum()), "2.5 x 40 tokens x top-2"
        rows, counts = rows_and_counts(activation_func=torch.nn.functional.relu)
        assert rows == int(counts.sum()), "Megatron's own experts take no other rows"
    with environment(rank_capacity_factor=0.01, **case.environment), switched_on():
        text = error_of(rows_and_counts)
        assert text.startswith("max_recv_rows is too small") and "but has 1" in text, text


def test_the_limit_is_never_more_than_ranks_can_send():
    assert rank_capacity.max_rows_by_factor(100, 10, 4, 2, 8) == 4 * 10 * 2
    assert rank_capacity.max_rows_by_factor(100, 10, 4, 8, 2) == 4 * 10 * 2
    assert rank_capacity.max_rows_by_factor(1.01, 10, 4, 2, 8) == 21
    assert rank_capacity.max_rows_by_factor(1.01, 10, 4, 2, 8, 16) == 32
    assert rank_capacity.max_rows_by_factor(100, 10, 4, 2, 8, 16) == 208, "padding of 8 groups, rounded up"
    assert rank_capacity.max_rows_by_factor(4, 10, 4, 2, 8, 16) == 208, (
        "the ranks are enough for any routing, with padding"
    )


# ---- TEGroupedMLP, with stand-ins for its linear layers -------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, dispatcher, settings, mode",
    [
        (EP2, OURS, {}, GROUPED_GEMMS),
        (EP2, "alltoall", {}, GROUPED_GEMMS),
        (EP2, OURS, MOE_ACT, GROUPED_GEMMS),
        (EP2, OURS, MOE_ACT, TWO_PARTS),
        (ETP2, OURS, {}, GROUPED_GEMMS),
    ],
    ids=str,
)
@on_ranks(4)
def test_grouped_mlp_agrees_with_megatrons_own(rank, layout, dispatcher, settings, mode):
    layer = make_grouped_layer(make_config(dispatcher, **GROUPED))
    wanted = outcome(layer, tokens_of(rank))
    with switched_on(mode) as printed:
        layer = make_grouped_layer(make_config(dispatcher, **GROUPED, **settings))
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            got = outcome(layer, tokens_of(rank))
    # The weights of linear_fc2, and the rows between the GEMMs where they are not computed again.
    widths = [shape[-1] for shape in kept if len(shape) == 2]
    assert widths.count(FFN // layout.etp) == EXPERTS // layout.ep + (settings != MOE_ACT)
    assert_agree(got, wanted)
    assert said(printed).startswith("ep_dispatcher runs the experts of 1 of 1 MoE layers" * (rank == 0))
    assert sum("linear_fc1.weight" in name for name in got) == EXPERTS // layout.ep


@on_ranks()
def test_checkpoints_stay_megatrons(rank: int):
    """The module is Megatron's own still: parameters, their names, and what is saved of them."""

    def described(layer):
        saved = layer.experts.sharded_state_dict("experts.")
        parameters = {name: (tuple(p.shape), p.dtype, type(p)) for name, p in layer.named_parameters()}
        return parameters, list(layer.state_dict()), sorted(saved), type(layer.experts)

    wanted = described(make_layer(make_config()))
    with switched_on():
        layer = make_layer(make_config())
        before = dict(layer.named_parameters())
        step(layer, tokens_of(rank))
        assert described(layer) == wanted
        assert all(p is before[name] for name, p in layer.named_parameters())


@MODES
@on_ranks()
def test_frozen_experts_get_no_gradients(rank, mode):
    config = make_config(**GROUPED)
    with switched_on(mode):
        config.gradient_accumulation_fusion = True
        layer = make_grouped_layer(config)
        layer.experts.requires_grad_(False)
        assert step(layer, tokens_of(rank))["input gradient"].any()
        assert all(p.grad is None for p in layer.experts.parameters())
        with torch.no_grad():
            layer(tokens_of(rank))


@pytest.mark.parametrize("dispatcher, order", [(OURS, OVERLAPPED), ("alltoall", ONE_AFTER_THE_OTHER)], ids=str)
@on_ranks()
def test_nodes_of_the_overlap_schedule(rank: int, dispatcher: str, order: str):
    with switched_on() as printed:
        run_nodes(rank, dispatcher, {}, order)
    counts = re.findall(r"the experts of (\d+) of (\d+) MoE layers in grouped GEMMs", printed.getvalue())
    assert rank > 0 or counts and all(grouped == layers for grouped, layers in counts), printed.getvalue()


@on_ranks()
def test_a_layer_that_is_refused_runs_megatrons_way(rank: int):
    settings = dict(moe_expert_capacity_factor=1.3, moe_pad_expert_input_to_capacity=True)
    settings["activation_func"] = torch.nn.functional.relu
    case = Case(layout=EP2, settings=settings)
    wanted = run_layer(rank, case, OURS)
    with switched_on() as printed:
        assert_same_bits(run_layer(rank, case, OURS), wanted)
    assert said(printed).endswith("Megatron's own way: layer 1: activation_func is relu" * (rank == 0))
