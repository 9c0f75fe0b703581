"""The dispatchers of Megatron that can be compared: which two, their settings, and what one needs to run here."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, get_args

from ep_dispatcher.integrations.megatron.dispatcher import registration
from ep_dispatcher.integrations.megatron.dispatcher.arguments import flag_of
from ep_dispatcher.tools.parity.flags import Refused

OURS = "ep_dispatcher"
MEGATRONS = ("alltoall", "allgather")  # each Megatron has these, on any machine
TYPE, BACKEND, AGAINST = "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend", "--against"
# What other backends are made of: the attribute of Megatron's module fused_a2a that is missing without it.
PARTS = {
    "deepep": ("fused_dispatch", "deep_ep", "DeepEP"),
    "hybridep": ("hybrid_ep_dispatch", "deep_ep", "DeepEP of its branch hybrid-ep"),
    "ncclep": ("nccl_ep_dispatch", "transformer_engine", "Transformer Engine, built with NVTE_BUILD_WITH_NCCL_EP=1"),
}
BFLOAT16_ONLY = ("deepep", "hybridep", "ncclep")
# Settings that change no value of a layer, and the dispatchers that do not have them.
LACKING = {
    "moe_expert_rank_capacity_factor": ("alltoall", "allgather", "deepep"),
    "moe_shared_expert_overlap": ("allgather",),  # and before 0.18 those of PARTS
}


class Pair(NamedTuple):
    """The two dispatchers of a comparison. The reference is the one that is taken to be right."""

    tested: str
    reference: str


def names() -> tuple[str, ...]:
    """Return the names of this Megatron's dispatchers, with ours."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    backends = get_args(TransformerConfig.__dataclass_fields__["moe_flex_dispatcher_backend"].type)
    return tuple(dict.fromkeys((*MEGATRONS, *backends, OURS)))


def take_chosen(settings: dict[str, Any]) -> str | None:
    """Take the flags that choose a dispatcher out of the settings. Return its name; None: they choose none."""
    kind, backend = settings.pop("moe_token_dispatcher_type", None), settings.pop("moe_flex_dispatcher_backend", None)
    flag = BACKEND
    if settings.pop("moe_enable_deepep", False):
        flag, backend = "--moe-enable-deepep", backend or "deepep"
        if backend != "deepep":
            raise Refused(f"{flag} is given beside {BACKEND} {backend}: give one of them")
    if backend is not None and kind != "flex":
        given = "no such flag" if kind is None else f"{kind}"
        raise Refused(f"{TYPE} is {given}, but has to be flex with {flag} {backend}: Megatron ignores it otherwise")
    return backend or "deepep" if kind == "flex" else kind


def pair(chosen: str | None, against: str | None, is_possible: dict[str, str | None]) -> Pair:
    """Return what to compare. chosen: by Megatron's flags. is_possible: MEGATRONS -> why it cannot run, or None."""
    one = chosen or OURS
    if against == one:
        raise Refused(f"{AGAINST} is {against}, but has to be another dispatcher than the one that the flags choose")
    plain = next((name for name in MEGATRONS if is_possible[name] is None), MEGATRONS[0])
    other = against or (OURS if one != OURS else plain)
    for name in (one, other):
        if is_possible.get(name) is not None:
            raise Refused(f"{name}: {is_possible[name]}")
    if one in MEGATRONS and other not in MEGATRONS:
        return Pair(tested=other, reference=one)
    return Pair(tested=one, reference=other)


def settings_of(name: str) -> dict[str, Any]:
    """Return the fields of a configuration that choose this dispatcher."""
    if name in MEGATRONS:
        return dict(moe_token_dispatcher_type=name)
    return dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=name)


def without_lacking(name: str, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that this dispatcher has, and sentences about those that it does not have."""
    lacking = [field for field in LACKING if settings.get(field) and _lacks(name, field)]
    kept = {field: value for field, value in settings.items() if field not in lacking}
    return kept, [f"{flag_of(field)}: {name} does not have this feature, and runs without it" for field in lacking]


def _lacks(name: str, field: str) -> bool:
    import megatron.core

    if field == "moe_shared_expert_overlap" and name in PARTS:
        return registration.version_numbers(megatron.core.__version__) < (0, 18)
    return name in LACKING[field]


def why_missing(name: str, cpu: bool, is_bfloat16: bool) -> str | None:
    """Return what a dispatcher needs that is missing here; None if nothing is missing, as far as can be seen."""
    from megatron.core.transformer.moe import fused_a2a

    if name == OURS:
        from ep_dispatcher import engines

        if not cpu and "cuda" not in engines.ENGINES:
            return "this build has no engine for GPUs; CUDA_VISIBLE_DEVICES= compares on the CPU"
        return None
    if name not in PARTS:
        return None
    attribute, module, package = PARTS[name]
    if getattr(fused_a2a, attribute, None) is None:
        return f"it needs {package}, and {_why_not_imported(module)}"
    if is_stand_in(module):
        return None  # runs on CPUs too, with rows of any dtype
    if cpu:
        return "it needs GPUs, and this machine has none"
    return None if is_bfloat16 or name not in BFLOAT16_ONLY else "it carries bfloat16 rows only; give --bf16"


def is_stand_in(module: str) -> bool:
    """Return whether what is imported by this name is our stand-in for it."""
    buffer = getattr(importlib.import_module(module), "Buffer", None)
    return str(getattr(buffer, "__module__", "")).startswith("ep_dispatcher.")


def _why_not_imported(module: str) -> str:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"`import {module}` raises {type(error).__name__}: {error}"
    return f"the {module} that is installed does not have it"
