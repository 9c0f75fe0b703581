"""What all benchmarks share: arguments, ranks that share GPUs, times of CUDA graphs, tables and charts.

``benchmarks/compare_builds.py`` loads this file by its path beside the package of an older build. So at the top it
imports nothing of the package.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ep_dispatcher.tools.testing import RankPool

Key = TypeVar("Key")  # what names a side
IN_A_ROW = 10  # operations that are timed together

# ---- arguments ------------------------------------------------------------------------------------------------------

ABOUT = {
    "ranks": "processes, each with a GPU if there are enough",
    "sms": "multiprocessors of a rank",
    "tokens": "tokens of a rank",
    "hidden": "elements of a token's row",
    "experts": "experts of all ranks",
    "topk": "experts of a token",
    "rounds": "turns of each side",
}


def make_parser(doc: str, **defaults: int) -> argparse.ArgumentParser:
    """Return a parser with an argument for each default, an integer of at least 1: ``few_tokens`` is --few-tokens.

    Its description is the first line of ``doc``.
    """
    parser = argparse.ArgumentParser(
        description=doc.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in defaults.items():
        about = ABOUT.get(name, name.replace("_", " "))
        parser.add_argument(f"--{name.replace('_', '-')}", type=number(int, 1), default=default, help=about)
    return parser


def number(kind: Callable, lowest: float) -> Callable[[str], Any]:
    """Return an argument's type: an int or float from ``lowest`` on."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not lowest <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"it is {text!r}, but has to be {kind.__name__} and at least {lowest:g}")
        return value

    return parse


def numbers(kind: Callable, lowest: float) -> Callable[[str], list]:
    """Return an argument's type: such numbers with commas between them."""
    one = number(kind, lowest)
    return lambda text: [one(part) for part in text.split(",")]


# ---- ranks ----------------------------------------------------------------------------------------------------------


def start_gpu_ranks(num_ranks: int, timeout_s: float = 300.0, built_with: str | None = None) -> RankPool:
    """Start ranks on GPUs, which they share if there are fewer.

    Exit with the reason where no GPU can be used, or the engine was built without EP_DISPATCHER_<built_with>=1.
    """
    from ep_dispatcher.engines import cuda_problem
    from ep_dispatcher.tools.testing import RankPool

    problem, engine = cuda_problem(), "the CUDA engine"
    if built_with is not None:
        engine += f", built with EP_DISPATCHER_{built_with}=1"
    if built_with is not None and problem is None:
        from ep_dispatcher import _C_cuda

        if not getattr(_C_cuda, f"has_{built_with.lower()}"):
            problem = "it was built without this"
    if problem is not None:
        print(f"{engine} cannot run here: {problem}", file=sys.stderr)
        raise SystemExit(2)
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    return RankPool(num_ranks, timeout_s=timeout_s)


def use_gpu(rank: int) -> torch.device:
    """Make the GPU of a rank the current one, and return it."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


# ---- the clock ------------------------------------------------------------------------------------------------------


def on_host(run: Callable[[], object], times: int = IN_A_ROW) -> Callable[[], float]:
    """Return a function that calls ``run`` several times, and returns the microseconds of one run on an idle device.

    ``run`` is called once before.
    """
    run()

    def measure() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e6 / times

    return measure


def captured(
    run: Callable[[], object], times: int = 1, pool: Any = None, meet: Callable[[], object] = lambda: None
) -> tuple[torch.cuda.CUDAGraph, object]:
    """Return a CUDA graph of several runs, and what the last one returned. ``run`` is called once before the capture.

    ``meet`` is called just before the capture.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    meet()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(times):
            kept = run()
    return graph, kept


def on_device(run: Callable[[], object], times: int = IN_A_ROW, pool: Any = None) -> Callable[[], float]:
    """Return a function that replays a CUDA graph of several runs, and returns the microseconds of one run.

    pool: a torch.cuda.graph_pool_handle() of graphs that are replayed one at a time and whose runs return nothing
    """
    graph, kept = captured(run, times, pool)

    def measure(inputs: object = (run, kept)) -> float:  # a graph does not keep what it reads and writes
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / times

    return measure


def median_times(replays: dict[Key, Callable[[], float]], rounds: int) -> dict[Key, float]:
    """Return the median time of each function over several rounds. In each round all ranks call each function once."""
    times: dict[Key, list[float]] = {key: [] for key in replays}
    for _ in range(rounds):
        for key, replay in replays.items():
            if dist.is_initialized():
                dist.barrier()
            times[key].append(replay())
    return {key: statistics.median(of_one) for key, of_one in times.items()}


# ---- results --------------------------------------------------------------------------------------------------------


def table(titles: tuple[str, ...], rows: list[tuple]) -> list[str]:
    """Return the lines of a table in Markdown."""
    first, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (titles, *rows))
    return [first, f"|{'---|' * len(titles)}", *others]


def draw(path: Path, size: tuple[float, float], fill: Callable[[Figure], None], dpi: int = 110) -> bool:
    """Draw into a file, the same bytes from the same figures, and say so. Return False without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart: matplotlib is missing (pip install matplotlib)")
        return False
    figure = Figure(figsize=size, layout="constrained")
    fill(figure)
    changing = ("Date", "Creator") if path.suffix == ".svg" else ("Software",)  # the version of matplotlib among them
    with rc_context({"svg.hashsalt": "ep_dispatcher"}):
        figure.savefig(path, dpi=dpi, metadata=dict.fromkeys(changing))
    print(f"chart: {path}")
    return True
