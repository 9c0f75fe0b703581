"""Joins both packages where Megatron builds an MoE layer, which gets our dispatcher and experts in grouped GEMMs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

from megatron.core.transformer.moe import moe_layer

from ep_dispatcher.integrations.megatron.dispatcher import arguments, registration
from ep_dispatcher.integrations.megatron.dispatcher.dispatcher import MoEEPTokenDispatcher
from ep_dispatcher.integrations.megatron.dispatcher.registration import UnknownMegatronError, chooses_ep_dispatcher
from ep_dispatcher.integrations.megatron.grouped_experts.experts import Experts


def wrap_init(old: Callable[..., None]) -> Callable[..., None]:
    """Wrap MoELayer.__init__."""

    def init(layer, config, *args, **kwargs):
        arguments.check(config)
        mode, active = arguments.experts_mode(config), registration.active()
        if mode != "megatron" and active is not None and active.why_no_grouped:
            raise UnknownMegatronError(f"{arguments.flag('experts')} {mode}: {active.why_no_grouped}")
        with _our_dispatcher() if chooses_ep_dispatcher(config) else contextlib.nullcontext():
            old(layer, config, *args, **kwargs)
        experts = None
        if mode != "megatron":
            experts = layer.experts.ep_dispatcher = Experts(layer)
        if isinstance(layer.token_dispatcher, MoEEPTokenDispatcher):
            layer.token_dispatcher.layer = weakref.ref(layer)
            layer.token_dispatcher.experts = experts
        else:
            registration.report_other_dispatcher(config)

    return init


@contextlib.contextmanager
def _our_dispatcher() -> Iterator[None]:
    """Let the constructor of an MoE layer find our class instead of Megatron's flex dispatcher."""
    original = moe_layer.MoEFlexTokenDispatcher
    moe_layer.MoEFlexTokenDispatcher = MoEEPTokenDispatcher
    try:
        yield
    finally:
        moe_layer.MoEFlexTokenDispatcher = original
