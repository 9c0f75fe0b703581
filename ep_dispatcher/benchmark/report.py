"""``python -m ep_dispatcher.bench --report``: the part of docs/performance.md between its marks, and its charts.

Made from the JSON files of the suite. The same files give the same text, to the last character.
"""

from __future__ import annotations

import json
import os
from itertools import groupby
from pathlib import Path

from ep_dispatcher.benchmark.cases import ALL_STEPS, FORWARD_STEPS, OPERATIONS, Case
from ep_dispatcher.benchmark.parts import ALL_TO_ALL, DEEP_EP, ENGINE, GRAPH, MEGATRON

BEGIN = "<!-- begin: python -m ep_dispatcher.bench --report -->"
END = "<!-- end -->"
NOTHING = "No figures of GPUs are here yet."
CASES = "Cases, in microseconds (hot_rank: one rank receives four times the mean, or all there is if ranks are fewer):"
STANDARD = ("tokens", "hidden", "experts", "topk", "routing", "dtype", "layout", "sms")


def write(page: Path, folder: Path) -> int:
    """Rewrite the part between the two marks, and draw the charts that it shows; 1 when there are no marks, else 0."""
    text = page.read_text() if page.exists() else ""
    if text.count(BEGIN) != 1 or END not in text.partition(BEGIN)[2]:
        print(f"{page}: given without the lines {BEGIN} and {END}, allowed with each of them once")
        return 1
    runs = load(folder)
    before, _, rest = text.partition(BEGIN)
    page.write_text(before + part(runs, folder, page.parent) + rest.partition(END)[2])
    print(f"{page}: the part between the marks, from {len(runs)} files in {folder}")
    try:
        from ep_dispatcher.benchmark import charts
    except ImportError:
        print("no charts: matplotlib is missing (pip install matplotlib)")
        return 0
    for group in machines(runs):
        print(f"chart: {charts.draw(group, chart_path(group, folder))}")
    return 0


