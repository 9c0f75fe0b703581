"""Bytes over the wires: the lower bound, those that the engine counts, and those that the baseline sends."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.tools.benchmark.cases import Case
from ep_dispatcher.tools.benchmark.ranks import sum_over_ranks
from ep_dispatcher.tools.benchmark.sides import identity_experts
from ep_dispatcher.tools.estimate.routing import Sizes
from ep_dispatcher.tools.estimate.traffic import count

WIRES = ("between nodes", "inside nodes", "local")


def rows_of(case: Case) -> dict[str, list[int]]:
    """Return the rows of all ranks over each of ``WIRES`` in a dispatch; a combine is its mirror.

    "least": a token goes once to every other node that has one of its experts, to the source's rail peer there. From
    there it goes once to every rank of that node that has one. "baseline": once to every expert's rank.
    """
    per_node = case.ranks_per_node or case.ranks
    sizes = Sizes(case.ranks // per_node, per_node, case.tokens, case.hidden, case.experts, case.topk)
    routing = [case.routing_on_host(rank)[0] for rank in range(case.ranks)]
    counts = count(sizes, routing)
    baseline = torch.zeros(len(WIRES), dtype=torch.int64, device="cpu")
    for rank, topk_idx in enumerate(routing):
        dst = topk_idx[topk_idx >= 0] // sizes.local_experts
        other_node = dst // per_node != rank // per_node
        baseline += torch.stack([other_node.sum(), (~other_node & (dst != rank)).sum(), (dst == rank).sum()])
    least = [int(rows.sum()) for rows in (counts.nic_out, counts.nvlink_in, counts.own)]
    return {"least": least, "baseline": baseline.tolist()}


def counted_bytes(buffer, rank: int, call: Callable[[], object]) -> list[int]:
    """Return the bytes that all ranks moved over each of ``WIRES`` during a call, by their buffers' counters."""
    before = buffer.counters()
    call()
    after = buffer.counters()

    def moved(name: str) -> list[int]:
        return [b - a for a, b in zip(before[name], after[name], strict=True)]

    pulled, pushed = moved("intra_node_bytes_read"), moved("intra_node_bytes_written")
    inside = [a + b for a, b in zip(pulled, pushed, strict=True)]
    return sum_over_ranks([sum(moved("inter_node_bytes_sent")), sum(inside) - inside[rank], inside[rank]])


def wire_bytes(engine, case: Case, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict:
    """Return the bytes of rows over each wire, all ranks together, of a dispatch and of a combine.

    The dispatch has a given plan and no weights. ``engine`` is an EngineSide.
    """
    rank, buffer = dist.get_rank(), engine.buffer
    received = engine.dispatch(x, topk_idx, topk_weights)
    y = identity_experts(received)
    calls = {
        "dispatch": lambda: buffer.dispatch(x, None, None, handle=received.handle),
        "combine": lambda: buffer.combine(y, received.handle),
    }
    rows = rows_of(case)
    if not {"all_to_all", "fast_sum"} & set(case.others):
        del rows["baseline"]
    moved = {name: [n * x.shape[1] * x.element_size() for n in per_wire] for name, per_wire in rows.items()}
    counted = {operation: counted_bytes(buffer, rank, call) for operation, call in calls.items()}
    return {
        operation: {
            name: dict(zip(WIRES, per_wire, strict=True))
            for name, per_wire in {"least": moved["least"], "engine": counted[operation], **moved}.items()
        }
        for operation in calls
    }
