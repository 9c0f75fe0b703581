"""Decides which layers of experts can run in grouped GEMMs, and which can overlap with communication."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch.nn.functional as F
from megatron.core import activations, distributed, tensor_parallel
from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts as megatrons
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.module_tracker import ModuleTracker

from ep_dispatcher.integrations.megatron.dispatcher import graphs, megatron_config, registration
from ep_dispatcher.integrations.megatron.dispatcher.dispatcher import MoEEPTokenDispatcher
from ep_dispatcher.integrations.megatron.grouped_experts import float8
from ep_dispatcher.integrations.megatron.grouped_experts.megatron_experts import MegatronExperts
from ep_dispatcher.integrations.megatron.grouped_experts.module_snapshot import GLOBAL_HOOKS, hooks_by_name
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.activation import SWIGLU, Activation
from ep_dispatcher.moe.expert_matrices import LINE_BYTES

# Fields of TransformerConfig, with the values that they must have. Not every version has all of them.
REQUIRED_SETTINGS = {
    "fp4": None,
    "quant_recipe": None,
    "use_kitchen": False,
    "batch_invariant_mode": False,
    "use_te_activation_func": False,
    "use_transformer_engine_op_fuser": False,
    "moe_use_grouped_tensor": False,
    "expert_gtp_weight_remat_size": 1,
    "activation_func_fp8_input_store": False,
    "moe_mlp_glu_interleave_size": None,
    "cpu_offloading": False,
}
DTYPES_ON_GPU = grouped_gemm.KERNEL_DTYPES  # with others the host would wait for the counts
_requires_grad = attrgetter("requires_grad")
# Megatron's activation functions, and what replaces them.
_QUICK_GELU = Activation("silu", alpha=1.702)
ACTIVATIONS: Mapping[Callable[..., Any], Activation] = {
    F.silu: SWIGLU,
    F.gelu: Activation("gelu"),
    activations.fast_gelu: Activation("gelu_tanh"),
    activations.quick_gelu: _QUICK_GELU,
    fused_bias_geglu.quick_gelu: _QUICK_GELU,
    activations.squared_relu: Activation("squared_relu"),
}


class _KnownForwards:
    """The exact classes that grouped GEMMs can replace, with their forwards at the time of register()."""

    def __init__(self) -> None:
        found = [MLP, tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear]
        try:
            from megatron.core.extensions import transformer_engine as te
        except ImportError:
            te = None
        names = [f"TE{side}Parallel{kind}Linear" for side in ("Column", "Row") for kind in ("", "Grouped")]
        found += [getattr(te, name, None) for name in names]
        # Without Transformer Engine some of these are not classes.
        classes: list[Any] = [kind for kind in found if isinstance(kind, type)]
        self.forwards: dict[type, Callable[..., Any]] = {kind: kind.forward for kind in classes}


def known_forwards() -> dict[type, Callable[..., Any]]:
    """Return the exact classes that grouped GEMMs can replace, with their forwards as they were at the first call."""
    return registration.process_wide(_KnownForwards).forwards


def linear_layers(experts: Any) -> tuple[list[Module], list[Module], list[Module]]:
    """Return the linear layers with w1, those with w2, and all modules that grouped GEMMs do not call.

    All lists are empty if the class of the experts is unknown.
    """
    if type(experts) is megatrons.TEGroupedMLP:
        owners = [experts]
    elif type(experts) is megatrons.SequentialMLP:
        owners = list(experts.local_experts)
    else:
        return [], [], []
    if not all(hasattr(owner, name) for owner in owners for name in ("linear_fc1", "linear_fc2")):
        return [], [], []
    fc1, fc2 = [owner.linear_fc1 for owner in owners], [owner.linear_fc2 for owner in owners]
    return fc1, fc2, [owner for owner in owners if owner is not experts] + fc1 + fc2


def why_not(ours: MegatronExperts) -> str | None:
    """Return why these experts cannot run in grouped GEMMs; None if they can."""
    kind = type(ours.module)
    if not ours.fc1:
        return f"its experts are {_name(kind)}"
    return _foreign_forward(ours) or _why_not_settings(ours.config, kind.__name__) or _why_not_modules(ours)


def _foreign_forward(ours: MegatronExperts) -> str | None:
    return None if ours.has_our_forward() else f"the forward of {type(ours.module).__name__} is not ep_dispatcher's"


def why_dispatch_cannot_be_left_to(ours: MegatronExperts) -> str | None:
    """Return why these experts cannot run a PendingDispatch; None if they can, in grouped GEMMs or Megatron's way."""
    return _foreign_forward(ours) or _why_not_hooks(ours.module)


def _name(kind: type) -> str:
    """Return the name of a class. Add its module if a class that can run in grouped GEMMs has the same name."""
    known = {one.__name__ for one in known_forwards()} | {"TEGroupedMLP", "SequentialMLP"}
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__name__ in known else kind.__name__


