"""Draws losses of several Megatron-LM jobs in one chart, and the distance of each from the first one of its seed.

    python benchmarks/loss_curves.py losses.json losses.png --tail 100 \\
        'seed 1: alltoall=a.log' 'seed 1: alltoall again=b.log' 'seed 1: ep_dispatcher=c.log,resumed.log'

A log is the output of pretrain_gpt.py with --log-interval 1. A run that was resumed has several logs, joined by commas;
if two have the same iteration, the later log counts. Other runs of a seed are compared with its first one. Give the
same dispatcher twice: the distance between its two runs is the noise of the job.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

from megatron_log import iterations


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
    import charts  # it needs matplotlib

    print(f"chart: {charts.draw_losses(runs, args.title, args.chart)}")
    return 0


def losses_of(logs: list[Path]) -> dict[int, float]:
    """Return the loss of each iteration, in ascending order."""
    found: dict[int, float] = {}
    for log in logs:
        found |= {one.number: one.loss for one in iterations(log)}
    return dict(sorted(found.items()))


def distances(runs: list[dict], tail: int) -> None:
    """Add to each run its distance from the first one of its seed, over the last ``tail`` iterations of both.

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


if __name__ == "__main__":
    sys.exit(main())
