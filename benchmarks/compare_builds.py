"""Times two builds of this package in turn, in one run, to find operations that a change makes slower.

    git worktree add ../old main~10 && (cd ../old && python setup.py build_ext --inplace)
    python benchmarks/compare_builds.py ../old .             # a rank per GPU, or 4 CPU ranks
    python benchmarks/compare_builds.py ../old . --ranks 4   # on one GPU too, under NVIDIA's MPS (docs/tests.md)

Both builds stay loaded and take turns, because machines differ by 30 %, and one machine varies over time. A time is
that of one operation in a sequence of ten, on the slowest rank. On GPUs the ten are one CUDA graph, so host time does
not count. It prints medians over all rounds, their ratio to the first build, and the least and most. The exit code is 1
if a ratio is above 1 + tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

# By its path, because the package of a rank is that of its build.
HARNESS = runpy.run_path(str(Path(__file__).resolve().parents[1] / "ep_dispatcher/tools/benchmark/harness.py"))

TOPK, ITERATIONS = 8, 24
DECODE_TOKENS = 512  # most tokens of a case with decode layout: its outputs have a place for each row that may come
CASES = {
    "cuda": ["4096x7168x256", "4096x2048x128", "128x7168x256", "16384x7168x256"],
    "cpu": ["512x1024x64", "32x1024x64"],
}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    builds = [Build(folder, args) for folder in args.builds]
    try:
        for build in builds:  # a first round that does not count
            build.measure()
        for turn in range(args.rounds):
            for build in builds if turn % 2 == 0 else builds[::-1]:
                build.keep(build.measure())
    finally:
        for build in builds:
            build.close()
    return report(builds, args.tolerance)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = HARNESS["make_parser"](__doc__, ranks=gpus or 4, sms=24, rounds=5)
    parser.add_argument("builds", nargs="+", type=Path, help="folders, each with a compiled ep_dispatcher in it")
    parser.add_argument("--engine", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    parser.add_argument("--cases", nargs="+", metavar="TOKENSxHIDDENxEXPERTS", help=f"None: {CASES}")
    parser.add_argument("--operations", nargs="+", metavar="NAME", help="only these, e.g. 'dispatch FP8' combine")
    parser.add_argument("--tolerance", type=float, default=0.02, help="0.02: 2 %% slower is no regression")
    args = parser.parse_args(argv)
    args.cases = args.cases or CASES[args.engine]
    return args


class Build:
    """The ranks of one build: processes that measure when they are asked."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.name, self.medians = str(folder), {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = dict(ranks=args.ranks, port=port, engine=args.engine, cases=args.cases, sms=args.sms)
        given |= dict(only=args.operations)
        # A rank imports the package from its folder, and finds it there first.
        paths = [str(folder.resolve()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} | os.environ
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        code = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})['work']"
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", f"{code}({rank}, {str(folder.resolve())!r}, **{given!r})"],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(args.ranks)
        ]

    def measure(self) -> dict[str, float]:
        """Return the median microseconds of each operation, of the slowest rank of each iteration."""
        for rank in self.ranks:
            print(file=rank.stdin, flush=True)
        lines = [rank.stdout.readline() for rank in self.ranks]
        if not all(lines):
            raise RuntimeError(f"a rank of {self.name} has ended")
        times = [json.loads(line) for line in lines]
        return {name: statistics.median(map(max, zip(*(t[name] for t in times)))) for name in times[0]}

    def keep(self, medians: dict[str, float]) -> None:
        for name, median in medians.items():
            self.medians.setdefault(name, []).append(median)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def report(builds: list[Build], tolerance: float) -> int:
    """Print the table. Return 1 if an operation of a later build is slower than that of the first."""
    slower = False
    print("microseconds: " + ", ".join(f"{'ABCDEFGH'[i]} = {build.name}" for i, build in enumerate(builds)))
    for name in builds[0].medians:
        figures, first = [], statistics.median(builds[0].medians[name])
        for build in builds:
            times = build.medians[name]
            ratio = statistics.median(times) / first
            slower |= ratio > 1 + tolerance
            figures.append(f"{statistics.median(times):10.1f} {ratio:6.3f} ({min(times):.1f} to {max(times):.1f})")
        print(f"{name:32}" + "".join(figures))
    return int(slower)


def work(
    rank: int, folder: str, *, ranks: int, port: int, engine: str, sms: int, cases: list[str], only: list[str] | None
) -> None:
    """Run one rank: measure for each line of input, and answer with a line of JSON."""
    if engine == "cuda":
        HARNESS["use_gpu"](rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    import ep_dispatcher

    assert Path(ep_dispatcher.__file__).is_relative_to(Path(folder)), f"{ep_dispatcher.__file__} is not in {folder}"
    with torch.no_grad():
        runs = [one for case in cases for one in operations(rank, engine, sms, only, *map(int, case.split("x")))]
        for _ in sys.stdin:
            print(json.dumps({name: [run() for _ in range(ITERATIONS)] for name, run in runs}), flush=True)
    os._exit(0)  # the other build may still be at work: free nothing


def operations(rank: int, engine: str, sms: int, only: list[str] | None, tokens: int, hidden: int, experts: int):
    """Yield the name of each operation, and the function that runs ten of it and returns the microseconds of one."""
    import ep_dispatcher as ep

    device, dtype = engine if engine == "cpu" else torch.device("cuda"), torch.bfloat16
    buffer = ep.Buffer(
        hidden=hidden, num_experts=experts, num_topk=TOPK, max_tokens_per_rank=tokens, num_sms=sms, engine=engine
    )
    generator = torch.Generator().manual_seed(rank)
    weights, idx = torch.rand(tokens, experts, generator=generator).softmax(-1).topk(TOPK)
    weights, idx = weights.to(device), idx.to(device)
    x = torch.randn(tokens, hidden, dtype=dtype).to(device)
    pair = ep.quantize(x)
    rows = torch.tensor(buffer.dispatch(x, idx, weights).x.shape[0])
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    limit = dict(max_recv_rows=int(rows))
    handle = buffer.dispatch(x, idx, weights, **limit).handle
    y = torch.randn(int(rows), hidden, dtype=dtype).to(device)
    todo: dict[str, Callable[[], object]] = {
        "dispatch": lambda: buffer.dispatch(x, idx, weights, **limit),
        "dispatch FP8": lambda: buffer.dispatch(pair, idx, weights, **limit),
        "dispatch, quantize": lambda: buffer.dispatch(x, idx, weights, quantize="e4m3_1x128", **limit),
        "cached dispatch": lambda: buffer.dispatch(x, topk_weights=weights, handle=handle),
        "combine": lambda: buffer.combine(y, handle),
    }
    if tokens <= DECODE_TOKENS:
        decode = dict(layout="decode", quantize="e4m3_1x128")
        decoded = buffer.dispatch(x, idx, **decode)
        rows_of_experts = torch.randn(decoded.x[0].shape, dtype=dtype, device=device)
        todo["decode dispatch FP8"] = lambda: buffer.dispatch(x, idx, **decode)
        todo["decode combine"] = lambda: buffer.combine(rows_of_experts, decoded.handle, weights=weights)
    for name, run in todo.items():
        if only is not None and name not in only:
            continue
        yield f"{tokens}x{hidden} {name}", HARNESS["on_host" if engine == "cpu" else "on_device"](run)


if __name__ == "__main__":
    sys.exit(main())
