"""Experts in grouped GEMMs: what Megatron's own experts compute, gradients where Megatron looks for them."""

import contextlib
import io
import operator
import re

import pytest
import torch
from megatron_layer import (
    EXPERTS,
    FFN,
    OURS,
    Case,
    Layout,
    assert_agree,
    assert_same_bits,
    device,
    environment,
    error_of,
    grads_of,
    make_config,
    make_layer,
    on_gpu,
    on_ranks,
    outcome,
    random,
    run_layer,
    set_weights,
    step,
    tokens_of,
    with_graphs,
)
from test_experts import uninitialised_memory_is_nan
from test_megatron_layer import CASES, UNEVEN
from test_megatron_schedule import ONE_AFTER_THE_OTHER, OVERLAPPED, run_nodes

from ep_dispatcher.integrations.megatron import eligibility, experts, limits, plugin, register, unregister
from ep_dispatcher.moe import overlap

GROUPED_GEMMS, OVERLAP, TWO_PARTS = "grouped GEMMs", "overlap", "two parts"
MODES = pytest.mark.parametrize("mode", [GROUPED_GEMMS, TWO_PARTS])
EP2, EP4, ETP2 = Layout(ep=2), Layout(ep=4), Layout(ep=2, etp=2)


@contextlib.contextmanager
def switched_on(mode: str = GROUPED_GEMMS, dtypes=(torch.float32,)):
    """Yield what the rank prints. ``dtypes``: what runs so on a GPU, where float32 does for these tests alone.

    OVERLAP overlaps nothing on a CPU; with TWO_PARTS a layer has to run in two parts of the tokens.
    """
    printed = io.StringIO()
    with (
        environment(experts="auto", overlap=None if mode == GROUPED_GEMMS else True),
        contextlib.redirect_stdout(printed),
        pytest.MonkeyPatch.context() as patch,
        two_parts() if mode == TWO_PARTS else contextlib.nullcontext() as runs,
    ):
        patch.setattr(eligibility, "DTYPES_ON_GPU", dtypes)
        for kind in (TEColumnParallelGroupedLinear, TERowParallelGroupedLinear):
            patch.setitem(eligibility.plain_forwards(), kind, kind.forward)
        yield printed
        assert runs or mode != TWO_PARTS


