"""dispatch and combine with gradients: each is the other's backward, with the same plan.

They are custom operators (torch.library), so that torch.compile keeps each one whole. The plan is a tensor, and goes
through a graph as one. If nothing looks at operators (observers.py), they run without torch.library. A graph of
autograd keeps its buffer alive. A compiled graph has only the buffer's id.

    ep.dispatch -> dispatch_op            something looks at operators
                   _EagerDispatch         gradients are wanted
                   neither                as in a backward
    each of the three -> Engine.dispatch

The same holds for combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import SymInt, Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.library import CustomOpDef

from ep_dispatcher import checks, recompute
from ep_dispatcher.argument_types import Quantize, TrainingLayout
from ep_dispatcher.arguments import DispatchOptions, combine_request, dispatch_request, refuse_decode_handle
from ep_dispatcher.buffer import Buffer, find_buffer
from ep_dispatcher.float8 import Float8Rows, QuantizedRows
from ep_dispatcher.handle import DispatchOutput, Handle
from ep_dispatcher.observers import is_observed, needs_no_autograd, plain_apply, refuse_dtensors, refuse_transforms
from ep_dispatcher.outputs import combine_output, dispatch_output
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Received

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _anchor(rows: Tensor, num_rows: int | SymInt) -> Tensor:
    """Return a stand-in for the exact rows of a quantised dispatch (QuantizedRows)."""
    return rows.new_zeros(()).expand(num_rows, rows.shape[1])


def _or_zeros(grad: Tensor | None, plan: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return plan.new_zeros(shape, dtype=dtype) if grad is None else grad


# ---- what a backward keeps of its forward ----------------------------------------------------------------------------


def _saved_plan(ctx: Any) -> tuple[Tensor, Tensor | None]:
    """Return the plan that the forward saved, and its message rows.

    Hooks on saved tensors may move them, but must keep their integers.
    """
    return checked_plan(*ctx.saved_tensors)


def checked_plan(plan: Tensor, message_rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
    for t in (plan, message_rows):
        if t is not None and t.dtype != torch.int32:
            allowed = "of torch.int32: hooks on saved tensors must not convert it"
            checks.fail("the saved plan", f"a tensor of {t.dtype}", allowed)
    return plan, None if message_rows is None else message_rows.cpu()


def buffer_of(ctx: Any) -> Buffer:
    """Return the buffer of a backward, which the graph has kept alive. From here on its errors name this backward."""
    buffer: Buffer = ctx.buffer
    if buffer.is_destroyed:
        raise ValueError("buffer was destroyed before this backward: call destroy() after the last backward")
    if ctx.note:
        buffer.note = ctx.note
    return buffer


def _keep_for_combine(ctx: Any, received: Received, buffer: Buffer, request: DispatchRequest) -> None:
    """Save for the backward of a dispatch, which is a combine."""
    source = received if request.plan is None else request
    ctx.save_for_backward(source.plan, source.message_rows)
    ctx.num_tokens, ctx.num_rows = request.rows.shape[0], received.rows.shape[0]
    ctx.layout, ctx.quantize = request.layout, request.quantize
    ctx.has_weights, ctx.buffer, ctx.note = request.topk_weights is not None, buffer, buffer.backward_note


def _keep_for_dispatch(ctx: Any, buffer: Buffer, request: CombineRequest) -> None:
    """Save for the backward of a combine, which is a dispatch."""
    ctx.save_for_backward(request.plan, request.message_rows)
    ctx.num_tokens, ctx.num_rows, ctx.layout = request.num_tokens, request.y.shape[0], request.layout
    ctx.has_weights, ctx.buffer, ctx.note = request.topk_weights is not None, buffer, buffer.backward_note


# ---- the backwards, with or without torch.library --------------------------------------------------------------------


def _dispatch_backward(
    ctx: Any, rows: Tensor | None, topk_weights: Tensor | None, anchor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of rows and topk_weights, from those of the dispatch's outputs. None stands for 0."""
    # All ranks must ask for the same. So what they gave to the dispatch decides, not what needs a gradient here.
    buffer, (plan, message_rows) = buffer_of(ctx), _saved_plan(ctx)
    config, grad_weights = buffer.config, None
    # The anchor stands for the exact rows. Float8 rows that were given have no gradient; only their weights do.
    grad_rows = _or_zeros(anchor if ctx.quantize else rows, plan, (ctx.num_rows, config.hidden), config.dtype)
    if ctx.has_weights:
        shape = (ctx.num_rows,) if ctx.layout == "expert" else (ctx.num_rows, config.num_topk)
        grad_weights = _or_zeros(topk_weights, plan, shape, torch.float32)
    request = CombineRequest(
        y=grad_rows.to(config.dtype),
        plan=plan,
        num_tokens=ctx.num_tokens,
        layout=ctx.layout,
        topk_weights=grad_weights,
        message_rows=message_rows,
    )
    combined = _differentiable_combine(buffer, request)
    return combined.x, combined.topk_weights if ctx.has_weights else None


