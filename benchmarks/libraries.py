"""``python benchmarks/libraries.py``: writes the tables of libraries, and their chart, from one JSON file.

benchmarks/results/libraries.json has the medians of one run with all libraries, in microseconds. docs/performance.md
gets all of them, the README a choice. ``--check`` writes nothing, and fails where a page is not made of the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from report import END, replace_part

from ep_dispatcher.tools.benchmark import harness

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- begin: python benchmarks/libraries.py -->"
ENGINE, MORE_SMS = "this engine", "with 32 SMs"
# Their order and colours are those of the chart.
COLORS = {
    ENGINE: "#1f77b4",
    MORE_SMS: "#9ecae1",
    "DeepEP": "#2ca02c",
    "HybridEP": "#7a0177",
    "NCCL EP": "#d95f02",
    "alltoall": "#999999",
}


# Rows of the README, by tokens: what decides a step, and where another library is faster.
CHOSEN = {
    4096: ("dispatch", "dispatch FP8", "combine", "in Megatron: six steps, forward+backward"),
    8192: ("dispatch", "combine", "in Megatron: six steps, forward+backward"),
    128: ("dispatch FP8", "dispatch+combine, CUDA graph"),
    8: ("dispatch FP8", "dispatch+combine, CUDA graph"),
}


def sides_of(result: dict) -> list[str]:
    found = {side for case in result["cases"] for times in case["us"].values() for side in times}
    return [side for side in COLORS if side in found]


def table_of(result: dict) -> str:
    """Return the table with its marks. In brackets: how many times as fast the engine is."""
    sides, rows = sides_of(result), []
    for case in result["cases"]:
        rows.append((f"**{title_of(case)}**", *("" for _ in sides)))
        for operation, times in case["us"].items():
            rows.append((operation, *(cell(times, side) for side in sides)))
    head = ("operation", *(f"{side} {result['versions'].get(side, '')}".strip() for side in sides))
    return "\n".join([BEGIN, about(result), "", *harness.table(head, rows), END])


def chosen_table_of(result: dict) -> str:
    """Return the rows of CHOSEN with their marks."""
    sides, rows = sides_of(result), []
    for case in result["cases"]:
        for operation in CHOSEN.get(case["tokens"], ()):
            if operation in case["us"]:
                size = f"{case['tokens']} x {case['hidden']}"
                rows.append((size, operation, *(cell(case["us"][operation], side) for side in sides)))
    return "\n".join([BEGIN, about(result), "", *harness.table(("tokens", "operation", *sides), rows), END])


def about(result: dict) -> str:
    return f"{result['machine']}, PyTorch {result['torch']}, build {result['build']}, {result['date']}:"


def title_of(case: dict) -> str:
    return f"{case['tokens']} x {case['hidden']}, top-{case['topk']} of {case['experts']}, {case['layout']} layout"


def cell(times: dict[str, float], side: str) -> str:
    if side not in times:
        return ""
    return f"{times[side]:.0f}" + ("" if side in (ENGINE, MORE_SMS) else f" ({times[side] / times[ENGINE]:.2f}x)")


def draw(result: dict, path: Path) -> None:
    """Draw a panel of bars for each case."""
    sides = sides_of(result)

    def fill(figure: Figure) -> None:
        heights = [sum(len(times) + 1 for times in case["us"].values()) for case in result["cases"]]
        panels = figure.subplots(1, len(heights), squeeze=False)[0]
        for axes, case in zip(panels, result["cases"]):
            at, ticks = 0.0, []
            for times in case["us"].values():
                first = at
                for side in (side for side in sides if side in times):
                    bars = axes.barh(at, times[side], 0.9, color=COLORS[side])
                    axes.bar_label(bars, fmt="%.0f", size=7, padding=2)
                    at += 1
                ticks.append((first + at - 1) / 2)
                at += 0.8
            axes.set_yticks(ticks, [name.replace(", ", ",\n") for name in case["us"]], size=8)
            axes.invert_yaxis()
            axes.margins(x=0.12)
            axes.set_title(title_of(case), size=9)
        handles = [panels[0].barh(0, 0, color=COLORS[side]) for side in sides]
        figure.legend(handles, sides, loc="outside lower center", ncols=len(sides))
        figure.suptitle(f"{result['machine']}, {result['date']}: microseconds, median of the slowest rank")

    harness.draw(path, (5.2 * len(result["cases"]), 6.0), fill)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md", help="for all figures")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="for a choice of them")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "libraries.json")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page has other figures")
    args = parser.parse_args(argv)
    result = json.loads(args.results.read_text())
    failed = replace_part(args.page, table_of(result), args.results, args.check)
    failed |= replace_part(args.readme, chosen_table_of(result), args.results, args.check)
    if not failed and not args.check:
        draw(result, args.results.with_suffix(".png"))
    return failed


if __name__ == "__main__":
    sys.exit(main())
