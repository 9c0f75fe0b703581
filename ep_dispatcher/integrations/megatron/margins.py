"""Margins: multiprocessors that GEMMs leave to a dispatch or combine beside them (EP_DISPATCHER_GEMM_SM_MARGIN).

A GEMM of a library has one block for each multiprocessor of the GPU, with a fixed share of the work. Blocks without a
free multiprocessor begin when others end, so the GEMM takes up to twice as long. With a margin fewer blocks share the
work. The margin is set while the host launches GEMMs that run beside communication:

    TransformerLayerSchedulePlan.run   a layer of a forward and one of a backward pass, with 1F1B overlap
    MoEEPTokenDispatcher               the forward of overlapped shared experts

Grouped GEMMs of EP_DISPATCHER_GROUPED_EXPERTS need no margin: each of their blocks has one tile of the result, and
starts on any free multiprocessor.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ep_dispatcher import envs

SWITCH = "EP_DISPATCHER_GEMM_SM_MARGIN"
TE_VARIABLE = "NVTE_EXT_MARGIN_SM"


class TransformerEngineMargin:
    """A variable that Transformer Engine reads at each GEMM, to set cuBLAS's target of multiprocessors.

    Unset, it counts as all multiprocessors: a target of 0, so cuBLAS chooses. ``restore`` sets this value and does not
    remove the variable, because another thread may read the environment meanwhile.
    """

    shown = f"Transformer Engine ({TE_VARIABLE})"

    def is_free(self) -> bool:
        return TE_VARIABLE not in os.environ

    def set(self, num_sms: int) -> None:
        os.environ[TE_VARIABLE] = str(num_sms)

    def restore(self) -> None:
        self.set(torch.cuda.get_device_properties().multi_processor_count)


class PyTorchMargin:
    """PyTorch's SM carve-out. It works for GEMMs by cuBLASLt, not for torch.matmul, which uses cuBLAS."""

    shown = "PyTorch's cuBLASLt (SM carve-out)"

    def is_free(self) -> bool:
        return hasattr(torch._C, "_set_sm_carveout_experimental") and torch._C._get_sm_carveout_experimental() is None

    def set(self, num_sms: int | None) -> None:
        torch._C._set_sm_carveout_experimental(num_sms)

    def restore(self) -> None:
        self.set(None)


@functools.cache
def _free_margins() -> tuple[TransformerEngineMargin | PyTorchMargin, ...]:
    """Return the margins that the user has not set. The first use decides, and prints a line."""
    made = tuple(margin for margin in (TransformerEngineMargin(), PyTorchMargin()) if margin.is_free())
    if not dist.is_initialized() or dist.get_rank() == 0:
        where = " and ".join(margin.shown for margin in made) or "none, where the user has set their margins"
        print(
            f"ep_dispatcher: GEMMs beside a dispatch or combine leave it {_num_sms()} multiprocessors "
            f"({SWITCH}={envs.read(SWITCH)}). Libraries: {where}",
            flush=True,
        )
    return made


def _num_sms() -> int:
    """Return the margin that the switch asks for; 0 before there is a buffer on a GPU."""
    from ep_dispatcher.integrations.megatron import buffers  # it imports Megatron

    given = envs.gemm_sm_margin()
    in_use = buffers.most_sms()
    return in_use if given == "auto" or in_use == 0 else given


_is_set = False


@contextlib.contextmanager
def margin() -> Iterator[None]:
    """Let GEMMs that are launched inside leave multiprocessors to communication, if the switch says so."""
    global _is_set
    num_sms = 0 if _is_set or envs.gemm_sm_margin() == 0 else _num_sms()
    if num_sms == 0:
        yield
        return
    made = _free_margins()
    _is_set = True
    try:
        for one in made:
            one.set(num_sms)
        yield
    finally:
        _is_set = False
        for one in made:
            one.restore()


def around_overlap(old: Callable[..., Any]) -> Any:
    """Wrap TransformerLayerSchedulePlan.run: communication of each layer runs beside GEMMs of the other."""

    @functools.wraps(old)
    def run(f_layer, b_layer, *args, **kwargs):
        with margin() if f_layer is not None and b_layer is not None else contextlib.nullcontext():
            return old(f_layer, b_layer, *args, **kwargs)

    return staticmethod(run)
