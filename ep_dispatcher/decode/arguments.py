"""What only decode layout takes, and what it refuses: ``layout="decode"``, and handles of that layout."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from ep_dispatcher import checks, float8
from ep_dispatcher.addressable import check_writable
from ep_dispatcher.argument_types import ScaleFormat
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.handle import Handle
from ep_dispatcher.request import CombineRequest

SCALE_FORMATS = get_args(ScaleFormat)


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
            checks.refuse(f"{argument} is {given}, which only layout='decode' takes")


def refuse_asynchronous(is_send_only: bool, async_finish: bool) -> None:
    if is_send_only and async_finish:
        checks.fail("async_finish", True, "False with return_hook: the hook says when to receive")


def check_dispatch(
    config: EngineConfig,
    topk_weights: Tensor | None,
    expert_alignment: int,
    quantize: str | None,
    max_recv_rows: int | None,
    scale_format: str,
    is_mx: bool,
) -> int:
    """Check what only decode layout refuses. Return the number of rows of the output. is_mx: scales are e8m0."""
    if topk_weights is not None:
        checks.fail("topk_weights", "a tensor", "None with layout='decode': its combine takes the weights")
    if max_recv_rows is not None:
        checks.fail("max_recv_rows", max_recv_rows, "None with layout='decode': its shapes do not depend on counts")
    if expert_alignment != 1:
        checks.fail("expert_alignment", expert_alignment, "1 with layout='decode': its groups begin at fixed rows")
    num_rows = config.num_local_experts * config.topology.num_ranks * config.max_tokens_per_rank
    if num_rows > checks.MAX_INT:
        given = f"{config.max_tokens_per_rank} and layout='decode', for which a rank has {num_rows} rows"
        checks.refuse(f"max_tokens_per_rank is {given}; at most {checks.MAX_INT} are allowed")
    checks.one_of("scale_format", scale_format, SCALE_FORMATS[is_mx:])
    if scale_format == "ue8m0" and not is_mx:  # its scales are made here, and fill whole integers
        if quantize is None:
            checks.refuse("scale_format is 'ue8m0', which needs quantize")
        block = float8.BLOCK * float8.SCALES_OF_INT
        if config.hidden % block:
            checks.refuse(
                f"scale_format is 'ue8m0', which needs a hidden that is a multiple of {block}; it is {config.hidden}"
            )
    return num_rows


def combine_request(
    config: EngineConfig,
    device: str,
    y: Tensor,
    handle: Handle,
    topk_weights: Tensor | None,
    weights: Tensor | None,
    out: Tensor | None,
    return_hook: bool,
) -> CombineRequest:
    """Check the arguments of a combine of decode layout."""
    if topk_weights is not None:
        checks.fail("topk_weights", "a tensor", "None with a handle of layout='decode', which takes weights")
    rows_per_group = handle.num_rows // config.num_local_experts
    checks.tensor("y", y, (config.dtype,), (config.num_local_experts, rows_per_group, config.hidden), device)
    checks.tensor("weights", weights, (torch.float32,), (handle.num_tokens, config.num_topk), device)
    if out is not None:
        checks.tensor("out", out, (config.dtype,), (handle.num_tokens, config.hidden), device)
        check_writable("out", out)
    sums = out.detach() if out is not None and _takes_sums(out, y) else None
    return CombineRequest(
        y=y.reshape(-1, config.hidden),
        plan=handle.plan,
        num_tokens=handle.num_tokens,
        layout="decode",
        message_rows=handle.message_rows,
        weights=weights,
        is_send_only=return_hook,
        out=sums,
    )


def _takes_sums(out: Tensor, y: Tensor) -> bool:
    """Return whether an engine may write its sums to `out` while y is read: contiguous, and not y's memory."""
    if out.device != y.device:  # kernels may not reach it
        return False
    # Compare addresses: two storages may be the same memory, through DLPack. A strided y has been copied before.
    begin, begin_of_y = out.data_ptr(), y.data_ptr()
    is_apart = begin + out.numel() * out.itemsize <= begin_of_y or begin_of_y + y.numel() * y.itemsize <= begin
    return is_apart and out.is_contiguous() and not out.is_neg() and out.data_ptr() % checks.ROW_GRANULARITY == 0
