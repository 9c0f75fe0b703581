"""Experts in grouped GEMMs: what Megatron's own experts compute."""

import contextlib
import io
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
    make_config,
    make_layer,
    on_ranks,
    outcome,
    random,
    run_layer,
    set_weights,
    step,
    tokens_of,
)
from test_experts import uninitialised_memory_is_nan
from test_megatron_layer import CASES, UNEVEN
from test_megatron_schedule import ONE_AFTER_THE_OTHER, OVERLAPPED, run_nodes

from ep_dispatcher.integrations.megatron import eligibility, experts, limits
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
NAMES = ("plain", "no tokens", "capacity", "capacity padded", "router fp64", "recompute moe", "recompute full")
NAMES += ("latent", "shared expert", "shared expert overlapped", "shared expert overlapped, gate, capacity")
NAMES += ("two nodes", *OWN_CASES, "sequence parallel", "expert tensor parallel")  # one layout after the other
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
