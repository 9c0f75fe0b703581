"""Forward: whatever the configuration, every bit is that of ep_dispatcher/reference.py."""

import dataclasses

import pytest
import torch
from conftest import exhaustive, long, on, on_ranks
from lib.dispatch_combine import GRID, Case, check_case, check_results, make_buffer, make_inputs, other_rows, run_case

import ep_dispatcher as ep
from ep_dispatcher import memory, reference
from ep_dispatcher.tools.testing import (
    RankPool,
    device_of,
    different_bits,
    same_bits,
)


@pytest.mark.parametrize("case", GRID, ids=str)
def test_bits_of_the_definition(pools, engine, case):
    check_case(pools, engine, case)


@pytest.mark.parametrize("ranks_per_node, hidden, layout", [(2, 512, "expert"), (1, 2880, "rank"), (2, 48, "rank")])
def test_pairs_of_mxfp8(pools, engine, ranks_per_node, hidden, layout):
    shape = dict(hidden=hidden, payload="pair_mx", layout=layout, tokens="uneven")
    check_case(pools, engine, Case(2, ranks_per_node, torch.bfloat16, **shape))


def run_case_with_lists(rank: int, *given):
    """As ``run_case``, without direct plans: so are the plans of buffers with many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.Shape, "plans_directly", property(lambda shape: False))
        return run_case(rank, *given)


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("case", [case for case in GRID if case.num_ranks == case.ranks_per_node], ids=str)
def test_few_tokens_without_direct_plans(pools, engine, case):
    check_case(pools, engine, dataclasses.replace(case, recv="counted"), run=run_case_with_lists)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(4, 4), (4, 2), (6, 3), (6, 2), (8, 2), (8, 4)])
def test_order_of_the_sums(pools, engine, num_ranks, ranks_per_node, dtype):
    """Tokens with many addends on every rank of every node: another order, or rounding elsewhere, shows."""
    shape = dict(num_topk=12, experts_per_rank=4, layout=("expert", "rank")[num_ranks % 3 == 0])
    check_case(pools, engine, Case(num_ranks, ranks_per_node, dtype, **shape))


@pytest.mark.parametrize(
    "tokens, hidden",
    [("uneven", 128), ("uneven", 1152), ("uneven", 7168), ("some", 1152), long("some", 7168)]
    + [("uneven", hidden) for hidden in (16, 1040, 2880)],
)
@pytest.mark.parametrize(
    "ranks_per_node, payload",
    [(2, "quantize"), exhaustive(1, "quantize"), exhaustive(2, "quantize_pow2"), (2, "quantize_mx")],
)
def test_quantized_rows_of_several_parts(pools, engine, ranks_per_node, payload, tokens, hidden):
    """Kernels quantize 8 scale blocks at a time. Here a row has less, some more, and seven times as many. The last
    block of a row may have fewer elements."""
    shape = dict(tokens=tokens, hidden=hidden, payload=payload, num_topk=9, experts_per_rank=8)
    check_case(pools, engine, Case(2, ranks_per_node, torch.bfloat16, **shape))


@pytest.mark.parametrize("num_topk", [1, 9, 17, 32, 33, 64])
@pytest.mark.parametrize("tokens", ["uneven", "some"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_few_and_many_choices_of_a_token(pools, engine, layout, tokens, num_topk):
    """Lanes share a token's choices: 8, 16 or 32 of them, or each has two. With one item a warp, and with many."""
    many = num_topk > 32
    shape = dict(tokens=tokens, layout=layout, num_topk=num_topk, experts_per_rank=40 if many else 19)
    for num_ranks in (2, 4) if many else (2,):
        check_case(pools, engine, Case(num_ranks, 2, torch.bfloat16, **shape))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
def test_many_tokens(pools, engine, ranks_per_node, layout, threads):
    """More tokens than any engine moves in one piece."""
    shape = dict(tokens="many", num_topk=3, layout=layout, threads=threads)
    check_case(pools, engine, Case(4, ranks_per_node, torch.bfloat16, **shape))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "num_ranks,ranks_per_node",
    [(16, 1), (16, 16), (16, 2), long(24, 24), long(40, 40), long(32, 1), (40, 4)],
)
def test_many_ranks(engine, num_ranks, ranks_per_node):
    """More ranks of a node, and more nodes, than a node has GPUs; more ranks than tokens, and less."""
    shape = dict(num_topk=8, hidden=512, experts_per_rank=3)
    with RankPool(num_ranks, timeout_s=180) as pool:
        for options in (
            dict(tokens="uneven", recv="spare"),
            dict(tokens="few chunks", routing="skewed", layout="rank"),
            dict(tokens="few chunks", routing="masked", payload="quantize", alignment=8),
        ):
            case = Case(num_ranks, ranks_per_node, torch.bfloat16, **shape, **options)
            check_case(lambda _: pool, engine, case)


