"""``deep_ep`` as programs know it, on ep_dispatcher."""

from ep_dispatcher.integrations.deep_ep.buffer import Buffer
from ep_dispatcher.integrations.deep_ep.config import Config, topk_idx_t
from ep_dispatcher.integrations.deep_ep.elastic import ElasticBuffer
from ep_dispatcher.integrations.deep_ep.elastic_handle import EPHandle
from ep_dispatcher.integrations.deep_ep.events import EventHandle, EventOverlap

__version__ = "1.2.1"
__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]
