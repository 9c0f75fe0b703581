"""Between (virtual) nodes: what crosses, that it is right however the routing changes, and who may form nodes."""

import pytest
from conftest import exhaustive, long, on, on_ranks
from lib import dispatch_combine as grid
from lib.dispatch_combine import Case, expert_rows, make_buffer, to
from lib.nodes import (
    LONG_ROWS,
    NUM_TOKENS,
    SMALL,
    change_routing,
    least_rows,
    make_inputs,
    replay,
    sent_by,
    too_few_rows,
    train,
)

import ep_dispatcher as ep
from ep_dispatcher import buffer_arguments
from ep_dispatcher.tools.testing import device_of

cuda = pytest.mark.parametrize("engine", [on("cuda")])


# ---- what crosses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2), (4, 1)])
@on_ranks()
def test_a_row_crosses_once_per_token_and_node(rank, engine, num_ranks, ranks_per_node):
    case = Case(num_ranks, ranks_per_node, **SMALL)
    device, given = device_of(engine, rank), make_inputs(case, [NUM_TOKENS] * num_ranks, "masked", 3)
    x, idx, weights = given.on(rank, device)
    own, per_node = divmod(rank, case.ranks_per_node)
    rail = [node * case.ranks_per_node + per_node for node in range(case.num_ranks // case.ranks_per_node)]
    slack = 0 if engine == "cuda" else 512  # the CPU engine's messages have headings, and aligned parts

    def expect(sent: list[int], rows: list[int], row_bytes: int) -> None:
        for node, peer in enumerate(rail):
            least = rows[node] * row_bytes
            assert least <= sent[peer] <= least + slack * (node != own), f"to rank {peer}: {sent[peer]}, least {least}"
        assert not any(count for peer, count in enumerate(sent) if peer not in rail), "bytes leave the rail"

    there = least_rows(case, given.topk_idx[rank], rank)
    back = [0] * len(rail)  # tokens of the rail peers that have an expert on this node
    for node, peer in enumerate(rail):
        back[node] = least_rows(case, given.topk_idx[peer], peer)[own]
    tail = -(-case.num_topk * 4 // 16) * 16 if engine == "cuda" else case.num_topk * 4
    with make_buffer(case, engine, NUM_TOKENS) as buffer:
        out, sent, lists = sent_by(buffer, lambda: buffer.dispatch(x, idx, weights))
        expect(sent, there, case.hidden * 2 + tail)
        assert all((lists[peer] > 0) == (peer != rank) for peer in rail)
        _, sent, lists = sent_by(buffer, lambda: buffer.dispatch(x, handle=out.handle))
        expect(sent, there, case.hidden * 2)
        assert all(count <= 80 for count in lists), "a cached dispatch has no lists, only Calls"
        y, row_weights = to(device, expert_rows(case, out, rank))
        _, sent, _ = sent_by(buffer, lambda: buffer.combine(y, out.handle, topk_weights=row_weights))
        if engine == "cuda":
            expect(sent, back, case.hidden * 2 + case.num_topk * 4)
        _, sent, _ = sent_by(buffer, lambda: buffer.combine(y, out.handle))
        expect(sent, back, case.hidden * 2)


# ---- many steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_ranks,ranks_per_node", [(2, 1), (4, 2), exhaustive(4, 1), long(8, 4), exhaustive(8, 2), long(8, 1)]
)
def test_every_step_has_another_routing(pools, engine, num_ranks, ranks_per_node):
    num_steps = 200 if engine == "cuda" else 20
    pools(num_ranks).run(change_routing, engine, Case(num_ranks, ranks_per_node, **SMALL), num_steps)


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), exhaustive(4, 2)])
def test_rows_that_do_not_fit_leave_nothing_behind(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(too_few_rows, engine, Case(num_ranks, ranks_per_node, **SMALL), 6)


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), exhaustive(4, 2), exhaustive(4, 1)])
def test_gradients_of_changing_routing(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(train, engine, Case(num_ranks, ranks_per_node, **SMALL), 40 if engine == "cuda" else 10)


@cuda
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2)])
def test_graphs_replay_between_nodes(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(replay, engine, Case(num_ranks, ranks_per_node, layout="rank", **SMALL))


@cuda
@pytest.mark.parametrize(
    "row", LONG_ROWS, ids=lambda row: f"{row.get('payload', 'rows')}-{row['hidden']}-{row.get('recv')}"
)
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), exhaustive(4, 2), exhaustive(4, 1)])
def test_long_rows_cross_in_pieces(pools, engine, num_ranks, ranks_per_node, row):
    case = Case(num_ranks, ranks_per_node, **row)
    given = grid.make_inputs(case)
    again = grid.other_rows(case, given)
    rows = None if case.recv == "counted" else max(grid.rows_needed(case, given.topk_idx))
    ranks = pools(num_ranks).run(grid.run_case, engine, case, given, again, rows)
    grid.check_results(case, ranks, given, again, rows)


# ---- the peer wire, and who may form nodes --------------------------------------------------------------------------


@cuda
@pytest.mark.parametrize(
    "hosts,options,argument", [("ABAB", {}, "group"), ("AAAA", dict(ranks_per_node=2, num_sms=1), "num_sms")]
)
@on_ranks(4)
def test_nodes_that_the_engine_cannot_serve(rank, engine, hosts, options, argument):
    sizes = dict(hidden=64, num_experts=8, num_topk=2, max_tokens_per_rank=8)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=f"^{argument} "):
        patch.setattr(buffer_arguments, "host_id", lambda: hosts[rank])
        ep.Buffer(engine=engine, **sizes, **options)
