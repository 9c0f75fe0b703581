"""Decode layout: a place for every row that an expert may get, so that no shape depends on counts. Without gradients.

``Buffer.dispatch`` and ``Buffer.combine`` call this module for ``layout="decode"`` and for handles of that layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ep_dispatcher import checks, float8
from ep_dispatcher.engines import CombineRequest, EngineConfig
from ep_dispatcher.handle import CombineOutput, DispatchOutput, Handle
from ep_dispatcher.plain import plain, writable

if TYPE_CHECKING:
    from ep_dispatcher.buffer import Buffer

SCALE_FORMATS = ("float32", "ue8m0")


def is_decode(layout: str, handle: object) -> bool:
    """Return whether these arguments of an operation mean decode layout."""
    return layout == "decode" or getattr(handle, "layout", None) == "decode"


# The defaults of arguments that only decode layout has. Those not listed default to None.
_DEFAULTS = {"scale_format": "float32", "return_hook": False}


def refuse_elsewhere(**arguments: object) -> None:
    """Refuse arguments that only decode layout has in the other layouts, unless they have their defaults."""
    for argument, value in arguments.items():
        default = _DEFAULTS.get(argument)
        if value is not default and value != default:
            given = "a tensor" if isinstance(value, Tensor) else repr(value)
            checks.fail(argument, given, f"{default!r}: only layout='decode' has another one")


def dispatch(
    buffer: Buffer,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    *,
    layout: str,
    expert_alignment: int,
    quantize: str | None,
    scale_format: str,
    handle: Handle | None,
    max_recv_rows: int | None,
    return_hook: bool,
    async_finish: bool,
) -> DispatchOutput:
    """Check what only decode layout refuses, run the dispatch, and give its rows their shape."""
    config, engine = buffer._config, buffer._live_engine()
    _check_hook(return_hook, async_finish)
    if handle is None:
        checks.one_of("layout", layout, engine.layouts)
    if topk_weights is not None:
        checks.fail("topk_weights", "a tensor", "None with layout='decode': its combine takes the weights")
    if max_recv_rows is not None:
        checks.fail("max_recv_rows", max_recv_rows, "None with layout='decode': its shapes do not depend on counts")
    if expert_alignment != 1:
        checks.fail("expert_alignment", expert_alignment, "1 with layout='decode': its groups begin at fixed rows")
    rows_per_group = config.topology.num_ranks * config.max_tokens_per_rank
    num_rows = config.num_local_experts * rows_per_group
    if num_rows > checks.MAX_INT:
        given = f"{config.max_tokens_per_rank} and layout='decode', for which a rank has {num_rows} rows"
        checks.fail("max_tokens_per_rank", given, f"what makes at most {checks.MAX_INT} rows")
    checks.one_of("scale_format", scale_format, SCALE_FORMATS)
    packs = scale_format == "ue8m0"
    if packs:
        _check_packed(config, quantize)
    out = buffer._checked_dispatch(
        partial(buffer._launch_dispatch, only_sends=return_hook, packs_scales=packs),
        x,
        topk_idx,
        None,
        layout=layout,
        expert_alignment=1,
        quantize=quantize,
        handle=handle,
        max_recv_rows=num_rows if handle is None else None,
    )

    rows, scales = out.x if isinstance(out.x, tuple) else (out.x, None)
    rows = rows.view(config.num_local_experts, rows_per_group, rows.shape[1])
    complete = _nothing
    if scales is not None and scales.dim() == 2:  # this engine has written them by row
        scales, complete = _by_column(scales.view(*rows.shape[:2], scales.shape[1]), packs)
    x = rows if scales is None else (rows, scales) if packs else float8.QuantizedRows(rows, scales)
    counts = out.tokens_per_expert.int()
    hook = _complete(buffer, complete, return_hook)
    return replace(out, x=x, tokens_per_expert=counts, rows_per_expert=counts, hook=hook)


def combine(
    buffer: Buffer,
    y: Tensor,
    handle: Handle,
    *,
    topk_weights: Tensor | None,
    weights: Tensor | None,
    out: Tensor | None,
    return_hook: bool,
    async_finish: bool,
) -> CombineOutput:
    """Check the arguments, and run the combine of decode layout."""
    config, engine = buffer._config, buffer._live_engine()
    _check_hook(return_hook, async_finish)
    checks.handle(handle, buffer.id)
    if topk_weights is not None:
        checks.fail("topk_weights", "a tensor", "None with a handle of layout='decode', which takes weights")
    rows_per_group = handle.num_rows // config.num_local_experts
    if torch.is_autocast_enabled(engine.device):
        y = buffer._as_autocast(y)
    checks.tensor("y", y, (config.dtype,), (config.num_local_experts, rows_per_group, config.hidden), engine.device)
    checks.tensor("weights", weights, (torch.float32,), (handle.num_tokens, config.num_topk), engine.device)
    assert weights is not None  # as it is a tensor
    if out is not None:
        checks.tensor("out", out, (config.dtype,), (handle.num_tokens, config.hidden), engine.device)
        writable("out", out)
    request = CombineRequest(y.reshape(-1, config.hidden), handle.plan, None, handle.num_tokens, "decode")
    sums = out.detach() if out is not None and _takes_sums(out, y) else None
    combined = buffer._launch_combine(request, plain("weights", weights), only_sends=return_hook, out=sums)

    def complete() -> None:
        if out is None:
            return
        if sums is None:
            out.detach().copy_(combined.x)
        elif not out.is_inference():  # inference tensors count no changes
            torch.autograd.graph.increment_version(out)

    hook = _complete(buffer, complete, return_hook)
    return CombineOutput(combined.x if out is None else out, None, buffer._event(), hook)


def _takes_sums(out: Tensor, y: Tensor) -> bool:
    """Return whether an engine may write its sums to `out` while y is read: contiguous, and not y's memory."""
    if out.device != y.device:  # kernels may not reach it
        return False
    # Compare addresses: two storages may be the same memory, through DLPack. A strided y has been copied before.
    begin, begin_of_y = out.data_ptr(), y.data_ptr()
    is_apart = begin + out.numel() * out.itemsize <= begin_of_y or begin_of_y + y.numel() * y.itemsize <= begin
    return is_apart and out.is_contiguous() and not out.is_neg() and out.data_ptr() % checks.ROW_GRANULARITY == 0


