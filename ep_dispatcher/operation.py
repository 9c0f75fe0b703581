"""An operation, from its arguments to the engine and back. No other module calls an engine's dispatch and combine.

    dispatch_request   check the arguments, once
    run_dispatch       call the engine; a dispatch with gradients comes here through autograd.py, and so does a backward
    dispatch_output    name the results

The same holds for combine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ep_dispatcher import checks, decode, float8
from ep_dispatcher.argument_types import Quantize
from ep_dispatcher.engines.base import Combined, CombineRequest, DispatchRequest, Engine, Received
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.handle import CombineOutput, DispatchOutput, Handle, no_hook
from ep_dispatcher.plain import plain

if TYPE_CHECKING:
    from ep_dispatcher.buffer import Buffer

_INTEGERS, _FLOATS = (torch.int32, torch.int64), (torch.float32,)


def dispatch_request(
    buffer: Buffer,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    layout: str = "expert",
    expert_alignment: int = 1,
    quantize: Quantize | None = None,
    handle: Handle | None = None,
    max_recv_rows: int | None = None,
    scale_format: str = "float32",
    return_hook: bool = False,
) -> DispatchRequest:
    """Check the arguments of Buffer.dispatch. ValueError if one is not allowed."""
    config, engine = buffer.config, buffer.live_engine()
    device, packs_scales = engine.device, False
    if torch.is_autocast_enabled(device):
        x = as_autocast(buffer, x)
    checks.rows(x, config.hidden, config.dtype, device, config.max_tokens_per_rank, quantize)
    rows, scales = x if isinstance(x, (tuple, list)) else (x, None)
    num_tokens = rows.shape[0]
    if layout == "decode" or (handle is not None and decode.is_decode(layout, handle)):
        if handle is None:
            checks.one_of("layout", layout, engine.layouts)
        is_mx = checks.scale_dtype(quantize, scales) not in (None, torch.float32)
        decode_rows = decode.check_dispatch(
            config, topk_weights, expert_alignment, quantize, max_recv_rows, scale_format, is_mx
        )
        packs_scales = scale_format == "ue8m0" and not is_mx
        max_recv_rows = decode_rows if handle is None else None
    elif return_hook is not False or scale_format != "float32":
        decode.refuse_elsewhere(scale_format=scale_format, return_hook=return_hook)
    if topk_weights is not None:
        checks.tensor("topk_weights", topk_weights, _FLOATS, (num_tokens, config.num_topk), device)
    if handle is None:
        expert_alignment, num_rows = _check_routing(
            buffer, topk_idx, num_tokens, layout, expert_alignment, max_recv_rows
        )
        plan = None
    else:
        checks.handle(handle, buffer.id)
        checks.reuse(handle, num_tokens, topk_idx, layout, expert_alignment, max_recv_rows)
        layout, expert_alignment = handle.layout, handle.expert_alignment
        plan, num_rows = handle.plan, handle.num_rows
    return DispatchRequest(
        rows,
        scales,
        topk_idx,
        topk_weights,
        plan,
        layout,
        expert_alignment,
        num_rows,
        checks.POWERS_OF_TWO if packs_scales else quantize,
        return_hook,
        packs_scales,
    )


def plan_request(
    buffer: Buffer, topk_idx: Tensor, *, layout: str, expert_alignment: int, max_recv_rows: int | None
) -> DispatchRequest:
    """Check the arguments of Buffer.plan. Return a dispatch of rows of 16 bytes."""
    checks.one_of("layout", layout, ("expert", "rank"))
    alignment, num_rows = _check_routing(buffer, topk_idx, "num_tokens", layout, expert_alignment, max_recv_rows)
    config, num_tokens = buffer.config, topk_idx.shape[0]
    checks.num_tokens("topk_idx", num_tokens, config.max_tokens_per_rank)
    rows = topk_idx.new_zeros((num_tokens, checks.ROW_GRANULARITY // config.dtype.itemsize), dtype=config.dtype)
    return DispatchRequest(rows, topk_idx=topk_idx, layout=layout, expert_alignment=alignment, num_rows=num_rows)


def _check_routing(
    buffer: Buffer,
    topk_idx: Tensor | None,
    num_tokens: int | str,
    layout: str,
    expert_alignment: int,
    max_recv_rows: int | None,
) -> tuple[int, int]:
    """Check the arguments that a new plan is made from. Return expert_alignment, and the rows of the output or -1.

    num_tokens: the rows of x, or a name if there is no x.
    """
    engine = buffer.live_engine()
    if layout not in engine.layouts:
        checks.one_of("layout", layout, engine.layouts)
    expert_alignment = checks.integer("expert_alignment", expert_alignment, 1)
    if max_recv_rows is not None:
        max_recv_rows = checks.integer("max_recv_rows", max_recv_rows, 0)
    checks.tensor("topk_idx", topk_idx, _INTEGERS, (num_tokens, buffer.config.num_topk), engine.device)
    return expert_alignment, -1 if max_recv_rows is None else max_recv_rows


def combine_request(
    buffer: Buffer,
    y: Tensor,
    handle: Handle,
    topk_weights: Tensor | None,
    weights: Tensor | None = None,
    out: Tensor | None = None,
    return_hook: bool = False,
) -> CombineRequest:
    """Check the arguments of Buffer.combine. ValueError if one is not allowed."""
    config, device = buffer.config, buffer.live_engine().device
    decodes = decode.is_decode("", handle)
    if not decodes and (weights is not None or out is not None or return_hook is not False):
        decode.refuse_elsewhere(weights=weights, out=out, return_hook=return_hook)
    checks.handle(handle, buffer.id)
    if torch.is_autocast_enabled(device):
        y = as_autocast(buffer, y)
    if decodes:
        return decode.combine_request(config, device, y, handle, topk_weights, weights, out, return_hook)
    checks.tensor("y", y, (config.dtype,), (handle.num_rows, config.hidden), device)
    if topk_weights is not None:
        shape = (handle.num_rows,) if handle.layout == "expert" else (handle.num_rows, config.num_topk)
        checks.tensor("topk_weights", topk_weights, _FLOATS, shape, device)
    return CombineRequest(y, handle.plan, topk_weights, handle.num_tokens, handle.layout)


def as_autocast(buffer: Buffer, value: Any) -> Any:
    """Return rows or weights in the buffer's dtype if torch.autocast, which is on, casts to that dtype.

    PyTorch casts the arguments of its matrix products by the same rule: not float64, nothing on another device.
    """
    dtype, device = buffer.config.dtype, buffer.live_engine().device
    if torch.get_autocast_dtype(device) != dtype or not isinstance(value, Tensor):
        return value
    return value.to(dtype) if value.dtype in checks.DTYPES and value.device.type == device else value


def run_dispatch(buffer: Buffer, request: DispatchRequest) -> Received:
    engine = buffer.live_engine()
    if engine.unreceived is not None:
        check_received(engine, "dispatch")
    engine.rows_on_host, engine.label = None, buffer.label  # None: until the engine knows
    try:
        return engine.dispatch(request.plain())
    except (PeerTimeoutError, ValueError) as error:
        raise buffer.explained(error)  # noqa: B904  # it has its cause


def run_combine(buffer: Buffer, request: CombineRequest) -> Combined:
    engine = buffer.live_engine()
    if engine.unreceived is not None:
        check_received(engine, "combine")
    try:
        return engine.combine(request.plain())
    except (PeerTimeoutError, ValueError) as error:
        raise buffer.explained(error)  # noqa: B904  # it has its cause


def receive(buffer: Buffer) -> None:
    """Complete the operation that has only sent."""
    try:
        buffer.live_engine().receive()
    except (PeerTimeoutError, ValueError) as error:
        raise buffer.explained(error)  # noqa: B904  # it has its cause


def check_routing(buffer: Buffer, topk_idx: Tensor) -> None:
    """Raise ValueError for an invalid entry, if the host can read it without a wait."""
    with buffer.errors_explained():
        buffer.live_engine().check_routing(topk_idx)


def compare_routing(buffer: Buffer, planned: Tensor, given: Tensor, where: tuple[int, int]) -> None:
    """Before a dispatch with a handle: find a routing that is not the one of its plan. Engine.compare_routing says how.

    planned, given: int64 [num_tokens, num_topk]. Raises ValueError at once for unequal numbers of tokens.
    """
    with buffer.errors_explained():
        if given.shape != planned.shape:
            raise checks.other_routing("topk_idx", f"{len(given)} tokens", f"{len(planned)} tokens", where)
        buffer.live_engine().compare_routing(plain("topk_idx", planned), plain("topk_idx", given), where)


def check_received(engine: Engine, operation: str) -> None:
    """Refuse an operation while another one waits for its hook."""
    unreceived = engine.unreceived
    if unreceived is not None:
        checks.fail("hook", f"a {operation} before the hook of the {unreceived}", "that hook() first")


def with_plan(request: DispatchRequest, handle: Handle) -> DispatchRequest:
    """Return a dispatch that uses the plan of a handle instead of making one."""
    return request._replace(topk_idx=None, plan=handle.plan, num_rows=handle.num_rows)


def new_handle(buffer: Buffer, request: DispatchRequest, received: Received) -> Handle:
    """Return the handle of a dispatch that has made a plan."""
    plan, num_tokens, num_rows = received.plan, request.rows.shape[0], received.rows.shape[0]
    assert plan is not None
    return Handle.of(
        buffer_id=buffer.id,
        layout=request.layout,
        expert_alignment=request.expert_alignment,
        num_tokens=num_tokens,
        num_rows=num_rows,
        plan=plan,  # below: a traced operation never reaches the engine
        rows_on_host=None if torch.compiler.is_compiling() else buffer.live_engine().rows_on_host,
        made_with=(request.layout, request.expert_alignment, num_tokens, num_rows, plan),
    )


def dispatch_output(
    buffer: Buffer, request: DispatchRequest, received: Received, handle: Handle | None
) -> DispatchOutput:
    """Name the results of a dispatch. handle: that of the request's plan; None: make one."""
    if handle is None:
        handle = new_handle(buffer, request, received)
    out: Tensor | tuple[Tensor, Tensor] = received.rows
    tokens_per_expert, rows_per_expert = received.tokens_per_expert, received.rows_per_expert
    if request.layout == "decode":
        out = decode.rows_by_expert(buffer.config, request, received)
        tokens_per_expert = rows_per_expert = tokens_per_expert.int()
    elif request.quantize or request.scales is not None:
        assert received.scales is not None
        out = float8.QuantizedRows(received.rows, received.scales, received.anchor if request.quantize else None)
    return DispatchOutput.of(
        x=out,
        topk_weights=None if request.topk_weights is None else received.topk_weights,
        topk_idx=received.topk_idx if request.layout == "rank" else None,
        tokens_per_expert=tokens_per_expert,
        rows_per_expert=rows_per_expert,
        handle=handle,
        event=buffer.live_engine().event(buffer),
        hook=Hook(buffer) if request.sends_only else no_hook,
    )


