"""Zeros in combine: every sum begins with +0.0, so no sum of -0.0 is negative. Compared bit by bit."""

import pytest
import torch

import ep_dispatcher as ep
from ep_dispatcher import reference
from ep_dispatcher.tools.testing import device_of

NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_RANKS = 8, 64, 16, 4
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def routing(num_topk: int) -> torch.Tensor:
    """Tokens with 0 to ``num_topk`` experts, on one rank or on several."""
    tokens = torch.arange(NUM_TOKENS)[:, None]
    together, apart = tokens + torch.arange(num_topk), 5 * (tokens + torch.arange(num_topk))
    idx = torch.where(tokens % 2 == 0, together, apart) % NUM_EXPERTS
    return idx.masked_fill(torch.arange(num_topk) >= tokens % (num_topk + 1), -1)


def combine_zeros(rank: int, engine: str, ranks_per_node: int, dtype: torch.dtype, num_topk: int) -> None:
    device = device_of(engine, rank)
    options = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=num_topk, max_tokens_per_rank=NUM_TOKENS)
    options |= dict(dtype=dtype, engine=engine, ranks_per_node=ranks_per_node, timeout_s=30)
    x, idx = torch.ones(NUM_TOKENS, HIDDEN, dtype=dtype), routing(num_topk)
    node_of = [r // ranks_per_node for r in range(NUM_RANKS)]
    with ep.Buffer(**options) as buffer:
        for layout in ("expert", "rank"):
            given = dict(num_experts=NUM_EXPERTS, layout=layout)
            received = reference.dispatch([x] * NUM_RANKS, [idx] * NUM_RANKS, None, **given)
            for sign in (-1, 1):  # all negative, and every other element
                pattern = torch.tensor([-0.0, sign * 0.0], dtype=dtype).repeat(HIDDEN // 2)
                y = [pattern.expand(len(each.x), HIDDEN) for each in received]
                right, _ = reference.combine(y, received, [idx] * NUM_RANKS, node_of=node_of, **given)[rank]
                out = buffer.dispatch(x.to(device), idx.to(device), layout=layout)
                seen = buffer.combine(y[rank].contiguous().to(device), out.handle).x.cpu()
                assert not right.view(BITS[dtype]).any(), "the definition has no negative zero"
                assert torch.equal(seen.view(BITS[dtype]), right.view(BITS[dtype])), (layout, sign)


@pytest.mark.parametrize("num_topk", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", list(BITS), ids=str)
@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_combine_of_zeros_is_positive(pools, engine, ranks_per_node, dtype, num_topk):
    pools(NUM_RANKS).run(combine_zeros, engine, ranks_per_node, dtype, num_topk)


def combine_weights(rank: int, engine: str, ranks_per_node: int) -> None:
    """Weights only travel, so every bit of them does: also the sign of a zero, as topk_weights and as a gradient."""
    device, num_topk = device_of(engine, rank), 4
    sizes = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=num_topk, max_tokens_per_rank=NUM_TOKENS)
    options = dict(sizes, dtype=torch.float32, engine=engine, ranks_per_node=ranks_per_node, timeout_s=30)
    x, idx = torch.ones(NUM_TOKENS, HIDDEN), routing(num_topk)
    node_of = [r // ranks_per_node for r in range(NUM_RANKS)]
    with ep.Buffer(**options) as buffer:
        for layout in ("expert", "rank"):
            given = dict(num_experts=NUM_EXPERTS, layout=layout)
            received = reference.dispatch(
                [x] * NUM_RANKS, [idx] * NUM_RANKS, [torch.ones(idx.shape)] * NUM_RANKS, **given
            )
            values = torch.tensor([-0.0, 0.0, torch.nan, -1.0, torch.inf, -0.0, -0.0]).repeat(99)
            weights = [values[: each.topk_weights.numel()].view_as(each.topk_weights) for each in received]
            y = [each.x for each in received]
            _, right = reference.combine(y, received, [idx] * NUM_RANKS, weights, node_of=node_of, **given)[rank]
            assert (right.view(torch.int32) == torch.tensor(-0.0).view(torch.int32)).any()

            leaf = torch.ones(idx.shape, device=device, requires_grad=True)
            out = ep.dispatch(buffer, x.to(device), idx.to(device), leaf, layout=layout)
            mine = weights[rank].to(device)
            (grad,) = torch.autograd.grad(out.topk_weights, leaf, mine)
            back = buffer.combine(out.x.detach(), out.handle, topk_weights=mine).topk_weights
            for seen in (back, grad):
                assert torch.equal(seen.cpu().view(torch.int32), right.view(torch.int32)), layout


@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_weights_keep_their_bits(pools, engine, ranks_per_node):
    pools(NUM_RANKS).run(combine_weights, engine, ranks_per_node)
