"""Steps of changing routing and cases of the grid over the NVSHMEM wire; its settings are read from the environment.

EP_DISPATCHER_WIRE=nvshmem NVSHMEM_REMOTE_TRANSPORT=none python tests/nvshmem_wire.py NUM_RANKS RANKS_PER_NODE \
    [STEPS [NUM_PUTTING]]

The first NUM_PUTTING ranks do not store where NVLink reaches: they, and others to them, only put.
"""

import os
import sys

import test_nodes
from test_dispatch_combine import GRID, Case, check_case

import ep_dispatcher as ep
from ep_dispatcher.testing import RankPool, device_of

NUM_STEPS = 200


class CheckedBuffer(ep.Buffer):
    """Wait for every operation by polling, so that no CUDA call of a test waits for one: see tests/remote_wire.cu."""

    def dispatch(self, *args, **options):
        out = super().dispatch(*args, **options)
        self.check()
        return out

    def combine(self, *args, **options):
        combined = super().combine(*args, **options)
        self.check()
        return combined


def check_every_operation(rank: int) -> None:
    """Let the buffers that this rank makes from now on be checked ones."""
    ep.Buffer = CheckedBuffer


def only_put(rank: int, num_putting: int) -> None:
    if rank < num_putting:
        os.environ["EP_DISPATCHER_WIRE"] = "nvshmem-puts"


def check_paths(rank: int, case: Case, num_putting: int) -> None:
    """See that stores and puts are as asked for."""
    is_remote = "REMOTE_WIRE_HOLD_US" in os.environ or os.environ["EP_DISPATCHER_WIRE"] == "nvshmem-puts"
    per_node = case.ranks_per_node
    rail = [peer for peer in range(rank % per_node, case.num_ranks, per_node) if peer != rank]
    stored = 0 if is_remote else sum(peer >= num_putting for peer in rail)
    device_of("cuda", rank)
    with test_nodes.make_buffer(case, "cuda", 8) as buffer:
        assert f", {stored} of {len(rail)} rail peers through NVLink" in repr(buffer), repr(buffer)
        needs_nvshmem = is_remote or num_putting > 0  # on any rank
        kernels = "_C_nvshmem" if needs_nvshmem else "_C_cuda"
        assert buffer._engine._compiled.__name__ == f"ep_dispatcher.{kernels}"


def main(num_ranks: int, ranks_per_node: int, num_steps: int = NUM_STEPS, num_putting: int = 0) -> None:
    pool = RankPool(num_ranks, timeout_s=120)
    if "REMOTE_WIRE_HOLD_US" in os.environ:
        pool.run(check_every_operation)
    pool.run(only_put, num_putting)
    pool.run(check_paths, Case(num_ranks, ranks_per_node, **test_nodes.SMALL), num_putting)
    pool.run(test_nodes.change_routing, "cuda", Case(num_ranks, ranks_per_node, **test_nodes.SMALL), num_steps)
    cases = [case for case in GRID if (case.num_ranks, case.ranks_per_node) == (num_ranks, ranks_per_node)]
    cases += [Case(num_ranks, ranks_per_node, **row) for row in test_nodes.LONG_ROWS]
    for case in cases:
        check_case(lambda _: pool, "cuda", case)
    pool.close()
    print(f"{num_steps} steps and {len(cases)} cases: right")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
