"""ep_dispatcher as an expert-parallel implementation of Hugging Face transformers (5.24).

    from ep_dispatcher.integrations.transformers import register
    register()
    parallel = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="ep_dispatcher")
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", distributed_config=parallel)

Importing this module imports nothing of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ep_dispatcher as ep
from ep_dispatcher.buffer import planned_buffer
from ep_dispatcher.integrations.collectives import abandon
from ep_dispatcher.integrations.deep_ep.buffer_pool import BufferKey, BufferPool, pool_of
from ep_dispatcher.integrations.deep_ep.row_conversion import RowFormat
from ep_dispatcher.integrations.messages import name_and_version
from ep_dispatcher.moe.expert_matrices import LINE_BYTES

NAME = "ep_dispatcher"
__all__ = ["EPDispatcher", "destroy_buffers", "register"]
_pools: set[BufferPool] = set()  # they outlive models, because Python frees these at different times on each rank


def __dir__() -> list[str]:
    """List the public names alone."""
    return __all__


def register() -> None:
    """Let ``DistributedConfig(ep_implementation="ep_dispatcher")`` choose ours. Call it on every rank.

    Raises ImportError if transformers is missing, or not laid out as 5.24 is.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
        from transformers.integrations.moe import _default_apply_gate, _grouped_linear  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"transformers: {error}; transformers 5.24 is needed, or a newer version with the same layout"
        ) from error
    EPImplementationInterface.register(NAME, EPDispatcher)


def destroy_buffers() -> None:
    """Free the memory of all buffers, after the last backward of a job. Collective; a later forward makes new ones."""
    for pool in _pools:
        pool.destroy()


