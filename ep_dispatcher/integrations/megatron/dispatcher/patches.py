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
    make: Callable[[Any], Any]  # the old value -> the new one
    feature: str  # that it serves
    why: str
    since: str = "0.16"  # the first version of Megatron-core that needs it
    parameters: tuple[str, ...] = ()  # the first ones that the old value has to take
    is_imported_by_name: bool = False  # other modules have the value under the same name

    @property
    def shown(self) -> str:
        return self.path if "." in self.path else f"{self.module.__name__.removeprefix('megatron.core.')}.{self.path}"

    def __str__(self) -> str:
        since = "" if self.since == "0.16" else f" (from {self.since} on)"
        return f"{self.shown}{since}: {self.feature}: {self.why}"

    def find(self) -> tuple[Any, str, Any]:
        """Return the value's owner, its name there, and the value: None if this Megatron does not have it."""
        owner, (*classes, name) = self.module, self.path.split(".")
        for one in classes:
            owner = getattr(owner, one, None)
        return owner, name, None if owner is None else getattr(owner, name, None)

    def why_not(self) -> str | None:
        """Say what this Megatron lacks for the patch."""
        return why_not(self.shown, self.find()[2], self.parameters)

    def apply(self) -> Callable[[], None]:
        """Replace the value. Return what puts it back."""
        owner, name, old = self.find()
        new = self.make(old)
        if inspect.isfunction(new):
            functools.update_wrapper(new, old)
        if self.is_imported_by_name:
            exchange(name, old, new)
            return functools.partial(exchange, name, new, old)
        stored = vars(owner).get(name) if isinstance(owner, type) else old  # None: it is inherited
        setattr(owner, name, staticmethod(new) if isinstance(stored, staticmethod) else new)
        inherit = functools.partial(delattr, owner, name)
        return inherit if stored is None else functools.partial(setattr, owner, name, stored)


def why_not(shown: str, found: Any, parameters: tuple[str, ...], *, exactly: bool = False) -> str | None:
    """Say that a function is missing, or begins with other parameters. exactly: it may have no others."""
    if found is None:
        return f"{shown} is missing"
    given = tuple(inspect.signature(found).parameters) if parameters else ()
    given = given if exactly else given[: len(parameters)]
    return None if given == parameters else f"{shown} takes {list(given)}, not {list(parameters)}"


def exchange(name: str, old: Any, new: Any) -> None:
    """Replace a function in its module, and in all that have imported it by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
