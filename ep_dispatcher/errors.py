"""The one error that is nobody's mistake: a peer that does not come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PeerTimeoutError(RuntimeError):
    """Peers did not arrive within the limit. The process survives; the buffer can only be destroyed.

    operation: "dispatch" or "combine"; epoch: number of the operation on the buffer; phase: what was waited for;
    rank: who waited, waited_s seconds; late_ranks: who had neither arrived nor said that they wait themselves, or
    ``rank`` alone when it is the one that came too late for the others; reason: what more is known, in words.
    Ranks are those of the buffer's group. note: what the caller was about (``Buffer.note``), first in the text.

    While a buffer is made, operation is "buffer", epoch is 0, and there is no buffer to destroy. A rank that came when
    the others had given up finds itself in late_ranks.
    """

    def __init__(
        self,
        operation: str,
        epoch: int,
        phase: str,
        rank: int,
        late_ranks: Sequence[int],
        waited_s: float,
        reason: str = "",
    ):
        self.operation, self.epoch, self.phase = operation, epoch, phase
        self.rank, self.late_ranks, self.waited_s = rank, tuple(late_ranks), waited_s
        self.reason, self.note = reason, ""
        late = ", ".join(str(r) for r in self.late_ranks)
        ranks = f"rank{'s' * (len(self.late_ranks) > 1)} {late}"
        waited = f"rank {rank} waited {waited_s:.1f} s for {ranks}."
        if operation != "buffer":
            where = f"{operation}, epoch {epoch}"
            if self.late_ranks == (rank,):
                waited = (
                    f"rank {rank} came too late: the other ranks have given up waiting for it. It was slow, or stopped."
                )
            then = "destroy() this buffer; the ranks that are left can make a new one on a smaller group."
        elif rank in self.late_ranks:
            where, waited = "making a buffer", f"rank {rank} came too late; the others gave up waiting for {ranks}."
            then = "No rank has this buffer; all ranks can make a new one."
        else:
            where = "making a buffer"
            then = (
                "No rank has this buffer; all ranks can make a new one, or the ranks that are left one on a smaller "
                "group."
            )
        super().__init__(" ".join(filter(None, (f"{where}, phase '{phase}': {waited}", reason, then))))

    def __str__(self) -> str:
        return f"{self.note}: {super().__str__()}" if self.note else super().__str__()

    def __reduce__(self) -> tuple[Any, ...]:  # by default an exception is copied from its message alone
        args = (self.operation, self.epoch, self.phase, self.rank, self.late_ranks, self.waited_s, self.reason)
        return PeerTimeoutError, args, {"note": self.note}
