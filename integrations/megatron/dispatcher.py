"""MoEEPTokenDispatcher: Megatron's six dispatcher steps on ep.dispatch and ep.combine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.integrations.megatron import buffers, graphs, limits, margins, recompute
from ep_dispatcher.integrations.megatron.deferred import Deferred
from ep_dispatcher.integrations.megatron.routing import Routing, columns


class MoEEPTokenDispatcher(MoETokenDispatcher):
    """Brings tokens to their experts and back through ep_dispatcher; rows arrive grouped by expert.

        tokens, probs = dispatch_preprocess(hidden_states, routing_map, probs)
        tokens, probs = token_dispatch(tokens, probs)                        # the one communication on the way out
        tokens, tokens_per_expert, permuted_probs = dispatch_postprocess(tokens, probs)
        tokens = combine_preprocess(experts(tokens, tokens_per_expert, permuted_probs))
        hidden_states = combine_postprocess(token_combine(tokens))           # the one communication on the way back

    Gradients flow through the arguments of the steps alone: a schedule may detach any of them and run a step's
    backward whenever it likes. A plan belongs to one forward pass; its backward finds it in the graph. Experts that
    overlap communication run it themselves: deferred.py.

    num_local_experts     experts of this rank
    local_expert_indices  their global numbers
    config                TransformerConfig; a setting that cannot be supported raises ValueError with the flag's name
    pg_collection         ProcessGroupCollection with ep, expt_tp and tp_ep
    """

    def __init__(self, num_local_experts, local_expert_indices, config, pg_collection=None):
        super().__init__(config=config, pg_collection=pg_collection)
        limits.check(config, num_local_experts, expert_tp=self.tp_size, num_ranks=self.tp_ep_group.size())
        graphs.note_layer(config)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.layer_number: int | None = None  # set when the layer gets its own
        self.expert_alignment = limits.expert_alignment(config)
        # What a partial CUDA graph that ends after dispatch_preprocess has to bring out beside the step's outputs.
        self.cudagraph_attrs = ["topk_idx"]
        # Of the forward pass under way, where Megatron calls the steps in their order.
        self.topk_idx: Tensor = None  # type: ignore[assignment]  # until dispatch_preprocess
        self.hidden_shape: torch.Size = None  # type: ignore[assignment]  # until dispatch_preprocess
        self.buffer: ep.Buffer = None  # type: ignore[assignment]  # until token_dispatch
        self.handle: ep.Handle | None = None  # from the dispatch to the combine, as is the next
        self.rows_per_expert: Tensor | None = None
        self.deferred: Deferred | None = None  # likewise, where the experts run dispatch and combine
        # All experts but those of the op fuser make a list of their counts first. 0.16's GroupedMLP takes counts on
        # the host alone.
        self._takes_host_counts = not getattr(config, "use_transformer_engine_op_fuser", False)
        self._needs_host_counts = hasattr(config, "moe_use_legacy_grouped_gemm") and config.moe_grouped_gemm
        self.experts_are_grouped: Callable[[], bool] = _no  # other functions where experts.py notes the layer
        self.experts_communicate: Callable[[ep.Buffer], bool] = _no
        self._plans = recompute.RecomputePlans.make(config)
        self._num_forwards = 0
        self._where = ""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The routing as top-k columns.

        hidden_states [..., hidden]; routing_map bool [num_tokens, num_experts]; probs float [num_tokens, num_experts]
        -> (hidden_states [num_tokens, hidden], probs float32 [num_tokens, top-k x expert tensor parallel size])

        Raises ValueError when a shape or dtype is not as above, or a token has more than top-k experts. (On a GPU that
        token's error comes from token_dispatch, or from a later call where the number of rows is given.)
        """
        self.hidden_shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        allowed, device = (hidden_states.shape[0], self.config.num_moe_experts), hidden_states.device.type
        checks.tensor("routing_map", routing_map, (torch.bool,), allowed, device)
        checks.tensor("probs", probs, limits.PROBS_DTYPES, allowed, device)
        routing = Routing(
            topk=self.config.moe_router_topk,
            slices=self.tp_size,
            experts_per_rank=self.num_local_experts,
            skips_zeros=self.config.moe_pad_expert_input_to_capacity,
        )
        self.topk_idx, weights = columns(routing, routing_map, probs)
        if graphs.is_warm_up():
            self.topk_idx = torch.full_like(self.topk_idx, -1)
        return hidden_states, weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [num_tokens, hidden] and probs, as preprocessed -> rows [rows, hidden] by expert, probs [rows]."""
        layer = f"layer {self.layer_number}"
        recomputed = self._plans.take(self.topk_idx, self.tp_ep_group, layer)
        if recomputed is None:
            again = recompute.under_way()  # of which microbatch is not known
            self._num_forwards += not again
            microbatch, handle = self._num_forwards, None
            self._where = f"{layer}, {'recompute after ' if again else ''}microbatch {microbatch}"
            self.buffer = buffers.shared_buffer(
                self.tp_ep_group, self.config, hidden_states, self.topk_idx, self._where
            )
        else:
            microbatch, self.buffer, handle = recomputed.microbatch, recomputed.buffer, recomputed.handle
            self._where = f"{layer}, microbatch {microbatch}"
        if self.shared_experts is not None:
            self._shared_experts_wait()
        self._note()
        _used_here(self.topk_idx)
        limit = self._max_rows(hidden_states.shape[0]) if handle is None else None
        send = partial(self._send, self.buffer, self.topk_idx, handle, microbatch)
        if self.experts_communicate(self.buffer):
            self.handle = self.rows_per_expert = None
            self.deferred = Deferred(self.buffer, self.topk_idx, limit, handle is not None, send)
            rows, row_probs, arriving = hidden_states, probs, None
        else:
            out = send(hidden_states, probs, limit)
            self.handle, self.rows_per_expert, self.deferred = out.handle, out.rows_per_expert, None
            rows, row_probs = cast(Tensor, out.x), cast(Tensor, out.topk_weights)  # as tensors and probs were given
            arriving = rows
        if self.shared_experts is not None:
            waited = {"wait_current_stream": False} if self._shared_experts_wait_apart else {}
            self.shared_experts.pre_forward_comm(hidden_states, **waited)
            with margins.margin():
                self.shared_experts.linear_fc1_forward_and_act(arriving)
        return rows, row_probs

    def _send(
        self,
        buffer: ep.Buffer,
        topk_idx: Tensor,
        handle: ep.Handle | None,
        microbatch: int,
        hidden_states: Tensor,
        probs: Tensor,
        max_rows: int | None,
    ) -> ep.DispatchOutput:
        """Dispatch, with the plan of an earlier pass where there is one."""
        if handle is not None:
            return ep.dispatch(buffer, hidden_states, topk_weights=probs, handle=handle)
        alignment = self.expert_alignment
        out = ep.dispatch(buffer, hidden_states, topk_idx, probs, expert_alignment=alignment, max_recv_rows=max_rows)
        self._plans.keep(topk_idx, microbatch, buffer, out.handle)
        return out

    def _max_rows(self, num_tokens: int) -> int | None:
        """The rows of this rank where the user has limited them: then no host waits for their number. Else None."""
        limit = limits.max_rows(self.config, num_tokens, self.tp_size, self.expert_alignment)
        if limit is None and self.experts_are_grouped():
            most, ranks = self.buffer._config.max_tokens_per_rank, self.tp_ep_group.size()
            limit = limits.max_rows_of_grouped_experts(most, ranks, self.topk_idx.shape[1], self.num_local_experts)
        if limit is None and graphs.is_capturing():
            checks.fail(
                "--cuda-graph-impl",
                f"{self.config.cuda_graph_impl}, whose graphs contain layer {self.layer_number}'s dispatch",
                "EP_DISPATCHER_RANK_CAPACITY_FACTOR, and experts that run in grouped GEMMs (rank 0 has said which do): "
                "no host can wait for counts while a graph is captured",
            )
        return limit

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | Deferred, Tensor]:
        """Copies nothing: -> (rows [rows, hidden], tokens_per_expert int64 [num_local_experts], probs [rows]).

        tokens_per_expert counts the zero rows that fill a group up to the alignment of quantised grouped GEMMs. It is
        on the host if the host knows it: then the experts are launched while rows still move. Experts in grouped GEMMs
        get it on the device. Those that run dispatch and combine themselves get tokens and probs as they were, and the
        Deferred between them.
        """
        if self.deferred is not None:
            return hidden_states, self.deferred, probs
        tokens_per_expert, handle = self.rows_per_expert, self.handle
        assert tokens_per_expert is not None and handle is not None  # since token_dispatch
        if not self.experts_are_grouped():
            if self._takes_host_counts and handle.rows_on_host is not None:
                return hidden_states, handle.rows_on_host, probs
            if self._needs_host_counts:
                return hidden_states, tokens_per_expert.cpu(), probs
        _used_here(tokens_per_expert)
        return hidden_states, tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Copies nothing: rows [rows, hidden] leave from where the experts put them."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Rows [rows, hidden] -> the sum over each token's rows, [num_tokens, hidden]."""
        if self.shared_experts is not None:
            self._shared_experts_wait()
        if self.deferred is not None:
            self.deferred, combined = None, hidden_states  # the experts have combined
        else:
            handle, self.handle, self.rows_per_expert = self.handle, None, None
            assert handle is not None  # since token_dispatch
            self._note()
            combined = ep.combine(self.buffer, hidden_states, handle)
        return combined

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[num_tokens, hidden] -> the shape that came in, with the overlapped shared experts' output added."""
        if self.shared_experts is not None:
            with margins.margin():
                self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
            hidden_states = hidden_states + self.shared_experts.get_output()
        return hidden_states.view(self.hidden_shape)

    @property
    def _shared_experts_wait_apart(self) -> bool:
        """Whether overlapped shared experts leave it to the dispatcher when they wait: Megatron 0.18 and newer."""
        return hasattr(self.shared_experts, "wait_current_stream")

    def _shared_experts_wait(self) -> None:
        """Before a communication, so that they run beside it."""
        if self._shared_experts_wait_apart:
            self.shared_experts.wait_current_stream()

    def _note(self) -> None:
        """Let the buffer's errors name this layer and microbatch, those of a backward too."""
        self.buffer.note, self.buffer._backward_note = self._where, f"{self._where}, backward"


def _no(*_: object) -> bool:
    return False


def _used_here(tensor: Tensor) -> None:
    """A schedule may run the steps of a layer in different streams; its streams know of the steps' outputs alone."""
    if tensor.is_cuda:
        # torch.cuda.current_stream() makes its object in Python, and takes the host 5 us more.
        tensor.record_stream(torch.accelerator.current_stream(tensor.get_device()))
