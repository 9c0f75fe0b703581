"""Megatron's experts with stand-ins of Transformer Engine's layers."""

import contextlib
import io
import re

import pytest
import torch

# First of all: it skips the importing file where Megatron is missing, which the others import.
from lib.megatron_layer import (
    Layout,
    device,
    environment,
    random,
    set_weights,
)

# isort: split
from ep_dispatcher.integrations.megatron.grouped_experts import eligibility, experts
from ep_dispatcher.moe import overlap

GROUPED_GEMMS, OVERLAP, TWO_PARTS = "grouped GEMMs", "overlap", "two parts"

MODES = pytest.mark.parametrize("mode", [GROUPED_GEMMS, TWO_PARTS])

EP2, EP4, ETP2 = Layout(ep=2), Layout(ep=4), Layout(ep=2, etp=2)


@contextlib.contextmanager
def switched_on(mode: str = GROUPED_GEMMS, dtypes=(torch.float32,)):
    """Yield what the rank prints. ``dtypes``: what runs so on a GPU, where float32 does for these tests alone.

    With OVERLAP a layer of one node runs dispatch and combine in one part of the tokens, under nothing on a CPU. With
    TWO_PARTS it has to run in two.
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
            patch.setitem(eligibility.known_forwards(), kind, kind.forward)
        yield printed
        assert runs or mode != TWO_PARTS


@contextlib.contextmanager
def parts(num_parts: int):
    """As inside a node, or between nodes on GPUs. Yield a list that gets an entry for every layer that runs so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "resolve_num_parts", lambda buffer: num_parts)
        yield note_parts(patch)


def two_parts():
    return parts(2)


def note_parts(patch) -> list:
    runs, run = [], overlap.mlp_in_parts
    patch.setattr(overlap, "mlp_in_parts", lambda *given, **options: runs.append(1) or run(*given, **options))
    return runs


def said(printed: io.StringIO, words: str = "MoE layers in grouped GEMMs") -> str:
    """The one line with these words; nothing on ranks but the first."""
    lines = [line for line in printed.getvalue().splitlines() if words in line]
    assert len(lines) == (torch.distributed.get_rank() == 0), lines
    return lines[0] if lines else ""


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
