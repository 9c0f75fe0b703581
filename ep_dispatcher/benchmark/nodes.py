"""Times one configuration on several topologies of CPU ranks: a rank's part."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.benchmark.baseline import AllToAllBaseline
from ep_dispatcher.benchmark.ranks import sum_over_ranks
from ep_dispatcher.benchmark.sides import EngineSide, compare, operations_of
from ep_dispatcher.benchmark.wires import wire_bytes
from ep_dispatcher.testing import make_routing

OPERATIONS = ("dispatch", "combine", "dispatch+combine", "cached dispatch", "forward+backward")


def measure(rank: int, config: argparse.Namespace) -> list[dict] | None:
    """Every topology of ``config.topologies``, on one rank of an initialised default group; None but on rank 0."""
    results = [measure_nodes(argparse.Namespace(**vars(config), ranks_per_node=n)) for n in config.topologies]
    return results if rank == 0 else None


def measure_nodes(config: argparse.Namespace) -> dict:
    """One topology: bytes, times and the comparison of results. Collective; every rank returns the same."""
    group, rank = dist.group.WORLD, dist.get_rank()
    topk_idx, topk_weights = make_routing(config.routing, config.tokens, config.experts, config.topk, seed=rank)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(config.tokens, config.hidden, generator=generator).to(getattr(torch, config.dtype))
    inputs = [x, topk_idx, topk_weights]
    with ep.Buffer(
        group,
        hidden=config.hidden,
        num_experts=config.experts,
        num_topk=config.topk,
        max_tokens_per_rank=config.tokens,
        dtype=x.dtype,
        engine=config.engine,
        ranks_per_node=config.ranks_per_node,
    ) as buffer:
        sides = {"engine": EngineSide(buffer, config.layout)}
        if config.baseline:
            sides["baseline"] = AllToAllBaseline(group, config.experts)
            sides["baseline, fast sum"] = AllToAllBaseline(group, config.experts, fast_sum=True)
        compared = {
            name: compare(sides["engine"], side, *inputs, config.layout)
            for name, side in sides.items()
            if name != "engine"
        }
        rows = {name: sum_over_ranks([side.dispatch(*inputs).x.shape[0]])[0] for name, side in sides.items()}
        moved = wire_bytes(sides["engine"], sides.get("baseline"), config.ranks_per_node, *inputs)
        times = measure_times(sides, config, *inputs)
    return {
        "ranks_per_node": config.ranks_per_node,
        "num_nodes": dist.get_world_size() // config.ranks_per_node,
        "row_bytes": config.hidden * x.element_size(),
        "received_rows": rows,
        "compared": compared,
        "wire_bytes": moved,
        **times,
    }


def measure_times(sides: dict, config: argparse.Namespace, *inputs: Tensor) -> dict[str, dict]:
    """ "seconds" and "cpu_seconds" (of the process, all its threads): operation -> side -> [iteration][rank].

    The sides take turns, so that a disturbance meets all of them; the CPU time hardly depends on other processes.
    """
    calls = {name: operations_of(side, *inputs) for name, side in sides.items()}
    results = {"seconds": {}, "cpu_seconds": {}}
    for operation in OPERATIONS:
        mine = {name: [] for name in sides}
        for iteration in range(-config.warmup, config.iters):
            for name in sides:
                dist.barrier()
                cpu_begin = time.process_time()
                seconds = _time(calls[name][operation])
                if iteration >= 0:
                    mine[name].append((seconds, time.process_time() - cpu_begin))
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for i, result in enumerate(results.values()):
            result[operation] = {
                name: [[times[i] for times in ranks] for ranks in zip(*(e[name] for e in everyone))] for name in sides
            }
    return results


def _time(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
