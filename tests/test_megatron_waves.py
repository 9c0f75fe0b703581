"""Experts that run dispatch and combine (EP_DISPATCHER_EXPERT_WAVES=1): the bits of one step after the other.

On a CPU they take the steps in turn: what is tested there is the way of the tokens through Megatron's six steps.
"""

import contextlib
import types

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
from test_megatron_schedule import OVERLAPPED, run_nodes
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("megatron.core", reason=NO_MEGATRON)

WAVES = "EP_DISPATCHER_EXPERT_WAVES"
HEAD = "ep_dispatcher runs dispatch and combine under the experts' GEMMs in"
NO_WAVES_HERE = "its engine is cpu"


@contextlib.contextmanager
def counted_runs():
    """Yield a list that gets an entry for every dispatch that the experts run.

    On a GPU few tokens would not get there. Their steps still run in turn: there are no kernels for float32.
    """
    from ep_dispatcher.integrations.megatron.deferred import Deferred
    from ep_dispatcher.moe import waves

    runs, run = [], Deferred.run
    with pytest.MonkeyPatch.context() as patch:
        if on_gpu():
            patch.setattr(waves, "can_overlap", lambda buffer, wants_gradients, *rest: True)

        def counted(deferred, *given, **options):
            runs.append(deferred)
            return run(deferred, *given, **options)

        patch.setattr(Deferred, "run", counted)
        yield runs


def said(printed) -> str:
    """The line about waves; nothing on ranks but the first."""
    lines = [line for line in printed.getvalue().splitlines() if WAVES in line]
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
    "limited rows": Case(
        environment=dict(EP_DISPATCHER_RANK_CAPACITY_FACTOR="4", EP_DISPATCHER_MAX_TOKENS_PER_RANK="40")
    ),
    "capacity factor": Case(settings=dict(moe_expert_capacity_factor=0.7)),
    "tensor parallel": Case(layout=Layout(ep=2, tp=2)),
}


def orders_shared_experts_by_dispatch() -> bool:
    """Whether their backward goes right before that of the dispatch: Megatron 0.18 and newer.

    Experts that run the dispatch give it no such place. Then a token's gradients are added in another order.
    """
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    return hasattr(SharedExpertMLP, "wait_current_stream")


def three_ways(rank: int, case: Case) -> None:
    use_layout(case.layout)
    megatrons = run_layer(rank, case, OURS).tensors()
    with switched_on():
        grouped = run_layer(rank, case, OURS).tensors()
    with switched_on(WAVES) as printed, counted_runs() as runs:
        got = run_layer(rank, case, OURS).tensors()
    recomputed = case.checkpointed or case.settings.get("recompute_granularity") is not None
    assert len(runs) == (0 if case.layout == ETP2 else 2 * (1 + recomputed))
    if case.settings.get("moe_shared_expert_overlap") and orders_shared_experts_by_dispatch():
        assert_agree(got, grouped)
        grouped |= {name: got[name] for name in got if name.startswith("input gradient")}
    assert_same_bits(got, grouped)
    assert_agree(got, megatrons, "overlapped and Megatron's own")
    if case.settings.get("recompute_granularity") and not on_gpu():
        assert [run.has_plan for run in runs] == [False, True] * 2, "a recompute reuses the plan"
    reason = "expert_tensor_parallel_size is 2" if case.layout == ETP2 else NO_WAVES_HERE
    if rank == 0 and not on_gpu():
        assert said(printed) == f"{HEAD} 0 of 1 MoE layers ({WAVES}=1). One after the other: layer 1: {reason}"
        assert f"1 of 1 MoE layers in grouped GEMMs ({SWITCH}=1)" in printed.getvalue(), "it implies the other switch"


@pytest.mark.parametrize("name", sorted(LAYERS, key=lambda name: str(LAYERS[name].layout)))
def test_the_bits_of_grouped_experts(name):
    megatron_pool(4).run(three_ways, LAYERS[name])


def in_flight(rank: int) -> None:
    """Forwards of three microbatches, then backwards in another order, as pipelines run them."""
    use_layout(EP2)
    results = []
    for switch in (SWITCH, WAVES):
        with switched_on(switch), counted_runs() as runs:
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
    assert_same_bits(*results)


def test_several_microbatches_in_flight():
    megatron_pool(2).run(in_flight)