def _check_packed(config: EngineConfig, quantize: str | None) -> None:
    """Check that the scales are made here, and fill whole integers."""
    if quantize is None:
        checks.fail("scale_format", "'ue8m0' without quantize", "it with quantize='e4m3_1x128'")
    block = float8.BLOCK * float8.SCALES_OF_INT
    if config.hidden % block:
        checks.fail("scale_format", f"'ue8m0' with hidden={config.hidden}", f"it with a multiple of {block}")


def _by_column(by_row: Tensor, packs: bool) -> tuple[Tensor, Callable[[], None]]:
    """Return memory for scales by column, [experts, rows, columns], and a function that copies the scales there."""
    experts, rows, columns = by_row.shape
    columns, dtype = (columns // float8.SCALES_OF_INT, torch.int32) if packs else (columns, torch.float32)
    by_column = by_row.new_empty(experts, columns, rows, dtype=dtype).transpose(1, 2)

    def copy() -> None:
        by_column.copy_(float8.packed_exponents(by_row) if packs else by_row)

    return by_column, copy


def _check_hook(wanted: bool, async_finish: bool) -> None:
    if wanted and async_finish:
        checks.fail("async_finish", True, "False with return_hook: the hook says when to receive")


def _complete(buffer: Buffer, complete: Callable[[], None], with_hook: bool) -> Callable[[], None] | None:
    """Complete an operation that has been launched: now, or in the hook that this returns."""
    if not with_hook:
        complete()
        return None
    received = False
    sent = buffer._sent = object()

    def hook() -> None:
        nonlocal received
        if not received:
            if buffer._sent is not sent:
                checks.fail("hook", "that of an operation before unmask()", "that of a later one: it was dropped")
            buffer._explaining(buffer._live_engine().receive)
            received = True
            complete()

    return hook


def _nothing() -> None:
    """Complete nothing."""
