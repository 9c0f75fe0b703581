"""The memory of expert slots on CPUs, which the ranks of a node share, and the copies into it and out of it."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ep_dispatcher.balance.slot_layout import Homes, Piece
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.engines.descriptors import Descriptors
from ep_dispatcher.moe.expert_matrices import ExpertMatrices

# Nobody can change the size: a file that shrinks under a mapping ends the process (SIGBUS).
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class CpuSlots:
    """``memory``: uint8 [num_bytes], of this rank. ``push`` and ``pull`` are complete when they return."""

    def __init__(self, config: EngineConfig, num_bytes: int, number: int):
        self._config, self._num_bytes = config, num_bytes
        self._secret = f"ep_dispatcher/{config.buffer_id}/slots/{number}/{config.topology.node_ranks[0]}"
        self._fd = -1  # of this rank's memory, until the other ranks have mapped it
        self._descriptors: Descriptors | None = None  # likewise
        self._of_node: list[Tensor] = []  # the memory of each rank of the node, as mapped here

    def allocate(self) -> None:
        """Allocate this rank's memory, which is zero. From now on other ranks may ask for it."""
        self._fd = os.memfd_create("ep_dispatcher slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self._num_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self.memory = _mapped(self._fd, self._num_bytes)
        topology = self._config.topology
        if topology.ranks_per_node > 1:
            self._descriptors = Descriptors(self._secret, topology.rank, topology.node_ranks)

    def attach(self) -> None:
        """Map the memory of the other ranks of the node. All have allocated theirs."""
        topology = self._config.topology
        if self._descriptors is None:
            self._of_node = [self.memory]
            return
        of_ranks = self._descriptors.exchange([self._fd], self._config.timeout_s)
        try:
            for rank, fds in zip(topology.node_ranks, of_ranks, strict=True):
                self._of_node.append(self.memory if rank == topology.rank else self._memory_of(rank, fds[0]))
        finally:
            for fd in itertools.chain.from_iterable(of_ranks):
                os.close(fd)

    def close_descriptors(self) -> None:
        """Close what has passed on this rank's memory. All ranks of the node have mapped it."""
        descriptors, self._descriptors = self._descriptors, None
        if descriptors is not None:
            descriptors.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _memory_of(self, rank: int, fd: int) -> Tensor:
        """Map what a rank has passed on, if it is memory of the right size, which stays so."""
        num_bytes, status = self._num_bytes, os.fstat(fd)
        try:
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:  # the system knows no seals of ordinary files
            is_sealed = False
        if not is_sealed or status.st_uid != os.geteuid() or status.st_size != num_bytes:
            raise RuntimeError(
                f"rank {rank} has passed on {status.st_size} bytes of user {status.st_uid}, sealed: {is_sealed}; its "
                f"expert slots have to be {num_bytes} bytes of user {os.geteuid()}, sealed"
            )
        return _mapped(fd, num_bytes)

    @torch.no_grad()
    def push(
        self,
        homes: Homes,
        copies: Tensor,
        pieces: Sequence[Piece],
        parameters: Sequence[ExpertMatrices | None],
        num_blocks: int = 0,
    ) -> None:
        """Copy each of ``parameters`` into its piece of the slots that hold copies of this rank's experts."""
        for expert, holder, slot in _copies_of_own_experts(homes, copies):
            for piece, of_experts in zip(pieces, parameters, strict=True):
                if of_experts is not None:
                    piece.of_slot(self._of_node[holder], slot).copy_(of_experts[expert])

    @torch.no_grad()
    def pull(
        self,
        homes: Homes,
        copies: Tensor,
        pieces: Sequence[Piece],
        gradients: Sequence[ExpertMatrices | None],
        num_blocks: int = 0,
    ) -> None:
        """Add the pieces of those slots to ``gradients``."""
        holders: dict[int, list[tuple[int, int]]] = {}  # (place of the rank in the node, slot) by expert
        for expert, holder, slot in _copies_of_own_experts(homes, copies):
            holders.setdefault(expert, []).append((holder, slot))
        for expert, places in holders.items():
            for piece, of_experts in zip(pieces, gradients, strict=True):
                if of_experts is None:
                    continue
                gradient = of_experts[expert]
                total = gradient.to(torch.float32, copy=True)
                for holder, slot in places:
                    total += piece.of_slot(self._of_node[holder], slot)
                gradient.copy_(total)

    def free(self) -> None:
        """Unmap all, once the caller has dropped its views. Other ranks keep what they have mapped."""
        self.close_descriptors()
        self.__dict__.pop("memory", None)
        self._of_node = []


def _copies_of_own_experts(homes: Homes, copies: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (local expert, place of the holder in the node, slot) for each copy of this rank's experts on other ranks.

    They come in ascending order of ranks and slots.
    """
    home, num_local = homes.ranks[homes.local_rank], homes.num_local_experts
    experts = copies[:, :, 0].tolist()
    for place, rank in enumerate(homes.ranks):
        for slot, expert in enumerate(experts[rank]):
            if rank != home and expert >= 0 and expert // num_local == home:
                yield expert % num_local, place, slot


def _mapped(fd: int, num_bytes: int) -> Tensor:
    """Map a file that has this size: uint8 [num_bytes]. The tensor owns the mapping, and needs no descriptor."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8, device="cpu")