def without_gradients(rank: int) -> None:
    use_layout(EP2)
    with switched_on(WAVES), counted_runs() as runs:
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
    with switched_on(WAVES), environment(EP_DISPATCHER_MAX_TOKENS_PER_RANK="30"):
        layer = make_layer(make_config())
        wanted = step(layer, tokens_of(rank))["output"]
        with environment(EP_DISPATCHER_RANK_CAPACITY_FACTOR="0.01"):
            text = error_of(lambda: layer(tokens_of(rank)))
            assert text.startswith("max_recv_rows: too small") and "given 1" in text, text
        if not on_gpu():
            assert torch.equal(step(layer, tokens_of(rank))["output"], wanted)


def test_mistakes():
    megatron_pool(2).run(mistakes)


# ---- gradients of weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, IN_BUCKETS | dict(overlap_param_gather=True)],
    ids=["overlapped", "distributed optimizer, weights gathered meanwhile"],
)
def test_gradients_reach_main_grad_and_are_reduced(settings):
    skip_what_gloo_refuses(settings)
    megatron_pool(4).run(main_grads, settings, WAVES)


@pytest.mark.parametrize("fused", [True, False])
def test_delayed_gradients_of_weights(fused):
    megatron_pool(4).run(delayed, fused, WAVES)


@pytest.mark.parametrize("test", [delayed_order, plain_main_grad, frozen], ids=lambda test: test.__name__)
def test_as_grouped_experts(test):
    megatron_pool(2).run(test, WAVES)


@pytest.mark.parametrize("settings", [{}, MOE_ACT], ids=["plain", "moe_act"])
def test_grouped_mlp_agrees_with_megatrons_own(settings):
    megatron_pool(4).run(grouped_mlp, EP2, OURS, settings, WAVES)


def same_main_grads(rank: int) -> None:
    """Two iterations of two microbatches: the bits of every main_grad."""
    use_layout(EP2)
    results = []
    for switch in (SWITCH, WAVES):
        config = make_config(**GROUPED)
        with switched_on(switch), counted_runs() as runs:
            config.gradient_accumulation_fusion = True
            results.append(iterations(ddp_of(make_grouped_layer(config), config), rank))
            assert len(runs) == (4 if switch == WAVES else 0)
    assert_same_bits(*results)


def test_the_bits_of_main_grad():
    skip_what_gloo_refuses({})
    megatron_pool(4).run(same_main_grads)


# ---- two parts of the tokens ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_parts():
    """As between nodes on GPUs. Yield a list that gets an entry for every layer that runs so."""
    from ep_dispatcher.integrations.megatron import deferred, experts
    from ep_dispatcher.moe import parts

    runs, run = [], parts.mlp_in_parts
    with pytest.MonkeyPatch.context() as patch:
        for module in (experts, deferred):
            patch.setattr(module, "num_parts_of", lambda buffer: 2)
        patch.setattr(parts, "mlp_in_parts", lambda *given, **options: runs.append(1) or run(*given, **options))
        yield runs


def layer_in_parts(rank: int, case: Case) -> None:
    use_layout(case.layout)
    with switched_on():
        grouped = run_layer(rank, case, OURS).tensors()
    with switched_on(WAVES), two_parts() as runs, counted_runs() as counted:
        got = run_layer(rank, case, OURS).tensors()
    assert len(runs) == len(counted) and bool(runs) is (case.layout != ETP2)
    assert not any(run.has_plan for run in counted), "a recompute makes new plans: each part has one"
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
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_gradients_of_weights_in_two_parts(name):
    """Each is written once, with the rows of both parts in it."""
    megatron_pool(4).run(with_two_parts, *IN_PARTS[name])


