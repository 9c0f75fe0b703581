"""The interface of an engine. Buffer has checked the arguments before it calls one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from ep_dispatcher.gather import Gather
from ep_dispatcher.handle import Event
from ep_dispatcher.topology import Topology


@dataclass(frozen=True)
class EngineConfig:
    """The settings of one buffer, checked and the same on all ranks but for rank, limits and num_sms."""

    group: ProcessGroup
    topology: Topology
    hosts: tuple[str, ...]  # of the ranks
    buffer_id: int
    hidden: int
    num_experts: int
    num_topk: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    timeout_s: float
    num_sms: int | None
    suspendable: bool
    mask_late_ranks: bool
    store: Store  # shared by the ranks of the group, under a prefix of this buffer's own
    gather: Gather  # collective, while the engine is made: every rank's result, or the same error on every rank

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.topology.num_ranks


# Requests are NamedTuples because they are made in every operation: a frozen dataclass takes four times as long.


class DispatchRequest(NamedTuple):
    """One dispatch, as Buffer has checked it. The custom operator takes these fields, in this order."""

    rows: Tensor  # [num_tokens, hidden]
    scales: Tensor | None  # [num_tokens, hidden / 128]
    topk_idx: Tensor | None  # int64 (or int32, before ``plain``) [num_tokens, num_topk]; None: the plan is given
    topk_weights: Tensor | None  # float32 [num_tokens, num_topk]
    plan: Tensor | None  # of an earlier dispatch; None: a new one is made
    layout: str
    expert_alignment: int
    num_rows: int  # of the output; -1: as many as are received
    quantize: bool  # bfloat16 rows travel as ep_dispatcher.quantize makes them

    @property
    def counts(self) -> bool:
        """Return whether the rows of the output are counted first: the host waits for their number."""
        return self.plan is None and self.num_rows < 0

    def plain(self) -> DispatchRequest:
        """Return it with tensors as engines read them: by address, topk_idx as int64."""
        tensors, topk_idx = self[:5], self.topk_idx
        for t in tensors:
            if t is not None and (not t.is_contiguous() or t.is_neg()):
                break
        else:
            if topk_idx is None or topk_idx.dtype == torch.int64:
                return self  # mostly, and three times as fast as to make another one
        rows, scales, topk_idx, topk_weights, plan = (None if t is None else plain(t) for t in tensors)
        assert rows is not None  # as it was given
        topk_idx = None if topk_idx is None else topk_idx.long()
        return DispatchRequest(rows, scales, topk_idx, topk_weights, plan, *self[5:])


class CombineRequest(NamedTuple):
    """One combine, as Buffer has checked it. The custom operator takes these fields, in this order."""

    y: Tensor  # [rows, hidden]
    plan: Tensor
    topk_weights: Tensor | None  # float32 [rows], or [rows, num_topk] in rank layout
    num_tokens: int  # of the output
    layout: str  # of the plan

    def plain(self) -> CombineRequest:
        """Return it with tensors as engines read them, by address."""
        for t in self[:3]:
            if t is not None and (not t.is_contiguous() or t.is_neg()):
                break
        else:
            return self
        weights = None if self.topk_weights is None else plain(self.topk_weights)
        return CombineRequest(plain(self.y), plain(self.plan), weights, self.num_tokens, self.layout)


def plain(t: Tensor) -> Tensor:
    """Return the values as they lie in contiguous memory, without a lazy change of sign. Autograd sees no copy."""
    # Every call into PyTorch counts, because this runs in every operation: detach only what is copied.
    return t if t.is_contiguous() and not t.is_neg() else t.detach().contiguous().resolve_neg()


ANY = 64  # address of a tensor without elements: it is not None


def address_of(t: Tensor | None) -> int:
    """Return the address for compiled code: 0 for None, and never 0 for a tensor without elements."""
    return 0 if t is None else t.data_ptr() or ANY


class Waves(NamedTuple):
    """A launch beside the experts, or behind them: its blocks, and counters between it and their kernels.

    Counters are 0 at first. A group is 64 rows. None: neither waits for the other.
    """

    num_blocks: int  # of this launch
    begun: Tensor | None = None  # int32 [1]: blocks that have begun. Experts take the other multiprocessors
    # int32 [groups]. Dispatch: rows that have arrived. Combine: pieces of rows of y that are written.
    done: Tensor | None = None
    pieces_of_row: int = 1


class Received(NamedTuple):
    """The tensors of one dispatch; what was not asked for is None."""

    rows: Tensor
    # In decode layout perhaps already [num_local_experts, rows, columns], as DispatchOutput has them.
    scales: Tensor | None
    topk_weights: Tensor | None
    topk_idx: Tensor | None
    tokens_per_expert: Tensor  # int64; in decode layout perhaps already int32, as the next
    rows_per_expert: Tensor
    plan: Tensor | None  # a new plan; None when the plan was given
    anchor: Tensor | None = None  # of a quantised dispatch with gradients (QuantizedRows); engines make none


class Combined(NamedTuple):
    """The tensors of one combine."""

    x: Tensor  # [num_tokens, hidden]
    topk_weights: Tensor | None  # [num_tokens, num_topk]; None when none were given


class Engine(Protocol):
    device: str  # type of the device whose tensors it takes
    layouts: tuple[str, ...]
    summary: str  # for people: what it is, and what it sends through
    rows_on_host: Tensor | None  # set by a dispatch with a new plan if the host knows the counts, as in Handle

    has_waves: bool  # whether it takes `by_expert` and `waves`: a CUDA engine, and not each one

    # The operation that only sent, until `receive` completes it or the engine ends. No other is allowed meanwhile.
    @property
    def unreceived(self) -> str | None: ...

    # `only_sends`: the operation is complete after `receive`.
    # `packs_scales`: scales of decode layout are powers of two; an engine that writes them by column packs them.
    # `by_expert`: make a plan for waves: rows of low experts arrive first, and those of high experts leave first.
    def dispatch(
        self, request: DispatchRequest, only_sends: bool = False, packs_scales: bool = False, by_expert: bool = False
    ) -> Received: ...

    # Raise ValueError for a bad entry, if the host can see it without a wait.
    def check_routing(self, topk_idx: Tensor) -> None: ...

    # `weights`: float32 [num_tokens, num_topk], as `plain` gives it; with a plan of decode layout, and only then.
    # `out`: contiguous memory for the sums, none of y's. None: new memory.
    # `waves`: take so many blocks. With `only_sends` and counters rows of y leave as soon as they are written.
    def combine(
        self,
        request: CombineRequest,
        weights: Tensor | None = None,
        only_sends: bool = False,
        waves: Waves | None = None,
        out: Tensor | None = None,
    ) -> Combined: ...

    # `waves`: count the rows of a dispatch as they arrive; or take so many blocks for the rest of a combine.
    def receive(self, waves: Waves | None = None) -> None: ...

    def plan_capacity(self, num_rows: int, layout: str) -> int: ...  # elements of a plan for a given ``num_rows``

    # Operations inside need not be complete at their end. `inputs`: the tensors they are given, or pairs of them.
    def asynchronous(self, *inputs: object) -> AbstractContextManager[None]: ...

    # The event of the last operation. It raises errors through `explaining`, as Buffer._explaining words them.
    def event(self, explaining: Callable[..., Any]) -> Event: ...

    # From now on every ``operation`` ("dispatch", "combine") adds to `wait_ns`, or to nothing: Buffer.dispatch_wait_ns.
    def measure_waits(self, operation: str, wait_ns: Tensor | None) -> None: ...

    def check(self) -> None: ...  # raises what operations in the current stream have found; the host waits for them

    def counters(self) -> dict[str, list[int]]: ...

    # Where the config says `mask_late_ranks`. `mask`: int32 [num_ranks] on the engine's device, 1 for masked ranks; a
    # copy. `unmask` is collective.
    @property
    def mask(self) -> Tensor: ...

    def mask_rank(self, rank: int) -> None: ...

    def unmask(self, meet: Callable[[], Gather]) -> None: ...

    # Give memory back, and take it again at the same addresses, where the config says `suspendable`. Collective. An
    # error that leaves the buffer as it was, or ends it, is the same on all ranks. `meet` opens a round of the ranks
    # for it.
    def suspend(self, meet: Callable[[], Gather]) -> None: ...

    def resume(self, meet: Callable[[], Gather]) -> None: ...

    @property
    def is_suspended(self) -> bool: ...

    def destroy(self) -> None: ...  # also while it is suspended
