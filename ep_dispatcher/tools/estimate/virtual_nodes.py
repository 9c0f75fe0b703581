"""The model beside our own runs between virtual nodes: 2 nodes on 2 H200 of one host, joined by NVLink.

Nothing was fitted to these figures. docs/performance.md says where the model is
off. All runs had 4096 tokens per rank, hidden 7168, 256 experts, top-8, bfloat16 or float8 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from ep_dispatcher.tools.estimate.model import COMBINE, DISPATCH, HBM_EFFICIENCY, MACHINES, NVLINK_EFFICIENCY, Machine
from ep_dispatcher.tools.estimate.published import Compared
from ep_dispatcher.tools.estimate.routing import Routing, Sizes
from ep_dispatcher.tools.estimate.run import Job
from ep_dispatcher.tools.estimate.traffic import Counts, count

NODES = 2
OPERATIONS = ("dispatch", "dispatch FP8", "combine", "cached dispatch")
SHIPPED = (256, 256)  # chunks that buffers have: tokens of a dispatch, of a combine
LARGER = (1024, 512)
EARLIER = "earlier kernels"  # before rows and sums became bulk copies


@dataclass(frozen=True)
class Run:
    """Times of one setting on the peer wire."""

    us: tuple[float, ...]  # microseconds, in the order of OPERATIONS; a cached dispatch may be left out
    gb_per_s: float | None = None  # the pace of the wire, per rank and direction; None: NVLink without a pace
    sms: int = 24  # with those of the wire
    rail_sms: int = 4  # those of the wire; the model ignores them
    chunks: tuple[int, int] = LARGER  # tokens with a common flag: in a dispatch, in a combine
    layout: str = "expert"
    gpus_per_node: int = 1  # 2: each GPU has a rank of both nodes
    kernels: str = ""  # the build, if not that of the other runs

    @property
    def name(self) -> str:
        pace = "no pace" if self.gb_per_s is None else f"{self.gb_per_s:g} GB/s"
        chunks = "/".join(map(str, self.chunks))
        sms = f"{self.sms} SMs ({self.rail_sms} for the wire)"
        name = f"{NODES} x {self.gpus_per_node}, {pace}, {self.layout} layout, {sms}, chunks {chunks}"
        return f"{name}, {self.kernels}" if self.kernels else name

    def machine(self, operation: str) -> Machine:
        """Return the part of an H200 that a rank has, with the wire in place of a NIC."""
        h200 = replace(MACHINES["H200"], num_sms=self.sms)
        if self.gpus_per_node > 1:  # the ranks of a GPU share it; the wire is a copy inside, which reads and writes
            nvlink, hbm = h200.nvlink_gb_per_s / NODES, h200.hbm_gb_per_s / NODES
            rank = replace(h200, nvlink_gb_per_s=nvlink, hbm_gb_per_s=hbm)
            return replace(rank, nic_gbit_per_s=8 * hbm / 2, nic_efficiency=HBM_EFFICIENCY)
        if self.gb_per_s is None:
            share = NVLINK_EFFICIENCY[kind_of(operation)]
            return replace(h200, nic_gbit_per_s=8 * h200.nvlink_gb_per_s, nic_efficiency=share)
        return replace(h200, nic_gbit_per_s=8 * self.gb_per_s, nic_efficiency=1.0)  # a pace is exact


def kind_of(operation: str) -> str:
    return COMBINE if operation == "combine" else DISPATCH


RUNS = (
    Run((503, 300, 581, 454)),
    Run((813, 474, 701, 724), gpus_per_node=2),
    Run((1285, 704, 1252), 50, 24, 4, SHIPPED),
    Run((1327, 741, 1276), 50, 12, 2, SHIPPED),
    Run((1336, 758, 1285), 50, 8, 2, SHIPPED, "rank"),
    Run((1335, 729, 1283), 50, 24, 4),
    Run((1408, 774, 1346), 50, 12, 2),
    Run((1651, 912, 1797), 50, 8, 2),
    Run((1991, 1093, 2390), 50, 6, 1),
    Run((3217, 1739, 3345), 50, 4, 1),
    Run((1388, 783, 1362), 50, 8, 2, layout="rank"),
    Run((1456, 839, 1415), 50, 6, 2, layout="rank"),
    Run((1704, 1022, 1884), 50, 4, 1, layout="rank"),
    Run((2493, 1328, 2455), 25, kernels=EARLIER),
    Run((1318, 718, 1286), 50, kernels=EARLIER),
    Run((734, 416, 695), 100, kernels=EARLIER),
)


@cache
def routing_of(gpus_per_node: int, layout: str) -> tuple[Sizes, Counts]:
    sizes = Sizes(NODES, gpus_per_node)
    counts = count(sizes, Routing().sample(sizes, seed=0))
    if layout == "rank":
        counts = replace(counts, copies=counts.received)  # a row for each token that a rank receives
    return sizes, counts


@cache
def compare_run(run: Run) -> dict[str, Compared]:
    """Compare the model with every time of a run, by operation, on one sampled routing."""
    (sizes, counts), results = routing_of(run.gpus_per_node, run.layout), {}
    for operation, measured in zip(OPERATIONS, run.us):
        chunk = run.chunks[kind_of(operation) == COMBINE]
        job = Job(sizes, Routing(), run.machine(operation), chunk_tokens=chunk)
        _, time = job.cost(operation, counts)
        results[operation] = Compared(f"{run.name}, {operation}", "us", measured, time.us, time, fitted=False)
    return results


def compare_virtual_nodes() -> list[Compared]:
    """Compare the model with all of ``RUNS``."""
    return [compared for run in RUNS for compared in compare_run(run).values()]
