"""Finds the late ranks. Each rank that timed out reports whom it waited for. Late ranks are those without a report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch.distributed import Store

from ep_dispatcher import threads
from ep_dispatcher.stores import STORE_GONE, are_ranks, read_json

# A rank that timed out reads the reports of others for this many seconds, because they may time out a little later.
GRACE_S = 2.0

_UNHEARD = "The store did not answer, so this rank does not know whether they wait for other ranks themselves."


MAX_BYTES = 2**16  # of a report


class Verdict(NamedTuple):
    """Who is late: the ranks at the end of a chain of ranks, each of which waits for the next."""

    late_ranks: list[int]  # ascending; this rank alone if the others timed out waiting for it
    reason: str = ""  # further facts, as sentences


def find_late_ranks(
    store: Store,
    rank: int,
    waited_for: Iterable[int],
    *,
    gone: Iterable[int] = (),
    beside: Iterable[int] = (),
    operation: str = "",
    epoch: int = 0,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Verdict:
    """Report that ``rank`` waits for ``waited_for``, and follow the reports of others to the end of the chain.

    ``gone``: those ranks of ``waited_for`` that are known to have left, and so will report nothing. ``beside``: the
    ranks of this node. If a whole node is late, each of them may wait for another rank there, and all of those are
    late. ``operation`` and ``epoch``: what this rank was doing. A buffer times out only once, so one report per rank is
    enough. Reading ends after ``GRACE_S``, when no further report can change the verdict, or when ``is_stopped()``. If
    the store does not answer because its host has died or hangs, the verdict is ``waited_for``, and says so.
    """
    waits = sorted(waited_for)
    report: dict[str, Any] = dict(waits=waits, gone=sorted(gone), operation=operation, epoch=epoch)  # goes into JSON
    first_verdict, _ = _judge(rank, {rank: report}, waits)
    verdicts = [first_verdict]  # the other thread appends better ones
    # In another thread, because a call to a store whose host hangs never returns.
    thread = threads.start(partial(_follow_reports, store, rank, report, list(beside), verdicts), "late ranks")
    end = time.monotonic() + GRACE_S + 1
    while thread.is_alive() and time.monotonic() < end and not is_stopped():
        thread.join(0.05)
    heard_nothing = len(verdicts) == 1 and not first_verdict.reason and not is_stopped()
    return first_verdict._replace(reason=_UNHEARD) if heard_nothing else verdicts[-1]


def _follow_reports(
    store: Store, rank: int, report: dict[str, Any], beside: list[int], verdicts: list[Verdict]
) -> None:
    """[thread of its own] Publish this rank's report, and append a verdict each time the others' have been read."""
    try:
        store.set(str(rank), json.dumps(report))
        reports = _Reports(store, rank, report)
        end = time.monotonic() + GRACE_S
        while True:
            threads.raise_if_ending()
            heard, silent = reports.follow(report["waits"], beside)
            verdict, is_final = _judge(rank, heard, silent)
            verdicts.append(verdict)
            if is_final or time.monotonic() >= end:
                return
            time.sleep(0.05)
    except STORE_GONE:  # then the last verdict counts
        pass
    except Exception as error:  # it says something else, and keeps its text
        verdicts.append(verdicts[-1]._replace(reason=f"The store failed, by {type(error).__name__}: {error}"))


class _Reports:
    """The reports in the store, each of which is read once."""

    def __init__(self, store: Store, rank: int, own_report: dict[str, Any]):
        self._store, self._rank = store, rank
        self._reports = {rank: own_report}

    def follow(self, waits: list[int], beside: list[int]) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Follow the chains from the ranks in ``waits``. Return the reports on them, and the ranks without a report.

        If a chain ends at a rank without a report, follow those of the ranks ``beside`` this one too.
        """
        seen = {self._rank}
        silent = self._walk(waits, seen)
        if silent:
            silent += self._walk([peer for peer in beside if self._has_reported(peer)], seen)
        return {peer: self._reports[peer] for peer in seen & self._reports.keys()}, silent

    def _walk(self, waits: list[int], seen: set[int]) -> list[int]:
        """Visit all ranks that these ranks wait for. Return those without a report."""
        to_visit, silent = [*waits], list[int]()
        while to_visit:
            peer = to_visit.pop()
            if peer in seen:
                continue
            seen.add(peer)
            if self._has_reported(peer):
                to_visit += self._reports[peer]["waits"]
            else:
                silent.append(peer)
        return silent

    def _has_reported(self, peer: int) -> bool:
        if peer not in self._reports and self._store.check([str(peer)]):
            self._reports[peer] = _read_report(self._store.get(str(peer)), peer)
        return peer in self._reports


def _read_report(message: bytes, peer: int) -> dict[str, Any]:
    """Return the report in a message. ValueError if it is not one: whoever can connect to the store can write there."""
    report = read_json(message, MAX_BYTES)
    if (
        isinstance(report, dict)
        and report.keys() == {"waits", "gone", "operation", "epoch"}
        and are_ranks(report["waits"])
        and are_ranks(report["gone"])
        and type(report["operation"]) is str
        and type(report["epoch"]) is int
    ):
        return report
    raise ValueError(f"{message[:100]!r} is no report of rank {peer}")


def _judge(rank: int, reports: dict[int, dict[str, Any]], silent: list[int]) -> tuple[Verdict, bool]:
    """Return the verdict by these reports and silent ranks, and whether further reports cannot change it."""
    gone = {peer for report in reports.values() for peer in report["gone"]}
    if silent:
        left = sorted(gone.intersection(silent))
        return Verdict(sorted(silent), _describe_left(left)), len(left) == len(silent)
    mine = reports[rank]
    same_epoch = {
        peer: report["operation"] for peer, report in sorted(reports.items()) if report["epoch"] == mine["epoch"]
    }
    if len(set(same_epoch.values())) > 1:
        inside = ", ".join(f"rank {peer} is in a {operation}" for peer, operation in same_epoch.items())
        return Verdict(mine["waits"], f"The ranks are in different operations: {inside}."), True
    if any(rank in report["waits"] for report in reports.values()):
        return Verdict([rank]), True
    return Verdict(mine["waits"]), True


def _describe_left(ranks: list[int]) -> str:
    if not ranks:
        return ""
    names = ", ".join(map(str, ranks))
    who = f"Rank {names} has left" if len(ranks) == 1 else f"Ranks {names} have left"
    return f"{who}: destroyed the buffer, failed, or ended."
