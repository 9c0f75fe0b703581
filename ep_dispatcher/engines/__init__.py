"""Chooses and makes an engine; no other place does."""

from __future__ import annotations

import importlib.util

import torch

from ep_dispatcher import checks
from ep_dispatcher.engines.base import Engine, EngineConfig

# The engines of this build.
ENGINES = ("cpu", "cuda") if importlib.util.find_spec("ep_dispatcher._C_cuda") else ("cpu",)
CAPABILITIES = "9.0 or newer, without 12.x"


def runs_on(capability: tuple[int, int]) -> bool:
    """Return whether kernels can run on a GPU. They need 227 KiB of shared memory in a block; 12.x has 99."""
    return capability >= (9, 0) and capability[0] != 12


def cuda_problem() -> str | None:
    """Return why the CUDA engine cannot run in this process; None if it can."""
    if "cuda" not in ENGINES:
        return "it was not built"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    capability = torch.cuda.get_device_capability()
    if not runs_on(capability):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, not {CAPABILITIES}"
    return None


def choose(engine: str) -> str:
    """Return the engine; for "auto" the best one that can run here. ValueError if the given one cannot."""
    if engine == "auto":
        return "cpu" if cuda_problem() else "cuda"
    checks.one_of("engine", engine, ("auto", "cpu", "cuda"))
    if engine == "cuda" and (problem := cuda_problem()):
        checks.fail("engine", "'cuda'", f"'auto', 'cpu', because {problem}")
    return engine


def make(engine: str, config: EngineConfig) -> Engine:
    if engine == "cuda":
        from ep_dispatcher.engines.cuda.engine import CudaEngine

        return CudaEngine(config)
    from ep_dispatcher.engines.cpu.engine import CpuEngine

    return CpuEngine(config)
