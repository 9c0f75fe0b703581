"""Draws the time line of one operation: when each role of its kernels ends each step, by the GPU's clock.

    EP_DISPATCHER_CUDA=1 EP_DISPATCHER_STAMPS=1 python setup.py build_ext --inplace      # kernels with stamps
    python benchmarks/time_line.py dispatch "dispatch FP8" combine                       # decode layout, 128 tokens
    python benchmarks/time_line.py "dispatch FP8" --tokens 4096 --layout rank --ranks 2 --ranks-per-node 1  # 2 nodes
    python benchmarks/time_line.py --draw runs/time_line/dispatch.json                   # only the table and the chart

Operations run one after the other in a CUDA graph, so ranks are in step; the first ones do not count. A stamp is the
time at which a warp ends a step. A lane is a role: warps of a block with a common job (docs/design.md). Block 0 has its
own lanes, because it announces the operation. A step lasts from the warp's previous stamp to its own, so a wait counts
for the step that it delays. Times are microseconds from the first stamp of the operation, on the slowest rank: medians
over warps, then over operations. `last` is the last warp. An operation in two launches has lanes for each of them.
The chart shows one operation, that of the median time. Stamps cost a little time: compare `one operation` with a build
without them. Writes JSON and SVG.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.tools.benchmark.cases import inputs_of
from ep_dispatcher.tools.benchmark.harness import draw, make_parser, number, on_device, start_gpu_ranks, table, use_gpu
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json
from ep_dispatcher.tools.benchmark.ranks import most_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATIONS = ("dispatch", "dispatch FP8", "dispatch, quantize", "combine")
# The warps of each role: PullWarps and StageWarps of dispatch.cuh, and Pipeline::role.
ROLES = {
    "dispatch": {"pull warps": range(0, 8), "stage warps": range(8, 20)},
    "combine": {"preparing warp": range(2, 3), "issuing warps": range(0, 2), "summing warps": range(3, 15)},
}
ENDING = ("last block", "complete")  # steps of one block
OF_RAIL, OF_RELAY = ("calls exchanged", "all chunks sent"), "all chunks relayed"  # steps of rail blocks, of relays
TOPK, TIMEOUT_S = 8, 20.0


class Step(NamedTuple):
    """A step of one lane in one run: microseconds from the run's first stamp, medians over warps, and the last end."""

    lane: str
    name: str
    begin: float
    end: float
    last: float
    us: float  # of the step


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.draw:
        show(args.draw)
        return
    sizes = {name: getattr(args, name) for name in ("tokens", "hidden", "experts", "sms", "layout", "ranks_per_node")}
    with start_gpu_ranks(args.ranks, built_with="STAMPS") as pool:
        args.out.mkdir(parents=True, exist_ok=True)
        for operation in args.operations:
            run = {"machine": describe_machine(), "operation": operation, "ranks": args.ranks, **sizes}
            run |= slowest(pool.run(measure, operation, sizes, args.replays))
            path = args.out / f"{operation.replace(',', '').replace(' ', '_')}.json"
            path.write_text(to_json(run))
            show(path)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    gpus = max(1, torch.cuda.device_count())
    parser = make_parser(__doc__, ranks=gpus, sms=24, tokens=128, hidden=7168, experts=256, replays=20)
    add = parser.add_argument
    add(
        "operations", nargs="*", metavar="OPERATION", default=["combine"], help=f"of {', '.join(map(repr, OPERATIONS))}"
    )
    add("--ranks-per-node", type=number(int, 1), metavar="N", help="virtual nodes of N ranks; None: one node")
    add("--layout", choices=("decode", "expert", "rank"), default="decode", help="of the rows")
    add("--out", type=Path, default=Path("runs/time_line"), metavar="FOLDER", help="of JSON files and charts")
    add("--draw", type=Path, metavar="JSON", help="draw this file, without a measurement")
    args = parser.parse_args(argv)
    for operation in args.operations:
        if operation not in OPERATIONS:
            parser.error(f"the operation is {operation!r}, but has to be one of {', '.join(map(repr, OPERATIONS))}")
    return args


# ---- from stamps to steps -------------------------------------------------------------------------------------------


def operations_in(stamps: Tensor) -> list[Tensor]:
    """Return the operations of CudaEngine.stamps(), oldest first: int64 [launches, blocks, warps, steps] each."""
    found = [of_one for of_one in stamps.transpose(0, 1) if of_one.any()]
    return sorted(found, key=first_ns)


def first_ns(stamps: Tensor) -> int:
    return int(stamps[stamps > 0].min())


