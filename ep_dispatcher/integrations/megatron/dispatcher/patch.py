"""Replaces a function of Megatron, if this Megatron is laid out as it has to be, and puts it back."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """A function or field of Megatron, and what takes its place."""

    module: Any
    path: str  # of the value in the module
    make: Callable[[Any], Any]  # takes the old value, returns the new one
    feature: str  # the feature that needs the patch
    why: str
    since: str = "0.16"  # the first version of Megatron-core that needs it
    parameters: tuple[str, ...] = ()  # the old value's first parameters have to have these names
    is_imported_by_name: bool = False  # whether other modules import the value by its name

    @property
    def shown_name(self) -> str:
        return self.path if "." in self.path else f"{self.module.__name__.removeprefix('megatron.core.')}.{self.path}"

    def __str__(self) -> str:
        since = "" if self.since == "0.16" else f" (from {self.since} on)"
        return f"{self.shown_name}{since}: {self.feature}: {self.why}"

    def find(self) -> tuple[Any, str, Any]:
        """Return the value's owner, its name there, and the value, which is None if this Megatron does not have it."""
        owner, (*classes, name) = self.module, self.path.split(".")
        for class_name in classes:
            owner = getattr(owner, class_name, None)
        return owner, name, None if owner is None else getattr(owner, name, None)

    def why_not(self) -> str | None:
        """Say what this Megatron lacks for the patch."""
        return why_not(self.shown_name, self.find()[2], self.parameters)

    def apply(self) -> Callable[[], None]:
        """Replace the value. Return what puts it back."""
        owner, name, old = self.find()
        new = self.make(old)
        if inspect.isfunction(new):
            functools.update_wrapper(new, old)
        if self.is_imported_by_name:
            replace_everywhere(name, old, new)
            return functools.partial(replace_everywhere, name, new, old)
        stored = vars(owner).get(name) if isinstance(owner, type) else old
        setattr(owner, name, staticmethod(new) if isinstance(stored, staticmethod) else new)
        if stored is None:  # the class inherits the value
            return functools.partial(delattr, owner, name)
        return functools.partial(setattr, owner, name, stored)


def why_not(shown_name: str, function: Any, parameters: tuple[str, ...], *, exactly: bool = False) -> str | None:
    """Say that a function is missing, or has other first parameters. With ``exactly`` it may have no more of them."""
    if function is None:
        return f"{shown_name} is missing"
    if not parameters:
        return None
    taken = tuple(inspect.signature(function).parameters)
    if not exactly:
        taken = taken[: len(parameters)]
    return None if taken == parameters else f"{shown_name} takes {list(taken)}, not {list(parameters)}"


def replace_everywhere(name: str, old: Any, new: Any) -> None:
    """Replace a function in its module, and in all modules that have imported it by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
