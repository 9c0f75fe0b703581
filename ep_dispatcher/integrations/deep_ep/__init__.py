"""DeepEP's Python interfaces, of 1.2.1 (Buffer) and 2 (ElasticBuffer), on ep_dispatcher, for programs written for them.

    import ep_dispatcher.integrations.deep_ep as d
    d.install()                       # before the program imports deep_ep
    from deep_ep import Buffer        # ours

or, without editing a file,

    torchrun ... -m ep_dispatcher.integrations.deep_ep program.py <arguments of program.py>

An installed DeepEP is neither loaded nor changed. docs/deep_ep.md says what is supported and how it was tested.
"""

from importlib import import_module

_HOMES = {
    "install": "path",
    "uninstall": "path",
    "Buffer": "buffer",
    "ElasticBuffer": "elastic",
    "EPHandle": "elastic_handle",
    "Config": "config",
    "EventHandle": "events",
    "EventOverlap": "events",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
