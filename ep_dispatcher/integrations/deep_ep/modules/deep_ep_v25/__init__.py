"""``deep_ep_v25``, the name by which the package sgl-deep-ep-v25 has DeepEP 2.5: what ours has of 2.5, and no more."""

import sys

import deep_ep
from deep_ep import (
    BucketBuffer,
    BucketSession,
    BufferAllocator,
    EngramBuffer,
    EPBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    PPBuffer,
    comm,
    destroy_all_managed_nccl_comm,
    get_logical_domain_size,
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
    get_physical_domain_size,
    topk_idx_t,
    utils,
)

# The same modules by the other name, so that classes are the same by both names.
sys.modules |= {
    f"{__name__}.comm": comm,
    f"{__name__}.utils": utils,
    f"{__name__}.utils.event": utils.event,
    f"{__name__}.utils.envs": utils.envs,
    f"{__name__}.buffers": deep_ep.buffers,
    f"{__name__}.buffers.ep": deep_ep.buffers.ep,
}
buffers = deep_ep.buffers

__version__ = "2.5.0"
__all__ = [
    "BucketBuffer",
    "BucketSession",
    "BufferAllocator",
    "EPBuffer",
    "EPHandle",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "PPBuffer",
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
