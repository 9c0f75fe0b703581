"""``deep_ep.buffer`` as programs know it, on ep_dispatcher."""

from ep_dispatcher.integrations.deep_ep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
