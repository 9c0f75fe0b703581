"""dispatch and combine with gradients: each is the other's backward, with the same plan.

They are custom operators (torch.library), so that torch.compile keeps each one whole. The plan is a tensor, and goes
through a graph as one. If nothing looks at operators, they run without torch.library, which costs the host more time
than everything else together. A graph of autograd keeps its buffer alive. A compiled graph has only the buffer's id.

    ep.dispatch -> dispatch_op      something looks at operators
                   _EagerDispatch   gradients are wanted
                   neither          as in a backward
    each of the three -> operation.run_dispatch -> Engine.dispatch

The same holds for combine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, get_args, overload

import torch
from torch import SymInt, Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.library import CustomOpDef
from torch.nn import Parameter

from ep_dispatcher import checks, operation, recompute
from ep_dispatcher.argument_types import DispatchOptions, Quantize, TrainingLayout
from ep_dispatcher.buffer import Buffer, find_buffer
from ep_dispatcher.decode import is_decode
from ep_dispatcher.engines.base import (
    COMBINE_ARGUMENTS,
    DISPATCH_ARGUMENTS,
    Combined,
    CombineRequest,
    DispatchRequest,
    Received,
)
from ep_dispatcher.float8 import QuantizedRows, blocks_of, float32_of, rows_of
from ep_dispatcher.handle import DispatchOutput, Handle

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The fields of a request that its operator takes. Decode layout and overlap use the others, and have no operators.
_DISPATCH_FIELDS, _COMBINE_FIELDS = 9, 5


def _anchor(rows: Tensor, num_rows: int | SymInt) -> Tensor:
    """Return a stand-in for the exact rows of a quantised dispatch (QuantizedRows)."""
    return rows.new_zeros(()).expand(num_rows, rows.shape[1])


def _dispatch_inputs(inputs: tuple[Any, ...]) -> tuple[Buffer, DispatchRequest]:
    """Return what the inputs of `dispatch_op` stand for."""
    return find_buffer(inputs[_DISPATCH_FIELDS]), DispatchRequest(*inputs[:_DISPATCH_FIELDS])


def _combine_inputs(inputs: tuple[Any, ...]) -> tuple[Buffer, CombineRequest]:
    """Return what the inputs of `combine_op` stand for."""
    return find_buffer(inputs[_COMBINE_FIELDS]), CombineRequest(*inputs[:_COMBINE_FIELDS])


def _dispatch_flat(*inputs: Any, after: Tensor | None = None) -> tuple[Tensor, ...]:
    """Run one dispatch with a flat list of arguments and results: torch.library takes no tuples, and returns no None.

    Results that were not asked for have no elements.
    """
    buffer, request = _dispatch_inputs(inputs)
    received, rows = _run_dispatch(buffer, request), request.rows

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
        given(received.anchor, rows.dtype),
    )


def _dispatch_fake(*inputs: Any, after: Tensor | None = None) -> tuple[Tensor | None, ...]:
    buffer, request = _dispatch_inputs(inputs)
    rows, quantize, num_rows, num_topk = request.rows, request.quantize, request.num_rows, buffer.config.num_topk
    by_rank, static = request.layout == "rank", num_rows >= 0
    size: int | SymInt = num_rows if static else torch.library.get_ctx().new_dynamic_size()
    plan_size: int | SymInt = 0
    if request.plan is None:
        capacity = buffer.live_engine().plan_capacity
        plan_size = capacity(num_rows, request.layout) if static else torch.library.get_ctx().new_dynamic_size()
    hidden, dtype = rows.shape[1], torch.float8_e4m3fn if quantize else rows.dtype
    scale_dtype = checks.scale_dtype(quantize, request.scales) or torch.float32
    pair = quantize is not None or request.scales is not None
    weights_shape = (size, num_topk) if by_rank else (size,)
    received = Received(
        rows=rows.new_empty(size, hidden, dtype=dtype),
        scales=rows.new_empty((size, checks.num_scales(hidden, scale_dtype)) if pair else 0, dtype=scale_dtype),
        topk_weights=rows.new_empty(0 if request.topk_weights is None else weights_shape, dtype=torch.float32),
        topk_idx=rows.new_empty((size, num_topk) if by_rank else 0, dtype=torch.int64),
        tokens_per_expert=rows.new_empty(buffer.num_local_experts, dtype=torch.int64),
        rows_per_expert=rows.new_empty(buffer.num_local_experts, dtype=torch.int64),
        plan=rows.new_empty(plan_size, dtype=torch.int32),
        anchor=_anchor(rows, size) if quantize else rows.new_empty(0),
    )
    return tuple(received)


def _combine_flat(*inputs: Any, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run one combine with a flat list of arguments and results."""
    buffer, request = _combine_inputs(inputs)
    x, weights = operation.run_combine(buffer, request)
    return x, x.new_empty(0, dtype=torch.float32) if weights is None else weights


