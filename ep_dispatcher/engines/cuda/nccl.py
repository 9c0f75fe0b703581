"""The communicator of the NCCL wire: one for each rail of a buffer, in the NCCL that PyTorch has loaded.

Its ranks are the nodes. NCCL is called by csrc/cuda/nccl.cpp, not through a process group of PyTorch: that would take
more of the host's time, use streams of its own, and be made by all ranks of the job together.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import torch

from ep_dispatcher import _C_cuda, checks, threads
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.gather import PeersLate
from ep_dispatcher.threads import StoreHangs, in_thread

END_S = 1.0  # how long destroy() waits for NCCL to free a communicator. NCCL waits for graphs that use it


def _host() -> str:
    """Return what this host is to NCCL, which takes no two ranks of a communicator on one GPU of a host."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


class NcclRail:
    """The communicator of this rank's rail. Collective over all ranks of the buffer.

    Raises PeersLate on all ranks if a rank does not arrive within the buffer's limit.
    """

    def __init__(self, config: EngineConfig, gpus: list[str]):
        topology, self._device = config.topology, torch.cuda.current_device()
        self._lock = threading.Lock()
        # Made before it joins anything, so that free() can give it up at any time.
        comm = _C_cuda.NcclComm()
        self._comm: _C_cuda.NcclComm | None = comm
        self.is_sound = False  # all operations are complete: nothing is under way

        def offer() -> tuple[str, str]:
            return _C_cuda.NcclComm.make_id().hex() if topology.node == 0 else "", _host()

        offers, hosts = zip(*config.gather("NCCL", offer))
        with config.gather.same_on_all_ranks():
            for rail in zip(*topology.nodes, strict=True):
                if len({(gpus[rank], hosts[rank]) for rank in rail}) < len(rail):
                    given = f"nccl, with a GPU that two of the ranks {list(rail)} share: they are on different nodes"
                    checks.fail("EP_DISPATCHER_WIRE", given, "nccl with a GPU for each of them, or peer on one host")

        def start() -> None:
            torch.cuda.set_device(self._device)
            comm.join(bytes.fromhex(offers[topology.rail[0]]), topology.node, topology.num_nodes, config.nccl_sms)
            comm.connect()

        def start_in_thread() -> None:
            try:
                in_thread(start, config.timeout_s)  # ranks of other rails wait GRACE_S longer for this one
            except StoreHangs as error:
                self.free(wait_s=0)  # then the thread ends: soon, or when NCCL lets go of it
                others = [rank for rank in topology.rail if rank != topology.rank]
                raise PeersLate(f"NCCL waited {config.timeout_s} s for other ranks", others) from error

        try:
            config.gather("NCCL's start", start_in_thread, waits_for_peers=True)
        except BaseException:  # of any rank: no other object has this communicator
            self.free()
            raise

    def serve(self, engine: _C_cuda.Engine) -> None:
        """Let the engine send by this communicator."""
        assert self._comm is not None  # free() comes later
        engine.send_by(self._comm)

    def free(self, before: Callable[[], None] = lambda: None, wait_s: float = END_S) -> None:
        """Free the communicator, after ``before()``. Unless all is sound, abort it: its kernels end soon.

        In a thread, for which the caller waits ``wait_s`` at most.
        """
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is None:
            return

        def run() -> None:
            torch.cuda.set_device(self._device)
            try:
                before()
            finally:
                comm.free(not self.is_sound)

        threads.start(run, "NCCL").join(wait_s)


def version() -> str:
    """Return the version of NCCL, such as 2.28.9."""
    number = _C_cuda.NcclComm.version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
