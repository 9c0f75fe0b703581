"""Lets Megatron-Bridge's functions for flex dispatchers take our name.

Up to 0.6 ``apply_flex_dispatcher_backend`` skips an unknown name with a warning. From 0.7 on it refuses such a name,
and ``validate_flex_dispatcher_backend`` refuses a model that has one. Megatron-Bridge takes long to import, and a
launcher calls register() before that import. So the functions are replaced as soon as their module is imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ep_dispatcher.integrations.megatron.dispatcher import registration
from ep_dispatcher.integrations.megatron.dispatcher.patch import replace_everywhere

MODULE = "megatron.bridge.training.flex_dispatcher_backend"
APPLY, VALIDATE = "apply_flex_dispatcher_backend", "validate_flex_dispatcher_backend"
TEXT = f"{MODULE.removeprefix('megatron.')}: {APPLY} and {VALIDATE} take our name, once it is imported"
PARAMETERS = ["model_config", "moe_flex_dispatcher_backend"]

logger = logging.getLogger(__name__)


def is_installed() -> bool:
    """Return whether Megatron-Bridge can be imported. This imports nothing but Megatron's namespace."""
    return MODULE in sys.modules or importlib.util.find_spec("megatron.bridge") is not None


def watch() -> Callable[[], None]:
    """Replace the functions now if their module is imported, else when that happens. Return what undoes it."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    if MODULE in sys.modules:
        finder.replace(sys.modules[MODULE])
    return finder.undo


class _Finder(importlib.abc.MetaPathFinder):
    """Finds that one module as Python does, and has its functions replaced when the module has run."""

    def __init__(self) -> None:
        self._replaced: list[tuple[str, Any, Any]] = []  # name, Megatron-Bridge's function, ours

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_replace(module: ModuleType) -> None:
                run(module)
                self.replace(module)

            spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec

    def replace(self, module: ModuleType) -> None:
        for name, wrap in ((APPLY, _applying_our_name), (VALIDATE, _passing_our_name)):
            old = getattr(module, name, None)
            if old is not None:  # a recipe that calls a missing function gets Python's own error
                self._replaced.append((name, old, wrap(old)))
                replace_everywhere(*self._replaced[-1])  # in recipes too

    def undo(self) -> None:
        sys.meta_path.remove(self)
        for name, old, new in self._replaced:
            replace_everywhere(name, new, old)


def _applying_our_name(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap apply_flex_dispatcher_backend. Raise if its signature is unknown: it might just skip our name."""
    signature = inspect.signature(old)
    given = list(signature.parameters)

    @functools.wraps(old)
    def apply(*args: Any, **kwargs: Any) -> Any:
        if registration.NAME not in (*args, *kwargs.values()):
            return old(*args, **kwargs)
        if given != PARAMETERS:
            raise ValueError(
                f"{APPLY} of this Megatron-Bridge takes {given}, not {PARAMETERS}. Set moe_token_dispatcher_type = "
                f'"flex" and moe_flex_dispatcher_backend = "{registration.NAME}" in the recipe instead'
            )
        config = signature.bind(*args, **kwargs).arguments[PARAMETERS[0]]
        if not getattr(config, "num_moe_experts", None):
            logger.warning("%s: skipped %s, because the model has no experts", APPLY, registration.NAME)
            return None
        # Other backends need the overlap of shared experts switched off, but this one does not.
        config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", registration.NAME
        return None

    return apply


def _passing_our_name(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap validate_flex_dispatcher_backend. A model with our name is valid: the engine checks the GPU itself."""

    @functools.wraps(old)
    def validate(*args: Any, **kwargs: Any) -> Any:
        for config in (*args, *kwargs.values()):
            has_fields = hasattr(config, "moe_token_dispatcher_type") and hasattr(config, "moe_flex_dispatcher_backend")
            if has_fields and registration.chooses_ep_dispatcher(config):
                return None
        return old(*args, **kwargs)

    return validate


def refuse_ignored_choice(config: Any) -> None:
    """Refuse a model of experts whose script has not taken our name from its command line.

    Some scripts of Megatron-Bridge compare the argument with the backends that they know, and ignore others.
    """
    active = registration.active()
    asked = None if active is None else getattr(active.parsed, "moe_flex_dispatcher_backend", None)
    if "megatron.bridge" not in sys.modules or asked != registration.NAME:
        return
    if config.num_moe_experts and not registration.chooses_ep_dispatcher(config):
        raise ValueError(
            f"--moe_flex_dispatcher_backend is {asked}, but this script of Megatron-Bridge ignores it and leaves "
            f'the model with "{config.moe_token_dispatcher_type}". Add model.moe_token_dispatcher_type=flex '
            f"model.moe_flex_dispatcher_backend={asked} to its overrides"
        )
