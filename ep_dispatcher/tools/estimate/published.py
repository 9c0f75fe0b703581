"""The model beside figures of others, and beside our own measurements.

DeepEP's bandwidths count rows that stay on the own node (RDMA) or rank (NVLink) too. Here the model's bytes are counted
in the same way, and divided by the model's time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ep_dispatcher.tools.benchmark.cases import Case
from ep_dispatcher.tools.estimate.model import COMBINE, DISPATCH, MACHINES, Machine, Time, estimate_time
from ep_dispatcher.tools.estimate.routing import Routing, Sizes
from ep_dispatcher.tools.estimate.traffic import Counts, Row, combine_traffic, count, dispatch_traffic

# DeepEP V1 has 12 channels on 24 multiprocessors, and sends a chunk of tokens in each: ``get_dispatch_config`` and
# ``get_combine_config`` of deep_ep/buffer.py, v1.2.1.
CHANNELS = 12
FITTED = (8, COMBINE)  # (nodes, operation) of V1 that NIC_EFFICIENCY was fitted to


@dataclass(frozen=True)
class Published:
    """One figure: logical GB/s of 8-GPU nodes, hidden 7168, 256 experts, top-8."""

    source: str
    nodes: int
    operation: str  # "dispatch" (float8 rows) or "combine" (bfloat16)
    gb_per_s: float
    machine: Machine
    chunk_tokens: int
    tokens: int = 4096
    topk_groups: int | None = 4
    row_extra: int = 0  # bytes of indices and weights that the source counts in a row
    fitted: bool = False  # NIC_EFFICIENCY was fitted to it

    @property
    def name(self) -> str:
        return f"{self.source}, EP {8 * self.nodes}, {self.operation}"


def _deep_ep_v1() -> list[Published]:
    """Return the figures of v1.2.1's README: H800, CX7 400 Gb/s, top-4 groups, 24 multiprocessors, with a handle."""
    rows = [(1, 153, 158, 0, 0), (2, 43, 43, 20, 12), (4, 58, 57, 32, 8), (8, 51, 50, 28, 20)]
    return [
        Published(
            "DeepEP V1",
            nodes,
            operation,
            figure,
            MACHINES["H800"],
            max(1, chunk * CHANNELS),
            fitted=(nodes, operation) == FITTED,
        )
        for nodes, *figures, first, second in rows
        for operation, figure, chunk in zip((DISPATCH, COMBINE), figures, (first, second))
    ]


def _deep_ep_v2() -> list[Published]:
    """Return the figures of main's README: SM90, CX7, 8192 tokens, no limit of groups.

    Its bytes include weights and, in a dispatch, int64 indices. It does not name its machine. At 8 x 2, 90 GB/s of RDMA
    are 254 GB/s of NVLink between GPUs, more than an H800 has. So 450 GB/s are assumed. It does not state the size of
    its chunks either: V1's at the same EP is assumed.
    """
    rows = [(2, 90, 81, 12, 20, 12), (4, 61, 61, 6, 32, 8)]
    return [
        Published(
            "DeepEP V2",
            nodes,
            operation,
            figure,
            replace(MACHINES["H100"], name="SM90", num_sms=num_sms),
            chunk * CHANNELS,
            tokens=8192,
            topk_groups=None,
            row_extra=8 * (12 if operation == DISPATCH else 4),
        )
        for nodes, *figures, num_sms, first, second in rows
        for operation, figure, chunk in zip((DISPATCH, COMBINE), figures, (first, second))
    ]


PUBLISHED = (*_deep_ep_v1(), *_deep_ep_v2())


@dataclass(frozen=True)
class Compared:
    """A figure that was published or measured, and the one of the model."""

    name: str
    unit: str
    given: float
    predicted: float
    time: Time
    fitted: bool

    @property
    def error(self) -> float:
        """Relative, above 0 where the model is too high."""
        return self.predicted / self.given - 1


def compare_published(seed: int = 0) -> list[Compared]:
    """Compare the model with every figure of ``PUBLISHED``, on one sampled routing each."""
    counted: dict[tuple, tuple[Sizes, Counts]] = {}
    results = []
    for figure in PUBLISHED:
        key = (figure.nodes, figure.tokens, figure.topk_groups)
        if key not in counted:
            sizes = Sizes(figure.nodes, 8, figure.tokens)
            limited = figure.topk_groups if figure.nodes > 1 else None
            counted[key] = sizes, count(sizes, Routing(topk_groups=limited, group_score="max").sample(sizes, seed))
        results.append(_compare(figure, *counted[key]))
    return results


def _compare(figure: Published, sizes: Sizes, counts: Counts) -> Compared:
    row = replace(Row.make(sizes.hidden, 2, sizes.topk, float8=figure.operation == DISPATCH), weights=figure.row_extra)
    make = combine_traffic if figure.operation == COMBINE else dispatch_traffic
    given = {} if figure.operation == COMBINE else {"new_plan": False}
    traffic = make(sizes, counts, row, **given)
    time = estimate_time(figure.operation, sizes, traffic, figure.machine, chunk_tokens=figure.chunk_tokens)
    rows = counts.received if sizes.nodes == 1 else counts.nic_out + counts.own_node
    logical = float(rows.double().mean()) * (row.in_output + figure.row_extra)
    return Compared(figure.name, "GB/s", figure.gb_per_s, logical / time.us / 1e3, time, figure.fitted)


def compare_measured(folder: Path) -> list[Compared]:
    """Compare the model with runs of our benchmark (``cuda-*.json`` in a folder): microseconds on one node of H200."""
    results = []
    for path in sorted(folder.glob("cuda-*ranks-*sms.json")):
        run = json.loads(path.read_text())
        fields = run["case"]
        case = Case(
            **{name: fields[name] for name in ("ranks", "tokens", "hidden", "experts", "topk", "routing", "sms")}
        )
        sizes = Sizes(1, case.ranks, case.tokens, case.hidden, case.experts, case.topk)
        counts = count(sizes, (case.routing_on_host(rank)[0] for rank in range(case.ranks)))
        machine = replace(MACHINES["H200"], num_sms=case.sms)
        for operation in ("dispatch", "dispatch FP8", "cached dispatch", "combine"):
            measured = run["operations"].get(operation, {}).get("engine")
            if measured is None:
                continue
            row = Row.make(
                sizes.hidden, 2, sizes.topk, float8=operation == "dispatch FP8", weights=operation != COMBINE
            )
            if operation == COMBINE:
                time = estimate_time(COMBINE, sizes, combine_traffic(sizes, counts, row), machine)
            else:
                new_plan = operation != "cached dispatch"
                traffic = dispatch_traffic(sizes, counts, row, new_plan=new_plan)
                time = estimate_time(DISPATCH, sizes, traffic, machine, new_plan=new_plan)
            name = "{tokens} x {hidden}, {experts} experts, top-{topk}, {routing}, {sms} SMs".format(**fields)
            results.append(
                Compared(
                    f"{name}, {operation}",
                    "us",
                    measured["median_s"] * 1e6,
                    time.us,
                    time,
                    _was_fitted(case, operation),
                )
            )
    return results


def _was_fitted(case: Case, operation: str) -> bool:
    """Return whether a constant of the model was fitted to this figure."""
    if operation not in ("cached dispatch", "combine", "dispatch"):
        return False
    standard = (case.hidden, case.experts, case.topk, case.routing) == (7168, 256, 8, "uniform")
    if standard:
        return case.sms == 24 or (case.sms in (8, 12, 16) and operation != "dispatch")
    return case.topk == 1 and operation == "cached dispatch"
