"""Loss curves of several Megatron-LM jobs in one chart, and how far each is from the first one of its seed.

    python benchmarks/loss_curves.py losses.json losses.png --tail 100 \\
        'seed 1: alltoall=a.log' 'seed 1: alltoall again=b.log' 'seed 1: ep_dispatcher=c.log,resumed.log'

A log is what pretrain_gpt.py prints with --log-interval 1. Logs of one run after another are joined by commas: where
both have an iteration, the later log counts. The first run of a seed is what the others of this seed are compared with.
Give the same dispatcher twice: the distance between two runs of it is the job's own noise.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

LINE = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([\d.E+-]+)")
SMOOTH = 10  # iterations in one point of the lower chart


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figures", type=Path, help="JSON file to write")
    parser.add_argument("chart", type=Path, help="image to write, .png or .svg")
    parser.add_argument("runs", nargs="+", metavar="SEED: NAME=LOG[,LOG]")
    parser.add_argument("--tail", type=int, default=100, help="iterations at the end for the table; default 100")
    parser.add_argument("--title", default="")
    args = parser.parse_args(argv)
    if args.tail < 1:
        parser.error(f"--tail: given {args.tail}, allowed: at least 1")
    runs = []
    for text in args.runs:
        found = re.fullmatch(r"(.+?): (.+?)=(.+)", text)
        if found is None:
            parser.error(f"run: given {text!r}, allowed: 'SEED: NAME=LOG' or 'SEED: NAME=LOG,LOG'")
        seed, name, logs = found.groups()
        losses = losses_of([Path(log) for log in logs.split(",")])
        if not losses:
            parser.error(f"run: given {text!r}, whose logs have no losses, allowed: logs with --log-interval 1")
        runs.append(dict(seed=seed, name=name, losses=losses))
    distances(runs, args.tail)
    args.figures.write_text(json.dumps(dict(title=args.title, tail=args.tail, runs=runs), indent=1) + "\n")
    print(table(runs, args.tail))
    draw(runs, args.title, args.chart)
    return 0


def losses_of(logs: list[Path]) -> dict[int, float]:
    """Return the loss of each iteration, in ascending order."""
    found: dict[int, float] = {}
    for log in logs:
        found |= {int(n): float(loss) for n, loss in LINE.findall(log.read_text(errors="replace"))}
    return dict(sorted(found.items()))


def distances(runs: list[dict], tail: int) -> None:
    """Add to each run how far it is from the first one of its seed, over the last ``tail`` iterations of both.

    ``relative``: the mean of |difference| / loss. ``final``: the mean loss there.
    """
    first: dict[str, dict] = {}
    for run in runs:
        of_seed = first.setdefault(run["seed"], run)
        both = sorted(run["losses"].keys() & of_seed["losses"].keys())[-tail:]
        run["final"] = statistics.fmean(run["losses"][n] for n in both)
        run["relative"] = statistics.fmean(
            abs(run["losses"][n] - of_seed["losses"][n]) / of_seed["losses"][n] for n in both
        )


def table(runs: list[dict], tail: int) -> str:
    lines = [
        f"| | | mean loss of the last {tail} | mean distance from the first run of the seed |",
        "|---|---|---|---|",
    ]
    previous = ""
    for run in runs:
        distance = "" if run["seed"] != previous else f"{run['relative']:.2%}"
        lines.append(f"| {run['seed']} | {run['name']} | {run['final']:.4f} | {distance} |")
        previous = run["seed"]
    return "\n".join(lines)


def draw(runs: list[dict], title: str, path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    seeds, names = (list(dict.fromkeys(run[key] for run in runs)) for key in ("seed", "name"))
    colours = {name: f"C{n}" for n, name in enumerate(names)}
    figure = Figure(figsize=(6 * len(seeds), 7), layout="constrained")
    grid = figure.subplots(2, len(seeds), squeeze=False, sharex=True)
    for column, seed in enumerate(seeds):
        upper, lower = grid[0][column], grid[1][column]
        first, *others = (run for run in runs if run["seed"] == seed)
        for run in (first, *others):
            upper.plot(
                list(run["losses"]), list(run["losses"].values()), color=colours[run["name"]], label=run["name"], lw=1
            )
        for run in others:
            both = sorted(run["losses"].keys() & first["losses"].keys())
            apart = [abs(run["losses"][n] - first["losses"][n]) / first["losses"][n] * 100 for n in both]
            points = [statistics.fmean(apart[max(0, n - SMOOTH + 1) : n + 1]) for n in range(len(apart))]
            lower.plot(both, points, color=colours[run["name"]], label=run["name"], lw=1)
        upper.set_title(seed)
        upper.set_ylabel("loss")
        lower.set_ylabel(f"% from {first['name']}, mean of {SMOOTH} iterations")
        lower.set_xlabel("iteration")
        lower.set_ylim(bottom=0)
        for axes in (upper, lower):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8)
    figure.suptitle(title)
    with rc_context({"svg.hashsalt": "ep_dispatcher"}):  # the same file from the same figures
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


if __name__ == "__main__":
    sys.exit(main())
