"""The chart of runs on one machine: all sides, and time against multiprocessors and tokens."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ep_dispatcher.tools.benchmark import harness
from ep_dispatcher.tools.benchmark.cases import FEW_OPERATIONS, Case, is_standard
from ep_dispatcher.tools.benchmark.measurements import BASELINES, ENGINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(runs: list[dict], title: str, colours: dict[str, str], unit: tuple[str, float], path: Path) -> bool:
    """``colours``: side -> colour, in the order of the bars. ``unit``: its name, and how many of it are a second."""
    cases = [Case(**run["case"]) for run in runs]
    panels = [partial(_draw_bars, run, colours, unit) for run, case in zip(runs, cases) if is_standard(case)]
    for field in ("sms", "tokens"):
        pairs = [(getattr(case, field), run) for run, case in zip(runs, cases) if is_standard(case, field)]
        pairs.sort(key=lambda pair: pair[0])
        if len({value for value, _ in pairs}) > 1:
            panels.append(partial(_draw_growth, pairs, field, unit))

    def fill(figure: Figure) -> None:
        for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0]):
            panel(axes)
            axes.legend(fontsize=8)
        figure.suptitle(title)

    return harness.draw(path, (max(8.0, 5.7 * len(panels)), 6.5), fill)


def _draw_bars(run: dict, colours: dict[str, str], unit: tuple[str, float], axes) -> None:
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


def _draw_growth(pairs: list[tuple[int, dict]], field: str, unit: tuple[str, float], axes) -> None:
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
