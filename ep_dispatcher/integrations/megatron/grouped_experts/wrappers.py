"""Wraps functions of Megatron's experts. plugin.py has the table of them, with the reasons."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import distributed
from torch.nn import Module

import ep_dispatcher as ep
from ep_dispatcher.integrations.megatron.dispatcher import backend_name
from ep_dispatcher.integrations.megatron.dispatcher.experts_interface import PendingDispatch, QuantizedInput
from ep_dispatcher.integrations.megatron.grouped_experts import overlapped_dispatch
from ep_dispatcher.integrations.megatron.grouped_experts.experts import QUANTIZE, experts_of
from ep_dispatcher.integrations.megatron.grouped_experts.megatron_experts import register_forward


def wrap_experts_forward(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of TEGroupedMLP and SequentialMLP."""

    def forward(experts, rows, tokens_per_expert, permuted_probs, *rest, **options):
        ours = experts_of(experts)
        if ours is not None and not rest and not options and ours.decide_grouped():
            return ours.forward(rows, tokens_per_expert, permuted_probs)

        def run(rows, counts, probs):
            if isinstance(counts, QuantizedInput):
                rows, counts = ep.dequantize(counts.with_anchor(rows)), counts.counts
            is_padded = True
            if ours is not None:
                ours.note_megatron_pass()
                ours.check_rows(rows, counts)
                is_padded = not isinstance(tokens_per_expert, PendingDispatch) and not ours.agreed.get(QUANTIZE, False)
            with backend_name.rows_arrive_padded(experts.config, is_padded):
                return old(experts, rows, counts, probs, *rest, **options)

        if isinstance(tokens_per_expert, PendingDispatch):
            return overlapped_dispatch.run_megatron_experts(tokens_per_expert, rows, permuted_probs, run), None
        return run(rows, tokens_per_expert, permuted_probs)

    register_forward(forward)
    return forward


def wrap_backward_dw(old: Callable[..., None]) -> Callable[..., None]:
    """Wrap TEGroupedMLP.backward_dw: write the gradients of the microbatch that has waited longest."""

    def backward_dw(experts):
        ours = experts_of(experts)
        delayed = None if ours is None else ours.gradients.delayed
        if delayed:
            with torch.no_grad():
                delayed.popleft()()
        elif ours is None or ours.has_run_megatron_experts:
            old(experts)

    return backward_dw


def note_ddp(owner: Module, name: str, module: Module | None) -> None:
    """Tell experts which DistributedDataParallel of Megatron is around them: a hook of PyTorch for all submodules.

    The hook runs in the constructor of DistributedDataParallel. So the experts decide again in their next pass.
    """
    if name != "module" or module is None or not isinstance(owner, distributed.DistributedDataParallel):
        return
    for inner in module.modules():
        if (ours := experts_of(inner)) is not None:
            ours.ddp = weakref.ref(owner)
            ours.decide_again_later()
