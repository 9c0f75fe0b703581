"""``buffer.runtime``, also named ``deep_ep_cpp.Buffer`` as DeepEP's compiled class: what programs ask it."""

from __future__ import annotations

import torch

from ep_dispatcher.integrations.deep_ep.config import NVL_PEERS, num_rdma_ranks
from ep_dispatcher.integrations.deep_ep.events import CommStream


class Runtime:
    """A rank's node and local index, with DeepEP's nodes of 8 ranks. All else raises NotImplementedError."""

    _rank: int
    _num_ranks: int
    _comm: CommStream

    def __init__(self, *args, **kwargs):
        raise NotImplementedError("deep_ep_cpp.Buffer: a program makes deep_ep.Buffer(...), which has it as runtime")

    @classmethod
    def of(cls, rank: int, num_ranks: int, comm: CommStream) -> Runtime:
        runtime = cls.__new__(cls)
        runtime._rank, runtime._num_ranks, runtime._comm = rank, num_ranks, comm
        return runtime

    def is_available(self) -> bool:
        return True

    def is_internode_available(self) -> bool:
        return self.get_num_rdma_ranks() > 1

    def get_num_rdma_ranks(self) -> int:
        return num_rdma_ranks(self._num_ranks)

    def get_rdma_rank(self) -> int:
        return self._rank // NVL_PEERS

    def get_root_rdma_rank(self, is_global: bool) -> int:
        return self._rank % NVL_PEERS if is_global else 0

    def get_local_device_id(self) -> int:
        if not torch.cuda.is_available():
            raise NotImplementedError("runtime.get_local_device_id: there is no GPU")
        return torch.cuda.current_device()

    def get_comm_stream(self) -> torch.cuda.Stream:
        return self._comm.stream()

    def __getattr__(self, name: str):
        if name.startswith("_"):  # Python and tools look for such names
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NotImplementedError(f"runtime.{name}: of DeepEP's compiled runtime; use the methods of deep_ep.Buffer")
