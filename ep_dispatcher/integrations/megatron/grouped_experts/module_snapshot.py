"""Finds out in every forward pass whether modules have changed since it was decided how to run them.

A program may change the class of a module or its forward, replace a module (as LoRA does), and change parameters or
hooks. It may use PyTorch's functions or write into a module's dictionaries, so no hook can report all of it. Therefore
everything is compared. ``map`` and ``itertools`` do so in C, several times as fast as a loop in Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import contains, is_, itemgetter
from typing import Any

from torch.nn import Module
from torch.nn.modules import module as torch_module

# The dictionaries of a module that hold its hooks. PyTorch has a fifth one, with flags of hooks that are in these.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(
    getattr(torch_module, f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")
)
# Each of these reads a module's own dictionary.
_hooks_of = itemgetter(*HOOKS)
_parameters_of, _modules_of = itemgetter("_parameters"), itemgetter("_modules")
# Attributes of experts' modules that change what they compute. Not every module has them.
_ATTRIBUTES = ("activation_func", "te_quant_params")
_END = (object(),)  # ends both sequences that are compared, so that a longer one is not equal
Owned = dict[str, Any]  # a module's own dictionary


class ModuleSnapshot:
    """Everything about some modules that decides how to run them. ``is_current`` says whether it is still the same.

    whole    the module that grouped GEMMs replace as a whole; it may own this snapshot, so it is not held here
    owners   modules in it, or lists of them, that have modules of their own
    linears  its linear layers, whose parameters count

    Objects are compared by identity. They are held here, so that no new object can get the address of an old one. Hooks
    are compared by their numbers, which PyTorch never uses again, because a hook may keep a whole model alive.
    """

    def __init__(self, whole: Module, owners: Sequence[Module], linears: Sequence[Module]):
        self._whole = weakref.ref(whole)
        self._modules = [*owners, *linears]
        self._classes: list[Any] = [type(whole), *map(type, self._modules)]
        self._distinct_classes = [*dict.fromkeys(self._classes)]
        self._owned_by_owners: list[Owned] = [module.__dict__ for module in owners]
        self._owned_by_linears: list[Owned] = [module.__dict__ for module in linears]
        inner = self._owned_by_owners + self._owned_by_linears
        attributed = [(owned, name) for owned in inner for name in _ATTRIBUTES if name in owned]
        self._attributed, self._names = [owned for owned, _ in attributed], [name for _, name in attributed]
        own = whole.__dict__
        self._contents = [*self._contents_now(own)]
        owned = [own, *inner]
        self._forwards = self._forwards_now(owned)
        self._hooks = _hooks_now(owned)

    def is_current(self) -> bool:
        whole = self._whole()
        if whole is None:
            return False
        own = whole.__dict__
        owned = [own, *self._owned_by_owners, *self._owned_by_linears]
        return (
            [type(whole), *map(type, self._modules)] == self._classes
            and all(map(is_, self._contents_now(own), self._contents))
            and self._forwards_now(owned) == self._forwards
            and _hooks_now(owned) == self._hooks
        )

    def _contents_now(self, own: Owned) -> Iterator[Any]:
        """Yield parameters, submodules and attributes, always in the same order."""
        modules = map(_modules_of, (own, *self._owned_by_owners))
        tables = chain(map(_parameters_of, self._owned_by_linears), modules)
        attributes = chain(map(own.get, _ATTRIBUTES), map(dict.get, self._attributed, self._names))
        return chain(chain.from_iterable(map(dict.values, tables)), attributes, _END)

    def _forwards_now(self, owned: list[Owned]) -> list[Any]:
        """Return the forward of each class. If a module has its own forward, also return which modules have one."""
        forwards: list[Any] = [kind.forward for kind in self._distinct_classes]
        if any(map(contains, owned, repeat("forward"))):
            forwards += ["forward" in each for each in owned]
        return forwards


def _hooks_now(owned: list[Owned]) -> list[Any]:
    """Return the numbers of all hooks, and which modules have them."""
    found: list[Any] = [*chain.from_iterable(GLOBAL_HOOKS)]
    if any(chain.from_iterable(map(_hooks_of, owned))):
        hooked = [(place, hooks) for place, hooks in enumerate(map(_hooks_of, owned)) if any(hooks)]
        found += [(place, *map(tuple, hooks)) for place, hooks in hooked]
    return found


def hooks_by_name(module: Module) -> Iterable[tuple[str, dict[int, Any]]]:
    """Return the module's dictionaries of hooks with their names."""
    return zip(HOOKS, _hooks_of(module.__dict__))
