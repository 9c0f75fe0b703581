"""dispatch and combine as custom operators (torch.library), which torch.compile and other tracers keep whole.

An operator takes and returns only tensors, numbers and strings. So a request is unpacked into the inputs of an operator
here, and packed again inside of it. A traced graph has only the id of its buffer. Outputs are never None: what was not
asked for has no elements. ``after`` is an output of the operation before, in a traced graph (_keep_order).

autograd.py gives both operators their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.library import CustomOpDef

from ep_dispatcher import checks
from ep_dispatcher.argument_types import Quantize
from ep_dispatcher.buffer import Buffer, find_buffer
from ep_dispatcher.observers import refuse_dtensors
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Received, with_anchor

# The fields of Received, in order, without rows_on_host.
DispatchOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def call_dispatch_op(buffer: Buffer, request: DispatchRequest) -> Received:
    """Run a dispatch as an operator."""
    refuse_dtensors(**dict(request.tensors()))
    outputs = dispatch_op(
        rows=request.rows,
        scales=request.scales,
        topk_idx=request.topk_idx,
        topk_weights=request.topk_weights,
        plan=request.plan,
        message_rows=request.message_rows,
        layout=request.layout,
        expert_alignment=request.expert_alignment,
        num_rows=request.num_rows,
        quantize=request.quantize,
        buffer_id=buffer.id,
        max_tokens_to_node=request.max_tokens_to_node,
    )
    return unpack_dispatch_outputs(outputs)


def call_combine_op(buffer: Buffer, request: CombineRequest) -> Combined:
    """Run a combine as an operator."""
    refuse_dtensors(**dict(request.tensors()))
    outputs = combine_op(
        y=request.y,
        plan=request.plan,
        topk_weights=request.topk_weights,
        message_rows=request.message_rows,
        num_tokens=request.num_tokens,
        layout=request.layout,
        buffer_id=buffer.id,
        max_tokens_to_node=request.max_tokens_to_node,
    )
    return Combined(*outputs)


def unpack_dispatch_inputs(
    rows: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    plan: Tensor | None,
    message_rows: Tensor | None,
    layout: str,
    expert_alignment: int,
    num_rows: int,
    quantize: str | None,
    buffer_id: str,
    max_tokens_to_node: int = 0,
    after: Tensor | None = None,
) -> tuple[Buffer, DispatchRequest]:
    """Return the buffer and the request from the inputs of `dispatch_op`."""
    request = DispatchRequest(
        rows=rows,
        scales=scales,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        plan=plan,
        message_rows=_none_if_empty(message_rows),
        max_tokens_to_node=max_tokens_to_node,
        layout=layout,
        expert_alignment=expert_alignment,
        num_rows=num_rows,
        quantize=cast("Quantize | None", quantize),
    )
    return find_buffer(buffer_id), request


def unpack_combine_inputs(
    y: Tensor,
    plan: Tensor,
    topk_weights: Tensor | None,
    message_rows: Tensor | None,
    num_tokens: int,
    layout: str,
    buffer_id: str,
    max_tokens_to_node: int = 0,
    after: Tensor | None = None,
) -> tuple[Buffer, CombineRequest]:
    """Return the buffer and the request from the inputs of `combine_op`."""
    request = CombineRequest(
        y=y,
        plan=plan,
        num_tokens=num_tokens,
        layout=layout,
        topk_weights=topk_weights,
        message_rows=_none_if_empty(message_rows),
        max_tokens_to_node=max_tokens_to_node,
    )
    return find_buffer(buffer_id), request


def _none_if_empty(t: Tensor | None) -> Tensor | None:
    return None if t is None or t.numel() == 0 else t


def _pack_dispatch_outputs(received: Received, request: DispatchRequest) -> DispatchOutputs:
    """Return the outputs of `dispatch_op`."""

    def empty_if_none(t: Tensor | None, dtype: torch.dtype) -> Tensor:
        return request.rows.new_empty(0, dtype=dtype) if t is None else t

    return (
        received.rows,
        empty_if_none(received.scales, torch.float32),
        empty_if_none(received.topk_weights, torch.float32),
        empty_if_none(received.topk_idx, torch.int64),
        received.tokens_per_expert,
        received.rows_per_expert,
        empty_if_none(received.plan, torch.int32),
        empty_if_none(received.message_rows, torch.int32),
        empty_if_none(received.anchor, request.rows.dtype),
    )


def unpack_dispatch_outputs(outputs: Sequence[Any]) -> Received:
    """Return the tensors of a dispatch from the outputs of `dispatch_op`."""
    rows, scales, topk_weights, topk_idx, tokens_per_expert, rows_per_expert, plan, message_rows, anchor = outputs
    return Received(
        rows=rows,
        scales=scales,
        topk_weights=topk_weights,
        topk_idx=topk_idx,
        tokens_per_expert=tokens_per_expert,
        rows_per_expert=rows_per_expert,
        plan=plan,
        message_rows=_none_if_empty(message_rows),
        anchor=anchor,
    )


@torch.library.custom_op("ep_dispatcher::dispatch", mutates_args=())
def dispatch_op(
    rows: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    plan: Tensor | None,
    message_rows: Tensor | None,
    layout: str,
    expert_alignment: int,
    num_rows: int,
    quantize: str | None,
    buffer_id: str,
    max_tokens_to_node: int = 0,
    after: Tensor | None = None,
) -> DispatchOutputs:
    buffer, request = unpack_dispatch_inputs(
        rows=rows,
        scales=scales,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        plan=plan,
        message_rows=message_rows,
        layout=layout,
        expert_alignment=expert_alignment,
        num_rows=num_rows,
        quantize=quantize,
        buffer_id=buffer_id,
        max_tokens_to_node=max_tokens_to_node,
    )
    request.label = buffer.label  # only now: a traced graph would be traced again for each label
    received = with_anchor(request, buffer.live_engine().dispatch(request))
    return _pack_dispatch_outputs(received, request)


@dispatch_op.register_fake
def _dispatch_fake(*inputs: Any, **named_inputs: Any) -> DispatchOutputs:
    """Return outputs of the shapes that `dispatch_op` returns, without any data."""
    buffer, request = unpack_dispatch_inputs(*inputs, **named_inputs)
    engine, rows, hidden, num_topk = buffer.live_engine(), request.rows, request.rows.shape[1], buffer.config.num_topk
    has_static_shapes, is_rank_layout = request.num_rows >= 0, request.layout == "rank"
    num_rows: int | SymInt = request.num_rows
    if not has_static_shapes:
        num_rows = torch.library.get_ctx().new_dynamic_size()

    plan = message_rows = None
    if request.plan is None:
        if has_static_shapes:
            plan_size: int | SymInt = engine.plan_capacity(request.num_rows, request.layout)
        else:
            plan_size = torch.library.get_ctx().new_dynamic_size()
            if engine.num_message_rows > 0:
                message_rows = torch.empty(engine.num_message_rows, dtype=torch.int32, device="cpu")
        plan = rows.new_empty(plan_size, dtype=torch.int32)

    scales = topk_weights = topk_idx = None
    scale_dtype = checks.scale_dtype(request.quantize, request.scales)
    if scale_dtype is not None:
        scales = rows.new_empty((num_rows, checks.num_scales(hidden, scale_dtype)), dtype=scale_dtype)
    if request.topk_weights is not None:
        weights_shape = (num_rows, num_topk) if is_rank_layout else (num_rows,)
        topk_weights = rows.new_empty(weights_shape, dtype=torch.float32)
    if is_rank_layout:
        topk_idx = rows.new_empty((num_rows, num_topk), dtype=torch.int64)
    received = Received(
        rows=rows.new_empty(num_rows, hidden, dtype=torch.float8_e4m3fn if request.quantize else rows.dtype),
        scales=scales,
        topk_weights=topk_weights,
        topk_idx=topk_idx,
        tokens_per_expert=rows.new_empty(buffer.num_local_experts, dtype=torch.int64),
        rows_per_expert=rows.new_empty(buffer.num_local_experts, dtype=torch.int64),
        plan=plan,
        message_rows=message_rows,
    )
    return _pack_dispatch_outputs(with_anchor(request, received), request)


@torch.library.custom_op("ep_dispatcher::combine", mutates_args=())
def combine_op(
    y: Tensor,
    plan: Tensor,
    topk_weights: Tensor | None,
    message_rows: Tensor | None,
    num_tokens: int,
    layout: str,
    buffer_id: str,
    max_tokens_to_node: int = 0,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    buffer, request = unpack_combine_inputs(
        y=y,
        plan=plan,
        topk_weights=topk_weights,
        message_rows=message_rows,
        num_tokens=num_tokens,
        layout=layout,
        buffer_id=buffer_id,
        max_tokens_to_node=max_tokens_to_node,
    )
    x, weights = buffer.live_engine().combine(request)
    return x, x.new_empty(0, dtype=torch.float32) if weights is None else weights


@combine_op.register_fake
def _combine_fake(*inputs: Any, **named_inputs: Any) -> tuple[Tensor, Tensor]:
    """Return outputs of the shapes that `combine_op` returns, without any data."""
    buffer, request = unpack_combine_inputs(*inputs, **named_inputs)
    x = request.y.new_empty(request.num_tokens, request.y.shape[1])
    if request.topk_weights is None:
        return x, x.new_empty(0, dtype=torch.float32)
    return x, x.new_empty((request.num_tokens, buffer.config.num_topk), dtype=torch.float32)


def _keep_order(operator: CustomOpDef, small_output: int) -> None:
    """Keep the order of operations in a traced graph: each takes, as ``after``, an output of the one before it.

    A compiler may reorder operations that do not depend on each other. Inductor does so by their sizes, which differ
    between ranks, but all ranks must run them in the same order. (The effect tokens of torch.library would express this
    without an argument, but inductor 2.13 ignores them.)
    """

    def trace(
        mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        after = getattr(mode.tracer, "_ep_dispatcher_last", None)
        outputs = mode.__torch_dispatch__(func, types, args, {**(kwargs or {}), "after": after})
        mode.tracer._ep_dispatcher_last = outputs[small_output]  # noqa: SLF001
        return outputs

    operator.register_torch_dispatch(ProxyTorchDispatchMode, trace)


# The smallest output that is always there.
_keep_order(dispatch_op, Received._fields.index("tokens_per_expert"))
_keep_order(combine_op, Combined._fields.index("topk_weights"))
