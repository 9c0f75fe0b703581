"""Who is late? A rank that waits in vain says for whom; the chain of answers ends at the ranks that say nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable

from torch.distributed import Store

# How long a rank that has given up listens to the others, who may give up a little later.
GRACE_S = 2.0


def find_late_ranks(store: Store, rank: int, waited_for: Iterable[int]) -> list[int]:
    """Leave word that ``rank`` waits for ``waited_for`` and return, in ascending order, the ranks at the chain's end.

    A buffer gives up only once, so one word per rank is enough. Without the store (its host may be the rank that
    died, or that hangs) the answer is ``waited_for``.
    """
    waited_for = sorted(waited_for)
    answer = [waited_for]
    # In a thread of its own, because a call to a store whose host hangs never comes back.
    asking = threading.Thread(target=_follow_chain, args=(store, rank, waited_for, answer), daemon=True)
    asking.start()
    asking.join(GRACE_S + 1)
    return answer[-1]


def _follow_chain(store: Store, rank: int, waited_for: list[int], answer: list[list[int]]) -> None:
    try:
        store.set(str(rank), json.dumps(waited_for))
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            late, seen, todo = set(), {rank}, list(waited_for)
            while todo:
                peer = todo.pop()
                if peer in seen:
                    continue
                seen.add(peer)
                if store.check([str(peer)]):
                    todo += json.loads(store.get(str(peer)))
                else:
                    late.add(peer)
            answer.append(sorted(late) or waited_for)
            time.sleep(0.05)
    except RuntimeError:  # torch.distributed's errors: the store is gone, and what was found so far is the answer
        pass
