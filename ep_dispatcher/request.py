"""Requests to an engine, and the tensors that it returns. arguments.py has checked the contents of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ep_dispatcher.addressable import as_addressable, is_addressable
from ep_dispatcher.argument_types import Quantize


# Every operation makes a request, so it is not a frozen dataclass, which takes four times as long to make. Only
# make_addressable and recompute.use_plan change one.
@dataclass(eq=False)
class DispatchRequest:
    """One dispatch. In a backward its tensors follow from those of the forward pass."""

    rows: Tensor  # [num_tokens, hidden]
    scales: Tensor | None = None  # [num_tokens, checks.num_scales]
    # [num_tokens, num_topk] int64, or int32 before make_addressable; None: the plan is given
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None  # float32 [num_tokens, num_topk]
    plan: Tensor | None = None  # that of an earlier dispatch; None: make a new one
    message_rows: Tensor | None = None  # of that plan: Received.message_rows
    max_tokens_to_node: int = 0  # Buffer.max_tokens_to_node of that plan, or of the new one; 0: no limit
    layout: str = "expert"
    expert_alignment: int = 1
    num_rows: int = -1  # rows of the output; -1: as many as arrive
    quantize: Quantize | None = None  # bfloat16 rows travel as ep_dispatcher.quantize makes them
    label: int = 0  # the caller's number, for the error of rows that do not fit and for counts
    is_send_only: bool = False  # Engine.receive will complete the operation
    packs_scales: bool = False  # decode layout, powers of two: an engine that writes scales by column packs them
    # Work of the host that sends nothing. The dispatch calls it once, on a GPU when the host would only wait for counts
    meanwhile: Callable[[], None] | None = None

    @property
    def needs_counts(self) -> bool:
        """Whether the host has to wait for the number of rows before it allocates the output."""
        return self.plan is None and self.num_rows < 0

    def tensors(self) -> tuple[tuple[str, Tensor | None], ...]:
        """Return the tensors, each with the name of the argument that it comes from."""
        return (
            ("x", self.rows),
            ("x[1]", self.scales),
            ("topk_idx", self.topk_idx),
            ("topk_weights", self.topk_weights),
            ("handle", self.plan),
        )

    def observable_fields(self) -> tuple[object, ...]:
        """Return the fields that a compiler or a transform may have replaced: tensors, and sizes."""
        tensors = self.rows, self.scales, self.topk_idx, self.topk_weights, self.plan, self.message_rows
        return *tensors, self.expert_alignment, self.num_rows, self.max_tokens_to_node

    def make_addressable(self) -> None:
        """Replace each tensor that engines cannot read by address with a copy. topk_idx becomes int64."""
        if not is_addressable(self.rows):
            self.rows = as_addressable("x", self.rows)
        if self.scales is not None and not is_addressable(self.scales):
            self.scales = as_addressable("x[1]", self.scales)
        if self.topk_weights is not None and not is_addressable(self.topk_weights):
            self.topk_weights = as_addressable("topk_weights", self.topk_weights)
        if self.plan is not None and not is_addressable(self.plan):
            self.plan = as_addressable("handle", self.plan)
        if self.topk_idx is not None:
            if not is_addressable(self.topk_idx):
                self.topk_idx = as_addressable("topk_idx", self.topk_idx)
            if self.topk_idx.dtype != torch.int64:
                self.topk_idx = self.topk_idx.long()


@dataclass(eq=False)
class CombineRequest:
    """One combine."""

    y: Tensor  # [rows, hidden]
    plan: Tensor
    num_tokens: int  # of the output
    layout: str = "expert"  # of the plan
    topk_weights: Tensor | None = None  # float32 [rows], or [rows, num_topk] in rank layout
    message_rows: Tensor | None = None  # of the plan: Received.message_rows
    max_tokens_to_node: int = 0  # of the plan, as in DispatchRequest
    weights: Tensor | None = None  # decode layout: float32 [num_tokens, num_topk]
    is_send_only: bool = False  # Engine.receive will complete the operation
    out: Tensor | None = None  # contiguous memory for the sums, not that of y; None: new memory

    def tensors(self) -> tuple[tuple[str, Tensor | None], ...]:
        """Return the tensors to be read, each with the name of the argument that it comes from."""
        return ("y", self.y), ("handle", self.plan), ("topk_weights", self.topk_weights), ("weights", self.weights)

    def observable_fields(self) -> tuple[object, ...]:
        """Return the fields that a compiler or a transform may have replaced: tensors, and sizes."""
        return self.y, self.plan, self.topk_weights, self.message_rows, self.num_tokens, self.max_tokens_to_node

    def make_addressable(self) -> None:
        """Replace each tensor that engines cannot read by address with a copy."""
        if not is_addressable(self.y):
            self.y = as_addressable("y", self.y)
        if not is_addressable(self.plan):
            self.plan = as_addressable("handle", self.plan)
        if self.topk_weights is not None and not is_addressable(self.topk_weights):
            self.topk_weights = as_addressable("topk_weights", self.topk_weights)
        if self.weights is not None and not is_addressable(self.weights):
            self.weights = as_addressable("weights", self.weights)


class Received(NamedTuple):
    """The tensors of one dispatch; None for those that were not asked for."""

    rows: Tensor
    # In decode layout an engine may already return [num_local_experts, rows, columns], as in DispatchOutput.
    scales: Tensor | None
    topk_weights: Tensor | None
    topk_idx: Tensor | None
    tokens_per_expert: Tensor  # int64; in decode layout an engine may return int32, here and in rows_per_expert
    rows_per_expert: Tensor
    plan: Tensor | None  # a new plan; None when the plan was given
    # Of a new plan whose host has waited for the counts, int32 on the CPU: how many rows messages to each node have,
    # and those from it, where a host posts them; it may not know. None for wires that need no such numbers.
    message_rows: Tensor | None = None
    rows_on_host: Tensor | None = None  # of a new plan, as in Handle
    anchor: Tensor | None = None  # of a quantized dispatch with gradients (QuantizedRows); made by with_anchor


def with_anchor(request: DispatchRequest, received: Received) -> Received:
    """Return the tensors of a dispatch with gradients. A quantized one gets an anchor, which needs no memory."""
    if not request.quantize:
        return received
    num_rows, hidden = received.rows.shape
    return received._replace(anchor=request.rows.new_zeros(()).expand(num_rows, hidden))


class Planned(NamedTuple):
    """What a dispatch writes before its rows: fields of Received, and None in place of the others."""

    tokens_per_expert: Tensor
    rows_per_expert: Tensor
    plan: Tensor | None
    rows: None = None
    scales: None = None
    topk_weights: None = None
    topk_idx: None = None
    message_rows: None = None


class Combined(NamedTuple):
    """The tensors of one combine."""

    x: Tensor  # [num_tokens, hidden]
    topk_weights: Tensor | None  # [num_tokens, num_topk]; None when none were given
