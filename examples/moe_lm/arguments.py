"""The command line: checks every value; an error names the argument, the value and what is allowed."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch

from moe_lm.device import MAX_RANKS, choose_device, default_ranks, default_ranks_per_node
from moe_lm.model import ModelConfig

# Argument: lowest and highest value, default on CPUs and on GPUs, meaning.
BY_DEVICE = {
    "layers": (1, 100, 2, 4, ""),
    "hidden": (8, 8192, 128, 1024, ""),
    "heads": (1, 128, 4, 16, ""),
    "experts": (1, 1024, 16, 64, "of all ranks; the default is less if the ranks do not divide it"),
    "topk": (1, 16, 2, 4, "experts of a token"),
    "intermediate": (1, 32768, 256, 512, "of an expert"),
    "seq_len": (8, 2048, 128, 256, "bytes"),
    "batch": (1, 1024, 4, 8, "sequences per rank"),
    "lr": (1e-7, 1.0, 5e-3, 1e-3, "peak learning rate"),
}
DTYPES = ("float32", "bfloat16")  # the defaults on CPUs and on GPUs
# Tokens of a run, where --steps is not given. On CPUs that is 750 steps with 4 ranks, about two minutes on two idle
# cores. On GPUs it is 9 times the text; some more, and the larger model learns it by heart.
TOKENS = {"cpu": 750 * 2048, "cuda": 1500 * 2048}

EPILOG = """
python train_moe_lm.py                             starts its own ranks (--ranks)
torchrun --nproc-per-node 4 train_moe_lm.py        uses those of the launcher
"""


def number(kind: type, low: float, high: float):
    """Return a type for argparse: ``kind`` (int or float) from ``low`` to ``high``."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"it is {text!r}, but has to be {what} from {low} to {high}")
        return value

    return convert


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_moe_lm.py",
        description="Train a byte-level mixture-of-experts language model with expert parallelism, on GPUs or CPUs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "default: %(default)s"
    run = parser.add_argument_group("the run")
    run.add_argument("--check", action="store_true", help="compare some steps with a dense model without dispatcher")
    run.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cuda: GPUs, with the CUDA engine; auto takes them where they can be used (default: auto)",
    )
    run.add_argument(
        "--steps",
        type=number(int, 1, 10**7),
        help=f"number of steps (default: {TOKENS['cpu']:,} tokens, on GPUs {TOKENS['cuda']:,}; --check: 10)",
    )
    run.add_argument(
        "--out", type=Path, default=Path("runs/train_moe_lm"), help=f"folder for chart and JSON ({default})"
    )
    run.add_argument("--sample-bytes", type=number(int, 0, 10**5), default=400, help=f"text to generate ({default})")
    run.add_argument(
        "--ranks",
        type=number(int, 1, MAX_RANKS),
        help="expert-parallel ranks to start (default: 4; one per GPU, or 2 on one)",
    )
    run.add_argument(
        "--ranks-per-node",
        type=number(int, 1, MAX_RANKS),
        help="makes virtual nodes (default: 2 if that divides; with GPUs all of a host)",
    )
    run.add_argument("--seed", type=number(int, 0, 10**6), default=0, help=default)
    shape = parser.add_argument_group("the model", "--check takes the sizes for CPUs on GPUs too")
    for name, (low, high, cpu, gpu, meaning) in BY_DEVICE.items():
        flag, kind = f"--{name.replace('_', '-')}", type(low)
        shape.add_argument(flag, type=number(kind, low, high), help=f"{meaning} (default: {cpu}, on GPUs {gpu})")
    meaning = "of matrix products and of rows that travel; parameters are float32"
    shape.add_argument("--dtype", choices=DTYPES, help=f"{meaning} (default: {DTYPES[0]}, on GPUs {DTYPES[1]})")
    step = parser.add_argument_group("the step")
    step.add_argument("--weight-decay", type=number(float, 0.0, 10.0), default=0.1, help=default)
    step.add_argument("--clip", type=number(float, 1e-6, 1e6), default=1.0, help=f"largest gradient norm ({default})")
    step.add_argument(
        "--balance", type=number(float, 0.0, 10.0), default=0.03, help=f"weight of the balance loss ({default})"
    )
    return parser


def parse_arguments() -> tuple[argparse.Namespace, ModelConfig]:
    """Return ``args``, complete and with ``device`` ("cpu" or "cuda") and ``why_cpu`` ("" on GPUs), and the config."""
    parser = make_parser()
    args = parser.parse_args()

    def demand(ok: bool, name: str, given, allowed: str) -> None:
        if not ok:
            parser.error(f"--{name} is {given}, but has to be {allowed}")

    try:
        args.device, args.why_cpu = choose_device(args.device)
    except ValueError as error:
        demand(False, "device", args.device, f"auto, cpu ({error})")
    if "RANK" in os.environ:
        size = int(os.environ["WORLD_SIZE"])
        demand(args.ranks in (None, size), "ranks", args.ranks, f"{size}, the launcher's number (or leave it out)")
        demand(size <= MAX_RANKS, "ranks", f"{size} by the launcher", f"1 to {MAX_RANKS}")
        args.ranks = size
    args.ranks = args.ranks or default_ranks(args.device)
    args.ranks_per_node = args.ranks_per_node or default_ranks_per_node(args.device, args.ranks)
    # Rounding alone moves tokens between experts of nearly equal weight; in a large model this happens in every step.
    # Then gradients cannot be compared, so --check takes the small model in float32.
    on_gpus = args.device == "cuda" and not args.check
    for name, (_, _, cpu, gpu, _) in BY_DEVICE.items():
        if getattr(args, name) is None:
            value = gpu if on_gpus else cpu
            setattr(args, name, value // args.ranks * args.ranks if name == "experts" else value)
    args.dtype = args.dtype or DTYPES[on_gpus]
    demand(not args.check or args.dtype == "float32", "dtype", args.dtype, "float32 together with --check")
    divides = args.ranks % args.ranks_per_node == 0
    demand(divides, "ranks-per-node", args.ranks_per_node, f"divisors of {args.ranks}, the number of ranks")
    demand(args.experts % args.ranks == 0, "experts", args.experts, f"multiples of {args.ranks}, the number of ranks")
    demand(args.topk <= args.experts, "topk", args.topk, f"1 to {args.experts}, the number of experts")
    demand(args.hidden % (2 * args.heads) == 0, "hidden", args.hidden, f"multiples of {2 * args.heads}, twice --heads")
    dtype = getattr(torch, args.dtype)
    allowed = f"multiples of {16 // dtype.itemsize}, so that a row is a multiple of 16 bytes"
    demand(args.hidden * dtype.itemsize % 16 == 0, "hidden", args.hidden, allowed)
    if args.steps is None:
        args.steps = 10 if args.check else max(1, TOKENS[args.device] // (args.ranks * args.batch * args.seq_len))
    if not args.check:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "report.json").touch()
        except OSError as error:
            demand(False, "out", args.out, f"a folder that can be made and written to ({error.strerror})")
    config = ModelConfig(
        num_layers=args.layers,
        hidden=args.hidden,
        num_heads=args.heads,
        num_experts=args.experts,
        num_topk=args.topk,
        intermediate=args.intermediate,
        seq_len=args.seq_len,
        seed=args.seed,
        dtype=dtype,
    )
    return args, config
