"""``deep_ep.comm`` as programs know it, on ep_dispatcher."""

from ep_dispatcher.integrations.deep_ep.domains import (
    barrier,
    destroy_all_managed_nccl_comm,
    get_comm_stream,
    get_logical_domain_size,
    get_physical_domain_size,
)

__all__ = [
    "barrier",
    "destroy_all_managed_nccl_comm",
    "get_comm_stream",
    "get_logical_domain_size",
    "get_physical_domain_size",
]