def _combine_backward(ctx: Any, x: Tensor | None, topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of y and topk_weights, from those of the combine's outputs. None stands for 0."""
    buffer, (plan, message_rows) = buffer_of(ctx), _saved_plan(ctx)
    config, grad_weights = buffer.config, None
    grad_x = _or_zeros(x, plan, (ctx.num_tokens, config.hidden), config.dtype)
    if ctx.has_weights:
        grad_weights = _or_zeros(topk_weights, plan, (ctx.num_tokens, config.num_topk), torch.float32)
    request = DispatchRequest(
        rows=grad_x,
        topk_weights=grad_weights,
        plan=plan,
        message_rows=message_rows,
        layout=ctx.layout,
        num_rows=ctx.num_rows,
    )
    received = _differentiable_dispatch(buffer, request)
    return received.rows, received.topk_weights if ctx.has_weights else None


# ---- without torch.library -------------------------------------------------------------------------------------------
# By default autograd makes zeros for every output without a gradient, so for all integers, in each backward. So it gets
# only the outputs that can have a gradient, and set_materialize_grads(False).


class _EagerDispatch(torch.autograd.Function):
    """dispatch_op with its gradient, without torch.library. ``made`` gets all outputs, with a gradient or not."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        topk_weights: Tensor | None,
        request: DispatchRequest,
        buffer: Buffer,
        made: list[Received],
    ) -> tuple[Tensor | None, ...]:
        received = _run_dispatch(buffer, request)
        made.append(received)
        ctx.set_materialize_grads(False)
        _keep_for_combine(ctx, received, buffer, request)
        return received.rows, received.topk_weights, received.anchor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_dispatch_backward(ctx, *gradients), None, None, None


class _EagerCombine(torch.autograd.Function):
    """combine_op with its gradient, without torch.library."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, topk_weights: Tensor | None, request: CombineRequest, buffer: Buffer
    ) -> tuple[Tensor, Tensor | None]:
        combined = buffer.live_engine().combine(request)
        ctx.set_materialize_grads(False)
        _keep_for_dispatch(ctx, buffer, request)
        return combined.x, combined.topk_weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_combine_backward(ctx, *gradients), None, None


_eager_dispatch, _eager_combine = plain_apply(_EagerDispatch), plain_apply(_EagerCombine)


# ---- with torch.library ----------------------------------------------------------------------------------------------
# An operator takes no objects but tensors, numbers and strings, and returns no None. Results that were not asked for
# have no elements. ``after`` is an output of the operation before, in a traced graph (_keep_order).

_Dispatched = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # fields of Received
_TOKENS_PER_EXPERT = 4  # the place of a small one among them


def _dispatch_inputs(
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
    after: Tensor | None = None,
) -> tuple[Buffer, DispatchRequest]:
    """Return what the inputs of `dispatch_op` stand for."""
    request = DispatchRequest(
        rows=rows,
        scales=scales,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        plan=plan,
        message_rows=_or_none(message_rows),
        layout=layout,
        expert_alignment=expert_alignment,
        num_rows=num_rows,
        quantize=cast("Quantize | None", quantize),
    )
    return find_buffer(buffer_id), request


def _combine_inputs(
    y: Tensor,
    plan: Tensor,
    topk_weights: Tensor | None,
    message_rows: Tensor | None,
    num_tokens: int,
    layout: str,
    buffer_id: str,
    after: Tensor | None = None,
) -> tuple[Buffer, CombineRequest]:
    """Return what the inputs of `combine_op` stand for."""
    request = CombineRequest(
        y=y,
        plan=plan,
        num_tokens=num_tokens,
        layout=layout,
        topk_weights=topk_weights,
        message_rows=_or_none(message_rows),
    )
    return find_buffer(buffer_id), request


