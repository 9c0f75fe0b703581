"""What operations of decode layout return: rows by expert, sums in the caller's memory, and hooks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ep_dispatcher import checks, float8
from ep_dispatcher.engines.base import Engine, EngineConfig
from ep_dispatcher.request import DispatchRequest, Received


def rows_by_expert(
    config: EngineConfig, request: DispatchRequest, received: Received
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the rows of a dispatch as [num_local_experts, rows, hidden], with scales by column if there are any."""
    rows, scales = received.rows, received.scales
    rows = rows.view(config.num_local_experts, rows.shape[0] // config.num_local_experts, rows.shape[1])
    if scales is None:
        return rows
    if scales.dim() == 2:  # the CPU engine writes them by row, and is complete
        scales = scales if scales.dtype == torch.float32 else scales.view(torch.int32)
        scales = scales.view(*rows.shape[:2], scales.shape[1])
        scales = float8.column_major(float8.packed_exponents(scales) if request.packs_scales else scales)
    return (rows, scales) if scales.dtype == torch.int32 else float8.QuantizedRows(rows, scales)


def complete_out(sums: Tensor, out: Tensor) -> None:
    """Bring the sums of a combine to the caller's memory, unless they are there."""
    if sums.data_ptr() != out.data_ptr():
        out.detach().copy_(sums)
    elif not out.is_inference():  # inference tensors count no changes
        increment_version(out)


class Hook:
    """``out.hook()``: receives, once, what an operation has sent. ``sums`` then belong in the caller's ``out``."""

    def __init__(self, engine: Engine, sums: Tensor | None = None, out: Tensor | None = None):
        self._engine, self._sums, self._out, self._is_received = engine, sums, out, False
        self._pending = engine.pending

    def __call__(self) -> None:
        if self._is_received:
            return
        if self._engine.pending is not self._pending:
            checks.refuse("this hook is of an operation before unmask(), which dropped it")
        self._engine.receive()
        self._is_received, self._pending = True, None  # the operation holds tensors
        if self._sums is not None and self._out is not None:
            complete_out(self._sums, self._out)
