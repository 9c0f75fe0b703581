"""Steps of changing routing and cases of the grid over the NVSHMEM wire; its settings are read from the environment.

EP_DISPATCHER_WIRE=nvshmem NVSHMEM_REMOTE_TRANSPORT=none python tests/nvshmem_wire.py NUM_RANKS RANKS_PER_NODE [STEPS]
"""

import os
import sys

import test_nodes
from test_dispatch_combine import GRID, Case, check_case

import ep_dispatcher as ep
from ep_dispatcher.testing import RankPool

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


def main(num_ranks: int, ranks_per_node: int, num_steps: int = NUM_STEPS) -> None:
    pool = RankPool(num_ranks, timeout_s=120)
    if "REMOTE_WIRE_HOLD_US" in os.environ:
        pool.run(check_every_operation)
    pool.run(test_nodes.change_routing, "cuda", Case(num_ranks, ranks_per_node, **test_nodes.SMALL), num_steps)
    cases = [case for case in GRID if (case.num_ranks, case.ranks_per_node) == (num_ranks, ranks_per_node)]
    for case in cases:
        check_case(lambda _: pool, "cuda", case)
    pool.close()
    print(f"{num_steps} steps and {len(cases)} cases: right")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
