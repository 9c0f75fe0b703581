"""Experts that run dispatch and combine in two parts of the tokens (--ep-dispatcher-overlap).

On a CPU the parts take their steps in turn: what is tested there is the way of the tokens through Megatron's six steps.
"""

import contextlib

import pytest
import test_megatron_schedule
import torch
from conftest import exhaustive
from megatron_layer import (
    NO_MEGATRON,
    OURS,
    Case,
    Layout,
    assert_agree,
    difference,
    environment,
    error_of,
    grads_of,
    make_config,
    make_layer,
    megatron_pool,
    on_gpu,
    random,
    run_layer,
    tokens_of,
    use_layout,
)
from test_megatron_experts import (
    CASES,
    EP2,
    ETP2,
    GROUPED,
    IN_BUCKETS,
    MOE_ACT,
    SWITCH,
    beside_dispatch,
    ddp_of,
    delayed,
    delayed_order,
    frozen,
    grouped_mlp,
    iterations,
    main_grads,
    make_grouped_layer,
    plain_main_grad,
    skip_what_gloo_refuses,
    step,
    switched_on,
)
from test_megatron_experts import (
    OVERLAP as WAVES,
)
from test_megatron_schedule import OVERLAPPED, run_nodes
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("megatron.core", reason=NO_MEGATRON)

HEAD = "ep_dispatcher runs dispatch and combine under the experts' GEMMs in"
NO_WAVES_HERE = "its engine is cpu"


@contextlib.contextmanager
def two_parts():
    """As between nodes on GPUs. Yield a list that gets an entry for every layer that runs so."""
    from ep_dispatcher.integrations.megatron import experts
    from ep_dispatcher.moe import overlap

    runs, run = [], overlap.mlp_in_parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "num_parts_of", lambda buffer: 2)
        patch.setattr(overlap, "mlp_in_parts", lambda *given, **options: runs.append(1) or run(*given, **options))
        yield runs


def said(printed) -> str:
    """The line about waves; nothing on ranks but the first."""
    lines = [line for line in printed.getvalue().splitlines() if HEAD in line]
    assert len(lines) == (torch.distributed.get_rank() == 0), lines
    return lines[0] if lines else ""