def load(folder: Path) -> list[dict]:
    """The runs of ``suite.py`` in a folder, in the order of their file names."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [run for run in runs if "case" in run]


def machines(runs: list[dict]) -> list[list[dict]]:
    """Runs that are shown together: the same engine on as many of the same GPUs. In each, cases in ascending order."""

    def machine(run: dict) -> tuple:
        return run["case"]["engine"], _processor(run), run["case"]["ranks"]

    def case(run: dict) -> tuple:
        return tuple(run["case"][name] for name in ("hidden", "experts", "topk", "routing", "tokens", "sms"))

    return [list(group) for _, group in groupby(sorted(runs, key=lambda run: (machine(run), case(run))), key=machine)]


def _processor(run: dict) -> str:
    return next(iter(run["machine"]["gpus"]), run["machine"]["cpu"])


def is_standard(run: dict, *but: str) -> bool:
    """Whether the case is the standard one, but for these fields."""
    return all(run["case"][name] == getattr(Case, name) for name in STANDARD if name not in but)


def chart_path(group: list[dict], folder: Path) -> Path:
    case = group[0]["case"]
    return folder / f"{case['engine']}-{case['ranks']}ranks-{_processor(group[0]).replace(' ', '-')}.png"


def part(runs: list[dict], folder: Path, root: Path) -> str:
    """What stands between the marks, with them."""
    groups = machines(runs)
    blocks = ["\n\n".join(_group(group, folder, root)) for group in groups] or [NOTHING]
    return "\n\n".join([BEGIN, *blocks, END])


def _group(group: list[dict], folder: Path, root: Path) -> list[str]:
    blocks = [f"### {group[0]['case']['ranks']} x {_processor(group[0])}", _machine(group)]
    blocks += [_operations(run) for run in group if is_standard(run)]
    blocks += [CASES, _cases(group)]
    image = chart_path(group, folder)
    blocks.append(f"![times]({os.path.relpath(image, root)})")
    missing = dict.fromkeys(note for run in group for note in run["notes"])
    if missing:
        blocks.append("\n".join(["Not measured:", "", *(f"- {note}" for note in missing)]))
    return blocks


def _machine(group: list[dict]) -> str:
    def values(name: str, runs: list[dict]) -> str:
        return ", ".join(sorted({str(run.get(name, "unknown")) for run in runs}))

    about = [run["machine"] for run in group]
    days = sorted({one["date"][:10] for one in about})
    versions = [f"{title} {values(name, about)}" for name, title in (("driver", "driver"), ("cuda", "CUDA"))]
    versions += [f"PyTorch {values('torch', about)}", f"NCCL {values('nccl', about)}"]
    other = sorted({run[name] for run in group for name in ("megatron", "deep_ep") if name in run})
    return (
        f"{', '.join(versions + other)}; build {values('git_commit', about)}; {' to '.join(days[:1] + days[1:][-1:])}. "
        f"Through the public calls, timed by events on the device; microseconds of the slowest rank, median of "
        f"{values('iters', [run['case'] for run in group])}. GB/s counts all rows that a rank receives, its own too. "
        "The engine is given max_recv_rows, the most that a rank needs; in Megatron the host waits for the counts."
    )


def _operations(run: dict) -> str:
    case, sides = run["case"], (GRAPH, ALL_TO_ALL, MEGATRON, DEEP_EP)
    shown = [side for side in sides if any(side in figures for figures in run["operations"].values())]
    lines = [
        "{tokens} tokens per rank, hidden {hidden}, {experts} experts, top-{topk}, {routing} routing, at most {sms} "
        "multiprocessors:".format(**case),
        "",
        _row("operation", "engine", "least to most", "GB/s", *(side.removeprefix("engine, ") for side in shown)),
        _row(*["---"] * (4 + len(shown))),
    ]
    for operation in (*OPERATIONS, FORWARD_STEPS, ALL_STEPS):
        figures = run["operations"].get(operation)
        if figures is None:
            continue
        name = f"in Megatron: {operation}" if operation in (FORWARD_STEPS, ALL_STEPS) else operation
        engine = figures.get(ENGINE)
        spread = f"{_us(engine['min_s'])} to {_us(engine['max_s'])}" if engine else ""
        speed = f"{engine['gb_per_s']:.0f}" if engine else ""
        lines.append(_row(name, _time(engine), spread, speed, *(_against(figures.get(side)) for side in shown)))
    for operation, moved in run.get("wire_bytes", {}).items():
        between = {name: wires["inside nodes"] / 1e6 for name, wires in moved.items()}
        other = f" (all_to_all_single: {between['baseline']:.1f} MB)" if "baseline" in between else ""
        lines += [
            "",
            f"A {operation} moves {between['engine']:.1f} MB between all GPUs together; the least is "
            f"{between['least']:.1f} MB{other}.",
        ]
    return "\n".join(lines)


# Column title, side and operation of the table of cases.
CASE_COLUMNS = (
    ("dispatch", ENGINE, "dispatch"),
    ("dispatch FP8", ENGINE, "dispatch FP8"),
    ("combine", ENGINE, "combine"),
    ("cached dispatch", ENGINE, "cached dispatch"),
    ("dispatch+combine", ENGINE, "dispatch+combine"),
    ("in a CUDA graph", GRAPH, "dispatch+combine"),
    ("all_to_all_single", ALL_TO_ALL, "dispatch+combine"),
    ("Megatron, all steps", ENGINE, ALL_STEPS),
    ("its alltoall", MEGATRON, ALL_STEPS),
)


def _cases(group: list[dict]) -> str:
    titles = ["tokens", "hidden", "experts", "top-k", "routing", "SMs", *(title for title, _, _ in CASE_COLUMNS)]
    lines = [_row(*titles), _row(*["---"] * len(titles))]
    for run in group:
        values = [str(run["case"][name]) for name in ("tokens", "hidden", "experts", "topk", "routing", "sms")]
        for _, side, operation in CASE_COLUMNS:
            figures = run["operations"].get(operation, {}).get(side)
            values.append(_time(figures) if side in (ENGINE, GRAPH) else _against(figures))
        lines.append(_row(*values))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _time(figures: dict | None) -> str:
    return _us(figures["median_s"]) if figures else ""


def _against(figures: dict | None) -> str:
    """The time, and how many times as fast the engine is."""
    if figures is None:
        return ""
    return f"{_time(figures)} ({figures['speedup']:.1f}x)" if "speedup" in figures else _time(figures)
