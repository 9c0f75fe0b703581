"""The engine as one side of a comparison, the calls that are timed, and the comparison of two sides' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.tools.benchmark.ranks import largest_over_ranks, sum_over_ranks


class EngineSide:
    """The engine, with the methods of ``AllToAllBaseline``."""

    def __init__(self, buffer: ep.Buffer, layout: str, max_recv_rows: int | None = None):
        self.buffer = buffer
        self.options: dict[str, Any] = dict(layout=layout, max_recv_rows=max_recv_rows)

    def dispatch(self, x, topk_idx: Tensor, topk_weights: Tensor, **options: Any):
        return self.buffer.dispatch(x, topk_idx, topk_weights, **self.options, **options)

    def dispatch_cached(self, x: Tensor, topk_weights: Tensor, handle):
        return self.buffer.dispatch(x, None, topk_weights, handle=handle)

    def combine(self, y: Tensor, handle) -> Tensor:
        return self.buffer.combine(y, handle).x

    def forward_backward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.detach().requires_grad_()
        topk_weights = topk_weights.detach().requires_grad_()
        out = ep.dispatch(self.buffer, x, topk_idx, topk_weights, **self.options)
        y = ep.combine(self.buffer, identity_experts(out), out.handle)
        return go_back(y, out.topk_weights, x, topk_weights)


def go_back(y, row_weights, x: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y and the gradients of x and topk_weights. The gradients of y and row_weights are x and row_weights."""
    torch.autograd.backward([y, row_weights], [x.detach(), row_weights.detach()])
    assert x.grad is not None and topk_weights.grad is not None
    return y.detach(), x.grad, topk_weights.grad


def identity_experts(received) -> Tensor:
    """Return the rows of identity experts. In rank layout the caller sums them: row times number of local experts."""
    topk_idx = getattr(received, "topk_idx", None)
    if topk_idx is None:
        return received.x
    return received.x * (topk_idx >= 0).sum(1, keepdim=True).to(received.x.dtype)


def operations_of(side, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls that every side has, with the same inputs each time."""
    received = side.dispatch(x, topk_idx, topk_weights)
    y = identity_experts(received)

    def dispatch_combine():
        out = side.dispatch(x, topk_idx, topk_weights)
        return side.combine(out.x, out.handle)

    return {
        "dispatch": lambda: side.dispatch(x, topk_idx, topk_weights),
        "combine": lambda: side.combine(y, received.handle),
        "dispatch+combine": dispatch_combine,
        "cached dispatch": lambda: side.dispatch_cached(x, topk_weights, received.handle),
        "forward+backward": lambda: side.forward_backward(x, topk_idx, topk_weights),
    }


def compare(ours, other, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, layout: str) -> dict:
    """Compare the results of both sides: rows and weights bit by bit, sums within the rounding of the dtype."""
    same = True
    if layout == "expert":
        a, b = (side.dispatch(x, topk_idx, topk_weights) for side in (ours, other))
        n = b.x.shape[0]  # with max_recv_rows ours has zero rows after them
        same = torch.equal(a.x[:n], b.x) and torch.equal(a.topk_weights[:n], b.topk_weights)
    (y, grad_x, grad_weights), expected = (side.forward_backward(x, topk_idx, topk_weights) for side in (ours, other))
    same = same and torch.equal(grad_weights, expected[2])
    return verdict(same, [(y, expected[0]), (grad_x, expected[1])], 2 * torch.finfo(x.dtype).eps)


def verdict(same: bool, sums: list[tuple[Tensor, Tensor]], allowed: float) -> dict:
    """Return the verdict of all ranks: each found ``same``, and its sums (got, wanted) are close enough."""
    worst = 0.0
    for got, wanted in sums:
        # With identity experts all addends of a sum are the same, so the relative error is bounded.
        error = (got.float() - wanted.float()).abs() / wanted.float().abs().clamp_min(torch.finfo(got.dtype).tiny)
        worst = max(worst, float(error.max()) if error.numel() else 0.0)
    (ranks_that_differ,) = sum_over_ranks([int(not same or not worst <= allowed)])
    (worst,) = largest_over_ranks([worst])
    return {"same": ranks_that_differ == 0, "largest_relative_error": worst, "allowed": allowed}
