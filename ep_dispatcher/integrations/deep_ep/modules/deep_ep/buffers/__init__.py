"""``deep_ep.buffers`` as programs know it, on ep_dispatcher."""

from deep_ep.buffers import elastic, ep, legacy

__all__ = ["elastic", "ep", "legacy"]
