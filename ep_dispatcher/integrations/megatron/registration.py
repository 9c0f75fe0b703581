"""What register() has done. Every other module here may read it, so it imports none of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

NAME = "ep_dispatcher"


@dataclass
class Registration:
    """What register() did: Megatron's version, a line for each replacement, and the settings that it was given."""

    megatron_version: str
    replaced: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    why_no_grouped: str = ""  # why no experts can run in grouped GEMMs with this Megatron
    parsed: Any = None  # what a parser has read after it; Megatron may still change it

    def __str__(self) -> str:
        settings = f" Settings: {self.settings}." if self.settings else ""
        head = f"ep_dispatcher is a backend of Megatron-core {self.megatron_version}'s flex dispatcher.{settings}"
        return "\n  ".join([f"{head} Replaced:", *self.replaced])


class UnknownMegatronError(RuntimeError):
    """This Megatron is not laid out as register() needs it; nothing was replaced."""


_active: Registration | None = None


def active() -> Registration | None:
    """Return what register() did, or None before it and after unregister()."""
    return _active


def set_active(registration: Registration | None) -> None:
    global _active
    _active = registration


def is_ours(config) -> bool:
    return config.moe_token_dispatcher_type == "flex" and config.moe_flex_dispatcher_backend == NAME


def numbers(version: str) -> tuple[int, ...]:
    """Return major and minor number. If there are none to read, return (), which is older than all."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