@contextlib.contextmanager
def two_parts():
    """As between nodes on GPUs. Yield a list that gets an entry for every layer that runs so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "num_parts_of", lambda buffer: 2)
        yield note_parts(patch)


def note_parts(patch) -> list:
    runs, run = [], overlap.mlp_in_parts
    patch.setattr(overlap, "mlp_in_parts", lambda *given, **options: runs.append(1) or run(*given, **options))
    return runs


def said(printed: io.StringIO, words: str = "MoE layers in grouped GEMMs") -> str:
    """The one line with these words; nothing on ranks but the first."""
    lines = [line for line in printed.getvalue().splitlines() if words in line]
    assert len(lines) == (torch.distributed.get_rank() == 0), lines
    return lines[0] if lines else ""


# ---- SequentialMLP --------------------------------------------------------------------------------------------------

FAMILIES = ("gpt-oss", "clamped SwiGLU", "squared ReLU", "GELU, biases", "tanh GELU", "probabilities on the input")


def family(name: str) -> dict:
    """The settings of a family of models."""
    from megatron.core import activations
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    clamped = dict(activation_func=quick_gelu, glu_linear_offset=1.0, activation_func_clamp_value=0.5)
    on_input = dict(moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True)
    return {
        "gpt-oss": dict(add_bias_linear=True, **clamped),
        "clamped SwiGLU": dict(activation_func_clamp_value=0.5),
        "squared ReLU": dict(activation_func=activations.squared_relu, gated_linear_unit=False),
        "GELU, biases": dict(activation_func=torch.nn.functional.gelu, gated_linear_unit=False, add_bias_linear=True),
        "tanh GELU": dict(activation_func=activations.fast_gelu, gated_linear_unit=False),
        "probabilities on the input": on_input,
    }[name]


OWN_CASES = {
    "one expert a rank": Case(settings=dict(num_moe_experts=4)),
    "other width of experts": Case(settings=dict(moe_ffn_hidden_size=24)),
    "limited rows": Case(environment=dict(rank_capacity_factor=4, max_tokens_per_rank=40)),
}
NAMES = (
    "plain",
    "no tokens",
    "capacity",
    "capacity padded",
    "router fp64",
    "recompute moe",
    "recompute full",
    "latent",
)
NAMES += ("shared expert", "shared expert overlapped", "shared expert overlapped, gate, capacity", "two nodes")
NAMES += (*OWN_CASES, "sequence parallel", "expert tensor parallel")  # one layout after the other
RUNS = [(name, OURS, mode) for name in NAMES for mode in (GROUPED_GEMMS, TWO_PARTS)]
RUNS += [(name, OURS, GROUPED_GEMMS) for name in FAMILIES]
RUNS += [("plain", "alltoall", GROUPED_GEMMS)]
RUNS += [(name, "allgather", GROUPED_GEMMS) for name in ("plain", "expert tensor parallel")]


@pytest.mark.parametrize("name, dispatcher, mode", RUNS)
@on_ranks(4, None)
def test_a_layer_agrees_with_megatrons_own_experts(rank, name, dispatcher, mode):
    case = Case(settings=family(name), lengths=UNEVEN[EP4]) if name in FAMILIES else (CASES | OWN_CASES)[name]
    wanted = run_layer(rank, case, dispatcher)
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
        assert text.startswith("max_recv_rows: too small") and "given 1" in text, text


def test_the_limit_is_never_more_than_ranks_can_send():
    assert limits.max_rows_by_factor(100, 10, 4, 2, 8) == 4 * 10 * 2
    assert limits.max_rows_by_factor(100, 10, 4, 8, 2) == 4 * 10 * 2
    assert limits.max_rows_by_factor(1.01, 10, 4, 2, 8) == 21
    assert limits.max_rows_by_factor(1.01, 10, 4, 2, 8, 16) == 32
    assert limits.max_rows_by_factor(100, 10, 4, 2, 8, 16) == 208, "padding of 8 groups, rounded up"


# ---- TEGroupedMLP, with stand-ins for its linear layers -------------------------------------------------------------


class StandIn(torch.nn.Module):
    """Stands for Megatron's layers of Transformer Engine's GroupedLinear: their parameters, forward and backward_dw."""

    def __init__(self, num_gemms, input_size, output_size, *, config, bias, skip_bias_add, pg_collection, **_):
        super().__init__()
        self.num_gemms, self.te_quant_params = num_gemms, None
        self.is_first_microbatch = True
        self.disable_parameter_transpose_cache = config.disable_parameter_transpose_cache
        slices = pg_collection.expt_tp.size()
        if isinstance(self, TERowParallelGroupedLinear):
            input_size //= slices
        else:
            output_size //= slices
        self.wgrad_accumulation_and_reduce_hooks = []
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1
            if config.delay_wgrad_compute:
                weight.skip_backward_post_hook = True
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(f"bias{i}", torch.nn.Parameter(weight.detach()[:, 0].clone()))
        self.biases = [f"bias{i}" for i in range(num_gemms)] if bias else []
        self.skips_biases = skip_bias_add

    def register_wgrad_accumulation_and_reduce_hooks(self, hook):
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def forward(self, x, m_splits):
        assert isinstance(m_splits, list)
        parts = [part @ getattr(self, f"weight{i}").t() for i, part in enumerate(x.split(m_splits))]
        biases = [getattr(self, name) for name in self.biases]
        self.is_first_microbatch = False
        if self.skips_biases:
            return torch.cat(parts), biases or None
        return torch.cat([part + bias for part, bias in zip(parts, biases)] or parts), None

    def backward_dw(self):
        raise AssertionError("not of this one")


class TEColumnParallelGroupedLinear(StandIn):
    pass


class TERowParallelGroupedLinear(StandIn):
    pass


def make_grouped_layer(config, layer_number: int = 1):
    """A MoELayer with TEGroupedMLP."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    kind = getattr(experts, "GroupedMLPSubmodules", MLPSubmodules)  # newer versions
    linears = kind(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear)
    layer = MoELayer(config, MoESubmodules(ModuleSpec(experts.TEGroupedMLP, submodules=linears)))
    layer.set_layer_number(layer_number)
    with torch.no_grad():
        set_weights(layer, layer)
        for name, weight in layer.experts.named_parameters():
            weight.copy_(random(*weight.shape, seed=weight.shape[-1] + int(re.search(r"\d+$", name)[0])) * 0.3)
    return layer.to(device())


