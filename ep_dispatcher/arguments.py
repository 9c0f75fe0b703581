"""Checks the arguments of a call, once, and makes the request of them. Everything that a call may not do is found here.

A ValueError names the argument, before anything is sent. decode/arguments.py has what only decode layout has.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypedDict, get_args

import torch
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.argument_types import Layout, Quantize, ScaleFormat, TrainingLayout
from ep_dispatcher.decode import arguments as decode
from ep_dispatcher.engines.base import Engine
from ep_dispatcher.handle import Handle
from ep_dispatcher.request import CombineRequest, DispatchRequest

_INTEGERS, _FLOATS = (torch.int32, torch.int64), (torch.float32,)
_TRAINING_LAYOUTS = get_args(TrainingLayout)
_NO_GRADIENTS = "decode layout has no gradients: use buffer.dispatch and buffer.combine"


class DispatchOptions(TypedDict, total=False):
    """What does not decide the types of ep.dispatch's results."""

    layout: TrainingLayout
    expert_alignment: int
    handle: Handle | None
    max_recv_rows: int | None


class BufferDispatchOptions(TypedDict, total=False):
    """What does not decide the types of Buffer.dispatch's results."""

    layout: Layout
    expert_alignment: int
    handle: Handle | None
    max_recv_rows: int | None
    async_finish: bool
    scale_format: ScaleFormat
    return_hook: bool


def dispatch_request(
    engine: Engine,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    *,
    layout: str = "expert",
    expert_alignment: int = 1,
    quantize: Quantize | None = None,
    handle: Handle | None = None,
    max_recv_rows: int | None = None,
    scale_format: str = "float32",
    return_hook: bool = False,
    async_finish: bool = False,
    label: int = 0,
    has_gradients: bool = False,
    is_balanced: bool = False,
) -> DispatchRequest:
    """Check the arguments of Buffer.dispatch, or of ep.dispatch, which has gradients, and so no decode layout.

    is_balanced: the caller runs redundant experts where the buffer has some
    """
    config, device = engine.config, engine.device
    if config.redundant_experts_per_rank and not is_balanced:
        _refuse_redundant_experts()
    decodes = layout == "decode" or (handle is not None and decode.is_decode(layout, handle))
    if has_gradients:
        if decodes:
            checks.refuse(f"layout is 'decode': {_NO_GRADIENTS}")
        if config.mask_late_ranks:
            checks.refuse(f"buffer was made with mask_late_ranks=True, which has decode layout alone: {_NO_GRADIENTS}")
        if handle is None and layout not in _TRAINING_LAYOUTS:
            checks.one_of("layout", layout, _TRAINING_LAYOUTS)
    if torch.is_autocast_enabled(device):
        x = as_autocast(engine, x)
    checks.rows(x, config.hidden, config.dtype, device, config.max_tokens_per_rank, quantize)
    rows, scales = x if isinstance(x, (tuple, list)) else (x, None)
    num_tokens, packs_scales = rows.shape[0], False
    if decodes:
        if handle is None:
            checks.one_of("layout", layout, engine.layouts)
        is_mx = checks.scale_dtype(quantize, scales) not in (None, torch.float32)
        decode_rows = decode.check_dispatch(
            config, topk_weights, expert_alignment, quantize, max_recv_rows, scale_format, is_mx
        )
        decode.refuse_asynchronous(return_hook, async_finish)
        packs_scales = scale_format == "ue8m0" and not is_mx
        max_recv_rows = decode_rows if handle is None else None
    elif return_hook is not False or scale_format != "float32":
        decode.refuse_elsewhere(scale_format=scale_format, return_hook=return_hook)
    if topk_weights is not None:
        checks.tensor("topk_weights", topk_weights, _FLOATS, (num_tokens, config.num_topk), device)
    plan = message_rows = None
    max_tokens_to_node = 0 if decodes else engine.max_tokens_to_node
    if handle is None:
        expert_alignment, num_rows = _check_routing(
            engine, topk_idx, num_tokens, layout, expert_alignment, max_recv_rows
        )
    else:
        checks.handle(handle, config.buffer_id)
        checks.handle_reuse(handle, num_tokens, topk_idx, layout, expert_alignment, max_recv_rows)
        layout, expert_alignment, num_rows = handle.layout, handle.expert_alignment, handle.num_rows
        plan, message_rows, max_tokens_to_node = handle.plan, handle.message_rows, handle.max_tokens_to_node
    return DispatchRequest(
        rows=rows,
        scales=scales,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        plan=plan,
        message_rows=message_rows,
        max_tokens_to_node=max_tokens_to_node,
        layout=layout,
        expert_alignment=expert_alignment,
        num_rows=num_rows,
        quantize=checks.POWERS_OF_TWO if packs_scales else quantize,
        label=label,
        is_send_only=return_hook,
        packs_scales=packs_scales,
    )


