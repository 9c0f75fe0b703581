"""Handles of ``deep_ep`` in autograd: saved as tensors, also behind hooks that give back copies."""

import copy
import itertools
from contextlib import nullcontext

import conftest
import pytest
import torch
from lib.deep_ep_case import HIDDEN, RANKS, Case, make_data, on_ranks, opened, routed, sent

from ep_dispatcher.integrations.deep_ep.handle import _largest, make_items, set_num_rows


class Dispatch(torch.autograd.Function):
    """As programs write it: the handle's items are saved like any other tensors."""

    @staticmethod
    def forward(ctx, x, topk_idx, topk_weights, buffer):
        recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(x, **routed(buffer, topk_idx, topk_weights))
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_weights, handle

    @staticmethod
    def backward(ctx, grad_x, _, grad_weights, *rest):
        grad_x, grad_weights, _ = ctx.buffer.combine(grad_x, ctx.saved_tensors, topk_weights=grad_weights)
        return grad_x, None, grad_weights, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, handle, buffer):
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx, grad):
        return ctx.buffer.dispatch(grad, handle=ctx.saved_tensors)[0], None, None


def copies():
    """Hooks that keep nothing of a tensor but its data, as offloading to a file does."""

    def pack(t):
        return t.device, t.detach().cpu().clone()

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].clone().to(packed[0]))


HOOKS = {"none": nullcontext, "save_on_cpu": torch.autograd.graph.save_on_cpu, "copies": copies}


def experts(rows, weights, local_idx):
    return torch.tanh(rows) * weights.where(local_idx >= 0, 0.0).sum(1, keepdim=True)


@pytest.mark.parametrize(
    "ranks_per_node, exact, hooks", [*itertools.product([None, 2], [False], HOOKS), (None, True, "copies")]
)
@on_ranks("ranks_per_node", "exact")
def test_saved_for_backward(rank: int, case: Case, hooks: str):
    data = make_data(case, rank, dtype=torch.float32)
    grad = torch.ones_like(data.x[rank]).cumsum(0)
    with opened(case) as buffer:
        x, weights = data.x[rank].requires_grad_(), data.weights[rank].requires_grad_()
        with HOOKS[hooks]():
            recv_x, recv_idx, recv_weights, handle = Dispatch.apply(x, data.topk_idx[rank], weights, buffer)
            out = Combine.apply(experts(recv_x, recv_weights, recv_idx), handle, buffer)
        out.backward(grad)

        # The same by hand, with the handle as it was.
        rows, scale = recv_x.detach().requires_grad_(), recv_weights.detach().requires_grad_()
        y = experts(rows, scale, recv_idx)
        assert torch.equal(out, buffer.combine(y.detach(), handle)[0])
        y.backward(buffer.dispatch(grad, handle=handle)[0])
        grad_x, grad_weights, _ = buffer.combine(rows.grad, handle, topk_weights=scale.grad)
        assert torch.equal(x.grad, grad_x) and torch.equal(weights.grad, grad_weights)
        assert bool(x.grad.any()) == bool(weights.grad.any()) == bool(len(x))


@pytest.mark.parametrize("exact", [False, True])
@on_ranks("exact")
def test_items_of_a_handle_serve_as_the_handle(rank: int, case: Case):
    """Programs take it apart, and give back its items, or copies of them, in a tuple or list of their own."""
    data = make_data(case, rank)
    with opened(case) as buffer:
        for num_worst_tokens in (0, RANKS * max(case.lengths)):
            recv_x, _, weights, _, handle, _ = sent(buffer, data, rank, num_worst_tokens=num_worst_tokens)
            copied = [item.cpu().clone().to(item.device) for item in handle]
            half = recv_x[:, : HIDDEN // 2].float().contiguous()
            sums, halves = buffer.combine(recv_x, handle)[0], buffer.combine(half, handle)[0]
            for given in (tuple(handle), list(handle), tuple(map(copy.copy, handle)), copied):
                assert torch.equal(buffer.dispatch(data.x[rank], handle=given)[0], recv_x)
                combined, combined_weights, _ = buffer.combine(recv_x, given, topk_weights=weights)
                assert torch.equal(combined, sums) and torch.equal(combined_weights, data.given_weights(rank))
                assert torch.equal(buffer.combine(half, given)[0], halves)
        wrong = (copied[:5], [*copied, copied[0]], [t[None] for t in copied], [t.double() for t in copied])
        for given in wrong:
            with pytest.raises(ValueError, match="^handle is of type list"):
                buffer.combine(recv_x, given)
    with opened(case) as buffer, pytest.raises(ValueError, match="^handle is of buffers that are destroyed"):
        buffer.combine(recv_x, copied)


@conftest.on_ranks(1)
def test_items_can_be_saved_after_a_dispatch_in_inference_mode(rank):
    _largest.cache_clear()
    with torch.inference_mode():
        make_items(torch.zeros(2, 4, dtype=torch.bool), 10)
    items = make_items(torch.zeros(2, 4, dtype=torch.bool), 10)
    set_num_rows(items, 3)
    assert [item.is_inference() for item in items] == [False] * 6
