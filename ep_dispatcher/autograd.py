"""dispatch and combine with gradients: each is the other's backward, with the same plan.

They are custom operators (torch.library), so that torch.compile keeps them whole. A plan is a tensor and travels
through a graph as one.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Optional

import torch
from torch import Tensor

from ep_dispatcher.buffer import Buffer, find_buffer
from ep_dispatcher.handle import DispatchOutput, Handle
from ep_dispatcher.quantize import BLOCK, QuantizedRows

_Received = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("ep_dispatcher::dispatch", mutates_args=())
def _dispatch(
    rows: Tensor,
    scales: Optional[Tensor],
    topk_idx: Optional[Tensor],
    topk_weights: Optional[Tensor],
    plan: Optional[Tensor],
    layout: str,
    expert_alignment: int,
    num_rows: int,
    buffer_id: int,
) -> _Received:
    run = find_buffer(buffer_id)._run_dispatch
    return tuple(run(rows, scales, topk_idx, topk_weights, plan, layout, expert_alignment, num_rows))


@_dispatch.register_fake
def _(rows, scales, topk_idx, topk_weights, plan, layout, expert_alignment, num_rows, buffer_id):
    buffer = find_buffer(buffer_id)
    engine, num_topk = buffer._live_engine(), buffer._config.num_topk
    by_rank, static = layout == "rank", num_rows >= 0
    if not static:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    if plan is not None:
        plan_size = 0
    elif static:
        plan_size = engine.plan_capacity(rows.shape[0], num_rows, layout)
    else:
        plan_size = torch.library.get_ctx().new_dynamic_size()
    weights_shape = (num_rows, num_topk) if by_rank else (num_rows,)
    return (
        rows.new_empty(num_rows, rows.shape[1]),
        rows.new_empty(0) if scales is None else scales.new_empty(num_rows, scales.shape[1]),
        rows.new_empty(0 if topk_weights is None else weights_shape, dtype=torch.float32),
        rows.new_empty((num_rows, num_topk) if by_rank else 0, dtype=torch.int64),
        rows.new_empty(buffer.num_local_experts, dtype=torch.int64),
        rows.new_empty(buffer.num_local_experts, dtype=torch.int64),
        rows.new_empty(plan_size, dtype=torch.int32),
    )


@torch.library.custom_op("ep_dispatcher::combine", mutates_args=())
def _combine(
    y: Tensor, plan: Tensor, topk_weights: Optional[Tensor], num_tokens: int, layout: str, buffer_id: int
) -> tuple[Tensor, Tensor]:
    return find_buffer(buffer_id)._run_combine(y, plan, topk_weights, num_tokens)


@_combine.register_fake
def _(y, plan, topk_weights, num_tokens, layout, buffer_id):
    num_topk = find_buffer(buffer_id)._config.num_topk
    weights = y.new_empty((num_tokens, num_topk) if topk_weights is not None else 0, dtype=torch.float32)
    return y.new_empty(num_tokens, y.shape[1]), weights


def _dispatch_setup(ctx, inputs, output):
    rows, _, _, topk_weights, plan, ctx.layout, _, _, ctx.buffer_id = inputs
    ctx.save_for_backward(output[-1] if plan is None else plan)
    ctx.num_tokens, ctx.has_weights = rows.shape[0], topk_weights is not None


def _dispatch_backward(ctx, grad_rows, _scales, grad_weights, *_):
    # All ranks must ask for the same, so it is decided by what they gave, not by what needs a gradient here.
    weights = grad_weights if ctx.has_weights else None
    grad_x, grad_topk_weights = _combine(
        grad_rows, *ctx.saved_tensors, weights, ctx.num_tokens, ctx.layout, ctx.buffer_id
    )
    return grad_x, None, None, grad_topk_weights if ctx.has_weights else None, None, None, None, None, None


def _combine_setup(ctx, inputs, output):
    y, plan, topk_weights, _, ctx.layout, ctx.buffer_id = inputs
    ctx.save_for_backward(plan)
    ctx.num_rows, ctx.has_weights = y.shape[0], topk_weights is not None


def _combine_backward(ctx, grad_x, grad_weights):
    weights = grad_weights if ctx.has_weights else None
    received = _dispatch(
        grad_x, None, None, weights, *ctx.saved_tensors, ctx.layout, 1, ctx.num_rows, ctx.buffer_id
    )
    return received[0], None, received[2] if ctx.has_weights else None, None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)
_combine.register_autograd(_combine_backward, setup_context=_combine_setup)


@torch.library.custom_op("ep_dispatcher::anchor", mutates_args=())
def _anchor(x: Tensor, plan: Tensor, num_rows: int, layout: str, buffer_id: int) -> Tensor:
    return x.new_zeros(()).expand(num_rows, x.shape[1])


@_anchor.register_fake
def _(x, plan, num_rows, layout, buffer_id):
    return x.new_zeros(()).expand(num_rows, x.shape[1])


def _anchor_setup(ctx, inputs, output):
    x, plan, _, ctx.layout, ctx.buffer_id = inputs
    ctx.save_for_backward(plan)
    ctx.num_tokens = x.shape[0]


def _anchor_backward(ctx, grad):
    grad_x, _ = _combine(grad, *ctx.saved_tensors, None, ctx.num_tokens, ctx.layout, ctx.buffer_id)
    return grad_x, None, None, None, None


_anchor.register_autograd(_anchor_backward, setup_context=_anchor_setup)


class _Float8Rows(torch.autograd.Function):
    """Links float8 rows to their anchor: a gradient for the rows becomes one for what they stand for."""

    @staticmethod
    def forward(ctx, rows, scales, anchor):
        ctx.save_for_backward(scales)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        warnings.warn(
            "a gradient went through float8 rows, and PyTorch rounded it to float8; use ep.dequantize(out.x), or "
            "out.x.anchor as an input of your own operator, to keep it exact",
            stacklevel=2,
        )
        (scales,) = ctx.saved_tensors
        exact = grad.float().unflatten(-1, (-1, BLOCK)) / scales.unsqueeze(-1)
        return None, None, torch.where(scales.unsqueeze(-1) > 0, exact, 0).flatten(-2).to(torch.bfloat16)


def dispatch(
    buffer: Buffer,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    layout: str = "expert",
    expert_alignment: int = 1,
    quantize: str | None = None,
    handle: Handle | None = None,
    max_recv_rows: int | None = None,
    async_finish: bool = False,
) -> DispatchOutput:
    """``Buffer.dispatch`` with gradients: out.x and out.topk_weights carry them back to x and topk_weights.

        backward:  grad x = combine(grad out.x);  grad topk_weights = combine's topk_weights of grad out.topk_weights

    Arguments, results and errors are those of ``Buffer.dispatch``. With ``quantize`` the gradient passes straight
    through the rounding: take it with ``ep.dequantize(out.x)``, or give ``out.x.anchor`` to an operator of your own
    (see ep_dispatcher.quantize). With ``max_recv_rows`` all shapes are static and torch.compile keeps the graph whole.
    """
    run = partial(_dispatch, buffer_id=buffer.id)
    out = buffer._dispatch(run, x, topk_idx, topk_weights, layout, expert_alignment, quantize, handle, max_recv_rows)
    if quantize is not None and x.requires_grad:
        anchor = _anchor(x, out.handle.plan, out.handle.num_rows, out.handle.layout, buffer.id)
        rows, scales = out.x
        pair = QuantizedRows(_Float8Rows.apply(rows, scales, anchor), scales, anchor)
        out = DispatchOutput(**{**vars(out), "x": pair})
    return out


def combine(
    buffer: Buffer, y: Tensor, handle: Handle, *, topk_weights: Tensor | None = None, async_finish: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """``Buffer.combine`` with gradients: the sum over each token's rows, [num_tokens, hidden].

        backward:  grad y = dispatch(grad, handle=handle)

    With ``topk_weights`` it returns the pair (sum, topk_weights [num_tokens, num_topk]), both differentiable.
    """
    run = partial(_combine, layout=getattr(handle, "layout", ""), buffer_id=buffer.id)
    res = buffer._combine(run, y, handle, topk_weights)
    return res.x if topk_weights is None else (res.x, res.topk_weights)
