"""Every EP_DISPATCHER_* switch of the environment, in one place.

    envs.timeout_s()  ->  float(os.environ["EP_DISPATCHER_TIMEOUT_S"]), or the default when it is unset or empty

Some switches are defaults of arguments of `Buffer`: what a caller passes wins. The others have no argument. A switch is
read when a function here is called, not at import. A value that is not allowed raises a ValueError with the name, what
was given and what is allowed.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

MAX_TIMEOUT_S = 1e9  # the longest limit of an operation


@dataclass(frozen=True)
class Switch:
    name: str
    default: Any
    allowed: str  # in words, for errors and tables
    meaning: str
    parse: Callable[[str], Any]  # text -> value; raises ValueError or KeyError when the text is not allowed

    def read(self) -> Any:
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"{self.name}: given {text!r}, allowed: {self.allowed}") from None


def _one_of(*names: str) -> Callable[[str], str]:
    return {name: name for name in names}.__getitem__


def _int_from(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise ValueError
        return value

    return parse


def _auto_or_int(text: str) -> int | str:
    return text if text == "auto" else _int_from(0)(text)


def _seconds(text: str) -> float:
    value = _positive_float(text)
    if value > MAX_TIMEOUT_S:
        raise ValueError
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError
    return value


SWITCHES = (
    Switch(
        "EP_DISPATCHER_ENGINE",
        "auto",
        "auto, cpu, cuda",
        "the engine; auto takes cuda when a usable GPU is there",
        _one_of("auto", "cpu", "cuda"),
    ),
    Switch(
        "EP_DISPATCHER_RANKS_PER_NODE",
        None,
        "an integer of at least 1",
        "ranks of a node, in place of the nodes that are found; smaller than a host: virtual nodes",
        _int_from(1),
    ),
    Switch(
        "EP_DISPATCHER_TIMEOUT_S",
        100.0,
        f"a number of seconds above 0, at most {MAX_TIMEOUT_S:g}",
        "how long a rank waits for a peer; it takes up to 3 s more to find out who is late, before PeerTimeoutError",
        _seconds,
    ),
    Switch(
        "EP_DISPATCHER_SPIN_US",
        50,
        "an integer of at least 0, in microseconds",
        "how long a waiting rank of the cpu engine spins before it sleeps",
        _int_from(0),
    ),
    Switch(
        "EP_DISPATCHER_NUM_SMS",
        None,
        "an integer of at least 1",
        "multiprocessors that the cuda engine uses at a time, at most; unset: 24",
        _int_from(1),
    ),
    Switch(
        "EP_DISPATCHER_RAIL_SMS",
        None,
        "an integer of at least 1",
        "how many of these serve the wire between nodes; unset: a sixth, in rank layout a quarter",
        _int_from(1),
    ),
    Switch(
        "EP_DISPATCHER_WIRE",
        "auto",
        "auto, peer, nvshmem, nvshmem-puts",
        "how the cuda engine sends between nodes. peer: stores through NVLink, between virtual nodes of one host. "
        "nvshmem: puts of NVSHMEM, and stores where NVLink reaches the other node. nvshmem-puts: puts alone, for "
        "tests. auto: peer on one host, nvshmem on several",
        _one_of("auto", "peer", "nvshmem", "nvshmem-puts"),
    ),
    Switch(
        "EP_DISPATCHER_WIRE_GBPS",
        None,
        "a number above 0, in GB/s",
        "the highest rate of the peer wire, per rank and direction: to measure with the rate of a network card. Needs "
        "a build with EP_DISPATCHER_PACE=1",
        _positive_float,
    ),
    Switch(
        "EP_DISPATCHER_TRACE",
        "0",
        "0, 1",
        "1: one line on stderr for every operation: rank, operation, epoch, time, bytes",
        _one_of("0", "1"),
    ),
    Switch(
        "EP_DISPATCHER_MAX_TOKENS_PER_RANK",
        None,
        "an integer of at least 1",
        "size of the integrations' buffers. unset: Megatron's arguments and first forward pass give it; the ranks of a "
        "deep_ep program agree on it before every dispatch",
        _int_from(1),
    ),
    Switch(
        "EP_DISPATCHER_DEEP_EP_EXACT",
        "0",
        "0, 1",
        "1: deep_ep programs also get what DeepEP's own tests look at. Handles have rank_prefix_matrix and "
        "recv_src_idx, and weights of experts on other ranks are summed, for one more small operation in each such "
        "call. Low-latency handles are complete, with DeepEP's float8 scales and sums, for many more operations",
        _one_of("0", "1"),
    ),
    Switch(
        "EP_DISPATCHER_GROUPED_EXPERTS",
        "0",
        "0, 1",
        "1: the routed experts of Megatron's MoE layers run in a few grouped GEMMs, where they can; a line says how "
        "many do, and why the others do not",
        _one_of("0", "1"),
    ),
    Switch(
        "EP_DISPATCHER_EXPERT_WAVES",
        "0",
        "0, 1",
        "1: as EP_DISPATCHER_GROUPED_EXPERTS=1, and between nodes dispatch and combine run under the GEMMs, where they "
        "can; a second line says how many do, and why the others do not. Set it alike on all ranks",
        _one_of("0", "1"),
    ),
    Switch(
        "EP_DISPATCHER_RANK_CAPACITY_FACTOR",
        None,
        "a number above 0",
        "with experts in grouped GEMMs: the most rows of a rank in an MoE layer, divided by tokens per rank x top-k. "
        "Then no host waits for counts, and more rows are an error. unset: rows are counted",
        _positive_float,
    ),
    Switch(
        "EP_DISPATCHER_GEMM_SM_MARGIN",
        0,
        "auto, an integer of at least 0",
        "multiprocessors that Transformer Engine's GEMMs leave to a dispatch or combine, where Megatron overlaps "
        "microbatches or shared experts; auto: as many as the operation uses",
        _auto_or_int,
    ),
)
_BY_NAME = {switch.name: switch for switch in SWITCHES}
# setup.py reads them
_OF_THE_BUILD = ("EP_DISPATCHER_CUDA", "EP_DISPATCHER_NVSHMEM", "EP_DISPATCHER_STAMPS", "EP_DISPATCHER_PACE")


def read(name: str) -> Any:
    """Return the value of the switch `name`; KeyError when there is no such switch."""
    return _BY_NAME[name].read()


def default(name: str) -> Any:
    """Return the value of the switch `name` where it is unset."""
    return _BY_NAME[name].default


def engine() -> str:
    return read("EP_DISPATCHER_ENGINE")


def ranks_per_node() -> int | None:
    return read("EP_DISPATCHER_RANKS_PER_NODE")


def timeout_s() -> float:
    return read("EP_DISPATCHER_TIMEOUT_S")


def spin_us() -> int:
    return read("EP_DISPATCHER_SPIN_US")


def num_sms() -> int | None:
    return read("EP_DISPATCHER_NUM_SMS")


def rail_sms() -> int | None:
    return read("EP_DISPATCHER_RAIL_SMS")


def wire() -> str:
    return read("EP_DISPATCHER_WIRE")


def wire_gbps() -> float | None:
    return read("EP_DISPATCHER_WIRE_GBPS")


def trace() -> bool:
    return read("EP_DISPATCHER_TRACE") == "1"


def max_tokens_per_rank() -> int | None:
    return read("EP_DISPATCHER_MAX_TOKENS_PER_RANK")


def deep_ep_exact() -> bool:
    return read("EP_DISPATCHER_DEEP_EP_EXACT") == "1"


def grouped_experts() -> bool:
    """Return whether either switch asks for them."""
    return read("EP_DISPATCHER_GROUPED_EXPERTS") == "1" or expert_waves()


def expert_waves() -> bool:
    return read("EP_DISPATCHER_EXPERT_WAVES") == "1"


def rank_capacity_factor() -> float | None:
    return read("EP_DISPATCHER_RANK_CAPACITY_FACTOR")


def gemm_sm_margin() -> int | Literal["auto"]:
    return read("EP_DISPATCHER_GEMM_SM_MARGIN")


def unknown() -> list[str]:
    """Return set variables that look like switches but are none, most likely misspelt."""
    return sorted(
        name for name in os.environ if name.startswith("EP_DISPATCHER_") and name not in (*_BY_NAME, *_OF_THE_BUILD)
    )


def nearest(name: str) -> list[str]:
    """Return the switch, also of the build, that a misspelt name most likely means; none if none is near."""
    prefix = "EP_DISPATCHER_"  # all have it, so it says nothing
    known = [known.removeprefix(prefix) for known in (*_BY_NAME, *_OF_THE_BUILD)]
    return [prefix + match for match in get_close_matches(name.removeprefix(prefix), known, 1)]


def table() -> str:
    """Return the Markdown table of docs/environment.md; `python -m ep_dispatcher.envs` prints it."""
    rows = [("switch", "default", "allowed", "meaning"), ("---",) * 4]
    for switch in SWITCHES:
        default = "unset" if switch.default is None else str(switch.default)
        rows.append((f"`{switch.name}`", default, switch.allowed, switch.meaning))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
