"""The memory of expert slots on GPUs, which the ranks of a node map, and the copies into it and out of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ep_dispatcher import _C_cuda
from ep_dispatcher.balance.slot_layout import PULL_BLOCKS, PUSH_BLOCKS, Homes, Piece
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.engines.cuda.regions import PeerRegions
from ep_dispatcher.engines.cuda.streams import free_when_idle, on_device, wait_for_device
from ep_dispatcher.moe.address_table import table_of
from ep_dispatcher.moe.expert_matrices import ExpertMatrices, addresses_of, even_step

_DTYPES = {
    torch.float32: _C_cuda.DType.float32,
    torch.bfloat16: _C_cuda.DType.bfloat16,
    torch.float16: _C_cuda.DType.float16,
}


class CudaSlots:
    """``memory``: uint8 [num_bytes], of this rank. ``push`` launches a kernel, ``pull`` one for each dtype.

    A kernel takes ``_C_cuda.max_slot_parameters`` parameters. If there are more, there are more launches.
    """

    def __init__(self, device: torch.device, config: EngineConfig, num_bytes: int, number: int):
        self._config, self._num_bytes = config, num_bytes
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        # With this wire each rank maps the memory of its own node only. Nothing goes over it.
        self._regions: PeerRegions | None = PeerRegions(config, "NCCL", f"/slots/{number}")
        self._nodes: dict[tuple[Homes, int], _C_cuda.NodeSlots] = {}  # by the number of slots too
        self._tables: list[Tensor] = []  # of addresses that captured graphs read

    def allocate(self) -> None:
        """Allocate this rank's memory, and fill it with zeros, before another rank can write to it."""
        assert self._regions is not None
        with torch.cuda.device(self._device):
            self._regions.prepare(self._num_bytes, 0)
            self._regions.allocate()
            self._regions.memory.zero_()
        wait_for_device(self._device, self._config.timeout_s)

    @property
    def memory(self) -> Tensor:
        assert self._regions is not None  # until `free`
        return self._regions.memory

    def attach(self) -> None:
        """Map the memory of the other ranks of the node. All have allocated theirs."""
        assert self._regions is not None
        with torch.cuda.device(self._device):
            self._regions.attach()

    def close_descriptors(self) -> None:
        """Close nothing: PyTorch has closed them."""

    def push(
        self,
        homes: Homes,
        copies: Tensor,
        pieces: Sequence[Piece],
        parameters: Sequence[ExpertMatrices | None],
        num_blocks: int = 0,
    ) -> None:
        """Copy each of ``parameters`` into its piece of the slots that hold copies of this rank's experts.

        num_blocks   of the kernel; 0: PUSH_BLOCKS
        """
        most, node = _C_cuda.max_slot_parameters, self._node_for(homes, copies)
        with on_device(self._device.index):
            pairs = zip(pieces, parameters, strict=True)
            moves = [self._move(piece, matrices, piece.num_bytes) for piece, matrices in pairs if matrices is not None]
            for first in range(0, len(moves), most):
                of_launch = moves[first : first + most]
                _C_cuda.slots_push(node, copies.data_ptr(), of_launch, num_blocks or PUSH_BLOCKS, self._stream())

    def pull(
        self,
        homes: Homes,
        copies: Tensor,
        pieces: Sequence[Piece],
        gradients: Sequence[ExpertMatrices | None],
        num_blocks: int = 0,
    ) -> None:
        """Add the pieces of those slots to ``gradients``. num_blocks: likewise; 0: PULL_BLOCKS"""
        most, node = _C_cuda.max_slot_parameters, self._node_for(homes, copies)
        moves, dtypes = [], []
        with on_device(self._device.index):
            for piece, matrices in zip(pieces, gradients, strict=True):
                if matrices is not None:
                    moves.append(self._move(piece, matrices, piece.num_elements))
                    dtypes.append(_DTYPES[matrices[0].dtype])
            for first in range(0, len(moves), most):
                of_launch = moves[first : first + most], dtypes[first : first + most]
                _C_cuda.slots_pull(node, copies.data_ptr(), *of_launch, num_blocks or PULL_BLOCKS, self._stream())

    def _node_for(self, homes: Homes, copies: Tensor) -> _C_cuda.NodeSlots:
        assert self._regions is not None
        num_slots = copies.shape[1]
        node = self._nodes.get((homes, num_slots))
        if node is None:
            node = self._nodes[homes, num_slots] = _C_cuda.NodeSlots(
                regions=[self._regions.addresses[rank] for rank in self._config.topology.node_ranks],
                ranks=homes.ranks,
                local_rank=homes.local_rank,
                num_local_experts=homes.num_local_experts,
                num_slots=num_slots,
            )
        return node

    def _stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._device.index)

    def _move(self, piece: Piece, matrices: ExpertMatrices, size: int) -> tuple[int, int, int, int, int, int]:
        """Return what a kernel has to know of one of them (struct ExpertParameter in csrc/cuda/balance/slots.h)."""
        return *self._located(matrices), size, piece.begin, piece.step

    def _located(self, matrices: ExpertMatrices) -> tuple[int, int, int]:
        """Return where the experts' matrices begin: a table of addresses or 0, the first address, and the step.

        Without a table an expert's address is first + e * step, which needs no copy from the host.
        """
        if isinstance(matrices, Tensor):
            return 0, matrices.data_ptr(), matrices.stride(0) * matrices.element_size()
        addresses = addresses_of(matrices)
        step = even_step(addresses)
        if step is not None:
            return 0, addresses[0], step
        table = table_of(addresses, self._device)[0]
        if torch.cuda.is_current_stream_capturing():
            self._tables.append(table)  # the cache of tables may be cleared before the graph is replayed
        else:
            table.record_stream(torch.accelerator.current_stream(self._device.index))  # or before this kernel has ended
        return table.data_ptr(), 0, 0

    def free(self) -> None:
        """Free this rank's memory once its GPU is idle. Other ranks keep what they have mapped."""
        regions, self._regions = self._regions, None
        if regions is not None:
            free_when_idle(self._device, lambda: regions.free(is_sound=True), self._config.timeout_s)
        self._tables = []
