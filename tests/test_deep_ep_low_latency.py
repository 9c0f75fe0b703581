"""The low-latency methods of ``deep_ep.Buffer`` against what DeepEP's interface promises, densely."""

import contextlib
import itertools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive
from lib.deep_ep_case import EXPERTS, LOCAL, RANKS, Case, Data, make_data, on_ranks, opened, routed
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import reference
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.integrations.deep_ep import Buffer
from ep_dispatcher.integrations.deep_ep.buffer_pool import BufferPool, DecodeBuffer
from ep_dispatcher.tools.testing import device_of

HIDDEN, MOST = 512, 24  # a hidden that four exponents fit into; tokens of a rank at most
LOW_32_BITS = (1 << 32) - 1
NODES = [None, 2]


def dispatch(buffer, x: Tensor, idx: Tensor, *stats: Tensor, **options):
    return buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, *stats, **dict(use_fp8=False) | options)


def sent_to(data: Data, expert: int) -> list[Tensor]:
    """The tokens of every rank that choose the expert, in order."""
    return [(idx == expert).any(1).nonzero().flatten() for idx in data.topk_idx]


def check_handle(data: Data, rank: int, handle, recv_count, exact: bool) -> None:
    src_info, ranges, most, hidden, num_experts = handle
    assert (most, hidden, num_experts) == (MOST, HIDDEN, EXPERTS) and recv_count.dtype == torch.int32
    assert src_info.shape == (LOCAL, RANKS * MOST) and src_info.dtype == torch.int32
    assert ranges.shape == (LOCAL, RANKS) and ranges.dtype == torch.int64
    assert exact or all(bool((item == torch.iinfo(item.dtype).max).all()) for item in (src_info, ranges))
    for local in range(LOCAL):
        tokens = sent_to(data, rank * LOCAL + local)
        assert int(recv_count[local]) == sum(map(len, tokens))
        for source, expected in enumerate(tokens if exact else ()):
            begin, count = int(ranges[local, source]) >> 32, int(ranges[local, source]) & LOW_32_BITS
            assert count == len(expected) and begin == sum(map(len, tokens[:source]))
            assert src_info[local, begin : begin + count].tolist() == expected.tolist()


def as_float32(scales: Tensor) -> Tensor:
    """The scales themselves, or those whose exponents are packed by four."""
    if scales.dtype == torch.float32:
        return scales
    return (scales.clone(memory_format=torch.contiguous_format).view(torch.uint8).int() << 23).view(torch.float32)


