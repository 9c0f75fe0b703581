"""Charts: runs on one machine (all sides, time against multiprocessors and tokens), a paced wire, steps."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ep_dispatcher.tools.benchmark.cases import FEW_OPERATIONS, Case, is_standard
from ep_dispatcher.tools.benchmark.parts import BASELINES, ENGINE

if TYPE_CHECKING:
    from time_line import Step


def draw(runs: list[dict], title: str, colours: dict[str, str], unit: tuple[str, float], path: Path) -> Path:
    """``colours``: side -> colour, in the order of the bars. ``unit``: its name, and how many of it are a second."""
    cases = [Case(**run["case"]) for run in runs]
    bars = [run for run, case in zip(runs, cases) if is_standard(case)]
    grown = {
        field: sorted(
            ((getattr(case, field), run) for run, case in zip(runs, cases) if is_standard(case, field)),
            key=lambda pair: pair[0],
        )
        for field in ("sms", "tokens")
    }
    grown = {field: pairs for field, pairs in grown.items() if len({value for value, _ in pairs}) > 1}
    num_panels = len(bars) + len(grown)
    figure = Figure(figsize=(max(8.0, 5.7 * num_panels), 6.5), layout="constrained")
    panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
    for axes, run in zip(panels, bars):
        _draw_bars(axes, run, colours, unit)
    for axes, (field, pairs) in zip(panels[len(bars) :], grown.items()):
        _draw_growth(axes, pairs, field, unit)
    figure.suptitle(title)
    return _save(figure, path)


def _draw_bars(axes, run: dict, colours: dict[str, str], unit: tuple[str, float]) -> None:
    name, per_second = unit
    operations = {operation: found for operation, found in run["seconds"].items() if ENGINE in found}
    order = {operation: [side for side in colours if side in found] for operation, found in operations.items()}
    width = 0.8 / max(len(sides) for sides in order.values())
    for side in (side for side in colours if any(side in sides for sides in order.values())):
        at = [
            n + (sides.index(side) - (len(sides) - 1) / 2) * width
            for n, sides in enumerate(order.values())
            if side in sides
        ]
        shown = [[s * per_second for s in found[side]] for found in operations.values() if side in found]
        tenths = [statistics.quantiles(times, n=10, method="inclusive") for times in shown]
        middle = [statistics.median(times) for times in shown]
        spread = [[m - t[0] for m, t in zip(middle, tenths)], [t[-1] - m for m, t in zip(middle, tenths)]]
        axes.barh(at, middle, width * 0.95, xerr=spread, capsize=2, color=colours[side], label=side)
        for y, m, t in zip(at, middle, tenths):
            text = f"{m:.3g}" if m < 100 else f"{m:.0f}"
            axes.annotate(text, (t[-1], y), (3, 0), textcoords="offset points", va="center", size=7)
    case = Case(**run["case"])
    nodes = case.ranks // (case.ranks_per_node or case.ranks)
    axes.set_title(("one node" if nodes == 1 else f"{nodes} virtual nodes") + ": median, 10th to 90th percentile")
    axes.set_xlabel(f"{name} (less is better)")
    labels = [operation.replace("+", "\n+ ").replace(", ", ",\n") for operation in operations]
    axes.set_yticks(range(len(operations)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.legend(fontsize=8)


def _draw_growth(axes, pairs: list[tuple[int, dict]], field: str, unit: tuple[str, float]) -> None:
    """Draw a line for each operation over the runs. ``pairs``: (value of the field, run), in ascending order."""
    name, per_second = unit
    sides = {ENGINE: "o-"} | ({BASELINES["all_to_all"]: "x--"} if field == "tokens" else {})
    for n, operation in enumerate(FEW_OPERATIONS):
        for side, style in sides.items():
            points = [
                (value, run["operations"][operation][side]["median_s"] * per_second)
                for value, run in pairs
                if side in run["operations"].get(operation, {})
            ]
            if points:
                label = operation if side == ENGINE else f"{side}, {operation}"
                axes.plot(*zip(*points), style, color=f"C{n}", label=label, markersize=4)
    if field == "tokens":
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    values = sorted({value for value, _ in pairs})
    axes.set_xticks(values, [str(value) for value in values], rotation=45 if field == "tokens" else 0)
    title = "multiprocessors" if field == "sms" else "tokens per rank"
    axes.set_title(f"against {title}")
    axes.set_xlabel(title)
    axes.set_ylabel(f"{name} (less is better)")
    axes.legend(fontsize=8)


def draw_paced(run: dict, limit: float, path: Path) -> Path:
    """Draw benchmarks/paced_wire.py: time against multiprocessors, and time over the wire's own against its rate."""
    points = run["points"]
    operations = list(dict.fromkeys(p["operation"] for p in points))
    counts = sorted({p["sms"] for p in points if p["gb_per_s"] and p["gb_per_s"] != run["at"]})
    at = [p for p in points if p["gb_per_s"] == (run["at"] if run["wire"] == "peer" else None)]
    figure = Figure(figsize=(5.7 * (1 + len(counts)), 4.8), layout="constrained")
    of_sms, *of_rates = figure.subplots(1, 1 + len(counts), squeeze=False)[0]
    for n, operation in enumerate(operations):
        # Of several points with the same multiprocessors the fastest.
        best = {p["sms"]: p for p in sorted(at, key=lambda p: -p["us"]) if p["operation"] == operation}
        mine = [best[sms] for sms in sorted(best)]
        of_sms.plot([p["sms"] for p in mine], [p["us"] for p in mine], "o-", color=f"C{n}", label=operation)
        for wire_us in {p["wire_us"] for p in mine if "wire_us" in p}:
            of_sms.axhline(limit * wire_us, linestyle="--", linewidth=1, color=f"C{n}")
        for axes, sms in zip(of_rates, counts):
            mine = [p for p in points if p["operation"] == operation and p["sms"] == sms and p["gb_per_s"]]
            mine.sort(key=lambda p: p["gb_per_s"])
            axes.plot([p["gb_per_s"] for p in mine], [p["ratio"] for p in mine], "o-", color=f"C{n}", label=operation)
            axes.set_xticks([p["gb_per_s"] for p in mine], [f"{p['gb_per_s']:g}" for p in mine])
    of_sms.set_title(f"{run['at']:g} GB/s; dashed: {limit:g} x the wire alone" if run["wire"] == "peer" else "no pace")
    values = sorted({p["sms"] for p in at})
    of_sms.set_xticks(values, [str(value) for value in values])
    of_sms.set_xlabel("multiprocessors, those of the wire too")
    of_sms.set_ylabel("microseconds (less is better)")
    of_sms.set_ylim(bottom=0)
    for axes, sms in zip(of_rates, counts):
        axes.axhline(limit, linestyle="--", linewidth=1, color="grey")
        axes.set_title(f"{sms} multiprocessors")
        axes.set_xlabel("GB/s of the wire, per rank")
        axes.set_ylabel("times the wire alone (1 is best)")
        axes.set_ylim(bottom=0)
    for axes in (of_sms, *of_rates):
        axes.legend(fontsize=8)
    gpus = run["machine"]["gpus"]
    figure.suptitle(
        f"{run['nodes']} virtual nodes of {run['ranks_per_node']} on {len(gpus)} x {gpus[0]}, {run['wire']} wire: "
        f"{run['tokens']} tokens per rank, hidden {run['hidden']}, {run['experts']} experts, top-{run['topk']}, "
        f"{run['layout']} layout",
        fontsize=10,
    )
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    changing = ("Date", "Creator") if path.suffix == ".svg" else ("Software",)  # the version of matplotlib among them
    with rc_context({"svg.hashsalt": "ep_dispatcher"}):  # the same file from the same figures
        figure.savefig(path, dpi=110, metadata=dict.fromkeys(changing))
    return path