def activation_of(config: Any) -> Activation:
    """Return the activation of experts with this config, one of those that ``why_not`` allows."""
    found = ACTIVATIONS[config.activation_func]
    if not config.gated_linear_unit:
        return found._replace(gated=False)
    limit, offset = getattr(config, "activation_func_clamp_value", None), getattr(config, "glu_linear_offset", 0.0)
    return found if limit is None and not offset else found._replace(limit=limit, offset=offset)


def _has_clamping_swiglu() -> bool:
    """Return whether Megatron's fused SwiGLU takes activation_func_clamp_value, as in 0.20."""
    return "clamp_value" in inspect.signature(fused_bias_swiglu.weighted_bias_swiglu_impl).parameters


def _why_not_settings(config, kind: str) -> str | None:
    if config.activation_func not in ACTIVATIONS:
        return f"activation_func is {getattr(config.activation_func, '__name__', config.activation_func)}"
    clamps = getattr(config, "activation_func_clamp_value", None) is not None
    swiglu = config.activation_func is F.silu and config.gated_linear_unit
    if clamps and swiglu and config.bias_activation_fusion and not _has_clamping_swiglu():
        return "activation_func_clamp_value is set, but the fused SwiGLU of this Megatron does not clamp"
    if config.add_bias_linear and config.expert_tensor_parallel_size > 1:
        return f"add_bias_linear with an expert_tensor_parallel_size of {config.expert_tensor_parallel_size}"
    for name, required in REQUIRED_SETTINGS.items():
        value = getattr(config, name, required)
        if value != required:
            return f"{name} is {value}"
    if getattr(config, "fine_grained_activation_offloading", False):
        names = [name for name in config.offload_modules if name in ("expert_fc1", "moe_act")]
        if names:
            return f"offload_modules has {' and '.join(names)}"
    captured = megatron_config.captured_experts(config)
    if captured is not None and not registration.chooses_ep_dispatcher(config):
        return f"CUDA graphs contain the experts ({captured[0]}), and their rows come by another dispatcher"
    overlaps_wgrad = megatron_config.has_overlapped_wgrad(config)
    if kind == "SequentialMLP" and (overlaps_wgrad or getattr(config, "delay_wgrad_compute", False)):
        return f"{megatron_config.OVERLAPS_WGRAD if overlaps_wgrad else 'delay_wgrad_compute'} with SequentialMLP"
    if overlaps_wgrad and megatron_config.can_capture_layers(config):  # the hooks of weights would run in the graph
        return f"{megatron_config.OVERLAPS_WGRAD} with CUDA graphs of layers"
    return None


def _why_not_modules(ours: MegatronExperts) -> str | None:
    experts = ours.module
    grouped = "linear_fc1" in vars(experts)["_modules"]  # TEGroupedMLP
    num_weights = experts.num_local_experts if grouped else 1
    kinds = ("weight", "bias") if ours.config.add_bias_linear else ("weight",)
    names = [f"{kind}{i}" if grouped else kind for kind in kinds for i in range(num_weights)]
    linears = {*ours.fc1, *ours.fc2}
    for module in ours.bypassed:
        kind, forwards = type(module), known_forwards()
        if kind not in forwards:
            return f"its {'linear layers' if module in linears else 'experts'} are {_name(kind)}"
        if "forward" in vars(module) or kind.forward is not forwards[kind]:
            return f"the forward of {kind.__name__} was replaced"
        if module in linears and {name for name, _ in module.named_parameters()} != set(names):
            return (
                f"{kind.__name__} has other parameters than {names[0]}{f' to {names[-1]}' if num_weights > 1 else ''}"
            )
        if getattr(module, "te_quant_params", None) is not None:
            return f"{kind.__name__} has a quantization of its own"
    for module in (experts, *ours.bypassed):
        if getattr(module, "activation_func", ours.config.activation_func) is not ours.config.activation_func:
            return f"the activation_func of {type(module).__name__} was replaced"
    return _why_not_global_hooks() or _why_not_hooks(*ours.bypassed) or _why_not_weights(ours)


def _why_not_global_hooks() -> str | None:
    """Return why global module hooks prevent it. Hooks of FlopCounterMode do not, as they only record the module."""
    for hooks in GLOBAL_HOOKS:
        for hook in hooks.values():
            if type(getattr(hook, "__self__", None)) is not ModuleTracker:
                return f"all modules have a hook: {getattr(hook, '__qualname__', hook)}"
    return None


def _why_not_hooks(*modules: Module) -> str | None:
    for module in modules:
        for name, hooks in hooks_by_name(module):
            if graphs.is_capturing() and name == "_forward_hooks":
                continue  # Transformer Engine's own, while it warms up
            if name == "_forward_pre_hooks" and all(map(_brings_weights, hooks.values())):
                continue
            if hooks:
                return f"{type(module).__name__} has hooks ({name.strip('_')})"
    return None


