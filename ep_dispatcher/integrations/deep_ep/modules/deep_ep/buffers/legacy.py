"""``deep_ep.buffers.legacy``, where DeepEP 2 has the Buffer of DeepEP 1."""

from ep_dispatcher.integrations.deep_ep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
