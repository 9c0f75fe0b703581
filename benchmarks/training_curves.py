"""Compares the curves of megatron_training.py, and draws their chart.

python benchmarks/training_curves.py runs/training/training.json      # prints the table, and draws the chart again
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE, OTHER_SEED = "alltoall", "alltoall_seed"
WINDOW = 50  # steps whose losses are averaged before curves are compared
FIRST_COMPARED = 200  # steps before it are not: the curves are steep there, and all differences small
COLORS = {
    BASE: "#d95f02",
    OTHER_SEED: "#999999",
    "ep_dispatcher": "#1f77b4",
    "balanced": "#2ca02c",
    "resumed": "#7a0177",
    "resumed_other_ep": "#e7298a",
}


def windows(run: dict[str, Any], interval: int) -> dict[int, float]:
    """Return the mean loss of each window of steps that has all of its steps, by the last one."""
    losses: dict[int, list[float]] = {}
    for iteration, loss in zip(run["iterations"], run["losses"]):
        # The first iteration of a job is logged too, and the next line has it once more.
        if loss is not None and iteration % interval == 0:
            losses.setdefault(-(-iteration // WINDOW) * WINDOW, []).append(loss)
    return {last: statistics.fmean(some) for last, some in losses.items() if len(some) == WINDOW // interval}


def differences(found: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Return the differences of windows from those of alltoall, for each other run."""
    curves = {name: windows(run, found["log_interval"]) for name, run in found["runs"].items()}
    base = curves.pop(BASE, {})
    return {
        name: {last: loss - base[last] for last, loss in curve.items() if last in base}
        for name, curve in curves.items()
    }


def size(of_windows: dict[int, float]) -> float | None:
    """Return the root mean square of the differences that are compared."""
    compared = [value for last, value in of_windows.items() if last > FIRST_COMPARED]
    return statistics.fmean(value**2 for value in compared) ** 0.5 if compared else None


def report(found: dict[str, Any]) -> list[str]:
    """Return the lines of a table, and one that compares the differences with those of another seed."""
    from ep_dispatcher.tools.benchmark.harness import table

    titles = ("job", "steps", "loss of the last windows", "validation loss", "difference from alltoall")
    titles += ("ms of a step", "tokens per s", "memory: allocator, GPU, MB", "skipped, NaN")
    sizes = {name: size(of_windows) for name, of_windows in differences(found).items()}
    rows = [_row(name, run, found, sizes.get(name)) for name, run in found["runs"].items()]
    lines, noise = table(titles, rows), sizes.pop(OTHER_SEED, None)
    if noise is None:
        return lines
    within = [f"{name} {value:.4f}" for name, value in sizes.items() if value is not None and value <= noise]
    beyond = [f"{name} {value:.4f}" for name, value in sizes.items() if value is not None and value > noise]
    lines.append(f"Root mean squares of differences from {BASE}, in windows of {WINDOW} steps after {FIRST_COMPARED}:")
    lines.append(
        f"another seed {noise:.4f}; within it: {', '.join(within) or 'none'}; beyond: {', '.join(beyond) or 'none'}"
    )
    return lines


def _row(name: str, run: dict[str, Any], found: dict[str, Any], difference: float | None) -> tuple[str, ...]:
    last = list(windows(run, found["log_interval"]).values())[-2:]
    steps = f"{run['iterations'][0]} to {run['iterations'][-1]}" if run["iterations"] else "none"
    ms = run["median_ms"]
    speed = f"{found['tokens_per_step'] / ms * 1e3:,.0f}" if ms else ""
    return (
        name if run["code"] == 0 else f"{name} (exit code {run['code']})",
        steps,
        _shown(statistics.fmean(last) if last else None, ".4f"),
        ", ".join(f"{loss:.4f} at {step}" for step, loss in run["validation"].items()),
        _shown(difference, ".4f"),
        _shown(ms, ".1f"),
        speed,
        f"{_shown(run['allocated_mb'], ',.0f')}, {_shown(run['device_mb'], ',.0f')}",
        f"{run['skipped']}, {run['nan']}",
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw_curves(path: Path) -> None:
    """Draw the chart beside a training.json: losses, and differences from alltoall beside those of the other seed."""
    from ep_dispatcher.tools.benchmark.harness import draw

    draw(path.with_suffix(".png"), (9.0, 8.0), partial(_fill, json.loads(path.read_text())))


def _fill(found: dict[str, Any], figure: Figure) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    interval, apart = found["log_interval"], differences(found)
    for name, color in COLORS.items():
        if name in found["runs"]:
            run = found["runs"][name]
            points = [(i, loss) for i, loss in zip(run["iterations"], run["losses"]) if loss and i % interval == 0]
            upper.plot([i for i, _ in points], [loss for _, loss in points], color=color, label=name, linewidth=1)
        if name in apart:
            lower.plot(list(apart[name]), list(apart[name].values()), color=color, label=name, linewidth=1.2)
    compared = [abs(d) for curve in apart.values() for last, d in curve.items() if last > FIRST_COMPARED]
    if compared:  # earlier differences are far larger
        lower.set_ylim(-1.5 * max(compared), 1.5 * max(compared))
    noise = size(apart.get(OTHER_SEED, {}))
    if noise is not None:
        lower.axhspan(-noise, noise, color=COLORS[OTHER_SEED], alpha=0.25, label="root mean square of the other seed")
    gpus = sorted(set(found["machine"]["gpus"]))
    upper.set_title(f"pretrain_gpt.py, 8 layers of 32 experts, EP {found['ranks']}, {', '.join(gpus) or 'no GPU'}")
    upper.set_ylabel(f"loss, nats per byte, mean of {interval} steps")
    lower.set_ylabel(f"difference from {BASE}, mean of {WINDOW} steps")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)


if __name__ == "__main__":
    for given in map(Path, sys.argv[1:]):
        print(*report(json.loads(given.read_text())), sep="\n")
        draw_curves(given)