class EPDispatcher:
    """The object that transformers makes for each module of experts, in place of its ``AllToAllEP``.

        y = implementation(hidden_states, top_k_index, top_k_weights)
        y[t] = sum over k of top_k_weights[t, k] * expert[top_k_index[t, k]](hidden_states[t])

    hidden_states  bfloat16, float16 or float32 [num_tokens, hidden]: the tokens of this rank. The ranks of tp_mesh have
                   the same tokens; each sends a part of them
    top_k_index    int64 [num_tokens, top_k]: experts, counted over all ranks
    top_k_weights  [num_tokens, top_k] of any floating dtype; gradients reach them

    Rows arrive in the order of local experts. So with transformers' default implementation of experts, "grouped_mm",
    nothing sorts them: SwiGLU without biases is ``ep.moe_mlp``, others are transformers' grouped GEMMs. Experts of
    another implementation run in their own forward.

    All layers share buffers of EP_DISPATCHER_MAX_TOKENS_PER_RANK tokens. If that is not set, ranks agree on the size
    before every dispatch. Raises ValueError for other dtypes and for more tokens, PeerTimeoutError if a rank is late.
    A rank with more tokens leaves its buffer: peers, which wait for it, raise PeerTimeoutError at once and name it.
    """

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh):
        self.experts, self.tp_mesh = experts, tp_mesh
        self.experts_forward = experts.forward  # before transformers replaces it
        self.num_experts = experts.num_experts * ep_mesh.size()  # transformers has divided them already
        self.pool = pool_of(ep_mesh.get_group())
        self.pool.framework = name_and_version("transformers")
        _pools.add(self.pool)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.tp_mesh.size() == 1:
            return self._run(hidden_states, top_k_index, top_k_weights)
        y = self._run(*map(self._part, (hidden_states, top_k_index, top_k_weights)))
        shape = hidden_states.shape
        return DTensor.from_local(y, self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)).full_tensor()

    def _part(self, t: Tensor) -> Tensor:
        """Return this rank's part of a tensor that all ranks of tp_mesh have. Its gradient is that of all of it."""
        whole = DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _buffer(self, key: BufferKey, num_tokens: int) -> ep.Buffer:
        """Return the buffer for a dispatch. All ranks make it together, also if this one brings too many tokens."""
        most = self.pool.settings().max_tokens
        if most is None:
            return self.pool.buffer_for_dispatch(key, num_tokens, 0)  # ranks agree
        buffer = self.pool.buffer_for(key, most)
        if num_tokens > most:
            abandon(buffer)
            raise ValueError(
                f"hidden_states has {num_tokens} tokens on rank {self.pool.group.rank()}, but "
                f"EP_DISPATCHER_MAX_TOKENS_PER_RANK is {most}. Set it to the most tokens that any rank brings in any "
                "forward pass, divided by tp_size."
            )
        return buffer

    def _run(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        weights_dtype = topk_weights.dtype
        topk_idx, topk_weights = _merge_repeated(topk_idx, topk_weights.float())
        key = BufferKey(RowFormat(x.shape[1], x.dtype), self.num_experts, topk_idx.shape[1])
        buffer = planned_buffer() or self._buffer(key, x.shape[0])
        is_grouped = _are_grouped(self.experts, x)
        if is_grouped and _are_swiglu(self.experts):
            w1, w2 = self.experts.gate_up_proj, self.experts.down_proj
            return ep.moe_mlp(buffer, x, topk_idx, topk_weights, w1, w2)
        out = ep.dispatch(buffer, x, topk_idx, topk_weights)
        assert isinstance(out.x, Tensor) and out.topk_weights is not None  # as x and topk_weights were given
        rows, row_weights, counts = out.x, out.topk_weights.to(weights_dtype), out.tokens_per_expert
        if (num_rows := rows.shape[0]) == 0:  # a row of zeros keeps parameters in the backward, where FSDP needs them
            rows, row_weights, counts = F.pad(rows, (0, 0, 0, 1)), F.pad(row_weights, (0, 1)), counts.clone()
            counts[-1] = 1
        experts_of_rows = torch.repeat_interleave(counts.long(), output_size=rows.shape[0])
        if is_grouped:
            y = _grouped_forward(self.experts, rows, experts_of_rows, counts.cumsum(0, dtype=torch.int32))
            y = (y * row_weights[:, None]).to(x.dtype)
        else:
            y = self.experts_forward(rows, experts_of_rows[:, None], row_weights[:, None])
        return ep.combine(buffer, y[:num_rows], out.handle)


def _merge_repeated(topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the routing with every expert at most once for a token, which is what the engine takes.

        sum of w[k] * expert[i](x) over the choices k of expert i  =  (sum of those w[k]) * expert[i](x)

    The first choice of an expert gets the weights of all its choices, and the others become -1. So each of them gets
    the gradient of that one row, as if the expert had computed it again. Weights of experts that a token has once do
    not change. A lookup table of DeepSeek-V4's hash router may repeat experts, and a new one consists of zeros. No host
    waits to find out whether there are any.

    topk_idx int64, topk_weights float32 [num_tokens, top_k]
    """
    if topk_idx.shape[1] == 1:
        return topk_idx, topk_weights
    is_same = topk_idx.unsqueeze(2) == topk_idx.unsqueeze(1)
    merged = torch.where(is_same, topk_weights.unsqueeze(1), 0).sum(2)  # a product would spread infinite weights
    return topk_idx.masked_fill(is_same.tril(-1).any(2), -1), merged


def _are_grouped(experts: Any, x: Tensor) -> bool:
    """Return whether transformers would run these experts in its grouped GEMMs, with weights of x's dtype."""
    chosen = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if chosen != "grouped_mm" or not hasattr(experts, "is_concatenated"):  # which its decorator sets
        return False
    return all(p.dtype == x.dtype for p in experts.parameters())  # quantized experts have grouped GEMMs of their own


def _are_swiglu(experts: Any) -> bool:
    """Return whether ep.moe_mlp computes these experts."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    if experts.has_bias or experts.is_transposed or experts.has_post_expert_norm or not experts.has_gate:
        return False
    if not experts.is_concatenated or type(experts)._apply_gate is not _default_apply_gate:
        return False  # a class with a gate of its own need not have an act_fn
    w2 = experts.down_proj
    is_silu = type(experts.act_fn) in (torch.nn.SiLU, SiLUActivation)
    return is_silu and w2.shape[2] * w2.itemsize % LINE_BYTES == 0


def _grouped_forward(experts: Any, rows: Tensor, experts_of_rows: Tensor, ends: Tensor) -> Tensor:
    """Return the results of rows [rows, hidden], which are in the order of experts, without routing weights.

    experts_of_rows: int64 [rows]; ends: int32 [local experts], the end of each expert's rows
    """
    from transformers.integrations.moe import _grouped_linear

    def linear(x: Tensor, name: str) -> Tensor:
        bias = None
        if experts.has_bias:  # as a product, because the backward of an index is slow where rows share one
            bias = getattr(experts, f"{name}_bias")
            bias = F.one_hot(experts_of_rows, bias.shape[0]).to(bias.dtype) @ bias
        return _grouped_linear(x, getattr(experts, name), ends, bias=bias, is_transposed=experts.is_transposed)

    if experts.has_gate:
        y = linear(experts._apply_gate(linear(rows, "gate_up_proj")), "down_proj")
    else:
        y = linear(experts.act_fn(linear(rows, "up_proj")), "down_proj")
    return experts.post_expert_norm(y) if experts.has_post_expert_norm else y
