"""Shared by both implementations of low latency: arguments and results of a dispatch, and its state for combines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.refuse import refuse_unless


class Asked(NamedTuple):
    """The arguments of a low_latency_dispatch, without rows and topk_idx."""

    max_tokens: int  # num_max_dispatch_tokens_per_rank
    num_experts: int
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    stats: Tensor | None  # int32 [num_local_experts]; add the counts to it
    waits: Tensor | None  # int64 [num_ranks]; add the time waited for each rank to it
    hook: bool
    masks: bool  # enable_shrink

    def add_counts(self, counts: Tensor) -> None:
        if self.stats is not None:
            self.stats.add_(counts)


class Route(Protocol):
    """The state of a dispatch for combines of its rows."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """num_local_experts, rows_per_group, hidden."""

    @property
    def topk_idx(self) -> Tensor:
        """[num_tokens, num_topk] of this rank's tokens."""

    @property
    def src_info(self) -> Tensor:
        """int32 [num_local_experts, rows_per_group], a row's token on its source rank;
        ``missing`` without EP_DISPATCHER_DEEP_EP_EXACT=1."""

    @property
    def layout_range(self) -> Tensor:
        """int64 [num_local_experts, num_ranks], first row << 32 | rows of each source; else ``missing``."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that operations read."""

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, out: Tensor | None, waits: Tensor | None, hook: bool
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Return the sums, and with ``hook`` the function to call before reading them."""


class Routed(NamedTuple):
    """The results of a low_latency_dispatch."""

    x: Tensor | tuple[Tensor, Tensor]
    counts: Tensor  # int32 [num_local_experts]
    route: Route
    hook: Callable[[], None] | None

    def tensors(self) -> list[Tensor]:
        rows = self.x if isinstance(self.x, tuple) else (self.x,)
        return [*rows, self.counts, *self.route.tensors()]


_PLAIN = nullcontext()


def measured(buffer: ep.Buffer, operation: str, waits: Tensor | None) -> AbstractContextManager[None]:
    """Let the operation inside add its wait for each rank to ``waits``, if not None."""
    return _PLAIN if waits is None else _measured(buffer, operation, waits)


@contextmanager
def _measured(buffer: ep.Buffer, operation: str, waits: Tensor) -> Iterator[None]:
    setattr(buffer, f"{operation}_wait_ns", waits)
    try:
        yield
    finally:
        setattr(buffer, f"{operation}_wait_ns", None)


def same_experts(topk_idx: Tensor, dispatched: Tensor) -> Tensor:
    """Return bool [num_tokens, k, j]: whether choice k of a combine is choice j of its dispatch.

    Refuse experts that the token was not dispatched to.
    """
    there = topk_idx >= 0
    same = (topk_idx[:, :, None] == dispatched[:, None, :]) & there[:, :, None]
    allowed = "experts that the token was dispatched to, or -1"
    mistake = checks.mistake("topk_idx", "an expert that the token was not dispatched to", allowed)
    refuse_unless((same.any(2) == there).all(), ValueError(mistake))
    return same
