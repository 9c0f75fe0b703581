"""Names the tensors of an operation for its caller: from Received and Combined to DispatchOutput and CombineOutput."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ep_dispatcher.decode.results import Hook, complete_out, rows_by_expert
from ep_dispatcher.engines.base import Engine
from ep_dispatcher.float8 import QuantizedRows
from ep_dispatcher.handle import CombineOutput, DispatchOutput, Handle, no_hook
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Received


def new_handle(engine: Engine, request: DispatchRequest, received: Received, copies: Tensor | None = None) -> Handle:
    """Return the handle of a dispatch that has made a plan. copies: of experts, that its routing goes to."""
    plan, num_tokens, num_rows = received.plan, request.rows.shape[0], received.rows.shape[0]
    assert plan is not None
    sizes = (request.layout, request.expert_alignment, num_tokens, num_rows)
    return Handle.of(
        buffer_id=engine.config.buffer_id,
        layout=request.layout,
        expert_alignment=request.expert_alignment,
        num_tokens=num_tokens,
        num_rows=num_rows,
        plan=plan,
        message_rows=received.message_rows,
        max_tokens_to_node=request.max_tokens_to_node,
        rows_on_host=received.rows_on_host,
        copies=copies,
        made_with=(*sizes, plan, received.message_rows, request.max_tokens_to_node),
    )


def dispatch_output(
    engine: Engine, request: DispatchRequest, received: Received, handle: Handle | None
) -> DispatchOutput:
    """Name the results of a dispatch. handle: that of the request's plan; None: make one."""
    if handle is None:
        handle = new_handle(engine, request, received)
    out: Tensor | tuple[Tensor, Tensor] = received.rows
    tokens_per_expert, rows_per_expert = received.tokens_per_expert, received.rows_per_expert
    if request.layout == "decode":
        out = rows_by_expert(engine.config, request, received)
        tokens_per_expert = rows_per_expert = tokens_per_expert.int()
    elif request.quantize or request.scales is not None:
        assert received.scales is not None
        out = QuantizedRows(received.rows, received.scales, received.anchor if request.quantize else None)
    return DispatchOutput.of(
        x=out,
        topk_weights=None if request.topk_weights is None else received.topk_weights,
        topk_idx=received.topk_idx if request.layout == "rank" else None,
        tokens_per_expert=tokens_per_expert,
        rows_per_expert=rows_per_expert,
        handle=handle,
        event=engine.event(),
        hook=Hook(engine) if request.is_send_only else no_hook,
    )


def combine_output(
    engine: Engine, request: CombineRequest, combined: Combined, out: Tensor | None = None
) -> CombineOutput:
    """Name the results of a combine. out: the caller's, complete when this returns, or after the hook."""
    hook: Callable[[], None] = no_hook
    if request.is_send_only:
        hook = Hook(engine, combined.x, out)
    elif out is not None:
        complete_out(combined.x, out)
    return CombineOutput.of(
        x=combined.x if out is None else out,
        topk_weights=None if request.topk_weights is None else combined.topk_weights,
        event=engine.event(),
        hook=hook,
    )