def assert_same_bits(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (got[name] is None) == (tensor is None), name
        assert tensor is None or torch.equal(got[name], tensor), f"{name} differs"


# ---- layers ---------------------------------------------------------------------------------------------------------

LAYERS = {name: case for name, case in CASES.items() if len(case.references) == 2} | {
    "shared expert overlapped, gate": Case(
        settings=dict(
            moe_shared_expert_intermediate_size=40, moe_shared_expert_overlap=True, moe_shared_expert_gate=True
        )
    ),
    "shared expert": Case(settings=dict(moe_shared_expert_intermediate_size=40)),
    "limited rows": Case(environment=dict(rank_capacity_factor=4, max_tokens_per_rank=40)),
    "capacity factor": Case(settings=dict(moe_expert_capacity_factor=0.7)),
    "tensor parallel": Case(layout=Layout(ep=2, tp=2)),
}


def in_flight(rank: int) -> None:
    """Forwards of three microbatches, then backwards in another order, as pipelines run them."""
    use_layout(EP2)
    results = []
    for switch in (SWITCH, WAVES):
        with switched_on(switch), two_parts() as runs:
            layer = make_layer(make_config())
            xs = [tokens_of(rank, number).requires_grad_() for number in range(3)]
            outputs = [layer(x)[0] for x in xs]
            for number in (1, 0, 2):
                (outputs[number] * random(*xs[0].shape, seed=number)).sum().backward()
                note = layer.token_dispatcher.buffer.note
                assert note == f"layer 1, microbatch {number + 1}, backward", note
            assert len(runs) == (3 if switch == WAVES else 0)
        found = {f"output {n}": y.detach() for n, y in enumerate(outputs)}
        results.append(found | {f"input gradient {n}": x.grad for n, x in enumerate(xs)} | grads_of(layer))
    assert_agree(*results)


def test_several_microbatches_in_flight():
    megatron_pool(2).run(in_flight)


def without_gradients(rank: int) -> None:
    use_layout(EP2)
    with switched_on(WAVES), two_parts() as runs:
        layer = make_layer(make_config())
        wanted = step(layer, tokens_of(rank))["output"]
        with torch.no_grad():
            assert torch.equal(layer(tokens_of(rank))[0], wanted)
        with torch.inference_mode():
            assert torch.equal(layer(tokens_of(rank))[0], wanted)
        assert len(runs) == 3


def test_without_gradients():
    megatron_pool(2).run(without_gradients)


def mistakes(rank: int) -> None:
    """Errors are those of the dispatch, and the next pass is right."""
    use_layout(EP2)
    with switched_on(WAVES), two_parts(), environment(max_tokens_per_rank=30):
        layer = make_layer(make_config())
        wanted = step(layer, tokens_of(rank))["output"]
        with environment(rank_capacity_factor=0.01):
            text = error_of(lambda: layer(tokens_of(rank)))
            assert text.startswith("max_recv_rows: too small") and "given 1" in text, text
        if not on_gpu():
            assert torch.equal(step(layer, tokens_of(rank))["output"], wanted)


def test_mistakes():
    megatron_pool(2).run(mistakes)


# ---- the bits ------------------------------------------------------------------------------------------------------


def layer_in_parts(rank: int, case: Case) -> None:
    use_layout(case.layout)
    with switched_on():
        grouped = run_layer(rank, case, OURS).tensors()
    with switched_on(WAVES), two_parts() as runs:
        got = run_layer(rank, case, OURS).tensors()
    recomputed = case.checkpointed or case.settings.get("recompute_granularity") is not None
    assert len(runs) == (0 if case.layout == ETP2 else 2 * (1 + recomputed))
    assert_agree(got, grouped, "in two parts and in one")


@pytest.mark.parametrize("name", sorted(LAYERS, key=lambda name: str(LAYERS[name].layout)))
def test_layers_in_two_parts(name):
    megatron_pool(4).run(layer_in_parts, LAYERS[name])


def with_two_parts(rank: int, test, *given) -> None:
    with two_parts() as runs:
        test(rank, *given)
        assert runs


IN_PARTS = {
    "main_grad": (main_grads, IN_BUCKETS, WAVES),
    "delayed, main_grad": (delayed, True, WAVES),
    "delayed": (delayed, False, WAVES),
    "moe_act": (grouped_mlp, EP2, OURS, MOE_ACT, WAVES),
    "order of delayed": (delayed_order, WAVES),
    "plain main_grad": (plain_main_grad, WAVES),
    "frozen": (frozen, WAVES),
    "beside dispatch": (beside_dispatch, WAVES),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_gradients_of_weights_in_two_parts(name):
    """Each is written once, with the rows of both parts in it."""
    ranks = 2 if name in ("order of delayed", "plain main_grad", "frozen", "beside dispatch") else 4
    megatron_pool(ranks).run(with_two_parts, *IN_PARTS[name])


def all_or_none(rank: int) -> None:
    """A hook on one rank's experts: no rank runs this layer in parts."""
    from ep_dispatcher.integrations.megatron import experts

    use_layout(EP2)
    with switched_on(WAVES) as printed, two_parts() as runs:
        layers = [make_layer(make_config(), number) for number in (1, 2)]
        if rank == 1:
            layers[0].experts.register_forward_hook(lambda *given: None)
        for number, layer in enumerate((*layers, *layers)):
            layer(tokens_of(rank))
            assert len(runs) == (0, 1, 1, 2)[number]
        ones = [experts._layers[layer.experts] for layer in layers]
        assert ones[1].why_no_overlap is None and [one.parts_agreed for one in ones] == [False, True]
    text = "ep_dispatcher runs the steps of layer 1 one after the other: "
    text += "1 of 2 ranks cannot overlap them, the first is rank 1"
    assert printed.getvalue().splitlines().count(text) == (rank == 0)


def test_all_ranks_run_in_two_parts_or_none():
    megatron_pool(2).run(all_or_none)


def refused_elsewhere(rank: int) -> None:
    """Two expert-parallel groups: the first rank of each says what a rank of the group refuses. Here it refuses."""
    use_layout(EP2)
    with switched_on(WAVES) as printed, two_parts() as runs:
        layer = make_layer(make_config())
        if rank == 2:
            layer.experts.register_forward_hook(lambda *given: None)
        layer(tokens_of(rank))
        assert len(runs) == (rank < 2)
    text = "1 of 2 ranks cannot overlap them, the first is rank 2"
    assert [line.endswith(text) for line in printed.getvalue().splitlines()].count(True) == (rank == 2)


def test_a_refusal_is_said_in_its_group():
    megatron_pool(4).run(refused_elsewhere)


def switched_on_here(rank: int) -> None:
    """Grouped experts on all ranks, overlap on rank 0 alone: it asks, and hears no."""
    use_layout(EP2)
    with switched_on(WAVES if rank == 0 else SWITCH), two_parts() as runs:
        run_layer(rank, Case(layout=EP2), OURS)
        assert not runs


def test_a_rank_without_the_switch_says_no():
    megatron_pool(2).run(switched_on_here)


def observed_on_one_rank(rank: int, settings: dict, delays: bool) -> None:
    """FlopCounterMode on rank 0: the same operations in the same order, and the same bits of each main_grad."""
    use_layout(EP2)
    results = []
    for watched in (False, rank % 2 == 0):
        config = make_config(**GROUPED, **settings)
        config.gradient_accumulation_fusion, config.delay_wgrad_compute = True, delays
        counter = FlopCounterMode(display=False)
        with switched_on(WAVES), two_parts() as runs, counter if watched else contextlib.nullcontext():
            layer = make_grouped_layer(config)
            ddp = ddp_of(layer, config, delay_wgrad_compute=delays)
            results.append(iterations(ddp, rank, layer.backward_dw if delays else lambda: None))
            assert bool(runs) is not watched
        assert bool(counter.get_total_flops()) is watched
    assert_same_bits(*results)


@pytest.mark.parametrize("settings, delays", [({}, False), (MOE_ACT, False), ({}, True)], ids=str)
def test_an_observer_on_one_rank(settings, delays):
    skip_what_gloo_refuses({})
    megatron_pool(4).run(observed_on_one_rank, settings, delays)


def after_the_agreement(rank: int) -> None:
    """A rank whose experts take no tokens any more says so before anything is sent. All may unregister."""
    from ep_dispatcher.integrations.megatron import register, unregister

    use_layout(EP2)
    with switched_on(WAVES), two_parts() as runs:
        layer = make_layer(make_config())
        wanted = step(layer, tokens_of(rank))
        layer.experts.forward = lambda rows, counts, probs: (rows, None)
        text = error_of(lambda: layer(tokens_of(rank)), RuntimeError)
        assert text.startswith("layer 1 has run in two parts of the tokens on all ranks"), text
        del layer.experts.forward
        assert_same_bits(step(layer, tokens_of(rank)), wanted)
        assert len(runs) == 2
        unregister()
        assert_agree(step(layer, tokens_of(rank)), wanted)
        assert len(runs) == 2
        register()
        step(layer, tokens_of(rank))
        assert len(runs) == 3


def test_experts_that_change_after_the_agreement():
    megatron_pool(2).run(after_the_agreement)


# ---- layers whose steps run one after the other ---------------------------------------------------------------------


def in_the_schedule(rank: int) -> None:
    """1F1B overlap gives each step to a node of its schedule: there the experts communicate no more than before."""
    make = test_megatron_schedule.make_config

    def for_the_schedule(*given, **settings):
        config = make(*given, **settings)
        config.overlap_moe_expert_parallel_comm = True  # its checks want a GPU
        return config

    with pytest.MonkeyPatch.context() as patch, switched_on(WAVES) as printed, two_parts() as runs:
        patch.setattr(test_megatron_schedule, "make_config", for_the_schedule)
        run_nodes(rank, OURS, {}, OVERLAPPED)
    assert not runs
    lines = [line for line in printed.getvalue().splitlines() if HEAD in line]
    assert rank > 0 or "layer 1: overlap_moe_expert_parallel_comm overlaps it with another microbatch" in lines[0]


def test_nodes_of_the_overlap_schedule():
    megatron_pool(2).run(in_the_schedule)


def refusals(rank: int) -> None:
    use_layout(EP2)

    def hook(layer):
        layer.experts.register_forward_hook(lambda *given: None)

    def schedule(layer):
        layer.config.overlap_moe_expert_parallel_comm = True

    def pad(layer):
        layer.token_dispatcher.expert_alignment = 16

    with switched_on(WAVES) as printed, two_parts() as runs:
        layers = [make_layer(make_config(OURS, **settings), n) for n, settings in enumerate([{}] * 4, 1)]
        layers.append(make_layer(make_config("alltoall"), 5))
        layers.append(make_layer(make_config(activation_func=torch.tanh), 6))
        for layer, change in zip(layers, (hook, schedule, pad)):
            change(layer)
        for layer in (layers[3], layers[0]):
            layer(tokens_of(rank))
        assert len(runs) == 1
        line = said(printed)
    if rank == 0 and not on_gpu():
        reasons = [
            "layer 1: SequentialMLP has hooks (forward_hooks)",
            "layer 2: overlap_moe_expert_parallel_comm overlaps it with another microbatch",
            "layer 3: rows of an expert are padded to a multiple of 16",
            f"layer 4: {NO_WAVES_HERE}",
            "layer 5: its dispatcher is MoEAlltoAllTokenDispatcher",
            "layer 6: its experts run Megatron's way",
        ]
        assert line == f"{HEAD} 0 of 6 MoE layers. One after the other: {'; '.join(reasons)}"


def test_what_cannot_run_so_is_named_with_its_reason():
    megatron_pool(2).run(refusals)


def lines_of_a_gpu(rank: int) -> None:
    """As between nodes on GPUs; without a limit of rows the host waits, and the line says it."""
    from ep_dispatcher.moe import overlap

    use_layout(EP2)
    for factor in (None, 4):
        with (
            switched_on(WAVES) as printed,
            environment(rank_capacity_factor=factor),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(overlap, "why_not", lambda buffer: None)
            make_layer(make_config())(tokens_of(rank))
            waits = ". The host waits for the counts of each dispatch: --ep-dispatcher-rank-capacity-factor"
            waits += " is not given"
            line = f"{HEAD} 1 of 1 MoE layers, in two parts of the tokens" + waits * (factor is None)
            assert said(printed) == line * (rank == 0)


@pytest.mark.skipif(on_gpu(), reason="with a stand-in for the GPU's buffer")
def test_the_line_where_there_are_waves():
    megatron_pool(2).run(lines_of_a_gpu)


# ---- on GPUs --------------------------------------------------------------------------------------------------------


def overlapped(rank: int, settings: dict, factor: int | None) -> None:
    """In bfloat16, with enough tokens, between nodes: dispatch and combine do run under the GEMMs."""
    from ep_dispatcher.moe import overlap

    use_layout(EP2)
    calls, call = [], overlap.mlp_in_parts
    results = []
    large = dict(hidden_size=256, moe_ffn_hidden_size=192, bf16=True, params_dtype=torch.bfloat16)
    variables = dict(max_tokens_per_rank=3000, rank_capacity_factor=factor, EP_DISPATCHER_RANKS_PER_NODE="1")
    for switch in (SWITCH, WAVES):
        with switched_on(switch) as printed, environment(**variables), pytest.MonkeyPatch.context() as patch:
            from ep_dispatcher.integrations.megatron import eligibility

            patch.setattr(eligibility, "DTYPES_ON_GPU", (torch.bfloat16,))
            patch.setattr(overlap, "mlp_in_parts", lambda *given, **options: calls.append(1) or call(*given, **options))
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
                x = tokens_of(rank, number, 1100 - 37 * rank, torch.bfloat16, 256).requires_grad_()
                output = ddp(x)[0]
                (output * random(*x.shape, seed=number, dtype=output.dtype)).sum().backward()
                found |= {f"output {number}": output.detach(), f"input gradient {number}": x.grad}
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
    assert len(calls) == ((6 if recomputed else 3) if on_gpu() else 0)
    if on_gpu():
        assert rank > 0 or said(printed).startswith(f"{HEAD} 1 of 1 MoE layers, in two parts of the tokens")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        MOE_ACT,
        dict(recompute_granularity="selective", recompute_modules=["moe"]),
        dict(moe_shared_expert_intermediate_size=96, moe_shared_expert_overlap=True),
    ],
    ids=["plain", "moe_act", "recompute moe", "shared expert overlapped"],
)
@pytest.mark.parametrize("factor", [None, exhaustive(2)], ids=["counted", "limited rows"])
def test_dispatch_and_combine_under_the_gemms(settings, factor):
    megatron_pool(2).run(overlapped, settings, factor)
