"""Reports of kernels, for machines without a GPU."""

import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from ep_dispatcher import engines

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")

needs_module = pytest.mark.skipif("cuda" not in engines.ENGINES, reason="built without the CUDA module")


def reports_of(late=None, mistake=None, masks=False, has_messages=False):
    """Rank 0 of 3, with what its kernels have reported: (its reports, a list that grows when it aborts)."""
    from ep_dispatcher.decode.masks import Masks
    from ep_dispatcher.engines.cuda.kernel_reports import KernelReports
    from ep_dispatcher.engines.health import Health

    aborts, mistakes = [], iter([mistake])
    engine = SimpleNamespace(out_of_step=lambda: False, late=lambda: late, take_error=lambda: next(mistakes, None))
    store = Mock(**{"set.side_effect": RuntimeError("gone")})  # its host is gone
    topology = SimpleNamespace(rank=0, num_ranks=3, node_ranks=(0, 1, 2))
    config = SimpleNamespace(
        num_logical_experts=8, logical_expert=lambda physical: physical, store=store, topology=topology
    )
    health = Health(lambda: aborts.append(1), 100.0)
    return KernelReports(engine, config, health, Masks(health) if masks else None, has_messages), aborts