GROUPED = dict(moe_grouped_gemm=True)
# Megatron needs Transformer Engine for it, so the layer beside it goes without.
MOE_ACT = dict(recompute_granularity="selective", recompute_modules=["moe_act"])


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


# ---- gradients in main_grad -----------------------------------------------------------------------------------------


def ddp_of(layer, config, **settings):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = dict(grad_reduce_in_fp32=True, overlap_grad_reduce=True) | settings
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), layer)


def iterations(ddp, rank: int, between=lambda: None, overwritten=()) -> dict[str, torch.Tensor]:
    """Two iterations of two microbatches; every main_grad, summed over the ranks that share the weight.

    The first microbatch writes over the main_grad of ``overwritten``, and does not read it.
    """
    found = {}
    for iteration in range(2):
        ddp.zero_grad_buffer()
        for parameter in overwritten:
            parameter.main_grad.fill_(7)
        if ddp.ddp_config.overlap_param_gather:
            lose_weights_of_others(ddp)
        with ddp.no_sync():
            found[f"{iteration} first"] = step(ddp, tokens_of(rank, 2 * iteration))["output"]
            between()
        found[f"{iteration} second"] = step(ddp, tokens_of(rank, 2 * iteration + 1))["output"]
        between()
        ddp.finish_grad_sync()
        for name, parameter in ddp.module.named_parameters():
            assert parameter.grad is None, name
            found[f"{iteration} {name}"] = parameter.main_grad.clone()
    return found


def lose_weights_of_others(ddp) -> None:
    """As after a step of the distributed optimizer: a rank has its part of the weights, the others are on the way."""
    for buffer in ddp.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = bucket.param_data.view(group.size(), -1)
            own = parts[group.rank()].clone()
            parts.fill_(float("nan"))
            parts[group.rank()] = own
    ddp.start_param_sync()


IN_BUCKETS = dict(use_distributed_optimizer=True, bucket_size=3000)  # Gloo reduces these on GPUs too


# For tests whose ranks may share a GPU, where NCCL does not start.
GLOO_TAKES_LISTS = pytest.mark.skipif(
    on_gpu(), reason="Megatron reduces lists of gradients, and Gloo takes no list of CUDA tensors"
)


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


def main_grads(layer, *xs) -> dict[str, torch.Tensor]:
    """What these microbatches add to main_grad, which a script has made by itself."""
    for weight in layer.experts.parameters():
        weight.main_grad = torch.ones(weight.shape, dtype=torch.float32, device=weight.device)
    for x in xs:
        step(layer, x)
    found = {name: weight.main_grad - 1 for name, weight in layer.experts.named_parameters()}
    if layer.config.gradient_accumulation_fusion:
        assert all(weight.grad is None for weight in layer.experts.parameters())
        return found
    return {name: found[name] + grad for name, grad in grads_of(layer.experts).items()}


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


# ---- layers that keep Megatron's way --------------------------------------------------------------------------------


class Wrapped(TEColumnParallelGroupedLinear):
    pass


FC1 = "experts.linear_fc1"


def promote_one(layer):
    for weight in layer.experts.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.bfloat16)
    weight.main_grad = weight.main_grad.float()


def strange_wrapper(layer):
    layer.config.gradient_accumulation_fusion = True
    for weight in layer.experts.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False


def hook(module):
    module.register_forward_hook(lambda *given: None)


def derive(layer):
    layer.experts.__class__ = type("InferenceGroupedMLP", (type(layer.experts),), {})


def clamp_fused(layer):
    layer.config.activation_func_clamp_value, layer.config.bias_activation_fusion = 7.0, True


def setting(name, value, owner="config"):
    return lambda layer: setattr(operator.attrgetter(owner)(layer), name, value)


