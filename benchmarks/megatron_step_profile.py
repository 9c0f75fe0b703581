"""Says where a training step of Megatron-LM goes: the GPU's busy time by kind of kernel, the host's time by owner.

    python benchmarks/megatron_in_turn.py --ranks 2 --rounds 1 --out runs/profile \\
        --job 'alltoall: PROFILE=runs/alltoall.json PYTHONPATH=/opt/Megatron-LM --moe-token-dispatcher-type alltoall' \\
        --job 'ep_dispatcher: PROFILE=runs/ours.json PYTHONPATH=/opt/Megatron-LM --moe-token-dispatcher-type flex \\
               --moe-flex-dispatcher-backend ep_dispatcher' \\
        benchmarks/megatron_step_profile.py /opt/Megatron-LM/pretrain_gpt.py --train-iters 24 ...
    python benchmarks/megatron_step_profile.py --draw runs/profile.png runs/alltoall.json runs/ours.json

Rank 0 writes the file of the variable PROFILE, an absolute path, after its last profiled step: 10 steps warm up, 5 are
timed, 3 run under PyTorch's profiler, and after another one 5 run under the signals of host_samples.py. A step ends
when its GPU is idle. In sampled steps the backward runs in the main thread, as a signal does not see others: the step
before them does so too, because then what torch.compile compiled for another thread is compiled again. Kinds of
kernels may overlap, so their sum can be more than the busy time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from host_samples import OTHERS, Sampler, shares

# Jobs without ep_dispatcher run this file too, so it is imported in functions only.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARM_UP, TIMED, TRACED, SAMPLED = 10, 5, 3, 5  # steps; another one is between the last two
SAMPLE_US = 500
NAME_LENGTH = 160  # of a kernel, of which templates make thousands of letters
KINDS = {  # of kernels, by a part of their name; the first that fits
    "gradients and weights between ranks": r"nccl.*(reduce|gather)",
    "dispatch, combine, permutes": r"nccl|dispatch|combine|permute|sort_chunks|deep_ep|hybrid_ep|direct_kernel",
    "attention": r"attention|fmha|flash|sdpa|cudnn",
    "GEMMs": r"gemm|nvjet|cutlass|xmma|_products|^_multiply|weight_grad_kernel",
    "optimizer": r"adam|multi_tensor|l2norm",
}
COLORS = ("#d95f02", "#7a0177", "#9ecae1", "#2ca02c", "#e7298a", "#cccccc")
WAIT = re.compile(r"cuda\w*Synchronize")  # a call of CUDA in which the host waits for its GPU
Interval = tuple[float, float]  # begin and end


def main(argv: list[str]) -> int:
    if argv[:1] != ["--draw"]:
        run_profiled(Path(os.environ["PROFILE"]), argv)
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", type=Path, required=True, metavar="FILE.png", help="where the chart goes")
    parser.add_argument("profiles", type=Path, nargs="+", help="files of profiled jobs")
    args = parser.parse_args(argv)
    found = {path.stem: json.loads(path.read_text()) for path in args.profiles}
    print("\n".join(report(found)))
    draw(found, args.draw)
    return 0


# ---- measuring ------------------------------------------------------------------------------------------------------


def run_profiled(path: Path, command: list[str]) -> None:
    """Run a script of Megatron-LM with its arguments, and profile steps of its training."""
    from megatron.training import training

    training.train_step = Profiled(training.train_step, path)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


class Profiled:
    """In the place of Megatron's train_step: calls it, and looks at it in some of its calls."""

    def __init__(self, step: Any, path: Path):
        self.step, self.path = step, path
        self.steps = 0
        self.times: list[float] = []
        # Kernels, and calls of CUDA, of each step, in microseconds from its own begin.
        self.traces: list[list[tuple[str, Interval]]] = []
        self.calls: list[list[tuple[str, Interval]]] = []
        self.sampler = Sampler(SAMPLE_US)

    def __call__(self, *args, **kwargs):
        call = partial(self.step, *args, **kwargs)
        at = self.steps - WARM_UP
        self.steps += 1
        if 0 <= at < TIMED:
            return self.timed(call)
        if TIMED <= at < TIMED + TRACED:
            return self.traced(call)
        if TIMED + TRACED <= at <= TIMED + TRACED + SAMPLED:
            result = self.sampled(call, nullcontext() if at == TIMED + TRACED else self.sampler)
            if at == TIMED + TRACED + SAMPLED and os.environ.get("RANK", "0") == "0":
                self.path.write_text(json.dumps(self.figures()))
            return result
        return call()

    def timed(self, call) -> Any:
        synchronize()
        begin = time.perf_counter()
        result = call()
        synchronize()
        self.times.append(time.perf_counter() - begin)
        return result

    def traced(self, call) -> Any:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if not torch.cuda.is_available():
            return call()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            result = call()
            synchronize()
        on_gpu, on_host = list[tuple[str, Interval]](), list[tuple[str, Interval]]()
        for event in trace.events():
            noted = on_gpu if event.device_type == torch.autograd.DeviceType.CUDA else on_host
            noted.append((event.name, (event.time_range.start, event.time_range.end)))
        self.traces.append(on_gpu)
        self.calls.append(on_host)
        return result

    def sampled(self, call, sampler: AbstractContextManager[None]) -> Any:
        import torch

        synchronize()
        with torch.autograd.set_multithreading_enabled(False), sampler:
            result = call()
            synchronize()
        return result

    def figures(self) -> dict[str, Any]:
        """Return what the file has, in milliseconds of a step."""
        milliseconds = 1e3 * statistics.median(self.times)
        host = shares(self.sampler.samples, milliseconds)
        kinds, names = Counter[str](), Counter[str]()
        for name, (begin, end) in chain.from_iterable(self.traces):
            kind, took = kind_of(name), (end - begin) / 1e3 / TRACED
            kinds[kind] += took
            names[f"{kind}: {name[:NAME_LENGTH]}"] += took
        on_gpu = dict(kernels=dict(kinds.most_common()), names=dict(names.most_common(40)))
        waits = [[(name, interval) for name, interval in step if WAIT.fullmatch(name)] for step in self.calls]
        times = dict(step=milliseconds, busy=mean_busy_time(self.traces), waits=mean_busy_time(waits))
        return times | on_gpu | host


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), OTHERS)


