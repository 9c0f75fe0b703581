"""Measures dispatch and combine between virtual nodes, with a wire that has the rate of a network card.

    EP_DISPATCHER_CUDA=1 EP_DISPATCHER_PACE=1 python setup.py build_ext --inplace      # a wire with a pace
    python benchmarks/paced_wire.py                                    # 2 nodes, all GPUs
    CUDA_VISIBLE_DEVICES=0 python benchmarks/paced_wire.py --ranks-per-node 2    # 4 ranks on a GPU, under NVIDIA's MPS
    python benchmarks/paced_wire.py --draw runs/paced_wire.json        # only the table and the chart
    python benchmarks/paced_wire.py --only-at --sms 4,6,8,12 --rail-sms 1,2,3,4 --graphs 3 --seconds 80
    python benchmarks/paced_wire.py --layout rank --sms-at 8

The wire is the peer wire of the CUDA engine, paced by EP_DISPATCHER_WIRE_GBPS (docs/performance.md): 50 GB/s per rank
stand for a card of 400 Gb/s. Ideally an operation takes no longer than its wire. So each time is compared with the
wire's own time: the bytes that the slowest rank sends to other nodes, rows and lists, over the rate. There are two
series: all of --sms at the rate of --at, and all of --rates with the multiprocessors of --sms-at. A time is that of one
operation among ten in a CUDA graph, on the slowest rank, the median of several graphs. Writes JSON, and beside it the
chart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import ep_dispatcher as ep
from ep_dispatcher import memory
from ep_dispatcher.tools.benchmark.cases import inputs_of
from ep_dispatcher.tools.benchmark.harness import (
    IN_A_ROW,
    draw,
    make_parser,
    number,
    numbers,
    on_device,
    start_gpu_ranks,
    table,
    use_gpu,
)
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json
from ep_dispatcher.tools.benchmark.ranks import largest_over_ranks, most_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMIT = 1.1  # times the wire's own time: the limit at 50 GB/s
TIMEOUT_S, BUDGET_S = 20.0, 0.3  # of an operation; of its graphs
SIZES = ("tokens", "hidden", "experts", "topk", "layout")
OPERATIONS = ("dispatch", "dispatch FP8", "combine")
# For NVSHMEM on one host without a network card, as in the tests of its wire.
OF_NVSHMEM = dict(REMOTE_TRANSPORT="none", BOOTSTRAP_UID_SOCK_IFNAME="lo")
OF_NVSHMEM |= dict(DISABLE_NVLS="1", DISABLE_MNNVL="1", DISABLE_NCCL="1")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if not args.draw:
        measure_all(args)
    path = args.draw or args.out
    run = json.loads(path.read_text())
    print(report(run))
    draw(path.with_suffix(".svg"), (5.7 * (1 + len(sms_of_rates(run))), 4.8), partial(fill, run))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, tokens=4096, hidden=7168, experts=256, topk=8, graphs=10)
    add, chunks = parser.add_argument, numbers(int, 16)
    add("--nodes", type=number(int, 2), default=2, help="virtual nodes")
    add("--ranks-per-node", type=number(int, 1), help="None: as many as give each rank a GPU, or 1")
    add("--wire", choices=("peer", "nvshmem", "nvshmem-puts"), default="peer", help="NVSHMEM has no pace")
    add("--sms", type=numbers(int, 2), default=[2, 4, 6, 8, 12, 24], help="multiprocessors of a rank, as 2,4,6")
    add("--at", type=number(float, 1e-3), default=50.0, help="GB/s for all of --sms")
    add("--rates", type=numbers(float, 1e-3), default=[25.0, 50.0, 100.0, 200.0, 300.0], help="GB/s, as 25,50")
    add("--sms-at", type=numbers(int, 2), default=[8, 24], help="multiprocessors for all of --rates")
    add("--rail-sms", type=numbers(int, 1), default=[None], help="of them for the wire, as 1,2; None: the engine's")
    add("--only-at", action="store_true", help="measure against --sms alone")
    about = "tokens with a common flag: of rows, of sums that cross, of partial sums (a multiple of 16), the first two "
    about += "powers of two; None: the engine's"
    add("--chunks", type=chunks, nargs="+", default=[None], metavar="ROWS,SUMS,WINDOW", help=about)
    add("--seconds", type=number(float, 1), default=float("inf"), help="begin no further point after these")
    add("--layout", choices=("expert", "rank"), default="expert", help="a row per expert, or one per rank")
    add("--out", type=Path, default=Path("runs/paced_wire.json"), help="JSON; the chart is beside it")
    add("--draw", type=Path, metavar="JSON", help="draw this file, without a measurement")
    return parser.parse_args(argv)


class Point(NamedTuple):
    """The settings of one measurement; None: as the engine chooses, and no pace."""

    sms: int
    rate: float | None  # GB/s
    rail_sms: int | None = None
    chunks: tuple[int, ...] | None = None  # of --chunks


def points_of(args: argparse.Namespace) -> list[Point]:
    """Return all points, each once."""
    pairs = [(sms, args.at if args.wire == "peer" else None) for sms in args.sms]
    if args.wire == "peer" and not args.only_at:
        pairs += [(sms, rate) for sms in args.sms_at for rate in (*args.rates, None)]
    points = [
        Point(sms, rate, rail_sms, chunks and tuple(chunks))
        for sms, rate in pairs
        for rail_sms in args.rail_sms
        for chunks in args.chunks
        if rail_sms is None or rail_sms < sms
    ]
    return list(dict.fromkeys(points))


def measure_all(args: argparse.Namespace) -> None:
    """Write the JSON after each point, so that an abort loses one point only."""
    per_node = args.ranks_per_node or max(1, torch.cuda.device_count() // args.nodes)
    if args.wire != "peer":
        for name, value in OF_NVSHMEM.items():
            os.environ.setdefault(f"NVSHMEM_{name}", value)
    sizes = {name: getattr(args, name) for name in SIZES}
    run = {"machine": describe_machine(), "wire": args.wire, "nodes": args.nodes, "ranks_per_node": per_node}
    run |= {**sizes, "at": args.at, "points": []}
    begin = time.monotonic()
    built_with = "PACE" if args.wire == "peer" else None
    with start_gpu_ranks(args.nodes * per_node, built_with=built_with) as pool:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        for point in points_of(args):
            if time.monotonic() - begin > args.seconds:
                print(f"{args.seconds:g} s are over: the rest is left out")
                break
            print(f"{point.sms} multiprocessors, {rate_of(point.rate)} GB/s", flush=True)
            run["points"] += merge(pool.run(measure, per_node, args.wire, point, sizes, args.graphs), point)
            args.out.write_text(to_json(run))


def merge(of_ranks: list[dict], point: Point) -> list[dict]:
    """Merge the results of all ranks for one point: for each operation the slowest rank, and the most bytes."""
    points = []
    for operation in of_ranks[0]["operations"]:
        found = [rank["operations"][operation] for rank in of_ranks]
        times = [max(of_one) for of_one in zip(*(f["us"] for f in found), strict=True)]
        num_bytes = max(f["bytes"] for f in found)
        made = dict(sms=point.sms, rail_sms=of_ranks[0]["rail_sms"], gb_per_s=point.rate, operation=operation)
        made |= dict(us=round(statistics.median(times), 2), least_us=round(min(times), 2), bytes=num_bytes)
        if point.rate:
            made["wire_us"] = round(num_bytes / point.rate / 1e3, 2)
            made["ratio"] = round(made["us"] / made["wire_us"], 4)
        points.append(made | (dict(chunks=list(point.chunks)) if point.chunks else {}))
    return points


# ---- one rank -------------------------------------------------------------------------------------------------------


@contextmanager
def settings(wire: str, point: Point) -> Iterator[None]:
    """Give buffers that are made inside this wire, and what the point says."""
    switches = dict(WIRE=wire, WIRE_GBPS=point.rate, RAIL_SMS=point.rail_sms)
    given = {f"EP_DISPATCHER_{name}": str(value) for name, value in switches.items() if value is not None}
    usual = {name: getattr(memory.Shape, name) for name in ("token_chunk", "sum_chunk", "window_chunk")}
    chunks = dict(zip(usual, point.chunks or usual.values()))
    with mock.patch.dict(os.environ, given), mock.patch.multiple(memory.Shape, **chunks):
        yield


def measure(rank: int, per_node: int, wire: str, point: Point, sizes: dict, graphs: int) -> dict:
    """Return the microseconds of each graph's operations on this rank, and the bytes of one."""
    device, (tokens, hidden, experts, topk, layout) = use_gpu(rank), (sizes[name] for name in SIZES)
    x, idx, weights = inputs_of(rank, device, tokens, hidden, experts, topk)
    shape = dict(hidden=hidden, num_experts=experts, num_topk=topk, max_tokens_per_rank=tokens)
    with settings(wire, point):
        placed = dict(ranks_per_node=per_node, num_sms=point.sms)
        buffer = ep.Buffer(engine="cuda", timeout_s=TIMEOUT_S, **placed, **shape)
    with buffer, torch.no_grad():
        found = re.search(r"(?:(\d+) or )?(\d+) of them for the (\w+) wire", repr(buffer))
        assert found and found[3].lower() == wire.removesuffix("-puts"), f"one node, or another wire: {buffer!r}"
        operations = {
            name: {"bytes": sent_by(buffer, run), "us": times_of(run, graphs)}
            for name, run in operations_of(buffer, x, idx, weights, layout).items()
        }
        buffer.check()
    rail_sms = int(found[2] if layout == "rank" else found[1] or found[2])  # rank layout has more, or as many
    return {"rail_sms": rail_sms, "operations": operations}


