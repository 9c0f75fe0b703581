"""What the dispatcher and the experts of a layer give each other.

Experts get their rows and, in place of the counts of Megatron's interface, one of these:

    a tensor      the counts of rows
    a Quantized   the rows have arrived quantised, beside their counts
    a Deferred    nothing was sent yet: the experts run the dispatch, and the combine too

The dispatcher knows experts in grouped GEMMs by the ``GroupedExperts`` that they fill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.argument_types import QuantizeBlocks
from ep_dispatcher.errors import TooFewRowsError
from ep_dispatcher.integrations.megatron.dispatcher import capacity
from ep_dispatcher.integrations.megatron.dispatcher.buffers import MegatronBuffer


class GroupedExperts(Protocol):
    """What the dispatcher asks the experts of its layer before each dispatch, in this order."""

    can_take_quantised: bool  # whether they take a Quantized

    def is_grouped(self) -> bool:
        """Return whether they run in grouped GEMMs in this pass. These read counts on the device."""

    def can_take_deferred(self, buffer: ep.Buffer) -> bool:
        """Return whether they take a Deferred: the same on all ranks. The first call is collective."""

    def quantisation(self) -> QuantizeBlocks | None:
        """Return how the dispatch of this pass quantises. The first call may be collective."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """Rows that have arrived quantised. The experts get it in place of their counts, beside the anchor of the rows."""

    rows: Tensor  # float8_e4m3fn [num_rows, hidden]
    scales: Tensor  # float32 [num_rows, ceil(hidden / 128)]
    counts: Tensor

    def pair(self, anchor: Tensor) -> ep.QuantizedRows:
        """Return the pair of rows and scales. anchor: what Megatron has made of that of the dispatch, maybe detached"""
        return ep.QuantizedRows(self.rows, self.scales, anchor)


@dataclass(frozen=True, eq=False)
class Deferred:
    """The dispatch of one forward pass. Experts that run it themselves get it in place of their counts."""

    buffer: MegatronBuffer
    topk_idx: Tensor  # int64 [num_tokens, num_topk]
    max_rows: int | None  # of this rank; None: the host waits for their number
    alignment: int  # of the rows of an expert
    handles: list[ep.Handle]  # the plan of an earlier pass, or one for each part; empty: make new ones
    keep: Callable[[list[ep.Handle]], None]  # called with new plans
    quantize: QuantizeBlocks | None  # as ep.dispatch takes it

    def send(self, tokens: Tensor, probs: Tensor) -> ep.DispatchOutput:
        """Dispatch tokens [num_tokens, hidden] and probs float32 [num_tokens, num_topk]."""
        if self.handles:
            handle = self.handles[0]
            return ep.dispatch(self.buffer, tokens, topk_weights=probs, handle=handle, quantize=self.quantize)
        options: dict[str, Any] = dict(
            expert_alignment=self.alignment, quantize=self.quantize, max_recv_rows=self.max_rows
        )

        def run(topk_idx: Tensor, handles: list[ep.Handle]) -> ep.DispatchOutput:
            out = ep.dispatch(self.buffer, tokens, topk_idx, probs, **options)
            handles.append(out.handle)
            return out

        return self.noting(run)

    def noting(self, run: Callable[[Tensor, list[ep.Handle]], Any]) -> Any:
        """Run with this routing and the plans of an earlier pass, or a list for new ones, which are kept.

        If too many rows arrive in the schedule of a step, send none instead. A GPU gives zeros by itself then, and the
        buffer finds the error later.
        """
        topk_idx, handles = self.topk_idx, [*self.handles]
        try:
            out = run(topk_idx, handles)
        except TooFewRowsError as error:  # on all ranks of the group
            if not capacity.note(error, self.buffer.num_choices, self.buffer.config.num_ranks):
                raise
            handles = [*self.handles]
            out = run(torch.full_like(topk_idx, -1), handles)
        if not self.handles:
            self.keep(handles)
        return out
