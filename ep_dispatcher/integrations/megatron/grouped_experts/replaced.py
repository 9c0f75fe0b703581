"""What takes the place of functions of Megatron's experts. plugin.py has the table with the reasons."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import distributed
from torch.nn import Module

import ep_dispatcher as ep
from ep_dispatcher.integrations.megatron.dispatcher import backend_name
from ep_dispatcher.integrations.megatron.dispatcher.handover import Deferred, Quantized
from ep_dispatcher.integrations.megatron.grouped_experts import deferred
from ep_dispatcher.integrations.megatron.grouped_experts.experts import QUANTISE, experts_of
from ep_dispatcher.integrations.megatron.grouped_experts.layer import note_forward


def run_grouped(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of TEGroupedMLP and SequentialMLP."""

    def forward(experts, rows, tokens_per_expert, permuted_probs, *rest, **options):
        one = experts_of(experts)
        if one is not None and not rest and not options and one.is_grouped():
            return one.forward(rows, tokens_per_expert, permuted_probs)

        def run(rows, counts, probs):
            if isinstance(counts, Quantized):
                rows, counts = ep.dequantize(counts.pair(rows)), counts.counts
            is_padded = True
            if one is not None:
                one.note_megatrons_way()
                one.check_rows(rows, counts)
                is_padded = not isinstance(tokens_per_expert, Deferred) and not one.agreed.get(QUANTISE, False)
            with backend_name.of_padded_rows(experts.config, is_padded):
                return old(experts, rows, counts, probs, *rest, **options)

        if isinstance(tokens_per_expert, Deferred):
            return deferred.run_megatrons_way(tokens_per_expert, rows, permuted_probs, run), None
        return run(rows, tokens_per_expert, permuted_probs)

    note_forward(forward)
    return forward


def write_delayed_grads(old: Callable[..., None]) -> Callable[..., None]:
    """Wrap TEGroupedMLP.backward_dw: write the gradients of the microbatch that has waited longest."""

    def backward_dw(experts):
        one = experts_of(experts)
        delayed = None if one is None else one.gradients.delayed
        if delayed:
            with torch.no_grad():
                delayed.popleft()()
        elif one is None or one.has_run_megatrons_way:
            old(experts)

    return backward_dw


def note_ddp(owner: Module, name: str, module: Module | None) -> None:
    """Tell experts which DistributedDataParallel of Megatron is around them: a hook of PyTorch for all submodules.

    It is called in the constructor, so what the gradients of the experts need of it is looked at in their next pass.
    """
    if name != "module" or module is None or not isinstance(owner, distributed.DistributedDataParallel):
        return
    for inner in module.modules():
        if (one := experts_of(inner)) is not None:
            one.ddp = weakref.ref(owner)
            one.look_again()
