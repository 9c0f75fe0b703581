"""Chooses where the ranks run: on GPUs with the CUDA engine, or on CPUs."""

from __future__ import annotations

import os

import torch

from ep_dispatcher import engines, envs

MAX_RANKS = 16  # each needs a few windows of the held-out text
MOST_OF_NODE = 8  # ranks, with the CUDA engine


def choose_device(asked: str) -> tuple[str, str]:
    """``asked``: "auto", "cpu" or "cuda". Return the device, and in words why it is the CPU (else "").

    "auto" chooses as a ``Buffer`` does: EP_DISPATCHER_ENGINE, else GPUs if there are usable ones. Raises ValueError if
    GPUs are asked for and cannot be used.
    """
    wanted = envs.engine() if asked == "auto" else asked
    if wanted == "cpu":
        return "cpu", "asked for"
    problem = gpu_problem()
    if problem and wanted == "cuda":
        raise ValueError(problem)
    return ("cpu", problem) if problem else ("cuda", "")


def gpu_problem() -> str:
    """Return why the CUDA engine cannot run here, for a user of a fresh clone; "" if it can."""
    problem = engines.cuda_problem()
    if problem is None:
        return ""
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    if "cuda" not in engines.ENGINES:
        return "there is a GPU, but the CUDA engine is not built (EP_DISPATCHER_CUDA=1 make setup says why)"
    return problem


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def ranks_on_host(num_ranks: int) -> int:
    """Return how many of ``num_ranks`` run on this host, as torchrun says; without torchrun all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def ranks_per_gpu(num_ranks: int) -> int:
    return -(-ranks_on_host(num_ranks) // torch.cuda.device_count())


def prepare_ranks(device: str, num_ranks: int) -> str:
    """Return the backend of the ranks' group. Call this before the ranks start.

    The model's own tensors travel through NCCL if every rank has a GPU. NCCL refuses two ranks on one GPU: then they
    travel through the host, with gloo.
    """
    if device == "cpu":
        return "gloo"
    if ranks_per_gpu(num_ranks) == 1:
        return "cpu:gloo,cuda:nccl"
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    return "gloo"


def default_ranks(device: str) -> int:
    """Return one rank per GPU; on a single GPU two, because one rank would send nothing."""
    return 4 if device == "cpu" else min(MAX_RANKS, max(2, torch.cuda.device_count()))


def default_ranks_per_node(device: str, num_ranks: int) -> int:
    """Return 2 on CPUs: virtual nodes, to show both wires. GPUs of a host are one node of at most ``MOST_OF_NODE``."""
    most = 2 if device == "cpu" else MOST_OF_NODE
    return max(size for size in range(1, most + 1) if ranks_on_host(num_ranks) % size == 0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work. Call this before reading the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
