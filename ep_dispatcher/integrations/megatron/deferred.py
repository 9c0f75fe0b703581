"""A dispatch that the experts run themselves, with communication under their GEMMs.

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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.argument_types import QuantizeBlocks
from ep_dispatcher.errors import TooFewRowsError
from ep_dispatcher.integrations.megatron import capacity
from ep_dispatcher.integrations.megatron.buffers import MegatronBuffer
from ep_dispatcher.moe import overlap
from ep_dispatcher.moe.grouped_mlp import Parameters
from ep_dispatcher.moe.mlp import run_grouped_nodes, run_nodes
from ep_dispatcher.observers import is_observed


@dataclass(frozen=True, eq=False)
class Deferred:
    """The dispatch of one forward pass. Experts that run it themselves get it in place of their counts."""

    buffer: MegatronBuffer
    topk_idx: Tensor  # int64 [num_tokens, num_topk]
    max_rows: int | None  # of this rank; None: the host waits for their number
    alignment: int  # of the rows of an expert
    handles: list[ep.Handle]  # the plan of an earlier pass, or one for each part; empty: make new ones
    keep: Callable[[list[ep.Handle]], None]  # called with new plans
    quantize: QuantizeBlocks | None  # as ep.dispatch takes it

    def send(self, tokens: Tensor, probs: Tensor) -> ep.DispatchOutput:
        """Dispatch tokens [num_tokens, hidden] and probs float32 [num_tokens, num_topk]."""
        if self.handles:
            handle = self.handles[0]
            return ep.dispatch(self.buffer, tokens, topk_weights=probs, handle=handle, quantize=self.quantize)
        options: dict[str, Any] = dict(
            expert_alignment=self.alignment, quantize=self.quantize, max_recv_rows=self.max_rows
        )

        def run(topk_idx: Tensor, handles: list[ep.Handle]) -> ep.DispatchOutput:
            out = ep.dispatch(self.buffer, tokens, topk_idx, probs, **options)
            handles.append(out.handle)
            return out

        return self._noting(run)

    def run(self, tokens: Tensor, probs: Tensor, parameters: Parameters, **options: Any) -> Tensor:
        """Return the sum over each token's rows, [num_tokens, hidden].

        Two parts of the tokens, bit by bit the same whether they overlap or not. If a tool looks at operators on one
        rank (FlopCounterMode), that rank still runs the operations of the others.

        tokens [num_tokens, hidden]; probs float32 [num_tokens, num_topk]; parameters and options: grouped_mlp
        """

        def run(topk_idx: Tensor, handles: list[ep.Handle]) -> Tensor:
            given = self.buffer, tokens, topk_idx, probs, parameters, self.max_rows
            more = options | dict(handles=handles, quantize=self.quantize)
            if is_observed((tokens, probs, topk_idx)):
                return run_grouped_nodes(*given, 2, **more)
            with torch.cuda.device_of(tokens):
                return overlap.mlp_in_parts(*given, overlap=True, **more)

        return self._noting(run)

    def run_megatrons_way(
        self, tokens: Tensor, probs: Tensor, run_experts: Callable[..., tuple[Tensor, Any]]
    ) -> Tensor:
        """Do what ``run`` does with other experts, in the same operations: the other ranks wait for them.

        run_experts: takes rows, their counts and their probs, as Megatron's experts do, and returns a pair
        """

        def run_on(sent: Sequence[ep.DispatchOutput]) -> list[Tensor]:
            counts = [
                out.rows_per_expert if out.handle.rows_on_host is None else out.handle.rows_on_host for out in sent
            ]
            given = [(ep.dequantize(out.x) if isinstance(out.x, tuple) else out.x, out.topk_weights) for out in sent]
            return [run_experts(rows, count, row_probs)[0] for (rows, row_probs), count in zip(given, counts)]

        def run(topk_idx: Tensor, handles: list[ep.Handle]) -> Tensor:
            given = self.buffer, tokens, topk_idx, probs, self.max_rows, 2
            return run_nodes(*given, run_on, handles, quantize=self.quantize)

        return self._noting(run)

    def _noting(self, run: Callable[[Tensor, list[ep.Handle]], Any]) -> Any:
        """Run with this routing and the plans of an earlier pass, or a list for new ones, which are kept.

        If too many rows arrive in the schedule of a step, send none instead. A GPU gives zeros by itself then, and the
        buffer finds the error later.
        """
        topk_idx, handles = self.topk_idx, [*self.handles]
        try:
            out = run(topk_idx, handles)
        except TooFewRowsError as error:  # on all ranks of the group
            if not capacity.note(error, self.buffer.num_choices, self.buffer.config.num_ranks):
                raise
            handles = [*self.handles]
            out = run(torch.full_like(topk_idx, -1), handles)
        if not self.handles:
            self.keep(handles)
        return out
