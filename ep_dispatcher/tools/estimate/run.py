"""One estimate: sample routings, count them, and work out bytes and time of every operation, and the memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ep_dispatcher.checks import ROW_GRANULARITY, fail
from ep_dispatcher.memory import DEFAULT_SMS, BufferBytes, Shape, bytes_of, default_sms
from ep_dispatcher.tools.estimate.model import CHUNK_TOKENS, COMBINE, DISPATCH, Machine, Time, estimate_time
from ep_dispatcher.tools.estimate.routing import Routing, Sizes
from ep_dispatcher.tools.estimate.traffic import (
    Counts,
    Messages,
    Row,
    Traffic,
    all_tokens,
    combine_traffic,
    count,
    dispatch_traffic,
    over_nccl,
)

WIRE_BYTES = {
    "NIC out": "nic_out",
    "NIC in": "nic_in",
    "NVLink out": "nvlink_out",
    "NVLink in": "nvlink_in",
    "HBM": "hbm",
}
OPERATIONS = ("dispatch", "dispatch FP8", "cached dispatch", "combine")  # named as in ep_dispatcher.tools.bench


@dataclass(frozen=True)
class Job:
    """The arguments of an estimate, for one number of nodes. Raises ValueError if one is not allowed."""

    sizes: Sizes
    routing: Routing
    machine: Machine
    dtype: torch.dtype = torch.bfloat16
    seeds: int = 2
    chunk_tokens: int = CHUNK_TOKENS
    max_tokens: int | None = None  # of the buffer; None: ``sizes.tokens``

    def __post_init__(self):
        if self.max_tokens is not None and self.max_tokens < self.sizes.tokens:
            fail("max_tokens", self.max_tokens, f"at least the {self.sizes.tokens} tokens")
        self.routing.check(self.sizes)

    @property
    def operations(self) -> tuple[str, ...]:
        float8 = self.dtype == torch.bfloat16 and self.sizes.hidden % ROW_GRANULARITY == 0
        return OPERATIONS if float8 else tuple(name for name in OPERATIONS if name != "dispatch FP8")

    @property
    def buffer_tokens(self) -> int:
        return self.sizes.tokens if self.max_tokens is None else self.max_tokens

    @property
    def memory(self) -> BufferBytes:
        """Return the bytes of a rank's buffer. The engine allocates them, or would if it ran on so many nodes."""
        sizes = self.sizes
        nodes, local = sizes.nodes, sizes.gpus_per_node
        shape = Shape(nodes, local, sizes.experts, sizes.topk, self.buffer_tokens, sizes.hidden, self.dtype)
        num_sms = self.machine.num_sms
        return bytes_of(shape, "cuda", max(default_sms(None if num_sms == DEFAULT_SMS else num_sms).values()))

    def cost(
        self, operation: str, counts: Counts, row: Row | None = None, *, nccl: str | None = None
    ) -> tuple[Traffic, Time]:
        """Return bytes and time of one of ``OPERATIONS`` on one routing.

        ``row``: given, or as the engine sends it, with weights in every dispatch. ``nccl``: over the NCCL wire, between
        nodes; messages are "exact", or have "all tokens" where a host does not wait for counts.
        """
        sizes, kind = self.sizes, COMBINE if operation == "combine" else DISPATCH
        new_plan, float8 = operation in ("dispatch", "dispatch FP8"), operation == "dispatch FP8"
        if row is None:
            row = Row.make(sizes.hidden, self.dtype.itemsize, sizes.topk, float8=float8, weights=kind == DISPATCH)
        if kind == COMBINE:
            traffic = combine_traffic(sizes, counts, row)
        else:
            traffic = dispatch_traffic(sizes, counts, row, new_plan=new_plan)
        messages = None
        if nccl is not None:
            rows = counts.message_rows if nccl == "exact" else all_tokens(sizes, self.buffer_tokens)
            messages = Messages.make(sizes, row, rows, self.chunk_tokens, new_plan=new_plan, back=kind == COMBINE)
            traffic = over_nccl(traffic, messages)
        return traffic, estimate_time(kind, sizes, traffic, self.machine, new_plan, self.chunk_tokens, messages)


def estimate(job: Job) -> dict:
    """Return an entry of "estimates" in the JSON, as docs/estimate.md describes it: bytes and microseconds."""
    sizes = job.sizes
    all_counts = [count(sizes, job.routing.sample(sizes, seed)) for seed in range(job.seeds)]

    def summary(name: str, nccl: str | None = None) -> dict:
        return _summary([job.cost(name, counts, nccl=nccl) for counts in all_counts])

    def over_nccl(name: str) -> dict:
        kinds = {"nccl": "exact", "nccl_all_tokens": "all tokens"}
        return {key: summary(name, kind) if sizes.nodes > 1 else None for key, kind in kinds.items()}

    return {
        "nodes": sizes.nodes,
        "ranks": sizes.ranks,
        "tokens_received": _spread([counts.received for counts in all_counts]),
        "expert_rows": _spread([counts.copies for counts in all_counts]),
        "operations": {name: summary(name) | over_nccl(name) for name in job.operations},
        "memory_bytes": job.memory.total,
        "memory_parts": job.memory.region | job.memory.state,
    }


def _spread(per_seed: list[torch.Tensor]) -> dict[str, float]:
    """Return the mean over ranks and seeds, and the largest value of any rank in any seed."""
    values = torch.stack([values.double() for values in per_seed])
    return {"mean": float(values.mean()), "max": float(values.max())}


def _summary(costs: list[tuple[Traffic, Time]]) -> dict:
    """Return mean, least and most over seeds, with the bottleneck and the parts of the slowest seed."""
    times = [time for _, time in costs]
    slowest = max(times, key=lambda time: time.us)
    return {
        **asdict(slowest),
        "us": sum(time.us for time in times) / len(times),
        "least_us": min(time.us for time in times),
        "most_us": slowest.us,
        "bytes": {name: _spread([getattr(moved, field) for moved, _ in costs]) for name, field in WIRE_BYTES.items()},
    }
