"""``deep_ep_cpp`` as programs know it: the names of DeepEP's compiled module that they import."""

from ep_dispatcher.integrations.deep_ep.buffer import Runtime as Buffer
from ep_dispatcher.integrations.deep_ep.config import Config, get_low_latency_rdma_size_hint, topk_idx_t
from ep_dispatcher.integrations.deep_ep.events import EventHandle

__all__ = ["Buffer", "Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]


def is_sm90_compiled() -> bool:
    return True
