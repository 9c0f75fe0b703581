"""What register() has done, and the one place for the state that the integration keeps in a process.

Every other module here may use it, so it imports none of them. Each keeps its own state in an object of its own class:

    registration.process_wide(Buffers)     the object of class Buffers; the first call makes it
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ep_dispatcher.integrations.messages import print_on_first_rank

NAME = "ep_dispatcher"
State = TypeVar("State")


@dataclass
class Registration:
    """What register() did: Megatron's version, a line for each replacement, and the settings that it was given."""

    megatron_version: str
    replaced: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    why_no_grouped: str = ""  # why no experts can run in grouped GEMMs with this Megatron
    expects_use: bool = False  # whether the launcher has registered: a layer with another dispatcher is then reported
    parsed: Any = None  # the arguments that a parser has read since; Megatron may still change them
    undo: ExitStack = field(default_factory=ExitStack, repr=False)  # puts back what was replaced

    def __str__(self) -> str:
        settings = f" Settings: {self.settings}." if self.settings else ""
        head = f"ep_dispatcher is a backend of Megatron-core {self.megatron_version}'s flex dispatcher.{settings}"
        return "\n  ".join([f"{head} Replaced:", *self.replaced])


class UnknownMegatronError(RuntimeError):
    """This Megatron is not laid out as register() needs it; nothing was replaced."""


@dataclass
class _Process:
    """The registration, if there is one, and the state of other modules, which outlives it.

    Layers that were built keep their dispatcher after unregister(), and the buffers live on.
    """

    registration: Registration | None = None
    states: dict[type, Any] = field(default_factory=dict)


# The only mutable object at module level in this integration. It cannot be passed around instead, because Megatron
# calls the replaced functions with its own arguments, and makes dispatchers from a configuration.
_process = _Process()


def active() -> Registration | None:
    """Return what register() did, or None before it and after unregister()."""
    return _process.registration


def set_active(registration: Registration | None) -> None:
    _process.registration = registration


def process_wide(kind: type[State]) -> State:
    """Return this process's only object of a class. The first call makes it."""
    state = _process.states.get(kind)
    if state is None:
        state = _process.states[kind] = kind()
    return state


def forget(kind: type) -> None:
    """Drop the object of this class. The next use makes another."""
    _process.states.pop(kind, None)


def why_not_importable(error: ImportError) -> str:
    """Return why Megatron-core cannot be imported, and what to install.

    Megatron-core 0.19 imports Triton, but does not list it as a requirement. A PyTorch for GPUs brings Triton with it,
    a PyTorch for CPUs does not.
    """
    if error.name == "triton":
        return (
            f"Megatron-core cannot be imported ({error}): it needs Triton, which neither it nor a PyTorch for CPUs "
            "brings. pip install triton"
        )
    return f"Megatron-core cannot be imported ({error}): pip install 'ep_dispatcher[megatron]'"


def chooses_ep_dispatcher(config) -> bool:
    """Return whether this TransformerConfig chooses ep_dispatcher."""
    return config.moe_token_dispatcher_type == "flex" and config.moe_flex_dispatcher_backend == NAME


def report_other_dispatcher(config) -> None:
    """Print once, if the job was started through the launcher, that an MoE layer has another dispatcher.

    The flags alone do not show it, because a script may choose the dispatcher in its code.
    """
    registered = active()
    if registered is None or not registered.expects_use:
        return
    registered.expects_use = False
    chosen = config.moe_token_dispatcher_type
    if chosen == "flex":
        chosen += f" with {config.moe_flex_dispatcher_backend}"
    print_on_first_rank(
        f"ep_dispatcher is registered, but an MoE layer has another token dispatcher: {chosen}. To choose "
        f"ep_dispatcher, give --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {NAME}, or set these "
        "fields of the TransformerConfig."
    )


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the major and minor number. Return () if there are none, which compares as older than any version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