def draw_time_line(steps: list[Step], title: str, path: Path) -> Path:
    """Draw benchmarks/time_line.py: a bar for each step, from its median begin to its median end, and a thin line to
    the end of the last warp. Lanes are from top to bottom in the order of the steps."""
    lanes = list(dict.fromkeys(step.lane for step in steps))
    names = list(dict.fromkeys(step.name for step in sorted(steps, key=lambda step: step.end)))
    colours = {name: f"C{n}" if n < 10 else colormaps["tab20b"](n % 20) for n, name in enumerate(names)}
    most = max(step.last for step in steps)
    figure = Figure(figsize=(14, 1.8 + 0.5 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for step in steps:
        y = lanes.index(step.lane)
        axes.plot([step.end, step.last], [y, y], color=colours[step.name], linewidth=1)
        axes.barh(y, step.end - step.begin, left=step.begin, height=0.7, color=colours[step.name], edgecolor="white")
        if step.end - step.begin > 0.03 * most:
            us = step.end - step.begin
            text = f"{us:.0f}" if us >= 100 else f"{us:.3g}"
            axes.annotate(text, ((step.begin + step.end) / 2, y), ha="center", va="center", size=7)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("microseconds from the first stamp; thin lines: until the last warp")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside right upper", fontsize=7)
    figure.suptitle(title, fontsize=9)
    return _save(figure, path)
