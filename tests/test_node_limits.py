"""Buffer.max_tokens_to_node, between virtual nodes: what it allows, what it refuses, and who must give the same."""

import pytest
import torch
from conftest import exhaustive, long, on, on_ranks
from lib import node_limits
from lib.dispatch_combine import Case, make_buffer
from lib.errors import assert_refused
from lib.nodes import NUM_ROWS, SMALL

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of

SPLITS = [(2, 1), (4, 2), exhaustive(4, 1), long(8, 2)]


@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_a_limit_that_is_enough_changes_nothing(pools, engine, num_ranks, ranks_per_node):
    num_steps = 40 if engine == "cuda" else 12
    pools(num_ranks).run(node_limits.change_routing, engine, Case(num_ranks, ranks_per_node, **SMALL), num_steps)


@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_a_limit_that_is_too_small_leaves_nothing_behind(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(node_limits.too_many_to_node, engine, Case(num_ranks, ranks_per_node, **SMALL), 6)


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2)])
@pytest.mark.parametrize("engine", [on("cuda")])
def test_a_graph_keeps_its_limit(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(node_limits.replay, engine, Case(num_ranks, ranks_per_node, **SMALL))


@pytest.mark.parametrize("num_ranks,num_topk,nodes_of_token", [(4, 2, 4), (8, 8, 4)])
def test_little_more_is_sent_than_what_crosses(pools, engine, num_ranks, num_topk, nodes_of_token):
    captures = engine == "cuda"
    pools(num_ranks).run(node_limits.send_little, engine, num_ranks, num_topk, nodes_of_token, captures)


@on_ranks(2)
def test_decode_layout_has_no_limit(rank, engine):
    device = device_of(engine, rank)
    sizes = dict(hidden=512, num_experts=8, num_topk=2, max_tokens_per_rank=16)
    with ep.Buffer(engine=engine, ranks_per_node=1, max_tokens_to_node=1, **sizes) as buffer:
        x = torch.ones(16, 512, dtype=torch.bfloat16, device=device)
        idx = torch.tensor([[0, 4]], device=device).expand(16, 2).contiguous()
        out = buffer.dispatch(x, idx, layout="decode")
        weights = torch.ones(16, 2, device=device)
        assert buffer.combine(out.x, out.handle, weights=weights).x.eq(2).all()
        buffer.check()


@on_ranks(2)
def test_it_is_the_same_on_all_ranks(rank, engine):
    case, device = Case(2, 1, **SMALL), device_of(engine, rank)
    options = dict(hidden=512, num_experts=8, num_topk=2, max_tokens_per_rank=16, engine=engine)
    with pytest.raises(ValueError, match="max_tokens_to_node: rank 0 gave 5, rank 1 gave 6"):
        ep.Buffer(max_tokens_to_node=5 + rank, **options)
    with make_buffer(case, engine, 16) as buffer:
        assert buffer.max_tokens_to_node is None
        for wrong in (0, -1, 1.5, True, "3"):
            assert_refused("max_tokens_to_node", setattr, buffer, "max_tokens_to_node", wrong)
            assert_refused("max_tokens_to_node", ep.Buffer, max_tokens_to_node=wrong, **options)
        assert buffer.max_tokens_to_node is None
        x = torch.ones(16, case.hidden, dtype=torch.bfloat16, device=device)
        idx = torch.full((16, case.num_topk), -1, device=device)
        for of_ranks, words in (((3, 4), ("3", "4")), ((None, 4), ("no limit", "4")), ((100, 4), ("no limit", "4"))):
            buffer.max_tokens_to_node = of_ranks[rank]
            assert buffer.max_tokens_to_node == of_ranks[rank]
            text = f"max_tokens_to_node: rank 1 gave {words[1]}, rank 0 gave {words[0]}; all ranks must give the same"
            with pytest.raises(ValueError, match=text):
                buffer.dispatch(x, idx, max_recv_rows=NUM_ROWS)
                buffer.check()
        buffer.max_tokens_to_node = 4
        buffer.dispatch(x, idx, max_recv_rows=NUM_ROWS)
        buffer.check()
