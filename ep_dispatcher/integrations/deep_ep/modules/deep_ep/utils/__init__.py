"""``deep_ep.utils`` as programs know it, on ep_dispatcher."""

from deep_ep.utils import envs, event

from ep_dispatcher.integrations.deep_ep.domains import check_nvlink_connections
from ep_dispatcher.integrations.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections", "envs", "event"]
