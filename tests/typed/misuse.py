"""Mistakes that type checkers find. Nothing runs this file.

Each line with a comment has to be an error: the checkers refuse a comment on a line without one.
"""

from torch import Tensor

import ep_dispatcher as ep
import ep_dispatcher.integrations.megatron as ep_megatron


def operations(buffer: ep.Buffer, x: Tensor, topk_idx: Tensor, weights: Tensor, handle: ep.Handle) -> None:
    ep.dispatch(buffer, x, topk_idx, layout="expertt")  # type: ignore[call-overload]
    ep.dispatch(buffer, x, topk_idx, layout="decode")  # type: ignore[call-overload]
    ep.dispatch(buffer, x, topk_idx, quantize="e4m3")  # type: ignore[call-overload]
    ep.dispatch(buffer, x, topk_idx, max_rows=3)  # type: ignore[call-overload]
    ep.dispatch(buffer, x, topk_idx).topk_weights.sum()  # type: ignore[attr-defined]
    ep.dispatch(buffer, x, topk_idx, quantize="mxfp8").x.sum()  # type: ignore[attr-defined]
    ep.combine(buffer, x, handle, topk_weight=weights)  # type: ignore[call-overload]
    buffer.dispatch(x, topk_idx, layout="decoding")  # type: ignore[call-overload]
    buffer.dispatch(x, topk_idx, layout="decode", return_hook=1)  # type: ignore[call-overload]
    buffer.combine(x, handle, topk_weight=weights)  # type: ignore[call-overload]
    buffer.plan(topk_idx, layout="decode")  # type: ignore[arg-type]
    buffer.max_recv_rows("decode")  # type: ignore[arg-type]
    ep.quantize(x, "fp8")  # type: ignore[arg-type]


def layers(buffer: ep.Buffer, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> None:
    ep.moe_mlp(buffer, x, topk_idx, weights, w1, w2, activation="swish")  # type: ignore[arg-type]
    ep.moe_mlp(buffer, x, topk_idx, weights, w1, w2, quantize="mxfp8")  # type: ignore[arg-type]
    ep.MoELayer(buffer, 32, activaton="gelu")  # type: ignore[call-arg]
    ep.MoELayer(buffer, 32)(x, topk_idx)  # type: ignore[call-arg]
    ep.Activation("swiglu")  # type: ignore[arg-type]


def buffers(buffer: ep.Buffer) -> None:
    buffer.hidden = 4  # type: ignore[misc]
    buffer.hiden  # type: ignore[attr-defined]  # noqa: B018
    ep.Buffer(hidden=8, num_experts=1, num_topk=1, max_tokens_per_rank=1, engine="gpu")  # type: ignore[arg-type]
    ep.Buffer(hidden=8, num_experts=1, num_topk=1, max_tokens=1)  # type: ignore[call-arg]
    ep.Buffer(hidden=8, num_experts=1, num_topk=1, max_tokens_per_rank=1, dtype="bf16")  # type: ignore[arg-type]
    ep.buffer_bytes(num_ranks=1, hidden=8, num_experts=1, num_topk=1, max_tokens_per_rank=1, sms=2)  # type: ignore[call-arg]
    ep_megatron.register(max_tokens=3)  # type: ignore[call-arg]
    ep.PeerTimeout  # type: ignore[attr-defined]  # noqa: B018
