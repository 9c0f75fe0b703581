"""``deep_ep.utils`` as programs know it, on ep_dispatcher."""

from ep_dispatcher.integrations.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]


def check_nvlink_connections(group) -> None:
    """Nothing to do: the engine finds out which memory it reaches when a buffer is made, and says so if it cannot."""
