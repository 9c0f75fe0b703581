"""Runs cases one after the other on the same ranks. Prints and writes the result of each as soon as it is there.

A case's JSON has ``machine``, ``case``, and

    operations     operation -> side -> median_s, min_s, max_s over iterations, each of the slowest rank; gb_per_s; for
                   sides other than the engine speedup: their time over the engine's
    seconds        operation -> side -> [iteration], of the slowest rank
    received_rows  rows that all ranks together receive in one dispatch
    max_recv_rows  the most rows that a rank receives, which the engine was given
    wire_bytes     operation -> "least" (lower bound), "engine" (by its counters) or "baseline" (all_to_all_single)
                   -> wire -> bytes of all ranks together
    compared       side -> whether its results are those of the engine, and the largest relative error of a sum
    passes         operation of a module in ``others`` -> how often it moves every received row
    notes          failures: what was not measured, and why

GB/s counts every row that a rank receives, those of its own tokens too: once per dispatch and once per combine. The
backward of either counts as the other. It is the mean of all ranks.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ep_dispatcher.tools.benchmark.cases import PASSES, Case
from ep_dispatcher.tools.benchmark.machine import to_json
from ep_dispatcher.tools.benchmark.measurements import ENGINE, GRAPH, measurements_of
from ep_dispatcher.tools.benchmark.ranks import TorchrunRanks
from ep_dispatcher.tools.testing import RankError, RankPool

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
TIMEOUT_S = {
    "cpu": 3600.0,
    "cuda": 90.0,
}  # of one measurement; the first one on GPUs also starts NCCL and imports Megatron


def start_ranks(case: Case) -> RankPool:
    return RankPool(
        case.ranks,
        threads_per_rank=case.threads,
        timeout_s=TIMEOUT_S[case.engine],
        backend=BACKENDS[case.engine],
    )


def run(
    cases: Iterable[Case],
    machine: dict,
    folder: Path,
    start: Callable[[Case], RankPool | TorchrunRanks] = start_ranks,
) -> int:
    """Measure, print, and write a JSON per case into ``folder``. Return 1 if a measurement fails or results differ."""
    folder.mkdir(parents=True, exist_ok=True)
    pool, has_failed, begin = None, False, time.monotonic()
    try:
        for case in cases:
            path = folder / f"{case.name}.json"
            result = {"machine": machine} | new_result(case)
            for measurement, *arguments in measurements_of(case):
                if pool is None or pool.closed:
                    pool = start(case)
                try:
                    found = pool.run(measurement, *arguments)[0]
                    usable = found.pop("usable")
                    merge(result, found)
                except RankError as error:
                    print(error, file=sys.stderr, flush=True)
                    rank, (kind, text, _) = next(iter(error.failures.items()))
                    result["notes"].append(
                        f"{measurement.__name__}: {kind}: {text.partition(chr(10))[0]} (rank {rank})"
                    )
                    usable, has_failed = False, True
                if (
                    not usable
                ):  # an error of a GPU comes back in all later calls: the next measurement gets new processes
                    pool.close()
                summarize(result, case)
                path.write_text(to_json(result))
            print(table(result), f"{path}, {time.monotonic() - begin:.0f} s so far", sep="\n", end="\n\n", flush=True)
            has_failed |= any(not compared["same"] for compared in result["compared"].values())
            has_failed |= not result["operations"]
    finally:
        if pool is not None:
            pool.close()
    return int(has_failed)


def new_result(case: Case) -> dict[str, Any]:
    return {"case": asdict(case), "notes": [], "operations": {}, "seconds": {}, "compared": {}, "passes": {}}


def merge(result: dict, found: dict) -> None:
    for operation, sides in found.pop("seconds").items():
        result["seconds"].setdefault(operation, {}).update(sides)
    result["notes"] += found.pop("notes")
    for name in ("compared", "passes"):
        result[name] |= found.pop(name)
    result.update(found)


def summarize(result: dict, case: Case) -> None:
    passes = PASSES | result["passes"]
    for operation, sides in result["seconds"].items():
        figures = result["operations"][operation] = {}
        rows = result.get("received_rows", 0) / case.ranks * passes[operation]
        for side, seconds in sides.items():
            median = statistics.median(seconds)
            figures[side] = {"median_s": median, "min_s": min(seconds), "max_s": max(seconds)}
            figures[side]["gb_per_s"] = round(rows * case.row_bytes(operation) / median / 1e9, 3)
            if side not in (ENGINE, GRAPH) and ENGINE in sides:
                figures[side]["speedup"] = round(median / statistics.median(sides[ENGINE]), 3)


def table(result: dict) -> str:
    case = result["case"]
    lines = [
        "{ranks} ranks, engine {engine}, {tokens} tokens per rank, hidden {hidden}, {experts} experts, top-{topk}, "
        "{dtype}, {routing} routing, {layout} layout".format(**case)
        + (", {sms} SMs".format(**case) if case["engine"] == "cuda" else "")
        + (", {ranks_per_node} ranks per node".format(**case) if case["ranks_per_node"] else ""),
        f"microseconds of the slowest rank of an iteration: median of {case['iters']}, least, most",
        f"{'operation':<28}{'side':<30}{'median':>10}{'least':>10}{'most':>10}{'GB/s':>8}  engine's speed-up",
    ]
    for operation, figures in result["operations"].items():
        for side, f in figures.items():
            times = "".join(f"{f[key] * 1e6:10.1f}" for key in ("median_s", "min_s", "max_s"))
            speedup = f"{f['speedup']:18.2f}x" if "speedup" in f else ""
            lines.append(f"{operation:<28}{side:<30}{times}{f['gb_per_s']:8.1f}{speedup}")
    for operation, moved in result.get("wire_bytes", {}).items():
        for wire in moved["least"]:
            megabytes = ", ".join(f"{name} {values[wire] / 1e6:.1f}" for name, values in moved.items())
            lines.append(f"MB of a {operation}, {wire}, all ranks: {megabytes}")
    for side, compared in result["compared"].items():
        same = "the same results" if compared["same"] else "DIFFERENT RESULTS"
        error, allowed = compared["largest_relative_error"], compared["allowed"]
        lines.append(f"engine and {side}: {same}; largest relative error {error:.1e}, allowed {allowed:.1e}")
    return "\n".join(lines + result["notes"])