def _or_none(t: Tensor | None) -> Tensor | None:
    return None if t is None or t.numel() == 0 else t


def _dispatched(received: Received, rows: Tensor) -> _Dispatched:
    """Return the outputs of `dispatch_op`. rows: of the request."""

    def given(t: Tensor | None, dtype: torch.dtype) -> Tensor:
        return rows.new_empty(0, dtype=dtype) if t is None else t

    return (
        received.rows,
        given(received.scales, torch.float32),
        given(received.topk_weights, torch.float32),
        given(received.topk_idx, torch.int64),
        received.tokens_per_expert,
        received.rows_per_expert,
        given(received.plan, torch.int32),
        given(received.message_rows, torch.int32),
        given(received.anchor, rows.dtype),
    )


def _received(outputs: Sequence[Any]) -> Received:
    """Return what the outputs of `dispatch_op` stand for, or likewise their gradients."""
    rows, scales, topk_weights, topk_idx, tokens_per_expert, rows_per_expert, plan, message_rows, anchor = outputs
    return Received(
        rows=rows,
        scales=scales,
        topk_weights=topk_weights,
        topk_idx=topk_idx,
        tokens_per_expert=tokens_per_expert,
        rows_per_expert=rows_per_expert,
        plan=plan,
        message_rows=_or_none(message_rows),
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
    after: Tensor | None = None,
) -> _Dispatched:
    buffer, request = _dispatch_inputs(
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
    )
    request.label = buffer.label  # only now: a traced graph would be traced again for each label
    return _dispatched(_run_dispatch(buffer, request), rows)


@dispatch_op.register_fake
def _dispatch_fake(*inputs: Any, **named: Any) -> _Dispatched:
    buffer, request = _dispatch_inputs(*inputs, **named)
    rows, quantize, num_rows, engine = request.rows, request.quantize, request.num_rows, buffer.live_engine()
    num_topk, hidden, by_rank, static = buffer.config.num_topk, rows.shape[1], request.layout == "rank", num_rows >= 0
    size: int | SymInt = num_rows if static else torch.library.get_ctx().new_dynamic_size()
    plan = message_rows = None
    if request.plan is None:
        capacity = engine.plan_capacity
        plan_size = capacity(num_rows, request.layout) if static else torch.library.get_ctx().new_dynamic_size()
        plan = rows.new_empty(plan_size, dtype=torch.int32)
        if not static and engine.num_message_rows > 0:
            message_rows = torch.empty(engine.num_message_rows, dtype=torch.int32, device="cpu")
    scale_dtype, scales, topk_weights, topk_idx = checks.scale_dtype(quantize, request.scales), None, None, None
    if scale_dtype is not None:
        scales = rows.new_empty((size, checks.num_scales(hidden, scale_dtype)), dtype=scale_dtype)
    if request.topk_weights is not None:
        topk_weights = rows.new_empty((size, num_topk) if by_rank else (size,), dtype=torch.float32)
    if by_rank:
        topk_idx = rows.new_empty((size, num_topk), dtype=torch.int64)
    received = Received(
        rows=rows.new_empty(size, hidden, dtype=torch.float8_e4m3fn if quantize else rows.dtype),
        scales=scales,
        topk_weights=topk_weights,
        topk_idx=topk_idx,
        tokens_per_expert=rows.new_empty(buffer.num_local_experts, dtype=torch.int64),
        rows_per_expert=rows.new_empty(buffer.num_local_experts, dtype=torch.int64),
        plan=plan,
        message_rows=message_rows,
        anchor=_anchor(rows, size) if quantize else None,
    )
    return _dispatched(received, rows)


