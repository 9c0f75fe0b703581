"""``deep_ep.utils.event`` as programs know it, on ep_dispatcher."""

from ep_dispatcher.integrations.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
