"""What benchmarks between two hosts of this machine share: rates of the network, and the chart of times against them.

python benchmarks/rates.py benchmarks/results/two-hosts-cuda.json      # draws it again
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_LIMIT = "none"
RATES = ["10gbit", NO_LIMIT, "20gbit", "5gbit", "1gbit"]


def rate(text: str) -> str:
    """The type of an argument: "none", or a rate of tc in Gb/s."""
    if text != NO_LIMIT and not re.fullmatch(r"\d+gbit", text):
        raise argparse.ArgumentTypeError(f"it is {text!r}, but has to be {NO_LIMIT!r}, or as '10gbit'")
    return text


def set_rate(hosts, text: str) -> None:
    """``hosts``: Hosts of tests/lib/two_hosts.py."""
    hosts.limit(None if text == NO_LIMIT else text)


def draw_rates(path: Path) -> None:
    """Draw the chart beside a JSON. It has a "title", and "median_ms": side -> rate -> milliseconds, ours first."""
    from ep_dispatcher.tools.benchmark.harness import draw

    found = json.loads(path.read_text())
    draw(path.with_suffix(".png"), (6.0, 4.5), partial(_fill, found["title"], found["median_ms"]))


def _fill(title: str, sides: dict[str, dict[str, float]], figure: Figure) -> None:
    axes, (ours, *_) = figure.subplots(), sides.values()
    rates = sorted(ours, key=lambda text: float("inf") if text == NO_LIMIT else int(text.removesuffix("gbit")))
    for side, of_rate in sides.items():
        axes.plot(range(len(rates)), [of_rate[text] for text in rates], "o-", label=side)
        for n, text in enumerate(rates):
            ratio = "" if of_rate is ours else f" ({of_rate[text] / ours[text]:.1f}x)"
            axes.annotate(f"{of_rate[text]:.0f}{ratio}", (n, of_rate[text]), (0, 6), textcoords="offset points", size=7)
    axes.set_xticks(range(len(rates)), ["no limit" if r == NO_LIMIT else r.replace("gbit", " Gb/s") for r in rates])
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds (less is better)")
    axes.margins(x=0.2, y=0.12)
    axes.set_title(title)
    axes.legend()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw_rates(Path(name))
