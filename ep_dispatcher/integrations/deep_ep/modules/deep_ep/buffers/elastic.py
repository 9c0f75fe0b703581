"""``deep_ep.buffers.elastic`` of DeepEP 2."""

from ep_dispatcher.integrations.deep_ep import ElasticBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
