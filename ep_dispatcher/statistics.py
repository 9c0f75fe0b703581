"""What Buffer.stats() returns, and how a buffer counts it: on the engine's device, without a wait of the host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.balance.move_clock import MoveClock
from ep_dispatcher.engines.base import Engine

NUM_LABELS = 256
_OPERATIONS = ("dispatch", "combine")
_MOST_COPIES = 4  # under way at a time. A host that is so far ahead takes no further ones


class BalanceStats(NamedTuple):
    """Sums over the microbatches that were balanced between two results of ``Buffer.stats()``.

    num_microbatches   plans of copies; a recompute makes none
    rows               choices of all ranks' tokens, which is what all experts compute
    fullest_before     rows of the fullest rank of each microbatch, had every expert stayed at home
    fullest_after      the same with the copies that were made
    num_copies         redundant copies that were made
    bytes_pushed       bytes of weights that this rank has written into slots of other ranks, in forwards, backwards and
                       recomputes
    bytes_pulled       bytes of float32 gradients that this rank has read from slots of other ranks
    push_ns, pull_ns   nanoseconds that these pushes and pulls took on this rank: on GPUs from when the stream could
                       begin one until it had ended, without those in CUDA graphs, which are not timed
    num_ranks          ranks of the buffer: no sum

    Bytes and times are those of one rank. All else is the same on all ranks.
    """

    num_microbatches: int
    rows: int
    fullest_before: int
    fullest_after: int
    num_copies: int
    bytes_pushed: int
    bytes_pulled: int
    push_ns: int
    pull_ns: int
    num_ranks: int

    @property
    def imbalance_before(self) -> float:
        """Rows of the fullest rank over the mean of all ranks, had every expert stayed at home. 1.0 is balanced."""
        return self.fullest_before * self.num_ranks / self.rows if self.rows else 1.0

    @property
    def imbalance_after(self) -> float:
        """Rows of the fullest rank over the mean of all ranks, with the copies that were made."""
        return self.fullest_after * self.num_ranks / self.rows if self.rows else 1.0


NUM_PLAN_SUMS = BalanceStats._fields.index("bytes_pushed")  # fields that a plan of copies adds to
NUM_BALANCE_SUMS = BalanceStats._fields.index("push_ns")  # fields that are counted on the engine's device


@dataclass(frozen=True)
class Stats:
    """What a buffer's operations have done between two results of ``Buffer.stats()``. All tensors are int64 on the CPU.

    tokens_per_expert   [256, num_local_experts]: the tokens that have arrived for each local expert, without padding.
                        Row i is for dispatches that were called or captured while the buffer's label was i. All other
                        labels count together in row 255
    dispatch_wait_ns    [num_ranks]: nanoseconds that dispatches have waited for each rank, as in
                        ``Buffer.dispatch_wait_ns``
    combine_wait_ns     likewise in combines
    num_calls           calls of ``stats()`` that this covers. It is more than 1 if earlier ones returned None
    balance             with redundant experts what balancing has done. Without them None, and with them
                        tokens_per_expert has a column for each slot behind those of this rank's experts
    """

    tokens_per_expert: Tensor
    dispatch_wait_ns: Tensor
    combine_wait_ns: Tensor
    num_calls: int
    balance: BalanceStats | None = None


class HostCopy:
    """A copy of a tensor on its way to the host, after all work in the current stream. ``values`` when it ``is_here``.

    A tensor of a CPU is copied at once.
    """

    def __init__(self, t: Tensor):
        self._event: torch.cuda.Event | None = None
        if not t.is_cuda:
            self.values = t.clone()
            return
        self.values = torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def is_here(self) -> bool:
        return self._event is None or self._event.query()


class _Taken(NamedTuple):
    """The totals at one call of take()."""

    copy: HostCopy
    call: int


class Totals:
    """Sums since they were made. The engine adds to them; they are never set back, so no operation can be lost.

    all     int64 on the engine's device; `parts` has its parts. integrations/job_stats.py reads it too
    moves   times of pushes and pulls of redundant copies
    """

    def __init__(self, engine: Engine, num_local_experts: int, num_ranks: int, device: torch.device):
        for name in _OPERATIONS:
            if name in engine.wait_ns:
                checks.refuse(f"{name}_wait_ns has to be None before stats(), which measures the same waits")
        self._sizes, self._num_ranks = (
            [NUM_LABELS * num_local_experts, num_ranks, num_ranks, NUM_BALANCE_SUMS],
            num_ranks,
        )
        with torch.inference_mode(False):  # operations may add inside and outside of it
            follow(engine, device)
            self.all = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
            self._last, self._last_call = torch.zeros_like(self.all, device="cpu"), 0
            tokens, *waits, self.balance = self.parts(self.all)
            engine.expert_tokens = tokens.unbind()
        for name, wait_ns in zip(_OPERATIONS, waits, strict=True):
            engine.measure_waits(name, wait_ns)
        self.moves = MoveClock(device)
        self._copies: deque[_Taken] = deque()
        self._call = 0

    def parts(self, totals: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens [NUM_LABELS, num_local_experts], waits [num_ranks] of dispatches and of combines, and balance.

        balance   [NUM_BALANCE_SUMS]: the first fields of BalanceStats; zeros without redundant experts
        """
        tokens, dispatch_wait_ns, combine_wait_ns, balance = totals.split(self._sizes)
        return tokens.view(NUM_LABELS, -1), dispatch_wait_ns, combine_wait_ns, balance

    def take(self, engine: Engine) -> Stats | None:
        """Begin a copy, after all operations so far. Return what the newest copy that is here has added.

        None: no other copy has arrived since the last result.
        """
        with torch.inference_mode(False), torch.cuda.device_of(self.all):
            follow(engine, self.all.device)
            self._call += 1
            self.moves.call = self._call
            if len(self._copies) < _MOST_COPIES:
                self._copies.append(_Taken(HostCopy(self.all), self._call))
            arrived = None
            while self._copies and self._copies[0].copy.is_here:
                arrived = self._copies.popleft()
            if arrived is None:
                return None
            totals, call = arrived.copy.values, arrived.call
            tokens, dispatch_wait_ns, combine_wait_ns, sums = self.parts(totals - self._last)
            balance = None
            if engine.config.redundant_experts_per_rank:
                balance = BalanceStats._make([*sums.tolist(), *self.moves.take(before=call), self._num_ranks])
            stats = Stats(tokens, dispatch_wait_ns, combine_wait_ns, call - self._last_call, balance)
            self._last, self._last_call = totals, call
            return stats


def follow(engine: Engine, device: torch.device) -> None:
    """Let the current stream follow all operations so far, and later operations follow what it does next.

    ValueError while a CUDA graph is captured.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                checks.refuse(
                    "stats() cannot be called in the capture of a CUDA graph: call it outside. Replays are counted"
                )
    engine.follow()