REASONS = [
    (setting("activation_func", torch.nn.functional.relu), "activation_func is relu"),
    (setting("fp8", "e4m3"), "fp8 is e4m3 with the recipe delayed, not e4m3 with blockwise"),
    (clamp_fused, "this Megatron's fused SwiGLU clamps nothing"),
    (setting("moe_mlp_glu_interleave_size", 8), "moe_mlp_glu_interleave_size is 8"),
    (setting("use_te_activation_func", True), "use_te_activation_func is True"),
    (lambda layer: with_graphs(layer.config, "local", "moe"), "CUDA graphs contain the experts"),
    (derive, "its experts are InferenceGroupedMLP"),
    (setting("__class__", Wrapped, FC1), "its linear layers are Wrapped"),
    (setting("lora", torch.nn.Parameter(torch.zeros(1)), FC1), "TEColumnParallelGroupedLinear has other parameters"),
    (setting("te_quant_params", object(), FC1), "TEColumnParallelGroupedLinear has a quantisation of its own"),
    (lambda layer: hook(layer.experts.linear_fc2), "TERowParallelGroupedLinear has hooks (forward_hooks)"),
    (setting("__fsdp_param__", True, f"{FC1}.weight0"), "Megatron's FSDP holds its weights"),
    (lambda layer: layer.experts.linear_fc2.double(), "its weights have different dtypes or devices"),
    (promote_one, "its main_grads have different dtypes"),
    (strange_wrapper, "its gradients are not those of Megatron's DistributedDataParallel"),
]


FUSED_SWIGLU = "megatron.core.fusions.fused_bias_swiglu.weighted_bias_swiglu_impl"


@on_ranks()
def test_layers_that_keep_megatrons_way_are_named_with_their_reasons(rank: int, monkeypatch):
    monkeypatch.setattr(FUSED_SWIGLU, lambda x, bias, weights: None)
    with switched_on() as printed:
        layers = [make_grouped_layer(make_config("alltoall", **GROUPED), n) for n in range(1, len(REASONS) + 1)]
        for layer, (change, _) in zip(layers, REASONS):
            change(layer)
        layers += [make_layer(make_config("alltoall", activation_func=torch.tanh), number) for number in (16, 17)]
        layers += [make_layer(make_config("alltoall"), number) for number in (18, 19)]
        layers[17].config.fine_grained_activation_offloading, layers[17].config.offload_modules = True, ["moe_act"]
        assert [experts.is_grouped(layer.experts) for layer in layers] == [False] * 18 + [True]
        line = said(printed)
    head, _, others = line.partition(". Megatron's own way: ")
    assert rank > 0 or head.startswith("ep_dispatcher runs the experts of 1 of 19 MoE layers in grouped GEMMs (")
    reasons = [f"layer {number}: {reason}" for number, (_, reason) in enumerate(REASONS, 1)]
    reasons += ["layer 16, 17: activation_func is tanh", "layer 18: offload_modules has moe_act"]
    for found, wanted in zip(others.split("; "), reasons, strict=True) if rank == 0 else ():
        assert found.startswith(wanted), (found, wanted)


@on_ranks()
def test_clamped_swiglu_runs_where_megatrons_fused_one_clamps_too(rank: int, monkeypatch):
    """In 0.20; in 0.16 the fused one ignores the limit."""
    monkeypatch.setattr(FUSED_SWIGLU, lambda x, bias, weights, clamp_value=None: None)
    with switched_on():
        layer = make_grouped_layer(make_config(**GROUPED))
        clamp_fused(layer)
        assert experts.is_grouped(layer.experts)


@on_ranks()
def test_a_layer_that_is_refused_runs_megatrons_way(rank: int):
    settings = dict(moe_expert_capacity_factor=1.3, moe_pad_expert_input_to_capacity=True)
    settings["activation_func"] = torch.nn.functional.relu
    case = Case(layout=EP2, settings=settings)
    wanted = run_layer(rank, case, OURS)
    with switched_on() as printed:
        assert_same_bits(run_layer(rank, case, OURS), wanted)
    assert said(printed).endswith("Megatron's own way: layer 1: activation_func is relu" * (rank == 0))


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
