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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ep_dispatcher.memory import MAX_LOCAL
from ep_dispatcher.tools.benchmark.cases import CASE_ROUTINGS
from ep_dispatcher.tools.benchmark.harness import make_parser, number, numbers
from ep_dispatcher.tools.estimate import report
from ep_dispatcher.tools.estimate.compared import NCCL_RUNS, PUBLISHED, RUNS, compare_measured, compare_run
from ep_dispatcher.tools.estimate.model import CHUNK_TOKENS, MACHINES
from ep_dispatcher.tools.estimate.routing import GROUP_SCORES, Routing, Sizes
from ep_dispatcher.tools.estimate.run import Job, estimate

DTYPES = ("bfloat16", "float16", "float32")
RATE = number(float, 1e-6)


def parser_of_command() -> argparse.ArgumentParser:
    sizes = dict(tokens=4096, hidden=7168, experts=256, topk=8)
    parser = make_parser(__doc__, gpus_per_node=8, **sizes, seeds=2, sms=24, chunk_tokens=CHUNK_TOKENS)
    parser.prog = "python -m ep_dispatcher.estimate"

    def add(name: str, about: str, **settings: Any) -> None:
        parser.add_argument(name, help=about, **settings)

    add("--nodes", "number of nodes (NVLink domains), or a list: 1,2,4,8", type=numbers(int, 1), default=[8])
    add("--dtype", "of the rows; bfloat16 gives a dispatch FP8 too", choices=DTYPES, default="bfloat16")
    add("--routing", "how tokens choose experts", choices=CASE_ROUTINGS, default="uniform")
    add(
        "--topk-groups", "groups of experts of a token, at most; None: no limit; DeepSeek-V3 has 4", type=number(int, 1)
    )
    add("--groups", "groups of experts; None: one per node; DeepSeek-V3 has 8", type=number(int, 1))
    add("--group-score", "two best experts or best one decide on a group", choices=GROUP_SCORES, default="top2")
    add("--gpu", "whose NVLink and memory rates to take", choices=tuple(MACHINES), default="H200")
    add("--nic-gbps", "Gb/s of the NIC of each GPU, one direction", type=RATE, default=400.0)
    add("--nvlink-gbs", "GB/s of a GPU's NVLink, one direction; None: that of --gpu", type=RATE)
    add("--hbm-gbs", "GB/s of a GPU's memory, reads and writes; None: that of --gpu", type=RATE)
    add("--max-tokens", "tokens per rank that the buffer has room for; None: --tokens", type=number(int, 1))
    add("--json", "write all figures: bytes and microseconds", type=Path, metavar="FILE")
    add("--chart", "draw times and bytes against nodes, or --published; needs matplotlib", type=Path, metavar="FILE")
    published = "only: the model beside DeepEP's figures and those of our virtual nodes"
    add("--published", published, action="store_true")
    add("--measured", "only: the model beside the benchmark's cuda-*.json there", type=Path, metavar="FOLDER")
    return parser


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, list[Job]]:
    """Return the arguments and a job for each number of nodes. Exit the process if an argument is not allowed."""
    parser = parser_of_command()
    args = parser.parse_args(argv)

    def refuse(argument: str, given: object, allowed: str) -> None:
        parser.error(f"{argument}: given {given}, allowed: {allowed}")

    if args.gpus_per_node > MAX_LOCAL:
        refuse("--gpus-per-node", args.gpus_per_node, f"1 to {MAX_LOCAL}, the ranks that the engine runs on a node")
    if args.measured is not None and not list(args.measured.glob("cuda-*ranks-*sms.json")):
        refuse("--measured", args.measured, "a folder with cuda-*.json of ep_dispatcher.bench")
    for name in ("json", "chart"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            refuse(f"--{name}", path, "a file in a folder that exists")
        if path is not None and (args.measured or args.published and name == "json"):
            refuse(f"--{name}", "beside --published or --measured", "without them; --chart beside --published alone")
    try:
        jobs = [_job(args, nodes) for nodes in args.nodes]
    except ValueError as error:  # of checks.py: begins with the argument's name
        argument, rest = str(error).split(":", 1)
        parser.error(f"--{argument.replace('_', '-')}:{rest}")
    return args, jobs


def _job(args: argparse.Namespace, nodes: int) -> Job:
    given = dict(nvlink_gb_per_s=args.nvlink_gbs, hbm_gb_per_s=args.hbm_gbs, num_sms=args.sms)
    given = {name: value for name, value in given.items() if value is not None}
    return Job(
        Sizes(nodes, args.gpus_per_node, args.tokens, args.hidden, args.experts, args.topk),
        Routing(args.routing, args.topk_groups, args.groups, args.group_score),
        replace(MACHINES[args.gpu], nic_gbit_per_s=args.nic_gbps, **given),
        getattr(torch, args.dtype),
        args.seeds,
        args.chunk_tokens,
        args.max_tokens,
    )


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 1 for a chart without matplotlib, else 0."""
    args, jobs = parse_args(argv)
    if args.published or args.measured:
        if args.published:
            print(report.compared_table("DeepEP, published", [figure.compare() for figure in PUBLISHED]))
            runs = [compared for run in (*RUNS, *NCCL_RUNS) for compared in compare_run(run).values()]
            print(f"\n{report.compared_table('this engine, virtual nodes on 2 H200', runs)}")
        if args.measured:
            print(report.compared_table("this engine, measured", list(compare_measured(args.measured))))
        return int(args.chart is not None and not report.draw_virtual_nodes(args.chart))
    print("\n".join(report.title(jobs[0])))
    results = []
    for job in jobs:
        results.append(estimate(job))
        print(f"\n{report.nodes_table(job, results[-1])}", flush=True)
    if len(jobs) > 1:
        print(f"\n{report.growth_table(results)}")
    if args.json is not None:
        left_out = ("json", "chart", "published", "measured", "gpu", "nvlink_gbs", "hbm_gbs", "nic_gbps", "sms")
        settings = {name: value for name, value in vars(args).items() if name not in left_out}
        settings["machine"] = asdict(jobs[0].machine)
        args.json.write_text(json.dumps({"settings": settings, "estimates": results}, indent=1) + "\n")
        print(f"\nJSON: {args.json}")
    return int(args.chart is not None and not report.draw(jobs[0], results, args.chart))