def plan_request(
    engine: Engine,
    topk_idx: Tensor,
    *,
    layout: str,
    expert_alignment: int,
    max_recv_rows: int | None,
    label: int,
) -> DispatchRequest:
    """Check the arguments of Buffer.plan. Return a dispatch of rows of 16 bytes."""
    if engine.config.redundant_experts_per_rank:
        _refuse_redundant_experts()
    checks.one_of("layout", layout, _TRAINING_LAYOUTS)
    alignment, num_rows = _check_routing(engine, topk_idx, "num_tokens", layout, expert_alignment, max_recv_rows)
    config, num_tokens = engine.config, topk_idx.shape[0]
    checks.num_tokens("topk_idx", num_tokens, config.max_tokens_per_rank)
    rows = topk_idx.new_zeros((num_tokens, checks.ROW_GRANULARITY // config.dtype.itemsize), dtype=config.dtype)
    return DispatchRequest(
        rows,
        topk_idx=topk_idx,
        max_tokens_to_node=engine.max_tokens_to_node,
        layout=layout,
        expert_alignment=alignment,
        num_rows=num_rows,
        label=label,
    )


def _check_routing(
    engine: Engine,
    topk_idx: Tensor | None,
    num_tokens: int | str,
    layout: str,
    expert_alignment: int,
    max_recv_rows: int | None,
) -> tuple[int, int]:
    """Check the arguments that a new plan is made from. Return expert_alignment, and the rows of the output or -1.

    num_tokens: the rows of x, or a name if there is no x.
    """
    if layout not in engine.layouts:
        checks.one_of("layout", layout, engine.layouts)
    expert_alignment = checks.integer("expert_alignment", expert_alignment, 1)
    if max_recv_rows is not None:
        max_recv_rows = checks.integer("max_recv_rows", max_recv_rows, 0)
    checks.tensor("topk_idx", topk_idx, _INTEGERS, (num_tokens, engine.config.num_topk), engine.device)
    return expert_alignment, -1 if max_recv_rows is None else max_recv_rows


def _refuse_redundant_experts() -> NoReturn:
    checks.refuse(
        "buffer has redundant experts, whose rows only ep.moe_mlp and ep.MoELayer with its own experts can compute: "
        "make another buffer for this"
    )


def refuse_decode_handle(handle: object) -> None:
    """Refuse a handle of decode layout in ep.combine, which has gradients."""
    if decode.is_decode("", handle):
        checks.refuse(f"handle is one of layout='decode': {_NO_GRADIENTS}")


def combine_request(
    engine: Engine,
    y: Tensor,
    handle: Handle,
    topk_weights: Tensor | None,
    *,
    weights: Tensor | None = None,
    out: Tensor | None = None,
    return_hook: bool = False,
    async_finish: bool = False,
) -> CombineRequest:
    """Check the arguments of Buffer.combine."""
    config, device = engine.config, engine.device
    decodes = decode.is_decode("", handle)
    if not decodes and (weights is not None or out is not None or return_hook is not False):
        decode.refuse_elsewhere(weights=weights, out=out, return_hook=return_hook)
    checks.handle(handle, config.buffer_id)
    if torch.is_autocast_enabled(device):
        y = as_autocast(engine, y)
    if decodes:
        decode.refuse_asynchronous(return_hook, async_finish)
        return decode.combine_request(config, device, y, handle, topk_weights, weights, out, return_hook)
    checks.tensor("y", y, (config.dtype,), (handle.num_rows, config.hidden), device)
    if topk_weights is not None:
        shape = (handle.num_rows,) if handle.layout == "expert" else (handle.num_rows, config.num_topk)
        checks.tensor("topk_weights", topk_weights, _FLOATS, shape, device)
    return CombineRequest(
        y=y,
        plan=handle.plan,
        num_tokens=handle.num_tokens,
        layout=handle.layout,
        topk_weights=topk_weights,
        message_rows=handle.message_rows,
        max_tokens_to_node=handle.max_tokens_to_node,
    )


def as_autocast(engine: Engine, value: Any) -> Any:
    """Return rows or weights in the buffer's dtype if torch.autocast, which is on, casts to that dtype.

    PyTorch casts the arguments of its matrix products by the same rule: not float64, nothing on another device.
    """
    dtype, device = engine.config.dtype, engine.device
    if torch.get_autocast_dtype(device) != dtype or not isinstance(value, Tensor):
        return value
    return value.to(dtype) if value.dtype in checks.DTYPES and value.device.type == device else value
