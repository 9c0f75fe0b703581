"""Estimates dispatch and combine on machines that are not at hand: bytes over every wire, memory, and time.

    python -m ep_dispatcher.estimate --nodes 8 --topk-groups 4        # 8 nodes of 8 H200, DeepSeek-V3's sizes
    python -m ep_dispatcher.estimate --nodes 1,2,4,8,16,32 --chart growth.png
    python -m ep_dispatcher.estimate --published                      # the model beside DeepEP's figures
    python -m ep_dispatcher.estimate --measured benchmarks/results    # the model beside our own

Bytes are counted for sampled routings; times are modelled. docs/estimate.md says how, and what was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ep_dispatcher.estimate import report
from ep_dispatcher.estimate.model import CHUNK_TOKENS, MACHINES, Machine
from ep_dispatcher.estimate.published import compare_measured, compare_published
from ep_dispatcher.estimate.routing import GROUP_SCORES, KINDS, Routing, Sizes
from ep_dispatcher.estimate.run import Job, estimate

DTYPES = ("bfloat16", "float16", "float32")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ep_dispatcher.estimate", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--nodes", type=numbers, default=[8], help="NVLink domains; or a list: 1,2,4,8")
    add("--gpus-per-node", type=int, default=8)
    add("--tokens", type=int, default=4096, help="tokens per rank")
    add("--hidden", type=int, default=7168)
    add("--experts", type=int, default=256, help="experts of all ranks together")
    add("--topk", type=int, default=8)
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--routing", choices=KINDS, default="uniform")
    add("--topk-groups", type=int, help="limit a token to so many groups of experts (nodes); DeepSeek-V3 has 4")
    add("--groups", type=int, help="groups of experts (default: one per node); DeepSeek-V3 has 8")
    add("--group-score", choices=GROUP_SCORES, default="top2", help="which groups a token takes")
    add("--seeds", type=int, default=2, help="routings to sample")
    add("--gpu", choices=tuple(MACHINES), default="H200", help="where NVLink and HBM come from")
    add("--nic-gbps", type=float, default=400.0, help="Gb/s of the NIC of each GPU, one direction")
    add("--nvlink-gbs", type=float, help="GB/s of a GPU's NVLink, one direction (default: the GPU's)")
    add("--hbm-gbs", type=float, help="GB/s of a GPU's memory (default: the GPU's)")
    add("--sms", type=int, default=24, help="multiprocessors of each operation")
    add("--chunk-tokens", type=int, default=CHUNK_TOKENS, help="tokens that move from stage to stage together")
    add("--max-tokens", type=int, help="tokens per rank that the buffer has room for (default: --tokens)")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--chart", type=Path, metavar="FILE", help="draw times and bytes against nodes (needs matplotlib)")
    add("--published", action="store_true", help="only: the model beside DeepEP's published figures")
    add("--measured", type=Path, metavar="FOLDER", help="only: the model beside the benchmark's cuda-*.json there")
    return parser


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, list[Job]]:
    """Return the arguments and a job for each number of nodes; ends the process where an argument is not allowed."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def refuse(argument: str, given: object, allowed: str) -> None:
        parser.error(f"{argument}: given {given}, allowed: {allowed}")

    for name in ("nic_gbps", "nvlink_gbs", "hbm_gbs", "sms"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            refuse(f"--{name.replace('_', '-')}", value, "a number above 0")
    if args.measured is not None and not list(args.measured.glob("cuda-*ranks-*sms.json")):
        refuse("--measured", args.measured, "a folder with cuda-*.json of ep_dispatcher.bench")
    for name in ("json", "chart"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            refuse(f"--{name}", path, "a file in a folder that exists")
        if path is not None and (args.published or args.measured):
            refuse(f"--{name}", "beside --published or --measured", "an estimate of its own")
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
        if args.measured:
            print(report.compared_table("this engine, measured", compare_measured(args.measured)))
        return 0
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
    if args.chart is not None:
        try:
            print(f"chart: {report.draw(jobs[0], results, args.chart)}")
        except ImportError:
            print("no chart: matplotlib is missing (pip install matplotlib)")
            return 1
    return 0


def _settings(args: argparse.Namespace, job: Job) -> dict:
    only = ("json", "chart", "published", "measured", "gpu", "nvlink_gbs", "hbm_gbs", "nic_gbps", "sms")
    return {name: value for name, value in vars(args).items() if name not in only} | {"machine": asdict(job.machine)}


if __name__ == "__main__":
    sys.exit(main())
