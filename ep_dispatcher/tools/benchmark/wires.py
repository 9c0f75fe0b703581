"""Bytes over the wires: the lower bound, those that the engine counts, and those that the baseline sends."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.tools.benchmark.ranks import sum_over_ranks
from ep_dispatcher.tools.benchmark.sides import identity_experts

WIRES = ("between nodes", "inside nodes", "local")


def least_rows(topk_idx: Tensor, rank: int, num_ranks: int, ranks_per_node: int, num_experts: int) -> list[int]:
    """Return how many rows of this rank's tokens must cross each of ``WIRES`` in a dispatch; a combine is its mirror.

    A token goes once to every other node that has one of its experts, to the source's rail peer there. From there it
    goes once to every rank of that node that has one.
    """
    dst = topk_idx.div(num_experts // num_ranks, rounding_mode="floor")  # "no expert" stays -1
    reached = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    reached.scatter_(1, dst + 1, torch.ones_like(dst, dtype=torch.bool))
    reached = reached[:, 1:]
    node, local_rank = divmod(rank, ranks_per_node)
    nodes = reached.view(-1, num_ranks // ranks_per_node, ranks_per_node).any(2)
    per_rank = reached.sum(0).view(-1, ranks_per_node)
    local = int(per_rank[:, local_rank].sum())
    return [int(nodes.sum() - nodes[:, node].sum()), int(per_rank.sum()) - local, local]


def baseline_rows(send_rows: list[int], rank: int, ranks_per_node: int) -> list[int]:
    own_node = sum(n for dst, n in enumerate(send_rows) if dst // ranks_per_node == rank // ranks_per_node)
    return [sum(send_rows) - own_node, own_node - send_rows[rank], send_rows[rank]]


def counted_bytes(buffer, rank: int, call: Callable[[], object]) -> list[int]:
    """Return the bytes that this rank moved over each of ``WIRES`` during a call, by the buffer's counters."""
    before = buffer.counters()
    call()
    after = buffer.counters()

    def moved(name: str) -> list[int]:
        return [b - a for a, b in zip(before[name], after[name], strict=True)]

    pulled, pushed = moved("intra_node_bytes_read"), moved("intra_node_bytes_written")
    inside = [a + b for a, b in zip(pulled, pushed, strict=True)]
    return [sum(moved("inter_node_bytes_sent")), sum(inside) - inside[rank], inside[rank]]


def wire_bytes(engine, baseline, ranks_per_node: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict:
    """Return the bytes of rows over each wire, all ranks together, of a dispatch and of a combine.

    The dispatch has a given plan and no weights. ``engine`` is an EngineSide, ``baseline`` an AllToAllBaseline or None.
    """
    rank, num_ranks, buffer = dist.get_rank(), dist.get_world_size(), engine.buffer
    received = engine.dispatch(x, topk_idx, topk_weights)
    y = identity_experts(received)
    counted = {
        "dispatch": counted_bytes(buffer, rank, lambda: buffer.dispatch(x, None, None, handle=received.handle)),
        "combine": counted_bytes(buffer, rank, lambda: buffer.combine(y, received.handle)),
    }
    num_experts = buffer.num_local_experts * num_ranks
    rows = {"least": least_rows(topk_idx.cpu(), rank, num_ranks, ranks_per_node, num_experts)}
    if baseline is not None:
        rows["baseline"] = baseline_rows(baseline.plan(topk_idx).send_rows, rank, ranks_per_node)
    row_bytes = x.shape[1] * x.element_size()
    moved = {name: [n * row_bytes for n in per_wire] for name, per_wire in rows.items()}
    return {
        operation: {
            name: dict(zip(WIRES, sum_over_ranks(per_wire), strict=True))
            for name, per_wire in {"least": moved["least"], "engine": counted[operation], **moved}.items()
        }
        for operation in counted
    }
