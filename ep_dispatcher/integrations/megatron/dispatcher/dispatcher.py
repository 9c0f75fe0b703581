"""MoEEPTokenDispatcher: Megatron's six dispatcher steps on ep.dispatch and ep.combine.

The road of one forward pass of an MoE layer. Files are in this folder unless a folder is named:

    MoELayer.forward                   Megatron: its router makes routing_map and probs, then it calls what follows
    1  dispatch_preprocess             routing.py: the map becomes columns of top-k experts
    2  token_dispatch
         find or make the buffer       buffers.py; a recompute has kept it with its plan (ep_dispatcher/recompute.py)
         ask how the experts run       grouped_experts/experts.py, through experts_interface.py
         limit the rows                rank_capacity.py, if a rank capacity factor is given
         dispatch                      PendingDispatch.send (experts_interface.py) -> ep_dispatcher/autograd.py
    3  dispatch_postprocess            passes rows and counts to the experts, without a copy
       experts.forward                 grouped_experts/wrappers.py -> experts.py -> ep_dispatcher/moe/grouped_mlp.py,
                                       or overlapped_dispatch.py, or Megatron's own forward
    4  combine_preprocess              does nothing
    5  token_combine                   ep.combine (ep_dispatcher/autograd.py)
    6  combine_postprocess             adds the output of overlapped shared experts
    at the end of a step's schedule    skipped_step.py: late errors, and steps that had too many rows
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks, recompute
from ep_dispatcher.buffer import find_buffer
from ep_dispatcher.engines.cuda.streams import current_stream
from ep_dispatcher.integrations.megatron.dispatcher import (
    arguments,
    buffers,
    gemm_sm_margin,
    graphs,
    megatron_config,
    rank_capacity,
)
from ep_dispatcher.integrations.megatron.dispatcher.experts_interface import (
    GroupedExperts,
    PendingDispatch,
    QuantizedInput,
)
from ep_dispatcher.integrations.megatron.dispatcher.recompute import is_under_way
from ep_dispatcher.integrations.megatron.dispatcher.routing import Routing, columns


class MoEEPTokenDispatcher(MoETokenDispatcher):
    """Brings tokens to their experts and back through ep_dispatcher; rows arrive grouped by expert.

        tokens, probs = dispatch_preprocess(hidden_states, routing_map, probs)
        tokens, probs = token_dispatch(tokens, probs)                        # the one communication on the way out
        tokens, tokens_per_expert, permuted_probs = dispatch_postprocess(tokens, probs)
        tokens = combine_preprocess(experts(tokens, tokens_per_expert, permuted_probs))
        hidden_states = combine_postprocess(token_combine(tokens))           # the one communication on the way back

    Gradients flow only through the arguments of the steps: a schedule may detach any of them and run the backward of a
    step at any time. A plan belongs to one forward pass; its backward finds it in the graph. Experts that overlap with
    communication run dispatch and combine themselves (grouped_experts/overlapped_dispatch.py).

    num_local_experts     experts of this rank
    local_expert_indices  their global numbers
    config                TransformerConfig; an unsupported setting raises ValueError with the flag's name
    pg_collection         ProcessGroupCollection with ep, expt_tp and tp_ep
    """

    def __init__(self, num_local_experts, local_expert_indices, config, pg_collection=None):
        super().__init__(config=config, pg_collection=pg_collection)
        megatron_config.check(config, num_local_experts, expert_tp=self.tp_size, num_ranks=self.tp_ep_group.size())
        graphs.note_layer(config)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.layer: Callable[[], Any] = lambda: None  # the MoELayer, once it is there
        self.expert_alignment = megatron_config.expert_alignment(config)
        # A partial CUDA graph that ends after dispatch_preprocess has to return this beside the outputs of the step.
        self.cudagraph_attrs = ["topk_idx"]
        # State of the current forward pass: Megatron calls the steps of one pass after the other.
        self.topk_idx: Tensor = None  # type: ignore[assignment]  # until dispatch_preprocess
        self.hidden_shape: torch.Size = None  # type: ignore[assignment]  # until dispatch_preprocess
        self.buffer: buffers.MegatronBuffer = None  # type: ignore[assignment]  # until token_dispatch
        self.handle: ep.Handle | None = None  # from the dispatch to the combine
        self.rows_per_expert: Tensor | None = None  # likewise
        self.pending: PendingDispatch | None = None  # likewise, if the experts run dispatch and combine
        self.quantized_rows: ep.QuantizedRows | None = None  # from token_dispatch to dispatch_postprocess
        # Most experts begin by making a list of their counts, but experts with these settings take counts on the
        # device. GroupedMLP of 0.16 takes counts on the host only.
        takes_device_counts = ("use_transformer_engine_op_fuser", "moe_use_grouped_tensor")
        self._takes_host_counts = not any(getattr(config, name, False) for name in takes_device_counts)
        self._needs_host_counts = hasattr(config, "moe_use_legacy_grouped_gemm") and config.moe_grouped_gemm
        self.experts: GroupedExperts | None = None  # unless they run Megatron's way anyway
        self._is_grouped = False  # whether the experts run in grouped GEMMs in this forward pass
        # Megatron's graphs write the routing of every microbatch to the same memory.
        self._keeps_copies = config.cuda_graph_impl != "none"
        self.num_forwards = 0  # not counting those of a recompute
        self._where = ""

    @property
    def layer_number(self) -> int | None:
        return getattr(self.layer(), "layer_number", None)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the routing into top-k columns.

        hidden_states [..., hidden]; routing_map bool [num_tokens, num_experts]; probs float [num_tokens, num_experts]
        -> (hidden_states [num_tokens, hidden], probs float32 [num_tokens, top-k x expert tensor parallel size])

        Raises ValueError if a shape or dtype is not as above, or a token has more than top-k experts. (On a GPU the
        error about a token comes from token_dispatch, or from a later call if the number of rows is given.)
        """
        self.hidden_shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        allowed, device = (hidden_states.shape[0], self.config.num_moe_experts), hidden_states.device.type
        checks.tensor("routing_map", routing_map, (torch.bool,), allowed, device)
        checks.tensor("probs", probs, megatron_config.PROBS_DTYPES, allowed, device)
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
        """Dispatch tokens [num_tokens, hidden] and their probs -> rows [rows, hidden] by expert, probs [rows]."""
        kept_plan, microbatch = self._find_buffer(hidden_states)
        have_shared_experts_waited = self._let_shared_experts_wait()
        self._label_buffer()
        _record_use(self.topk_idx)
        num_parts_of_experts, quantize, alignment = 0, None, self.expert_alignment
        if self.experts is not None:
            self._is_grouped = self.experts.decide_grouped()
            quantize = self.experts.quantize_blocks()
            alignment = alignment if quantize is None else 1  # experts in grouped GEMMs need none
            num_parts_of_experts = self.experts.num_parts_of_dispatch(self.buffer, alignment)
        num_parts = max(1, num_parts_of_experts)
        handles = []
        self._limit_tokens_to_node()
        if kept_plan is not None and len(kept_plan.handles) == num_parts:
            handles = kept_plan.handles
            for tensor in (kept_plan.topk_idx, *(handle.plan for handle in handles)):
                _record_use(tensor)
            kept_plan.compare(self.topk_idx)
        dispatch = PendingDispatch(
            buffer=self.buffer,
            topk_idx=self.topk_idx,
            num_parts=num_parts,
            max_rows=None if handles else self._max_rows(hidden_states.shape[0]),
            alignment=alignment,
            handles=handles,
            keep=partial(self._keep_plans, microbatch),
            quantize=quantize,
        )
        self.handle = self.rows_per_expert = self.pending = self.quantized_rows = None
        if num_parts_of_experts > 0:
            self.pending = dispatch
            rows, row_probs, received = hidden_states, probs, None
        else:
            out: Any = dispatch.send(hidden_states, probs)  # has weights, as probs were given
            self.handle, self.rows_per_expert = out.handle, out.rows_per_expert
            row_probs, rows = out.topk_weights, out.x
            if isinstance(rows, ep.QuantizedRows):
                self.quantized_rows, rows = rows, out.x.anchor
            received = rows
        if self.shared_experts is not None:
            # Megatron before 0.18 has no such argument.
            options = {"wait_current_stream": False} if have_shared_experts_waited else {}
            self.shared_experts.pre_forward_comm(hidden_states, **options)
            with gemm_sm_margin.margin(self.config):
                self.shared_experts.linear_fc1_forward_and_act(received)
        return rows, row_probs

    def _find_buffer(self, hidden_states: Tensor) -> tuple[recompute.SavedPlan | None, int]:
        """Set the buffer of this pass. Return the plan that a recompute has kept, if there is one, and the microbatch.

        The first pass of a job makes the buffer, which is collective.
        """
        kept_plan = recompute.take_plan(self)
        if kept_plan is not None:
            self.buffer = cast(buffers.MegatronBuffer, find_buffer(kept_plan.engine.config.buffer_id))
            _, microbatch = kept_plan.where
            self._where = f"layer {self.layer_number}, microbatch {microbatch}"
            return kept_plan, microbatch
        if is_under_way():  # a recompute without a plan, whose microbatch is not known
            self._where = f"layer {self.layer_number}, recompute after microbatch {self.num_forwards}"
        else:
            self.num_forwards += 1
            self._where = f"layer {self.layer_number}, microbatch {self.num_forwards}"
        self.buffer = buffers.shared_buffer(self.tp_ep_group, self.config, hidden_states, self.topk_idx, self._where)
        return None, self.num_forwards

    def _max_rows(self, num_tokens: int) -> int | None:
        """Return the limit of this rank's rows, or None. With a limit the host does not wait for their number."""
        limit = rank_capacity.max_rows(self.config, num_tokens, self.tp_size, self.expert_alignment)
        configured = None
        if self._is_grouped and limit is None:
            configured = arguments.rank_capacity_factor(self.config)
        factor = max(configured or 0.0, rank_capacity.state().grown_factor)
        is_limited = configured is not None or limit is not None
        if is_limited and factor > 0:
            rows = rank_capacity.max_rows_by_factor(
                factor,
                self.buffer.config.max_tokens_per_rank,
                self.tp_ep_group.size(),
                self.topk_idx.shape[1],
                self.buffer.config.num_local_experts,
                self.expert_alignment,
            )
            limit = max(rows, limit or 0)
        if limit is None and graphs.is_capturing():
            checks.refuse(
                f"layer {self.layer_number}'s dispatch is inside a CUDA graph (--cuda-graph-impl "
                f"{self.config.cuda_graph_impl}), where the host cannot wait for row counts: give "
                f"{rank_capacity.FACTOR_FLAG}, and let its experts run in grouped GEMMs (rank 0 has printed which do)"
            )
        return limit

    def _limit_tokens_to_node(self) -> None:
        """Set the size of messages between nodes where no host waits for the counts of a new plan."""
        factor = arguments.node_capacity_factor(self.config)
        limit = None
        if factor is not None:
            factor = max(factor, rank_capacity.state().grown_node_factor)
            limit = self.buffer.capacities.max_tokens_to_node(factor)
        if self.buffer.max_tokens_to_node != limit:
            self.buffer.max_tokens_to_node = limit

    def _keep_plans(self, microbatch: int, handles: list[ep.Handle]) -> None:
        """Keep a new plan, or one for each part of the tokens, if a recompute will need it."""
        if recompute.is_expected():
            topk_idx = self.topk_idx.clone() if self._keeps_copies else self.topk_idx
            where = (self.layer_number or 0, microbatch)
            recompute.save_plan(self, recompute.SavedPlan(self.buffer.live_engine(), topk_idx, where, handles))

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | PendingDispatch | QuantizedInput, Tensor]:
        """Copy nothing: -> (rows [rows, hidden], tokens_per_expert int64 [num_local_experts], probs [rows]).

        tokens_per_expert includes the zero rows that fill a group up to the alignment of quantized grouped GEMMs. It is
        on the host if the host knows it, so that the experts are launched while rows still move. Experts in grouped
        GEMMs get it on the device. Experts that run dispatch and combine themselves get tokens and probs unchanged, and
        the PendingDispatch in place of the counts. If rows have arrived quantized, the experts get their anchor, and a
        QuantizedInput in place of the counts. Experts that do not take one get the rows dequantized.
        """
        if self.pending is not None:
            return hidden_states, self.pending, probs
        tokens_per_expert, handle = self.rows_per_expert, self.handle
        quantized_rows, self.quantized_rows = self.quantized_rows, None
        assert tokens_per_expert is not None and handle is not None  # since token_dispatch
        if quantized_rows is not None:
            for tensor in quantized_rows:
                _record_use(tensor)
            quantized = QuantizedInput(*quantized_rows, tokens_per_expert)
            if self._is_grouped and self.experts is not None and self.experts.can_take_quantized:
                _record_use(tokens_per_expert)
                return hidden_states, quantized, probs
            hidden_states = ep.dequantize(quantized.with_anchor(hidden_states))
        if not self._is_grouped:
            if self._takes_host_counts and handle.rows_on_host is not None:
                return hidden_states, handle.rows_on_host, probs
            if self._needs_host_counts:
                return hidden_states, tokens_per_expert.cpu(), probs
        _record_use(tokens_per_expert)
        return hidden_states, tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Copy nothing: the combine reads rows [rows, hidden] where the experts wrote them."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Combine rows [rows, hidden] -> the sum over each token's rows, [num_tokens, hidden]."""
        self._let_shared_experts_wait()
        if self.pending is not None:
            self.pending, combined = None, hidden_states  # the experts have combined
        else:
            handle, self.handle, self.rows_per_expert = self.handle, None, None
            assert handle is not None  # since token_dispatch
            self._label_buffer()
            combined = ep.combine(self.buffer, hidden_states, handle)
        return combined

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Add the output of overlapped shared experts: [num_tokens, hidden] -> the shape of the layer's input."""
        if self.shared_experts is not None:
            with gemm_sm_margin.margin(self.config):
                self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
            hidden_states = hidden_states + self.shared_experts.get_output()
        return hidden_states.view(self.hidden_shape)

    def _let_shared_experts_wait(self) -> bool:
        """Let overlapped shared experts wait for the current stream before a communication, so that they run beside it.

        Return whether they have done so. Before Megatron 0.18 they decide themselves when to wait.
        """
        if not hasattr(self.shared_experts, "wait_current_stream"):
            return False
        self.shared_experts.wait_current_stream()
        return True

    def _label_buffer(self) -> None:
        """Let the buffer's errors name this layer and microbatch, in a backward too."""
        self.buffer.label = self.layer_number or 0
        self.buffer.note, self.buffer.backward_note = self._where, f"{self._where}, backward"


def _record_use(tensor: Tensor) -> None:
    """Record a tensor's use in this stream: steps may run in different streams, which know only the steps' outputs."""
    if tensor.is_cuda:
        tensor.record_stream(current_stream(tensor.get_device()))
