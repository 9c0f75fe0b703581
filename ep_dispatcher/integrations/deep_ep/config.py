"""DeepEP's settings and size hints. In our engine only the number of multiprocessors has an effect."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ep_dispatcher import checks
from ep_dispatcher.integrations.messages import is_first_rank

topk_idx_t = torch.int64  # of topk_idx
NVL_PEERS = 8  # ranks of a node, as DeepEP counts them
_ALIGNMENT = 128  # bytes
_METADATA = 128 * (8 + 4) + 128 * 4 + 4  # bytes with each row in DeepEP's queues: choices, scales, source

logger = logging.getLogger(__name__)
_said: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning once, on the first rank of the job, for example about an argument that has no effect."""
    if text not in _said:
        _said.add(text)
        if is_first_rank():
            logger.warning("ep_dispatcher as deep_ep: %s", text)


def warn_ignored(arguments: str, reason: str) -> None:
    warn_once(f"{arguments}: accepted, and without effect: {reason}")


@dataclass(eq=False)
class Config:
    """Multiprocessors, and sizes of DeepEP's queues, which our engine does not have.

    Programs ask a config for the bytes to give to ``Buffer``, and compare the answers. These grow with the bytes of a
    row and with the ranks, as DeepEP's do. They are not the memory of our buffers (docs/memory.md).
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes, a multiple of 128: a queue of rows with metadata, for each channel and rank of a node."""
        queues = self.num_sms // 2 * min(num_ranks, NVL_PEERS)
        return _aligned(queues * self.num_max_nvl_chunked_recv_tokens * (hidden_bytes + _METADATA))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes, a multiple of 128: two queues for each channel and node; 0 for one node of DeepEP."""
        if num_ranks <= NVL_PEERS:
            return 0
        queues = 2 * (self.num_sms // 2) * num_rdma_ranks(num_ranks)
        return _aligned(queues * self.num_max_rdma_chunked_recv_tokens * (hidden_bytes + _METADATA))


def num_rdma_ranks(num_ranks: int) -> int:
    """Return the number of nodes as DeepEP counts them: 8 ranks each."""
    return max(1, num_ranks // NVL_PEERS)


def get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Return bytes, a multiple of 128: two buffers with a bfloat16 row for every expert and token, both ways."""
    checks.integer("num_ranks", num_ranks, 1)  # the number of ranks changes nothing
    return _aligned(2 * 2 * num_experts * num_max_dispatch_tokens_per_rank * (2 * hidden + 16))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
