"""Joins the two packages where Megatron builds an MoE layer: it gets our dispatcher, and experts in grouped GEMMs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

from megatron.core.transformer.moe import moe_layer

from ep_dispatcher.integrations.megatron.dispatcher import arguments, registration
from ep_dispatcher.integrations.megatron.dispatcher.dispatcher import MoEEPTokenDispatcher
from ep_dispatcher.integrations.megatron.dispatcher.registration import UnknownMegatronError, is_ours
from ep_dispatcher.integrations.megatron.grouped_experts.experts import Experts


def build(old: Callable[..., None]) -> Callable[..., None]:
    """Wrap MoELayer.__init__."""

    def init(layer, config, *args, **kwargs):
        arguments.check(config)
        wanted, active = arguments.experts(config), registration.active()
        if wanted != "megatron" and active is not None and active.why_no_grouped:
            raise UnknownMegatronError(f"{arguments.flag('experts')} {wanted}: {active.why_no_grouped}")
        with _our_dispatcher() if is_ours(config) else contextlib.nullcontext():
            old(layer, config, *args, **kwargs)
        one = None if wanted == "megatron" else Experts(layer)
        if one is not None:
            layer.experts.ep_dispatcher = one
        if isinstance(layer.token_dispatcher, MoEEPTokenDispatcher):
            layer.token_dispatcher.layer, layer.token_dispatcher.experts = weakref.ref(layer), one
        else:
            registration.note_other_dispatcher(config)

    return init


@contextlib.contextmanager
def _our_dispatcher() -> Iterator[None]:
    """Let the constructor of an MoE layer find our class in the place of Megatron's flex dispatcher."""
    megatrons = moe_layer.MoEFlexTokenDispatcher
    moe_layer.MoEFlexTokenDispatcher = MoEEPTokenDispatcher
    try:
        yield
    finally:
        moe_layer.MoEFlexTokenDispatcher = megatrons