def operations_of(buffer: ep.Buffer, x, idx, weights, layout: str) -> dict[str, Callable[[], object]]:
    """Return the operations by name. All ranks give the number of output rows, so no host waits."""
    received = buffer.dispatch(x, idx, weights, layout=layout)
    rows = most_rows(received)
    given = dict(layout=layout, max_recv_rows=rows)
    pair, handle = ep.quantize(x), buffer.dispatch(x, idx, weights, **given).handle
    y = x.new_zeros(rows, x.shape[1])
    y[: len(received.x)] = received.x
    runs = (partial(buffer.dispatch, rows, idx, weights, **given) for rows in (x, pair))
    return dict(zip(OPERATIONS, (*runs, partial(buffer.combine, y, handle)), strict=True))


def sent_by(buffer: ep.Buffer, run: Callable[[], object]) -> int:
    """Return the bytes that this rank sends to other nodes, lists included. This is the warm-up too."""

    def sent() -> int:
        counters = buffer.counters()
        return sum(sum(counters[name]) for name in ("inter_node_bytes_sent", "inter_node_list_bytes_sent"))

    run()
    before = sent()
    run()
    return sent() - before


def times_of(run: Callable[[], object], graphs: int) -> list[float]:
    """Return the microseconds of so many graphs, fewer where they take long."""
    replay = on_device(run)
    dist.barrier()
    took = largest_over_ranks([replay() * IN_A_ROW / 1e6])[0]
    return [replay() for _ in range(max(3, min(graphs, int(BUDGET_S / took))))]


