"""Balances the layers of one buffer: gathers counts, plans copies, and moves weights and gradients of copies.

    forward     counts of all ranks -> plan of copies -> physical experts in topk_idx
                dispatch, and beside it push weights into slots; barrier, experts, combine
    backward    dispatch, push again, barrier; experts, gradients of copies, barrier, pull them; combine

No flag and no protocol of its own: what orders the ranks are the operations of the buffer. When an operation is
complete on a rank, every rank has entered it, so all that a rank did before it in its stream is done. The gather of
counts and the barrier are such operations too: of their own on GPUs of one node (csrc/cuda/balance/gather.cu), and
elsewhere a dispatch whose rows are the counts.

    weights in slots    written by a push, after the gather of counts, or after a dispatch of rows; read after the
                        barrier behind the push
    gradients in slots  written after the dispatch of a backward; pulled after the barrier behind that; written again
                        after the dispatch of the next backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ep_dispatcher import _C_cpu, checks
from ep_dispatcher.addressable import as_addressable
from ep_dispatcher.balance.move_clock import Move
from ep_dispatcher.balance.planner import BalancePlan, BalanceSizes, count_choices, plan_copies, rewrite, why_not
from ep_dispatcher.balance.slots import Slots
from ep_dispatcher.engines.base import Engine
from ep_dispatcher.handle import Handle
from ep_dispatcher.memory import round_up
from ep_dispatcher.moe.expert_matrices import ExpertMatrices, matrix_shape
from ep_dispatcher.outputs import new_handle
from ep_dispatcher.request import DispatchRequest
from ep_dispatcher.statistics import NUM_PLAN_SUMS, BalanceStats, Totals
from ep_dispatcher.topology import Topology

MAX_SLOTS: int = _C_cpu.BALANCE_MAX_SLOTS  # of a rank
SMALLEST_COPY = 256  # rows. Below that the bytes of the weights cost more than the rows save
_COUNT_BYTES = 4
_BYTES_OF: dict[Move, int] = {  # fields of BalanceStats
    "push": BalanceStats._fields.index("bytes_pushed"),
    "pull": BalanceStats._fields.index("bytes_pulled"),
}


def _row_bytes(num_experts: int) -> int:
    """Return the bytes of a row of counts.

    A barrier has shorter rows. So ranks that are a step apart differ in the bytes of a row, and the engine finds it.
    """
    return max(2 * checks.ROW_GRANULARITY, round_up(num_experts * _COUNT_BYTES, checks.ROW_GRANULARITY))


def _count_rows(num_ranks: int, num_topk: int) -> int:
    """Return how many tokens bring a row of counts to every rank, as each reaches num_topk ranks."""
    return -(-num_ranks // num_topk)


def _bytes_of_copy(in_slots: Sequence[Sequence[Tensor]], moved: Sequence[ExpertMatrices | None]) -> int:
    """Return the bytes that move for one copy. Nothing moves where `moved` has None."""
    return sum(of_slots[0].nbytes for of_slots, one in zip(in_slots, moved, strict=True) if one is not None)


def check_redundant_experts(topology: Topology, num_slots: int, sizes: dict[str, int], dtype: torch.dtype) -> None:
    """Refuse redundant experts on a buffer of these sizes, whose num_experts are those of the router."""
    given = f"redundant_experts_per_rank is {num_slots}"
    reason = why_not(topology.num_ranks, topology.ranks_per_node, sizes["num_experts"], num_slots)
    if reason is not None:
        checks.refuse(f"{given}, which these sizes do not allow: {reason}")
    if topology.ranks_per_node == 1:
        checks.refuse(f"{given}, but every node has one rank, and copies stay inside a node: give 0")
    row_bytes, needed = sizes["hidden"] * dtype.itemsize, _row_bytes(sizes["num_experts"])
    if needed > row_bytes:
        checks.refuse(
            f"{given}, for which a row has to hold the counts of all experts: {needed} bytes, but hidden = "
            f"{sizes['hidden']} in {dtype} has {row_bytes}"
        )
    num_tokens = _count_rows(topology.num_ranks, sizes["num_topk"])
    if num_tokens > sizes["max_tokens_per_rank"]:
        checks.refuse(
            f"{given}, which needs max_tokens_per_rank of at least {num_tokens} with {topology.num_ranks} ranks and "
            f"num_topk = {sizes['num_topk']}; it is {sizes['max_tokens_per_rank']}"
        )


@dataclass(frozen=True, eq=False)
class Balanced:
    """A routing whose experts are physical ones."""

    topk_idx: Tensor  # int64 [num_tokens, num_topk]
    plan: BalancePlan


class Balancer:
    """What ``ep.moe_mlp`` needs of a buffer with redundant experts.

    ``balance``, ``barrier`` and the first ``slots_for`` are calls of all ranks.

    sizes           what a plan of copies follows from
    smallest_copy   rows: a smaller copy is not made. Set another number on all ranks alike
    """

    def __init__(self, engine: Engine, device: torch.device):
        config = engine.config
        self._engine, self._device = engine, device
        self.sizes = BalanceSizes(
            num_ranks=config.num_ranks,
            ranks_per_node=config.ranks_per_node,
            num_local_experts=config.num_own_experts,
            num_slots=config.redundant_experts_per_rank,
            smallest_copy=SMALLEST_COPY,
            rank_at=tuple(rank for ranks in config.topology.nodes for rank in ranks),
        )
        self._handle: Handle | None = None  # of the dispatch that gathers counts
        self._barrier_row: Tensor | None = None
        self._slots: dict[tuple[object, ...], Slots] = {}  # by what they have of an expert
        self._num_made = 0  # attempts to make some
        self._last_use: torch.Event | None = None  # of any slot
        self.totals: Totals | None = None  # of the buffer, once it counts: plans and moves add to them

    @property
    def smallest_copy(self) -> int:
        return self.sizes.smallest_copy

    @smallest_copy.setter
    def smallest_copy(self, rows: int) -> None:
        self.sizes = replace(self.sizes, smallest_copy=rows)

    def balance(self, topk_idx: Tensor) -> Balanced:
        """Plan the copies of this microbatch. The host does not wait, but for the first time.

        topk_idx   int32 or int64 [num_tokens, num_topk]: the router's experts, or -1
        """
        config, sizes = self._engine.config, self.sizes
        topk_idx = as_addressable("topk_idx", topk_idx)
        counts = self._gather_counts(topk_idx)
        plan = plan_copies(counts, sizes)
        return Balanced(rewrite(topk_idx, counts, config.topology.rank, plan, sizes), plan)

    def count(self, plan: BalancePlan) -> None:
        """Count a plan for ``Buffer.stats()``, once the buffer counts. No other rank is needed."""
        if self.totals is None:
            return
        before, after = plan.rows.long()
        numbers = [torch.ones_like(before[0]), before.sum(), before.max(), after.max()]
        sums = self.totals.balance[:NUM_PLAN_SUMS]
        sums += torch.stack([*numbers, (plan.copies[..., 0] >= 0).sum()])

    def barrier(self) -> None:
        """Let later work in the current stream of this rank follow all earlier work in that of every rank."""
        if self._engine.gathers_counts:
            self._engine.gather_counts(None)
            return
        if self._barrier_row is None:
            num_words = checks.ROW_GRANULARITY // _COUNT_BYTES
            with torch.inference_mode(False):
                self._barrier_row = torch.zeros(num_words, dtype=torch.int32, device=self._device)
        self._gather(self._barrier_row)

    def _gather_counts(self, topk_idx: Tensor) -> Tensor:
        """Return int32 [num_ranks, num_experts or more]: how often each rank has chosen each expert."""
        num_experts = self._engine.config.num_logical_experts
        if self._engine.gathers_counts:
            counts = self._engine.gather_counts(topk_idx)
            assert counts is not None  # as topk_idx is given
            return counts
        own = torch.zeros(_row_bytes(num_experts) // _COUNT_BYTES, dtype=torch.int32, device=self._device)
        count_choices(topk_idx, num_experts, out=own)
        return self._gather(own)

    def _gather(self, own: Tensor) -> Tensor:
        """Return int32 [num_ranks, len(own)]: the row of every rank. It is a dispatch in rank layout."""
        config, engine, handle = self._engine.config, self._engine, self._handle
        rows = own.view(config.dtype).expand(_count_rows(config.num_ranks, config.num_topk), -1).contiguous()
        if handle is not None:
            request = DispatchRequest(
                rows, plan=handle.plan, message_rows=handle.message_rows, layout="rank", num_rows=handle.num_rows
            )
            return engine.dispatch(request).rows.view(torch.int32)
        with torch.inference_mode(False):  # the plan serves inside and outside of it
            num_choices = rows.shape[0] * config.num_topk
            ranks = torch.arange(num_choices, dtype=torch.int64, device=self._device)
            to_rank = torch.where(ranks < config.num_ranks, ranks * config.num_local_experts, -1)
            request = DispatchRequest(rows, topk_idx=to_rank.view(rows.shape[0], -1), layout="rank")
            counted, engine.expert_tokens = engine.expert_tokens, None  # these are no tokens of the caller's
            try:
                received = engine.dispatch(request)
            finally:
                engine.expert_tokens = counted
            self._handle = new_handle(engine, request, received)
        return received.rows.view(torch.int32)

    def slots_for(self, weights: Sequence[ExpertMatrices], parameters: Sequence[ExpertMatrices]) -> Slots:
        """Return the slots for experts with such weights. The first time all ranks make them together.

        weights      what a push brings of this rank's experts: each a tensor per expert, or one of them all
        parameters   likewise, those that have gradients
        """
        shapes = tuple((tuple(matrix_shape(one)), one[0].dtype) for one in weights)
        of_gradients = tuple(tuple(matrix_shape(one)) for one in parameters)
        slots = self._slots.get((shapes, of_gradients))
        if slots is None:
            config, number = self._engine.config, self._num_made
            self._num_made += 1  # also if it fails: names are used once
            with torch.inference_mode(False):  # they serve inside and outside of it
                slots = Slots(config, self._device, config.redundant_experts_per_rank, shapes, of_gradients, number)
            self._slots[(shapes, of_gradients)] = slots
        return slots

    def push(self, slots: Slots, copies: Tensor, weights: Sequence[ExpertMatrices | None]) -> None:
        """Push as Slots does, and measure it for ``Buffer.stats()``."""
        with self._measured("push", copies, slots.weights, weights):
            slots.push(copies, weights)

    def pull(self, slots: Slots, copies: Tensor, gradients: Sequence[ExpertMatrices | None]) -> None:
        """Pull as Slots does, and measure it for ``Buffer.stats()``."""
        with self._measured("pull", copies, slots.gradients, gradients):
            slots.pull(copies, gradients)

    @contextmanager
    def _measured(
        self,
        move: Move,
        copies: Tensor,
        in_slots: Sequence[Sequence[Tensor]],
        moved: Sequence[ExpertMatrices | None],
    ) -> Iterator[None]:
        """Count the time and the bytes of a move once the buffer counts. The host does not wait."""
        totals = self.totals
        if totals is None:
            yield
            return
        with totals.moves.measure(move):
            yield
        homes = copies[..., 0] // self.sizes.num_local_experts  # -1 where a slot is free
        num_copies = (homes == self._engine.config.topology.rank).sum()
        totals.balance[_BYTES_OF[move]].add_(num_copies, alpha=_bytes_of_copy(in_slots, moved))

    @property
    def slot_bytes(self) -> int:
        """Bytes of this rank's slots, of all shapes of experts that have run so far."""
        return sum(slots.num_bytes for slots in self._slots.values())

    @contextmanager
    def using_slots(self) -> Iterator[None]:
        """Let what happens inside follow earlier uses of slots on this rank, also those in another stream.

        Uses in one CUDA graph follow each other, as in its stream. Between graphs the caller orders them.
        """
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield
            return
        # Streams and events of torch.cuda are made in Python, which takes the host ten times as long.
        if self._last_use is not None:
            torch.accelerator.current_stream(self._device.index).wait_event(self._last_use)
        try:
            yield
        finally:
            self._last_use = torch.accelerator.current_stream(self._device.index).record_event()

    def free(self) -> None:
        """Free the slots."""
        slots, self._slots = self._slots, {}
        for one in slots.values():
            one.free()
