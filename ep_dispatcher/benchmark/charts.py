"""The chart of the runs on one machine: all sides, time against multiprocessors, and time against tokens."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from ep_dispatcher.benchmark.cases import FEW_OPERATIONS
from ep_dispatcher.benchmark.parts import ALL_TO_ALL, DEEP_EP, ENGINE, GRAPH, MEGATRON
from ep_dispatcher.benchmark.report import is_standard

COLOURS = {
    ENGINE: "#1f77b4",
    GRAPH: "#9ecae1",
    ALL_TO_ALL: "#d95f02",
    MEGATRON: "#7a0177",
    DEEP_EP: "#2ca02c",
}


def draw(group: list[dict], path: Path) -> Path:
    figure = Figure(figsize=(17.0, 6.5), layout="constrained")
    bars, sms, tokens = figure.subplots(1, 3)
    for run in group:
        if is_standard(run):
            _draw_bars(bars, run)
    bars.set_title("the standard case: median, least to most")
    bars.set_xlabel("microseconds (less is better)")
    _draw_growth(sms, [run for run in group if is_standard(run, "sms")], "sms", [ENGINE])
    sms.set_title("against the engine's multiprocessors")
    sms.set_ylim(bottom=0)
    tokens.set_xscale("log", base=2)
    tokens.set_yscale("log")
    _draw_growth(tokens, [run for run in group if is_standard(run, "tokens")], "tokens", [ENGINE, ALL_TO_ALL])
    tokens.set_title("against tokens per rank")
    for axes in (sms, tokens):
        axes.set_ylabel("microseconds (less is better)")
    for axes in (bars, sms, tokens):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    case, machine = group[0]["case"], group[0]["machine"]
    name = next(iter(machine["gpus"]), machine["cpu"])
    about = f"engine {case['engine']}, PyTorch {machine['torch']}, {machine['date'][:10]}"
    figure.suptitle(f"{case['ranks']} x {name}, {about}")
    figure.savefig(path, dpi=110, metadata={"Software": None})  # not the version of matplotlib
    return path


def _draw_bars(axes, run: dict) -> None:
    operations = {name: figures for name, figures in run["operations"].items() if ENGINE in figures}
    sides = [side for side in COLOURS if any(side in figures for figures in operations.values())]
    width = 0.8 / max(1, len(sides))
    for i, side in enumerate(sides):
        first = (i - (len(sides) - 1) / 2) * width
        at = [n + first for n, figures in enumerate(operations.values()) if side in figures]
        shown = [figures[side] for figures in operations.values() if side in figures]
        middle, low, high = ([f[key] * 1e6 for f in shown] for key in ("median_s", "min_s", "max_s"))
        spread = [[m - least for m, least in zip(middle, low)], [most - m for m, most in zip(middle, high)]]
        axes.barh(at, middle, width * 0.95, xerr=spread, capsize=2, color=COLOURS[side], label=side)
        for y, m, most in zip(at, middle, high):
            axes.annotate(f"{m:.0f}", (most, y), (3, 0), textcoords="offset points", va="center", size=7)
    axes.set_yticks(range(len(operations)), [name.replace("+", "\n+ ").replace(", ", ",\n") for name in operations])
    axes.invert_yaxis()
    axes.margins(x=0.1)


def _draw_growth(axes, runs: list[dict], field: str, sides: list[str]) -> None:
    """Lines of the operations over the runs, which differ in ``field``."""
    runs = sorted(runs, key=lambda run: run["case"][field])
    for n, operation in enumerate(FEW_OPERATIONS):
        for side in sides:
            points = [
                (run["case"][field], run["operations"][operation][side]["median_s"] * 1e6)
                for run in runs
                if side in run["operations"].get(operation, {})
            ]
            if points:
                style = "o-" if side == ENGINE else "x--"
                label = operation if side == ENGINE else f"{side}, {operation}"
                axes.plot(*zip(*points), style, color=f"C{n}", label=label, markersize=4)
    values = sorted({run["case"][field] for run in runs})
    axes.set_xticks(values, [str(value) for value in values], rotation=45 if field == "tokens" else 0)
    axes.set_xlabel("multiprocessors" if field == "sms" else field)
