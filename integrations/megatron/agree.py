"""What ranks agree on outside the engine, with its time limit and its error."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher import envs
from ep_dispatcher.engines.faults import find_late_ranks

_agreements: Counter[str] = Counter()  # by group; all its ranks count the same


def all_reduce(tensor: Tensor, op: dist.ReduceOp, group: ProcessGroup, *, about: str, note: str) -> None:
    """``dist.all_reduce`` in place, complete when it returns.

    Raises PeerTimeoutError when a rank does not come within EP_DISPATCHER_TIMEOUT_S, or is gone: of the dispatch that
    this goes before, with epoch 0, phase ``about`` and the note.
    """
    name = group.group_name
    _agreements[name] += 1
    started = time.monotonic()
    try:
        dist.all_reduce(tensor, op, group=group, async_op=True).wait(timedelta(seconds=envs.timeout_s()))
    except RuntimeError as cause:
        waited_s, rank = time.monotonic() - started, group.rank()
        prefix = f"ep_dispatcher/agree/{name}/{_agreements[name]}"
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        late = find_late_ranks(store, rank, [r for r in range(group.size()) if r != rank])
        error = ep.PeerTimeoutError("dispatch", 0, about, rank, late, waited_s)
        error.note = note
        raise error from cause