def combine_output(
    buffer: Buffer, request: CombineRequest, combined: Combined, out: Tensor | None = None
) -> CombineOutput:
    """Name the results of a combine. out: the caller's, complete when this returns, or after the hook."""
    hook: Callable[[], None] = no_hook
    if request.sends_only:
        hook = Hook(buffer, combined.x, out)
    elif out is not None:
        decode.complete_out(combined.x, out)
    return CombineOutput.of(
        x=combined.x if out is None else out,
        topk_weights=None if request.topk_weights is None else combined.topk_weights,
        event=buffer.live_engine().event(buffer),
        hook=hook,
    )


class Hook:
    """``out.hook()``: receives, once, what an operation has sent. ``sums`` then belong in the caller's ``out``."""

    def __init__(self, buffer: Buffer, sums: Tensor | None = None, out: Tensor | None = None):
        self._buffer, self._sums, self._out, self._received = buffer, sums, out, False
        self._sent = buffer.last_sent = object()

    def __call__(self) -> None:
        if self._received:
            return
        if self._buffer.last_sent is not self._sent:
            checks.fail("hook", "that of an operation before unmask()", "that of a later one: it was dropped")
        receive(self._buffer)
        self._received = True
        if self._sums is not None and self._out is not None:
            decode.complete_out(self._sums, self._out)
