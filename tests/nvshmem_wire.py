"""Runs dispatch and combine over the NVSHMEM wire; its settings are read from the environment.

EP_DISPATCHER_WIRE=nvshmem NVSHMEM_REMOTE_TRANSPORT=none python tests/nvshmem_wire.py NUM_RANKS RANKS_PER_NODE \
    [STEPS [NUM_PUTTING [WHAT...]]]

The first NUM_PUTTING ranks do not store where NVLink reaches: they, and others to them, only put. WHAT is
``routing``: STEPS of changing routing; ``cases``: those of the grid; ``train``: STEPS with gradients; ``graph``:
replays of a CUDA graph. Without it, routing and cases.
"""

import ctypes
import os
import sys
import time
from dataclasses import replace

import torch
from lib import nodes
from lib.dispatch_combine import GRID, Case, check_case

import ep_dispatcher as ep
from ep_dispatcher.engines.cuda.regions import NvshmemRegions
from ep_dispatcher.tools.testing import RankPool, device_of

NUM_STEPS = 200


class CheckedBuffer(ep.Buffer):
    """Wait for every operation by polling, so that no CUDA call of a test waits for one: see tests/remote_wire.cu."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options | dict(timeout_s=15))  # the other rank need not wait long after a failure

    def dispatch(self, *args, **options):
        return self._checked(super().dispatch(*args, **options))

    def combine(self, *args, **options):
        return self._checked(super().combine(*args, **options))

    def _checked(self, output):
        if not torch.cuda.is_current_stream_capturing():
            self.check()
        return output


def use_remote_wire(rank: int, ranks_per_node: int) -> None:
    """Give this rank's node a host name for NVSHMEM, and let the buffers made from now on be checked ones."""
    os.environ["REMOTE_WIRE_HOST"] = f"node{rank // ranks_per_node}"
    ep.Buffer = CheckedBuffer


def count_puts(rank: int, case: Case) -> list[int]:
    """Return the puts of a dispatch and of a combine in which 256 tokens go to both of two nodes.

    A put has 32 rows, or metadata of 32 tokens: 16 in all. Counts, Call, items and table are one each.
    """
    puts, device = ctypes.CDLL(None).remote_wire_num_puts, device_of("cuda", rank)
    idx = torch.tensor([0, 1, case.num_experts // 2], device=device).repeat(256, 1)
    with nodes.make_buffer(case, "cuda", 256) as buffer:
        counts = [puts()]
        x = torch.ones(256, case.hidden, dtype=case.dtype, device=device)
        out = buffer.dispatch(x, idx, torch.ones(idx.shape, device=device), layout="rank")
        counts.append(puts())
        buffer.combine(out.x, out.handle, topk_weights=out.topk_weights)
        counts.append(puts())
    counts = [after - before for before, after in zip(counts, counts[1:])]
    assert counts[0] <= 20 and counts[1] <= 17, f"puts of a dispatch, of a combine: {counts}"
    return counts


def only_put(rank: int, num_putting: int) -> None:
    """Let the first ranks reach no rail peer through NVLink, as if they were on other hosts."""
    if rank < num_putting:
        attach = NvshmemRegions.attach

        def attach_without_rail(regions: NvshmemRegions) -> None:
            attach(regions)
            own = regions._config.topology.node
            regions.rail = [address if node == own else 0 for node, address in enumerate(regions.rail)]

        NvshmemRegions.attach = attach_without_rail


def check_paths(rank: int, case: Case, num_putting: int) -> None:
    """See that stores and puts are as asked for."""
    is_remote = "REMOTE_WIRE_HOLD_US" in os.environ or rank < num_putting
    per_node = case.ranks_per_node
    rail = [peer for peer in range(rank % per_node, case.num_ranks, per_node) if peer != rank]
    stored = 0 if is_remote else sum(peer >= num_putting for peer in rail)
    device_of("cuda", rank)
    with nodes.make_buffer(case, "cuda", 8) as buffer:
        assert f", {stored} of {len(rail)} rail peers through NVLink" in repr(buffer), repr(buffer)
        needs_nvshmem = is_remote or num_putting > 0  # on any rank
        kernels = "_C_nvshmem" if needs_nvshmem else "_C_cuda"
        assert buffer._engine._compiled.__name__ == f"ep_dispatcher.{kernels}"


def main(num_ranks: int, ranks_per_node: int, num_steps: int = NUM_STEPS, num_putting: int = 0, *what: str) -> None:
    what = what or ("routing", "cases")
    pool = RankPool(num_ranks, timeout_s=120)
    if "REMOTE_WIRE_HOLD_US" in os.environ:
        pool.run(use_remote_wire, ranks_per_node)
    pool.run(only_put, num_putting)
    small = Case(num_ranks, ranks_per_node, **nodes.SMALL)
    begin = time.monotonic()

    def done(text: str) -> None:
        print(f"{time.monotonic() - begin:.1f} s: {text}", flush=True)

    pool.run(check_paths, small, num_putting)
    done("NVSHMEM has started")
    if "REMOTE_WIRE_HOLD_US" in os.environ:
        done(f"puts of a dispatch, of a combine: {pool.run(count_puts, small)}")
    if "routing" in what:
        pool.run(nodes.change_routing, "cuda", small, num_steps)
        done(f"{num_steps} steps")
    if "train" in what:
        pool.run(nodes.train, "cuda", small, num_steps)
        done(f"{num_steps} steps with gradients")
    if "graph" in what:
        pool.run(nodes.replay, "cuda", replace(small, layout="rank"))
        done("a CUDA graph")
    if "cases" in what:
        cases = [case for case in GRID if (case.num_ranks, case.ranks_per_node) == (num_ranks, ranks_per_node)]
        cases += [Case(num_ranks, ranks_per_node, **row) for row in nodes.LONG_ROWS]
        for case in cases:
            check_case(lambda _: pool, "cuda", case)
        done(f"{len(cases)} cases")
    pool.close()
    print("all: right")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), *sys.argv[5:])
