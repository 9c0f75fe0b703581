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

# For so many seconds a rank that timed out reads the reports of others, which may time out a little later.
GRACE_S = 2.0

_UNHEARD = "The store did not answer, so this rank does not know whether they wait for other ranks themselves."


MAX_BYTES = 2**16  # of a report


class Chain(NamedTuple):
    """The end of a chain of ranks, each of which waits for the next."""

    late_ranks: list[int]  # ascending; this rank alone, if the others timed out waiting for it
    reason: str = ""  # further facts, in words


def follow_chain(
    store: Store,
    rank: int,
    waited_for: Iterable[int],
    *,
    gone: Iterable[int] = (),
    beside: Iterable[int] = (),
    operation: str = "",
    epoch: int = 0,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Chain:
    """Report that ``rank`` waits for ``waited_for``, and follow the reports of others to the end of the chain.

    ``gone``: those of ``waited_for`` that are known to have left, and will report nothing. ``beside``: the ranks of
    this node. If a whole node is late, each of them may wait for another rank there, and all of those are the answer.
    ``operation`` and ``epoch`` are those of this rank. A buffer times out only once, so one report per rank is enough.
    Reading ends after ``GRACE_S``, when no further report can change the answer, or when ``is_stopped()``. If the store
    does not answer, because its host has died or hangs, the answer is ``waited_for``, and says so.
    """
    waits = sorted(waited_for)
    word: dict[str, Any] = dict(waits=waits, gone=sorted(gone), operation=operation, epoch=epoch)  # goes into JSON
    answer = [_judge(rank, {rank: word}, waits)[0]]
    # In another thread: a call to a store whose host hangs never returns.
    asking = threads.start(partial(_listen, store, rank, word, list(beside), answer), "late ranks")
    end = time.monotonic() + GRACE_S + 1
    while asking.is_alive() and time.monotonic() < end and not is_stopped():
        asking.join(0.05)
    heard_nothing = len(answer) == 1 and not answer[0].reason and not is_stopped()
    return answer[0]._replace(reason=_UNHEARD) if heard_nothing else answer[-1]


def _listen(store: Store, rank: int, word: dict[str, Any], beside: list[int], answer: list[Chain]) -> None:
    def has_reported(peer: int) -> bool:
        if peer not in words and store.check([str(peer)]):
            words[peer] = _read_word(store.get(str(peer)), peer)
        return peer in words

    def follow(todo: list[int]) -> None:
        while todo:
            peer = todo.pop()
            if peer in seen:
                continue
            seen.add(peer)
            if has_reported(peer):
                todo += words[peer]["waits"]
            else:
                silent.append(peer)

    try:
        store.set(str(rank), json.dumps(word))
        words = {rank: word}
        end = time.monotonic() + GRACE_S
        while True:
            threads.raise_if_ending()
            silent: list[int] = []
            seen = {rank}
            follow(list(word["waits"]))
            if silent:
                follow([peer for peer in beside if has_reported(peer)])
            chain, is_final = _judge(rank, {peer: words[peer] for peer in seen & words.keys()}, silent)
            answer.append(chain)
            if is_final or time.monotonic() >= end:
                return
            time.sleep(0.05)
    except STORE_GONE:  # then the last answer counts
        pass
    except Exception as error:  # it says something else, and keeps its text
        answer.append(answer[-1]._replace(reason=f"The store failed, by {type(error).__name__}: {error}"))


def _read_word(message: bytes, peer: int) -> dict[str, Any]:
    """Return the report in a message. ValueError if it is none: whoever can connect to the store can write there."""
    word = read_json(message, MAX_BYTES)
    if (
        isinstance(word, dict)
        and word.keys() == {"waits", "gone", "operation", "epoch"}
        and are_ranks(word["waits"])
        and are_ranks(word["gone"])
        and type(word["operation"]) is str
        and type(word["epoch"]) is int
    ):
        return word
    raise ValueError(f"{message[:100]!r} is no report of rank {peer}")


def _judge(rank: int, words: dict[int, dict[str, Any]], silent: list[int]) -> tuple[Chain, bool]:
    """Return the end of the chain by these reports and silent ranks, and whether it is final."""
    gone = {peer for word in words.values() for peer in word["gone"]}
    if silent:
        left = sorted(gone.intersection(silent))
        return Chain(sorted(silent), _left(left)), len(left) == len(silent)
    mine = words[rank]
    same_epoch = {peer: word["operation"] for peer, word in sorted(words.items()) if word["epoch"] == mine["epoch"]}
    if len(set(same_epoch.values())) > 1:
        inside = ", ".join(f"rank {peer} is in a {operation}" for peer, operation in same_epoch.items())
        return Chain(mine["waits"], f"The ranks are in different operations: {inside}."), True
    if any(rank in word["waits"] for word in words.values()):
        return Chain([rank]), True
    return Chain(mine["waits"]), True


def _left(ranks: list[int]) -> str:
    if not ranks:
        return ""
    one = len(ranks) == 1
    who = f"Rank{'' if one else 's'} {', '.join(map(str, ranks))} {'has' if one else 'have'} left"
    return f"{who}: destroyed the buffer, failed, or ended."
