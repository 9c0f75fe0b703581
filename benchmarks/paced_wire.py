"""Measures dispatch and combine between virtual nodes, with a wire that has the rate of a network card.

    python benchmarks/paced_wire.py                                    # 2 nodes, all GPUs
    CUDA_VISIBLE_DEVICES=0 python benchmarks/paced_wire.py --ranks-per-node 2    # 4 ranks on a GPU, under NVIDIA's MPS
    python benchmarks/paced_wire.py --draw runs/paced_wire.json        # only the table and the chart
    python benchmarks/paced_wire.py --only-at --sms 4,6,8,12 --rail-sms 1,2,3,4 --graphs 3 --seconds 80
    python benchmarks/paced_wire.py --layout rank --sms-at 8

The wire is the peer wire of the CUDA engine, paced by EP_DISPATCHER_WIRE_GBPS (docs/nodes.md): 50 GB/s per rank stand
for a card of 400 Gb/s. Ideally an operation takes no longer than its wire. So each time is compared with the wire's own
time: the bytes that the slowest rank sends to other nodes, rows and lists, over the rate. There are two series: all of
--sms at the rate of --at, and all of --rates with the multiprocessors of --sms-at. A time is that of one operation
among ten in a CUDA graph, on the slowest rank, the median of several graphs. Writes JSON, and beside it the chart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time as clock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import ep_dispatcher as ep
from ep_dispatcher import memory
from ep_dispatcher.engines import cuda_problem
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json
from ep_dispatcher.tools.benchmark.ranks import largest_over_ranks, most_rows
from ep_dispatcher.tools.testing import RankPool, make_routing

LIMIT = 1.1  # times the wire's own time: the limit at 50 GB/s
UNPACED = "unpaced"
TIMEOUT_S = 20.0  # of an operation
SIZES = ("tokens", "hidden", "experts", "topk", "layout")
COUNTERS = ("inter_node_bytes_sent", "inter_node_list_bytes_sent")
# For NVSHMEM on one host without a network card, as in the tests of its wire.
OF_NVSHMEM = dict(REMOTE_TRANSPORT="none", BOOTSTRAP_UID_SOCK_IFNAME="lo")
OF_NVSHMEM |= dict(DISABLE_NVLS="1", DISABLE_MNNVL="1", DISABLE_NCCL="1")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.draw:
        print(table(json.loads(args.draw.read_text())))
        return draw(args.draw)
    problem = cuda_problem()
    if problem:
        print(f"engine: given none that can run, because {problem}; allowed: the CUDA engine, whose wire has a pace")
        return 2
    run = measure_all(args)
    print(f"{table(run)}\nwritten: {args.out}")
    return draw(args.out)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--nodes", type=_number(int, 2), default=2, help="virtual nodes; default 2")
    add("--ranks-per-node", type=_number(int, 1), help="default: as many as give each rank a GPU, or 1")
    add(
        "--wire",
        choices=("peer", "nvshmem", "nvshmem-puts"),
        default="peer",
        help="NVSHMEM has no pace: measured as it is",
    )
    add("--sms", type=_numbers(int, 2), default=[2, 4, 6, 8, 12, 24], help="multiprocessors of a rank, as 2,4,6")
    add("--at", type=_number(float, 1e-3), default=50.0, help="GB/s for all of --sms; default 50")
    add("--rates", type=_numbers(float, 1e-3), default=[25.0, 50.0, 100.0, 200.0, 300.0], help="GB/s, as 25,50")
    add("--sms-at", type=_numbers(int, 2), default=[8, 24], help="multiprocessors for all of --rates; default 8,24")
    add("--rail-sms", type=_numbers(int, 1), help="of them for the wire, as 1,2; default: as the engine chooses")
    add("--only-at", action="store_true", help="measure against --sms alone")
    add(
        "--chunks",
        type=_numbers(int, 16),
        nargs="+",
        default=[None],
        metavar="ROWS,SUMS,WINDOW",
        help="tokens with a common flag: of rows, of sums that cross, of partial sums (a multiple of 16), the first "
        "two powers of two; default: as the engine chooses, 256,256,256 with 2 nodes of several ranks",
    )
    add("--seconds", type=_number(float, 1), default=float("inf"), help="begin no further point after these")
    add("--layout", choices=("expert", "rank"), default="expert", help="a row per expert, or one per rank")
    add("--tokens", type=_number(int, 1), default=4096)
    add("--hidden", type=_number(int, 128), default=7168)
    add("--experts", type=_number(int, 1), default=256)
    add("--topk", type=_number(int, 1), default=8)
    add("--graphs", type=_number(int, 3), default=10, help="timed graphs of ten; fewer where they take long")
    add("--out", type=Path, default=Path("runs/paced_wire.json"))
    add("--draw", type=Path, metavar="JSON", help="draw this file, without a measurement")
    return parser.parse_args(argv)


def _number(kind: Callable, lowest: float) -> Callable:
    def parse(text: str):
        value = kind(text)
        if not lowest <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"given {text}, allowed: from {lowest:g} on")
        return value

    parse.__name__ = kind.__name__
    return parse


def _numbers(kind: Callable, lowest: float) -> Callable:
    one = _number(kind, lowest)

    def parse(text: str) -> list:
        return [one(part) for part in text.split(",")]

    parse.__name__ = f"numbers of kind {kind.__name__}"
    return parse


class Point(NamedTuple):
    """The settings of one measurement."""

    sms: int
    rate: float | None  # GB/s; None: no pace
    rail_sms: int | None = None  # None: as the engine chooses
    chunks: tuple[int, ...] | None = None  # of --chunks


def points_of(args: argparse.Namespace) -> list[Point]:
    """Return all points, each once."""
    pairs = [(sms, args.at if args.wire == "peer" else None) for sms in args.sms]
    if args.wire == "peer" and not args.only_at:
        pairs += [(sms, rate) for sms in args.sms_at for rate in (*args.rates, None)]
    points = [
        Point(sms, rate, rail_sms, chunks and tuple(chunks))
        for sms, rate in pairs
        for rail_sms in args.rail_sms or [None]
        for chunks in args.chunks
        if rail_sms is None or rail_sms < sms
    ]
    return list(dict.fromkeys(points))


def measure_all(args: argparse.Namespace) -> dict:
    """Return the content of the JSON. Write it after each point, so that an abort loses one point only."""
    per_node = args.ranks_per_node or max(1, torch.cuda.device_count() // args.nodes)
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # ranks may share a GPU
    if args.wire != "peer":
        for name, value in OF_NVSHMEM.items():
            os.environ.setdefault(f"NVSHMEM_{name}", value)
    sizes = {name: getattr(args, name) for name in SIZES}
    run = {"machine": describe_machine(), "wire": args.wire, "nodes": args.nodes, "ranks_per_node": per_node}
    run |= {**sizes, "at": args.at, "points": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    begin = clock.monotonic()
    with RankPool(args.nodes * per_node) as pool:
        for point in points_of(args):
            if clock.monotonic() - begin > args.seconds:
                print(f"{args.seconds:g} s are over: the rest is left out")
                break
            print(f"{point.sms} multiprocessors, {_rate(point.rate)}", flush=True)
            of_ranks = pool.run(measure, per_node, args.wire, point, sizes, args.graphs)
            run["points"] += merge(of_ranks, point.sms, point.rate, point.chunks)
            args.out.write_text(to_json(run))
    return run


def merge(of_ranks: list[dict], sms: int, rate: float | None, chunks: tuple[int, ...] | None = None) -> list[dict]:
    """Merge the results of all ranks for one point: for each operation the slowest rank, and the most bytes."""
    points = []
    for operation in of_ranks[0]["operations"]:
        found = [rank["operations"][operation] for rank in of_ranks]
        times = [max(of_one) for of_one in zip(*(f["us"] for f in found), strict=True)]
        num_bytes = max(f["bytes"] for f in found)
        point = dict(sms=sms, rail_sms=of_ranks[0]["rail_sms"], gb_per_s=rate, operation=operation)
        point |= dict(us=round(statistics.median(times), 2), least_us=round(min(times), 2), bytes=num_bytes)
        if rate:
            point["wire_us"] = round(num_bytes / rate / 1e3, 2)
            point["ratio"] = round(point["us"] / point["wire_us"], 4)
        if chunks:
            point["chunks"] = list(chunks)
        points.append(point)
    return points


# ---- one rank -------------------------------------------------------------------------------------------------------


@contextmanager
def switches(**values: object) -> Iterator[None]:
    """Set EP_DISPATCHER_* switches; None leaves one as it is."""
    given = {f"EP_DISPATCHER_{name}": str(value) for name, value in values.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def chunks_of(chunks: tuple[int, ...] | None) -> Iterator[None]:
    """Give buffers that are made inside these chunks, those of --chunks."""
    names = ("token_chunk", "sum_chunk", "window_chunk")
    before = {name: getattr(memory.Shape, name) for name in names}
    for name, value in zip(names, chunks or ()):
        setattr(memory.Shape, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(memory.Shape, name, value)


def measure(rank: int, per_node: int, wire: str, point: Point, sizes, graphs):
    """Return the microseconds of each graph's operations on this rank, and the bytes of one."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    tokens, hidden, experts, topk, layout = (sizes[name] for name in SIZES)
    idx, weights = (t.cuda() for t in make_routing("uniform", tokens, experts, topk, seed=rank))
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    with switches(WIRE=wire, WIRE_GBPS=point.rate, RAIL_SMS=point.rail_sms), chunks_of(point.chunks):
        buffer = ep.Buffer(
            hidden=hidden,
            num_experts=experts,
            num_topk=topk,
            max_tokens_per_rank=tokens,
            engine="cuda",
            ranks_per_node=per_node,
            num_sms=point.sms,
            timeout_s=TIMEOUT_S,
        )
    with buffer, torch.no_grad():
        found = re.search(r"(?:(\d+) or )?(\d+) of them for the (\w+) wire", repr(buffer))
        assert found and found[3].lower() == wire.removesuffix("-puts"), f"one node, or another wire: {buffer!r}"
        operations = {
            name: {"bytes": sent_by(buffer, run), "us": time(run, graphs)}
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
    return {
        "dispatch": lambda: buffer.dispatch(x, idx, weights, **given),
        "dispatch FP8": lambda: buffer.dispatch(pair, idx, weights, **given),
        "combine": lambda: buffer.combine(y, handle),
    }


def sent_by(buffer: ep.Buffer, run: Callable[[], object]) -> int:
    """Return the bytes that this rank sends to other nodes, lists included. This is the warm-up too."""

    def sent() -> int:
        counters = buffer.counters()
        return sum(sum(counters[name]) for name in COUNTERS)

    run()
    before = sent()
    run()
    return sent() - before


def time(run: Callable[[], object], graphs: int, budget_s: float = 0.3) -> list[float]:
    from compare_builds import IN_A_ROW, on_device

    replay = on_device(run)
    dist.barrier()
    took = largest_over_ranks([replay() * IN_A_ROW / 1e6])[0]
    return [replay() for _ in range(max(3, min(graphs, int(budget_s / took))))]


# ---- the table and the chart ----------------------------------------------------------------------------------------


def table(run: dict) -> str:
    """Return all points as a table for docs/performance.md, with the machine above it."""
    machine = run["machine"]
    ranks = f"{run['nodes']} virtual nodes of {run['ranks_per_node']} on {len(machine['gpus'])} x {machine['gpus'][0]}"
    sizes = f"{run['tokens']} tokens per rank, hidden {run['hidden']}, {run['experts']} experts, top-{run['topk']}"
    sizes += f", {run['layout']} layout"
    lines = [f"{ranks}, {run['wire']} wire, {sizes}, build {machine['git_commit']}, {machine['date'][:10]}:", ""]
    titles = ("operation", "SMs", "for the wire", "GB/s", "us", "MB sent", "wire alone, us", "ratio")
    has_chunks = any("chunks" in p for p in run["points"])
    titles += ("chunks",) * has_chunks
    lines += [_row(titles), _row(["---"] * len(titles))]
    for p in sorted(run["points"], key=_order):
        figures = [f"{p['wire_us']:.0f}", f"{p['ratio']:.2f}"] if p["gb_per_s"] else ["", ""]
        rate = _rate(p["gb_per_s"]).removesuffix(" GB/s")
        cells = [p["operation"], p["sms"], p["rail_sms"], rate, f"{p['us']:.0f}", f"{p['bytes'] / 1e6:.1f}"]
        chunks = ["/".join(map(str, p.get("chunks", ["default"])))] * has_chunks
        lines.append(_row([*cells, *figures, *chunks]))
    return "\n".join(lines)


def _order(point: dict) -> tuple:
    names = ("dispatch", "dispatch FP8", "combine")
    rate = point["gb_per_s"] or float("inf")
    return names.index(point["operation"]), point["sms"], rate, point["rail_sms"], point.get("chunks", [])


def _row(cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _rate(rate: float | None) -> str:
    return UNPACED if rate is None else f"{rate:g} GB/s"


def draw(path: Path) -> int:
    try:
        import charts
    except ImportError:
        print("no chart: matplotlib is missing (pip install matplotlib)")
        return 0
    print(f"chart: {charts.draw_paced(json.loads(path.read_text()), LIMIT, path.with_suffix('.svg'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
