"""Compares two runs: the engine's times in B over those in A. Times of other sides are shown, but not judged."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ep_dispatcher.tools.benchmark.cases import Case
from ep_dispatcher.tools.benchmark.measurements import ENGINE, GRAPH

NO_SIZES = ("iters", "warmup", "graph", "operations", "others")  # fields of a Case that A and B need not share


def run(a: Path, b: Path, tolerance: float) -> int:
    """Print a table of ratios, and return the exit code.

        2 if A and B differ in cases, sizes or operations of the engine (it prints where), or have nothing in common
        1 if an operation of the engine takes more than 1 + tolerance times as long in B, or B has wrong results
        0 otherwise

    ``a`` and ``b`` are JSON files or folders of them. Folders are matched by file names; a file beside a folder is
    compared with the file of the same name.
    """
    before, after = load(a), load(b)
    problems = [f"{path}: no JSON of this benchmark" for path, runs in ((a, before), (b, after)) if not runs]
    if a.is_file() and b.is_file():
        before = dict(zip(after, before.values()))  # whatever their names are
    problems += [f"{name}: not in {b}" for name in before if name not in after and b.is_dir()]
    problems += [f"{name}: not in {a}" for name in after if name not in before and a.is_dir()]
    regressions = []
    for name in (name for name in before if name in after):
        old, new = before[name], after[name]
        if different := different_sizes(old, new):
            problems.append(f"{name}: {different}")
            continue
        print(table(name, old, new), end="\n\n")
        for operation, sides in old["operations"].items():
            for side in (ENGINE, GRAPH):
                ratio = ratio_of(operation, side, old, new)
                if ratio is None and side == ENGINE and side in sides:
                    problems.append(f"{name}: {operation} of the engine is not in B")
                elif ratio is not None and ratio > 1 + tolerance:
                    slower = f"{ratio:.3f} times as long, allowed {1 + tolerance:g}"
                    regressions.append(f"{name}: {side}, {operation}: {slower}")
        wrong = [side for side, compared in new["compared"].items() if not compared["same"]]
        regressions += [f"{name}: results differ from those of {side}" for side in wrong]
    for kind, found in (("regression", regressions), ("cannot be compared", problems)):
        for text in found:
            print(f"{kind}: {text}")
    return 2 if problems else int(bool(regressions))


def load(path: Path) -> dict[str, dict]:
    """Return file name -> run, of one file or of all in a folder. Other JSON is left out."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    runs = {file.name: json.loads(file.read_text()) for file in files}
    return {name: run for name, run in runs.items() if "case" in run}


def different_sizes(old: dict, new: dict) -> str:
    """Return the fields that differ between the cases, in words."""
    a, b = (asdict(Case(**run["case"])) for run in (old, new))
    return ", ".join(f"{name} {a[name]} and {b[name]}" for name in a if name not in NO_SIZES and a[name] != b[name])


def ratio_of(operation: str, side: str, old: dict, new: dict) -> float | None:
    figures = [run["operations"].get(operation, {}).get(side) for run in (old, new)]
    return None if None in figures else figures[1]["median_s"] / figures[0]["median_s"]


def table(name: str, old: dict, new: dict) -> str:
    """Return a table with the microseconds of both runs, and B / A."""
    machines = [run["machine"] for run in (old, new)]
    lines = [name]
    for letter, machine in zip("AB", machines):
        processor = ", ".join(sorted(set(machine["gpus"]))) or machine["cpu"]
        build, date = machine["git_commit"], machine["date"]
        lines.append(f"{letter}: {processor}, torch {machine['torch']}, build {build}, {date}")
    lines.append(f"{'operation':<28}{'side':<30}{'A, us':>10}{'B, us':>10}{'B / A':>8}")
    for operation, sides in old["operations"].items():
        for side in sides:
            ratio = ratio_of(operation, side, old, new)
            if ratio is not None:
                a, b = (run["operations"][operation][side]["median_s"] * 1e6 for run in (old, new))
                lines.append(f"{operation:<28}{side:<30}{a:10.1f}{b:10.1f}{ratio:8.3f}")
    return "\n".join(lines)