def run_case_in_groups(rank: int, engine: str, case: Case, members: list[list[int]], inputs: list, again: list):
    groups = [torch.distributed.new_group(ranks) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if rank in ranks)
    position = torch.distributed.get_group_rank(groups[mine], rank)
    return run_case(position, engine, case, inputs[mine], again[mine], None, groups[mine])


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_groups_that_are_not_the_world(pools, engine, ranks_per_node):
    """Two groups side by side, whose ranks are not those of the default group."""
    case, members = Case(2, ranks_per_node, tokens="uneven"), [[0, 2], [1, 3]]
    inputs = [make_inputs(case, seed) for seed in (1, 2)]
    again = [other_rows(case, given) for given in inputs]
    ranks = pools(4).run(run_case_in_groups, engine, case, members, inputs, again)
    for group, given, other in zip(members, inputs, again):
        check_results(case, [ranks[r] for r in group], given, other)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_async_finish_changes_no_bit(rank, engine, ranks_per_node):
    case = Case(2, ranks_per_node, tokens="uneven")
    given = make_inputs(case).on(rank, device_of(engine, rank))
    with make_buffer(case, engine, max_tokens_per_rank=64) as buffer:
        right = buffer.dispatch(*given)
        right_sum = buffer.combine(right.x, right.handle).x
        out = buffer.dispatch(*given, async_finish=True)
        out.event.wait()
        combined = buffer.combine(out.x, out.handle, async_finish=True)
        combined.event.synchronize()
        assert out.event.query() and combined.event.query()
        assert same_bits(out.x, right.x) and same_bits(combined.x, right_sum)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_a_handle_has_the_counts_on_the_host(rank, engine, ranks_per_node):
    case = Case(2, ranks_per_node)
    x, topk_idx, _ = make_inputs(case).on(rank, device_of(engine, rank))
    with make_buffer(case, engine, max_tokens_per_rank=64) as buffer:
        for layout, alignment in (("expert", 1), ("rank", 1), ("expert", 8)):
            out = buffer.dispatch(x, topk_idx, layout=layout, expert_alignment=alignment)
            rows = out.handle.rows_on_host
            assert rows.device.type == "cpu" and torch.equal(rows, out.rows_per_expert.cpu())
            assert out.rows_on_host is rows
            assert buffer.dispatch(x, handle=out.handle).handle.rows_on_host is rows
            # Later counts do not change it.
            none = buffer.dispatch(x, torch.full_like(topk_idx, -1), layout=layout, expert_alignment=alignment)
            assert torch.equal(none.handle.rows_on_host, torch.zeros_like(rows))
            assert torch.equal(rows, out.rows_per_expert.cpu())
        limited = buffer.dispatch(x, topk_idx, max_recv_rows=case.num_ranks * x.shape[0] * case.num_topk)
        if engine == "cuda":
            assert limited.handle.rows_on_host is None  # the host does not wait
        assert torch.equal(limited.rows_on_host, limited.rows_per_expert.cpu())


@pytest.mark.parametrize("ranks_per_node", [4, 2])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@on_ranks(4)
def test_weights_keep_their_bits(rank, engine, layout, ranks_per_node):
    """They only travel, so the sign of a zero does too: as topk_weights and as a gradient."""
    case = Case(4, ranks_per_node, num_topk=4, experts_per_rank=4, routing="masked", layout=layout)
    inputs, options, device = make_inputs(case), dict(num_experts=16, layout=layout), device_of(engine, rank)
    received = reference.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, **options)
    values = torch.tensor([-0.0, 0.0, torch.nan, -1.0, torch.inf, -0.0, -0.0]).repeat(99)
    weights = [values[: each.topk_weights.numel()].view_as(each.topk_weights) for each in received]
    y = [torch.zeros(len(each.x), case.hidden) for each in received]
    _, right = reference.combine(y, received, inputs.topk_idx, weights, node_of=case.node_of, **options)[rank]
    assert different_bits(right, right.masked_fill(right == 0, 0)).any(), "no negative zero"
    with make_buffer(case, engine, max_tokens_per_rank=64) as buffer:
        x, topk_idx, leaf = inputs.on(rank, device)
        out = ep.dispatch(buffer, x, topk_idx, leaf.requires_grad_(), layout=layout)
        mine = weights[rank].to(device)
        (grad,) = torch.autograd.grad(out.topk_weights, leaf, mine)
        back = buffer.combine(y[rank].to(device), out.handle, topk_weights=mine).topk_weights
        assert same_bits(back.cpu(), right) and same_bits(grad.cpu(), right)