def mean_busy_time(steps: list[list[tuple[str, Interval]]]) -> float:
    """Return in milliseconds for how long of a step one or more of the events last."""
    return sum(busy_time(interval for _, interval in events) for events in steps) / 1e3 / TRACED


def busy_time(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


# ---- results --------------------------------------------------------------------------------------------------------


def report(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, one in found.items():
        lines += [f"{name}: a step takes {one['step']:.1f} ms, and its GPU is busy for {one['busy']:.1f} ms"]
        lines += [f"  the host waits for its GPU for {one['waits']:.1f} ms"]
        for title in ("kernels", "owners"):
            lines += [f"  {title}: {', '.join(f'{key} {value:.1f}' for key, value in one[title].items())}"]
        for title in ("names", "lines"):
            lines += [f"  {title}:", *(f"  {value:8.2f}  {key}" for key, value in list(one[title].items())[:12])]
    return lines


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw two bars for each job: its GPU and its host, and a mark where its step ends."""
    from ep_dispatcher.tools.benchmark import harness

    harness.draw(path, (10.0, 2.2 + 1.5 * len(found)), partial(_fill, found))


def _fill(found: dict[str, Any], figure: Figure) -> None:
    figure.suptitle("A training step of Megatron-LM, rank 0: milliseconds")
    panels = figure.subplots(2, 1, sharex=True)
    titles = {"kernels": "GPU, by kind of kernel", "owners": "host, by owner of the code"}
    last = 1.02 * max(one["step"] for one in found.values())
    for axes, (title, about) in zip(panels, titles.items()):
        names = dict.fromkeys(name for one in found.values() for name in one[title])
        left = dict.fromkeys(found, 0.0)
        for color, name in zip(COLORS, sorted(names, key=OTHERS.__eq__)):  # the others at the end
            widths = [one[title].get(name, 0.0) for one in found.values()]
            axes.barh(list(found), widths, 0.6, left=list(left.values()), color=color, label=name)
            left = {job: begin + width for (job, begin), width in zip(left.items(), widths)}
        if title == "owners":
            waits = [one["waits"] for one in found.values()]
            places = [place + 0.36 for place in range(len(found))]
            axes.barh(places, waits, 0.1, color="black", label="waits for its GPU, of these")
        for place, one in enumerate(found.values()):
            axes.plot([one["step"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
        axes.set_title(f"{about}; black: the step's end", size=9)
        axes.set_xlim(0, last)
        axes.invert_yaxis()
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
