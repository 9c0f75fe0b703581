"""The command line: every value is checked here, and a wrong one is named together with what is allowed."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from moe_lm.model import ModelConfig

MAX_RANKS = 16  # each needs a few windows of the held-out text

EPILOG = """
python train_moe_lm.py                             starts its own ranks (--ranks)
torchrun --nproc-per-node 4 train_moe_lm.py        uses those of the launcher
"""


def number(kind: type, low: float, high: float):
    """A type for argparse: ``kind`` (int or float) from ``low`` to ``high``."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"given {text!r}, allowed: {what} from {low} to {high}")
        return value

    return convert


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_moe_lm.py",
        description="Train a byte-level mixture-of-experts language model with expert parallelism on CPUs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model, default = ModelConfig(), "default: %(default)s"
    run = parser.add_argument_group("the run")
    run.add_argument("--check", action="store_true", help="compare some steps with a dense model without dispatcher")
    run.add_argument(
        "--minutes", type=number(float, 0.01, 1e4), help="time for training (default: 2.3; no limit with --steps)"
    )
    run.add_argument("--steps", type=number(int, 1, 10**7), help="number of steps (default: 1500 at most; --check: 10)")
    run.add_argument(
        "--out", type=Path, default=Path("runs/train_moe_lm"), help=f"folder for chart and JSON ({default})"
    )
    run.add_argument("--sample-bytes", type=number(int, 0, 10**5), default=400, help=f"text to generate ({default})")
    run.add_argument("--ranks", type=number(int, 1, MAX_RANKS), help="expert-parallel ranks to start (default: 4)")
    run.add_argument(
        "--ranks-per-node", type=number(int, 1, MAX_RANKS), help="makes virtual nodes (default: 2 if that divides)"
    )
    run.add_argument("--seed", type=number(int, 0, 10**6), default=0, help=default)
    shape = parser.add_argument_group("the model")
    shape.add_argument("--layers", type=number(int, 1, 100), default=model.num_layers, help=default)
    shape.add_argument("--hidden", type=number(int, 8, 8192), default=model.hidden, help=default)
    shape.add_argument("--heads", type=number(int, 1, 128), default=model.num_heads, help=default)
    shape.add_argument("--experts", type=number(int, 1, 1024), default=model.num_experts, help=default)
    shape.add_argument("--topk", type=number(int, 1, 16), default=model.num_topk, help=default)
    shape.add_argument("--intermediate", type=number(int, 1, 32768), default=model.intermediate, help=default)
    shape.add_argument("--seq-len", type=number(int, 8, 2048), default=model.seq_len, help=default)
    step = parser.add_argument_group("the step")
    step.add_argument("--batch", type=number(int, 1, 1024), default=4, help=f"sequences per rank ({default})")
    step.add_argument("--lr", type=number(float, 1e-7, 1.0), default=5e-3, help=f"peak learning rate ({default})")
    step.add_argument("--weight-decay", type=number(float, 0.0, 10.0), default=0.1, help=default)
    step.add_argument("--clip", type=number(float, 1e-6, 1e6), default=1.0, help=f"largest gradient norm ({default})")
    step.add_argument(
        "--balance", type=number(float, 0.0, 10.0), default=0.03, help=f"weight of the balance loss ({default})"
    )
    return parser


def parse_arguments() -> tuple[argparse.Namespace, ModelConfig]:
    parser = make_parser()
    args = parser.parse_args()

    def demand(ok: bool, name: str, given, allowed: str) -> None:
        if not ok:
            parser.error(f"argument --{name}: given {given}, allowed: {allowed}")

    if "RANK" in os.environ:
        size = int(os.environ["WORLD_SIZE"])
        demand(args.ranks in (None, size), "ranks", args.ranks, f"{size}, the launcher's number (or leave it out)")
        demand(size <= MAX_RANKS, "ranks", f"{size} by the launcher", f"1 to {MAX_RANKS}")
        args.ranks = size
    args.ranks = args.ranks or 4
    args.ranks_per_node = args.ranks_per_node or math.gcd(2, args.ranks)
    divides = args.ranks % args.ranks_per_node == 0
    demand(divides, "ranks-per-node", args.ranks_per_node, f"divisors of {args.ranks}, the number of ranks")
    demand(args.experts % args.ranks == 0, "experts", args.experts, f"multiples of {args.ranks}, the number of ranks")
    demand(args.topk <= args.experts, "topk", args.topk, f"1 to {args.experts}, the number of experts")
    demand(args.hidden % (2 * args.heads) == 0, "hidden", args.hidden, f"multiples of {2 * args.heads}, twice --heads")
    demand(args.hidden % 4 == 0, "hidden", args.hidden, "multiples of 4, so that a row is a multiple of 16 bytes")
    if args.check:
        demand(args.minutes is None, "minutes", args.minutes, "nothing together with --check, which counts --steps")
        args.steps = args.steps or 10
    elif args.minutes is None and args.steps is None:
        args.minutes, args.steps = 2.3, 1500  # whichever ends first; beyond some 2000 steps it learns the text by heart
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
    )
    return args, config
