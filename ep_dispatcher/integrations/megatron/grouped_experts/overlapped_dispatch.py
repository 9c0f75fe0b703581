"""Runs a dispatch that was left to the experts: so that communication overlaps with their GEMMs, or with copies.

Megatron calls dispatch, experts and combine one after the other. To overlap, all three have to be one call, which is
that of the experts. So do redundant copies of experts, whose weights travel between the steps. The other steps only
pass on what they get:

    token_dispatch        keeps its arguments in a PendingDispatch, sends nothing  -> tokens, probs
    dispatch_postprocess                                                           -> tokens, the PendingDispatch, probs
    experts               run it: dispatch, GEMMs, combine                         -> the sum over each token's rows
    combine_preprocess, token_combine                                              -> the same
    combine_postprocess   as always

Between nodes experts run in two parts of the tokens, each with a plan of its own. Inside a node they run in one part,
where only the last combine of the backward overlaps (moe/overlap.py). So do experts with redundant copies
(moe/balanced_mlp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.integrations.megatron.dispatcher.experts_interface import PendingDispatch
from ep_dispatcher.moe import overlap
from ep_dispatcher.moe.balanced_mlp import balanced_mlp
from ep_dispatcher.moe.grouped_mlp import Parameters
from ep_dispatcher.moe.mlp import run_grouped_nodes, run_nodes
from ep_dispatcher.observers import is_observed


def run(dispatch: PendingDispatch, tokens: Tensor, probs: Tensor, parameters: Parameters, **options: Any) -> Tensor:
    """Return the sum over each token's rows, [num_tokens, hidden].

    The result is the same, bit by bit, whether operations overlap or not. If a tool observes operators on one rank
    (FlopCounterMode), that rank still runs the same operations.

    tokens [num_tokens, hidden]; probs float32 [num_tokens, num_topk]; parameters and options: grouped_mlp
    """

    def run_parts(topk_idx: Tensor, handles: list[ep.Handle]) -> Tensor:
        arguments = dispatch.buffer, tokens, topk_idx, probs, parameters, dispatch.max_rows
        if dispatch.buffer.redundant_experts_per_rank:
            with torch.cuda.device_of(tokens):
                return balanced_mlp(*arguments, handles=handles, **options)
        more = options | dict(handles=handles, quantize=dispatch.quantize)
        if is_observed((tokens, probs, topk_idx)):
            return run_grouped_nodes(*arguments, dispatch.num_parts, **more)
        with torch.cuda.device_of(tokens):
            return overlap.mlp_in_parts(*arguments, dispatch.num_parts, overlap=True, **more)

    return dispatch.run_with_plans(run_parts)


def run_megatron_experts(
    dispatch: PendingDispatch, tokens: Tensor, probs: Tensor, run_experts: Callable[..., tuple[Tensor, Any]]
) -> Tensor:
    """Do what ``run`` does with other experts, in the same operations, because the other ranks wait for these.

    run_experts: takes rows, their counts and their probs, as Megatron's experts do, and returns a pair
    """

    def run_on(sent: Sequence[ep.DispatchOutput]) -> list[Tensor]:
        results = []
        for out in sent:
            counts = out.handle.rows_on_host
            if counts is None:
                counts = out.rows_per_expert
            rows = ep.dequantize(out.x) if isinstance(out.x, tuple) else out.x
            result, _ = run_experts(rows, counts, out.topk_weights)
            results.append(result)
        return results

    def run_parts(topk_idx: Tensor, handles: list[ep.Handle]) -> Tensor:
        arguments = dispatch.buffer, tokens, topk_idx, probs, dispatch.max_rows, dispatch.num_parts
        return run_nodes(*arguments, run_on, handles, quantize=dispatch.quantize)

    return dispatch.run_with_plans(run_parts)
