"""What all tests share: the engines to test, and processes that live as long as the session."""

import pytest
import torch

from ep_dispatcher.testing import RankPool

ENGINES = ["cpu"]

torch.set_num_threads(1)  # the ranks need the cores


@pytest.fixture(params=ENGINES)
def engine(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def pools():
    """``pools(num_ranks)`` is a pool of that size, started at the first use and replaced after a failure closed it."""
    started: dict[int, RankPool] = {}

    def pool_of(num_ranks: int) -> RankPool:
        if num_ranks not in started or started[num_ranks].closed:
            started[num_ranks] = RankPool(num_ranks, timeout_s=60)
        return started[num_ranks]

    yield pool_of
    for pool in started.values():
        pool.close()
