"""The interface of an engine. Buffer checks the arguments before it calls one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from ep_dispatcher.argument_types import Quantize
from ep_dispatcher.engines.health import Health
from ep_dispatcher.gather import Gather
from ep_dispatcher.handle import Event
from ep_dispatcher.memory import Shape
from ep_dispatcher.plain import is_plain, plain
from ep_dispatcher.topology import Topology

if TYPE_CHECKING:
    from ep_dispatcher.buffer import Buffer


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Shape):
    """The settings of one buffer, checked. All ranks have the same, except for rank, limits and num_sms."""

    group: ProcessGroup
    topology: Topology
    hosts: tuple[str, ...]  # of the ranks
    why_hosts: str  # why nodes are hosts, where NVLink reaches other hosts or may do so; else ""
    buffer_id: int
    timeout_s: float
    num_sms: int | None
    nccl_sms: int
    suspendable: bool
    store: Store  # of the group's ranks, under a prefix for this buffer alone
    gather: Gather  # collective, while the engine is made; returns every rank's result, or raises alike on all ranks

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks


# Every operation makes a request, so requests are NamedTuples: a frozen dataclass takes four times as long to make.
# Their first fields come from these arguments of the caller:
DISPATCH_ARGUMENTS = ("x", "x[1]", "topk_idx", "topk_weights", "handle")
COMBINE_ARGUMENTS = ("y", "handle", "topk_weights", "weights")


class DispatchRequest(NamedTuple):
    """The checked arguments of one dispatch. The custom operator takes those up to `quantize`, in this order."""

    rows: Tensor  # [num_tokens, hidden]
    scales: Tensor | None = None  # [num_tokens, checks.num_scales]
    topk_idx: Tensor | None = None  # int64 (or int32, before ``plain``) [num_tokens, num_topk]; None: the plan is given
    topk_weights: Tensor | None = None  # float32 [num_tokens, num_topk]
    plan: Tensor | None = None  # of an earlier dispatch; None: make a new one
    layout: str = "expert"
    expert_alignment: int = 1
    num_rows: int = -1  # of the output; -1: as many as arrive
    quantize: Quantize | None = None  # bfloat16 rows travel as ep_dispatcher.quantize makes them
    sends_only: bool = False  # `receive` will complete the operation
    packs_scales: bool = False  # decode layout, powers of two: an engine that writes scales by column packs them

    @property
    def counts(self) -> bool:
        """Return whether the host waits for the number of rows before it allocates the output."""
        return self.plan is None and self.num_rows < 0

    def plain(self) -> DispatchRequest:
        """Return a request whose tensors engines can read by address, with topk_idx as int64."""
        tensors, topk_idx = self[:5], self.topk_idx
        for t in tensors:
            if t is not None and not is_plain(t):
                break
        else:
            if topk_idx is None or topk_idx.dtype == torch.int64:
                return self  # the usual case, three times as fast as a new request
        rows, scales, topk_idx, topk_weights, plan = (
            None if t is None else plain(argument, t) for argument, t in zip(DISPATCH_ARGUMENTS, tensors)
        )
        assert rows is not None  # as it was given
        topk_idx = None if topk_idx is None else topk_idx.long()
        return DispatchRequest(rows, scales, topk_idx, topk_weights, plan, *self[5:])


class CombineRequest(NamedTuple):
    """The checked arguments of one combine. The custom operator takes those up to `layout`, in this order."""

    y: Tensor  # [rows, hidden]
    plan: Tensor
    topk_weights: Tensor | None  # float32 [rows], or [rows, num_topk] in rank layout
    num_tokens: int  # of the output
    layout: str  # of the plan
    weights: Tensor | None = None  # float32 [num_tokens, num_topk]; only with a plan of decode layout
    sends_only: bool = False  # `receive` will complete the operation
    out: Tensor | None = None  # contiguous memory for the sums, not that of y; None: new memory

    def plain(self) -> CombineRequest:
        """Return a request whose tensors engines can read by address."""
        tensors = (*self[:3], self.weights)
        for t in tensors:
            if t is not None and not is_plain(t):
                break
        else:
            return self
        y, plan, topk_weights, weights = (
            None if t is None else plain(argument, t) for argument, t in zip(COMBINE_ARGUMENTS, tensors)
        )
        assert y is not None and plan is not None  # as they were given
        return self._replace(y=y, plan=plan, topk_weights=topk_weights, weights=weights)


ANY = 64  # stands for the address of a tensor without elements: 0 would mean None


def address_of(t: Tensor | None) -> int:
    """Return the address for compiled code: 0 for None, and never 0 for a tensor without elements."""
    return 0 if t is None else t.data_ptr() or ANY


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
    anchor: Tensor | None = None  # of a quantised dispatch with gradients (QuantizedRows); engines make none


class Combined(NamedTuple):
    """The tensors of one combine."""

    x: Tensor  # [num_tokens, hidden]
    topk_weights: Tensor | None  # [num_tokens, num_topk]; None when none were given


class Engine(Protocol):
    """What a buffer asks of an engine. Operations, `unmask`, `suspend` and `resume` are collective.

    By default every operation is complete, and has raised its errors, when its call returns.
    """

    device: str  # device type of its tensors
    layouts: tuple[str, ...]
    summary: str  # for people: the engine and its wires
    used_sms: int  # the most multiprocessors that an operation uses outside decode layout, NCCL's included
    rows_on_host: Tensor | None = None  # set by a dispatch with a new plan if the host knows the counts, as in Handle
    label: int = 0  # set by the caller; a dispatch with too few rows has it in its error
    wait_ns: dict[str, Tensor]  # of `measure_waits`, by operation
    # By label, int64 [num_local_experts]: what dispatches with a new plan add their tokens to.
    expert_tokens: Sequence[Tensor] | None = None
    health: Health

    @property
    def unreceived(self) -> str | None:
        """The operation that has only sent, until `receive` completes it or the engine ends. No other may begin."""

    def dispatch(self, request: DispatchRequest) -> Received:
        """Send rows to the ranks of their experts, and receive."""

    def check_routing(self, topk_idx: Tensor) -> None:
        """Raise ValueError for an invalid entry, if the host can read it without a wait."""
        return

    def compare_routing(self, planned: Tensor, given: Tensor, where: tuple[int, int]) -> None:
        """Find entries of ``given`` that differ from those that the plan of the next dispatch was made from.

        Both int64 [num_tokens, num_topk], as address_of reads them. Raises OtherRoutingError with `where`. An engine
        whose host would have to wait raises it later, as other mistakes that kernels find.
        """

    def combine(self, request: CombineRequest) -> Combined:
        """Return rows to the ranks of their tokens, and sum."""

    def receive(self) -> None:
        """Complete the operation that has only sent."""

    def plan_capacity(self, num_rows: int, layout: str) -> int:
        """Return the int32 elements of a plan for ``num_rows`` output rows."""

    def asynchronous(self, *inputs: object) -> AbstractContextManager[None]:
        """Let operations inside be incomplete when it exits. inputs: their tensors, or pairs of them."""
        return nullcontext()

    def follow(self) -> None:
        """Let the current stream follow the operations so far, and let later ones follow what it does next."""
        return

    def event(self, buffer: Buffer) -> Event:
        """Return the event of the last operation. It raises errors as the buffer words them."""
        return Event()

    def measure_waits(self, operation: str, wait_ns: Tensor | None) -> None:
        """Let every later ``operation`` ("dispatch", "combine") add to `wait_ns`, or to nothing: None.

        As Buffer.dispatch_wait_ns.
        """
        self.wait_ns.pop(operation, None)
        if wait_ns is not None:
            self.wait_ns[operation] = wait_ns

    def count(self, tokens_per_expert: Tensor) -> None:
        """Add the tokens of a new plan to the row of its label. The last row is that of all other labels."""
        if self.expert_tokens is not None:
            label, last = int(self.label or 0), len(self.expert_tokens) - 1
            self.expert_tokens[label if 0 <= label < last else last].add_(tokens_per_expert)

    def check(self) -> None:
        """Wait for the operations in the current stream, and raise their errors."""

    def overlook(self, found: Callable[[ValueError], bool]) -> None:
        """Do what Buffer.overlook() says."""
        return

    def counters(self) -> dict[str, list[int]]:
        """Return Buffer.counters()."""

    @property
    def mask(self) -> Tensor:
        """A copy, int32 [num_ranks] on the engine's device: 1 for masked ranks. Only with `mask_late_ranks`."""

    def mask_rank(self, rank: int) -> None:
        """Mask a rank. Only with `mask_late_ranks`."""

    def unmask(self, meet: Callable[[], Gather]) -> None:
        """Let all ranks in again. Only with `mask_late_ranks`. meet: opens an exchange between the ranks."""

    def suspend(self, meet: Callable[[], Gather]) -> None:
        """Free memory. Only with `suspendable`. meet: as in `unmask`.

        An error is the same on all ranks, whether it ends the buffer or leaves it as it was.
        """

    def resume(self, meet: Callable[[], Gather]) -> None:
        """Take the memory again, at the same addresses. Errors as in `suspend`."""

    def destroy(self) -> None:
        """End the engine, also while it is suspended."""
