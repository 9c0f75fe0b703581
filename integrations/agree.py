"""What ranks agree on outside the engine, with its time limit and its error. Between hosts: no GPU is waited for."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher import envs
from ep_dispatcher.engines.faults import find_late_ranks

_agreements: Counter[str] = Counter()  # by group; all its ranks count the same
_of_hosts: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup, *, about: str, note: str) -> None:
    """``dist.all_reduce`` in place of a tensor on the CPU, complete when it returns, whatever the group's backend.

    Through NCCL the host would wait for all that the GPU has to do before, and a rank that does not come would leave a
    kernel that waits forever.

    Raises PeerTimeoutError when a rank does not come within EP_DISPATCHER_TIMEOUT_S, or is gone: of the dispatch that
    this goes before, with epoch 0, phase ``about`` and the note.
    """
    name = group.group_name
    _agreements[name] += 1
    started = time.monotonic()
    try:
        limit = timedelta(seconds=envs.timeout_s())
        dist.all_reduce(tensor, op, group=_hosts(group, limit), async_op=True).wait(limit)
    except RuntimeError as cause:
        waited_s, rank = time.monotonic() - started, group.rank()
        prefix = f"ep_dispatcher/agree/{name}/{_agreements[name]}"
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        late = find_late_ranks(store, rank, [r for r in range(group.size()) if r != rank])
        error = ep.PeerTimeoutError("dispatch", 0, about, rank, late, waited_s)
        error.note = note
        raise error from cause


def _hosts(group: ProcessGroup, limit: timedelta) -> ProcessGroup:
    """The group itself where it takes tensors on the CPU; else one of the same ranks that does, made at first use."""
    if _takes_cpu_tensors(group):
        return group
    if group not in _of_hosts:
        ranks = dist.get_process_group_ranks(group)
        _of_hosts[group] = dist.new_group(ranks, limit, "gloo", use_local_synchronization=True)
    return _of_hosts[group]


def _takes_cpu_tensors(group: ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in group._device_types)
