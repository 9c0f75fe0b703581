"""``deep_ep.Buffer`` on our engine: layout, dispatch and combine against what DeepEP's interface promises, densely."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from lib.deep_ep_case import (
    EXPERTS,
    HIDDEN,
    RANKS,
    TOPK,
    Case,
    assert_received,
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
from ep_dispatcher.integrations.deep_ep import Buffer, destroy_buffers
from ep_dispatcher.integrations.deep_ep.buffer_pool import pool_of
from ep_dispatcher.integrations.deep_ep.handle import make_items, set_num_rows
from ep_dispatcher.integrations.deep_ep.layout import dispatch_layout, routing_of_ranks

NODES = [None, 2]


def assert_sum(combined, data, rank):
    """Every token came back from all its ranks; the engine rounds sums of up to RANKS rows to the dtype."""
    expected = data.x[rank].float() * num_ranks_of(data, rank)
    torch.testing.assert_close(combined.float(), expected, rtol=2e-2, atol=2e-2)


def assert_missing(items, shapes: list[tuple[int, ...]], dtype: torch.dtype):
    """Items of a handle that the engine does not have have DeepEP's shape and dtype, and hold the largest number."""
    assert [item.shape for item in items] == shapes and {item.dtype for item in items} == {dtype}
    assert all(bool((item == torch.iinfo(dtype).max).all()) for item in items)


