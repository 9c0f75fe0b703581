"""DeepEP's Python interfaces, of 1.2.1 (Buffer), 2 (ElasticBuffer) and 2.5 (EPBuffer), on ep_dispatcher.

    import ep_dispatcher.integrations.deep_ep as d
    d.install()                       # before the program imports deep_ep
    from deep_ep import Buffer        # ours

or, without editing a file,

    torchrun ... -m ep_dispatcher.integrations.deep_ep program.py <arguments of program.py>

An installed DeepEP is neither loaded nor changed. docs/deep_ep.md says what is supported and how it was tested.
"""

from ep_dispatcher.integrations.deep_ep.buffer import Buffer
from ep_dispatcher.integrations.deep_ep.buffer_pool import destroy_buffers
from ep_dispatcher.integrations.deep_ep.config import Config
from ep_dispatcher.integrations.deep_ep.elastic import ElasticBuffer
from ep_dispatcher.integrations.deep_ep.elastic_handle import EPHandle
from ep_dispatcher.integrations.deep_ep.ep_buffer import EPBuffer
from ep_dispatcher.integrations.deep_ep.events import EventHandle, EventOverlap
from ep_dispatcher.integrations.deep_ep.import_path import install, uninstall
from ep_dispatcher.integrations.deep_ep.redundant_experts import BufferAllocator

__all__ = [
    "Buffer",
    "BufferAllocator",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "destroy_buffers",
    "install",
    "uninstall",
]


def __dir__() -> list[str]:
    """List the public names alone."""
    return __all__
