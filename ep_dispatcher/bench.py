"""Times dispatch and combine against the all-to-all that a user writes otherwise, in the same run and routing.

    python -m ep_dispatcher.bench                      # starts 4 ranks here: one node, then 2 virtual nodes
    torchrun --nproc-per-node 4 -m ep_dispatcher.bench # uses the ranks that torchrun started
    python -m ep_dispatcher.bench --chart FILE.json    # draws the chart of an earlier run again

    python -m ep_dispatcher.bench --engine cuda        # a rank per GPU, beside NCCL, Megatron and DeepEP
    python -m ep_dispatcher.bench --engine cuda --sms 8,12,16,24,32          # a case for each
    python -m ep_dispatcher.bench --engine cuda --suite benchmarks/results   # all cases that docs/performance.md shows
    python -m ep_dispatcher.bench --report             # writes docs/performance.md and charts from benchmarks/results

Prints tables and writes JSON with every single time, and charts. The JSON's fields are explained in
``benchmark/nodes_report.py`` (CPU) and ``benchmark/suite.py`` (GPU).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ep_dispatcher.benchmark import nodes, nodes_report, report, suite
from ep_dispatcher.benchmark.cases import CASE_ROUTINGS, HOT, Case, suite_cases
from ep_dispatcher.benchmark.machine import describe_machine
from ep_dispatcher.benchmark.nodes import OPERATIONS
from ep_dispatcher.benchmark.wires import WIRES
from ep_dispatcher.testing import ROUTINGS, run_ranks

__all__ = ["OPERATIONS", "WIRES", "main"]

DTYPES = ("bfloat16", "float16", "float32")


SIZES = {
    "cpu": dict(tokens=[1024], hidden=1024, experts=64, topk=8),
    "cuda": dict(tokens=[Case.tokens], hidden=Case.hidden, experts=Case.experts, topk=Case.topk, sms=[Case.sms]),
}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ep_dispatcher.bench", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, help="processes to start (default: 4, with cuda one per GPU); under torchrun its own")
    add("--ranks-per-node", type=int, nargs="+", help="topologies to measure (default: one node; with cpu also two)")
    add("--tokens", type=numbers, help="tokens per rank; with cuda also a list: 256,1024,4096")
    add("--hidden", type=int)
    add("--experts", type=int, help="experts of all ranks together")
    add("--topk", type=int)
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--routing", choices=CASE_ROUTINGS, default="uniform", help=f"{HOT}, with cuda: one rank gets 4 times the mean")
    add("--layout", choices=("expert", "rank"), default="expert", help="layout of the received rows")
    add("--iters", type=int, default=20)
    add("--warmup", type=int, default=3)
    add("--threads", type=int, default=1, help="threads per rank")
    add("--engine", choices=("cpu", "cuda"), default="cpu")
    add("--sms", type=numbers, help="cuda: multiprocessors that the engine may use, or a list: 8,12,16,24,32")
    add("--graph", action="store_true", help="cuda: each of the engine's operations in a CUDA graph too")
    add("--suite", type=Path, metavar="FOLDER", help="cuda: measure every case of docs/performance.md, into FOLDER")
    add("--build", help="what was built, for the JSON, where git cannot say")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON files and charts")
    add("--no-baseline", dest="baseline", action="store_false", help="measure the engine alone")
    add("--chart", type=Path, metavar="FILE.json", help="cpu: only draw the chart of this JSON again")
    add("--report", action="store_true", help="only write docs/performance.md and charts from the JSON in --out")
    return parser


def parse_args(argv: list[str] | None, world_size: int | None) -> argparse.Namespace:
    """``world_size``: the number of ranks that torchrun started, None without torchrun."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def refuse(argument: str, given: object, allowed: str) -> None:
        parser.error(f"{argument}: given {given}, allowed {allowed}")

    if args.chart is not None:
        if not args.chart.is_file():
            refuse("--chart", args.chart, "a JSON file that this benchmark wrote")
        return args
    if args.report:
        if not args.out.is_dir():
            refuse("--out", args.out, "the folder of the JSON files")
        return args
    on_cpu = args.engine == "cpu"
    if args.suite is not None:
        for name in (*SIZES["cuda"], "ranks_per_node", "routing", "graph", "baseline", "layout", "dtype"):
            if getattr(args, name) != parser.get_default(name):
                refuse(f"--{name.replace('_', '-')}", "beside --suite", "without it: the suite has its own")
        args.out = args.suite
    if args.ranks is None:
        args.ranks = world_size or (4 if on_cpu else torch.cuda.device_count() or 1)
    for name, default in SIZES[args.engine].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    for name in ("ranks", "tokens", "hidden", "experts", "topk", "iters", "threads", "sms"):
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                refuse(f"--{name}", value, "1 or more")
    if args.warmup < 0:
        refuse("--warmup", args.warmup, "0 or more")
    if world_size is not None and args.ranks != world_size:
        refuse("--ranks", args.ranks, f"the {world_size} ranks that torchrun started")
    if args.experts % args.ranks:
        refuse("--experts", args.experts, f"multiples of the {args.ranks} ranks")
    if args.topk > args.experts:
        refuse("--topk", args.topk, f"at most the {args.experts} experts")
    if args.out.exists() and not args.out.is_dir():
        refuse("--out", args.out, "a folder")
    (_finish_cpu if on_cpu else _finish_cuda)(args, world_size, refuse)
    return args