@torch.library.custom_op("ep_dispatcher::combine", mutates_args=())
def combine_op(
    y: Tensor,
    plan: Tensor,
    topk_weights: Tensor | None,
    message_rows: Tensor | None,
    num_tokens: int,
    layout: str,
    buffer_id: str,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    buffer, request = _combine_inputs(
        y=y,
        plan=plan,
        topk_weights=topk_weights,
        message_rows=message_rows,
        num_tokens=num_tokens,
        layout=layout,
        buffer_id=buffer_id,
    )
    x, weights = buffer.live_engine().combine(request)
    return x, x.new_empty(0, dtype=torch.float32) if weights is None else weights


@combine_op.register_fake
def _combine_fake(*inputs: Any, **named: Any) -> tuple[Tensor, Tensor]:
    buffer, request = _combine_inputs(*inputs, **named)
    y, shape = request.y, (request.num_tokens, buffer.config.num_topk)
    weights = y.new_empty(0 if request.topk_weights is None else shape, dtype=torch.float32)
    return y.new_empty(request.num_tokens, y.shape[1]), weights


_DISPATCH_INPUTS, _COMBINE_INPUTS = (
    tuple(signature(_dispatch_inputs).parameters),
    tuple(signature(_combine_inputs).parameters),
)


def _gradients(inputs: tuple[str, ...], **gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return a gradient for each input of an operator, None for those that have none."""
    return tuple(map(gradients.get, inputs))


def _dispatch_op_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    rows, _, topk_weights, *_, anchor = gradients
    grad_rows, grad_weights = _dispatch_backward(ctx, rows, topk_weights, anchor)
    return _gradients(_DISPATCH_INPUTS, rows=grad_rows, topk_weights=grad_weights)


def _combine_op_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    grad_y, grad_weights = _combine_backward(ctx, *gradients)
    return _gradients(_COMBINE_INPUTS, y=grad_y, topk_weights=grad_weights)


def _keep_of_dispatch_op(ctx: Any, inputs: tuple[Any, ...], output: _Dispatched) -> None:
    _keep_for_combine(ctx, _received(output), *_dispatch_inputs(*inputs))


def _keep_of_combine_op(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _keep_for_dispatch(ctx, *_combine_inputs(*inputs))


dispatch_op.register_autograd(_dispatch_op_backward, setup_context=_keep_of_dispatch_op)
combine_op.register_autograd(_combine_op_backward, setup_context=_keep_of_combine_op)


def _keep_order(operator: CustomOpDef, small_output: int) -> None:
    """Keep the order of operations in a traced graph: each takes, as ``after``, an output of the one before it.

    A compiler may reorder operations that do not depend on each other. Inductor does so by their sizes, which differ
    between ranks, but all ranks must run them in one order. (The effect tokens of torch.library would express this
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


_keep_order(dispatch_op, _TOKENS_PER_EXPERT)
_keep_order(combine_op, Combined._fields.index("topk_weights"))


# ---- the three ways --------------------------------------------------------------------------------------------------


def _run_dispatch(buffer: Buffer, request: DispatchRequest) -> Received:
    received = buffer.live_engine().dispatch(request)
    if request.quantize:
        received = received._replace(anchor=_anchor(request.rows, received.rows.shape[0]))
    return received


def _differentiable_dispatch(buffer: Buffer, request: DispatchRequest) -> Received:
    if is_observed(request.special()):
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
        )
        return _received(outputs)
    if needs_no_autograd():
        return _run_dispatch(buffer, request)
    made: list[Received] = []
    _eager_dispatch(request.rows, request.topk_weights, request, buffer, made)
    return made[0]  # apply() has returned these very tensors, and given them their gradient


def _differentiable_combine(buffer: Buffer, request: CombineRequest) -> Combined:
    if is_observed(request.special()):
        refuse_dtensors(**dict(request.tensors()))
        outputs = combine_op(
            y=request.y,
            plan=request.plan,
            topk_weights=request.topk_weights,
            message_rows=request.message_rows,
            num_tokens=request.num_tokens,
            layout=request.layout,
            buffer_id=buffer.id,
        )
        return Combined(*outputs)
    if needs_no_autograd():
        return buffer.live_engine().combine(request)
    return Combined(*_eager_combine(request.y, request.topk_weights, request, buffer))


def check_buffer(buffer: Buffer) -> None:
    if not isinstance(buffer, Buffer):
        checks.fail("buffer", f"of type {type(buffer).__name__}", "an ep_dispatcher.Buffer")


# The types of the results: float8 rows are pairs, and there are weights if some were given.
@overload
def dispatch(  # type: ignore[overload-overlap]  # the first that fits counts
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor | None = None,
    topk_weights: None = None,
    *,
    quantize: None = None,
    **options: Unpack[DispatchOptions],
) -> DispatchOutput[Tensor, None]: ...


@overload
def dispatch(  # type: ignore[overload-overlap]  # the first that fits counts
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor = ...,
    *,
    quantize: None = None,
    **options: Unpack[DispatchOptions],
) -> DispatchOutput[Tensor, Tensor]: ...


@overload
def dispatch(
    buffer: Buffer,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor | None = None,
    topk_weights: None = None,
    *,
    quantize: Quantize | None = None,
    **options: Unpack[DispatchOptions],
) -> DispatchOutput[QuantizedRows, None]: ...


@overload
def dispatch(
    buffer: Buffer,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor | None = None,
    topk_weights: Tensor = ...,
    *,
    quantize: Quantize | None = None,
    **options: Unpack[DispatchOptions],
) -> DispatchOutput[QuantizedRows, Tensor]: ...


def dispatch(
    buffer: Buffer,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    layout: TrainingLayout = "expert",
    expert_alignment: int = 1,
    quantize: Quantize | None = None,
    handle: Handle | None = None,
    max_recv_rows: int | None = None,
) -> DispatchOutput:
    """``Buffer.dispatch`` with gradients: out.x and out.topk_weights carry them back to x and topk_weights.

        backward:  grad x = combine(grad out.x);  grad topk_weights = combine's topk_weights of grad out.topk_weights

    A backward is an operation of all ranks too, so every rank must run the backward of every operation. A rank without
    tokens, or whose loss does not use the layer, adds ``0 * y.sum()`` of the layer's result y to its loss. x must
    require a gradient on all ranks or on none; if on none, the same holds for topk_weights.

    Arguments, results and errors are those of ``Buffer.dispatch``, except ``async_finish``. To overlap an operation
    with other work on a GPU, call it in a stream of your own (``torch.cuda.stream``), by PyTorch's rules for streams.
    Its backward then runs in that stream too.

    Under torch.autocast of the buffer's dtype rows are cast, here and in combine, as PyTorch's matrix products cast
    their arguments: from float32, bfloat16 or float16. Gradients have the caller's dtype. topk_weights are never cast.

    With ``quantize`` the gradient passes through the rounding unchanged. It arrives through ``ep.dequantize(out.x)``,
    or through ``out.x.anchor`` in an operator of your own (see ep.QuantizedRows). With ``max_recv_rows`` all shapes are
    static, and torch.compile keeps the graph whole.
    """
    check_buffer(buffer)
    refuse_transforms(x=x, topk_weights=topk_weights)
    engine = buffer.live_engine()
    request = dispatch_request(
        engine,
        x,
        topk_idx,
        topk_weights,
        layout=layout,
        expert_alignment=expert_alignment,
        quantize=quantize,
        handle=handle,
        max_recv_rows=max_recv_rows,
        label=0 if torch.compiler.is_compiling() else buffer.label,
        has_gradients=True,
    )
    handles = [] if handle is not None or buffer.caller_keeps_plans else recompute.handles_of(engine, request)
    if handles:
        (handle,) = handles
        recompute.use_plan(request, handle)
    received = _differentiable_dispatch(buffer, request)
    if request.quantize:
        received = received._replace(rows=Float8Rows.apply(received.rows, received.scales, received.anchor))
    out = dispatch_output(engine, request, received, handle)
    if handle is None:
        handles.append(out.handle)
    return out


@overload
def combine(buffer: Buffer, y: Tensor, handle: Handle, *, topk_weights: None = None) -> Tensor: ...


@overload
def combine(buffer: Buffer, y: Tensor, handle: Handle, *, topk_weights: Tensor) -> tuple[Tensor, Tensor]: ...


def combine(
    buffer: Buffer, y: Tensor, handle: Handle, *, topk_weights: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``Buffer.combine`` with gradients: the sum over each token's rows, [num_tokens, hidden].

        backward:  grad y = dispatch(grad, handle=handle)

    Every rank must run this backward too, as in ``ep.dispatch``. y must require a gradient on all ranks or on none. If
    a loss does not use the result, add ``0 * result.sum()`` to it.

    With ``topk_weights`` it returns the pair (sum, topk_weights [num_tokens, num_topk]), both differentiable.
    """
    check_buffer(buffer)
    refuse_transforms(y=y, topk_weights=topk_weights)
    refuse_decode_handle(handle)
    engine = buffer.live_engine()
    request = combine_request(engine, y, handle, topk_weights)
    res = combine_output(engine, request, _differentiable_combine(buffer, request))
    return res.x if res.topk_weights is None else (res.x, res.topk_weights)
