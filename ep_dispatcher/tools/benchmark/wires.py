"""Bytes over the wires: the lower bound, those that the engine counts, and those that the baseline sends."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.tools.benchmark.cases import Case
from ep_dispatcher.tools.benchmark.ranks import sum_over_ranks
from ep_dispatcher.tools.benchmark.sides import identity_experts

WIRES = ("between nodes", "inside nodes", "local")


def rows_of(case: Case) -> dict[str, list[int]]:
    """Return the rows of all ranks over each of ``WIRES`` in a dispatch; a combine is its mirror.

    "least": a token goes once to every other node that has one of its experts, to the source's rail peer there. From
    there it goes once to every rank of that node that has one. "baseline": once to every expert's rank.
    """
    per_node = case.ranks_per_node or case.ranks
    num_nodes, num_local_experts = case.ranks // per_node, case.experts // case.ranks
    least, baseline = (torch.zeros(len(WIRES), dtype=torch.int64, device="cpu") for _ in range(2))
    for source in range(case.ranks):
        home, local = divmod(source, per_node)
        topk_idx = case.routing_on_host(source)[0]
        dst = topk_idx.div(num_local_experts, rounding_mode="floor")  # -1 stays -1
        reached = torch.zeros(len(topk_idx), 1 + case.ranks, dtype=torch.bool, device="cpu").scatter_(1, dst + 1, True)
        reached = reached[:, 1:].view(-1, num_nodes, per_node)
        of_rank = reached.sum(0)  # [nodes, per_node] tokens of the source for each receiver
        of_node = reached.any(2).sum(0)  # [nodes] tokens of the source for each node
        stays = of_rank[:, local].sum()  # the rail peer, or the source itself, reads its own memory
        least += torch.stack([of_node.sum() - of_node[home], of_rank.sum() - stays, stays])
        dst = dst[dst >= 0]
        is_remote = dst // per_node != home
        baseline += torch.stack([is_remote.sum(), (~is_remote & (dst != source)).sum(), (dst == source).sum()])
    return {"least": least.tolist(), "baseline": baseline.tolist()}


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
