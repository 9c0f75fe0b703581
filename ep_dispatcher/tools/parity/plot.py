"""The chart of the parity tool: step times of both dispatchers, and the difference of each tensor."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

FORMATS = (".png", ".svg", ".pdf")
COLORS = ("#9aa5b1", "#1f6feb")  # of the reference, and of what is tested
LEAST = 1e-9  # where bars of no difference begin


def why_not(path: Path) -> str | None:
    """Say why no chart can be drawn into this file. None: one can."""
    if path.suffix not in FORMATS:
        return f"its name ends with {path.suffix or 'nothing'}, but has to end with {', '.join(FORMATS)}"
    if importlib.util.find_spec("matplotlib") is None:
        return "Matplotlib is not installed: pip install matplotlib"
    return None


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw the chart. figures: those of report.figures; without timed steps the differences alone."""
    from matplotlib.figure import Figure

    tensors, times = figures["tensors"], figures["milliseconds"]
    figure = Figure(figsize=(11 if times else 7, 1.6 + 0.3 * max(len(tensors), 5)), layout="constrained")
    verdict = "the same within rounding" if figures["same"] else "DIFFERENT"
    figure.suptitle(f"{figures['tested']} against {figures['reference']}: {verdict}")
    axes = figure.subplots(1, 2 if times else 1, squeeze=False)[0]
    if times:
        _draw_times(axes[0], figures)
    _draw_differences(axes[-1], tensors)
    figure.savefig(path)


def _draw_times(axes: Any, figures: dict[str, Any]) -> None:
    """Draw a group of bars for all that was timed, with a bar per dispatcher."""
    times = figures["milliseconds"]
    width = 0.38
    for i, name in enumerate((figures["reference"], figures["tested"])):
        places = [place + (i - 0.5) * width for place in range(len(times))]
        bars = axes.bar(places, [of[name] for of in times.values()], width, label=name, color=COLORS[i])
        axes.bar_label(bars, fmt="%.2f")
    axes.set_xticks(range(len(times)), list(times))
    axes.margins(y=0.15)
    axes.set_ylabel("milliseconds")
    axes.set_title(f"forward and backward, median of {figures['timed_steps']} steps")
    axes.legend()


def _draw_differences(axes: Any, tensors: dict[str, dict[str, Any]]) -> None:
    """Draw a bar per tensor, on a logarithmic axis, with a mark at its limit. Red: more than allowed."""
    finite = [one["relative_difference"] for one in tensors.values() if one["relative_difference"] is not None]
    most = max([1e-3, *finite, *(one["limit"] for one in tensors.values())])
    for place, one in enumerate(tensors.values()):
        difference = one["relative_difference"]  # None: infinite
        length = 10 * most if difference is None else max(difference, LEAST)
        axes.barh(place, length - LEAST, left=LEAST, color=COLORS[1] if one["ok"] else "#d1242f")
        if one["limit"] > 0:
            axes.plot([one["limit"]] * 2, [place - 0.45, place + 0.45], color="black")
    axes.set_xscale("log")
    axes.set_xlim(LEAST, 10 ** math.ceil(math.log10(10 * most)))
    axes.set_yticks(range(len(tensors)), list(tensors))
    axes.invert_yaxis()
    axes.set_xlabel("largest difference / largest value; black: the limit")
    axes.set_title("differences")
