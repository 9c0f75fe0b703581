"""The interface of an engine. The arguments of a request are checked before an engine gets it (arguments.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup, Store

from ep_dispatcher import checks
from ep_dispatcher.engines.health import Health
from ep_dispatcher.gather import Gather, Members
from ep_dispatcher.handle import Event
from ep_dispatcher.memory import Shape
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Received
from ep_dispatcher.topology import GroupReference, Topology
from ep_dispatcher.wording import Wording


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Shape):
    """The settings of one buffer, checked. All ranks have the same, except for rank, limits and num_sms."""

    group_reference: GroupReference
    topology: Topology
    hosts: tuple[str, ...]  # of the ranks
    why_hosts: str  # why nodes are hosts although NVLink may reach other hosts; "" if there is nothing to explain
    buffer_id: str  # a number; Dynamo would trace an int as a symbol that may change
    wording: Wording  # puts errors into the caller's words
    timeout_s: float
    num_sms: int | None
    nccl_sms: int
    suspendable: bool
    redundant_experts_per_rank: int  # of the num_local_experts of a rank, which are its own and these
    store: Store  # of the group's ranks, under a prefix for this buffer alone
    gather: Gather  # collective, while the engine is made; returns every rank's result, or raises on all ranks

    @property
    def group(self) -> ProcessGroup:
        """The group of the ranks. ValueError after destroy_process_group."""
        return self.group_reference.group()

    @property
    def members(self) -> Members:
        return Members(self.topology.rank, self.num_ranks)

    @property
    def num_local_experts(self) -> int:
        """Physical experts of a rank: its own, and its slots for redundant copies of others."""
        return self.num_experts // self.num_ranks

    @property
    def num_own_experts(self) -> int:
        """Logical experts of a rank, those that a router knows."""
        return self.num_local_experts - self.redundant_experts_per_rank

    @property
    def num_logical_experts(self) -> int:
        """Experts that a router knows, on all ranks together."""
        return self.num_own_experts * self.num_ranks

    def logical_expert(self, physical: int) -> int | None:
        """Return the router's number of a physical expert, for errors. None for a slot, whose copy changes.

        Numbers that are no expert's stay so: balance/planner.py moves those that are too large as it moves others.
        """
        if physical < 0:
            return physical
        if physical >= self.num_experts:
            return physical - self.num_experts + self.num_logical_experts
        rank, number = divmod(physical, self.num_local_experts)
        return rank * self.num_own_experts + number if number < self.num_own_experts else None

    def describe(self, state: str) -> str:
        """Return the text of a buffer for people. state: that of its engine"""
        topology = self.topology
        nodes = f"{topology.num_nodes} {'node' if topology.num_nodes == 1 else 'nodes'} x {topology.ranks_per_node}"
        sizes = f"hidden={self.hidden}, num_experts={self.num_logical_experts}"
        if self.redundant_experts_per_rank:
            sizes += f", redundant_experts_per_rank={self.redundant_experts_per_rank}"
        sizes += f", num_topk={self.num_topk}, max_tokens_per_rank={self.max_tokens_per_rank}"
        return f"Buffer(rank {topology.rank} of {nodes}, {sizes}, dtype={self.dtype}, {state})"


ANY = 64  # stands for the address of a tensor without elements: 0 would mean None


def address_of(t: Tensor | None) -> int:
    """Return the address for compiled code: 0 for None, and never 0 for a tensor without elements."""
    return 0 if t is None else t.data_ptr() or ANY


class PendingOperation:
    """An operation that has sent, and waits for its hook to complete it by `receive`."""

    def __init__(self, operation: str):
        self.operation = operation


class Engine(Protocol):
    """What a buffer asks of an engine. Operations, `unmask`, `suspend` and `resume` are collective.

    By default every operation is complete, and has raised its errors, when its call returns.
    """

    config: EngineConfig
    device: str  # device type of its tensors
    layouts: tuple[str, ...]
    summary: str  # for people: the engine and its wires
    used_sms: int  # the most multiprocessors that an operation uses outside decode layout, those of NCCL included
    wait_ns: dict[str, Tensor]  # the tensors given to `measure_waits`, by operation
    # By label, int64 [num_local_experts]: dispatches with a new plan add their tokens here.
    expert_tokens: Sequence[Tensor] | None = None
    health: Health
    pending: PendingOperation | None = None  # the operation that waits for its hook
    num_message_rows: int = 0  # elements of Received.message_rows
    max_tokens_to_node: int = 0  # the limit for new plans, in the layouts of training; 0: no limit
    gathers_counts: bool = False  # has `gather_counts`

    def refuse_if_pending(self, operation: str) -> None:
        """Refuse an operation while another one waits for its hook."""
        if self.pending is not None and not self.health.ended:
            checks.refuse(f"hook() of the {self.pending.operation} has to be called before the {operation}")

    def dispatch(self, request: DispatchRequest) -> Received:
        """Send rows to the ranks of their experts, and receive."""

    def check_routing(self, topk_idx: Tensor, num_experts: int | None = None) -> None:
        """Raise ValueError for an invalid entry, if the host can read it without a wait.

        num_experts: those that may be chosen; None: all physical ones
        """
        return

    def compare_routing(self, planned: Tensor, given: Tensor, where: tuple[int, int]) -> None:
        """Find entries of ``given`` that differ from ``planned``, from which the plan of the next dispatch was made.

        Both are addressable, int64 [num_tokens, num_topk]. Raises OtherRoutingError with `where`. An engine whose host
        would have to wait raises it later, like other errors that kernels find.
        """

    def combine(self, request: CombineRequest) -> Combined:
        """Return rows to the ranks of their tokens, and sum."""

    def gather_counts(self, topk_idx: Tensor | None) -> Tensor | None:
        """Return how often each rank has chosen each logical expert: int32 [num_ranks, num_logical_experts].

        topk_idx: int32 or int64 [num_tokens, num_topk], addressable. None: the operation is a barrier, and returns
        None. Either way every rank has begun it when it is complete on one. Only with `gathers_counts`.
        """
        raise AssertionError("this engine has no gather of counts")

    def receive(self) -> None:
        """Complete the operation that has only sent."""

    def plan_capacity(self, num_rows: int, layout: str) -> int:
        """Return the int32 elements of a plan for ``num_rows`` output rows."""

    def asynchronous(self, *inputs: object) -> AbstractContextManager[None]:
        """Return a context in which operations may return before they are complete. inputs: their tensors or pairs"""
        return nullcontext()

    def follow(self) -> None:
        """Order the current stream after all operations so far, and later operations after that stream."""
        return

    def event(self) -> Event:
        """Return the event of the last operation."""
        return Event()

    def measure_waits(self, operation: str, wait_ns: Tensor | None) -> None:
        """Make every later ``operation`` ("dispatch" or "combine") add its waits to `wait_ns`. None: measure nothing.

        See Buffer.dispatch_wait_ns.
        """
        self.wait_ns.pop(operation, None)
        if wait_ns is not None:
            self.wait_ns[operation] = wait_ns

    def count(self, label: int, tokens_per_expert: Tensor) -> None:
        """Add the tokens of a new plan to the row of its label. The last row is for all other labels."""
        if self.expert_tokens is not None:
            last = len(self.expert_tokens) - 1
            self.expert_tokens[label if 0 <= label < last else last].add_(tokens_per_expert)

    def check(self) -> None:
        """Wait for the operations in the current stream, and raise their errors."""

    def limit_tokens_to_node(self, most: int) -> None:
        """Do what Buffer.max_tokens_to_node says; 0: no limit."""
        self.max_tokens_to_node = most

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
        """Unmask all ranks. Only with `mask_late_ranks`. meet: opens an exchange between the ranks"""

    def suspend(self, meet: Callable[[], Gather]) -> None:
        """Free memory. Only with `suspendable`. meet: as in `unmask`.

        An error is the same on all ranks, whether it ends the buffer or leaves it as it was.
        """

    def resume(self, meet: Callable[[], Gather]) -> None:
        """Allocate the memory again, at the same addresses. Errors are as in `suspend`."""

    def destroy(self) -> None:
        """End the engine, also while it is suspended."""
