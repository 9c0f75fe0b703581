"""What register() has done, and the one place for what the integration keeps in a process.

Every other module here may read it, so it imports none of them. Objects of other modules are its ``parts``, found by
their classes:

    registration.part(Buffers)     the buffers of this process
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ep_dispatcher.integrations.agree import say

NAME = "ep_dispatcher"
Part = TypeVar("Part")


@dataclass
class Registration:
    """What register() did: Megatron's version, a line for each replacement, and the settings that it was given."""

    megatron_version: str
    replaced: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    why_no_grouped: str = ""  # why no experts can run in grouped GEMMs with this Megatron
    expects_use: bool = False  # the launcher was given, so a layer with another dispatcher is a surprise
    parsed: Any = None  # what a parser has read after it; Megatron may still change it
    undo: ExitStack = field(default_factory=ExitStack, repr=False)  # puts back what was replaced

    def __str__(self) -> str:
        settings = f" Settings: {self.settings}." if self.settings else ""
        head = f"ep_dispatcher is a backend of Megatron-core {self.megatron_version}'s flex dispatcher.{settings}"
        return "\n  ".join([f"{head} Replaced:", *self.replaced])


class UnknownMegatronError(RuntimeError):
    """This Megatron is not laid out as register() needs it; nothing was replaced."""


@dataclass
class _Process:
    """What there is once in a process: the registration, if there is one, and parts that outlive it.

    Layers that were built keep their dispatcher after unregister(), and the buffers live on. So the parts stay.
    """

    registration: Registration | None = None
    parts: dict[type, Any] = field(default_factory=dict)


# The only object that the integration keeps at the level of a module. Megatron calls the functions that register() puts
# into it with arguments of its own, and makes dispatchers from a configuration: nothing of ours could come that way.
_process = _Process()


def active() -> Registration | None:
    """Return what register() did, or None before it and after unregister()."""
    return _process.registration


def set_active(registration: Registration | None) -> None:
    _process.registration = registration


def part(kind: type[Part]) -> Part:
    """Return the object of this class that the process has. The first use makes it."""
    found = _process.parts.get(kind)
    if found is None:
        found = _process.parts[kind] = kind()
    return found


def forget(kind: type) -> None:
    """Drop the object of this class. The next use makes another."""
    _process.parts.pop(kind, None)


def cannot_import(error: ImportError) -> str:
    """Return why Megatron-core cannot be imported, and what to install.

    Megatron-core 0.19 imports Triton at once and does not require it. A PyTorch for GPUs brings it, one for CPUs not.
    """
    if error.name == "triton":
        return (
            f"Megatron-core cannot be imported ({error}): it needs Triton, which neither it nor a PyTorch for CPUs "
            "brings. pip install triton"
        )
    return f"Megatron-core cannot be imported ({error}): pip install 'ep_dispatcher[megatron]'"


def is_ours(config) -> bool:
    """Return whether this TransformerConfig chooses ep_dispatcher."""
    return config.moe_token_dispatcher_type == "flex" and config.moe_flex_dispatcher_backend == NAME


def note_other_dispatcher(config) -> None:
    """Tell whoever has started the launcher, once, that an MoE layer has another dispatcher.

    Flags cannot tell: a script may choose the dispatcher in its code, with or against them.
    """
    registered = active()
    if registered is None or not registered.expects_use:
        return
    registered.expects_use = False
    given = config.moe_token_dispatcher_type
    if given == "flex":
        given += f" with {config.moe_flex_dispatcher_backend}"
    say(
        f"ep_dispatcher is registered, but an MoE layer has another token dispatcher: {given}. To choose it give "
        f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {NAME}, or set these fields of the "
        "TransformerConfig."
    )


def numbers(version: str) -> tuple[int, ...]:
    """Return major and minor number. If there are none to read, return (), which is older than all."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
