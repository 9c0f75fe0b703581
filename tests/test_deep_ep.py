"""``deep_ep.Buffer`` on our engine: layout, dispatch and combine against what DeepEP's interface promises, densely."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from deep_ep_case import (
    EXPERTS,
    HIDDEN,
    RANKS,
    TOPK,
    Case,
    environment,
    expected_rows,
    make_data,
    num_ranks_of,
    on_ranks,
    opened,
    routed,
    sent,
)

import ep_dispatcher as ep
from ep_dispatcher.integrations.deep_ep import Buffer
from ep_dispatcher.integrations.deep_ep.handle import make_items, set_num_rows
from ep_dispatcher.integrations.deep_ep.layout import dispatch_layout, routing_of_ranks
from ep_dispatcher.integrations.deep_ep.pool import _pools, pool_of

NODES = [None, 2]


def assert_sum(combined, data, case, rank, times=1.0):
    """Every token came back from all its ranks; the engine rounds sums of up to RANKS rows to the dtype."""
    expected = data.x[rank].float() * num_ranks_of(data, case, rank) * times
    torch.testing.assert_close(combined.float(), expected, rtol=2e-2, atol=2e-2)


def assert_missing(items, shapes: list[tuple[int, ...]], dtype: torch.dtype):
    """Items of a handle that the engine does not have have DeepEP's shape and dtype, and hold the largest number."""
    assert [item.shape for item in items] == shapes and {item.dtype for item in items} == {dtype}
    assert all(bool((item == torch.iinfo(dtype).max).all()) for item in items)


