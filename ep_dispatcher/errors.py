"""The one error that is nobody's mistake: a peer that does not come."""

from __future__ import annotations

from collections.abc import Sequence


class PeerTimeoutError(RuntimeError):
    """Peers did not arrive within the limit. The process survives; the buffer can only be destroyed.

    operation: "dispatch" or "combine"; epoch: number of the operation on the buffer; phase: what was waited for;
    rank: who waited, waited_s seconds; late_ranks: who had neither arrived nor said that they wait themselves.
    Ranks are those of the buffer's group. note: what the caller was about (``Buffer.note``), first in the text.
    """

    def __init__(self, operation: str, epoch: int, phase: str, rank: int, late_ranks: Sequence[int], waited_s: float):
        self.operation, self.epoch, self.phase = operation, epoch, phase
        self.rank, self.late_ranks, self.waited_s = rank, tuple(late_ranks), waited_s
        self.note = ""
        late = ", ".join(str(r) for r in self.late_ranks)
        super().__init__(
            f"{operation}, epoch {epoch}, phase '{phase}': rank {rank} waited {waited_s:.1f} s for "
            f"rank{'s' * (len(late_ranks) > 1)} {late}. destroy() this buffer; the ranks that are left can make a new "
            "one on a smaller group."
        )

    def __str__(self) -> str:
        return f"{self.note}: {super().__str__()}" if self.note else super().__str__()

    def __reduce__(self):  # by default an exception is copied from its message alone
        args = (self.operation, self.epoch, self.phase, self.rank, self.late_ranks, self.waited_s)
        return PeerTimeoutError, args, {"note": self.note}
