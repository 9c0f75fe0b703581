"""``deep_ep.utils.envs`` as programs know it, on ep_dispatcher, without what only DeepEP's own tests use."""

from ep_dispatcher.integrations.deep_ep.domains import (
    check_nvlink_connections,
    get_logical_domain_size,
    get_physical_domain_size,
)

__all__ = ["check_nvlink_connections", "get_logical_domain_size", "get_physical_domain_size"]
