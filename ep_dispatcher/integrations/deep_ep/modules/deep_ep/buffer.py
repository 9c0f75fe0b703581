"""``deep_ep.buffer`` as programs know it, on ep_dispatcher."""

from ep_dispatcher.integrations.deep_ep.buffer import Buffer
from ep_dispatcher.integrations.deep_ep.config import Config
from ep_dispatcher.integrations.deep_ep.events import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
