"""The error of a peer that does not arrive, and mistakes of a caller that an engine finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)

_WITHOUT_EPOCH = ("suspend", "resume", "unmask", "expert slots")  # operations on a buffer that have no epoch
_COMPILES = " If a rank was compiling (torch.compile, Triton, a CUDA graph), raise EP_DISPATCHER_TIMEOUT_S."


class _Noted(Exception):
    """An error whose text begins with the caller's own note (``Buffer.note``)."""

    note = ""

    def __str__(self) -> str:
        return f"{self.note}: {super().__str__()}" if self.note else super().__str__()


class PeerTimeoutError(_Noted, RuntimeError):
    """Peers did not arrive within the limit. The process survives; the buffer can only be destroyed.

    operation   "dispatch", "combine", "suspend", "resume" or "unmask"; "buffer" while a buffer is made, and "expert
                slots" while it gets those
    epoch       number of the dispatch or combine on the buffer; 0 for other operations
    phase       purpose of the wait
    rank        the rank that waited, in the buffer's group
    late_ranks  ranks that neither arrived nor reported waiting for someone else; ``rank`` alone if the others timed out
                waiting for it
    waited_s    seconds
    reason      further facts, in words
    note        the caller's own note (``Buffer.note``); the text begins with it
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
        parts = (f"{self._where()}, phase '{phase}': {self._waited()}", reason, self._advice())
        super().__init__(" ".join(filter(None, parts)))

    def _where(self) -> str:
        if self.operation == "buffer":
            return "making a buffer"
        if self.operation in _WITHOUT_EPOCH:
            return self.operation
        return f"{self.operation}, epoch {self.epoch}"

    def _waited(self) -> str:
        rank = self.rank
        late = ", ".join(str(r) for r in self.late_ranks)
        ranks = f"rank{'s' * (len(self.late_ranks) > 1)} {late}"
        if self.operation == "buffer" and rank in self.late_ranks:
            return f"rank {rank} came too late; the others gave up waiting for {ranks}."
        if self.operation != "buffer" and self.late_ranks == (rank,):
            return f"rank {rank} came too late: the other ranks have given up waiting for it. It was slow, or stopped."
        return f"rank {rank} waited {self.waited_s:.1f} s for {ranks}."

    def _advice(self) -> str:
        if self.operation == "unmask":
            return "No mask has changed; all ranks can call it again."
        if self.operation != "buffer":
            left = "destroy() this buffer; the ranks that are left can make a new one on a smaller group."
            may_compile = not self.reason and self.operation not in _WITHOUT_EPOCH
            return left + _COMPILES * may_compile
        if self.rank in self.late_ranks:
            return "No rank has this buffer; all ranks can make a new one."
        return (
            "No rank has this buffer; all ranks can make a new one, or the ranks that are left one on a smaller group."
        )

    def __reduce__(self) -> tuple[Any, ...]:  # by default an exception is copied from its message alone
        args = (self.operation, self.epoch, self.phase, self.rank, self.late_ranks, self.waited_s, self.reason)
        return PeerTimeoutError, args, {"note": self.note}


class PeerDataError(RuntimeError):
    """What another rank has sent cannot be right, and was not used. The process survives; the buffer has ended.

    The memory of that rank was overwritten, its build is another one, or somebody else has sent in its name.

    operation    "dispatch" or "combine"
    epoch        number of the operation on the buffer
    rank         the rank that raises this
    sender       the rank whose data is wrong, in the buffer's group
    field        the number that is wrong, in words
    found        its value; allowed are ``least`` to ``most``
    """

    def __init__(
        self, operation: str, epoch: int, rank: int, sender: int, field: str, found: int, least: int, most: int
    ):
        self.operation, self.epoch, self.rank, self.sender = operation, epoch, rank, sender
        self.field, self.found, self.least, self.most = field, found, least, most
        allowed = f"only {least} is" if least == most else f"{least} to {most} are"
        super().__init__(
            f"{operation}, epoch {epoch}: rank {rank} got data of rank {sender} that cannot be right: {field} is "
            f"{found}, but {allowed} possible. destroy() this buffer, and look for what writes to the memory of rank "
            f"{sender} or sends in its name."
        )

    def __reduce__(self) -> tuple[Any, ...]:  # by default an exception is copied from its message alone
        own = (self.operation, self.epoch, self.rank, self.sender, self.field, self.found, self.least, self.most)
        return PeerDataError, own


class _FoundError(ValueError):
    """A text, and facts that are attributes too."""

    def __str__(self) -> str:
        return self.args[0]


class TooFewRowsError(_FoundError):
    """More rows arrive than max_recv_rows, or a rank has more tokens for another node than max_tokens_to_node.

    needed_rows  the most that any rank needs: rows that arrive, or tokens for one other node. With num_parts=2 it is
                 that of the part in which it was found; the other part may need more
    label        the buffer's when the dispatch was called or captured (``Buffer.label``)
    argument     "max_recv_rows" or "max_tokens_to_node": what is too small
    """

    def __init__(self, text: str, needed_rows: int, label: int, argument: str = "max_recv_rows"):
        super().__init__(text, needed_rows, label, argument)
        self.needed_rows, self.label, self.argument = needed_rows, label, argument


class UnknownExpertError(_FoundError):
    """topk_idx has an expert above the last one, for ``token``."""

    def __init__(self, text: str, token: int):
        super().__init__(text, token)
        self.token = token


class OtherRoutingError(_FoundError):
    """A routing is not that of the plan. ``where``: two numbers that the caller gave for it."""

    def __init__(self, text: str, where: tuple[int, int]):
        super().__init__(text, where)
        self.where = where


class DisagreementError(_Noted, ValueError):
    """Ranks are in different operations, or have given different arguments. All of them raise it."""


def copy_error(error: E, more: str = "") -> E:
    """Return a new error with the same facts, and more text.

    Raise the new one where the first one is kept: a raised error holds the frames that it passed, and their tensors.
    """
    return type(error)(f"{error}{more}", *error.args[1:])
