"""Says which layers of experts can run in grouped GEMMs, and which can overlap with communication.

``ours`` says how this integration runs a layer: ``Experts`` in experts.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from ep_dispatcher import grouped_gemm
from ep_dispatcher.integrations.megatron import graphs, limits, plugin

if TYPE_CHECKING:
    from ep_dispatcher.integrations.megatron.experts import Experts

# Fields of TransformerConfig with the values that they must have. Not every version has all of them.
PLAIN_SETTINGS = {
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "fp8": None,
    "fp4": None,
    "fp8_param": False,
    "quant_recipe": None,
    "use_kitchen": False,
    "batch_invariant_mode": False,
    "use_te_activation_func": False,
    "use_transformer_engine_op_fuser": False,
    "moe_use_grouped_tensor": False,
    "expert_gtp_weight_remat_size": 1,
    "activation_func_fp8_input_store": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "moe_mlp_glu_interleave_size": None,
    "moe_apply_probs_on_input": False,
    "cpu_offloading": False,
}
# The linear layers that grouped GEMMs can replace, by the names of their classes.
GROUPED_LINEARS = ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
LINEARS = ("ColumnParallelLinear", "RowParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear")
DTYPES_ON_GPU = grouped_gemm.KERNEL_DTYPES  # with others the host would wait for the counts
HOOKS = ("_forward_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")


def why_not(experts: Any, ours: Experts) -> str | None:
    """Say why this experts module cannot run in grouped GEMMs. None: it can."""
    if not ours.fc1:
        return f"its experts are {type(experts).__name__}"
    return _why_not_settings(ours.config, type(experts).__name__) or _why_not_modules(experts, ours)


def _why_not_settings(config, kind: str) -> str | None:
    if config.activation_func != F.silu:
        return f"activation_func is {getattr(config.activation_func, '__name__', config.activation_func)}"
    for name, plain in PLAIN_SETTINGS.items():
        value = getattr(config, name, plain)
        if value != plain:
            return f"{name} is {value}"
    if getattr(config, "fine_grained_activation_offloading", False):
        names = [name for name in config.offload_modules if name in ("expert_fc1", "moe_act")]
        if names:
            return f"offload_modules has {' and '.join(names)}"
    captured = limits.captured_experts(config)
    if captured is not None and not plugin.is_ours(config):
        return f"CUDA graphs contain the experts ({captured[0]}), and their rows come by another dispatcher"
    overlaps_wgrad = limits.overlaps_wgrad(config)
    if kind == "SequentialMLP" and (overlaps_wgrad or getattr(config, "delay_wgrad_compute", False)):
        return f"{limits.OVERLAPS_WGRAD if overlaps_wgrad else 'delay_wgrad_compute'} with SequentialMLP"
    if overlaps_wgrad and limits.layers_may_be_captured(config):  # the hooks of weights would run in the graph
        return f"{limits.OVERLAPS_WGRAD} with CUDA graphs of layers"
    return None


def _why_not_modules(experts: Any, ours: Experts) -> str | None:
    grouped = type(experts).__name__ == "TEGroupedMLP"
    num_weights = experts.num_local_experts if grouped else 1
    names = [f"weight{i}" for i in range(num_weights)] if grouped else ["weight"]
    for linear in ours.fc1 + ours.fc2:
        kind = type(linear).__name__
        if kind not in (GROUPED_LINEARS if grouped else LINEARS):
            return f"its linear layers are {kind}"
        if [name for name, _ in linear.named_parameters()] != names:
            return f"{kind} has other parameters than {names[0]}{f' to {names[-1]}' if num_weights > 1 else ''}"
        if getattr(linear, "te_quant_params", None) is not None:
            return f"{kind} has a quantisation of its own"
    return _why_not_hooks(*ours.bypassed) or _why_not_weights(ours)


def _why_not_hooks(*modules: Module) -> str | None:
    for module in modules:
        for hooks in HOOKS:
            if graphs.is_capturing() and hooks == "_forward_hooks":
                continue  # Transformer Engine's own, while it warms up
            if getattr(module, hooks):
                return f"{type(module).__name__} has hooks ({hooks.strip('_')})"
    return None


def _why_not_weights(ours: Experts) -> str | None:
    w1, w2 = ours.weights()
    dtype, device = w1[0].dtype, w1[0].device
    for weight in (*w1, *w2):
        if type(weight) is not Parameter or type(weight.data) is not Tensor:
            return f"its weights are {type(weight).__name__} of {type(weight.data).__name__}"
        if hasattr(weight, "__fsdp_param__"):
            return "Megatron's FSDP holds its weights"
        if weight.dtype != dtype or weight.device != device:
            return "its weights have different dtypes or devices"
    if len({getattr(weight, "main_grad", weight).dtype for weight in (*w1, *w2)}) > 1:
        return "its main_grads have different dtypes"
    if device.type == "cuda":
        if dtype not in DTYPES_ON_GPU:
            return f"params_dtype is {dtype}"
        if any(w.shape[1] * w.itemsize % grouped_gemm.LINE_BYTES for w in (w1[0], w2[0])):
            return f"rows of its weights are no multiple of {grouped_gemm.LINE_BYTES} bytes"
    if ours.config.gradient_accumulation_fusion and hasattr(w1[0], "grad_added_to_main_grad") and ours.ddp() is None:
        return "its gradients are not those of Megatron's DistributedDataParallel"
    return None


def why_no_waves(experts: Any, ours: Experts, *, gemms_wait: bool = True) -> str | None:
    """Say why dispatch and combine of this layer cannot run under its experts' GEMMs, with any buffer.

    gemms_wait: whether GEMMs wait for rows, as they do in one part of the tokens
    """
    layer = ours.layer()
    if ours.why_not is not None or layer is None:
        return "its experts run Megatron's way"
    dispatcher = layer.token_dispatcher
    if not hasattr(dispatcher, "experts_communicate"):
        return f"its dispatcher is {type(dispatcher).__name__}"
    if getattr(ours.config, "overlap_moe_expert_parallel_comm", False):  # 1F1B: each step is a node of the schedule
        return "overlap_moe_expert_parallel_comm overlaps it with another microbatch"
    if gemms_wait:
        # Waiting GEMMs delay a send of the pipeline, and the rows may depend on that send.
        if ours.config.pipeline_model_parallel_size > 1 and ours.config.overlap_p2p_comm:
            return "overlap_p2p_comm: a send of the pipeline could start only after GEMMs that wait for another rank"
        # waves.why_not says so only during a capture, which is later.
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and limits.experts_may_be_captured(ours.config):
            return "CUDA graphs contain it, and CUDA_DEVICE_MAX_CONNECTIONS is 1"
    if dispatcher.tp_size > 1:
        return f"expert_tensor_parallel_size is {dispatcher.tp_size}"
    if dispatcher.expert_alignment > 1:
        return f"rows of an expert are padded to a multiple of {dispatcher.expert_alignment}"
    return _why_not_hooks(experts)  # they would get other rows


def why_copied(ours: Experts) -> str | None:
    """Say why each grouped GEMM copies the weights first, and what helps. None: it reads them in place.

    Megatron's DistributedDataParallel gives weights their final place, so ask after it is made.
    """
    weights = ours.weights()
    if not grouped_gemm.has_kernels(weights[0][0]) or all(map(grouped_gemm.stack_in_place, weights)):
        return None
    ddp = ours.ddp()
    if ddp is None or not ddp.ddp_config.use_distributed_optimizer:
        return "each lies by itself, and --use-distributed-optimizer puts them side by side"
    return "padding between buckets separates them, and a larger --ddp-bucket-size separates fewer"
