"""What a benchmark of CPU ranks writes: a table, a JSON and a chart.

The JSON: ``machine`` describes where it ran, ``settings`` how, and ``topologies`` has one entry per number of nodes:

    received_rows     side -> rows that all ranks together receive in one dispatch
    compared          baseline -> whether its results are those of the engine, the largest relative error of a sum
    wire_bytes        operation -> "least" or side -> wire -> bytes of all ranks together; for a baseline and for
                      "least" the rows alone, for the engine what its counters say
    operations        operation -> side -> median_s, p10_s, p90_s of the slowest rank of an iteration; gb_per_s;
                      cpu_s, the processor time of a rank (mean of the ranks, median of the iterations), which a
                      busy machine disturbs less; for a baseline speedup, how many times as fast the engine is
    seconds           operation -> side -> [iteration][rank], every single time; cpu_seconds likewise
    targets           what the project wants of this configuration and whether this run met it (often empty)

GB/s counts every row that a rank receives, those of its own tokens too, once per dispatch and once per combine (the
backward of either counts as the other), per rank, on the average of all ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from ep_dispatcher.benchmark.machine import to_json

PASSES = {"dispatch": 1, "combine": 1, "dispatch+combine": 2, "cached dispatch": 1, "forward+backward": 4}
COLOURS = {"engine": "#1f77b4", "baseline": "#d95f02", "baseline, fast sum": "#f2b27a", "least": "#7f7f7f"}

# The project's targets: speed-up of dispatch+combine over "baseline" by number of nodes, for these settings alone.
TARGETS = {1: 3.0, 2: 1.5}
TARGET_CORES = 2
TARGET_SETTINGS = {
    "ranks": 4,
    "tokens": 1024,
    "hidden": 1024,
    "experts": 64,
    "topk": 8,
    "dtype": "bfloat16",
    "layout": "expert",
    "routing": "uniform",
    "engine": "cpu",
}


def report(args: argparse.Namespace, machine: dict, results: list[dict]) -> int:
    """Print, write JSON and chart into ``args.out``; 1 when a baseline's result is not the engine's, else 0."""
    settings = {key: value for key, value in vars(args).items() if key not in ("chart", "out", "build", "report")}
    run = {
        "machine": machine,
        "settings": settings,
        "topologies": [_summarise(result, settings, machine) for result in results],
    }
    print(table(run))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{file_stem(settings)}.json"
    path.write_text(to_json(run))
    print(f"\nJSON: {path}")
    try:
        print(f"chart: {draw_chart(path)}")
    except ImportError:
        print('no chart: matplotlib is missing (pip install matplotlib), then "--chart" with the JSON draws it')
    same = all(compared["same"] for result in run["topologies"] for compared in result["compared"].values())
    return 0 if same else 1


def file_stem(settings: dict) -> str:
    return (
        "{engine}-{ranks}ranks-{tokens}tokens-{hidden}hidden-{experts}experts-top{topk}-{dtype}-{routing}-{layout}"
    ).format(**settings)


def _summarise(result: dict, settings: dict, machine: dict) -> dict:
    operations = {}
    for operation, per_side in result["seconds"].items():
        figures = {}
        for side, iterations in per_side.items():
            slowest = torch.tensor(iterations, dtype=torch.float64).amax(1)
            p10, median, p90 = torch.quantile(slowest, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
            received = result["received_rows"][side] * result["row_bytes"] * PASSES[operation] / settings["ranks"]
            figures[side] = {"median_s": median, "p10_s": p10, "p90_s": p90, "gb_per_s": received / median / 1e9}
            cpu = torch.tensor(result["cpu_seconds"][operation][side], dtype=torch.float64).mean(1)
            figures[side]["cpu_s"] = torch.quantile(cpu, 0.5).item()
            if side != "engine":
                figures[side]["speedup"] = median / figures["engine"]["median_s"]
        operations[operation] = figures
    targets = []
    same_settings = all(settings[key] == value for key, value in TARGET_SETTINGS.items())
    num_nodes = result["num_nodes"]
    if same_settings and machine["cores"] == TARGET_CORES and settings["baseline"] and num_nodes in TARGETS:
        speedup = operations["dispatch+combine"]["baseline"]["speedup"]
        targets.append(
            {
                "operation": "dispatch+combine",
                "against": "baseline",
                "wanted_speedup": TARGETS[num_nodes],
                "speedup": speedup,
                "met": speedup >= TARGETS[num_nodes],
            }
        )
    rounded = {key: _round_times(result[key]) for key in ("seconds", "cpu_seconds")}
    return {**result, **rounded, "operations": operations, "targets": targets}


def _round_times(per_operation: dict) -> dict:
    """To microseconds."""
    return {
        operation: {side: [[round(t, 6) for t in ranks] for ranks in times] for side, times in per_side.items()}
        for operation, per_side in per_operation.items()
    }


def title(settings: dict) -> str:
    return (
        "{engine} engine, {tokens} tokens per rank, hidden {hidden}, {experts} experts, top-{topk}, {dtype}, "
        "{routing} routing, {layout} layout, {threads} thread(s) per rank"
    ).format(**settings)


def nodes_title(result: dict) -> str:
    n, per_node = result["num_nodes"], result["ranks_per_node"]
    return f"{n} node{'s' if n > 1 else ''} of {per_node} rank{'s' if per_node > 1 else ''}"


def table(run: dict) -> str:
    machine, settings = run["machine"], run["settings"]
    lines = [
        title(settings),
        "{cpu}, {cores} cores, torch {torch}, load average {load_average_at_start} at the start".format(**machine),
        f"times: slowest rank of an iteration, median (10th to 90th percentile) of {settings['iters']}; "
        "CPU ms: processor time of a rank; GB/s: all rows a rank receives, its own too",
    ]
    if machine["load_average_at_start"][0] > machine["cores"] / 2:
        lines.append("the machine was busy with other work: the times are disturbed, the CPU times less so")
    for result in run["topologies"]:
        lines += ["", nodes_title(result), *_time_lines(result), "", *_wire_lines(result)]
        for side, compared in result["compared"].items():
            verdict = "the same results" if compared["same"] else "DIFFERENT RESULTS"
            error, allowed = compared["largest_relative_error"], compared["allowed"]
            lines.append(f"engine and {side}: {verdict}; largest relative error {error:.1e}, allowed {allowed:.1e}")
        for target in result["targets"]:
            lines.append(
                "target {operation}, {wanted_speedup:g} times as fast as {against}: {speedup:.2f} times, ".format(
                    **target
                )
                + ("met" if target["met"] else "NOT MET")
            )
    return "\n".join(lines)


def _time_lines(result: dict) -> list[str]:
    columns = f"{'median ms':>12}{'10th':>10}{'90th':>10}{'CPU ms':>10}{'GB/s':>8}  engine's speed-up"
    lines = [f"{'operation':<18}{'side':<20}{columns}"]
    for operation, figures in result["operations"].items():
        for side, f in figures.items():
            ms = "".join(
                f"{f[key] * 1e3:{width}.2f}" for key, width in (("median_s", 12), ("p10_s", 10), ("p90_s", 10))
            )
            speedup = f"{f['speedup']:18.2f}x" if "speedup" in f else ""
            lines.append(f"{operation:<18}{side:<20}{ms}{f['cpu_s'] * 1e3:10.2f}{f['gb_per_s']:8.2f}{speedup}")
    return lines


def _wire_lines(result: dict) -> list[str]:
    lines = []
    for operation, moved in result["wire_bytes"].items():
        lines = lines or ["MB, all ranks".ljust(32) + "".join(f"{name:>20}" for name in moved)]
        for wire in moved["least"]:
            figures = "".join(f"{values[wire] / 1e6:20.3f}" for values in moved.values())
            lines.append(f"{operation + ', ' + wire:<32}" + figures)
    return lines


def draw_chart(path: Path) -> Path:
    """Draw the JSON at ``path`` into the PNG beside it: times above, bytes over the wires below."""
    from matplotlib.figure import Figure

    run = json.loads(Path(path).read_text())
    results = run["topologies"]
    figure = Figure(figsize=(7.0 * len(results) + 0.5, 9.0), layout="constrained")
    axes = figure.subplots(2, len(results), squeeze=False, sharey="row")
    for (above, below), result in zip(axes.T, results, strict=True):
        _draw_times(above, result)
        _draw_wires(below, result)
    for row, label in zip(axes, ("milliseconds (less is better)", "MB over the wire, all ranks"), strict=True):
        row[0].set_ylabel(label)
    machine = "{cpu}, {cores} cores, torch {torch}, {date}, load average {load_average_at_start[0]} at the start"
    figure.suptitle(title(run["settings"]) + "\n" + machine.format(**run["machine"]), fontsize=10)
    image = Path(path).with_suffix(".png")
    figure.savefig(image, dpi=120)
    return image


def _draw_times(axes, result: dict) -> None:
    operations, sides = result["operations"], list(result["received_rows"])
    width = 0.8 / len(sides)
    for i, side in enumerate(sides):
        figures = [operations[operation][side] for operation in operations]
        median, low, high = ([f[key] * 1e3 for f in figures] for key in ("median_s", "p10_s", "p90_s"))
        at = [n + (i - (len(sides) - 1) / 2) * width for n in range(len(operations))]
        spread = [[m - p10 for m, p10 in zip(median, low)], [p90 - m for m, p90 in zip(median, high)]]
        axes.bar(at, median, width * 0.95, yerr=spread, capsize=3, color=COLOURS[side], label=side)
        for x, top, f in zip(at, high, figures):
            if "speedup" in f:
                axes.annotate(f"{f['speedup']:.1f}x", (x, top), (0, 3), textcoords="offset points", ha="center", size=8)
    axes.set_xticks(range(len(operations)), [name.replace("+", "\n+ ") for name in operations])
    axes.set_title(
        f"{nodes_title(result)}: time of the slowest rank\nmedian, 10th to 90th percentile, engine's speed-up"
    )
    axes.margins(y=0.1)
    axes.legend()


def _draw_wires(axes, result: dict) -> None:
    moved = result["wire_bytes"]
    names = [name for name in COLOURS if name in moved["dispatch"]]
    names.sort(key=lambda name: name != "least")
    wires = [wire for wire in moved["dispatch"]["least"] if result["num_nodes"] > 1 or wire != "between nodes"]
    groups = [(operation, wire) for operation in moved for wire in wires]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [n + (i - (len(names) - 1) / 2) * width for n in range(len(groups))]
        bars = axes.bar(
            at, [moved[op][name][wire] / 1e6 for op, wire in groups], width * 0.95, color=COLOURS[name], label=name
        )
        axes.bar_label(bars, fmt="%.1f", size=7, padding=2)
    axes.set_xticks(range(len(groups)), [f"{operation}\n{wire}" for operation, wire in groups])
    axes.set_title(f"{nodes_title(result)}: bytes over each wire")
    axes.margins(y=0.1)
    axes.legend()
