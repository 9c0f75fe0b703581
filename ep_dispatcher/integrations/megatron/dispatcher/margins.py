"""Margins: multiprocessors that GEMMs leave to a dispatch or combine beside them (--ep-dispatcher-gemm-sm-margin).

A GEMM of a library has one block for each multiprocessor of the GPU, with a fixed share of the work. Blocks without a
free multiprocessor begin when others end, so the GEMM takes up to twice as long. With a margin fewer blocks share the
work. The margin is set while the host launches GEMMs that run beside communication:

    TransformerLayerSchedulePlan.run   a layer of a forward and one of a backward pass, with 1F1B overlap
    MoEEPTokenDispatcher               the forward of overlapped shared experts

Experts in grouped GEMMs need no margin: each of their blocks has one tile of the result, and starts on any free
multiprocessor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ep_dispatcher.integrations.agree import say
from ep_dispatcher.integrations.megatron.dispatcher import arguments, buffers, registration

TE_VARIABLE = "NVTE_EXT_MARGIN_SM"


def set_transformer_engine(num_sms: int | None) -> None:
    """Set the variable that Transformer Engine reads at each GEMM, to set cuBLAS's target of multiprocessors.

    None stands for all: then the target is 0, and cuBLAS chooses. The variable is not removed, because another thread
    may read the environment meanwhile.
    """
    os.environ[TE_VARIABLE] = str(num_sms or torch.cuda.get_device_properties().multi_processor_count)


def set_pytorch(num_sms: int | None) -> None:
    """Set PyTorch's SM carve-out. It works for GEMMs by cuBLASLt, not for torch.matmul, which uses cuBLAS."""
    torch._C._set_sm_carveout_experimental(num_sms)


@dataclass
class Margins:
    """The margins of this process."""

    free: tuple[Callable[[int | None], None], ...] | None = None  # what sets them; None: it is not decided
    are_set: bool = False


def _free_margins() -> tuple[Callable[[int | None], None], ...]:
    """Return what sets the margins that the user has not set. The first use decides, and prints a line."""
    margins = registration.part(Margins)
    if margins.free is not None:
        return margins.free
    made = {}
    if TE_VARIABLE not in os.environ:
        made[f"Transformer Engine ({TE_VARIABLE})"] = set_transformer_engine
    if hasattr(torch._C, "_set_sm_carveout_experimental") and torch._C._get_sm_carveout_experimental() is None:
        made["PyTorch's cuBLASLt (SM carve-out)"] = set_pytorch
    where = " and ".join(made) or "none, where the user has set their margins"
    sms = buffers.most_sms()
    say(f"ep_dispatcher: GEMMs beside a dispatch or combine leave it {sms} multiprocessors. Libraries: {where}")
    margins.free = tuple(made.values())
    return margins.free


@contextlib.contextmanager
def margin(config: Any) -> Iterator[None]:
    """Let GEMMs that are launched inside leave multiprocessors to communication, if the config asks for it."""
    margins = registration.part(Margins)
    num_sms = buffers.most_sms() if arguments.given(config, "gemm_sm_margin") and not margins.are_set else 0
    if num_sms == 0:
        yield
        return
    made = _free_margins()
    margins.are_set = True
    try:
        for set_margin in made:
            set_margin(num_sms)
        yield
    finally:
        margins.are_set = False
        for set_margin in made:
            set_margin(None)


def around_overlap(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap TransformerLayerSchedulePlan.run: communication of each layer runs beside GEMMs of the other."""

    def run(f_layer, b_layer, *args, **kwargs):
        both = f_layer is not None and b_layer is not None
        with margin(f_layer.config) if both else contextlib.nullcontext():
            return old(f_layer, b_layer, *args, **kwargs)

    return run