def spans_of(stamps: Tensor, names: list[str]) -> Iterator[tuple[str, str, int, int]]:
    """Yield lane, step, begin and end of all steps of all warps, in ns.

    ``stamps``: of one operation; names of steps
    """
    kind = "dispatch" if stamps[..., names.index("dispatch")].any() else "combine"
    launches = [of_launch for of_launch in stamps if of_launch.any()]
    for n, of_launch in enumerate(launches, 1):
        yield from _spans_of_launch(of_launch, names, kind, f", launch {n}" if len(launches) > 1 else "")


def _spans_of_launch(stamps: Tensor, names: list[str], kind: str, mark: str) -> Iterator[tuple[str, str, int, int]]:
    """Do the same for one launch, int64 [blocks, warps, steps]. The steps of a warp are in order of time."""
    pushes = stamps[..., names.index("pushes stored")].any(1)
    serves_wire = stamps[..., [names.index(name) for name in OF_RAIL]].any((1, 2))
    relays = stamps[..., names.index(OF_RELAY)] > 0
    for block, of_block in enumerate(stamps.tolist()):
        if block == 0:
            part = "block 0"
        elif kind == "dispatch":
            part = "other blocks"
        elif kind == "combine" and pushes[block]:
            part = "pushing blocks"
        else:
            part = "reducing blocks"
        lanes = [(warp, f"{role}, {part}") for role, warps in ROLES[kind].items() for warp in warps]
        if serves_wire[block]:
            lanes = [(warp, "relays" if relays[block, warp] else "senders") for warp in range(len(of_block))]
        for warp, lane in lanes:
            ends = sorted((ns, name) for ns, name in zip(of_block[warp], names, strict=True) if ns > 0)
            for (begin, _), (end, name) in zip(ends, ends[1:]):
                yield f"{kind}{mark}: {'last block' if name in ENDING else lane}", name, begin, end


def run_of(stamps: Tensor, names: list[str]) -> dict:
    """Return a step for all spans of an operation with the same lane and name, in order of lanes, then of time."""
    zero, end = first_ns(stamps), int(stamps.max())
    by_step: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for lane, name, *span in spans_of(stamps, names):
        by_step.setdefault((lane, name), []).append((span[0] - zero, span[1] - zero))
    steps = []
    for (lane, name), times in by_step.items():
        begins, ends = zip(*times)
        us = statistics.median(end - begin for begin, end in times)
        steps.append(Step(lane, name, *(ns / 1e3 for ns in (*map(statistics.median, (begins, ends)), max(ends), us))))
    return {"us": (end - zero) / 1e3, "zero_ns": zero, "end_ns": end, "steps": sorted(steps, key=_order)}


def _order(step: Step) -> tuple:
    """Return the sort key of a step: by launch, block 0 first, then as in ROLES, the last block last."""
    launch, _, rest = step.lane.partition(": ")
    role, _, part = rest.partition(", ")
    roles = list(ROLES[launch.partition(",")[0]])
    lane = (role not in roles, part != "block 0", part, roles.index(role) if role in roles else 0, step.lane)
    return launch, *lane, step.end