@on_ranks()
def test_layout(rank: int, case: Case):
    data = make_data(case, rank)
    idx = data.topk_idx[rank]
    with opened(case) as buffer:
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS)
        assert buffer.get_dispatch_layout(idx, EXPERTS, buffer.capture(), async_finish=True)[-1].event is not None
    assert per_node is None and event.event is None and in_rank.is_contiguous()
    assert (per_rank.dtype, per_expert.dtype, in_rank.dtype) == (torch.int32, torch.int32, torch.bool)
    assert torch.equal(in_rank, torch.stack([data.in_rank(rank, other) for other in range(RANKS)], 1))
    assert torch.equal(per_rank, in_rank.sum(0).int())
    assert per_expert.tolist() == [int((idx == expert).sum()) for expert in range(EXPERTS)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("expert", [-(2**31), -7, -2, EXPERTS, EXPERTS + 1, 2**31 - 1])
def test_layout_refuses_experts_that_do_not_exist(expert, dtype):
    with pytest.raises(ValueError, match=rf"^topk_idx\[1, 1\] is {expert}, but has to be -1 .*0 to {EXPERTS - 1}$"):
        dispatch_layout(torch.tensor([[0, -1], [EXPERTS - 1, expert]], dtype=dtype), EXPERTS, RANKS)
    with pytest.raises(ValueError, match="^num_experts is 7"):
        dispatch_layout(torch.zeros(1, 1, dtype=dtype), 7, RANKS)


def test_layout_and_handles_of_several_of_deep_eps_nodes():
    """DeepEP takes 8 ranks for a node; what counts nodes, and its longer handle, need no engine."""
    idx = torch.tensor([[0, 5, 40], [-1, 33, 62], [-1, -1, -1]])  # experts of 16 ranks, 4 each
    per_rank, per_node, per_expert, in_rank, _ = dispatch_layout(idx, 64, 16)
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
    with opened(case) as buffer:
        layout = routed(buffer, data.topk_idx[rank], data.weights[rank])
        dispatch, combine = getattr(buffer, f"{prefix}dispatch"), getattr(buffer, f"{prefix}combine")
        for previous, async_finish in ((False, False), (True, True), (True, False)):
            options = dict(async_finish=async_finish, previous_event=buffer.capture() if previous else None)
            options |= dict(config=buffer.get_dispatch_config(RANKS), allocate_on_comm_stream=previous and async_finish)
            received = recv_x, _, recv_weights, _, handle, event = dispatch(data.x[rank], **layout, **options)
            assert (event.event is not None) == async_finish
            with event:
                pass
            assert_received(received, data, rank)
            assert isinstance(handle, tuple) and len(handle) == 6
            combined_x, combined_weights, event = combine(recv_x, handle, topk_weights=recv_weights, **options)
            with event:
                pass
            assert_sum(combined_x, data, rank)
            assert torch.equal(combined_weights, data.given_weights(rank))
            assert combine(recv_x, handle)[1] is None
            again, *_, event = dispatch(data.x[rank], handle=handle, **options)
            with event:
                pass
            assert torch.equal(again, recv_x)


@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks("ranks_per_node")
def test_alignment_and_bias(rank: int, case: Case):
    data = make_data(case, rank)
    with opened(case) as buffer:
        received = recv_x, _, _, _, handle, _ = sent(buffer, data, rank, expert_alignment=16)
        assert_received(received, data, rank, alignment=16)  # padding is of the counts alone
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

        for kind in ("float32", "column-major", "one a row", "int32"):
            scales = {
                "float32": lambda plain: plain,
                "column-major": lambda plain: plain.t().contiguous().t(),
                "one a row": lambda plain: plain[:, 1],
                "int32": lambda plain: torch.arange(len(plain), device=plain.device).int()[:, None] - columns,
            }[kind]
            taken = [data.in_rank(source, rank) for source in range(RANKS)]
            wanted = torch.cat([pair[0].view(torch.uint8)[mask] for pair, mask in zip(pairs, taken)])
            wanted_scales = torch.cat([scales(pair[1])[mask] for pair, mask in zip(pairs, taken)])
            x = pairs[rank][0], scales(pairs[rank][1])
            recv_x, _, _, _, handle, _ = buffer.dispatch(x, **layout)
            again, *rest, _ = buffer.dispatch(x, handle=handle)
            assert rest == [None] * 4
            for got, got_scales in (recv_x, again):
                assert got.dtype == torch.float8_e4m3fn and torch.equal(got.view(torch.uint8), wanted)
                assert got_scales.dtype == wanted_scales.dtype and torch.equal(got_scales, wanted_scales)
                assert got_scales.is_contiguous()
        assert buffer.combine(recv_x[0].bfloat16(), handle)[0].shape == data.x[rank].shape


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
            rows, *_ = expected_rows(other, rank)
            for _ in range(2):
                recv_x, *_ = second.dispatch(other.x[rank], handle=handle)
                assert recv_x.dtype == dtype and torch.equal(recv_x, rows)
        halves = make_data(case, rank, seed=2, dtype=torch.float16, hidden=64)
        halves.topk_idx = data.topk_idx
        rows, *_ = expected_rows(halves, rank)
        assert_sum(second.combine(rows, handle)[0], halves, rank)  # rows that no dispatch has brought


@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks("ranks_per_node")
def test_without_topk(rank: int, case: Case):
    data = make_data(case, rank)
    rows, _, _, counts = expected_rows(data, rank)
    with opened(case) as buffer:
        layout = routed(buffer, data.topk_idx[rank])
        recv_x, recv_idx, recv_weights, recv_list, handle, _ = buffer.dispatch(
            data.x[rank], expert_alignment=4, **layout
        )
        assert recv_idx is None and recv_weights is None and torch.equal(recv_x, rows)
        assert recv_list == [-(-count // 4) * 4 for count in counts]
        ends = torch.tensor([int(data.in_rank(source, rank).sum()) for source in range(RANKS)]).cumsum(0)
        assert torch.equal(handle[0][:, rank].cpu(), ends.int())
        assert torch.equal(buffer.dispatch(data.x[rank], handle=handle)[0], rows)
        assert_sum(buffer.combine(recv_x, handle)[0], data, rank)


@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks("ranks_per_node")
def test_num_worst_tokens(rank: int, case: Case):
    data = make_data(case, rank)
    worst, num = RANKS * max(case.lengths), len(expected_rows(data, rank)[0])
    with opened(case) as buffer:
        received = recv_x, _, recv_weights, _, handle, _ = sent(buffer, data, rank, num_worst_tokens=worst)
        assert_received(received, data, rank, worst=worst)
        again, *_ = buffer.dispatch(data.x[rank], handle=handle, num_worst_tokens=worst)
        assert torch.equal(again, recv_x)
        wider = data.x[rank].repeat(1, 2)
        assert torch.equal(buffer.dispatch(wider, handle=handle)[0][:num], recv_x[:num].repeat(1, 2))
        recv_weights[num:] = 7  # of no token
        combined, combined_weights, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
        assert_sum(combined, data, rank)
        assert torch.equal(combined_weights, data.given_weights(rank))


@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks("ranks_per_node", exact=True)
def test_what_only_deep_eps_tests_look_at(rank: int, case: Case):
    data = make_data(case, rank)
    with opened(case) as buffer:
        recv_x, recv_idx, recv_weights, _, handle, _ = sent(buffer, data, rank)
        counts = torch.tensor([[data.in_rank(s, r).sum() for r in range(RANKS)] for s in range(RANKS)])
        assert torch.equal(handle[0].cpu(), counts.cumsum(0).int())
        everywhere = torch.where(recv_idx < 0, 2.0, recv_weights)  # as if other ranks' experts had weights here too
        combined = buffer.combine(recv_x, handle, topk_weights=everywhere)[1]
        others = num_ranks_of(data, rank) - (data.topk_idx[rank] >= 0).float()
        torch.testing.assert_close(combined, data.given_weights(rank) + 2.0 * others)


@on_ranks()
def test_buffers_grow_when_one_rank_brings_more(rank: int, case: Case):
    """At any time and alone; older handles stay good."""
    with opened(case) as buffer:
        kept = []
        for step, length in enumerate((4, 9, 3, 40)):
            lengths = tuple(length if r == step else 2 for r in range(RANKS))
            data = make_data(replace(case, lengths=lengths), rank, seed=step)
            recv_x, _, _, _, handle, _ = sent(buffer, data, rank)
            kept.append((data, recv_x, handle))
        for data, recv_x, handle in kept:
            assert_sum(buffer.combine(recv_x, handle)[0], data, rank)
        (sizes,) = (
            [one.config.max_tokens_per_rank for one in made] for made in pool_of(dist.group.WORLD)._buffers.values()
        )
    assert sizes == [4, 9, 40]


@on_ranks()
def test_a_given_size_is_kept(rank: int, case: Case):
    data = make_data(case, rank)
    with opened(case, dict(EP_DISPATCHER_MAX_TOKENS_PER_RANK="20")) as buffer:
        sent(buffer, data, rank)
        many = torch.full((21, TOPK), -1, dtype=torch.int64, device=data.x[0].device)
        with pytest.raises(ValueError, match="x has 21 tokens on rank ., but at most EP_DISPATCHER_MAX"):
            buffer.dispatch(data.x[0].new_zeros(21, HIDDEN), **routed(buffer, many, many.float()))


@on_ranks()
def test_memory_stays_until_it_is_destroyed(rank: int, case: Case):
    """It went with the last buffer and handle, which Python frees at different times on different ranks."""
    data = make_data(case, rank)
    with environment(case):
        buffer = Buffer(dist.group.WORLD)
        with pytest.raises(ValueError, match="explicitly_destroy"):
            buffer.destroy()
        recv_x, _, _, _, handle, _ = sent(buffer, data, rank)
        del buffer
        gc.collect()
        assert pool_of(dist.group.WORLD)._made
        buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
        assert_sum(buffer.combine(recv_x, handle)[0], data, rank)
        assert buffer.runtime.get_num_rdma_ranks() == 1 and buffer.runtime.is_available()
        buffer.destroy()
        assert buffer.runtime is None
        with pytest.raises(ValueError, match="destroyed"):
            buffer.combine(recv_x, handle)
        buffer = Buffer(dist.group.WORLD)
        assert_sum(buffer.combine(recv_x, handle)[0], data, rank)  # the first one was not to be destroyed
        destroy_buffers()
        with pytest.raises(ValueError, match="destroyed"):
            buffer.combine(recv_x, handle)
        assert_received(sent(buffer, data, rank), data, rank)
        destroy_buffers()
        assert not pool_of(dist.group.WORLD)._made


@on_ranks()
def test_what_a_handle_does_not_have_and_wrong_values(rank: int, case: Case):
    """test_deep_ep_arguments.py has every argument alone."""
    data = make_data(case, rank)
    x, idx, weights = data.of(rank)
    with opened(case, low_latency_mode=False) as buffer:
        layout = routed(buffer, idx, weights)
        recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(x, **layout)
        shapes = [(RANKS, RANKS), (RANKS, 10), (RANKS, 10), (len(recv_x),), (len(x), RANKS)]
        assert_missing((*handle[:4], handle[5]), shapes, torch.int32)
        assert torch.equal(handle[4], layout["is_token_in_rank"])
        if case.engine == "cpu" and rank != 1:  # on a GPU these are asserts on the device, which end the process
            with pytest.raises(ValueError, match="^is_token_in_rank has another routing"):
                buffer.dispatch(x, **layout | dict(is_token_in_rank=~handle[4]))
        recv_idx += 0
        with pytest.raises(ValueError, match="^topk_weights cannot be combined after a change .* in place"):
            buffer.combine(recv_x, handle, topk_weights=recv_weights)
        assert_sum(buffer.combine(recv_x, handle)[0], data, rank)  # none of them has cost the buffer anything


@on_ranks()
def test_a_rank_that_does_not_come_is_named(rank: int, case: Case):
    data = make_data(case, rank)
    with environment(case, EP_DISPATCHER_TIMEOUT_S="3"):
        buffer = Buffer(dist.new_group())  # of its own: gloo cannot use one again after this
        layout = routed(buffer, data.topk_idx[rank], data.weights[rank])
        if rank != 2:
            with pytest.raises(ep.PeerTimeoutError, match="compare the settings") as caught:
                buffer.dispatch(data.x[rank], **layout)
            assert caught.value.late_ranks == (2,)