@pytest.mark.parametrize(
    "ranks_per_node, exact, hook, float8",
    [
        *itertools.product(NODES, [False, True], [False, True], [None]),
        (None, True, True, dict(use_fp8=True)),
        (None, False, True, dict(use_fp8=True, round_scale=True)),
        (None, False, True, dict(use_fp8=True, round_scale=True, use_ue8m0=True)),
    ],
)
@on_ranks("ranks_per_node", "exact")
def test_dispatch_brings_the_tokens_of_each_expert(rank: int, case: Case, hook: bool, float8: dict | None):
    use_fp8, use_ue8m0, round_scale = ((float8 or {}).get(name) for name in ("use_fp8", "use_ue8m0", "round_scale"))
    data = make_data(case, rank, hidden=HIDDEN)
    x, idx, _ = data.of(rank)
    with opened(case) as buffer:
        stats = torch.arange(LOCAL, dtype=torch.int32, device=x.device)
        recv_x, recv_count, handle, event, receive = dispatch(
            buffer, x, idx, stats, async_finish=not hook, return_recv_hook=hook, **float8 or {}
        )
        receive() if hook else event.current_stream_wait()
        assert (receive is None) != hook and (event.event is None) == hook
        rows, scales = recv_x if use_fp8 else (recv_x, None)
        if hook:
            assert event.extra_tensors is None
        else:
            used = (x, idx, stats, rows, *([scales] if use_fp8 else []), recv_count)
            assert {t.data_ptr() for t in used} <= {t.data_ptr() for t in event.extra_tensors}
        check_handle(data, rank, handle, recv_count, case.exact)
        assert stats.tolist() == [local + int(recv_count[local]) for local in range(LOCAL)]
        assert rows.shape == (LOCAL, RANKS * MOST, HIDDEN) and rows.is_contiguous()
        assert rows.dtype == (torch.float8_e4m3fn if use_fp8 else torch.bfloat16)
        if use_fp8:
            assert scales.dtype == (torch.int32 if use_ue8m0 else torch.float32)
            assert scales.shape == (LOCAL, RANKS * MOST, HIDDEN // (512 if use_ue8m0 else 128))
            assert scales.transpose(1, 2).is_contiguous()
        for local in range(LOCAL):
            tokens, num = sent_to(data, rank * LOCAL + local), int(recv_count[local])
            expected = torch.cat([x[t] for x, t in zip(data.x, tokens)])
            if use_fp8:
                wanted = ep.quantize(expected, "e4m3_1x128_pow2" if round_scale else "e4m3_1x128")
                assert torch.equal(rows[local, :num].view(torch.uint8), wanted.rows.view(torch.uint8))
                assert torch.equal(as_float32(scales[local, :num]), wanted.scales)
            else:
                assert torch.equal(rows[local, :num], expected)


def assert_sum(combined: Tensor, case: Case, x: Tensor, idx: Tensor, weights: Tensor, multiply: bool = False) -> None:
    """This rank's sums are the reference's. Experts return their rows, or ``multiply`` them by their number + 1."""

    def by_rank(t: Tensor) -> list[Tensor]:
        return [t.cpu() if rank == dist.get_rank() else t[:0].cpu() for rank in range(RANKS)]

    layout = dict(num_experts=EXPERTS, layout="decode")
    received = reference.dispatch(by_rank(x), by_rank(idx), None, max_tokens_per_rank=MOST, **layout)
    factor = (
        torch.arange(1, EXPERTS + 1).repeat_interleave(RANKS * MOST).view(RANKS, -1, 1) if multiply else RANKS * [1]
    )
    y = [one.x * times for one, times in zip(received, factor)]
    node_of = [rank // (case.ranks_per_node or RANKS) for rank in range(RANKS)]
    sums = reference.combine(y, received, by_rank(idx), node_of=node_of, factors=by_rank(weights), **layout)
    assert torch.equal(combined.cpu(), sums[dist.get_rank()][0])


@pytest.mark.parametrize("ranks_per_node", NODES)
@pytest.mark.parametrize("zero_copy, use_out, hook", [(False, False, True), (True, True, False)])
@on_ranks("ranks_per_node")
def test_combine(rank: int, case: Case, zero_copy: bool, use_out: bool, hook: bool):
    """Experts multiply by their number + 1. Rows that nobody owns are NaN, and so are weights that nobody uses."""
    data = make_data(case, rank, hidden=HIDDEN)
    idx, weights = data.topk_idx[rank], data.weights[rank].clone()
    weights[idx < 0] = float("nan")
    with opened(case) as buffer:
        for _ in range(2):
            recv_x, recv_count, handle, _, _ = dispatch(buffer, data.x[rank], idx)
            y = torch.full_like(recv_x, float("nan"))
            for local in range(LOCAL):
                num = int(recv_count[local])
                y[local, :num] = recv_x[local, :num] * (rank * LOCAL + local + 1)
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(list(handle))[:, :, :] = y
                y = torch.full_like(y, float("nan"))
                src_info, ranges, *sizes = handle
                handle = (src_info, ranges, *sizes)  # as programs that take it apart
            out = torch.empty_like(data.x[rank]) if use_out else None
            combined, event, receive = buffer.low_latency_combine(
                y, idx, weights, handle, zero_copy=zero_copy, out=out, async_finish=not hook, return_recv_hook=hook
            )
            receive() if hook else event.current_stream_wait()
            assert out is None or combined.data_ptr() == out.data_ptr()
            assert (event.extra_tensors is None) == hook
            assert_sum(combined, case, data.x[rank], idx, weights, multiply=True)


@on_ranks()
def test_combine_of_some_choices(rank: int, case: Case):
    """The choices of a combine in other columns than those of the dispatch, and some of them left out."""
    x, idx, weights = make_data(case, rank, hidden=HIDDEN).of(rank)
    with opened(case) as buffer:
        recv_x, _, handle, _, _ = dispatch(buffer, x, idx)
        fewer = idx.flip(1).clone()
        fewer[::2, 0] = -1
        nans = weights.where(fewer >= 0, float("nan"))
        same = ((idx.view(idx.shape), weights), (idx.clone(), weights))
        for choices, given in ((fewer, nans), (fewer[:, 1:], weights[:, 1:]), *same):
            assert_sum(buffer.low_latency_combine(recv_x, choices, given, handle)[0], case, x, choices, given)
        if case.engine == "cpu" and len(idx):  # on a GPU an assert on the device
            with pytest.raises(ValueError, match="not dispatched to"):
                buffer.low_latency_combine(recv_x, torch.where(idx == 0, 1, 0), weights, handle)
        buffer.low_latency_combine(recv_x, idx, weights, handle)


@pytest.mark.parametrize("exact", [False, exhaustive(True)])
@on_ranks("exact")
def test_several_round_trips_at_once_beside_another_dispatch(rank: int, case: Case):
    """More hooks than there are buffers, called late, twice and in another order; counts are added once."""
    with opened(case) as buffer:
        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
        all_data = [make_data(case, rank, seed=seed, hidden=HIDDEN) for seed in range(4)]
        stats = torch.zeros(LOCAL, dtype=torch.int32, device=all_data[0].x[0].device)
        trips = []
        for data in all_data:
            x, idx, weights = data.of(rank)
            trips.append((x, idx, weights, *dispatch(buffer, x, idx, stats, return_recv_hook=True)))
        buffer.dispatch(x, **routed(buffer, idx, weights))
        for *_, receive in trips[::-1] * 2:
            receive()
        assert torch.equal(stats, sum(count for *_, count, _, _, _ in trips))
        sums = []
        for x, idx, weights, recv_x, _, handle, _, _ in trips:
            combined, _, receive = buffer.low_latency_combine(
                recv_x, idx, weights, handle, use_logfmt=True, return_recv_hook=True
            )
            sums.append((combined, x, idx, weights, receive))
        for combined, *given, receive in sums[::-1]:
            receive()
            assert_sum(combined, case, *given)


@pytest.mark.parametrize("exact", [False, True])
@on_ranks("exact")
def test_choices_changed_in_place(rank: int, case: Case):
    x, choices, weights = make_data(case, rank, hidden=HIDDEN).of(rank)
    with opened(case) as buffer:
        for mode in (contextlib.nullcontext, torch.inference_mode):  # which counts no changes
            with mode():
                idx = choices.clone()
                recv_x, _, handle, _, _ = dispatch(buffer, x, idx)
                assert_sum(buffer.low_latency_combine(recv_x, idx, weights, handle)[0], case, x, idx, weights)
        idx = choices.clone()
        recv_x, _, handle, _, _ = dispatch(buffer, x, idx)
        idx[:, 0] = -1
        if case.exact:
            assert_sum(buffer.low_latency_combine(recv_x, idx, weights, handle)[0], case, x, idx, weights)
        else:
            for given in (idx, idx.clone()):
                with pytest.raises(ValueError, match="changed in place .*EP_DISPATCHER_DEEP_EP_EXACT"):
                    buffer.low_latency_combine(recv_x, given, weights, handle)


@on_ranks()
def test_masks_of_a_buffer_without_them(rank: int, case: Case):
    with opened(case) as buffer:
        assert status_of(buffer, device_of(case.engine, rank)) == [0] * RANKS
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_update_mask_buffer(1, False)
        with pytest.raises(ValueError, match="made without enable_shrink=True"):
            buffer.low_latency_update_mask_buffer(1, True)


def status_of(buffer, device: torch.device | str = "cpu") -> list[int]:
    status = torch.full((RANKS,), 7, dtype=torch.int32, device=device)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def trip_without(buffer, data: Data, rank: int, case: Case, absent: int | None) -> None:
    """One round trip, right without the tokens and the experts of a rank."""
    x, idx, weights = data.of(rank)
    recv_x, recv_count, handle, _, receive = dispatch(buffer, x, idx, return_recv_hook=True)
    receive()
    for local in range(LOCAL):
        sent = sent_to(data, rank * LOCAL + local)
        rows = torch.cat([data.x[source][tokens] for source, tokens in enumerate(sent) if source != absent])
        assert int(recv_count[local]) == len(rows) and torch.equal(recv_x[local, : len(rows)], rows)
    combined, _, receive = buffer.low_latency_combine(recv_x, idx, weights, handle, return_recv_hook=True)
    receive()
    there = idx if absent is None else idx.masked_fill(idx // LOCAL == absent, -1)
    assert_sum(combined, case, x, there, weights)


@pytest.mark.parametrize("by_hand, exact", [(True, False), (False, False), exhaustive(False, True)])
@on_ranks("exact")
def test_a_rank_that_stays_away(rank: int, case: Case, by_hand: bool):
    """The victim is masked by hand or late. Then all are let in again."""
    victim = 1 if by_hand else 3
    data = make_data(case, rank, hidden=HIDDEN)
    with opened(case, dict(EP_DISPATCHER_TIMEOUT_S="60" if by_hand else "4"), enable_shrink=True) as buffer:
        for _ in range(2):  # of both buffers
            trip_without(buffer, data, rank, case, None)
        assert status_of(buffer) == [0] * RANKS
        dist.barrier()
        mask = buffer.low_latency_update_mask_buffer
        if rank == victim:
            with pytest.raises(ValueError, match=f"rank_to_mask is {victim}, which is this rank"):
                mask(victim, True)
        else:
            if by_hand:
                mask(victim, True)
            for _ in range(4):
                trip_without(buffer, data, rank, case, victim)
            assert status_of(buffer) == [int(other == victim) for other in range(RANKS)]
            with pytest.raises(NotImplementedError, match=f"the masked rank {victim} .*low_latency_clean_mask_buffer"):
                mask(victim, False)
            mask((victim + 1) % RANKS, False)  # that is in
        dist.barrier()
        buffer.low_latency_clean_mask_buffer()
        assert status_of(buffer) == [0] * RANKS
        for _ in range(3):
            trip_without(buffer, data, rank, case, None)


@on_ranks()
def test_a_query_of_masks_receives_nothing(rank: int, case: Case):
    data = make_data(case, rank, hidden=HIDDEN)
    with opened(case, enable_shrink=True) as buffer:
        stats = torch.zeros(LOCAL, dtype=torch.int32, device=data.x[0].device)
        _, count, _, _, receive = dispatch(buffer, *data.of(rank)[:2], stats, return_recv_hook=True)
        assert status_of(buffer) == [0] * RANKS
        buffer.low_latency_update_mask_buffer(1, False)
        assert not bool(stats.any())  # nothing was received
        receive()
        assert bool(count.any()) and torch.equal(stats, count)


def test_a_rank_that_is_out_before_its_hook_is_let_in_again():
    """On a GPU the hook of what it has sent raises then, each time."""
    late = PeerTimeoutError("dispatch", 1, "rows", rank=1, late_ranks=[1], waited_s=1.0)
    pool, engine_buffer = BufferPool(mock.Mock()), mock.Mock()
    hooked = DecodeBuffer(engine_buffer, has_masks=True)
    pool._decode_buffers[None] = [hooked]
    receive = hooked.hook(mock.Mock(hook=mock.Mock(side_effect=late)))
    for _ in range(2):
        with pytest.raises(PeerTimeoutError):
            receive()
    pool.unmask()
    engine_buffer.unmask.assert_called_once_with()
    assert hooked.ready() is engine_buffer


@on_ranks()
def test_graphs_of_any_length_beside_eager_ranks(rank: int, case: Case):
    """Rank 1 replays a round trip, which leaves its host as it was. The others make the same one anew."""
    data = make_data(case, rank, hidden=HIDDEN)
    with opened(case, dict(EP_DISPATCHER_TIMEOUT_S="10")) as buffer:
        trip_without(buffer, data, rank, case, None)
        (both,) = buffer._pool._decode_buffers.values()
        turns = both[0].turns
        before = turns.count
        trip_without(buffer, data, rank, case, None)
        if rank == 1:
            turns.count = before
        trip_without(buffer, data, rank, case, None)


@on_ranks(ranks_per_node=2)
def test_where_masks_are_impossible(rank: int, case: Case):
    data = make_data(case, rank, hidden=HIDDEN)
    with opened(case, enable_shrink=True) as buffer:
        buffer.low_latency_update_mask_buffer((rank + 1) % RANKS, True)  # nobody knows yet that there are none
        dist.barrier()
        trip_without(buffer, data, rank, case, None)
        with pytest.raises(NotImplementedError, match="True on 2 nodes, but needs one node"):
            buffer.low_latency_update_mask_buffer((rank + 1) % RANKS, True)


@pytest.mark.parametrize("exact", [False, exhaustive(True)])
@on_ranks("exact")
def test_wait_statistics_say_who_was_waited_for(rank: int, case: Case):
    """Rank 2 comes late to a dispatch, rank 1 to the combine."""
    x, idx, weights = make_data(case, rank, hidden=HIDDEN).of(rank)
    with opened(case) as buffer:
        waits = {2: torch.ones(RANKS, dtype=torch.int64, device=x.device)}
        waits[1] = waits[2].clone()
        for late in (False, True):
            recv_x, _, handle, _, _ = dispatch(buffer, x, idx)
            buffer.low_latency_combine(recv_x, idx, weights, handle)
            dispatch(buffer, x, idx)
            for victim in waits:
                dist.barrier()
                if rank == victim and late:
                    time.sleep(0.5)
                stats = waits[victim] if late else None
                if victim == 2:
                    recv_x, _, handle, _, _ = dispatch(buffer, x, idx, None, stats)
                else:
                    buffer.low_latency_combine(recv_x, idx, weights, handle, combine_wait_recv_cost_stats=stats)
                if x.is_cuda:
                    torch.cuda.synchronize()
    for victim, waited in waits.items():
        waited = waited.tolist()
        assert waited[rank] == 1 and min(waited) >= 1
        if rank == victim:
            assert max(waited) < 0.25e9
        else:
            assert waited[victim] > 0.4e9 and waited.index(max(waited)) == victim


@pytest.mark.parametrize("lengths", [(0, 0, 0, 0), (1, 0, 0, 0)])
@on_ranks("lengths")
def test_no_tokens_at_all(rank: int, case: Case):
    """Of one token the middle one is the token without experts."""
    x, idx, weights = make_data(case, rank, hidden=HIDDEN).of(rank)
    with opened(case) as buffer:
        for use_fp8 in (False, True):
            recv_x, count, handle, _, _ = dispatch(buffer, x, idx, use_fp8=use_fp8)
            y = recv_x[0].bfloat16() if use_fp8 else recv_x
            combined, _, _ = buffer.low_latency_combine(y, idx, weights, handle)
            assert int(count.sum()) == 0 and combined.shape == x.shape and not bool(combined.any())


@on_ranks()
def test_a_dispatch_makes_two_buffers_with_the_number_of_sms_chosen_last(rank: int, case: Case):
    x, idx, weights = make_data(case, rank, hidden=HIDDEN).of(rank)
    with pytest.MonkeyPatch.context() as patch, opened(case) as buffer:
        for name in ("num_sms", "_chosen_sms"):
            patch.setattr(Buffer, name, getattr(Buffer, name))  # as they are, again at the end
        Buffer.set_num_sms(14)
        recv_x, _, handle, _, _ = dispatch(buffer, x, idx)
        Buffer.set_num_sms(18)
        buffer.low_latency_combine(recv_x, idx, weights, handle)
        assert [one.config.num_sms for one in buffer._pool._made] == [14, 14]
