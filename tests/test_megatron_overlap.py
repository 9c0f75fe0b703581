"""Experts that run dispatch and combine in two parts of the tokens (--ep-dispatcher-overlap).

On a CPU the parts take their steps in turn: what is tested there is the way of the tokens through Megatron's six steps.
test_megatron_experts.py and test_megatron_main_grad.py run their layers so too.
"""

import contextlib

import pytest
import torch
from conftest import exhaustive
from lib import megatron_schedule
from lib.megatron_experts import (
    EP2,
    GROUPED,
    GROUPED_GEMMS,
    MOE_ACT,
    OVERLAP,
    make_grouped_layer,
    note_parts,
    parts,
    said,
    switched_on,
    two_parts,
)
from lib.megatron_layer import (
    OURS,
    Case,
    assert_agree,
    assert_same_bits,
    difference,
    environment,
    error_of,
    make_config,
    make_layer,
    on_gpu,
    on_ranks,
    run_layer,
    step,
    tokens_of,
)
from lib.megatron_main_grad import GLOO_TAKES_LISTS, ddp_of, iterations
from lib.megatron_recompute import MOE, Microbatch
from lib.megatron_schedule import OVERLAPPED, run_nodes
from torch.utils.flop_counter import FlopCounterMode

from ep_dispatcher.integrations.megatron import register, unregister
from ep_dispatcher.integrations.megatron.grouped_experts import experts
from ep_dispatcher.moe import overlap

HEAD = "ep_dispatcher runs dispatch and combine under the experts' GEMMs in"
HEAD_OF_ONE_PART = "ep_dispatcher runs the last combine of the backward under the experts' GEMMs in"


@pytest.mark.parametrize("num_parts", [1, 2])
@on_ranks()
def test_several_microbatches_in_flight(rank: int, num_parts: int):
    """Forwards of three microbatches, then backwards in another order, as pipelines run them."""
    results = []
    for mode in (GROUPED_GEMMS, OVERLAP):
        with switched_on(mode), parts(num_parts) as runs:
            layer = make_layer(make_config())
            flying = [Microbatch(layer, tokens_of(rank, number)) for number in range(3)]
            found = {}
            for number in (1, 0, 2):
                found |= {f"{name} {number}": one for name, one in flying[number].backward(may_wait=True).items()}
                note = layer.token_dispatcher.buffer.note
                assert note == f"layer 1, microbatch {number + 1}, backward", note
            assert len(runs) == (3 if mode == OVERLAP else 0)
        results.append(found)
    if num_parts == 1:
        assert_same_bits(*results)
    assert_agree(*results)


@pytest.mark.parametrize("settings", [{}, MOE_ACT, MOE], ids=["plain", "moe_act", "recompute moe"])
@pytest.mark.parametrize("hooked", [False, True])
@on_ranks()
def test_one_part_has_the_bits_of_separate_steps(rank: int, settings: dict, hooked: bool):
    """Inside a node. A rank with a hook on its experts leaves dispatch and combine to the dispatcher, unlike the other.

    Sums in main_grad have the same bits too.
    """
    results = []
    for mode in (GROUPED_GEMMS, OVERLAP):
        config = make_config(**GROUPED, **settings)
        config.gradient_accumulation_fusion = True
        with switched_on(mode), parts(1) as runs:
            layer = make_grouped_layer(config)
            ddp = ddp_of(layer, config)
            if hooked and rank == 1:
                layer.experts.register_forward_hook(lambda *given: None)
            ddp.zero_grad_buffer()
            found = {}
            for number in range(2):
                found |= {f"{name} {number}": one for name, one in step(ddp, tokens_of(rank, number), number).items()}
            found |= {name: p.main_grad.clone() for name, p in layer.named_parameters() if "experts" in name}
            is_one_node = mode == OVERLAP and not (hooked and rank == 1)
            assert len(runs) == (2 * (1 + (settings == MOE)) if is_one_node else 0)
        results.append(found)
    assert_same_bits(*results)


@on_ranks()
def test_without_gradients(rank: int):
    with switched_on(OVERLAP), two_parts() as runs:
        layer = make_layer(make_config())
        wanted = step(layer, tokens_of(rank))["output"]
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(layer(tokens_of(rank))[0], wanted)
        assert len(runs) == 3


@on_ranks()
def test_errors_are_those_of_the_dispatch_and_the_next_pass_is_right(rank: int):
    with switched_on(OVERLAP), two_parts(), environment(max_tokens_per_rank=30):
        layer = make_layer(make_config())
        wanted = step(layer, tokens_of(rank))["output"]
        with environment(rank_capacity_factor=0.01):
            text = error_of(lambda: layer(tokens_of(rank)))
            assert text.startswith("max_recv_rows is too small") and "but has 1" in text, text
        if not on_gpu():
            assert torch.equal(step(layer, tokens_of(rank))["output"], wanted)


