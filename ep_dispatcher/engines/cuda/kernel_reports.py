"""Errors reported by kernels of the CUDA engine to the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ep_dispatcher import _C_cuda, checks
from ep_dispatcher.decode.masks import Masks
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.engines.health import Health
from ep_dispatcher.engines.late_ranks import find_late_ranks
from ep_dispatcher.errors import PeerTimeoutError, copy_error


class KernelReports:
    """Raise what kernels have found: a caller's mistake (ValueError) or a late peer (PeerTimeoutError).

    Numbers of a peer that are out of range are a RuntimeError that names it.

        reports.raise_found(ends=True)   # at the start of an operation: a mistake ends the buffer's use
        reports.raise_found(ends=False)  # where all ranks ask before their next operation: the buffer stays usable

    Kernels publish a mistake when its operation is complete on this rank, so after every rank has begun it. If this
    rank finds it at the start of the next operation, other ranks may be inside that one already. This rank refuses it,
    so all have to end. Never waits for the device.

    ``masks``: of a buffer that masks late ranks. There a rank that reports itself as late is masked.
    ``has_messages``: messages of ranks that differ may not fit together. So there a difference ends the buffer's use.
    """

    def __init__(
        self,
        engine: _C_cuda.Engine,
        config: EngineConfig,
        health: Health,
        masks: Masks | None = None,
        has_messages: bool = False,
    ):
        self._engine, self._config, self._health, self._masks = engine, config, health, masks
        self.overlooks: Callable[[ValueError], bool] | None = None  # as Buffer.overlook says
        self._has_messages = has_messages

    def raise_found(self, *, ends: bool, reason: str = "") -> None:
        """Raise what kernels have found. reason: further facts for the error of a late peer."""
        if not self._health.ended:
            late, differ = self._engine.late(), self._has_messages and self._engine.out_of_step()
            mistake, is_difference = self._take_error()  # after the others: the mistake came first, and led to them
            differ = differ or (is_difference and self._has_messages)
            if mistake is not None and not differ and self.overlooks is not None and self.overlooks(mistake):
                mistake = None
            if mistake is None and late is None and not differ:
                return
            if differ:
                text = ". Ranks differ, so their messages of the NCCL wire do not fit together; destroy() this buffer"
                self._health.end(partial(copy_error, mistake or checks.unknown_disagreement_error(), text))
            elif mistake is not None and late is None and not ends:
                raise copy_error(mistake)
            elif mistake is not None:
                text = ". Found when other operations had begun, which leaves ranks out of step; destroy() this buffer"
                self._health.end(partial(copy_error, mistake, text))
            elif late is not None:
                self._end_late(*late, reason)
        self._health.raise_if_ended(suspended=self._health.suspended)  # destroy() asks while it is suspended

    def _end_late(
        self, operation: str, phase: str, epoch: int, waited_for: list[int], waited_s: float, reason: str
    ) -> None:
        rank = self._config.topology.rank
        if phase in _C_cuda.WRONG_NUMBERS:
            self._health.end(partial(RuntimeError, _wrong_numbers(operation, phase, epoch, rank, waited_for)))
            return
        if self._masks is not None and waited_for == [rank]:
            self._masks.end(operation, epoch, phase, rank, waited_s)
            return
        chain = find_late_ranks(self._config.store, rank, waited_for, beside=self._config.topology.node_ranks)
        error = partial(PeerTimeoutError, operation, epoch, phase, rank, chain.late_ranks, waited_s, reason)
        self._health.end(error)

    def _take_error(self) -> tuple[ValueError | None, bool]:
        """Return the error of the caller's mistake, once for each, and whether ranks differ."""
        found = self._engine.take_error()
        return (None, False) if found is None else (self._error_of(*found), found[0] == "differ")

    def _error_of(self, kind: str, detail: list[int], value: int, rows: list[tuple[int, int]]) -> ValueError:
        if kind == "bad_entry":
            token, k, repeated, _ = detail
            entry = token, k, self._config.logical_expert(value), bool(repeated)
            return checks.invalid_entry_error(entry, self._config.num_logical_experts)
        if kind == "too_few_rows":
            return checks.too_few_rows_error(rows, value)
        if kind == "too_many_to_node":
            return checks.too_many_to_node_error(rows, value)
        if kind == "too_many_rows":
            rank = max(range(len(rows)), key=lambda r: rows[r][0])
            return checks.too_many_rows_error(detail[0], rank, rows[rank][0])
        if kind == "other_routing":
            token, k, *where = detail
            return checks.other_routing_error(f"topk_idx[{token}, {k}]", value, rows[0][0], (where[0], where[1]))
        field, rank, theirs, others = detail
        return checks.disagreement_error(_C_cuda.COMPARED[field], rank, theirs, value, others)


def _wrong_numbers(operation: str, phase: str, epoch: int, rank: int, sources: list[int]) -> str:
    """Word the error of a rank that has found numbers of another one, or of its own, that would lead out of memory."""
    whose = " and ".join(f"rank {source}" for source in sources)
    return (
        f"{operation}, epoch {epoch}: rank {rank} has read {phase}, written by {whose}. Something has overwritten "
        "memory of this buffer, or the ranks run different builds. destroy() this buffer"
    )