def _brings_weights(hook: Any) -> bool:
    """Return whether a forward pre-hook is the one of Megatron's DistributedDataParallel with overlap_param_gather.

    That hook waits for the module's weights, and does not read the module's inputs.
    """
    make = distributed.DistributedDataParallel._make_forward_pre_hook
    return getattr(hook, "__code__", None) in make.__code__.co_consts


def _why_not_weights(ours: MegatronExperts) -> str | None:
    parameters = ours.parameters()
    tensors, w1, w2 = parameters.flat(), parameters.w1, parameters.w2
    dtype, device = w1[0].dtype, w1[0].device
    if ours.is_float8:
        why_not = float8.why_not(ours.config, [*w1, *w2])
        if why_not is not None:
            return why_not
        if float8.is_quantized(w1[0]):
            if megatron_config.can_capture_experts(ours.config) and not float8.has_lasting_transposed_copies():
                return "CUDA graphs may contain its quantized weights, whose copies this Transformer Engine throws away"
    for weight in tensors:
        is_plain = type(weight) is Parameter and type(weight.data) is Tensor
        if not is_plain and not (ours.is_float8 and float8.is_quantized(weight)):
            return f"its weights are {type(weight).__name__} of {type(weight.data).__name__}"
        if hasattr(weight, "__fsdp_param__"):
            return "Megatron's FSDP holds its weights"
        if weight.dtype != dtype or weight.device != device:
            return "its weights have different dtypes or devices"
        why_not = _why_not_strides(ours, weight, is_plain)
        if why_not is not None:
            return why_not
    if len({hasattr(weight, "main_grad") for weight in tensors}) > 1:
        return "some of its weights have no main_grad"
    if len({getattr(weight, "main_grad", weight).dtype for weight in tensors}) > 1:
        return "its main_grads have different dtypes"
    if device.type == "cuda":
        if dtype not in DTYPES_ON_GPU:
            return f"params_dtype is {dtype}"
        if any(w.shape[1] * dtype.itemsize % LINE_BYTES for w in (w1[0], w2[0])):
            return f"rows of its weights are not multiples of {LINE_BYTES} bytes"
    if ours.config.gradient_accumulation_fusion and hasattr(w1[0], "grad_added_to_main_grad") and ours.ddp() is None:
        return "its gradients do not belong to Megatron's DistributedDataParallel"
    return None


def _why_not_strides(ours: MegatronExperts, weight: Any, is_plain: bool) -> str | None:
    """Return why a weight or its main_grad cannot be used as it lies in memory.

    Kernels write gradients, and copies of experts are moved, in the order of memory. A quantized weight has no values
    of its own: Transformer Engine allocates them, contiguous. Its main_grad is as that of any other weight.
    """
    main_grad = getattr(weight, "main_grad", None)
    for owner, t in (("", weight if is_plain else None), ("main_grad of ", main_grad)):
        if t is not None and not t.is_contiguous():
            name = next(name for name, one in ours.module.named_parameters() if one is weight)
            return f"{owner}{name} has shape {list(t.shape)} and strides {list(t.stride())}, and is not contiguous"
    return None


def why_no_overlap(ours: MegatronExperts) -> str | None:
    """Return why communication of this layer cannot overlap with its experts' GEMMs, whatever the buffer."""
    if ours.why_not is not None:
        return "its experts run Megatron's way"
    dispatcher = ours.layer.token_dispatcher
    if not isinstance(dispatcher, MoEEPTokenDispatcher):
        return f"its dispatcher is {type(dispatcher).__name__}"
    if getattr(ours.config, "overlap_moe_expert_parallel_comm", False):  # 1F1B: each step is a node of the schedule
        return "overlap_moe_expert_parallel_comm overlaps it with another microbatch"
    if dispatcher.tp_size > 1:
        return f"expert_tensor_parallel_size is {dispatcher.tp_size}"
    if dispatcher.expert_alignment > 1 and not ours.is_float8:
        return f"rows of an expert are padded to a multiple of {dispatcher.expert_alignment}"
    return why_dispatch_cannot_be_left_to(ours)  # hooks would get other rows


def why_no_copies(ours: MegatronExperts) -> str | None:
    """Return why the experts of this layer cannot have redundant copies on other ranks."""
    if ours.why_not is not None:
        return f"its experts run Megatron's way: {ours.why_not}"
    if ours.is_float8:
        return "it runs in FP8"
    if megatron_config.has_overlapped_wgrad(ours.config):
        return f"{megatron_config.OVERLAPS_WGRAD} computes gradients of weights later"
    if getattr(ours.config, "delay_wgrad_compute", False):
        return "delay_wgrad_compute computes gradients of weights later"
    if not all(map(_requires_grad, ours.parameters().flat())):
        return "some of its weights need no gradient"
    return why_no_overlap(ours)


def can_take_quantized(ours: MegatronExperts) -> bool:
    """Return whether these experts can take rows that have arrived quantized. Hooks would see only their anchor."""
    if ours.why_not is not None or not ours.is_float8 or getattr(ours.config, "moe_apply_probs_on_input", False):
        return False
    return why_dispatch_cannot_be_left_to(ours) is None
