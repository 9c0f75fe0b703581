"""``deep_ep`` as programs know it, on ep_dispatcher."""

from ep_dispatcher.integrations.deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap
from ep_dispatcher.integrations.deep_ep.config import topk_idx_t

__version__ = "1.2.1"
__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]
