"""Measures lower bounds of an operation: a launch, a flag, a row, all rows of a decode step. Needs nvcc and a GPU.

    python benchmarks/latency_floor.py                              # GPUs 0 and 1, or one GPU in place of both
    python benchmarks/latency_floor.py --measured dispatch=40 combine=44.7       # how far above the floor these are
    python benchmarks/latency_floor.py --draw runs/latency_floor.json            # only the tables

latency_floor.cu has the parts; it is compiled into a temporary folder. Each part runs alone on idle GPUs, twenty
launches in a CUDA graph. Times are medians in microseconds. A floor is the sum of the parts on the shortest path
through an operation of 128 tokens, hidden 7168, top-8 on 4 ranks. These parts cannot overlap. Writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "benchmarks" / "latency_floor.cu"
FLAGS = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr"]
BLOCKS = ("24", "48", "96")  # of a launch
LIMIT_S = 120  # of the whole program

LAUNCH = "launch, {blocks} blocks of 512 threads, 226 KB, last block"
HOP = "flag, one way, to the peer, for 8 warps"
# By operation: the parts of its shortest path. A rank receives a token at most once, so up to 512 rows, and has 1024
# output rows. In a combine up to 512 sums travel, each of two pieces of 7 KB; then they are read and 128 are written.
FLOORS = {
    "dispatch FP8": (LAUNCH, HOP, "pull from the peer: 512 rows of 7 KB, {blocks} blocks less its launch"),
    "dispatch": (LAUNCH, HOP, "pull from the peer: 1024 rows of 7 KB, {blocks} blocks less its launch"),
    "combine": (
        LAUNCH,
        "push to the peer: 1024 rows of 7 KB, {blocks} blocks less its launch",
        HOP,
        "copy in own memory: 1024 rows of 7 KB, {blocks} blocks less its launch",
    ),
}
LESS_LAUNCH = " less its launch"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.draw:
        run = json.loads(args.draw.read_text())
    else:
        try:
            printed = measure(args.program)
        except RuntimeError as error:
            print(error)
            return 2
        run = {"machine": describe_machine(), **parse(printed)}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(to_json(run))
    print(f"{table(run)}\n\n{floors_table(run, args.measured)}")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--program", type=Path, help="latency_floor.cu, already compiled")
    add("--measured", type=_time, nargs="*", default=[], metavar="OPERATION=US", help=f"times of {', '.join(FLOORS)}")
    add("--out", type=Path, default=Path("runs/latency_floor.json"))
    add("--draw", type=Path, metavar="JSON", help="print the tables of this file, without a measurement")
    return parser.parse_args(argv)


def _time(text: str) -> tuple[str, float]:
    operation, _, us = text.partition("=")
    if operation not in FLOORS:
        raise argparse.ArgumentTypeError(f"given {operation!r}, allowed: {', '.join(FLOORS)}")
    return operation, float(us)


def measure(program: Path | None) -> str:
    """Compile the program unless it is given, run it, and return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        if program is None:
            program = Path(folder, "latency_floor")
            compile_to(program)
        done = subprocess.run([str(program)], capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"latency_floor ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def compile_to(program: Path) -> None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    found = [shutil.which("nvcc"), *(shutil.which(f"{home}/bin/nvcc") for home in homes if home)]
    nvcc = next((path for path in found if path), None)
    if nvcc is None:
        raise RuntimeError("nvcc: given none, allowed: one in PATH or CUDA_HOME; or --program, compiled before")
    command = [nvcc, *FLAGS, f"-I{ROOT / 'csrc'}", str(SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr.strip()}")


def parse(printed: str) -> dict:
    """Return the GPUs, and the median, least and most microseconds of each part, from the program's lines."""
    run: dict = {"parts": {}}
    for line in printed.splitlines():
        name, unit, values = line.split("\t")
        if unit == "ns":
            us = [float(value) / 1e3 for value in values.split()]
            run["parts"][name] = [round(of(us), 4) for of in (statistics.median, min, max)]
        else:
            run[f"gpu_{unit}"] = int(values) if unit == "number" else values
    return run


def part_us(run: dict, name: str) -> float:
    """Return the median of a part; with `less its launch` without that of an empty kernel of as many blocks."""
    if not name.endswith(LESS_LAUNCH):
        return run["parts"][name][0]
    name = name.removesuffix(LESS_LAUNCH)
    blocks = name.split(", ")[-1].removesuffix(" blocks")
    return max(0.0, part_us(run, name) - part_us(run, f"launch, {blocks} blocks of 512 threads, 226 KB"))


def table(run: dict) -> str:
    """Return all parts as a table, with the machine above it."""
    pair = "between two" if run["gpu_number"] == 2 else "one GPU in place of two, so no NVLink:"
    machine = run["machine"]
    lines = [f"{pair} {run['gpu_name']}, build {machine['git_commit']}, {machine['date'][:10]}; microseconds:", ""]
    lines += ["| part | median | least | most |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | " + " | ".join(f"{us:.2f}" for us in times) + " |" for name, times in run["parts"].items()]
    return "\n".join(lines)


def floors(run: dict, blocks: str) -> dict[str, list[tuple[str, float]]]:
    """Return the parts of each operation's shortest path, and their microseconds, for launches of so many blocks."""
    return {
        operation: [(part.format(blocks=blocks), part_us(run, part.format(blocks=blocks))) for part in parts]
        for operation, parts in FLOORS.items()
    }


def floors_table(run: dict, measured: list[tuple[str, float]]) -> str:
    """Return the floor of each operation by its parts, and how far above it the measured times are."""
    lines = ["| operation | blocks | floor | of which | measured |", "| --- | --- | --- | --- | --- |"]
    for blocks in BLOCKS:
        for operation, parts in floors(run, blocks).items():
            floor = sum(us for _, us in parts)
            above = [
                f"{us:g} ({us / floor:.1f}x, {us - floor:.1f} above)" for name, us in measured if name == operation
            ]
            shown = "; ".join(f"{us:.2f} {part.replace(f', {blocks} blocks', '')}" for part, us in parts)
            lines.append(f"| {operation} | {blocks} | {floor:.1f} | {shown} | {', '.join(above)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
