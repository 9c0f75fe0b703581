"""Draws the time line of one operation: when each role of its kernels ends each step, by the GPU's clock.

    EP_DISPATCHER_CUDA=1 EP_DISPATCHER_STAMPS=1 python setup.py build_ext --inplace      # kernels with stamps
    python benchmarks/time_line.py dispatch "dispatch FP8" combine                       # decode layout, 128 tokens
    python benchmarks/time_line.py "moe_mlp forward" "moe_mlp both" --tokens 4096 --sms 24
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
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.engines import cuda_problem
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json
from ep_dispatcher.tools.benchmark.ranks import most_rows
from ep_dispatcher.tools.testing import RankPool, make_routing

OPERATIONS = ("dispatch", "dispatch FP8", "dispatch, quantize", "combine", "moe_mlp forward", "moe_mlp both")
EPOCHS = {"moe_mlp forward": 2, "moe_mlp both": 4}  # of one run; else 1
# The warps of each role: Movers and Helpers of csrc/cuda/dispatch/dispatch.cuh, Pipeline::role.
ROLES = {
    "dispatch": {"movers": range(0, 8), "helpers": range(8, 16)},
    "combine": {"preparing warp": range(2, 3), "issuing warps": range(0, 2), "summing warps": range(3, 15)},
}
ENDING = ("last block", "complete")  # steps of one block
OF_RAIL, OF_RELAY = ("calls exchanged", "all chunks sent"), "all chunks relayed"  # steps of rail blocks, of relays
EXPERTS = ("multiply", "weighted_swiglu", "weighted_swiglu_grad", "outer_products")  # of grouped_gemm_kernels
TOPK, TIMEOUT_S = 8, 20.0


class Step(NamedTuple):
    """A step of one lane in one run: microseconds from the run's first stamp, medians over warps, and the last end."""

    lane: str
    name: str
    begin: float
    end: float
    last: float
    us: float  # of the step


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.draw:
        run = json.loads(args.draw.read_text())
        print(table(run))
        return draw(run, args.draw.with_suffix(".svg"))
    problem = cuda_problem()
    if problem:
        print(f"engine: given none that can run, because {problem}; allowed: the CUDA engine, built with stamps")
        return 2
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # ranks may share a GPU
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("tokens", "hidden", "experts", "intermediate", "sms", "layout", "ranks_per_node")
    sizes = {name: getattr(args, name) for name in names}
    with RankPool(args.ranks, timeout_s=120) as pool:
        for operation in args.operations:
            ranks = pool.run(measure, operation, sizes, args.replays)
            run = {"machine": describe_machine(), "operation": operation, "ranks": args.ranks, **sizes}
            run |= slowest(ranks)
            path = args.out / f"{operation.replace(',', '').replace(' ', '_')}.json"
            path.write_text(to_json(run))
            print(f"{table(run)}\nwritten: {path}")
            draw(run, path.with_suffix(".svg"))
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(map(repr, OPERATIONS))}; default: combine")
    add("--ranks", type=int, default=max(1, torch.cuda.device_count()), help="default: one per GPU")
    add("--ranks-per-node", type=int, metavar="N", help="virtual nodes of N ranks; default: one node")
    add("--sms", type=int, default=24, help="multiprocessors of a rank; default 24")
    add("--layout", choices=("decode", "expert", "rank"), default="decode", help="not for moe_mlp; default decode")
    add("--tokens", type=int, default=128, help="tokens of a rank; moe_mlp overlaps from 2048 on")
    add("--hidden", type=int, default=7168)
    add("--experts", type=int, default=256)
    add("--intermediate", type=int, default=2048, help="size inside an expert of moe_mlp")
    add("--replays", type=int, default=20, help="replays of the graph")
    add("--out", type=Path, default=Path("runs/time_line"), metavar="FOLDER")
    add("--draw", type=Path, metavar="JSON", help="draw this file, without a measurement")
    args = parser.parse_args(argv)
    args.operations = args.operations or ["combine"]
    for operation in args.operations:
        if operation not in OPERATIONS:
            parser.error(f"given {operation!r}, allowed: {', '.join(map(repr, OPERATIONS))}")
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
    for number, of_launch in enumerate(launches, 1):
        yield from _spans_of_launch(of_launch, names, kind, f", launch {number}" if len(launches) > 1 else "")


