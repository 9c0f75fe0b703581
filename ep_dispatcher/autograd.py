"""dispatch and combine with gradients: each is the other's backward, with the same plan.

    ep.dispatch -> call_dispatch_op       something looks at operators, as torch.compile does (custom_ops.py)
                   _EagerDispatch         gradients are wanted
                   neither of them        no gradients are wanted, as in a backward
    each of the three -> Engine.dispatch

The same holds for combine. Where nothing looks at operators (observers.py) operations run without torch.library, which
would take the host longer than everything else together. A graph of autograd keeps its buffer alive. A compiled graph
has only the buffer's id.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ep_dispatcher import checks, recompute
from ep_dispatcher.argument_types import Quantize, TrainingLayout
from ep_dispatcher.arguments import DispatchOptions, combine_request, dispatch_request, refuse_decode_handle
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.custom_ops import (
    DispatchOutputs,
    call_combine_op,
    call_dispatch_op,
    combine_op,
    dispatch_op,
    unpack_combine_inputs,
    unpack_dispatch_inputs,
    unpack_dispatch_outputs,
)
from ep_dispatcher.float8 import Float8Rows, QuantizedRows
from ep_dispatcher.handle import DispatchOutput, Handle
from ep_dispatcher.observers import apply_without_functorch, is_observed, needs_no_autograd, refuse_transforms
from ep_dispatcher.outputs import dispatch_output
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Received, with_anchor

if TYPE_CHECKING:
    from typing_extensions import Unpack


# ---- what a forward saves for its backward ---------------------------------------------------------------------------


def _save_for_combine(ctx: Any, received: Received, buffer: Buffer, request: DispatchRequest) -> None:
    """Save what the backward of a dispatch needs. That is a combine."""
    if request.plan is None:
        ctx.save_for_backward(received.plan, received.message_rows)
    else:
        ctx.save_for_backward(request.plan, request.message_rows)
    ctx.num_tokens = request.rows.shape[0]
    ctx.num_rows = received.rows.shape[0]
    ctx.max_tokens_to_node = request.max_tokens_to_node
    ctx.layout = request.layout
    ctx.quantize = request.quantize
    ctx.has_weights = request.topk_weights is not None
    ctx.buffer = buffer
    ctx.note = buffer.backward_note


def _save_for_dispatch(ctx: Any, buffer: Buffer, request: CombineRequest) -> None:
    """Save what the backward of a combine needs. That is a dispatch."""
    ctx.save_for_backward(request.plan, request.message_rows)
    ctx.num_tokens = request.num_tokens
    ctx.num_rows = request.y.shape[0]
    ctx.max_tokens_to_node = request.max_tokens_to_node
    ctx.layout = request.layout
    ctx.has_weights = request.topk_weights is not None
    ctx.buffer = buffer
    ctx.note = buffer.backward_note


def check_saved_plan(plan: Tensor, message_rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a saved plan, and its message rows on the CPU. ValueError if a hook on saved tensors has converted them.

    Such hooks may move the tensors, but must keep their integers.
    """
    for t in (plan, message_rows):
        if t is not None and t.dtype != torch.int32:
            allowed = "of torch.int32: hooks on saved tensors must not convert it"
            checks.fail("the saved plan", f"a tensor of {t.dtype}", allowed)
    return plan, None if message_rows is None else message_rows.cpu()


def backward_buffer(ctx: Any) -> Buffer:
    """Return the buffer of a backward, which the graph has kept alive. Its errors name this backward from here on."""
    buffer: Buffer = ctx.buffer
    if buffer.is_destroyed:
        raise ValueError("buffer was destroyed before this backward: call destroy() after the last backward")
    if ctx.note:
        buffer.note = ctx.note
    return buffer


# ---- the backwards, with or without torch.library --------------------------------------------------------------------


