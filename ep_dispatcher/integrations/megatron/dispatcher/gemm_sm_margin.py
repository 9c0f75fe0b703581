"""Lets GEMMs leave multiprocessors free for a dispatch or combine that overlaps (--ep-dispatcher-gemm-sm-margin).

A library's GEMM has one block for each multiprocessor of the GPU, with a fixed share of the work. A block that finds no
free multiprocessor begins when another ends, so the GEMM takes up to twice as long. With a margin, fewer blocks share
the work. The margin is set while the host launches GEMMs that overlap with communication:

    TransformerLayerSchedulePlan.run   a layer of a forward and one of a backward pass, with 1F1B overlap
    MoEEPTokenDispatcher               the forward of overlapped shared experts

Experts in grouped GEMMs need no margin, because each of their blocks computes one tile of the result, and starts on
any free multiprocessor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ep_dispatcher.integrations.megatron.dispatcher import arguments, buffers, registration
from ep_dispatcher.integrations.messages import print_on_first_rank

TE_VARIABLE = "NVTE_EXT_MARGIN_SM"


def set_transformer_engine(num_sms: int | None) -> None:
    """Set the environment variable that Transformer Engine reads at each GEMM. It limits cuBLAS's multiprocessors.

    None stands for all multiprocessors of the GPU: then cuBLAS chooses. The variable is not removed, because another
    thread may read the environment at the same time.
    """
    os.environ[TE_VARIABLE] = str(num_sms or torch.cuda.get_device_properties().multi_processor_count)


def set_pytorch(num_sms: int | None) -> None:
    """Set PyTorch's SM carve-out. It works for GEMMs by cuBLASLt, not for torch.matmul, which uses cuBLAS."""
    torch._C._set_sm_carveout_experimental(num_sms)


@dataclass
class Margins:
    """The margins of this process."""

    # Functions that set the margins of libraries whose margin the user has not set. None: not decided yet.
    setters: tuple[Callable[[int | None], None], ...] | None = None
    are_set: bool = False


def _setters() -> tuple[Callable[[int | None], None], ...]:
    """Return the functions that set margins. The first call finds them, and prints a line."""
    margins = registration.process_wide(Margins)
    if margins.setters is not None:
        return margins.setters
    found = {}
    if TE_VARIABLE not in os.environ:
        found[f"Transformer Engine ({TE_VARIABLE})"] = set_transformer_engine
    if hasattr(torch._C, "_set_sm_carveout_experimental") and torch._C._get_sm_carveout_experimental() is None:
        found["PyTorch's cuBLASLt (SM carve-out)"] = set_pytorch
    libraries = " and ".join(found) or "none, because the user has set their margins"
    sms = buffers.max_sms_in_use()
    print_on_first_rank(
        f"ep_dispatcher: GEMMs beside a dispatch or combine leave it {sms} multiprocessors. Libraries: {libraries}"
    )
    margins.setters = tuple(found.values())
    return margins.setters


@contextlib.contextmanager
def margin(config: Any) -> Iterator[None]:
    """Let GEMMs that are launched inside leave multiprocessors to communication, if the config asks for it."""
    margins = registration.process_wide(Margins)
    num_sms = buffers.max_sms_in_use() if arguments.setting(config, "gemm_sm_margin") and not margins.are_set else 0
    if num_sms == 0:
        yield
        return
    setters = _setters()
    margins.are_set = True
    try:
        for set_margin in setters:
            set_margin(num_sms)
        yield
    finally:
        margins.are_set = False
        for set_margin in setters:
            set_margin(None)


def wrap_schedule_plan_run(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap TransformerLayerSchedulePlan.run: communication of each layer runs beside GEMMs of the other."""

    def run(f_layer, b_layer, *args, **kwargs):
        both = f_layer is not None and b_layer is not None
        with margin(f_layer.config) if both else contextlib.nullcontext():
            return old(f_layer, b_layer, *args, **kwargs)

    return run
