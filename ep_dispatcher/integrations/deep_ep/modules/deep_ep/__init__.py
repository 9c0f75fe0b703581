"""``deep_ep`` as programs know it, on ep_dispatcher: the names of DeepEP 1.2.1, 2 and 2.5."""

from deep_ep import buffer, buffers, comm, utils

from ep_dispatcher.integrations.deep_ep import (
    Buffer,
    BufferAllocator,
    Config,
    ElasticBuffer,
    EPBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
)
from ep_dispatcher.integrations.deep_ep.config import topk_idx_t
from ep_dispatcher.integrations.deep_ep.domains import (
    destroy_all_managed_nccl_comm,
    get_logical_domain_size,
    get_physical_domain_size,
)
from ep_dispatcher.integrations.deep_ep.elastic_base import (
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
)
from ep_dispatcher.integrations.deep_ep.ep_buffer import (
    BucketBuffer,
    BucketSession,
    EngramBuffer,
    PPBuffer,
)

__version__ = "1.2.1"
__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "PPBuffer",
    "buffer",
    "buffers",
    "comm",
    "destroy_all_managed_nccl_comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]
