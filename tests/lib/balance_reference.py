"""The definition of the plan of balanced experts and of physical numbers: plain Python, slow and clear."""

from __future__ import annotations

from ep_dispatcher.balance.planner import BalanceSizes

Copies = list[list[tuple[int, int, int]]]  # by rank and slot: (logical expert or -1, begin, end)


def group_totals(counts: list[list[int]], sizes: BalanceSizes) -> list[int]:
    """Rows of each expert."""
    return [sum(row[expert] for row in counts) for expert in range(sizes.num_experts)]


def group_loads(totals: list[int], sizes: BalanceSizes) -> list[int]:
    """Rows of each rank's own experts."""
    m = sizes.num_local_experts
    return [sum(totals[rank * m : (rank + 1) * m]) for rank in range(sizes.num_ranks)]


def nodes(sizes: BalanceSizes) -> list[list[int]]:
    n = sizes.ranks_per_node
    return [sorted(sizes.rank_at[first : first + n]) for first in range(0, sizes.num_ranks, n)]


def hand_out(totals, loads, node, sizes, threshold) -> dict[tuple[int, int], tuple[int, int]] | None:
    """Copies of one node that leave no rank with more rows than the threshold, or None.

    By (rank, slot): (expert, rows).
    """
    m, q = sizes.num_local_experts, sizes.smallest_copy
    loads = {rank: loads[rank] for rank in node}
    left = {expert: totals[expert] for rank in node for expert in range(rank * m, (rank + 1) * m)}
    copies: dict[tuple[int, int], tuple[int, int]] = {}
    while max(loads.values()) > threshold:
        home = min(node, key=lambda rank: (-loads[rank], rank))
        expert = min(range(home * m, (home + 1) * m), key=lambda e: (-left[e], e))
        in_rank = {rank: [e for (other, _), (e, _) in copies.items() if other == rank] for rank in node}
        targets = [r for r in node if r != home and len(in_rank[r]) < sizes.num_slots and expert not in in_rank[r]]
        if not targets:
            return None
        target = min(targets, key=lambda rank: (loads[rank], rank))
        rows = min(threshold - loads[target], left[expert], max(loads[home] - threshold, q))
        if rows < q:
            return None
        copies[target, len(in_rank[target])] = expert, rows
        left[expert] -= rows
        loads[home] -= rows
        loads[target] += rows
    return copies


def is_balanced(loads: list[int], sizes: BalanceSizes) -> bool:
    return max(loads) * sizes.num_ranks * 100 < sum(loads) * 105


def thresholds(loads, node, sizes):
    """All thresholds of a node, in the order in which they are tried."""
    mean = -(-sum(loads) // sizes.num_ranks)
    threshold = max(mean, -(-sum(loads[rank] for rank in node) // len(node)))
    while True:
        yield threshold
        threshold += max(1, mean // 128)


def plan(counts: list[list[int]], sizes: BalanceSizes) -> tuple[Copies, list[list[int]]]:
    """Return what plan_copies returns, as lists."""
    totals = group_totals(counts, sizes)
    before = group_loads(totals, sizes)
    after = list(before)
    copies: Copies = [[(-1, 0, 0)] * sizes.num_slots for _ in range(sizes.num_ranks)]
    if is_balanced(before, sizes):
        return copies, [before, after]
    for node in nodes(sizes):
        tried = (hand_out(totals, before, node, sizes, threshold) for threshold in thresholds(before, node, sizes))
        found = next(one for one in tried if one is not None)
        at = list(totals)  # where the next copy of each expert begins: first the home's quota
        for expert, rows in found.values():
            at[expert] -= rows
        for (rank, slot), (expert, rows) in sorted(found.items()):
            copies[rank][slot] = (expert, at[expert], at[expert] + rows)
            at[expert] += rows
            after[rank] += rows
            after[expert // sizes.num_local_experts] -= rows
    return copies, [before, after]


def physical_of(expert: int, number: int, copies: Copies, sizes: BalanceSizes) -> int:
    """The physical expert of choice ``number`` of an expert."""
    m, width = sizes.num_local_experts, sizes.num_local_experts + sizes.num_slots
    for rank, slots in enumerate(copies):
        for slot, (copied, begin, end) in enumerate(slots):
            if copied == expert and begin <= number < end:
                return rank * width + m + slot
    return expert // m * width + expert % m


def rewrite(
    topk_idx: list[list[int]], counts: list[list[int]], rank: int, copies: Copies, sizes: BalanceSizes
) -> list[list[int]]:
    """Return what rewrite returns, as lists."""
    number = [sum(row[expert] for row in counts[:rank]) for expert in range(sizes.num_experts)]
    result = []
    for chosen in topk_idx:
        physical = []
        for expert in chosen:
            if expert < 0:
                physical.append(expert)
            elif expert >= sizes.num_experts:
                physical.append(sizes.num_physical + expert - sizes.num_experts)
            else:
                physical.append(physical_of(expert, number[expert], copies, sizes))
        result.append(physical)
        for expert in {e for e in chosen if 0 <= e < sizes.num_experts}:
            number[expert] += 1
    return result