@on_ranks()
def test_layout(rank: int, case: Case):
    data = make_data(case, rank)
    with opened(case) as buffer:
        idx = data.topk_idx[rank]
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS)
    assert per_node is None and event.event is None
    assert per_rank.dtype == per_expert.dtype == torch.int32 and in_rank.dtype == torch.bool
    assert in_rank.is_contiguous()
    for other in range(RANKS):
        mask = data.in_rank(case, rank, other)
        assert torch.equal(in_rank[:, other], mask) and int(per_rank[other]) == int(mask.sum())
    assert per_expert.tolist() == [int((idx == expert).sum()) for expert in range(EXPERTS)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("expert", [-(2**31), -7, -2, EXPERTS, EXPERTS + 1, 2**31 - 1])
def test_layout_refuses_experts_that_do_not_exist(expert, dtype):
    with pytest.raises(ValueError, match=f"^topk_idx: given .*, allowed: -1 .*0 to {EXPERTS - 1}$"):
        dispatch_layout(torch.tensor([[0, -1], [EXPERTS - 1, expert]], dtype=dtype), EXPERTS, RANKS)


def test_layout_and_handles_of_several_of_deep_eps_nodes():
    """DeepEP takes 8 ranks for a node; what counts nodes, and its longer handle, need no engine."""
    idx = torch.tensor([[0, 5, 40], [-1, 33, 62], [-1, -1, -1]])  # experts of 16 ranks, 4 each
    per_rank, per_node, per_expert, in_rank = dispatch_layout(idx, 64, 16)
    assert per_node.tolist() == [1, 2] and per_node.dtype == torch.int32
    assert in_rank.nonzero().tolist() == [[0, 0], [0, 1], [0, 10], [1, 8], [1, 15]]
    assert per_rank.sum() == per_expert.sum() == 5
    handle = make_items(in_rank, 12)
    set_num_rows(handle, 5)
    assert handle[0] is in_rank
    assert_missing(handle[1:7], [(2, 12), (16, 12), (2, 12), (2,), (16, 12), (16,)], torch.int32)
    assert_missing(handle[7:8], [(5, 8)], torch.uint8)
    assert_missing(handle[8:], [(3, 2), (0, 8)], torch.int32)
    with pytest.raises(NotImplementedError, match="65 ranks"):
        routing_of_ranks(torch.zeros(2, 65, dtype=torch.bool))


@pytest.mark.parametrize("ranks_per_node, prefix", [(None, ""), (2, ""), (2, "internode_")])
@on_ranks("ranks_per_node")
def test_round_trip(rank: int, case: Case, prefix: str):
    data = make_data(case, rank)
    rows, local_idx, weights, counts = expected_rows(data, case, rank)
    with opened(case) as buffer:
        dispatch, combine = getattr(buffer, f"{prefix}dispatch"), getattr(buffer, f"{prefix}combine")
        for previous, async_finish in ((False, False), (True, True), (True, False)):
            options = dict(async_finish=async_finish, previous_event=buffer.capture() if previous else None)
            recv_x, recv_idx, recv_weights, recv_list, handle, event = dispatch(
                data.x[rank],
                **routed(buffer, data.topk_idx[rank], data.weights[rank]),
                **options,
                config=buffer.get_dispatch_config(RANKS),
            )
            assert (event.event is not None) == async_finish
            with event:
                pass
            assert torch.equal(recv_x, rows) and torch.equal(recv_idx, local_idx)
            assert torch.equal(recv_weights, weights) and recv_list == counts
            assert isinstance(handle, tuple) and len(handle) == 6
            options |= dict(topk_weights=recv_weights, config=buffer.get_combine_config(RANKS))
            combined_x, combined_weights, event = combine(recv_x, handle, **options)
            with event:
                pass
            assert_sum(combined_x, data, case, rank)
            assert torch.equal(combined_weights, data.given_weights(rank))
            assert combine(recv_x, handle)[1] is None


@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks("ranks_per_node")
def test_alignment_and_bias(rank: int, case: Case):
    data = make_data(case, rank)
    rows, _, _, counts = expected_rows(data, case, rank)
    with opened(case) as buffer:
        recv_x, _, _, recv_list, handle, _ = sent(buffer, data, rank, expert_alignment=16)
        assert torch.equal(recv_x, rows)  # padding is of the counts alone
        assert recv_list == [-(-count // 16) * 16 for count in counts]
        plain = buffer.combine(recv_x, handle)[0].float()
        one, two = torch.randn_like(data.x[rank]), torch.randn_like(data.x[rank])
        assert torch.equal(buffer.combine(recv_x, handle, bias=one)[0], (plain + one.float()).bfloat16())
        both = buffer.combine(recv_x, handle, bias=(one, two))[0]
        torch.testing.assert_close(both, (plain + one.float() + two.float()).bfloat16())


@pytest.mark.parametrize("ranks_per_node, hidden", list(zip(NODES, (HIDDEN, HIDDEN + 16), strict=True)))
@on_ranks("ranks_per_node")
def test_float8_pairs(rank: int, case: Case, hidden: int):
    data = make_data(case, rank, hidden=hidden)
    pairs = [ep.quantize(x) for x in data.x]
    columns = torch.arange(HIDDEN // 256, device=data.x[0].device, dtype=torch.int32)
    with opened(case) as buffer:
        layout = routed(buffer, data.topk_idx[rank], data.weights[rank])

        def scales_of(source: int, kind: str):
            plain = pairs[source][1]
            if kind == "column-major":
                return plain.t().contiguous().t()
            if kind == "one a row":
                return plain[:, 1]
            return (
                plain if kind == "float32" else torch.arange(len(plain), device=plain.device).int()[:, None] - columns
            )

        for kind in ("float32", "column-major", "one a row", "int32"):
            taken = [data.in_rank(case, source, rank) for source in range(RANKS)]
            rows = torch.cat([pair[0].view(torch.uint8)[mask] for pair, mask in zip(pairs, taken)])
            scales = torch.cat([scales_of(source, kind)[mask] for source, mask in enumerate(taken)])
            x = (pairs[rank][0], scales_of(rank, kind))
            recv_x, _, _, _, handle, _ = buffer.dispatch(x, **layout)
            again, *rest, _ = buffer.dispatch(x, handle=handle)
            assert rest == [None] * 4
            for got in (recv_x, again):
                assert got[0].dtype == torch.float8_e4m3fn and got[1].dtype == scales.dtype
                assert torch.equal(got[0].view(torch.uint8), rows) and torch.equal(got[1], scales)
                assert got[1].is_contiguous()
        combined_x, _, _ = buffer.combine(
            ep.dequantize((recv_x[0], torch.ones_like(recv_x[0][:, ::128]).float())), handle
        )
        assert combined_x.shape == data.x[rank].shape


@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks("ranks_per_node")
def test_other_rows_by_one_handle(rank: int, case: Case):
    """DeepEP's handle serves rows of any size and dtype, also through another Buffer of the group."""
    data = make_data(case, rank)
    with opened(case) as second:
        with opened(case) as first:  # the other is still there after it
            handle = sent(first, data, rank)[4]
        for hidden, dtype in ((HIDDEN, torch.float32), (HIDDEN // 2, torch.bfloat16), (HIDDEN // 2, torch.uint8)):
            other = make_data(case, rank, seed=1, hidden=hidden)
            other.x = [(x * 50).to(dtype) for x in other.x]
            other.topk_idx = data.topk_idx
            rows, *_ = expected_rows(other, case, rank)
            for _ in range(2):
                recv_x, *_ = second.dispatch(other.x[rank], handle=handle)
                assert recv_x.dtype == dtype and torch.equal(recv_x, rows)
        halves = make_data(case, rank, seed=2, dtype=torch.float16, hidden=64)
        halves.topk_idx = data.topk_idx
        rows, *_ = expected_rows(halves, case, rank)
        assert_sum(second.combine(rows, handle)[0], halves, case, rank)  # rows that no dispatch has brought


@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks("ranks_per_node")
def test_without_topk(rank: int, case: Case):
    data = make_data(case, rank)
    rows, _, _, counts = expected_rows(data, case, rank)
    with opened(case) as buffer:
        layout = routed(buffer, data.topk_idx[rank])
        recv_x, recv_idx, recv_weights, recv_list, handle, _ = buffer.dispatch(
            data.x[rank], expert_alignment=4, **layout
        )
        assert recv_idx is None and recv_weights is None and torch.equal(recv_x, rows)
        assert recv_list == [-(-count // 4) * 4 for count in counts]
        ends = torch.tensor([int(data.in_rank(case, source, rank).sum()) for source in range(RANKS)]).cumsum(0)
        assert torch.equal(handle[0][:, rank].cpu(), ends.int())
        assert torch.equal(buffer.dispatch(data.x[rank], handle=handle)[0], rows)
        assert_sum(buffer.combine(recv_x, handle)[0], data, case, rank)


@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks("ranks_per_node")
def test_num_worst_tokens(rank: int, case: Case):
    data = make_data(case, rank)
    rows, local_idx, weights, _ = expected_rows(data, case, rank)
    worst = RANKS * max(case.lengths)
    with opened(case) as buffer:
        recv_x, recv_idx, recv_weights, recv_list, handle, _ = sent(buffer, data, rank, num_worst_tokens=worst)
        assert recv_list == [] and recv_x.shape == (worst, HIDDEN) and recv_idx.shape == (worst, TOPK)
        num = len(rows)
        assert torch.equal(recv_x[:num], rows) and torch.equal(recv_idx[:num], local_idx)
        assert torch.equal(recv_weights[:num], weights) and bool((recv_idx[num:] == -1).all())
        again, *_ = buffer.dispatch(data.x[rank], handle=handle, num_worst_tokens=worst)
        assert torch.equal(again, recv_x)
        wider = data.x[rank].repeat(1, 2)
        assert torch.equal(buffer.dispatch(wider, handle=handle)[0][:num], rows.repeat(1, 2))
        recv_weights[num:] = 7  # of no token
        combined, combined_weights, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
        assert_sum(combined, data, case, rank)
        assert torch.equal(combined_weights, data.given_weights(rank))


@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks("ranks_per_node", exact=True)
def test_what_only_deep_eps_tests_look_at(rank: int, case: Case):
    """What DeepEP's own tests look at."""
    data = make_data(case, rank)
    with opened(case) as buffer:
        recv_x, recv_idx, recv_weights, _, handle, _ = sent(buffer, data, rank)
        expected = torch.stack(
            [torch.stack([data.in_rank(case, s, r).sum() for r in range(RANKS)]) for s in range(RANKS)]
        )
        assert torch.equal(handle[0], expected.cumsum(0).int())
        everywhere = torch.where(recv_idx < 0, 2.0, recv_weights)  # as if other ranks' experts had weights here too
        combined = buffer.combine(recv_x, handle, topk_weights=everywhere)[1]
        idx, num_ranks = data.topk_idx[rank], num_ranks_of(data, case, rank)
        here = torch.where(idx >= 0, data.weights[rank], 0.0)
        torch.testing.assert_close(combined, here + 2.0 * (num_ranks - (idx >= 0).float()))


@on_ranks()
def test_buffers_grow_when_one_rank_brings_more(rank: int, case: Case):
    """At any time and alone; older handles stay good."""
    with opened(case) as buffer:
        kept = []
        for step, length in enumerate((4, 9, 3, 40)):
            lengths = tuple(length if r == step else 2 for r in range(RANKS))
            data = make_data(Case(case.engine, lengths=lengths), rank, seed=step)
            recv_x, _, _, _, handle, _ = sent(buffer, data, rank)
            kept.append((data, lengths, recv_x, handle))
        for data, lengths, recv_x, handle in kept:
            assert_sum(buffer.combine(recv_x, handle)[0], data, Case(case.engine, lengths=lengths), rank)
        (sizes,) = (
            [one.config.max_tokens_per_rank for one in made] for made in pool_of(dist.group.WORLD)._buffers.values()
        )
    assert sizes == [4, 9, 40]


@on_ranks()
def test_a_given_size_is_kept(rank: int, case: Case):
    data = make_data(case, rank)
    with opened(case, dict(EP_DISPATCHER_MAX_TOKENS_PER_RANK="20")) as buffer:
        sent(buffer, data, rank)
        many = torch.zeros(21, TOPK, dtype=torch.int64, device=data.x[0].device)
        many[:, 1:] = -1
        layout = routed(buffer, many, many.float())
        with pytest.raises(ValueError, match="x: given 21 tokens, allowed: up to EP_DISPATCHER_MAX_TOKENS_PER_RANK=20"):
            x = data.x[0].new_zeros(21, HIDDEN)
            buffer.dispatch(x, **layout)


@on_ranks()
def test_memory_goes_with_the_last_buffer_and_handle(rank: int, case: Case):
    import gc

    data = make_data(case, rank)
    with environment(case):
        buffer = Buffer(dist.group.WORLD)
        with pytest.raises(ValueError, match="explicitly_destroy"):
            buffer.destroy()
        recv_x, _, _, _, handle, _ = sent(buffer, data, rank)
        del buffer
        gc.collect()
        assert dist.group.WORLD in _pools  # the handle keeps it, for a buffer that comes later
        buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
        assert_sum(buffer.combine(recv_x, handle)[0], data, case, rank)
        assert buffer.runtime.get_num_rdma_ranks() == 1 and buffer.runtime.is_available()
        buffer.destroy()
        assert buffer.runtime is None
        with pytest.raises(ValueError, match="destroyed"):
            buffer.combine(recv_x, handle)
        del buffer, handle
        gc.collect()
        assert dist.group.WORLD not in _pools


@on_ranks()
def test_errors(rank: int, case: Case):
    data = make_data(case, rank)
    idx, weights, x = data.topk_idx[rank], data.weights[rank], data.x[rank]
    with opened(case, low_latency_mode=False) as buffer:
        layout = routed(buffer, idx)
        recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)

        def refused(kind, match, call):
            with pytest.raises(kind, match=match):
                call()

        refused(ValueError, "^num_experts: given 7", lambda: buffer.get_dispatch_layout(idx, 7))
        refused(ValueError, "^num_tokens_per_rank", lambda: buffer.dispatch(x, topk_idx=idx))
        refused(ValueError, "^num_worst_tokens", lambda: buffer.dispatch(x, num_worst_tokens=9, **layout))
        refused(ValueError, "^topk_idx", lambda: buffer.dispatch(x, handle=handle, topk_idx=idx))
        for other in (tuple(handle)[:5], list(range(6)), (), None):
            refused(ValueError, "^handle: given", partial(buffer.combine, recv_x, other))
        refused(ValueError, "^x", lambda: buffer.combine(recv_x.new_zeros(len(recv_x) + 1, HIDDEN), handle))
        refused(ValueError, "low_latency_mode", lambda: buffer.low_latency_dispatch(x, idx, 32, EXPERTS))
        refused(NotImplementedError, r"x\[1\]: 3 scales", lambda: buffer.dispatch((x.byte(), x[:, :3].float()), handle))
        refused(NotImplementedError, "x: a pair", lambda: buffer.dispatch((x, x[:, :1].float()), handle))
        shapes = [(RANKS, RANKS), (RANKS, 10), (RANKS, 10), (len(recv_x),), (len(x), RANKS)]
        assert_missing((*handle[:4], handle[5]), shapes, torch.int32)
        assert torch.equal(handle[4], layout["is_token_in_rank"])
        if case.engine == "cpu" and rank != 1:  # on a GPU these are asserts on the device, which end the process
            other = layout | dict(is_token_in_rank=~layout["is_token_in_rank"])
            refused(ValueError, "another", lambda: buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **other))
            if bool((recv_idx < 0).any()):
                ones = torch.ones_like(recv_weights)
                refused(NotImplementedError, "EXACT", lambda: buffer.combine(recv_x, handle, topk_weights=ones))
        recv_idx += 0
        refused(ValueError, "in place", lambda: buffer.combine(recv_x, handle, topk_weights=recv_weights))
        assert_sum(buffer.combine(recv_x, handle)[0], data, case, rank)  # none of them has cost the buffer anything


@on_ranks()
def test_a_rank_that_does_not_come_is_named(rank: int, case: Case):
    data = make_data(case, rank)
    with environment(case, EP_DISPATCHER_TIMEOUT_S="1"):
        buffer = Buffer(dist.new_group())  # of its own: gloo cannot use one again after this
        layout = routed(buffer, data.topk_idx[rank], data.weights[rank])
        if rank != 2:
            with pytest.raises(ep.PeerTimeoutError, match="agree on the number of tokens") as caught:
                buffer.dispatch(data.x[rank], **layout)
            assert caught.value.late_ranks == (2,)