def slowest(ranks: list[dict]) -> dict:
    """Return the content of the JSON: all steps and the median run, of the rank whose median run is the longest."""
    rank, found = max(enumerate(ranks), key=lambda pair: statistics.median(run["us"] for run in pair[1]["runs"]))
    runs = sorted(found["runs"], key=lambda run: run["us"])
    times: dict[tuple[str, str], list[Step]] = {}
    for run in runs:
        for step in run["steps"]:
            times.setdefault((step.lane, step.name), []).append(step)
    medians = [
        Step(*key, *(statistics.median(of) for of in zip(*(s[2:] for s in of_key)))) for key, of_key in times.items()
    ]
    shown = {name: found[name] for name in ("one_us", "gap_us", "clock_step_ns")}
    shown |= {"us": statistics.median(run["us"] for run in runs), "runs": len(runs)}
    return {"rank": rank, **shown, "steps": sorted(medians, key=_order), "chart": runs[(len(runs) - 1) // 2]["steps"]}


# ---- one rank -------------------------------------------------------------------------------------------------------


def measure(rank: int, operation: str, sizes: dict, replays: int) -> dict:
    """Return all runs of this rank, the time of one by events, and the time between two."""
    device, tokens, hidden, num_experts = use_gpu(rank), sizes["tokens"], sizes["hidden"], sizes["experts"]
    x, idx, weights = inputs_of(rank, device, tokens, hidden, num_experts, TOPK)
    given = dict(hidden=hidden, num_experts=num_experts, num_topk=TOPK, max_tokens_per_rank=tokens)
    given |= dict(num_sms=sizes["sms"], ranks_per_node=sizes["ranks_per_node"])
    with ep.Buffer(engine="cuda", timeout_s=TIMEOUT_S, **given) as buffer:
        engine = buffer.live_engine()
        engine.stamps()  # begin
        run = runs_of(buffer, operation, sizes["layout"], x, idx, weights)
        for _ in range(3):
            run()
        in_graph = engine._compiled.stamped_operations
        replay = on_device(run, in_graph)
        replay()
        engine.stamps()
        found, gaps, times = [], [], []
        for _ in range(replays):
            dist.barrier()
            times.append(replay())
            operations = operations_in(engine.stamps())
            assert len(operations) == in_graph, f"{len(operations)} operations, not {in_graph}"
            runs = [run_of(stamps, engine._compiled.steps) for stamps in operations]
            gaps += [(after["zero_ns"] - before["end_ns"]) / 1e3 for before, after in zip(runs, runs[1:])]
            found += runs[max(1, in_graph // 4) :]  # the ranks are in step by then
        clock = operations[0][operations[0] > 0].unique().diff().min()
        buffer.check()
        del replay
    shown = dict(one_us=statistics.median(times), gap_us=statistics.median(gaps), clock_step_ns=int(clock))
    return {"runs": found, **shown}


def runs_of(buffer: ep.Buffer, operation: str, layout: str, x: Tensor, idx: Tensor, weights: Tensor) -> Callable:
    """Return the function that runs the operation once, without a host wait."""
    options = dict(layout=layout)
    if layout != "decode":
        options |= dict(max_recv_rows=most_rows(buffer.dispatch(x, idx, weights, **options)))
    if operation == "combine":
        out = buffer.dispatch(x, idx, **options)
        y = torch.zeros_like(out.x) + 1
        return partial(buffer.combine, y, out.handle, **(dict(weights=weights) if layout == "decode" else {}))
    options |= dict(quantize="e4m3_1x128") if operation == "dispatch, quantize" else {}
    return partial(buffer.dispatch, ep.quantize(x) if operation == "dispatch FP8" else x, idx, **options)


# ---- the table and the chart ----------------------------------------------------------------------------------------


def show(path: Path) -> None:
    """Print the table of a JSON file, and draw its chart beside it."""
    run = json.loads(path.read_text())
    lanes = len({lane for lane, *_ in run["chart"]})
    print(report(run))
    draw(path.with_suffix(".svg"), (14, 1.8 + 0.5 * lanes), partial(fill, run))


def title(run: dict) -> str:
    gpus, build = run["machine"]["gpus"], run["machine"]["git_commit"]
    sizes = f"{run['tokens']} tokens per rank, hidden {run['hidden']}, {run['experts']} experts, top-{TOPK}"
    ranks = f"{run['ranks']} ranks with {run['sms']} multiprocessors on {len(gpus)} x {gpus[0]}"
    nodes = f", virtual nodes of {run['ranks_per_node']}" if run.get("ranks_per_node") else ""
    return f"{run['operation']}, {run['layout']} layout: {sizes}; {ranks}{nodes}, build {build}"


def report(run: dict) -> str:
    """Return the steps of all lanes as a table, with the run above it."""
    about = (
        f"rank {run['rank']}, the slowest: {run['us']:.1f} us from the first stamp to the last "
        f"(median of {run['runs']}), {run['gap_us']:.1f} us to the next one; one operation by events "
        f"{run['one_us']:.1f} us; the clock has steps of {run['clock_step_ns']} ns"
    )
    rows = [(lane, name, *(f"{us:.1f}" for us in times)) for lane, name, *times in run["steps"]]
    steps = table(("lane", "step", "begin", "end", "last", "us"), rows)
    return "\n".join([f"{title(run)}, {run['machine']['date'][:10]}", about, "", *steps])


def fill(run: dict, figure: Figure) -> None:
    """Draw a bar for each step, from its median begin to its median end, and a thin line to the end of the last warp.

    Lanes are from top to bottom in the order of the steps.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    steps = [Step(*fields) for fields in run["chart"]]
    lanes = list(dict.fromkeys(step.lane for step in steps))
    names = list(dict.fromkeys(step.name for step in sorted(steps, key=lambda step: step.end)))
    colours = {name: f"C{n}" if n < 10 else colormaps["tab20b"](n % 20) for n, name in enumerate(names)}
    axes = figure.subplots()
    for lane, name, begin, end, last, _ in steps:
        y = lanes.index(lane)
        axes.plot([end, last], [y, y], color=colours[name], linewidth=1)
        axes.barh(y, end - begin, left=begin, height=0.7, color=colours[name], edgecolor="white")
        if end - begin > 0.03 * max(step.last for step in steps):
            text = f"{end - begin:.0f}" if end - begin >= 100 else f"{end - begin:.3g}"
            axes.annotate(text, ((begin + end) / 2, y), ha="center", va="center", size=7)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("microseconds from the first stamp; thin lines: until the last warp")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside right upper", fontsize=7)
    figure.suptitle(title(run), fontsize=9)


if __name__ == "__main__":
    sys.exit(main())