def _finish_cpu(args: argparse.Namespace, world_size: int | None, refuse) -> None:
    """``topologies``, and one number of tokens."""
    for name in ("sms", "graph", "suite"):
        if getattr(args, name):
            refuse(f"--{name}", "with --engine cpu", "with --engine cuda")
        delattr(args, name)
    if args.routing == HOT:
        refuse("--routing", HOT, f"with --engine cuda; with cpu {', '.join(ROUTINGS)}")
    if len(args.tokens) > 1:
        refuse("--tokens", args.tokens, "one number with --engine cpu")
    (args.tokens,) = args.tokens
    args.topologies = args.ranks_per_node or default_topologies(args.ranks)
    for n in args.topologies:
        if n < 1 or args.ranks % n:
            refuse("--ranks-per-node", n, f"divisors of the {args.ranks} ranks")
    del args.ranks_per_node


def _finish_cuda(args: argparse.Namespace, world_size: int | None, refuse) -> None:
    """``cases``."""
    num_gpus = torch.cuda.device_count()
    if world_size is not None:
        refuse("--engine", "cuda under torchrun", "without torchrun: it starts the ranks itself")
    if not num_gpus:
        refuse("--engine", "cuda", "cpu: there is no GPU that PyTorch can use")
    if args.ranks > num_gpus:
        refuse("--ranks", args.ranks, f"at most the {num_gpus} GPUs")
    for n in args.ranks_per_node or ():
        if n < 1 or args.ranks % n:
            refuse("--ranks-per-node", n, f"divisors of the {args.ranks} ranks")
    args.cases = make_cases(args)
    for case in args.cases:
        try:
            case.routing_on_host(0) if case.routing == HOT else None
        except ValueError as error:
            refuse("--routing", case.routing, str(error))


def make_cases(args: argparse.Namespace) -> list[Case]:
    common = dict(engine=args.engine, iters=args.iters, warmup=args.warmup)
    if args.suite is not None:
        return list(suite_cases(args.ranks, **common))
    names = ("hidden", "experts", "topk", "routing", "dtype", "layout", "graph")
    common |= {name: getattr(args, name) for name in names}
    if not args.baseline:
        common["others"] = ()
    nodes = [None if n == args.ranks else n for n in args.ranks_per_node or (args.ranks,)]
    return [
        Case(args.ranks, tokens=tokens, sms=sms, ranks_per_node=n, **common)
        for tokens in args.tokens
        for sms in args.sms
        for n in nodes
    ]


def default_topologies(num_ranks: int) -> list[int]:
    """Ranks per node: as torchrun started them; of one node also its halves as virtual nodes."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    return [num_ranks, num_ranks // 2] if per_host == num_ranks and num_ranks % 2 == 0 else [per_host]


def main(argv: list[str] | None = None) -> int:
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    args = parse_args(argv, int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
    if args.chart is not None:
        print(f"chart: {nodes_report.draw_chart(args.chart)}")
        return 0
    if args.report:
        return report.write(Path("docs/performance.md"), args.out)
    machine = describe_machine(args.build)  # before the run: its load is not the benchmark's own
    if args.engine == "cuda":
        return suite.run(args.cases, machine, args.out, args.threads)
    if under_torchrun:
        torch.set_num_threads(args.threads)
        dist.init_process_group("gloo")
        results = nodes.measure(dist.get_rank(), args)
        dist.destroy_process_group()
    else:
        results = run_ranks(args.ranks, nodes.measure, args, threads_per_rank=args.threads, timeout_s=3600.0)[0]
    return 0 if results is None else nodes_report.report(args, machine, results)


if __name__ == "__main__":
    sys.exit(main())
