"""Converts Megatron's routing, a map of tokens by experts, for the engine: to columns of top-k experts.

On a GPU one compiled kernel makes the columns, and another one the gradient. Separate operations of PyTorch would cost
the host more time than a dispatch.

A token with more than top-k experts is an error. On a CPU the host finds it before anything is sent. On a GPU the host
would have to wait for the router. So the token gets an expert number that does not exist, which the engine reports from
the dispatch, or from a later call if the number of rows is given. ``explained`` rewords that error.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_dispatcher import checks, engines
from ep_dispatcher.addressable import as_addressable
from ep_dispatcher.errors import UnknownExpertError
from ep_dispatcher.observers import apply_without_functorch, is_observed, once_differentiable

_compiled: Any = import_module("ep_dispatcher._C_cuda") if "cuda" in engines.ENGINES else None
_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class Routing(NamedTuple):
    """How columns are made from a map.

    topk              experts of a token
    slices            ranks that each hold a slice of an expert (expert tensor parallelism); all of them get its tokens.
                      Slices of an expert are on successive ranks of the group: slice t of expert e is expert
                      ``(e // L * slices + t) * L + e % L`` of the group, with L = experts_per_rank
    experts_per_rank  experts, or slices of experts, of this rank
    skips_zeros       ignore experts with probability 0. Megatron's map then marks whole capacities, and tokens that
                      only fill them up add nothing
    """

    topk: int
    slices: int
    experts_per_rank: int
    skips_zeros: bool


def columns(routing: Routing, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, -1 for none, and their probabilities, slice by slice.

    routing_map bool [num_tokens, num_experts]; probs float [num_tokens, num_experts]
    -> (int64 [num_tokens, slices * topk], float32 [num_tokens, slices * topk])

    Beside -1 the probability is undefined. Probabilities are differentiable once. On a GPU the columns are in the order
    of experts. Raises ValueError if a token has more than topk experts and the host can see it.
    """
    if _has_kernels(routing_map) and not is_observed((routing_map, probs)):
        if probs.dtype == torch.float64:
            probs = probs.float()
        return _make_columns(probs, routing_map, routing)
    return _by_operators(routing, routing_map, probs)


def _has_kernels(routing_map: Tensor) -> bool:
    """Return whether the kernels can be launched in the current stream of the current GPU."""
    return routing_map.is_cuda and _compiled is not None and routing_map.get_device() == torch._C._cuda_getDevice()


def can_host_look(routing_map: Tensor) -> bool:
    """Return whether the host can read the routing map without waiting for a device."""
    return not routing_map.is_cuda


def explained(error: ValueError, topk: int) -> ValueError:
    """Return the error. If it is about an expert number that ``columns`` made up, return one in Megatron's terms."""
    if not isinstance(error, UnknownExpertError):
        return error
    reworded = ValueError(
        f"routing_map chooses more than {topk} experts for token {error.token}, but --moe-router-topk is {topk} (the "
        f"engine was given an expert that does not exist: {error})"
    )
    reworded.__cause__ = error
    return reworded


def _by_operators(routing: Routing, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    topk, slices, per_rank, skips_zeros = routing
    if skips_zeros:
        routing_map = routing_map & (probs != 0)
    num_experts = routing_map.shape[1]
    most = min(topk + 1, num_experts)  # one more shows which tokens have more than top-k experts
    ones, idx = routing_map.view(torch.uint8).topk(most, dim=1)  # a token's experts, then others
    ones = ones.view(torch.bool)
    idx, chosen, is_overfull = idx[:, :topk], ones[:, :topk], ones[:, topk:]
    looks = can_host_look(routing_map)
    if looks and is_overfull.any():
        most = int(routing_map.sum(1).max())
        checks.refuse(f"routing_map chooses {most} experts for a token, but --moe-router-topk is {topk}")
    weights = probs.gather(1, idx).float()  # the engine reads none beside -1, and gives it the gradient 0
    if slices > 1:
        first = idx // per_rank * (slices * per_rank) + idx % per_rank
        idx = torch.cat([first + t * per_rank for t in range(slices)], dim=1)
        chosen, weights = chosen.repeat(1, slices), weights.repeat(1, slices)
    idx = torch.where(chosen, idx, -1)
    if most > topk and not looks:
        idx[:, -1:].masked_fill_(is_overfull, num_experts * slices)
    return idx, weights


class _Columns(torch.autograd.Function):
    """Make the columns with one kernel, and the gradient of probs with another. Tensors are on the current GPU."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        num_tokens, num_experts = probs.shape
        probs, routing_map = as_addressable("probs", probs), as_addressable("routing_map", routing_map)
        shape = (num_tokens, routing.slices * routing.topk)
        topk_idx = probs.new_empty(shape, dtype=torch.int64)
        weights = probs.new_empty(shape, dtype=torch.float32)
        ctx.routing, ctx.num_experts, ctx.dtype = routing, num_experts, probs.dtype
        addresses = (routing_map.data_ptr(), probs.data_ptr(), topk_idx.data_ptr(), weights.data_ptr())
        _compiled.map_to_columns(*_sizes(ctx, num_tokens), *addresses, _stream(probs))
        ctx.save_for_backward(topk_idx)
        ctx.mark_non_differentiable(topk_idx)
        ctx.set_materialize_grads(False)
        return topk_idx, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, grad_weights: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad_weights is None:
            return None, None, None
        (topk_idx,) = ctx.saved_tensors
        grad_weights = as_addressable("gradient of topk_weights", grad_weights)
        num_tokens = grad_weights.shape[0]
        grad_probs = grad_weights.new_empty((num_tokens, ctx.num_experts), dtype=ctx.dtype)
        addresses = (topk_idx.data_ptr(), grad_weights.data_ptr(), grad_probs.data_ptr())
        _compiled.columns_to_map(*_sizes(ctx, num_tokens), *addresses, _stream(grad_weights))
        return grad_probs, None, None


_make_columns = apply_without_functorch(_Columns)


def _sizes(ctx: Any, num_tokens: int) -> tuple[Any, ...]:
    """Return the first arguments of both kernels."""
    dtype = getattr(_compiled.DType, _DTYPES[ctx.dtype])
    return num_tokens, ctx.num_experts, *ctx.routing, dtype


def _stream(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())
