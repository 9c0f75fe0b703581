"""The results of dispatch and combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic

import torch
from torch import Tensor
from typing_extensions import TypeVar  # of PyTorch; Python's own has defaults from 3.13 on

from ep_dispatcher.argument_types import Layout

R = TypeVar("R", bound="_Result")
# The types of what an output has: they depend on what was asked for. An output without them has the unions.
Rows = TypeVar("Rows", bound="Tensor | tuple[Tensor, Tensor]", covariant=True, default="Tensor | tuple[Tensor, Tensor]")
Weights = TypeVar("Weights", bound="Tensor | None", covariant=True, default="Tensor | None")


def _short(value: Any) -> str:
    """Describe a tensor by dtype and shape: its contents are long, and parts of a plan are uninitialised."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))})"
    return repr(value)


class _Result:
    """The base of the frozen dataclasses that operations return."""

    @classmethod
    def of(cls: type[R], **given: Any) -> R:
        """Return ``cls(**given)`` in a third of the time. Give every field that has no default."""
        if torch.compiler.is_compiling():  # Dynamo can trace only the constructor
            return cls(**given)
        made = object.__new__(cls)
        vars(made).update(given)
        return made

    def __repr__(self) -> str:
        names = [one.name for one in fields(self) if one.repr]  # type: ignore[arg-type]  # each class is a dataclass
        given = ", ".join(f"{name}={_short(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({given})"


@dataclass(frozen=True, eq=False, repr=False)
class Handle(_Result):
    """The plan of one routing on one rank. ``dispatch`` or ``plan`` makes it.

    ``combine``, a backward and a recompute use it. It never changes, and stays valid until its buffer is destroyed.
    """

    buffer_id: str
    layout: Layout
    expert_alignment: int
    num_tokens: int  # of this rank, as a source
    num_rows: int  # rows of the dispatched output, zero rows included
    plan: Tensor  # int32 [plan size] on the engine's device; only the engine reads it
    # int32 on the CPU, for an engine whose host posts messages between nodes and has waited for the counts
    # (Received.message_rows). None for all others. Only the engine reads it.
    message_rows: Tensor | None = None
    max_tokens_to_node: int = 0  # Buffer.max_tokens_to_node when it was made; 0: no limit, also in decode layout
    # DispatchOutput.rows_per_expert on the CPU, for experts that need their counts there. Reading it never waits.
    # None if the host does not know the counts: after a dispatch with max_recv_rows on a GPU, or in one being traced.
    rows_on_host: Tensor | None = None
    copies: Tensor | None = None  # balance.planner.BalancePlan.copies, with redundant experts
    made_with: tuple[Any, ...] = field(default=(), repr=False)  # layout to max_tokens_to_node, when it was made

    def is_as_made(self) -> bool:
        """Return whether nothing was changed that decides how much memory an operation reads and writes."""
        *sizes, plan, message_rows, max_tokens_to_node = self.made_with or (None, None, None)
        are_kept = self.plan is plan and self.message_rows is message_rows
        are_kept = are_kept and self.max_tokens_to_node == max_tokens_to_node
        return are_kept and sizes == [self.layout, self.expert_alignment, self.num_tokens, self.num_rows]


class Event:
    """The event of an operation. This one is complete, as every operation of the CPU engine when its call returns."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def wait(self) -> None:
        """Let the current stream wait for the operation."""

    def synchronize(self) -> None:
        """Let the host wait for the operation. Raise the errors that it found late."""

    def query(self) -> bool:
        """Return whether the operation is complete."""
        return True


def no_hook() -> None:
    """The hook of an operation without ``return_hook``: nothing is left to receive.

    A function, because Dynamo of PyTorch 2.11 cannot trace a result that has an object of a class of ours.
    """


@dataclass(frozen=True, eq=False, repr=False)
class DispatchOutput(_Result, Generic[Rows, Weights]):
    """The rows that this rank received. ``rows`` is their number, padding included.

    In annotations ep.DispatchOutput[Tensor, Tensor] has the types of x and topk_weights; the types of a result follow
    from the arguments.

    x                 [rows, hidden] of the buffer's dtype, or QuantizedRows (float8 rows, scales)
    topk_weights      float32: expert layout [rows], 0 on padding; rank layout [rows, num_topk], 0 where the expert is
                      not local; None if dispatch got none
    topk_idx          rank layout: int64 [rows, num_topk], number of the local expert or -1; expert layout: None
    tokens_per_expert int64 [num_local_experts], tokens of each expert, without padding. Add up those of many
                      operations, also in a CUDA graph, with ``total += out.tokens_per_expert``
    rows_per_expert   int64 [num_local_experts], the same rounded up to expert_alignment
    handle            for combine, and for another dispatch with the same routing
    event             completion of this dispatch
    hook              with ``return_hook`` the function to call before anything here is read; else it does nothing

    In decode layout, with S = num_ranks * max_tokens_per_rank:

    x                 [num_local_experts, S, hidden], or QuantizedRows of it and float32 scales [num_local_experts, S,
                      ceil(hidden / 128)]. With scale_format="ue8m0" a plain pair with int32 scales
                      [num_local_experts, S, hidden / 512], or of MXFP8 [.., ceil(hidden / 128)], four exponents in
                      each. Scales of one column are contiguous in memory. Rows after an expert's count are not written
    tokens_per_expert int32 [num_local_experts]; rows_per_expert is the same
    topk_weights      None, and so is topk_idx
    """

    x: Rows
    topk_weights: Weights
    topk_idx: Tensor | None
    tokens_per_expert: Tensor
    rows_per_expert: Tensor
    handle: Handle
    event: Event
    hook: Callable[[], None] = field(repr=False)

    @property
    def rows_on_host(self) -> Tensor:
        """rows_per_expert on the CPU. The host waits for the device only if it does not know the counts yet."""
        known = self.handle.rows_on_host
        return self.rows_per_expert.cpu() if known is None else known


@dataclass(frozen=True, eq=False, repr=False)
class CombineOutput(_Result, Generic[Weights]):
    """The sums of this rank's tokens.

    x             [num_tokens, hidden] of the buffer's dtype
    topk_weights  float32 [num_tokens, num_topk]; None if combine got none
    event         completion of this combine
    hook          with ``return_hook`` the function to call before x is read; else it does nothing
    """

    x: Tensor
    topk_weights: Weights
    event: Event
    hook: Callable[[], None] = field(repr=False)