def _spans_of_launch(stamps: Tensor, names: list[str], kind: str, mark: str) -> Iterator[tuple[str, str, int, int]]:
    """Do the same for one launch, int64 [blocks, warps, steps]. The steps of a warp are in order of time."""
    pushes = stamps[..., names.index("pushes stored")].any(1)
    serves_wire = stamps[..., [names.index(name) for name in OF_RAIL]].any((1, 2))
    relays = stamps[..., names.index(OF_RELAY)] > 0
    for block, of_block in enumerate(stamps.tolist()):
        part = "block 0" if block == 0 else "other blocks" if kind == "dispatch" else "reducing blocks"
        if kind == "combine" and block > 0 and pushes[block]:
            part = "pushing blocks"
        lanes = [(warp, f"{role}, {part}") for role, warps in ROLES[kind].items() for warp in warps]
        if serves_wire[block]:
            lanes = [(warp, "relays" if relays[block, warp] else "senders") for warp in range(len(of_block))]
        for warp, lane in lanes:
            ends = sorted((ns, name) for ns, name in zip(of_block[warp], names, strict=True) if ns > 0)
            for (begin, _), (end, name) in zip(ends, ends[1:]):
                yield f"{kind}{mark}: {'last block' if name in ENDING else lane}", name, begin, end


def steps_of(spans: list[tuple[str, str, int, int]], zero_ns: int) -> list[Step]:
    """Return a step for all spans of the same lane and name, in order of lanes, then of time."""
    by_step: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for lane, name, begin, end in spans:
        by_step.setdefault((lane, name), []).append((begin - zero_ns, end - zero_ns))
    steps = []
    for (lane, name), times in by_step.items():
        begins, ends = zip(*times)
        us = statistics.median(end - begin for begin, end in times)
        steps.append(Step(lane, name, *(ns / 1e3 for ns in (*map(statistics.median, (begins, ends)), max(ends), us))))
    lanes = sorted({step.lane for step in steps}, key=_order)
    return sorted(steps, key=lambda step: (lanes.index(step.lane), step.end))


def _order(lane: str) -> tuple:
    """Return the sort key of a lane: block 0, then the others, in the order of ROLES; last block and experts last."""
    operation, _, rest = lane.partition(": ")
    role, _, part = rest.partition(", ")
    roles = [role for kind, of_kind in ROLES.items() if kind in operation for role in of_kind]
    return operation, role not in roles, part != "block 0", part, roles.index(role) if role in roles else 0, lane


