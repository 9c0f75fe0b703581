"""Agreements between ranks outside the engine, with its time limit and its error. No host waits for a GPU."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher import envs
from ep_dispatcher.engines.faults import follow_chain
from ep_dispatcher.errors import is_peer_failure
from ep_dispatcher.topology import registered_group

_agreements: Counter[str] = Counter()  # number by group; the same on all its ranks
_of_hosts: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def say(text: str) -> None:
    """Print a line of ours on the first rank of the job."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


# Outside of compiled graphs: a host waits here with a limit, and looks for late ranks. No operator could do more for a
# graph, because sizes on the host depend on the result.
@torch.compiler.disable(reason="ranks agree on their hosts, with a time limit")
def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup, *, about: str, note: str = "") -> None:
    """Reduce a tensor on the CPU in place, as ``dist.all_reduce``. It is complete on return, with any backend.

    Through NCCL the host would wait for all earlier work of the GPU, and a missing rank would leave a kernel that waits
    forever.

    Raises PeerTimeoutError if a rank does not arrive within EP_DISPATCHER_TIMEOUT_S, or has ended. Its operation is
    "dispatch", because one follows, with epoch 0, phase ``about`` and the note. Other errors are raised as they are.
    """
    group = registered_group(group)
    name = group.group_name
    _agreements[name] += 1
    started = time.monotonic()
    try:
        limit = timedelta(seconds=envs.timeout_s())
        dist.all_reduce(tensor, op, group=_hosts(group, limit), async_op=True).wait(limit)
    except RuntimeError as cause:  # only a time-out or a closed connection is a late peer
        if not is_peer_failure(cause):
            raise
        waited_s, rank = time.monotonic() - started, group.rank()
        prefix = f"ep_dispatcher/agree/{name}/{_agreements[name]}"
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        late = follow_chain(store, rank, [r for r in range(group.size()) if r != rank]).late_ranks
        error = ep.PeerTimeoutError("dispatch", 0, about, rank, late, waited_s)
        error.note = note
        raise error from cause


def _hosts(group: ProcessGroup, limit: timedelta) -> ProcessGroup:
    """Return the group, if it takes tensors on the CPU; else one of the same ranks that does, made at first use."""
    if _takes_cpu_tensors(group):
        return group
    if group not in _of_hosts:
        ranks = dist.get_process_group_ranks(group)
        _of_hosts[group] = dist.new_group(ranks, limit, "gloo", use_local_synchronization=True)
    return _of_hosts[group]


def _takes_cpu_tensors(group: ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in group._device_types)
