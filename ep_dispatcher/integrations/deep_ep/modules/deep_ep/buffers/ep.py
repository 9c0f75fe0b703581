"""``deep_ep.buffers.ep`` of DeepEP 2.5."""

from ep_dispatcher.integrations.deep_ep import EPBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["EPBuffer", "EPHandle", "EventHandle", "EventOverlap"]
