"""Makes the memory of expert slots: all ranks allocate some, and the ranks of a node map each other's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ep_dispatcher import checks
from ep_dispatcher.balance.cpu_slots import CpuSlots
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.gather import Gather, History

SlotMemory = CpuSlots | Any  # or CudaSlots, which has the same methods, and whose module needs the CUDA engine


@contextmanager
def gather_for_slots(config: EngineConfig, device: torch.device, number: int) -> Iterator[Gather]:
    """Let all ranks of a buffer meet, with its limit, to make expert slots.

    number   counts the slots that are made for this buffer: the same on all ranks, and another one each time
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        checks.refuse(
            "the memory of expert slots cannot be allocated while a CUDA graph is captured: run one warm-up pass first"
        )
    history = History(f"ep_dispatcher/slots/{config.buffer_id}/{number}")
    meet = partial(Gather, config.members, config.timeout_s, operation="expert slots", history=history)
    with config.wording, meet() as gather:
        yield gather


def allocate_slots(
    gather: Gather, config: EngineConfig, device: torch.device, num_bytes: int, number: int
) -> SlotMemory:
    """Allocate ``num_bytes`` of zeros on every rank, and map those of the node's other ranks.

    num_bytes   the same on all ranks
    """
    memory = _memory_on(device)(config, num_bytes, number)
    try:
        gather("memory", memory.allocate)
        gather("memory of the other ranks", memory.attach, waits_for_peers=True)
        memory.close_descriptors()
    except BaseException:  # it is raised again
        memory.free()
        raise
    return memory


def _memory_on(device: torch.device) -> Any:
    if device.type == "cpu":
        return CpuSlots
    return partial(importlib.import_module("ep_dispatcher.balance.cuda_slots").CudaSlots, device)
