"""Lets Megatron accept our name wherever it asks for the name of a backend, whose features decide what it allows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import megatron.core

from ep_dispatcher.integrations.megatron.dispatcher import graphs, megatron_bridge, megatron_config, registration
from ep_dispatcher.integrations.megatron.dispatcher.registration import NAME, chooses_ep_dispatcher

SIMILAR_BACKEND = "hybridep"  # a backend of Megatron's that is like ours: rows arrive padded, and inputs are not freed


def add_to_type(old: Any) -> Any:
    """Return the type of the field moe_flex_dispatcher_backend, with our name."""
    names = (*get_args(old), NAME)
    return Literal[names]


def wrap_post_init(old: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap TransformerConfig.__post_init__."""

    def check(config):
        megatron_bridge.refuse_ignored_choice(config)
        with _under_another_name(config):
            old(config)
        graphs.keep_gradients(config)

    return check


@contextlib.contextmanager
def _under_another_name(config) -> Iterator[None]:
    """While Megatron checks a configuration, put the name of a backend with the same features in place of ours."""
    if config.moe_flex_dispatcher_backend != NAME or config.num_moe_experts is None:
        yield
        return
    if config.moe_token_dispatcher_type != "flex":
        raise ValueError(
            f"--moe-token-dispatcher-type is {config.moe_token_dispatcher_type}, but --moe-flex-dispatcher-backend "
            f"{NAME} needs flex"
        )
    if getattr(config, "moe_enable_deepep", False):
        raise ValueError(f"--moe-enable-deepep and --moe-flex-dispatcher-backend {NAME} exclude each other")
    if config.moe_shared_expert_overlap and registration.version_numbers(megatron.core.__version__) < (0, 18):
        config.moe_token_dispatcher_type = "alltoall"
    if getattr(config, "moe_expert_rank_capacity_factor", None) is not None:
        config.moe_flex_dispatcher_backend = SIMILAR_BACKEND
    factor, pads = config.moe_expert_capacity_factor, config.moe_pad_expert_input_to_capacity
    if config.cuda_graph_impl != "none" and "moe" in megatron_config.graph_modules(config)[1]:
        # Megatron allows it only if rows are padded to a capacity.
        config.moe_expert_capacity_factor = abs(factor or 1.0)
        config.moe_pad_expert_input_to_capacity = True
    try:
        yield
    finally:
        config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", NAME
        config.moe_expert_capacity_factor = None if factor is None or factor < 0 else factor
        config.moe_pad_expert_input_to_capacity = pads


def wrap_should_free_input(old: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap should_free_input."""

    def should_free_input(name, is_moe, config, *rest):
        if is_moe and chooses_ep_dispatcher(config):
            config = copy.copy(config)
            config.moe_flex_dispatcher_backend = SIMILAR_BACKEND
        return old(name, is_moe, config, *rest)

    return should_free_input


@contextlib.contextmanager
def rows_arrive_padded(config, is_padded: bool) -> Iterator[None]:
    """Let Megatron's experts see that their rows have arrived padded, so that they do not pad them. 0.18 and newer ask.

    This concerns our dispatcher only: Megatron knows whether its own ones pad rows.
    """
    if not is_padded or not chooses_ep_dispatcher(config):
        yield
        return
    config.moe_flex_dispatcher_backend = SIMILAR_BACKEND
    try:
        yield
    finally:
        config.moe_flex_dispatcher_backend = NAME