def run_of(operations: list[Tensor], names: list[str], experts: list[tuple[str, int, int]]) -> dict:
    """Return the steps of one run: of its operations, and of the experts beside them (name, begin, end in ns)."""
    zero = min(first_ns(stamps) for stamps in operations)
    end = max([int(stamps.max()) for stamps in operations] + [end for *_, end in experts])
    spans = []
    for number, stamps in enumerate(operations, 1):
        mark = f"{number} " if len(operations) > 1 else ""
        spans += [(mark + lane, name, begin, to) for lane, name, begin, to in spans_of(stamps, names)]
    spans += [("experts", f"{number} {name}", begin, to) for number, (name, begin, to) in enumerate(experts, 1)]
    return {"us": (end - zero) / 1e3, "zero_ns": zero, "end_ns": end, "steps": steps_of(spans, zero)}


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
    lanes = sorted({step.lane for step in medians}, key=_order)
    medians.sort(key=lambda step: (lanes.index(step.lane), step.end))
    shown = {name: found[name] for name in ("one_us", "gap_us", "clock_step_ns")}
    us = statistics.median(run["us"] for run in runs)
    chart = runs[(len(runs) - 1) // 2]["steps"]
    return {"rank": rank, "us": us, **shown, "runs": len(runs), "steps": medians, "chart": chart}


# ---- one rank -------------------------------------------------------------------------------------------------------


def measure(rank: int, operation: str, sizes: dict, replays: int) -> dict:
    """Return all runs of this rank, the time of one by events, and the time between two."""
    from compare_builds import on_device

    torch.cuda.set_device(rank % torch.cuda.device_count())
    tokens, hidden, num_experts = sizes["tokens"], sizes["hidden"], sizes["experts"]
    idx, weights = (t.cuda() for t in make_routing("uniform", tokens, num_experts, TOPK, seed=rank))
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    given = dict(hidden=hidden, num_experts=num_experts, num_topk=TOPK, max_tokens_per_rank=tokens)
    given |= dict(num_sms=sizes["sms"], ranks_per_node=sizes["ranks_per_node"])
    experts = Experts(operation.startswith("moe_mlp"))
    with ep.Buffer(engine="cuda", timeout_s=TIMEOUT_S, **given) as buffer, experts:
        engine = buffer._live_engine()
        engine.stamps()  # begin
        run = runs_of(buffer, operation, sizes, x, idx, weights)
        for _ in range(3):
            run()
        epochs = EPOCHS.get(operation, 1)
        in_graph = engine._compiled.stamped_operations // epochs
        experts.clear()
        replay = on_device(run, in_graph)
        replay()
        engine.stamps()
        found, gaps, times = [], [], []
        for _ in range(replays):
            dist.barrier()
            times.append(replay())
            operations = operations_in(engine.stamps())
            assert len(operations) == in_graph * epochs, f"{len(operations)} operations, not {in_graph * epochs}"
            beside = experts.take(in_graph)
            runs = [
                run_of(operations[n * epochs : (n + 1) * epochs], engine._compiled.steps, beside[n])
                for n in range(in_graph)
            ]
            gaps += [(after["zero_ns"] - before["end_ns"]) / 1e3 for before, after in zip(runs, runs[1:])]
            found += runs[max(1, in_graph // 4) :]  # the ranks are in step by then
        clock = operations[0][operations[0] > 0].unique().diff().min()
        buffer.check()
        del replay
    shown = dict(one_us=statistics.median(times), gap_us=statistics.median(gaps), clock_step_ns=int(clock))
    return {"runs": found, **shown}


def runs_of(buffer: ep.Buffer, operation: str, sizes: dict, x: Tensor, idx: Tensor, weights: Tensor) -> Callable:
    """Return the function that runs the operation once, without a host wait."""
    if operation.startswith("moe_mlp"):
        return layer_of(buffer, operation, sizes, x, idx, weights)
    layout = dict(layout=sizes["layout"])
    if layout["layout"] != "decode":
        layout |= dict(max_recv_rows=most_rows(buffer.dispatch(x, idx, weights, **layout)))
    if operation == "combine":
        out = buffer.dispatch(x, idx, **layout)
        y = torch.zeros_like(out.x) + 1
        if layout["layout"] != "decode":
            return partial(buffer.combine, y, out.handle)
        return partial(buffer.combine, y, out.handle, weights=weights)
    quantize = dict(quantize="e4m3_1x128") if operation == "dispatch, quantize" else {}
    return partial(buffer.dispatch, ep.quantize(x) if operation == "dispatch FP8" else x, idx, **layout, **quantize)


def layer_of(buffer: ep.Buffer, operation: str, sizes: dict, x: Tensor, idx: Tensor, weights: Tensor) -> Callable:
    """Return one layer of experts with overlap, forward or both ways."""
    local, width, hidden = buffer.num_local_experts, sizes["intermediate"], sizes["hidden"]
    w1, w2 = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5
        for shape in ((local, 2 * width, hidden), (local, hidden, width))
    )
    rows = most_rows(buffer.dispatch(x, idx, weights))
    forward = partial(ep.moe_mlp, buffer, overlap=True, num_parts=1, max_recv_rows=rows)
    if operation == "moe_mlp forward":
        return lambda: forward(x, idx, weights, w1, w2)
    leaves, of_y = [t.requires_grad_() for t in (x, weights, w1, w2)], torch.randn_like(x)
    return lambda: torch.autograd.grad(forward(leaves[0], idx, *leaves[1:]), leaves, of_y)


class Experts:
    """Put stamps before and after each kernel of experts, in the same stream. Replaces EXPERTS meanwhile.

    Without ``wanted`` it does nothing, and does not need Triton.
    """

    def __init__(self, wanted: bool, most: int = 256):
        self.ns, self.names, self._wanted = torch.zeros(2 * most, dtype=torch.int64, device="cuda"), [], wanted
        self._replaced: dict[str, Callable] = {}

    def __enter__(self) -> Experts:
        if self._wanted:
            from stamp_kernel import keep_time

            self._keep_time, self._kernels = keep_time, grouped_gemm.kernels()
            self._replaced = {name: getattr(self._kernels, name) for name in EXPERTS}
        for name, function in self._replaced.items():
            setattr(self._kernels, name, partial(self._call, name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._replaced.items():
            setattr(self._kernels, name, function)

    def _call(self, name: str, function: Callable, *args, **options):
        at = 2 * len(self.names)
        self.names.append(name)
        self._keep_time[1,](self.ns, at, num_warps=1)
        result = function(*args, **options)
        self._keep_time[1,](self.ns, at + 1, num_warps=1)
        return result

    def clear(self) -> None:
        self.names.clear()

    def take(self, num_runs: int) -> list[list[tuple[str, int, int]]]:
        """Return name, begin and end in ns of the calls that were captured, by run; after replays. Calls of the
        warm-up are before them."""
        times = self.ns.view(-1, 2).tolist()
        calls = [(name, *times[n]) for n, name in enumerate(self.names)]
        each = len(calls) // (num_runs + 1)  # `captured` runs once more before
        return [calls[(n + 1) * each : (n + 2) * each] for n in range(num_runs)]


# ---- the table and the chart ----------------------------------------------------------------------------------------


def title(run: dict) -> str:
    gpus = run["machine"]["gpus"]
    sizes = f"{run['tokens']} tokens per rank, hidden {run['hidden']}, {run['experts']} experts, top-{TOPK}"
    layout = "" if run["operation"].startswith("moe_mlp") else f", {run['layout']} layout"
    ranks = f"{run['ranks']} ranks with {run['sms']} multiprocessors on {len(gpus)} x {gpus[0]}"
    if run.get("ranks_per_node"):
        ranks += f", virtual nodes of {run['ranks_per_node']}"
    return f"{run['operation']}{layout}: {sizes}; {ranks}, build {run['machine']['git_commit']}"


def table(run: dict) -> str:
    """Return the steps of all lanes as a table, with the run above it."""
    lines = [f"{title(run)}, {run['machine']['date'][:10]}"]
    lines += [
        f"rank {run['rank']}, the slowest: {run['us']:.1f} us from the first stamp to the last "
        f"(median of {run['runs']}), {run['gap_us']:.1f} us to the next one; one operation by events "
        f"{run['one_us']:.1f} us; the clock has steps of {run['clock_step_ns']} ns",
        "",
        "| lane | step | begin | end | last | us |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for step in (Step(*fields) for fields in run["steps"]):
        times = " | ".join(f"{us:.1f}" for us in (step.begin, step.end, step.last, step.us))
        lines.append(f"| {step.lane} | {step.name} | {times} |")
    return "\n".join(lines)


def draw(run: dict, path: Path) -> int:
    try:
        import charts
    except ImportError:
        print("no chart: matplotlib is missing (pip install matplotlib)")
        return 0
    steps = [Step(*fields) for fields in run["chart"]]
    print(f"chart: {charts.draw_time_line(steps, title(run), path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
