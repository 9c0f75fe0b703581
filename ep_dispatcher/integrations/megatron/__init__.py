"""ep_dispatcher as a token dispatcher of unmodified Megatron-core (0.16 and newer).

    import ep_dispatcher.integrations.megatron as m
    m.register()                                                    # before Megatron parses arguments or builds layers
    config = TransformerConfig(..., moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="ep_dispatcher")

or, with no edit of any file,

    torchrun ... -m ep_dispatcher.integrations.megatron pretrain_gpt.py <arguments> \
        --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher

Importing this module imports nothing of Megatron: a launcher may still choose which Megatron that is.
"""

from importlib import import_module

_HOMES = {
    "register": "plugin",
    "unregister": "plugin",
    "Registration": "registration",
    "MoEEPTokenDispatcher": "dispatcher",
    "destroy_buffers": "buffers",
    "repeated_steps": "overflow",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
