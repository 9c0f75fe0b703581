"""Exchanges between the ranks of a benchmark. They use CPU tensors, so they work without a usable GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.handle import DispatchOutput


class TorchrunRanks:
    """Ranks started by torchrun, with those methods of ``RankPool`` that ``suite.run`` calls. Each rank makes one."""

    closed = False

    def __init__(self, threads: int, backend: str):
        torch.set_num_threads(threads)
        if "nccl" in backend:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)

    def run(self, part: Callable, *args: Any) -> list[Any]:
        """Call ``part(rank, *args)`` here; the other ranks have to call it too."""
        return [part(dist.get_rank(), *args)]

    def close(self) -> None:
        self.closed = True
        dist.destroy_process_group()


def sum_over_ranks(values: list[int]) -> list[int]:
    total = torch.tensor(values, dtype=torch.int64, device="cpu")
    dist.all_reduce(total)
    return total.tolist()


def mean_over_ranks(values: list[float]) -> list[float]:
    """Return the mean of each entry."""
    total = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def largest_over_ranks(values: list[float]) -> list[float]:
    """Return the largest value of each entry."""
    largest = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def largest_of(value: int) -> int:
    """Return the largest value of all ranks. Collective."""
    return int(largest_over_ranks([value])[0])


def most_rows(out: DispatchOutput) -> int:
    """Return the most rows that a rank has received. Collective."""
    assert isinstance(out.x, Tensor)
    return largest_of(out.x.shape[0])


def attempt(what: str, notes: list[str], call: Callable[[], Any]) -> Any:
    """Return ``call()``. If it raises an error on any rank, return None on all, and add a note."""
    value, error = None, None
    try:
        value = call()
    except Exception as caught:  # of any kind: it becomes a note
        # A PyTorch error can be pages long; its first line says what it is.
        error = f"{type(caught).__name__}: {str(caught).partition(chr(10))[0]}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    failed = [(rank, text) for rank, text in enumerate(errors) if text is not None]
    if not failed:
        return value
    rank, text = failed[0]
    notes.append(f"{what}: {text} (rank {rank})")
    return None