def all_or_none(rank: int) -> None:
    """A hook on one rank's experts: no rank runs this layer in parts. GEMMs that wait for no rows forbid less."""
    from ep_dispatcher.integrations.megatron import experts

    use_layout(EP2)
    with switched_on(WAVES) as printed, two_parts() as runs:
        layers = [make_layer(make_config(), number) for number in (1, 2)]
        if rank == 1:
            layers[0].experts.register_forward_hook(lambda *given: None)
        for layer in layers:
            layer.config.pipeline_model_parallel_size, layer.config.overlap_p2p_comm = 2, True
        for number, layer in enumerate((*layers, *layers)):
            layer(tokens_of(rank))
            assert len(runs) == (0, 1, 1, 2)[number]
        ones = [experts._layers[layer.experts] for layer in layers]
        assert all(one.why_no_waves is not None for one in ones)
        assert ones[1].why_no_parts is None and [one.parts_agreed for one in ones] == [False, True]
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
    """Grouped experts on all ranks, EP_DISPATCHER_EXPERT_WAVES on rank 0 alone: it asks, and hears no."""
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

    with pytest.MonkeyPatch.context() as patch, switched_on(WAVES) as printed, counted_runs() as runs:
        patch.setattr(test_megatron_schedule, "make_config", for_the_schedule)
        run_nodes(rank, OURS, {}, OVERLAPPED)
    assert not runs
    lines = [line for line in printed.getvalue().splitlines() if WAVES in line]
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

    with switched_on(WAVES) as printed, counted_runs() as runs:
        layers = [make_layer(make_config(OURS, **settings), n) for n, settings in enumerate([{}] * 4, 1)]
        layers.append(make_layer(make_config("alltoall"), 5))
        layers.append(make_layer(make_config(add_bias_linear=True), 6))
        for layer, change in zip(layers, (hook, schedule, pad)):
            change(layer)
        for layer in (layers[3], layers[0]):
            layer(tokens_of(rank))
        assert len(runs) == 1
        line = said(printed)
        from ep_dispatcher.integrations.megatron import experts
        from ep_dispatcher.moe import waves

        for can in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(waves, "can_overlap", lambda buffer, wants_gradients, can=can: can)
                patch.setattr(experts, "num_parts_of", lambda buffer: 1)
                assert experts.communicates(layers[3].experts, types.SimpleNamespace(engine="cuda")) is can
    if rank == 0 and not on_gpu():
        reasons = [
            "layer 1: SequentialMLP has hooks (forward_hooks)",
            "layer 2: overlap_moe_expert_parallel_comm overlaps it with another microbatch",
            "layer 3: rows of an expert are padded to a multiple of 16",
            f"layer 4: {NO_WAVES_HERE}",
            "layer 5: its dispatcher is MoEAlltoAllTokenDispatcher",
            "layer 6: its experts run Megatron's way",
        ]
        assert line == f"{HEAD} 0 of 6 MoE layers ({WAVES}=1). One after the other: {'; '.join(reasons)}"


def test_what_cannot_run_so_is_named_with_its_reason():
    megatron_pool(2).run(refusals)


def settings_that_forbid(rank: int) -> None:
    """Pipelines whose sends overlap, and CUDA graphs with one connection; either half of a condition alone is none."""
    from ep_dispatcher.integrations.megatron import eligibility, experts

    def reason(connections: str = "1", **settings) -> str | None:
        with pytest.MonkeyPatch.context() as patch, environment(CUDA_DEVICE_MAX_CONNECTIONS=connections):
            for name, value in settings.items():
                patch.setattr(layer.config, name, value)
            return eligibility.why_no_waves(layer.experts, experts._layers[layer.experts])

    use_layout(EP2)
    pipeline = dict(pipeline_model_parallel_size=2, overlap_p2p_comm=True)
    captured = "CUDA graphs contain it, and CUDA_DEVICE_MAX_CONNECTIONS is 1"
    with switched_on(WAVES) as printed:
        layer = make_layer(make_config())
        layer.config.pipeline_model_parallel_size, layer.config.overlap_p2p_comm = 2, True
        with counted_runs() as runs:
            layer(tokens_of(rank))
        assert not runs
        late = "overlap_p2p_comm: a send of the pipeline could start only after GEMMs that wait for another rank"
        assert said(printed).endswith(f"layer 1: {late}" * (rank == 0))
        layer.config.pipeline_model_parallel_size, layer.config.overlap_p2p_comm = 1, False
        assert reason() is None
        assert reason(**pipeline) == late
        assert reason(**pipeline | dict(overlap_p2p_comm=False)) is None
        assert reason(**pipeline | dict(pipeline_model_parallel_size=1)) is None
        assert reason(cuda_graph_impl="transformer_engine") == captured, "without a scope they contain the whole layer"
        assert reason("8", cuda_graph_impl="transformer_engine") is None
        scope = "cuda_graph_modules" if hasattr(layer.config, "cuda_graph_modules") else "cuda_graph_scope"
        assert reason(cuda_graph_impl="transformer_engine", **{scope: ["moe_router"]}) is None


def test_settings_that_forbid_it():
    megatron_pool(2).run(settings_that_forbid)


