"""Chooses and makes an engine. No other file does."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from ep_dispatcher import checks
from ep_dispatcher.capability import CAPABILITIES, runs_on
from ep_dispatcher.engines.base import Engine, EngineConfig

# The engines of this build.
ENGINES = ("cpu", "cuda") if importlib.util.find_spec("ep_dispatcher._C_cuda") else ("cpu",)


def cuda_problem() -> str | None:
    """Return why the CUDA engine cannot run in this process; None if it can."""
    if "cuda" not in ENGINES:
        return "it was not built"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    capability = torch.cuda.get_device_capability()
    if not runs_on(capability):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, not {CAPABILITIES}"
    driver, built_by = importlib.import_module("ep_dispatcher._C_cuda").cuda_versions()
    if driver // 1000 < built_by // 1000:
        return f"it was built by CUDA {_version(built_by)}, and the GPU driver knows CUDA {_version(driver)} only"
    return None


def _version(number: int) -> str:
    """Return a version of CUDA as text: 12080 is 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def summary() -> str:
    """Return a line that says which engines this build has, and which one a buffer takes here by default."""
    problem = cuda_problem()
    default = "cuda" if problem is None else f"cpu, not cuda: {problem}"
    return f"engines {' and '.join(ENGINES)}; here a buffer takes {default}"


def choose(engine: str) -> str:
    """Return the engine's name; for "auto" the best one that can run here. ValueError if the given one cannot run."""
    if engine == "auto":
        return "cpu" if cuda_problem() else "cuda"
    checks.one_of("engine", engine, ("auto", "cpu", "cuda"))
    if engine == "cuda" and (problem := cuda_problem()):
        checks.fail("engine", "'cuda'", f"'auto' or 'cpu', because {problem}")
    return engine


def make(engine: str, config: EngineConfig) -> Engine:
    if engine == "cuda":
        from ep_dispatcher.engines.cuda.engine import CudaEngine

        return CudaEngine(config)
    from ep_dispatcher.engines.cpu.engine import CpuEngine

    return CpuEngine(config)
