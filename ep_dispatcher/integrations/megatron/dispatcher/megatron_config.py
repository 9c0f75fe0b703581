"""Reads a Megatron configuration for the dispatcher, and refuses settings that it does not support.

The check runs when a layer is built. rank_capacity.py has what limits the rows of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from ep_dispatcher import checks
from ep_dispatcher.integrations.megatron.dispatcher import arguments, rank_capacity
from ep_dispatcher.integrations.megatron.dispatcher.arguments import flag_of

# Fields with the multiprocessors that communication may use. Megatron 0.19 added the first; there the others set it.
SMS_FIELDS = ("moe_flex_dispatcher_num_sms", "moe_deepep_num_sms", "moe_hybridep_num_sms")
# Fields that this dispatcher would ignore, and why. Not every Megatron has all of them. Two other fields of other
# backends ask for what this one does anyway: moe_permute_fusion_into_hybridep, moe_hybridep_pad_uneven_dispatch_inputs.
UNSUPPORTED = {
    "moe_paged_stash": "it is for experts of the op fuser; a step with too many rows is skipped here without it",
    "moe_ncclep_static_shape": "it is for ncclep; --moe-expert-rank-capacity-factor gives static shapes here",
    "moe_ncclep_zero_copy": "it is for ncclep",
    "moe_hybridep_num_blocks_permute": "it is for hybridep, and nothing is permuted here",
    "moe_hybridep_num_blocks_unpermute": "it is for hybridep, and nothing is permuted here",
    "moe_hybridep_num_sms_preprocessing": "it is for hybridep",
}
OVERLAPS_WGRAD = "overlap_dispatch_backward_with_experts_wgrad"  # 0.18 and newer
# Fields that let GEMMs run beside a dispatch or combine. Without them it may take more than 24 multiprocessors.
OVERLAPS = ("overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap", "delay_wgrad_compute", OVERLAPS_WGRAD)
ALONE_SMS = 32  # multiprocessors of an operation that nothing overlaps with
PROBS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check(config, num_local_experts: int, *, expert_tp: int, num_ranks: int) -> None:
    """Raise ValueError, with the flag's name, for a setting that Megatron accepts and this dispatcher does not."""
    captured = captured_experts(config)
    if captured is not None:
        _check_capture(config, *captured)
    num_sms(config)
    for name, value in _changed(config, UNSUPPORTED).items():
        default = type(config).__dataclass_fields__[name].default
        checks.fail(flag_of(name), value, f"{default} with this dispatcher: {UNSUPPORTED[name]}")
    columns = config.moe_router_topk * expert_tp
    if columns > checks.MAX_TOPK:
        times = f" x --expert-tensor-parallel-size {expert_tp}" if expert_tp > 1 else ""
        checks.fail("--moe-router-topk", f"{config.moe_router_topk}{times}", f"at most {checks.MAX_TOPK} in all")
    if num_local_experts * num_ranks != config.num_moe_experts * expert_tp:
        checks.refuse(
            f"--num-experts {config.num_moe_experts} cannot be divided evenly among {num_ranks // expert_tp} ranks; "
            f"this rank has {num_local_experts}"
        )
    latent = getattr(config, "moe_latent_size", None)
    flag, size = ("--moe-latent-size", latent) if latent else ("--hidden-size", config.hidden_size)
    dtype = config.params_dtype
    if dtype not in checks.DTYPES:
        checks.fail("--params-dtype", dtype, "float32, bfloat16 or float16")
    if size * dtype.itemsize % checks.ROW_GRANULARITY:
        step = checks.ROW_GRANULARITY // dtype.itemsize
        checks.fail(
            flag, size, f"a multiple of {step} in {dtype}: rows are multiples of {checks.ROW_GRANULARITY} bytes"
        )


def graph_modules(config) -> tuple[str, list[str]]:
    """Return the flag that says what CUDA graphs capture, and its values as words. 0.18 renamed the flag.

    Until Megatron has checked it, a value may be a name, or a list of names or of members of an enum.
    """
    values = {name: getattr(config, name, None) for name in ("cuda_graph_modules", "cuda_graph_scope")}
    given = {name: value for name, value in values.items() if value is not None}
    return flag_of(next(iter(given), "cuda_graph_impl")), re.findall(r"\w+", str([*given.values()]))


