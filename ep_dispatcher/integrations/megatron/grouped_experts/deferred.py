"""Runs a dispatch that was left to the experts, with communication under their GEMMs.

Megatron calls dispatch, experts and combine one after the other. To overlap, all three have to be one call, that of the
experts. So the other steps only pass on what they get:

    token_dispatch        keeps its arguments in a Deferred, sends nothing           -> tokens, probs
    dispatch_postprocess                                                             -> tokens, the Deferred, probs
    experts               run it: dispatch, GEMMs, combine                           -> the sum over each token's rows
    combine_preprocess, token_combine                                                -> the same
    combine_postprocess   as always

They do so between nodes alone, in two parts of the tokens (moe/overlap.py). Each part has a plan of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.integrations.megatron.dispatcher.handover import Deferred
from ep_dispatcher.moe import overlap
from ep_dispatcher.moe.grouped_mlp import Parameters
from ep_dispatcher.moe.mlp import run_grouped_nodes, run_nodes
from ep_dispatcher.observers import is_observed


def run(dispatch: Deferred, tokens: Tensor, probs: Tensor, parameters: Parameters, **options: Any) -> Tensor:
    """Return the sum over each token's rows, [num_tokens, hidden].

    Two parts of the tokens, bit by bit the same whether they overlap or not. If a tool looks at operators on one
    rank (FlopCounterMode), that rank still runs the operations of the others.

    tokens [num_tokens, hidden]; probs float32 [num_tokens, num_topk]; parameters and options: grouped_mlp
    """

    def run_parts(topk_idx: Tensor, handles: list[ep.Handle]) -> Tensor:
        given = dispatch.buffer, tokens, topk_idx, probs, parameters, dispatch.max_rows
        more = options | dict(handles=handles, quantize=dispatch.quantize)
        if is_observed((tokens, probs, topk_idx)):
            return run_grouped_nodes(*given, 2, **more)
        with torch.cuda.device_of(tokens):
            return overlap.mlp_in_parts(*given, overlap=True, **more)

    return dispatch.noting(run_parts)


def run_megatrons_way(
    dispatch: Deferred, tokens: Tensor, probs: Tensor, run_experts: Callable[..., tuple[Tensor, Any]]
) -> Tensor:
    """Do what ``run`` does with other experts, in the same operations: the other ranks wait for them.

    run_experts: takes rows, their counts and their probs, as Megatron's experts do, and returns a pair
    """

    def run_on(sent: Sequence[ep.DispatchOutput]) -> list[Tensor]:
        counts = [out.rows_per_expert if out.handle.rows_on_host is None else out.handle.rows_on_host for out in sent]
        given = [(ep.dequantize(out.x) if isinstance(out.x, tuple) else out.x, out.topk_weights) for out in sent]
        return [run_experts(rows, count, row_probs)[0] for (rows, row_probs), count in zip(given, counts)]

    def run_parts(topk_idx: Tensor, handles: list[ep.Handle]) -> Tensor:
        given = dispatch.buffer, tokens, topk_idx, probs, dispatch.max_rows, 2
        return run_nodes(*given, run_on, handles, quantize=dispatch.quantize)

    return dispatch.noting(run_parts)