@pytest.mark.parametrize("refusing", [1, 2])
@on_ranks(4)
def test_all_ranks_of_a_group_run_in_two_parts_or_none(rank: int, refusing: int):
    """A hook on one rank's experts keeps its group from it, whose first rank says so; the other group goes on."""
    with switched_on(OVERLAP) as printed, two_parts() as runs:
        layers = [make_layer(make_config(), number) for number in (1, 2)]
        if rank == refusing:
            layers[0].experts.register_forward_hook(lambda *given: None)
        is_refused = rank // 2 == refusing // 2
        for number, layer in enumerate((*layers, *layers)):
            layer(tokens_of(rank))
            assert len(runs) == ((0, 1, 1, 2) if is_refused else (1, 2, 3, 4))[number]
        ones = [experts.experts_of(layer.experts) for layer in layers]
        assert ones[1].why_no_overlap is None and [list(one.agreed.values()) for one in ones] == [
            [not is_refused],
            [True],
        ]
    text = "ep_dispatcher: the ranks of layer 1 do not run their steps in two parts of the tokens: "
    text += f"1 of 2 ranks cannot, the first is rank {refusing}"
    assert printed.getvalue().splitlines().count(text) == (rank == refusing // 2 * 2)


@on_ranks()
def test_a_rank_without_the_switch_says_no(rank: int):
    """Grouped experts on all ranks, overlap on rank 0 alone: it asks, and hears no."""
    with switched_on(OVERLAP if rank == 0 else GROUPED_GEMMS), two_parts() as runs:
        run_layer(rank, Case(layout=EP2), OURS)
        assert not runs


@GLOO_TAKES_LISTS
@pytest.mark.parametrize("settings, delays", [({}, False), (MOE_ACT, False), ({}, True)], ids=str)
@on_ranks(4)
def test_an_observer_on_one_rank(rank, settings, delays):
    """FlopCounterMode on rank 0: the same operations in the same order, and the same bits of each main_grad."""
    results = []
    for watched in (False, rank % 2 == 0):
        config = make_config(**GROUPED, **settings)
        config.gradient_accumulation_fusion, config.delay_wgrad_compute = True, delays
        counter = FlopCounterMode(display=False)
        with switched_on(OVERLAP), two_parts() as runs, counter if watched else contextlib.nullcontext():
            layer = make_grouped_layer(config)
            ddp = ddp_of(layer, config, delay_wgrad_compute=delays)
            results.append(iterations(ddp, rank, layer.backward_dw if delays else lambda: None))
            assert bool(runs) is not watched
        assert bool(counter.get_total_flops()) is watched
    assert_same_bits(*results)


@on_ranks()
def test_experts_that_change_after_the_agreement(rank: int):
    """A rank whose experts take no tokens any more says so before anything is sent. All may unregister."""
    with switched_on(OVERLAP), two_parts() as runs:
        layer = make_layer(make_config())
        wanted = step(layer, tokens_of(rank))
        layer.experts.forward = lambda rows, counts, probs: (rows, None)
        text = error_of(lambda: layer(tokens_of(rank)), RuntimeError)
        assert text.startswith("layer 1 has run in two parts of the tokens on all ranks"), text
        assert "is not ep_dispatcher's" in text
        del layer.experts.forward
        hook = layer.experts.register_forward_hook(lambda *given: None)
        text = error_of(lambda: layer(tokens_of(rank)), RuntimeError)
        assert text.startswith("layer 1 has run in two parts") and "has hooks (forward_hooks)" in text, text
        hook.remove()
        assert_same_bits(step(layer, tokens_of(rank)), wanted)
        assert len(runs) == 2
        unregister()
        assert_agree(step(layer, tokens_of(rank)), wanted)
        assert len(runs) == 2
        register()
        step(layer, tokens_of(rank))
        assert len(runs) == 3


@on_ranks()
def test_nodes_of_the_overlap_schedule(rank: int, monkeypatch):
    """1F1B overlap gives each step to a node of its schedule: there the experts communicate no more than before."""
    make = megatron_schedule.make_config

    def for_the_schedule(*given, **settings):
        config = make(*given, **settings)
        config.overlap_moe_expert_parallel_comm = True  # its checks want a GPU
        return config

    monkeypatch.setattr(megatron_schedule, "make_config", for_the_schedule)
    with switched_on(OVERLAP) as printed, two_parts() as runs:
        run_nodes(rank, OURS, {}, OVERLAPPED)
    assert not runs
    lines = [line for line in printed.getvalue().splitlines() if HEAD in line]
    assert rank > 0 or "layer 1: overlap_moe_expert_parallel_comm overlaps it with another microbatch" in lines[0]


@on_ranks()
def test_what_cannot_run_so_is_named_with_its_reason(rank: int):
    def hook(layer):
        layer.experts.register_forward_hook(lambda *given: None)

    def schedule(layer):
        layer.config.overlap_moe_expert_parallel_comm = True

    def pad(layer):
        layer.token_dispatcher.expert_alignment = 16

    with switched_on(OVERLAP) as printed, two_parts() as runs:
        layers = [make_layer(make_config(), number) for number in range(1, 5)]
        layers.append(make_layer(make_config("alltoall"), 5))
        layers.append(make_layer(make_config(activation_func=torch.tanh), 6))
        for layer, change in zip(layers, (hook, schedule, pad)):
            change(layer)
        for layer in (layers[3], layers[0]):
            layer(tokens_of(rank))
        assert len(runs) == 1
        line = said(printed, HEAD)
    if rank == 0 and not on_gpu():
        reasons = [
            "layer 1: SequentialMLP has hooks (forward_hooks)",
            "layer 2: overlap_moe_expert_parallel_comm overlaps it with another microbatch",
            "layer 3: rows of an expert are padded to a multiple of 16",
            "layer 4: its engine is cpu",
            "layer 5: its dispatcher is MoEAlltoAllTokenDispatcher",
            "layer 6: its experts run Megatron's way",
        ]
        assert line == f"{HEAD} 0 of 6 MoE layers. One after the other: {'; '.join(reasons)}"


@pytest.mark.skipif(on_gpu(), reason="with a stand-in for the GPU's buffer")
@on_ranks()
def test_the_line_where_layers_overlap(rank: int, monkeypatch):
    """As on GPUs: inside a node, and between nodes. Without a limit of rows the host waits, and the line says it."""
    monkeypatch.setattr(overlap, "no_side_stream_reason", lambda buffer: None)
    with switched_on(OVERLAP) as printed:
        make_layer(make_config())(tokens_of(rank))
    line = f"{HEAD_OF_ONE_PART} 1 of 1 MoE layers"
    assert said(printed, HEAD_OF_ONE_PART) == line * (rank == 0)
    for factor in (None, 4):
        with switched_on(OVERLAP) as printed, two_parts(), environment(rank_capacity_factor=factor):
            make_layer(make_config())(tokens_of(rank))
            waits = ". The host waits for the counts of each dispatch: --ep-dispatcher-rank-capacity-factor"
            waits += " is not given"
            line = f"{HEAD} 1 of 1 MoE layers, in two parts of the tokens" + waits * (factor is None)
            assert said(printed, HEAD) == line * (rank == 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        MOE_ACT,
        MOE,
        dict(moe_shared_expert_intermediate_size=96, moe_shared_expert_overlap=True),
    ],
    ids=["plain", "moe_act", "recompute moe", "shared expert overlapped"],
)
@pytest.mark.parametrize("factor", [None, exhaustive(2)], ids=["counted", "limited rows"])
@on_ranks()
def test_dispatch_and_combine_under_the_gemms(rank: int, monkeypatch, settings: dict, factor: int | None):
    """In bfloat16, with enough tokens, between nodes: dispatch and combine do run under the GEMMs."""
    results, runs = [], note_parts(monkeypatch)
    large = dict(hidden_size=256, moe_ffn_hidden_size=192, bf16=True, params_dtype=torch.bfloat16)
    variables = dict(max_tokens_per_rank=3000, rank_capacity_factor=factor, EP_DISPATCHER_RANKS_PER_NODE="1")
    for mode in (GROUPED_GEMMS, OVERLAP):
        with switched_on(mode, dtypes=(torch.bfloat16,)) as printed, environment(**variables):
            by_autograd = "moe_shared_expert_intermediate_size" in settings
            if by_autograd:
                config = make_config(**large, **settings)
                layer = make_layer(config)  # weights that lie anywhere, and gradients by autograd
            else:
                config = make_config(**GROUPED, **large, **settings)
                config.gradient_accumulation_fusion = True
                layer = make_grouped_layer(config)
            ddp = ddp_of(layer, config)
            found = {}
            ddp.zero_grad_buffer()
            for number in range(3):
                x = tokens_of(rank, number, 1100 - 37 * rank, torch.bfloat16, 256)
                found |= {f"{name} {number}": one for name, one in step(ddp, x, number).items()}
            if not on_gpu():  # gloo reduces no gradients there
                ddp.finish_grad_sync()
            layer.token_dispatcher.buffer.check()
            found |= {name: p.main_grad.clone() for name, p in layer.named_parameters() if "experts" in name}
            results.append(found)
    for key in [key for key in results[0] if "experts" in key]:  # sums in another order; autograd's are bfloat16
        one, two = (found.pop(key) for found in results)
        assert difference(two, one) < (2**-8 if by_autograd else 1e-4), key
    assert_same_bits(*results)
    recomputed = "moe" in settings.get("recompute_modules", ())
    assert len(runs) == (6 if recomputed else 3), "in one part on a CPU"
    if on_gpu():
        assert rank > 0 or said(printed, HEAD).startswith(f"{HEAD} 1 of 1 MoE layers, in two parts of the tokens")
