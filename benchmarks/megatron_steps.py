"""``python benchmarks/megatron_steps.py``: writes the table of Megatron's steps, and its chart, from one JSON file.

    python benchmarks/megatron_steps.py --take runs/job/times.json Qwen3-235B=runs/qwen3_235b/times.json

--take makes benchmarks/results/megatron-steps.json of the files of megatron_in_turn.py, one for each part of the table
and of the chart, and with the name of its model if it has one. Without it both are made of that file again. ``--check``
writes nothing, and fails where the page is not made of the file. --page and --results name others, for example

    --page benchmarks/results/RUNS.md --results benchmarks/results/megatron-steps-1xH200.json

A job's name is that of its dispatcher, and after a dash what is special about it: alltoall, ep_dispatcher-graphs-fp8.
Dispatchers are the columns, and the rest makes the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_jobs import StepTime
from report import END, replace_part

from ep_dispatcher.tools.benchmark import harness
from ep_dispatcher.tools.benchmark.machine import to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- begin: python benchmarks/megatron_steps.py -->"
BASE = "alltoall"  # what ratios are of
COLORS = {  # in the order of the columns
    BASE: "#999999",
    "deepep": "#2ca02c",
    "hybridep": "#7a0177",
    "ep_dispatcher": "#1f77b4",
}
MOST_PANELS_IN_A_ROW = 3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--page", type=Path, default=ROOT / "docs" / "performance.md", help="gets the table")
    add("--results", type=Path, default=ROOT / "benchmarks" / "results" / "megatron-steps.json")
    add("--take", nargs="+", metavar="[MODEL=]times.json", help="make --results of these files first")
    add("--check", action="store_true", help="change nothing; fail if the page has other figures")
    args = parser.parse_args(argv)
    if args.take:
        args.results.write_text(to_json([take(given) for given in args.take]))
    parts = json.loads(args.results.read_text())
    failed = replace_part(args.page, table_of(parts), args.results, args.check)
    if not failed and not args.check:
        draw(parts, args.results.with_suffix(".png"))
    return failed


def take(given: str) -> dict[str, Any]:
    """Return a part with its model, which is "" if ``given`` is only the path of a file."""
    model, _, path = given.rpartition("=")
    return {"model": model} | json.loads(Path(path).read_text())


def steps_of(part: dict[str, Any]) -> dict[str, StepTime]:
    """Return the times of the jobs that have a run that ended well, in the order of their first runs."""
    sound = [run for run in part["runs"] if run["code"] == 0 and run["ms"]]
    names = dict.fromkeys(run["job"] for run in sound)
    return {name: StepTime.of([run["ms"] for run in sound if run["job"] == name], part["last"]) for name in names}


def table_of(parts: list[dict[str, Any]]) -> str:
    """Return the table with its marks."""
    rows, before = [], None
    measured = {name.partition("-")[0] for part in parts for name in steps_of(part)}
    sides = [side for side in COLORS if side in measured]
    for part in parts:
        steps, title = steps_of(part), title_of(part)
        for variant in dict.fromkeys(name.partition("-")[2] for name in steps):
            words = ["the same" if title == before else title, *filter(None, variant.split("-"))]
            rows.append((", ".join(words), *cells(steps, sides, variant)))
            before = title
    return "\n".join([BEGIN, about(parts[0]), "", *harness.table(("job", *sides), rows), END])


def about(part: dict[str, Any]) -> str:
    machine = part["machine"]
    gpus, date = machine["gpus"], machine["date"].partition("T")[0]
    return f"{len(gpus)} x {gpus[0]}, PyTorch {machine['torch']}, build {machine['modules']['_C_cuda']}, {date}:"


def title_of(part: dict[str, Any]) -> str:
    """Return a part's model and its sizes."""
    words = part["arguments"].split()

    def last(flag: str) -> str:
        """The value that counts, if a flag is there more than once."""
        return words[len(words) - 1 - words[::-1].index(flag) + 1]

    layers = last("--num-layers")
    sizes = f"{part['model']}: " if part["model"] else ""
    sizes += f"{layers} layer{'s' * (layers != '1')}, hidden {last('--hidden-size')}, "
    return (
        sizes + f"top-{last('--moe-router-topk')} of {last('--num-experts')} experts of {last('--moe-ffn-hidden-size')}"
    )


def cells(steps: dict[str, StepTime], sides: list[str], variant: str) -> list[str]:
    """Return a row's times in milliseconds, and in brackets relative to the base, which may have no such variant."""
    by_side = {side: steps.get(f"{side}-{variant}" if variant else side) for side in sides}
    base = by_side.get(BASE) or steps.get(BASE)
    found = []
    for side, step in by_side.items():
        if step is None:
            found.append("")
        elif base is None or side == BASE:
            found.append(f"{step.median:.0f}")
        else:
            found.append(f"{step.median:.0f} ({step.median / base.median:.2f})")
    return found


def draw(parts: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel of bars for each part."""
    rows = -(-len(parts) // MOST_PANELS_IN_A_ROW)
    columns = -(-len(parts) // rows)
    harness.draw(path, (5.6 * columns, 0.6 + 2.6 * rows), partial(_fill, parts, rows, columns))


def _fill(parts: list[dict[str, Any]], rows: int, columns: int, figure: Figure) -> None:
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for part, axes in zip(parts, panels):
        _draw_part(part, axes)
    for axes in list(panels):  # zip has left these
        axes.set_visible(False)
    figure.suptitle(f"{about(parts[0])[:-1]}: milliseconds of a step, median, 10th to 90th percentile")


def _draw_part(part: dict[str, Any], axes) -> None:
    steps = steps_of(part)
    for place, (name, step) in enumerate(steps.items()):
        spread = [[max(0.0, step.median - step.low)], [max(0.0, step.high - step.median)]]
        axes.barh(place, step.median, 0.8, xerr=spread, capsize=2, color=COLORS.get(name.partition("-")[0]))
        axes.annotate(f" {step.median:.0f}", (max(step.high, step.median), place), va="center", size=8)
    axes.set_yticks(range(len(steps)), [name.replace("-", "\n", 1) for name in steps], size=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(title_of(part), size=9)


if __name__ == "__main__":
    sys.exit(main())
