"""What integrations share: agreements between ranks outside the engine, and what they say to the user.

An agreement has the engine's time limit and its error. No host waits for a GPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
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

_agreements: Counter[str] = Counter()  # number by group; the same on all its ranks
_in_use: set[str] = set()  # frameworks of which ``say_in_use`` has told
_of_hosts: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def is_first_rank() -> bool:
    """Return whether this is the rank of the job that tells the user something."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Print a line of ours on the first rank of the job."""
    if is_first_rank():
        print(text, flush=True)


def say_in_use(framework: str, buffer: ep.Buffer, more: str = "") -> None:
    """Print once a job, on its first rank, that this library carries the tokens of a framework.

    framework   its name and version, such as "torchtitan 0.3.0"
    buffer      the first one; the line has its engine, sizes, ranks, nodes, and the wire between nodes
    more        facts of this framework alone, which follow its name
    """
    name = framework.partition(" ")[0]
    if name not in _in_use:
        _in_use.add(name)
        say(f"ep_dispatcher {ep.__version__} carries the tokens of {framework}{more}. First buffer: {buffer}")


def versioned(package: str) -> str:
    """Return the name of a package, and its version if it is installed by pip."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:  # run from its sources
        return package


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
    started, limit_s, hosts = time.monotonic(), envs.timeout_s(), None
    try:
        hosts = _hosts(group, limit_s)
        dist.all_reduce(tensor, op, group=hosts, async_op=True).wait(wait_limit(limit_s))
    except (RuntimeError, OSError) as cause:  # raised as it is, unless it means a late peer (gloo.py)
        waited_s, rank = time.monotonic() - started, group.rank()
        if waited_s < limit_s and not isinstance(cause, STORE_GONE) and not (hosts and _has_lost_a_neighbour(hosts)):
            raise
        prefix = f"ep_dispatcher/agree/{name}/{_agreements[name]}"
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        late = find_late_ranks(store, rank, [r for r in range(group.size()) if r != rank]).late_ranks
        error = ep.PeerTimeoutError("dispatch", 0, about, rank, late, waited_s)
        error.note = note
        raise error from cause


def most_of(number: int, group: ProcessGroup, *, about: str, note: str = "") -> int:
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


def largest_in_job(*values: int) -> list[int]:
    """Return the largest of each value over all ranks of the job. Collective; on GPUs the host waits for them.

    Through the job's own group: one of the hosts, with a connection between every two ranks, would be slow in large
    jobs. So call it where the GPU's work is complete in any case.
    """
    if not dist.is_initialized():
        return [*values]
    largest = torch.tensor(values, dtype=torch.int64, device=job_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def check_same(everyone: Sequence[Mapping[str, int | None]]) -> None:
    """Raise ValueError if ranks have brought different numbers to a Gather. None: not given."""
    for rank, one in enumerate(everyone):
        for name, first in everyone[0].items():
            if one[name] != first:
                zero, other = ("none" if number is None else number for number in (first, one[name]))
                raise ValueError(f"{name}: rank 0 gave {zero}, rank {rank} gave {other}; all ranks must give the same")


def leave(buffer: ep.Buffer) -> None:
    """Destroy a buffer before this rank raises an error of its own, so that peers that wait for it learn at once.

    They raise PeerTimeoutError, which says that this rank has left. Otherwise they would wait out their limit.
    """
    with suppress(ValueError, RuntimeError):  # late errors of earlier operations: that of the caller comes first
        buffer.destroy()


def _has_lost_a_neighbour(hosts: ProcessGroup) -> bool:
    """Return whether the connection to a neighbour is closed: gloo reduces in a ring. Others it may not have made yet,
    and would wait for."""
    rank, size = hosts.rank(), hosts.size()
    return any(is_closed(hosts, neighbour) for neighbour in {(rank - 1) % size, (rank + 1) % size} - {rank})


def _hosts(group: ProcessGroup, limit_s: float) -> ProcessGroup:
    """Return the group, if it takes tensors on the CPU; else one of the same ranks that does, made at first use."""
    if _takes_cpu_tensors(group):
        return group
    if group not in _of_hosts:
        ranks = dist.get_process_group_ranks(group)
        make = partial(dist.new_group, ranks, wait_limit(limit_s), "gloo", use_local_synchronization=True)
        _of_hosts[group] = in_thread(make, limit_s + STORE_S)  # it asks the store, which may hang
    return _of_hosts[group]


def _takes_cpu_tensors(group: ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in group._device_types)