def captured_experts(config) -> tuple[str, str] | None:
    """Return the flag and the value that put dispatch and experts into CUDA graphs; None if none does."""
    if config.cuda_graph_impl == "full_iteration":  # 0.18 and newer
        return "--cuda-graph-impl", "full_iteration"
    if config.cuda_graph_impl == "none":
        return None
    flag, modules = graph_modules(config)
    if not modules:
        return flag, "none, which is the whole layer"
    return next(((flag, name) for name in ("full_iteration", "moe") if name in modules), None)


def can_capture_experts(config) -> bool:
    """Return whether some kind of layer has its experts in a CUDA graph.

    Megatron's own graphs (local) of attn contain a whole TransformerLayer, but nothing of a MoETransformerLayer.
    """
    own_attention = config.cuda_graph_impl == "local" and "attn" in graph_modules(config)[1]
    return own_attention or captured_experts(config) is not None


def can_capture_layers(config) -> bool:
    """Return the same, but False for graphs of a whole iteration, which contain DistributedDataParallel's hooks too."""
    captured = captured_experts(config)
    return can_capture_experts(config) and (captured is None or captured[1] != "full_iteration")


def graphs_begin_layers(config) -> bool:
    """Return whether Transformer Engine captures layers from their beginning on, with attention before the experts."""
    modules = graph_modules(config)[1]
    return config.cuda_graph_impl == "transformer_engine" and (not modules or "attn" in modules)


def has_overlapped_wgrad(config) -> bool:
    """Return whether gradients of experts' weights are computed beside the backward of dispatch, in backward_dw."""
    return getattr(config, OVERLAPS_WGRAD, False)


def _check_capture(config, flag: str, value: str) -> None:
    """Raise ValueError for settings that dispatch and experts do not support inside a CUDA graph."""
    if rank_capacity.factor_of(config) is None:
        checks.refuse(
            f"{flag} is {value}: while a graph is captured the host cannot wait for row counts. Capture attn, "
            f"moe_router and moe_preprocess alone, or give {arguments.flag('experts')} auto and "
            f"{rank_capacity.FACTOR_FLAG}"
        )
    if config.variable_seq_lengths:
        checks.fail("--variable-seq-lengths", True, f"False with {flag} {value}: a graph has one number of tokens")
    if config.overlap_moe_expert_parallel_comm and value != "full_iteration":
        checks.fail("--overlap-moe-expert-parallel-comm", True, f"False with {flag} {value}: it splits a layer")


def num_sms(config) -> int | None:
    """Return the multiprocessors that the user's flags give to communication, by default ALONE_SMS if it runs alone.

    None stands for the engine's default, 24. Megatron's own defaults (20 for DeepEP, 16 for HybridEP in 0.16) are for
    other backends.
    """
    ours = arguments.setting(config, "num_sms")
    if ours is not None:
        return ours
    given = _changed(config, SMS_FIELDS)
    for name, value in given.items():
        checks.integer(flag_of(name), value, 1)
        if SMS_FIELDS[0] not in given and len(set(given.values())) > 1:
            checks.refuse(f"{flag_of(name)} is {value} beside {given}: give only one number of multiprocessors")
    overlaps = arguments.setting(config, "overlap") or any(getattr(config, name, False) for name in OVERLAPS)
    return next(iter(given.values()), None if overlaps else ALONE_SMS)


def _changed(config, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those fields that this Megatron has and that differ from their defaults."""
    fields = type(config).__dataclass_fields__
    given = {name: getattr(config, name) for name in names if name in fields}
    return {name: value for name, value in given.items() if value != fields[name].default}


def expert_alignment(config) -> int:
    """Return the alignment of expert groups that Megatron's grouped GEMMs need, 1 for none.

    Megatron knows which settings need one: quantization, since 0.18 the op fuser, in 0.20 moe_use_grouped_tensor.
    Before 0.18 it says 16 where none is needed.
    """
    from megatron.core.transformer.moe import (
        moe_utils,  # here, because buffers.py imports this file before Megatron is in use
    )

    knows_all = hasattr(moe_utils, "skip_routed_expert_padding")  # 0.18 and newer
    if knows_all or config.fp8 or getattr(config, "fp4", None):
        return max(1, moe_utils.get_align_size_for_quantization(config))
    return 1
