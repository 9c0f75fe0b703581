"""The model beside DeepEP's published figures, our runs on one node, and our runs between virtual nodes.

DeepEP's bandwidths count rows that stay on the own node (RDMA) or rank (NVLink) too. Here the model's bytes are counted
in the same way, and divided by the model's time. The runs between virtual nodes are of 2 nodes on 2 H200 of one host,
joined by NVLink. docs/performance.md says where the model is off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ep_dispatcher.tools.benchmark.cases import Case
from ep_dispatcher.tools.estimate import model
from ep_dispatcher.tools.estimate.model import COMBINE, DISPATCH, MACHINES, Machine, Time
from ep_dispatcher.tools.estimate.routing import Routing, Sizes
from ep_dispatcher.tools.estimate.run import Job
from ep_dispatcher.tools.estimate.traffic import Counts, Row, count

OPERATIONS = ("dispatch", "dispatch FP8", "combine", "cached dispatch")


@dataclass(frozen=True)
class Compared:
    """A figure that was published or measured, and the one of the model."""

    name: str
    unit: str
    given: float
    predicted: float
    time: Time
    fitted: bool = False  # whether a constant of the model was fitted to it

    @property
    def error(self) -> float:
        """Relative, above 0 where the model is too high."""
        return self.predicted / self.given - 1


@cache
def sampled(sizes: Sizes, routing: Routing) -> Counts:
    return count(sizes, routing.sample(sizes, 0))


# ---- DeepEP ---------------------------------------------------------------------------------------------------------

# DeepEP V1 has 12 channels on 24 multiprocessors, and sends a chunk of tokens in each: ``get_dispatch_config`` and
# ``get_combine_config`` of deep_ep/buffer.py, v1.2.1.
CHANNELS = 12


@dataclass(frozen=True)
class Published:
    """One figure: logical GB/s of 8-GPU nodes, hidden 7168, 256 experts, top-8, with a handle."""

    source: str
    nodes: int
    operation: str  # "dispatch" (float8 rows) or "combine" (bfloat16)
    gb_per_s: float
    chunk: int  # tokens of a channel's chunk
    num_sms: int = 24
    fitted: bool = False  # NIC_EFFICIENCY was fitted to it

    def compare(self) -> Compared:
        v1, is_combine = self.source.endswith("V1"), self.operation == COMBINE
        sizes = Sizes(self.nodes, 8, 4096 if v1 else 8192)
        counts = sampled(sizes, Routing(topk_groups=4 if v1 and self.nodes > 1 else None, group_score="max"))
        row_extra = 0 if v1 else 8 * (4 if is_combine else 12)  # bytes of weights and indices that V2 counts in a row
        row = replace(Row.make(sizes.hidden, 2, sizes.topk, float8=not is_combine), weights=row_extra)
        machine = MACHINES["H800"] if v1 else replace(MACHINES["H100"], name="SM90", num_sms=self.num_sms)
        job = Job(sizes, Routing(), machine, chunk_tokens=max(1, self.chunk * CHANNELS))
        _, time = job.cost("combine" if is_combine else "cached dispatch", counts, row)
        rows = counts.received if sizes.nodes == 1 else counts.nic_out + counts.own_node
        logical = float(rows.double().mean()) * (row.in_output + row_extra)
        name = f"{self.source}, EP {8 * self.nodes}, {self.operation}"
        return Compared(name, "GB/s", self.gb_per_s, logical / time.us / 1e3, time, self.fitted)


# V1: README of v1.2.1: H800, CX7 400 Gb/s, top-4 groups. V2: README of main: SM90, CX7, 8192 tokens, no limit of
# groups, int64 indices. It does not name its machine: at 8 x 2, 90 GB/s of RDMA are 254 GB/s of NVLink between GPUs,
# more than an H800 has, so 450 are assumed. It does not state the size of its chunks: V1's at the same EP is assumed.
PUBLISHED = (
    Published("DeepEP V1", 1, DISPATCH, 153, 0),
    Published("DeepEP V1", 1, COMBINE, 158, 0),
    Published("DeepEP V1", 2, DISPATCH, 43, 20),
    Published("DeepEP V1", 2, COMBINE, 43, 12),
    Published("DeepEP V1", 4, DISPATCH, 58, 32),
    Published("DeepEP V1", 4, COMBINE, 57, 8),
    Published("DeepEP V1", 8, DISPATCH, 51, 28),
    Published("DeepEP V1", 8, COMBINE, 50, 20, fitted=True),
    Published("DeepEP V2", 2, DISPATCH, 90, 20, num_sms=12),
    Published("DeepEP V2", 2, COMBINE, 81, 12, num_sms=12),
    Published("DeepEP V2", 4, DISPATCH, 61, 32, num_sms=6),
    Published("DeepEP V2", 4, COMBINE, 61, 8, num_sms=6),
)


# ---- our runs on one node -------------------------------------------------------------------------------------------


def compare_measured(folder: Path) -> Iterator[Compared]:
    """Compare the model with runs of our benchmark (``cuda-*.json`` in a folder): microseconds on one node of H200."""
    for path in sorted(folder.glob("cuda-*ranks-*sms.json")):
        run = json.loads(path.read_text())
        case = Case(**run["case"])
        sizes = Sizes(1, case.ranks, case.tokens, case.hidden, case.experts, case.topk)
        counts = count(sizes, (case.routing_on_host(rank)[0] for rank in range(case.ranks)))
        job = Job(sizes, Routing(), replace(MACHINES["H200"], num_sms=case.sms))
        name = f"{case.tokens} x {case.hidden}, {case.experts} experts, top-{case.topk}, {case.routing}, {case.sms} SMs"
        for operation in ("dispatch", "dispatch FP8", "cached dispatch", "combine"):
            measured = run["operations"].get(operation, {}).get("engine")
            if measured is not None:
                _, time = job.cost(operation, counts)
                us, fitted = measured["median_s"] * 1e6, _was_fitted(case, operation)
                yield Compared(f"{name}, {operation}", "us", us, time.us, time, fitted)


def _was_fitted(case: Case, operation: str) -> bool:
    if operation == "dispatch FP8":
        return False
    if (case.hidden, case.experts, case.topk, case.routing) == (7168, 256, 8, "uniform"):
        return case.sms == 24 or (case.sms in (8, 12, 16) and operation != "dispatch")
    return case.topk == 1 and operation == "cached dispatch"


# ---- our runs between virtual nodes ---------------------------------------------------------------------------------

NODES = 2
NVLINK, SOCKETS = 116.4, 2.005  # GB/s of NCCL, fitted to the cached dispatches of NCCL_RUNS
SHIPPED = (256, 256)  # chunks that buffers have: tokens of a dispatch, of a combine
LARGER = (1024, 512)
EARLIER = "earlier kernels"  # before rows and sums became bulk copies


@dataclass(frozen=True)
class Run:
    """Times of one setting on the peer wire, or over NCCL: 4096 tokens per rank, hidden 7168, 256 experts, top-8."""

    us: tuple[float | None, ...]  # microseconds, in the order of OPERATIONS; None or left out: not measured
    gb_per_s: float | None = None  # the pace of the wire, per rank and direction; None: NVLink without a pace
    sms: int = 24  # with those of the wire
    rail_sms: int = 4  # those of the wire; the model ignores them
    chunks: tuple[int, int] = LARGER  # tokens with a common flag: in a dispatch, in a combine
    layout: str = "expert"
    gpus_per_node: int = 1  # 2: each GPU has a rank of both nodes
    kernels: str = ""  # the build, if not that of the other runs
    nccl: str = ""  # over the NCCL wire: what NCCL sent through

    @property
    def name(self) -> str:
        if self.nccl:
            return f"{NODES} x {self.gpus_per_node}, NCCL wire over {self.nccl}"
        pace = "no pace" if self.gb_per_s is None else f"{self.gb_per_s:g} GB/s"
        chunks = "/".join(map(str, self.chunks))
        sms = f"{self.sms} SMs ({self.rail_sms} for the wire)"
        name = f"{NODES} x {self.gpus_per_node}, {pace}, {self.layout} layout, {sms}, chunks {chunks}"
        return f"{name}, {self.kernels}" if self.kernels else name

    def machine(self, kind: str) -> Machine:
        """Return the part of an H200 that a rank has, with the wire in place of a NIC."""
        h200 = replace(MACHINES["H200"], num_sms=self.sms)
        if self.gpus_per_node > 1:  # the ranks of a GPU share it; the wire is a copy inside, which reads and writes
            nvlink, hbm = h200.nvlink_gb_per_s / NODES, h200.hbm_gb_per_s / NODES
            rank = replace(h200, nvlink_gb_per_s=nvlink, hbm_gb_per_s=hbm)
            return replace(rank, nic_gbit_per_s=8 * hbm / 2, nic_efficiency=model.HBM_EFFICIENCY)
        if self.gb_per_s is None:
            return replace(h200, nic_gbit_per_s=8 * h200.nvlink_gb_per_s, nic_efficiency=model.NVLINK_EFFICIENCY[kind])
        return replace(h200, nic_gbit_per_s=8 * self.gb_per_s, nic_efficiency=1.0)  # a pace is exact


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

# The NCCL wire: build 99f9e51, 2 H200 of one host, PyTorch 2.11, NCCL 2.28.9 (`tests/nccl_wire.py 2 1 speed`).
NCCL_RUNS = (
    Run((888, None, 856, 793), NVLINK, nccl="NVLink, 16 SMs"),
    Run((31032, None, 32179, 29635), SOCKETS, nccl="sockets of one host"),
)


@cache
def compare_run(run: Run) -> dict[str, Compared]:
    """Compare the model with every time of a run, by operation. Only NVLINK and SOCKETS were fitted to these."""
    sizes, results = Sizes(NODES, run.gpus_per_node), {}
    counts = sampled(sizes, Routing())
    if run.layout == "rank":
        counts = replace(counts, copies=counts.received)  # a row for each token that a rank receives
    for operation, measured in zip(OPERATIONS, run.us):
        if measured is None:
            continue
        kind = COMBINE if operation == "combine" else DISPATCH
        job = Job(sizes, Routing(), run.machine(kind), chunk_tokens=run.chunks[kind == COMBINE])
        _, time = job.cost(operation, counts, nccl="exact" if run.nccl else None)
        fitted = bool(run.nccl) and operation == "cached dispatch"
        results[operation] = Compared(f"{run.name}, {operation}", "us", measured, time.us, time, fitted)
    return results