def _dispatch_backward(
    ctx: Any, grad_rows: Tensor | None, grad_weights: Tensor | None, grad_anchor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of rows and topk_weights from those of a dispatch's outputs. None stands for zeros."""
    # All ranks must ask for the same outputs. So the arguments of the dispatch decide, not what needs a gradient here.
    buffer = backward_buffer(ctx)
    plan, message_rows = check_saved_plan(*ctx.saved_tensors)
    config = buffer.config
    # The anchor stands for the exact rows. If the rows were given as float8 they have no gradient; only weights do.
    grad = grad_anchor if ctx.quantize else grad_rows
    y = _zeros_if_none(grad, plan, (ctx.num_rows, config.hidden), config.dtype)
    if ctx.has_weights:
        weights_shape = (ctx.num_rows,) if ctx.layout == "expert" else (ctx.num_rows, config.num_topk)
        grad_weights = _zeros_if_none(grad_weights, plan, weights_shape, torch.float32)
    request = CombineRequest(
        y=y.to(config.dtype),
        plan=plan,
        num_tokens=ctx.num_tokens,
        layout=ctx.layout,
        topk_weights=grad_weights if ctx.has_weights else None,
        message_rows=message_rows,
        max_tokens_to_node=ctx.max_tokens_to_node,
    )
    combined = _differentiable_combine(buffer, request)
    return combined.x, combined.topk_weights if ctx.has_weights else None


def _combine_backward(ctx: Any, grad_x: Tensor | None, grad_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of y and topk_weights from those of a combine's outputs. None stands for zeros."""
    buffer = backward_buffer(ctx)
    plan, message_rows = check_saved_plan(*ctx.saved_tensors)
    config = buffer.config
    if ctx.has_weights:
        grad_weights = _zeros_if_none(grad_weights, plan, (ctx.num_tokens, config.num_topk), torch.float32)
    request = DispatchRequest(
        rows=_zeros_if_none(grad_x, plan, (ctx.num_tokens, config.hidden), config.dtype),
        topk_weights=grad_weights if ctx.has_weights else None,
        plan=plan,
        message_rows=message_rows,
        max_tokens_to_node=ctx.max_tokens_to_node,
        layout=ctx.layout,
        num_rows=ctx.num_rows,
    )
    received = _differentiable_dispatch(buffer, request)
    return received.rows, received.topk_weights if ctx.has_weights else None


def _zeros_if_none(grad: Tensor | None, plan: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return plan.new_zeros(shape, dtype=dtype) if grad is None else grad


# ---- without torch.library -------------------------------------------------------------------------------------------
# By default autograd makes zeros in each backward for every output without a gradient, and so for all integers. So it
# gets only the outputs that can have a gradient, and set_materialize_grads(False).


class _EagerDispatch(torch.autograd.Function):
    """A dispatch with its gradient. ``results`` is a list that gets all outputs, with a gradient or not."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        topk_weights: Tensor | None,
        request: DispatchRequest,
        buffer: Buffer,
        results: list[Received],
    ) -> tuple[Tensor | None, ...]:
        received = with_anchor(request, buffer.live_engine().dispatch(request))
        results.append(received)
        ctx.set_materialize_grads(False)
        _save_for_combine(ctx, received, buffer, request)
        return received.rows, received.topk_weights, received.anchor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_rows, grad_weights = _dispatch_backward(ctx, *gradients)
        return grad_rows, grad_weights, None, None, None


class _EagerCombine(torch.autograd.Function):
    """A combine with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, topk_weights: Tensor | None, request: CombineRequest, buffer: Buffer
    ) -> tuple[Tensor, Tensor | None]:
        combined = buffer.live_engine().combine(request)
        ctx.set_materialize_grads(False)
        _save_for_dispatch(ctx, buffer, request)
        return combined.x, combined.topk_weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_y, grad_weights = _combine_backward(ctx, *gradients)
        return grad_y, grad_weights, None, None


_eager_dispatch = apply_without_functorch(_EagerDispatch)
_eager_combine = apply_without_functorch(_EagerCombine)


# ---- with torch.library ----------------------------------------------------------------------------------------------

_DISPATCH_INPUTS = tuple(signature(unpack_dispatch_inputs).parameters)
_COMBINE_INPUTS = tuple(signature(unpack_combine_inputs).parameters)


def _gradients_of_inputs(inputs: tuple[str, ...], **gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return a gradient for each input of an operator, None for an input without a gradient."""
    return tuple(gradients.get(name) for name in inputs)


def _setup_dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: DispatchOutputs) -> None:
    buffer, request = unpack_dispatch_inputs(*inputs)
    _save_for_combine(ctx, unpack_dispatch_outputs(output), buffer, request)


def _dispatch_op_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    grad_out_rows, _, grad_out_weights, *_, grad_anchor = gradients  # in the order of DispatchOutputs
    grad_rows, grad_weights = _dispatch_backward(ctx, grad_out_rows, grad_out_weights, grad_anchor)
    return _gradients_of_inputs(_DISPATCH_INPUTS, rows=grad_rows, topk_weights=grad_weights)


def _setup_combine_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    buffer, request = unpack_combine_inputs(*inputs)
    _save_for_dispatch(ctx, buffer, request)


def _combine_op_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    grad_y, grad_weights = _combine_backward(ctx, *gradients)
    return _gradients_of_inputs(_COMBINE_INPUTS, y=grad_y, topk_weights=grad_weights)


dispatch_op.register_autograd(_dispatch_op_backward, setup_context=_setup_dispatch_context)
combine_op.register_autograd(_combine_op_backward, setup_context=_setup_combine_context)


# ---- with torch.library, with autograd, or with neither --------------------------------------------------------------


def _differentiable_dispatch(buffer: Buffer, request: DispatchRequest) -> Received:
    if is_observed(request.observable_fields()):
        return call_dispatch_op(buffer, request)
    if needs_no_autograd():
        return with_anchor(request, buffer.live_engine().dispatch(request))
    results: list[Received] = []
    _eager_dispatch(request.rows, request.topk_weights, request, buffer, results)
    return results[0]  # the tensors that apply() has returned too, with their gradient


def _differentiable_combine(buffer: Buffer, request: CombineRequest) -> Combined:
    if is_observed(request.observable_fields()):
        return call_combine_op(buffer, request)
    if needs_no_autograd():
        return buffer.live_engine().combine(request)
    x, topk_weights = _eager_combine(request.y, request.topk_weights, request, buffer)
    return Combined(x, topk_weights)


def _float8_rows(buffer: Buffer, received: Received) -> Tensor:
    """Return float8 rows whose gradient goes to their anchor; without one if the caller uses the anchor instead."""
    if buffer.caller_uses_anchors:
        return received.rows.detach()
    return Float8Rows.apply(received.rows, received.scales, received.anchor)


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

    A backward is a collective operation too, so every rank must run the backward of every operation. A rank without
    tokens, or whose loss does not use the layer, adds ``0 * y.sum()`` of the layer's result y to its loss. x must
    require a gradient on all ranks or on none. If it does on none, the same holds for topk_weights.

    Arguments, results and errors are as in ``Buffer.dispatch``, but there is no ``async_finish``. To overlap an
    operation with other work on a GPU, call it in a stream of your own (``torch.cuda.stream``), by PyTorch's rules for
    streams. Its backward then runs in that stream too.

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
    handles: list[Handle] = []  # of this dispatch; a recompute finds the one of its forward pass here
    if handle is None and not buffer.caller_keeps_plans:
        handles = recompute.handles_for(engine, request)
    if handles:
        (handle,) = handles
        recompute.use_plan(request, handle)
    received = _differentiable_dispatch(buffer, request)
    if request.quantize:
        received = received._replace(rows=_float8_rows(buffer, received))
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
    combined = _differentiable_combine(buffer, request)
    if topk_weights is None:
        return combined.x
    assert combined.topk_weights is not None  # as some were given
    return combined.x, combined.topk_weights
