"""Lets Megatron-Bridge's apply_flex_dispatcher_backend take our name, which it would skip with a warning.

Megatron-Bridge takes long to import, and a launcher registers before it is imported. So its module is changed when it
comes.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ep_dispatcher.integrations.megatron import registration

MODULE = "megatron.bridge.training.flex_dispatcher_backend"
NAME = "apply_flex_dispatcher_backend"
TEXT = f"{MODULE.removeprefix('megatron.')}.{NAME}: takes our name, once it is imported"
PARAMETERS = ["model_config", "moe_flex_dispatcher_backend"]


def is_installed() -> bool:
    """Return whether Megatron-Bridge can be imported. This imports nothing but Megatron's namespace."""
    return MODULE in sys.modules or importlib.util.find_spec("megatron.bridge") is not None


def watch() -> Callable[[], None]:
    """Replace the function now if its module is imported, else when that happens. Return what undoes it."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    if MODULE in sys.modules:
        finder.replace(sys.modules[MODULE])
    return finder.undo


class _Finder(importlib.abc.MetaPathFinder):
    """Finds that one module as Python does, and has the function replaced when the module has run."""

    def __init__(self) -> None:
        self.old: Any = None
        self.new: Any = None

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
        old: Any = getattr(module, NAME, None)
        given = list(inspect.signature(old).parameters) if old else None
        if given != PARAMETERS:
            warnings.warn(
                f"this Megatron-Bridge's {NAME} takes {given}, not {PARAMETERS}, and was not replaced: it does not "
                f'know {registration.NAME}. Set moe_token_dispatcher_type = "flex" and moe_flex_dispatcher_backend = '
                f'"{registration.NAME}" in the recipe instead.',
                stacklevel=2,
            )
            return
        self.old, self.new = old, _take_our_name(old)
        _exchange(self.old, self.new)

    def undo(self) -> None:
        sys.meta_path.remove(self)
        if self.old is not None:
            _exchange(self.new, self.old)


def _exchange(old: Any, new: Any) -> None:
    """Replace the function in its module, and in all that have imported it by name, as recipes do."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(NAME) is old:
            setattr(module, NAME, new)


def _take_our_name(old: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(old)
    def apply(model_config: Any, moe_flex_dispatcher_backend: str | None = None) -> None:
        if moe_flex_dispatcher_backend != registration.NAME or not getattr(model_config, "num_moe_experts", None):
            return old(model_config, moe_flex_dispatcher_backend)
        # Overlapped shared experts stay as they are: other backends need them switched off, this one does not.
        model_config.moe_token_dispatcher_type, model_config.moe_flex_dispatcher_backend = "flex", registration.NAME
        return None

    return apply
