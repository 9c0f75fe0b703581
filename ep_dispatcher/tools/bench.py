"""Times dispatch and combine, and the all-to-all that a user would write instead, in one run on the same routing.

    python -m ep_dispatcher.bench                      # starts 4 ranks here: one node, then 2 virtual nodes
    torchrun ... -m ep_dispatcher.bench                # uses the ranks that torchrun started, on all hosts
    python -m ep_dispatcher.bench --engine cuda --sms 8,12,16,24,32   # a rank per GPU, beside NCCL; a case for each
    python -m ep_dispatcher.bench --engine cuda --suite benchmarks/results \
        --with ep_dispatcher.tools.benchmark.megatron ep_dispatcher.tools.benchmark.deep_ep
    python -m ep_dispatcher.bench --compare benchmarks/results runs/bench       # fails on a regression

Prints a table per case and writes a JSON with every single time; ``benchmark/suite.py`` explains its fields.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ep_dispatcher.tools.benchmark import compare, harness, suite
from ep_dispatcher.tools.benchmark.cases import CASE_ROUTINGS, HOT, STANDARD, Case, suite_cases
from ep_dispatcher.tools.benchmark.harness import number, numbers
from ep_dispatcher.tools.benchmark.machine import describe_machine
from ep_dispatcher.tools.benchmark.measurements import measurements_of
from ep_dispatcher.tools.benchmark.ranks import TorchrunRanks

DTYPES = ("bfloat16", "float16", "float32")
ONE_VALUE = ("hidden", "experts", "topk", "routing", "dtype", "layout", "graph")  # of all cases of a run
SEVERAL = ("tokens", "sms", "ranks_per_node")  # a case for each


def make_parser() -> argparse.ArgumentParser:
    parser = harness.make_parser(__doc__, iters=Case.iters, threads=Case.threads)
    parser.prog = "python -m ep_dispatcher.bench"
    add, positive, several = parser.add_argument, number(int, 1), numbers(int, 1)
    add("--ranks", type=positive, help="processes to start; None: 4, with cuda one per GPU, under torchrun its ranks")
    add(
        "--ranks-per-node",
        type=positive,
        nargs="+",
        help="node sizes to measure; None: one node, with cpu also two nodes",
    )
    add("--tokens", type=several, help="tokens per rank, or a list: 256,1024,4096")
    add("--hidden", type=positive, help="elements of a token's row; None: 1024, with cuda 7168")
    add("--experts", type=positive, help="experts of all ranks together; None: 64, with cuda 256")
    add("--topk", type=positive, help="experts of a token; None: 8")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the rows")
    add("--routing", choices=CASE_ROUTINGS, default="uniform", help=f"{HOT}: one rank gets 4 times the mean")
    add("--layout", choices=("expert", "rank"), default="expert", help="layout of the received rows")
    add("--warmup", type=number(int, 0), default=Case.warmup, help="runs before the timed ones")
    add("--engine", choices=tuple(STANDARD), default="cpu", help="cuda: a rank per GPU")
    add("--sms", type=several, help="cuda: multiprocessors that the engine may use, or a list: 8,12,16,24,32")
    add("--graph", action="store_true", help="cuda: also time each operation of the engine in a CUDA graph")
    add(
        "--suite",
        type=Path,
        metavar="FOLDER",
        help="cuda: measure the cases of the tables in docs/performance.md, and write to FOLDER",
    )
    add(
        "--with",
        dest="modules",
        nargs="+",
        metavar="MODULE",
        default=[],
        help="modules that measure more, such as other dispatchers",
    )
    add("--no-baseline", dest="baseline", action="store_false", help="leave out the all-to-all")
    add("--build", help="name of the build for the JSON, if git does not know it")
    add("--out", type=Path, default=Path("runs/bench"), help="folder of the JSON files")
    add(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="measure nothing, and compare B with A: JSON files, or folders",
    )
    add(
        "--tolerance", type=number(float, 0), default=0.05, help="for --compare: 0.05 lets an operation take 5%% longer"
    )
    return parser


def parse_args(argv: list[str] | None, world_size: int | None) -> argparse.Namespace:
    """Return the arguments, with ``cases``. ``world_size``: how many ranks torchrun started; None without torchrun."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        for path in args.compare or ():
            if not path.exists():
                refuse("compare", path, "JSON files of this benchmark, or folders of them")
        if not args.compare:
            check_choice(args, parser)
            fill_in(args, world_size)
            check_sizes(args, world_size)
            args.cases = make_cases(args)
            args.cases[0].routing_on_host(0)  # raises where a routing cannot be made
    except ValueError as error:
        parser.error(str(error))
    return args


