"""Estimates dispatch and combine on machines that are not at hand: bytes over every wire, memory, and time.

    python -m ep_dispatcher.estimate --nodes 8 --topk-groups 4        # 8 nodes of 8 H200, DeepSeek-V3's sizes
    python -m ep_dispatcher.estimate --nodes 1,2,4,8,16,32 --chart growth.png
    python -m ep_dispatcher.estimate --published                      # the model beside DeepEP, and our virtual nodes
    python -m ep_dispatcher.estimate --measured benchmarks/results    # the model beside our runs on one node

Bytes are counted for sampled routings; times are modelled. docs/estimate.md says how, and what was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ep_dispatcher.memory import MAX_LOCAL
from ep_dispatcher.tools.estimate import report
from ep_dispatcher.tools.estimate.model import CHUNK_TOKENS, MACHINES, Machine
from ep_dispatcher.tools.estimate.published import compare_measured, compare_published
from ep_dispatcher.tools.estimate.routing import GROUP_SCORES, KINDS, Routing, Sizes
from ep_dispatcher.tools.estimate.run import Job, estimate
from ep_dispatcher.tools.estimate.virtual_nodes import compare_virtual_nodes

DTYPES = ("bfloat16", "float16", "float32")


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"given {text!r}, allowed: an integer") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"given {text!r}, allowed: a number above 0") from None


def numbers_of_nodes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        allowed = "integers from 1, with commas between them, such as 8 or 1,2,4,8"
        raise argparse.ArgumentTypeError(f"given {text!r}, allowed: {allowed}") from None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ep_dispatcher.estimate", description=__doc__.partition("\n")[0])

    def add(name: str, text: str, default: object = None, **settings: Any) -> None:
        if default is not None:
            settings["default"], text = default, f"{text} (default: {default})"
        parser.add_argument(name, help=text, **settings)

    add("--nodes", "number of nodes (NVLink domains), or a list: 1,2,4,8", "8", type=numbers_of_nodes)
    add("--gpus-per-node", f"GPUs of a node, one rank each, 1 to {MAX_LOCAL}", 8, type=whole)
    add("--tokens", "tokens per rank", 4096, type=whole)
    add("--hidden", "elements of a token's row", 7168, type=whole)
    add("--experts", "experts of all ranks together", 256, type=whole)
    add("--topk", "experts of a token", 8, type=whole)
    add("--dtype", "of the rows; bfloat16 gives a dispatch FP8 too", "bfloat16", choices=DTYPES)
    add("--routing", "how tokens choose experts", "uniform", choices=KINDS)
    add("--topk-groups", "groups of experts of a token, at most (default: no limit); DeepSeek-V3 has 4", type=whole)
    add("--groups", "groups of experts (default: one per node); DeepSeek-V3 has 8", type=whole)
    add("--group-score", "two best experts or best one decide on a group", "top2", choices=GROUP_SCORES)
    add("--seeds", "number of routings to sample", 2, type=whole)
    add("--gpu", "whose NVLink and memory rates to take", "H200", choices=tuple(MACHINES))
    add("--nic-gbps", "Gb/s of the NIC of each GPU, one direction", 400.0, type=number)
    add("--nvlink-gbs", "GB/s of a GPU's NVLink, one direction (default: that of --gpu)", type=number)
    add("--hbm-gbs", "GB/s of a GPU's memory, reads and writes (default: that of --gpu)", type=number)
    add("--sms", "multiprocessors of each operation", 24, type=whole)
    add("--chunk-tokens", "tokens that move from stage to stage together", CHUNK_TOKENS, type=whole)
    add("--max-tokens", "tokens per rank that the buffer has room for (default: --tokens)", type=whole)
    add("--json", "write all figures: bytes and microseconds (default: none)", type=Path, metavar="FILE")
    chart = "draw times and bytes against nodes, or --published; needs matplotlib (default: none)"
    add("--chart", chart, type=Path, metavar="FILE")
    published = "only: the model beside DeepEP's figures and those of our virtual nodes (default: off)"
    add("--published", published, action="store_true")
    measured = "only: the model beside the benchmark's cuda-*.json there (default: none)"
    add("--measured", measured, type=Path, metavar="FOLDER")
    return parser


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, list[Job]]:
    """Return the arguments and a job for each number of nodes. Exit the process if an argument is not allowed."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def refuse(argument: str, given: object, allowed: str) -> None:
        parser.error(f"{argument}: given {given}, allowed: {allowed}")

    if not 1 <= args.gpus_per_node <= MAX_LOCAL:
        refuse(
            "--gpus-per-node", args.gpus_per_node, f"1 to {MAX_LOCAL}: the engine runs 1 to {MAX_LOCAL} ranks a node"
        )
    for name in ("nic_gbps", "nvlink_gbs", "hbm_gbs", "sms"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            refuse(f"--{name.replace('_', '-')}", value, "a number above 0")
    if args.measured is not None and not list(args.measured.glob("cuda-*ranks-*sms.json")):
        refuse("--measured", args.measured, "a folder with cuda-*.json of ep_dispatcher.tools.bench")
    for name in ("json", "chart"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            refuse(f"--{name}", path, "a file in a folder that exists")
        if path is not None and (args.measured or args.published and name == "json"):
            also = ", or with --published alone" if name == "chart" else ""
            refuse(f"--{name}", "beside --published or --measured", f"without them{also}")
    try:
        jobs = [_job(args, nodes) for nodes in args.nodes]
    except ValueError as error:  # of checks.py: begins with the argument's name
        argument, rest = str(error).split(":", 1)
        parser.error(f"--{argument.replace('_', '-')}:{rest}")
    return args, jobs


def _job(args: argparse.Namespace, nodes: int) -> Job:
    return Job(
        Sizes(nodes, args.gpus_per_node, args.tokens, args.hidden, args.experts, args.topk),
        Routing(args.routing, args.topk_groups, args.groups, args.group_score),
        _machine(args),
        getattr(torch, args.dtype),
        args.seeds,
        args.chunk_tokens,
        args.max_tokens,
    )


def _machine(args: argparse.Namespace) -> Machine:
    given = dict(nvlink_gb_per_s=args.nvlink_gbs, hbm_gb_per_s=args.hbm_gbs)
    given = {name: value for name, value in given.items() if value is not None}
    return replace(MACHINES[args.gpu], nic_gbit_per_s=args.nic_gbps, num_sms=args.sms, **given)


def main(argv: list[str] | None = None) -> int:
    args, jobs = parse_args(argv)
    if args.published or args.measured:
        if args.published:
            print(report.compared_table("DeepEP, published", compare_published()))
            print(f"\n{report.compared_table('this engine, virtual nodes on 2 H200', compare_virtual_nodes())}")
        if args.measured:
            print(report.compared_table("this engine, measured", compare_measured(args.measured)))
        return _draw(args.chart, report.draw_virtual_nodes)
    print("\n".join(report.title(jobs[0])))
    results = []
    for job in jobs:
        results.append(estimate(job))
        print(f"\n{report.nodes_table(job, results[-1])}", flush=True)
    if len(jobs) > 1:
        print(f"\n{report.growth_table(results)}")
    if args.json is not None:
        args.json.write_text(json.dumps({"settings": _settings(args, jobs[0]), "estimates": results}, indent=1) + "\n")
        print(f"\nJSON: {args.json}")
    return _draw(args.chart, lambda path: report.draw(jobs[0], results, path))


def _draw(path: Path | None, draw: Callable[[Path], Path]) -> int:
    """Return the exit code."""
    if path is not None:
        try:
            print(f"chart: {draw(path)}")
        except ImportError:
            print("no chart: matplotlib is missing (pip install matplotlib)")
            return 1
    return 0


def _settings(args: argparse.Namespace, job: Job) -> dict:
    only = ("json", "chart", "published", "measured", "gpu", "nvlink_gbs", "hbm_gbs", "nic_gbps", "sms")
    return {name: value for name, value in vars(args).items() if name not in only} | {"machine": asdict(job.machine)}
