"""Buffer.plan: the plan of a routing, made before its rows are ready."""

import pytest
import torch
from conftest import on_ranks
from lib.errors import assert_refused
from lib.round_trip import device, inputs, make_buffer

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import same_bits


def tensors_of(out: ep.DispatchOutput) -> list:
    rows = out.x if isinstance(out.x, tuple) else (out.x,)
    return [*rows, out.topk_weights, out.topk_idx, out.tokens_per_expert, out.rows_per_expert]


def assert_same(got, wanted) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert (a is None and b is None) or same_bits(a, b)


@pytest.mark.parametrize("num_ranks, ranks_per_node", [(2, None), (4, 2)])
@on_ranks()
def test_a_plan_first_gives_the_same_bits(rank, engine, num_ranks, ranks_per_node):
    """A dispatch with a plan gives the bits of one that plans itself, and so do combine and the gradients."""
    with make_buffer(engine=engine, ranks_per_node=ranks_per_node) as buffer:
        for seed, (layout, alignment) in enumerate([("expert", 1), ("expert", 8), ("rank", 1)]):
            x, topk_idx, topk_weights = inputs(rank, seed=seed, device=device(buffer))
            options = dict(layout=layout, expert_alignment=alignment)
            wanted = buffer.dispatch(x, topk_idx, topk_weights, **options)
            for max_recv_rows in (None, wanted.handle.num_rows):
                handle = buffer.plan(topk_idx.int(), max_recv_rows=max_recv_rows, **options)
                assert (handle.num_tokens, handle.num_rows) == (len(x), wanted.handle.num_rows)
                if max_recv_rows is None:
                    assert torch.equal(handle.rows_on_host, wanted.rows_per_expert.cpu())
                out = buffer.dispatch(x, topk_weights=topk_weights, handle=handle)
                assert out.handle is handle
                assert_same(tensors_of(out), tensors_of(wanted))
                res, right = (
                    buffer.combine(wanted.x, h, topk_weights=wanted.topk_weights) for h in (handle, wanted.handle)
                )
                assert_same((res.x, res.topk_weights), (right.x, right.topk_weights))
            # A plan serves every kind of row, and the backward.
            leaf = x.clone().requires_grad_()
            rows = ep.dispatch(buffer, leaf, topk_weights=topk_weights, handle=handle).x
            ep.combine(buffer, rows, handle).sum().backward()
            again = x.clone().requires_grad_()
            rows = ep.dispatch(buffer, again, topk_idx, topk_weights, **options)
            ep.combine(buffer, rows.x, rows.handle).sum().backward()
            assert_same([leaf.grad], [again.grad])


@on_ranks(2)
def test_a_plan_serves_pairs(rank, engine):
    with make_buffer(hidden=256, engine=engine) as buffer:
        _, topk_idx, topk_weights = inputs(rank, device=device(buffer))
        pair = ep.quantize(torch.randn(len(topk_idx), 256, dtype=torch.bfloat16, device=topk_idx.device))
        out = buffer.dispatch(pair, topk_weights=topk_weights, handle=buffer.plan(topk_idx))
        assert_same(tensors_of(out), tensors_of(buffer.dispatch(pair, topk_idx, topk_weights)))


@on_ranks(1)
def test_a_plan_finds_a_repeated_expert(rank, engine):
    """On the rank that gave it. test_errors.py has the other mistakes."""
    with make_buffer(engine=engine) as buffer:
        topk_idx = inputs(rank, device=device(buffer))[1]
        topk_idx[0] = 1
        assert_refused("topk_idx[0, 1]", buffer.plan, topk_idx)
