"""Every EP_DISPATCHER_* switch of the environment, in one place.

    envs.timeout_s()  ->  float(os.environ["EP_DISPATCHER_TIMEOUT_S"]), or the default when it is unset or empty

Switches say what is the machine's; what is the job's is an argument. Some are defaults of arguments of `Buffer`: what a
caller passes wins. A switch is read when it is called, not at import. A value that is not allowed raises a ValueError
with the name, what was given and what is allowed.
"""

import functools
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

MAX_TIMEOUT_S = 1e9  # the longest limit of an operation
Value = TypeVar("Value")


@dataclass(frozen=True)
class Switch(Generic[Value]):
    name: str
    default: Value
    allowed: str  # in words, for errors and tables
    parse: Callable[[str], Value]  # raises ValueError or KeyError when the text is not allowed
    meaning: str

    def __call__(self) -> Value:
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"{self.name} is {text!r}, but has to be {self.allowed}") from None


def _one_of(*names: str) -> tuple[str, Callable[[str], str]]:
    """Return what is allowed, in words, and the function that reads it."""
    return ", ".join(names), {name: name for name in names}.__getitem__


def _positive_int(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _positive_float(text: str, most: float = math.inf) -> float:
    if not (0 < (value := float(text)) <= most and math.isfinite(value)):
        raise ValueError
    return value


_YES_OR_NO = "0, 1", {"0": False, "1": True}.__getitem__
_COUNT = "an integer of at least 1", _positive_int

engine = Switch(
    "EP_DISPATCHER_ENGINE",
    "auto",
    *_one_of("auto", "cpu", "cuda"),
    "the engine; auto takes cuda when a usable GPU is there",
)
ranks_per_node = Switch[int | str | None](
    "EP_DISPATCHER_RANKS_PER_NODE",
    None,
    f"nvlink, {_COUNT[0]}",
    lambda text: text if text == "nvlink" else _positive_int(text),
    "ranks of a node, in place of the nodes that are found; smaller than a host: virtual nodes. nvlink: those that "
    "NVLink joins, or an error",
)
timeout_s = Switch(
    "EP_DISPATCHER_TIMEOUT_S",
    100.0,
    f"a number of seconds above 0, at most {MAX_TIMEOUT_S:g}",
    lambda text: _positive_float(text, MAX_TIMEOUT_S),
    "how long a rank waits for a peer; it takes up to 3 s more to find out who is late, before PeerTimeoutError",
)
wire = Switch(
    "EP_DISPATCHER_WIRE",
    "auto",
    *_one_of("auto", "peer", "nccl", "nvshmem"),
    "how the cuda engine sends between nodes. peer: through NVLink, between virtual nodes of one host. nccl: by "
    "PyTorch's NCCL, over any network that it knows. nvshmem: by NVSHMEM. auto: peer on one host, nccl on several",
)
trace = Switch(
    "EP_DISPATCHER_TRACE",
    False,
    *_YES_OR_NO,
    "1: one line on stderr for every operation: rank, operation, epoch, time, bytes",
)
max_tokens_per_rank = Switch[int | None](
    "EP_DISPATCHER_MAX_TOKENS_PER_RANK",
    None,
    *_COUNT,
    "the most tokens of a rank, for Megatron, transformers and deep_ep programs. unset: the ranks of the latter two "
    "agree on it before every dispatch. Megatron's argument of this meaning wins",
)
deep_ep_exact = Switch(
    "EP_DISPATCHER_DEEP_EP_EXACT",
    False,
    *_YES_OR_NO,
    "1: deep_ep programs also get what DeepEP's own tests look at, for one more small operation in each such call "
    "(docs/deep_ep.md)",
)
SWITCHES = (engine, ranks_per_node, timeout_s, wire, trace, max_tokens_per_rank, deep_ep_exact)
# setup.py reads them
_OF_THE_BUILD = ("CUDA", "CUDA_ARCHS", "NVSHMEM", "STAMPS")
_NAMES = (*(switch.name for switch in SWITCHES), *(f"EP_DISPATCHER_{name}" for name in _OF_THE_BUILD))


def unknown() -> list[str]:
    """Return set variables that look like switches but are none, most likely misspelt."""
    return sorted(name for name in os.environ if name.startswith("EP_DISPATCHER_") and name not in _NAMES)


@functools.cache
def warn_of_unknown() -> None:
    """Warn once in a process of variables that look like switches: the job would run otherwise than they ask."""
    for name in unknown():
        meant = "".join(f"; the nearest name is {near}" for near in nearest(name))
        logger.warning("ep_dispatcher: %s is set, but there is no such switch%s", name, meant)


def nearest(name: str) -> list[str]:
    """Return the switch, also of the build, that a misspelt name most likely means; none if none is near."""
    prefix = "EP_DISPATCHER_"  # all have it, so it says nothing
    known = [known.removeprefix(prefix) for known in _NAMES]
    return [prefix + match for match in get_close_matches(name.removeprefix(prefix), known, 1)]


def table() -> str:
    """Return the Markdown table of docs/environment.md; `python -m ep_dispatcher.envs` prints it."""
    rows = [("switch", "default", "allowed", "meaning"), ("---",) * 4]
    for switch in SWITCHES:
        default = "unset" if switch.default is None else "0" if switch.default is False else str(switch.default)
        rows.append((f"`{switch.name}`", default, switch.allowed, switch.meaning))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
