"""Handles of ``deep_ep`` in autograd: saved as tensors, also behind hooks that give back copies."""

from contextlib import nullcontext

import pytest
import torch
from deep_ep_case import HIDDEN, RANKS, Case, make_data, opened, routed


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


def run_saved(rank: int, case: Case, hooks: str):
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


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_saved_for_backward(pools, engine, ranks_per_node, hooks):
    pools(RANKS).run(run_saved, Case(engine, ranks_per_node), hooks)


def test_saved_for_backward_with_a_complete_handle(pools, engine):
    pools(RANKS).run(run_saved, Case(engine, exact=True), "copies")


def run_copies(rank: int, case: Case):
    """Copies serve rows of every kind, and rows of the worst case. What is no handle is refused."""
    data = make_data(case, rank)
    worst = RANKS * max(case.lengths)
    with opened(case) as buffer:
        layout = routed(buffer, data.topk_idx[rank], data.weights[rank])
        for num_worst_tokens in (0, worst):
            recv_x, *_, handle, _ = buffer.dispatch(data.x[rank], **layout, num_worst_tokens=num_worst_tokens)
            again = [item.cpu().clone().to(item.device) for item in handle]
            assert torch.equal(buffer.dispatch(data.x[rank], handle=again)[0], recv_x)
            assert torch.equal(buffer.combine(recv_x, again)[0], buffer.combine(recv_x, handle)[0])
            half = recv_x[:, : HIDDEN // 2].float().contiguous()
            assert torch.equal(buffer.combine(half, again)[0], buffer.combine(half, handle)[0])
        for wrong in (again[:5], [*again, again[0]], [t[None] for t in again], [t.double() for t in again]):
            with pytest.raises(ValueError, match="handle: given list, allowed: the handle of a dispatch"):
                buffer.combine(recv_x, wrong)
    with opened(case) as buffer, pytest.raises(ValueError, match="handle: given one of buffers that are destroyed"):
        buffer.combine(recv_x, again)


def test_copies_of_items(pools, engine):
    pools(RANKS).run(run_copies, Case(engine))


def run_made_in_inference_mode(rank: int):
    from ep_dispatcher.integrations.deep_ep.handle import Items, _largest

    _largest.cache_clear()
    with torch.inference_mode():
        Items(torch.zeros(2, 4, dtype=torch.bool), 10, None).handle(3)
    items = Items(torch.zeros(2, 4, dtype=torch.bool), 10, None).handle(3)
    return [item.is_inference() for item in items]


def test_items_can_be_saved_after_a_dispatch_in_inference_mode(pools):
    assert pools(1).run(run_made_in_inference_mode) == [[False] * 6]