def lines_of_a_gpu(rank: int) -> None:
    """As where the buffer has waves; without a limit of rows the host waits, and the line says it."""
    from ep_dispatcher.moe import waves

    use_layout(EP2)
    for factor in (None, "4"):
        with (
            switched_on(WAVES) as printed,
            environment(EP_DISPATCHER_RANK_CAPACITY_FACTOR=factor),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(waves, "why_not", lambda buffer, wants_gradients, *rest: None)
            make_layer(make_config())(tokens_of(rank))
            waits = ". The host waits for the counts of each dispatch: EP_DISPATCHER_RANK_CAPACITY_FACTOR is unset"
            line = f"{HEAD} 1 of 1 MoE layers ({WAVES}=1)" + waits * (factor is None)
            assert said(printed) == line * (rank == 0)
            with two_parts():
                make_layer(make_config())(tokens_of(rank))
            line = f"{HEAD} 1 of 1 MoE layers, in two parts of the tokens ({WAVES}=1)" + waits * (factor is None)
            assert printed.getvalue().rstrip().endswith(line * (rank == 0))


@pytest.mark.skipif(on_gpu(), reason="with a stand-in for the GPU's buffer")
def test_the_line_where_there_are_waves():
    megatron_pool(2).run(lines_of_a_gpu)


def other_forwards(rank: int) -> None:
    """Experts whose forward is not ours get rows and counts: after unregister(), and where somebody replaced it."""
    from ep_dispatcher.integrations.megatron import register, unregister

    use_layout(EP2)
    with switched_on(WAVES), counted_runs() as runs:
        layer = make_layer(make_config())
        wanted = step(layer, tokens_of(rank))
        seen = []
        layer.experts.forward = lambda rows, counts, probs: seen.append((rows, counts)) or (rows, None)
        layer(tokens_of(rank))
        ((rows, counts),) = seen
        assert rows.shape[0] == int(counts.sum())
        del layer.experts.forward
        unregister()
        assert_agree(step(layer, tokens_of(rank)), wanted)
        assert len(runs) == 1
        register()
        assert_same_bits(step(layer, tokens_of(rank)), wanted)
        assert len(runs) == 2


def test_experts_with_another_forward_get_rows():
    megatron_pool(2).run(other_forwards)


# ---- on GPUs --------------------------------------------------------------------------------------------------------


def overlapped(rank: int, settings: dict, factor: str | None, per_node: str | None = None) -> None:
    """In bfloat16, with enough tokens: dispatch and combine do run under the GEMMs. Between nodes in two parts."""
    from ep_dispatcher.moe import parts, waves

    use_layout(EP2)
    place, name = (waves, "overlapped_mlp") if per_node is None else (parts, "mlp_in_parts")
    calls, call = [], getattr(place, name)
    results = []
    large = dict(hidden_size=256, moe_ffn_hidden_size=192, bf16=True, params_dtype=torch.bfloat16)
    variables = dict(EP_DISPATCHER_MAX_TOKENS_PER_RANK="3000", EP_DISPATCHER_RANK_CAPACITY_FACTOR=factor)
    variables |= dict(EP_DISPATCHER_RANKS_PER_NODE=per_node)
    for switch in (SWITCH, WAVES):
        with switched_on(switch) as printed, environment(**variables), pytest.MonkeyPatch.context() as patch:
            from ep_dispatcher.integrations.megatron import eligibility

            patch.setattr(eligibility, "DTYPES_ON_GPU", (torch.bfloat16,))
            patch.setattr(place, name, lambda *given, **options: calls.append(1) or call(*given, **options))
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
    if per_node is not None:  # two parts sum the gradients of weights in another order; autograd's are bfloat16
        for key in [key for key in results[0] if "experts" in key]:
            one, two = (found.pop(key) for found in results)
            assert difference(two, one) < (2**-8 if by_autograd else 1e-4), key
    assert_same_bits(*results)
    recomputed = per_node is not None and "moe" in settings.get("recompute_modules", ())
    times = 6 if recomputed else 3  # rows of 512 bytes in one part overlap with gradients alone
    assert len(calls) == (times if on_gpu() else 0)
    if on_gpu():
        in_parts = "" if per_node is None else ", in two parts of the tokens"
        assert rank > 0 or said(printed).startswith(f"{HEAD} 1 of 1 MoE layers{in_parts}")


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
@pytest.mark.parametrize("factor", [None, exhaustive("2")], ids=["counted", "limited rows"])
@pytest.mark.parametrize("per_node", [None, "1"], ids=["one node", "two nodes"])
def test_dispatch_and_combine_under_the_gemms(settings, factor, per_node):
    megatron_pool(2).run(overlapped, settings, factor, per_node)
