"""What programs tune and size DeepEP with. Of all of it only the multiprocessors mean something to our engine."""

from __future__ import annotations

import logging

import torch

topk_idx_t = torch.int64  # of topk_idx
NVL_PEERS = 8  # ranks that DeepEP takes for one node
_ALIGNMENT = 128  # bytes
_ROOM = 128 * (8 + 4) + 128 * 4 + 4  # bytes that DeepEP's queues keep beside a row: choices, scales, source

logger = logging.getLogger(__name__)
_said: set[str] = set()


def say_once(text: str) -> None:
    """Warn of an argument that was accepted and does nothing, once in a process."""
    if text not in _said:
        _said.add(text)
        logger.warning("ep_dispatcher as deep_ep: %s", text)


class Config:
    """Multiprocessors, and sizes of the queues that DeepEP sends through; our engine has no such queues.

    A program asks a config how many bytes to give to ``Buffer``, and compares the answers. They grow with the bytes of
    a row and with the ranks, as DeepEP's do; what our buffers take is another matter (docs/memory.md).
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ):
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes, a multiple of 128: a queue per channel and rank of a node, of rows with their metadata."""
        queues = self.num_sms // 2 * min(num_ranks, NVL_PEERS)
        return _aligned(queues * self.num_max_nvl_chunked_recv_tokens * (hidden_bytes + _ROOM))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes, a multiple of 128: two queues per channel and node; 0 where DeepEP sees one node."""
        if num_ranks <= NVL_PEERS:
            return 0
        queues = 2 * (self.num_sms // 2) * num_rdma_ranks(num_ranks)
        return _aligned(queues * self.num_max_rdma_chunked_recv_tokens * (hidden_bytes + _ROOM))


def num_rdma_ranks(num_ranks: int) -> int:
    """Nodes as DeepEP counts them: 8 ranks each."""
    return max(1, num_ranks // NVL_PEERS)


def get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Bytes, a multiple of 128: two buffers with a bfloat16 row for every expert and token, both ways."""
    return _aligned(2 * 2 * num_experts * num_max_dispatch_tokens_per_rank * (2 * hidden + 16))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
