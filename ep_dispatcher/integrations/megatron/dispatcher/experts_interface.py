"""What the dispatcher and the experts of a layer pass to each other.

Experts get their rows and, in place of the counts of Megatron's interface, one of these:

    a tensor           the counts of rows
    a QuantizedInput   the rows, which have arrived quantized, and their counts
    a PendingDispatch  nothing has been sent yet: the experts run the dispatch, and the combine too

The dispatcher knows the experts only through the protocol ``GroupedExperts``, which grouped_experts/experts.py fills.
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
from ep_dispatcher.integrations.megatron.dispatcher import rank_capacity
from ep_dispatcher.integrations.megatron.dispatcher.buffers import MegatronBuffer


class GroupedExperts(Protocol):
    """What the dispatcher asks the experts of its layer before each dispatch, in this order."""

    can_take_quantized: bool  # whether they accept a QuantizedInput

    def decide_grouped(self) -> bool:
        """Decide whether they run in grouped GEMMs in this pass, which read counts on the device, and return it."""

    def quantize_blocks(self) -> QuantizeBlocks | None:
        """Return how the dispatch of this pass quantizes. The first call may be collective."""

    def num_parts_of_dispatch(self, buffer: ep.Buffer, alignment: int) -> int:
        """Return the parts of the tokens in which they run a PendingDispatch; 0 if they do not accept one.

        If one rank returns 2, so do all. The first call may be collective. alignment: that of PendingDispatch.send
        """


# Each forward pass makes one of these, and a frozen dataclass takes four times as long to make.
@dataclass(eq=False)
class QuantizedInput:
    """Rows that have arrived quantized. The experts get it in place of their counts, beside the anchor of the rows."""

    rows: Tensor  # float8_e4m3fn [num_rows, hidden], without a gradient
    scales: Tensor  # float32 [num_rows, ceil(hidden / 128)]
    counts: Tensor

    def with_anchor(self, anchor: Tensor) -> ep.QuantizedRows:
        """Return rows and scales with the anchor that Megatron has passed on. It may have detached it."""
        return ep.QuantizedRows(self.rows, self.scales, anchor)


@dataclass(eq=False)
class PendingDispatch:
    """The dispatch of one forward pass. Experts that run it themselves get it in place of their counts."""

    buffer: MegatronBuffer
    topk_idx: Tensor  # int64 [num_tokens, num_topk]
    num_parts: int  # of the tokens, each with a plan: 1 or 2
    max_rows: int | None  # of this rank; None: the host waits for their number
    alignment: int  # of the rows of an expert in `send`
    handles: list[ep.Handle]  # the plan of an earlier pass, or one for each part; empty: make new ones
    keep: Callable[[list[ep.Handle]], None]  # called with new plans, to keep them for a recompute
    quantize: QuantizeBlocks | None  # as ep.dispatch takes it

    def send(self, tokens: Tensor, probs: Tensor) -> ep.DispatchOutput:
        """Dispatch tokens [num_tokens, hidden] and probs float32 [num_tokens, num_topk]."""
        if self.handles:
            handle = self.handles[0]
            return ep.dispatch(self.buffer, tokens, topk_weights=probs, handle=handle, quantize=self.quantize)

        def dispatch(topk_idx: Tensor, handles: list[ep.Handle]) -> ep.DispatchOutput:
            out = ep.dispatch(
                self.buffer,
                tokens,
                topk_idx,
                probs,
                expert_alignment=self.alignment,
                quantize=self.quantize,
                max_recv_rows=self.max_rows,
            )
            handles.append(out.handle)
            return out

        return self.run_with_plans(dispatch)

    def run_with_plans(self, call: Callable[[Tensor, list[ep.Handle]], Any]) -> Any:
        """Return ``call(topk_idx, handles)``. The handles are the plans of an earlier pass.

        Without an earlier pass the list is empty: the call appends new plans, which are kept for a recompute.

        If more rows than max_rows would arrive while a schedule runs, send none instead. On a GPU the kernels give
        zeros by themselves then, and the buffer finds the error later.
        """
        topk_idx, handles = self.topk_idx, [*self.handles]
        try:
            out = call(topk_idx, handles)
        except TooFewRowsError as error:  # on all ranks of the group
            if not rank_capacity.note_overflow(error, self.buffer.capacities):
                raise
            handles = [*self.handles]
            out = call(torch.full_like(topk_idx, -1), handles)
        if not self.handles:
            self.keep(handles)
        return out
