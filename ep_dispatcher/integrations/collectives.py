"""Collectives of the integrations, by which ranks agree on sizes and settings outside the engine.

Those over a group run on the hosts. They have the engine's time limit, and raise its error if a rank is late.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher import envs
from ep_dispatcher.engines.late_ranks import find_late_ranks
from ep_dispatcher.gather import count_attempt
from ep_dispatcher.gloo import is_closed, wait_limit
from ep_dispatcher.stores import STORE_GONE, STORE_S
from ep_dispatcher.threads import in_thread
from ep_dispatcher.topology import registered_group

_num_calls: Counter[str] = Counter()  # calls of all_reduce by group name; the same on all ranks of the group
_gloo_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()  # by the group of the same ranks


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
    _num_calls[name] += 1
    started, limit_s, hosts = time.monotonic(), envs.timeout_s(), None
    try:
        hosts = _gloo_group(group, limit_s)
        dist.all_reduce(tensor, op, group=hosts, async_op=True).wait(wait_limit(limit_s))
    except (RuntimeError, OSError) as cause:  # raised as it is, unless it means a late peer (gloo.py)
        waited_s, rank = time.monotonic() - started, group.rank()
        if waited_s < limit_s and not isinstance(cause, STORE_GONE) and not (hosts and _has_lost_neighbor(hosts)):
            raise
        prefix = f"ep_dispatcher/agree/{name}/{_num_calls[name]}"
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        late = find_late_ranks(store, rank, [r for r in range(group.size()) if r != rank]).late_ranks
        error = ep.PeerTimeoutError("dispatch", 0, about, rank, late, waited_s)
        error.note = note
        raise error from cause


def max_over_group(number: int, group: ProcessGroup, *, about: str, note: str = "") -> int:
    """Return the largest number of any rank, before all ranks make a buffer, or all make none. Collective."""
    most = torch.tensor(number, dtype=torch.int64, device="cpu")
    try:
        all_reduce(most, dist.ReduceOp.MAX, group, about=about, note=note)
    except ep.PeerTimeoutError:
        count_attempt(registered_group(group))  # a late rank finds the others' messages, and begins to make the buffer
        raise
    return int(most)


def job_device() -> torch.device:
    """Return where tensors of collectives over the whole job are, which may go through NCCL or gloo."""
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


def max_over_job(*values: int) -> list[int]:
    """Return the largest of each value over all ranks of the job. Collective; on GPUs the host waits for them.

    Through the job's own group: one of the hosts, with a connection between every two ranks, would be slow in large
    jobs. So call it where the GPU's work is complete in any case.
    """
    if not dist.is_initialized():
        return [*values]
    largest = torch.tensor(values, dtype=torch.int64, device=job_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def abandon(buffer: ep.Buffer) -> None:
    """Destroy a buffer before this rank raises an error of its own, so that peers that wait for it learn at once.

    They raise PeerTimeoutError, which says that this rank has left. Otherwise they would wait out their limit.
    """
    with suppress(ValueError, RuntimeError):  # late errors of earlier operations: that of the caller comes first
        buffer.destroy()


def _has_lost_neighbor(hosts: ProcessGroup) -> bool:
    """Return whether the connection to a neighbor is closed: gloo reduces in a ring. Others it may not have made yet,
    and would wait for."""
    rank, size = hosts.rank(), hosts.size()
    return any(is_closed(hosts, neighbor) for neighbor in {(rank - 1) % size, (rank + 1) % size} - {rank})


def _gloo_group(group: ProcessGroup, limit_s: float) -> ProcessGroup:
    """Return the group, if it takes tensors on the CPU; else one of the same ranks that does, made at first use."""
    if _takes_cpu_tensors(group):
        return group
    if group not in _gloo_groups:
        ranks = dist.get_process_group_ranks(group)
        make = partial(dist.new_group, ranks, wait_limit(limit_s), "gloo", use_local_synchronization=True)
        _gloo_groups[group] = in_thread(make, limit_s + STORE_S)  # it asks the store, which may hang
    return _gloo_groups[group]


def _takes_cpu_tensors(group: ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in group._device_types)
