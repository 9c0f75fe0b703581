"""ep_dispatcher as a token dispatcher of unmodified Megatron-core (0.16 and newer).

    import ep_dispatcher.integrations.megatron as m
    m.register()                                                    # before Megatron parses arguments or builds layers
    config = TransformerConfig(..., moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="ep_dispatcher")

or, with no edit of any file,

    torchrun ... -m ep_dispatcher.integrations.megatron pretrain_gpt.py <arguments> \
        --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher

Importing this module imports nothing of Megatron: a launcher may still choose which Megatron that is. plugin.py has the
tables of what register() replaces, and dispatcher/dispatcher.py begins with the road of one forward pass.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep_dispatcher.integrations.megatron.dispatcher.buffers import destroy_buffers
    from ep_dispatcher.integrations.megatron.dispatcher.dispatcher import MoEEPTokenDispatcher
    from ep_dispatcher.integrations.megatron.dispatcher.registration import Registration, UnknownMegatronError
    from ep_dispatcher.integrations.megatron.dispatcher.skipped_step import skipped_steps
    from ep_dispatcher.integrations.megatron.dispatcher.stats_log import job_stats
    from ep_dispatcher.integrations.megatron.plugin import register, unregister

__all__ = [
    "MoEEPTokenDispatcher",
    "Registration",
    "UnknownMegatronError",
    "destroy_buffers",
    "job_stats",
    "register",
    "skipped_steps",
    "unregister",
]
_HOMES = {
    "MoEEPTokenDispatcher": "dispatcher.dispatcher",
    "Registration": "dispatcher.registration",
    "UnknownMegatronError": "dispatcher.registration",
    "destroy_buffers": "dispatcher.buffers",
    "job_stats": "dispatcher.stats_log",
    "register": "plugin",
    "skipped_steps": "dispatcher.skipped_step",
    "unregister": "plugin",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names alone, also those that nobody has asked for yet."""
    return __all__