# ---- the table and the chart ----------------------------------------------------------------------------------------


def title(run: dict) -> str:
    machine = run["machine"]
    ranks = f"{run['nodes']} virtual nodes of {run['ranks_per_node']} on {len(machine['gpus'])} x {machine['gpus'][0]}"
    sizes = f"{run['tokens']} tokens per rank, hidden {run['hidden']}, {run['experts']} experts, top-{run['topk']}"
    build = f"build {machine['git_commit']}, {machine['date'][:10]}"
    return f"{ranks}, {run['wire']} wire, {sizes}, {run['layout']} layout, {build}"


def report(run: dict) -> str:
    """Return all points as a table, with the machine above it."""
    titles = ("operation", "SMs", "for the wire", "GB/s", "us", "MB sent", "wire alone, us", "ratio", "chunks")

    def order(p: dict) -> tuple:
        where = p["gb_per_s"] or float("inf"), p["rail_sms"], p.get("chunks", [])
        return OPERATIONS.index(p["operation"]), p["sms"], *where

    rows = []
    for p in sorted(run["points"], key=order):
        ratio = (f"{p['wire_us']:.0f}", f"{p['ratio']:.2f}") if p["gb_per_s"] else ("", "")
        chunks = "/".join(map(str, p.get("chunks", ["default"])))
        moved = (rate_of(p["gb_per_s"]), f"{p['us']:.0f}", f"{p['bytes'] / 1e6:.1f}")
        rows.append((p["operation"], p["sms"], p["rail_sms"], *moved, *ratio, chunks))
    return "\n".join([f"{title(run)}:", "", *table(titles, rows)])


def rate_of(rate: float | None) -> str:
    return "unpaced" if rate is None else f"{rate:g}"


def sms_of_rates(run: dict) -> list[int]:
    """Return the multiprocessors of the points at other rates than --at."""
    return sorted({p["sms"] for p in run["points"] if p["gb_per_s"] and p["gb_per_s"] != run["at"]})


def fill(run: dict, figure: Figure) -> None:
    """Draw time against multiprocessors, and time over the wire's own against its rate."""
    points, counts, paced = run["points"], sms_of_rates(run), run["wire"] == "peer"
    at = [p for p in points if p["gb_per_s"] == (run["at"] if paced else None)]
    of_sms, *of_rates = figure.subplots(1, 1 + len(counts), squeeze=False)[0]
    for n, operation in enumerate(OPERATIONS):
        # Of several points with the same multiprocessors the fastest.
        best = {p["sms"]: p for p in sorted(at, key=lambda p: -p["us"]) if p["operation"] == operation}
        of_sms.plot(sorted(best), [best[sms]["us"] for sms in sorted(best)], "o-", color=f"C{n}", label=operation)
        for wire_us in {p["wire_us"] for p in best.values() if "wire_us" in p}:
            of_sms.axhline(LIMIT * wire_us, linestyle="--", linewidth=1, color=f"C{n}")
        for axes, sms in zip(of_rates, counts):
            mine = [p for p in points if p["operation"] == operation and p["sms"] == sms and p["gb_per_s"]]
            ratios = sorted((p["gb_per_s"], p["ratio"]) for p in mine)
            axes.plot(*zip(*ratios), "o-", color=f"C{n}", label=operation)
    of_sms.set(title=f"{run['at']:g} GB/s; dashed: {LIMIT:g} x the wire alone" if paced else "no pace")
    of_sms.set(xlabel="multiprocessors, those of the wire too", ylabel="microseconds (less is better)")
    for axes, sms in zip(of_rates, counts):
        axes.axhline(LIMIT, linestyle="--", linewidth=1, color="grey")
        axes.set(title=f"{sms} multiprocessors", xlabel="GB/s of the wire, per rank")
        axes.set(ylabel="times the wire alone (1 is best)")
    for axes in (of_sms, *of_rates):
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    figure.suptitle(title(run), fontsize=10)


if __name__ == "__main__":
    sys.exit(main())