def _combine_fake(*inputs: Any, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    buffer, request = _combine_inputs(inputs)
    y, shape = request.y, (request.num_tokens, buffer.config.num_topk)
    weights = y.new_empty(0 if request.topk_weights is None else shape, dtype=torch.float32)
    return y.new_empty(request.num_tokens, y.shape[1]), weights


# The types of a request's fields, unless one is a subclass of Tensor or a size of a traced graph.
_PLAIN_TYPES = frozenset((Tensor, Parameter, type(None), int, str, bool))


def is_observed(request: Iterable[object]) -> bool:
    """Return whether something looks at operators: a compiler, a dispatch mode, a transform, a subclass of Tensor."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN_TYPES.issuperset(map(type, request))
    )


def refuse_dtensors(**arguments: object) -> None:
    """Refuse DTensors where something is observed: an operator would mix their local parts with other tensors."""
    if not torch.compiler.is_compiling():
        for argument, value in arguments.items():
            checks.dtensor(argument, value)


def _needs_no_autograd() -> bool:
    """Return whether neither gradients nor tangents are wanted here, as in a backward."""
    return not torch.is_grad_enabled() and forward_ad._current_level < 0


def _run_dispatch(buffer: Buffer, request: DispatchRequest) -> Received:
    received = operation.run_dispatch(buffer, request)
    if request.quantize:
        received = received._replace(anchor=_anchor(request.rows, received.rows.shape[0]))
    return received


def _differentiable_dispatch(buffer: Buffer, request: DispatchRequest) -> Received:
    if is_observed(request):
        refuse_dtensors(**dict(zip(DISPATCH_ARGUMENTS, request)))
        return Received(*dispatch_op(*request[:_DISPATCH_FIELDS], buffer.id, None))
    if _needs_no_autograd():
        return _run_dispatch(buffer, request)
    made: list[Received] = []
    _eager_dispatch(request.rows, request.topk_weights, request, buffer, made)
    return made[0]  # apply() has returned these very tensors, and given them their gradient


def _differentiable_combine(buffer: Buffer, request: CombineRequest) -> Combined:
    if is_observed(request):
        refuse_dtensors(**dict(zip(COMBINE_ARGUMENTS, request[:3])))
        return Combined(*combine_op(*request[:_COMBINE_FIELDS], buffer.id, None))
    if _needs_no_autograd():
        return operation.run_combine(buffer, request)
    return Combined(*_eager_combine(request.y, request.topk_weights, request, buffer))


def _saved_plan(ctx: Any) -> Tensor:
    """Return the plan that the forward saved. Hooks on saved tensors may move it, but must keep its integers."""
    (plan,) = ctx.saved_tensors
    check_saved_plan(plan)
    return plan


def check_saved_plan(plan: Tensor) -> None:
    if plan.dtype != torch.int32:
        checks.fail(
            "saved plan", f"a tensor of {plan.dtype}", "torch.int32: hooks on saved tensors must not convert it"
        )


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
    ctx.save_for_backward(received.plan if request.plan is None else request.plan)
    ctx.num_tokens, ctx.num_rows = request.rows.shape[0], received.rows.shape[0]
    ctx.layout, ctx.quantize = request.layout, request.quantize
    ctx.has_weights, ctx.buffer, ctx.note = request.topk_weights is not None, buffer, buffer.backward_note


def _keep_for_dispatch(ctx: Any, buffer: Buffer, request: CombineRequest) -> None:
    """Save for the backward of a combine, which is a dispatch."""
    ctx.save_for_backward(request.plan)
    ctx.num_tokens, ctx.num_rows, ctx.layout = request.num_tokens, request.y.shape[0], request.layout
    ctx.has_weights, ctx.buffer, ctx.note = request.topk_weights is not None, buffer, buffer.backward_note


def _or_zeros(grad: Tensor | None, plan: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return plan.new_zeros(shape, dtype=dtype) if grad is None else grad


def _dispatch_backward(
    ctx: Any, rows: Tensor | None, topk_weights: Tensor | None, anchor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of rows and topk_weights, from those of the dispatch's outputs. None stands for 0."""
    # All ranks must ask for the same. So what they gave to the dispatch decides, not what needs a gradient here.
    buffer, plan = buffer_of(ctx), _saved_plan(ctx)
    config, grad_weights = buffer.config, None
    # The anchor stands for the exact rows. Float8 rows that were given have no gradient; only their weights do.
    grad = _or_zeros(anchor if ctx.quantize else rows, plan, (ctx.num_rows, config.hidden), config.dtype)
    grad = grad.to(config.dtype)
    if ctx.has_weights:
        shape = (ctx.num_rows,) if ctx.layout == "expert" else (ctx.num_rows, config.num_topk)
        grad_weights = _or_zeros(topk_weights, plan, shape, torch.float32)
    combined = _differentiable_combine(buffer, CombineRequest(grad, plan, grad_weights, ctx.num_tokens, ctx.layout))
    return combined.x, combined.topk_weights if ctx.has_weights else None


def _combine_backward(ctx: Any, x: Tensor | None, topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of y and topk_weights, from those of the combine's outputs. None stands for 0."""
    buffer, plan = buffer_of(ctx), _saved_plan(ctx)
    config, grad_weights = buffer.config, None
    grad = _or_zeros(x, plan, (ctx.num_tokens, config.hidden), config.dtype)
    if ctx.has_weights:
        grad_weights = _or_zeros(topk_weights, plan, (ctx.num_tokens, config.num_topk), torch.float32)
    request = DispatchRequest(grad, topk_weights=grad_weights, plan=plan, layout=ctx.layout, num_rows=ctx.num_rows)
    received = _differentiable_dispatch(buffer, request)
    return received.rows, received.topk_weights if ctx.has_weights else None


def will_run(node: torch.autograd.graph.Node) -> bool:
    """Return whether the backward under way runs a node.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` ask for some gradients only, and skip nodes that lead to no
    gradient asked for. needs_input_grad does not show that.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad asks for
        return True


def dispatch_goes_back(ctx: Any) -> bool:
    """Return whether the backward of a layer runs that of its dispatch. x and topk_weights are its first inputs.

    On another rank the steps of the layer may be nodes of their own. There autograd skips the backward of the dispatch
    if neither x nor topk_weights wants a gradient, or none is asked for in this pass. All ranks must do the same.
    """
    inputs = zip(ctx.needs_input_grad[:2], ctx.next_functions)
    return any(wanted and will_run(node) for wanted, (node, _) in inputs)


# By default autograd makes zeros for every output without a gradient, so for all integers, in each backward. So it gets
# only the outputs that can have a gradient, and set_materialize_grads(False).


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for callers that nothing observes.

    It skips what ``apply`` does for torch.func, in Python: a third of the host's time.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


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
        combined = operation.run_combine(buffer, request)
        ctx.set_materialize_grads(False)
        _keep_for_dispatch(ctx, buffer, request)
        return combined.x, combined.topk_weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_combine_backward(ctx, *gradients), None, None


_eager_dispatch, _eager_combine = plain_apply(_EagerDispatch), plain_apply(_EagerCombine)


def _dispatch_op_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    received = Received(*gradients)
    grad_rows, grad_weights = _dispatch_backward(ctx, received.rows, received.topk_weights, received.anchor)
    return grad_rows, None, None, grad_weights, *[None] * 7  # in the order of the operator's arguments


def _combine_op_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    grad_y, grad_weights = _combine_backward(ctx, *gradients)
    return grad_y, None, grad_weights, *[None] * 4  # in the order of the operator's arguments


dispatch_op = torch.library.custom_op(
    "ep_dispatcher::dispatch",
    _dispatch_flat,
    mutates_args=(),
    schema="(Tensor rows, Tensor? scales, Tensor? topk_idx, Tensor? topk_weights, Tensor? plan, str layout, "
    "SymInt expert_alignment, SymInt num_rows, str? quantize, str buffer_id, Tensor? after=None) -> "
    f"({', '.join(['Tensor'] * len(Received._fields))})",
)
dispatch_op.register_fake(_dispatch_fake)
dispatch_op.register_autograd(
    _dispatch_op_backward,
    setup_context=lambda ctx, inputs, output: _keep_for_combine(ctx, Received(*output), *_dispatch_inputs(inputs)),
)
combine_op = torch.library.custom_op(
    "ep_dispatcher::combine",
    _combine_flat,
    mutates_args=(),
    schema="(Tensor y, Tensor plan, Tensor? topk_weights, SymInt num_tokens, str layout, str buffer_id, "
    "Tensor? after=None) -> (Tensor, Tensor)",
)
combine_op.register_fake(_combine_fake)
combine_op.register_autograd(
    _combine_op_backward, setup_context=lambda ctx, inputs, output: _keep_for_dispatch(ctx, *_combine_inputs(inputs))
)


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


_keep_order(dispatch_op, Received._fields.index("tokens_per_expert"))
_keep_order(combine_op, Combined._fields.index("topk_weights"))


class _Float8Rows(torch.autograd.Function):
    """Links float8 rows to their anchor: a gradient of the rows becomes one of the exact rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scales: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(scales)
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        if not torch.compiler.is_compiling():  # it traces this line even if it never runs
            warnings.warn(
                "a gradient went through float8 rows, and PyTorch rounded it to float8; use ep.dequantize(out.x), or "
                "out.x.anchor as an input of your own operator, to keep it exact",
                stacklevel=2,
            )
        (scales,) = ctx.saved_tensors
        factors = float32_of(scales).unsqueeze(-1)
        exact = torch.where(factors > 0, blocks_of(grad, scales.dtype) / factors, 0)
        return None, None, rows_of(exact, grad.shape[-1]).to(torch.bfloat16)


_REVERSE = "reverse mode: backward() or torch.autograd.grad"


def refuse_transforms(**arguments: object) -> None:
    """Refuse forward mode and torch.func. Of custom operators PyTorch drops tangents, and has no torch.func.grad."""
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if forward_ad._current_level < 0 and not transformed:
        return
    for argument, value in arguments.items():
        for t in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(t, Tensor) or not t.is_floating_point():
                continue
            if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
                checks.fail(argument, "a tangent of forward-mode differentiation (torch.func.jvp)", _REVERSE)
            if transformed and t.requires_grad and torch.is_grad_enabled():
                checks.fail(argument, "a gradient of torch.func (grad, vjp, jacrev)", _REVERSE)


def check_buffer(buffer: Buffer) -> None:
    if not isinstance(buffer, Buffer):
        checks.fail("buffer", type(buffer).__name__, "an ep_dispatcher.Buffer")


_LAYOUTS = get_args(TrainingLayout)
_NO_DECODE = "decode layout has no gradients: use buffer.dispatch and buffer.combine"


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
    if layout == "decode" or (handle is not None and is_decode(layout, handle)):
        checks.fail("layout", "'decode'", f"'expert', 'rank': {_NO_DECODE}")
    if buffer.config.mask_late_ranks:
        checks.fail("buffer", "one with mask_late_ranks=True, which has decode layout alone", f"another: {_NO_DECODE}")
    if handle is None and layout not in _LAYOUTS:
        checks.one_of("layout", layout, _LAYOUTS)
    request = operation.dispatch_request(
        buffer, x, topk_idx, topk_weights, layout, expert_alignment, quantize, handle, max_recv_rows
    )
    handles = recompute.handles_of(buffer, request) if handle is None else []
    if handles:
        (handle,) = handles
        request = operation.with_plan(request, handle)
    received = _differentiable_dispatch(buffer, request)
    if request.quantize:
        received = received._replace(rows=_Float8Rows.apply(received.rows, received.scales, received.anchor))
    out = operation.dispatch_output(buffer, request, received, handle)
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
    if getattr(handle, "layout", None) == "decode":
        checks.fail("handle", "one of layout='decode'", f"one of layout='expert' or 'rank': {_NO_DECODE}")
    request = operation.combine_request(buffer, y, handle, topk_weights)
    res = operation.combine_output(buffer, request, _differentiable_combine(buffer, request))
    return res.x if res.topk_weights is None else (res.x, res.topk_weights)