def refuse(argument: str, given: object, allowed: str) -> NoReturn:
    raise ValueError(f"--{argument.replace('_', '-')} is {given}, but has to be {allowed}")


def check_choice(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse arguments that do not go together."""
    if args.engine == "cpu":
        for name in ("sms", "graph", "suite"):
            if getattr(args, name):
                refuse(name, "with --engine cpu", "with --engine cuda")
    elif not torch.cuda.device_count():
        refuse("engine", "cuda", "cpu: there is no GPU that PyTorch can use")
    if args.suite is not None:
        for name in (*ONE_VALUE, *SEVERAL, "baseline"):
            if getattr(args, name) != parser.get_default(name):
                refuse(name, "given with --suite", "left out, because the suite has its own")


def fill_in(args: argparse.Namespace, world_size: int | None) -> None:
    standard = STANDARD[args.engine]
    if args.ranks is None:
        args.ranks = world_size or (standard.ranks if args.engine == "cpu" else torch.cuda.device_count())
    for name in ("hidden", "experts", "topk"):
        setattr(args, name, getattr(args, name) or getattr(standard, name))
    args.tokens, args.sms = args.tokens or [standard.tokens], args.sms or [standard.sms]
    args.out = args.suite or args.out
    args.per_host = per_host = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
    if args.ranks_per_node is None:  # as torchrun has started them; with the CPU engine on one node also virtual nodes
        halves = args.engine == "cpu" and per_host == args.ranks and args.ranks % 2 == 0
        args.ranks_per_node = [per_host, per_host // 2] if halves else [per_host]


def check_sizes(args: argparse.Namespace, world_size: int | None) -> None:
    if world_size is not None and args.ranks != world_size:
        refuse("ranks", args.ranks, f"the {world_size} ranks that torchrun started")
    if args.engine == "cuda" and args.per_host > torch.cuda.device_count():
        refuse("ranks", f"{args.per_host} on a host", f"at most its {torch.cuda.device_count()} GPUs")
    if args.experts % args.ranks:
        refuse("experts", args.experts, f"a multiple of the number of ranks ({args.ranks})")
    if args.topk > args.experts:
        refuse("topk", args.topk, f"at most the number of experts ({args.experts})")
    for n in args.ranks_per_node:
        if args.ranks % n:
            refuse("ranks_per_node", n, f"a divisor of the number of ranks ({args.ranks})")
    if args.out.exists() and not args.out.is_dir():
        refuse("out", args.out, "a folder")


def make_cases(args: argparse.Namespace) -> list[Case]:
    common = {name: getattr(args, name) for name in ("iters", "warmup", "threads")}
    nodes = [None if n == args.ranks else n for n in args.ranks_per_node]
    if args.suite is not None:
        return list(suite_cases(args.ranks, args.modules, ranks_per_node=nodes[0], **common))
    common |= {name: getattr(args, name) for name in ONE_VALUE}
    standard = STANDARD[args.engine]
    others = (*(standard.others if args.baseline else ()), *args.modules)
    first = replace(standard, ranks=args.ranks, others=others, **common)
    return [
        replace(first, tokens=tokens, sms=sms, ranks_per_node=n)
        for tokens, sms, n in product(args.tokens, args.sms, nodes)
    ]


def main(argv: list[str] | None = None) -> int:
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    args = parse_args(argv, int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
    if args.compare:
        before, after = args.compare
        return compare.run(before, after, args.tolerance)
    machine = describe_machine(args.build)  # before the run, so that its load is not the benchmark's own
    if not under_torchrun:
        return suite.run(args.cases, machine, args.out)
    ranks = TorchrunRanks(args.threads, suite.BACKENDS[args.engine])
    if dist.get_rank() == 0:
        return suite.run(args.cases, machine, args.out, lambda case: ranks)
    for case in args.cases:
        for measurement, *arguments in measurements_of(case):
            ranks.run(measurement, *arguments)
    ranks.close()
    return 0
