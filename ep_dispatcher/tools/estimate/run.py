"""One estimate: sample routings, count them, and work out bytes and time of every operation, and the memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ep_dispatcher.checks import ROW_GRANULARITY, fail
from ep_dispatcher.memory import BufferBytes, Shape, cuda_bytes
from ep_dispatcher.tools.estimate.model import CHUNK_TOKENS, COMBINE, DISPATCH, Machine, Time, estimate_time
from ep_dispatcher.tools.estimate.routing import Routing, Sizes
from ep_dispatcher.tools.estimate.traffic import Counts, Row, Traffic, combine_traffic, count, dispatch_traffic

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
    def memory(self) -> BufferBytes:
        """Return the bytes of a rank's buffer. The engine allocates them, or would if it ran on so many nodes."""
        sizes, tokens = self.sizes, self.sizes.tokens if self.max_tokens is None else self.max_tokens
        nodes, local = sizes.nodes, sizes.gpus_per_node
        shape = Shape(nodes, local, sizes.experts, sizes.topk, tokens, sizes.hidden, self.dtype)
        return cuda_bytes(shape, self.machine.num_sms)

    def cost(
        self, operation: str, counts: Counts, row: Row | None = None, new_plan: bool | None = None
    ) -> tuple[Traffic, Time]:
        """Return bytes and time of one of ``OPERATIONS`` on one routing.

        ``row``: given, or as the engine sends it, with weights in every dispatch. ``new_plan``: given, or that of the
        operation.
        """
        sizes, kind = self.sizes, COMBINE if operation == "combine" else DISPATCH
        options = dict(float8=operation == "dispatch FP8", weights=kind == DISPATCH)
        row = row or Row.make(sizes.hidden, self.dtype.itemsize, sizes.topk, **options)
        if new_plan is None:
            new_plan = operation in ("dispatch", "dispatch FP8")
        if kind == COMBINE:
            traffic = combine_traffic(sizes, counts, row)
        else:
            traffic = dispatch_traffic(sizes, counts, row, new_plan=new_plan)
        time = estimate_time(kind, sizes, traffic, self.machine, new_plan=new_plan, chunk_tokens=self.chunk_tokens)
        return traffic, time


def estimate(job: Job) -> dict:
    """Return an entry of "estimates" in the JSON, as docs/estimate.md describes it: bytes and microseconds."""
    sizes = job.sizes
    all_counts = [count(sizes, job.routing.sample(sizes, seed)) for seed in range(job.seeds)]
    costs = {name: [job.cost(name, counts) for counts in all_counts] for name in job.operations}
    return {
        "nodes": sizes.nodes,
        "ranks": sizes.ranks,
        "tokens_received": _spread([counts.received for counts in all_counts]),
        "expert_rows": _spread([counts.copies for counts in all_counts]),
        "operations": {name: _summary(found) for name, found in costs.items()},
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
