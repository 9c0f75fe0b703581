"""The capacities: how many rows a rank may receive in a layer, and how many tokens it may send to another node.

    with rank_capacity.state().watch() as overflows:   # skipped_step.py does so around the schedule of a step
        ...                                            # a dispatch with too many rows gives zeros, and is noted

Outside of a schedule too many rows are an error. When a capacity grows, it grows to one factor for all layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from ep_dispatcher.errors import TooFewRowsError, copy_error
from ep_dispatcher.integrations.megatron.dispatcher import arguments, registration

FACTOR_FLAG = arguments.flag("rank_capacity_factor")
MEGATRON_FACTOR_FLAG = arguments.flag_of("moe_expert_rank_capacity_factor")
NODE_FACTOR_FLAG = arguments.flag("node_capacity_factor")
OF_RANK, OF_NODE = "max_recv_rows", "max_tokens_to_node"  # what a capacity limits: TooFewRowsError.argument


def factor_of(config) -> float | None:
    """Return the rank capacity factor, ours or Megatron's."""
    ours = arguments.rank_capacity_factor(config)
    return getattr(config, "moe_expert_rank_capacity_factor", None) if ours is None else ours


def max_rows(config, num_tokens: int, expert_tp: int, alignment: int) -> int | None:
    """Return the rows of a rank by --moe-expert-rank-capacity-factor; None without it."""
    factor = getattr(config, "moe_expert_rank_capacity_factor", None)
    if factor is None:
        return None
    return -(-int(num_tokens * config.moe_router_topk * expert_tp * factor) // alignment) * alignment


def max_rows_by_factor(
    factor: float, max_tokens: int, num_ranks: int, choices: int, num_local_experts: int, alignment: int = 1
) -> int:
    """Return the rows of a rank by --ep-dispatcher-rank-capacity-factor.

    They are max_tokens x choices x factor, but never more than the ranks can send with groups that are padded to
    ``alignment``, and rounded up to it. With a factor of num_ranks they are exactly that: then any routing has room.
    """
    rows = num_ranks * max_tokens * min(choices, num_local_experts) + num_local_experts * (alignment - 1)
    if factor < num_ranks:
        rows = min(rows, math.ceil(max_tokens * choices * factor))
    return -(-rows // alignment) * alignment


def share_of_node(
    num_nodes: int, num_experts: int, topk: int, num_groups: int | None = None, topk_groups: int | None = None
) -> float:
    """Return the share of tokens with an expert on a node, if routing is even.

        1 - (experts elsewhere over topk) / (num_experts over topk)

    With groups of experts a token has experts in topk_groups of num_groups. Where every node has whole groups, that is
    on no more nodes.
    """
    elsewhere = num_experts - num_experts // num_nodes
    share = 1 - math.comb(elsewhere, topk) / math.comb(num_experts, topk)
    if num_groups and topk_groups and num_groups % num_nodes == 0:
        share = min(share, topk_groups / num_nodes)
    return share


@dataclass(frozen=True)
class Capacities:
    """What the two factors multiply in a buffer, and with which factors any routing has room."""

    num_choices: int  # of a rank: tokens x choices of a token; the rank capacity factor multiplies it
    num_ranks: int  # this rank capacity factor is always enough
    max_tokens: int = 1  # of a rank
    share_of_node: float = 1.0  # of a rank's tokens, for another node; the node capacity factor multiplies it

    def max_tokens_to_node(self, factor: float) -> int:
        """Return the tokens of a rank for another node by --ep-dispatcher-node-capacity-factor."""
        return min(self.max_tokens, math.ceil(self.max_tokens * self.share_of_node * factor))

    def factor_for(self, error: TooFewRowsError) -> float:
        """Return the factor that would have been enough."""
        if error.argument == OF_NODE:
            return error.needed_rows / (self.max_tokens * self.share_of_node)
        return min(error.needed_rows / self.num_choices, self.num_ranks)

    def most(self, error: TooFewRowsError) -> float:
        """Return the factor that is enough for any routing."""
        return 1 / self.share_of_node if error.argument == OF_NODE else self.num_ranks


def explained(error: ValueError, capacities: Capacities) -> ValueError:
    """Return the error. If a factor allowed too few rows, return one that names a factor that is enough."""
    if not isinstance(error, TooFewRowsError):
        return error
    flag = NODE_FACTOR_FLAG if error.argument == OF_NODE else FACTOR_FLAG
    enough = math.ceil(round(100 * capacities.factor_for(error), 6)) / 100
    return copy_error(error, f". {flag} {enough:g} is enough for this dispatch")


@dataclass(frozen=True, order=True)
class Overflow:
    """Too many rows in a dispatch, or too many tokens of a rank for another node."""

    factor: float  # would have been enough
    rows: int  # the most rows that a rank needs, or tokens that it has for another node
    layer: int  # its number; 0: it has none
    most: float  # the factor that is enough for any routing: of rows, the number of ranks of the group
    argument: str = OF_RANK


@dataclass
class CapacityState:
    """The capacities, and the step under way.

    The grown factors, ``pending_error`` and ``num_skipped`` are the same on all ranks.
    """

    grown_factor: float = 0.0  # the rank capacity factor that the job has grown to; 0: as configured
    grown_node_factor: float = 0.0  # the same of the node capacity factor
    overflows: list[Overflow] | None = None  # of the schedule under way; None: no schedule is under way
    # If not None, Megatron's optimizers skip their steps until the next schedule that trains, and others raise it.
    pending_error: TooFewRowsError | None = None
    has_skipped: bool = False  # whether an optimizer has skipped its step since
    last_was_skipped: bool = False  # whether the optimizer step before the schedule under way was skipped
    num_skipped: int = 0
    num_optimizer_calls: int = 0  # what graphs.num_optimizer_calls returned before the schedule under way
    saved: Any = None  # a skipped_step.SavedState, to be restored if this step is skipped
    # skipped_step.ModelFacts of a schedule's models, by the first model.
    model_facts: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)
    optimizers: WeakSet[Any] = field(default_factory=WeakSet)  # Megatron's, of this rank

    def grown(self, argument: str) -> float:
        return self.grown_node_factor if argument == OF_NODE else self.grown_factor

    def grow(self, argument: str, factor: float) -> None:
        if argument == OF_NODE:
            self.grown_node_factor = factor
        else:
            self.grown_factor = factor

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Overflow]]:
        """Yield a list that collects overflows, which would otherwise be raised."""
        overflows: list[Overflow] = []
        self.overflows = overflows
        try:
            yield overflows
        finally:
            self.overflows = None


def state() -> CapacityState:
    return registration.process_wide(CapacityState)


def note_overflow(error: ValueError, capacities: Capacities) -> bool:
    """Note an overflow if a schedule is under way. Return whether that was so; otherwise the error has to be raised."""
    overflows = state().overflows
    if overflows is None or not isinstance(error, TooFewRowsError):
        return False
    most = capacities.most(error)
    overflows.append(Overflow(capacities.factor_for(error), error.needed_rows, error.label, most, error.argument))
    return True
