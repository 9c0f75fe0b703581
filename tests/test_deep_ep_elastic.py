"""``deep_ep.ElasticBuffer`` of DeepEP 2: both layouts against the reference, handles, callers, and what is refused."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from deep_ep_case import EXPERTS, HIDDEN, LOCAL, RANKS, TOPK, Case, environment, install, make_data

import ep_dispatcher as ep
from ep_dispatcher import reference

MOST, ALIGNMENT = 24, 16
LARGEST = torch.iinfo(torch.int32).max


def opened(**options):
    """An ElasticBuffer as the programs make it."""
    from deep_ep import ElasticBuffer

    sizes = dict(num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK)
    return ElasticBuffer(dist.group.WORLD, **sizes, **dict(explicitly_destroy=True) | options)


def expected(data, rank: int, expand: bool, alignment: int = 1, x=None) -> reference.Dispatched:
    to_cpu = [[t.cpu() for t in tensors] for tensors in (data.topk_idx, data.weights)]
    x = [tuple(t.cpu() for t in one) if isinstance(one, tuple) else one.cpu() for one in (data.x if x is None else x)]
    layout = dict(layout="expert" if expand else "rank", expert_alignment=alignment)
    return reference.dispatch(x, *to_cpu, num_experts=EXPERTS, **layout)[rank]


def assert_rows(given, wanted, num_rows: int):
    """The rows are the reference's, and all later ones are zeros. Pairs compare by bytes."""
    for one, other in zip(*((t if isinstance(t, tuple) else (t,)) for t in (given, wanted))):
        one, other = (t.cpu().contiguous().view(len(t), -1).view(torch.uint8) for t in (one, other))
        assert torch.equal(one[: len(other)], other) and not one[len(other) :].any() and len(one) == num_rows


def most_rows(expand: bool) -> int:
    rows = RANKS * MOST * (min(TOPK, LOCAL) if expand else 1) + (ALIGNMENT - 1) * LOCAL * expand
    return -(-rows // ALIGNMENT) * ALIGNMENT if expand else rows


def assert_handle(handle, wanted, expand: bool, waits: bool):
    rows, tokens = wanted.rows_per_expert, wanted.tokens_per_expert
    assert (handle.do_expand, handle.num_experts, handle.expert_alignment) == (expand, EXPERTS, ALIGNMENT)
    assert handle.num_max_tokens_per_rank == MOST
    assert handle.num_recv_tokens_per_expert_list == (rows.tolist() if waits else [])
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == tokens.tolist()
    ends = rows.cumsum(0)
    assert handle.psum_num_recv_tokens_per_expert.tolist() == (ends - rows + tokens if expand else ends).tolist()
    assert handle.psum_num_recv_tokens_per_expert.dtype == torch.int32
    assert handle.num_expanded_tokens == (int(ends[-1]) if waits else most_rows(True))


def assert_sources(handle, rank: int, data, wanted, local_ranks: int):
    """With EP_DISPATCHER_DEEP_EP_EXACT=1 a handle has the source of each received token, and where its rows are."""
    compact = expected(data, rank, False)
    num_tokens = len(compact.x)
    sources, taken = torch.full((num_tokens,), -1, dtype=torch.int32), [0] * local_ranks
    slots = torch.full((num_tokens, TOPK), -1, dtype=torch.int32)
    for source, (rows, to) in enumerate(zip(compact.row_of, wanted.row_of)):
        for token, k in (rows >= 0).nonzero().tolist():
            sources[rows[token, k]] = source * MOST + token
            slots[rows[token, k], k] = to[token, k]
        taken[source % local_ranks] += len(rows[rows >= 0].unique())
    assert torch.equal(handle.recv_src_metadata[:num_tokens, 0].cpu(), sources)
    if handle.do_expand:
        assert torch.equal(handle.recv_src_metadata[:num_tokens, 2:].cpu(), slots)
    psum = torch.tensor(taken).cumsum(0).tolist()
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == psum


def run_layouts(rank: int, case: Case, expand: bool, waits: bool):
    data = make_data(case, rank)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    pairs = [tuple(ep.quantize(one)) for one in data.x]
    with environment(case):
        install(rank)
        buffer = opened()
        local_ranks = case.ranks_per_node or RANKS
        assert (
            buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (RANKS // local_ranks, local_ranks)
        )
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(rank, local_ranks)
        stats = torch.ones(LOCAL, dtype=torch.int32, device=x.device)
        sizes = dict(num_experts=EXPERTS, expert_alignment=ALIGNMENT, do_cpu_sync=waits, do_expand=expand)
        for value, all_values in ((x, data.x), (pairs[rank], pairs)):
            wanted = expected(data, rank, expand, ALIGNMENT, all_values)
            num_rows = wanted.topk_weights.shape[0] if waits else most_rows(expand)
            recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
                value, idx, weights, stats, **sizes, use_tma_aligned_col_major_sf=True, do_zero_padding=expand
            )
            assert event.event is None
            assert_rows(recv_x, wanted.x, num_rows)
            assert_rows(recv_weights, wanted.topk_weights, num_rows)
            if isinstance(recv_x, tuple):
                assert recv_x[1].stride() == (1, -(-num_rows // 4) * 4)
            if expand:
                assert recv_idx is None
            else:
                assert torch.equal(recv_idx.cpu()[: len(wanted.topk_idx)], wanted.topk_idx)
                assert bool((recv_idx[len(wanted.topk_idx) :] == -1).all())
                assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) == len(wanted.topk_idx)
            assert_handle(handle, wanted, expand, waits)
            if case.exact:
                assert_sources(handle, rank, data, wanted, local_ranks)
            else:
                assert (
                    bool((handle.recv_src_metadata == LARGEST).all()) and handle.recv_src_metadata.shape[1] == 2 + TOPK
                )
            assert torch.equal(handle.topk_idx, idx) and handle.topk_idx.data_ptr() != idx.data_ptr() or not len(idx)
            # The same routing again: other rows, other sizes of rows, the other layout.
            for again, same in ((pairs, expand), ([one.float() for one in data.x], expand), (data.x, not expand)):
                wanted = expected(data, rank, same, ALIGNMENT, again)
                num_rows = len(wanted.topk_weights) if waits else most_rows(same)
                cached = buffer.dispatch(again[rank], topk_weights=weights, handle=handle, do_expand=same)
                assert_rows(cached[0], wanted.x, num_rows)
                assert_rows(cached[2], wanted.topk_weights, num_rows)
                assert cached[3] is handle and (cached[1] is None) == same
                assert buffer.dispatch(again[rank], handle=handle, do_expand=same)[2] is None
        assert torch.equal(stats.cpu(), 1 + 2 * expected(data, rank, expand).tokens_per_expert.int())
        run_combines(buffer, rank, case, data, expand, handle)
        buffer.barrier(with_cpu_sync=True)
        buffer.destroy()


def run_combines(buffer, rank: int, case: Case, data, expand: bool, handle):
    """Sums, with weights and biases, of bfloat16 and float32; once with one rounding alone."""
    idx, weights = data.topk_idx[rank], data.weights[rank]
    chosen, per_node = [one.cpu() for one in data.topk_idx], case.ranks_per_node or RANKS
    layout = dict(num_experts=EXPERTS, layout="expert" if expand else "rank")
    node_of = [source // per_node for source in range(RANKS)]
    for dtype, rounds in ((torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)):
        received = [expected(data, to, expand, ALIGNMENT) for to in range(RANKS)]
        generator = torch.Generator().manual_seed(1)
        y = [torch.randn(one.x.shape, generator=generator).to(dtype) for one in received]
        exact = [one.float() for one in y] if not rounds else y
        to_send = torch.zeros(handle.num_rows, HIDDEN, dtype=dtype, device=idx.device)
        to_send[: len(y[rank])] = y[rank].to(idx.device)
        sent_weights = buffer.dispatch(data.x[rank], topk_weights=weights, handle=handle, do_expand=expand)[2]
        buffer.allow_multiple_reduction = rounds
        wanted = reference.combine(exact, received, chosen, node_of=node_of, **layout)[rank][0].to(idx.device)
        bias = tuple(torch.full_like(data.x[rank], value, dtype=dtype) for value in (0.5, 0.25))
        for given in (None, bias[0], bias):
            combined, combined_weights, _ = buffer.combine(to_send, handle, sent_weights, given)
            added = 0.0 if given is None else 0.5 if given is bias[0] else 0.75
            # Compact rows on one node are summed once in any case.
            torch.testing.assert_close(combined, (wanted.float() + added).to(dtype), rtol=0, atol=0)
            assert torch.equal(combined_weights, weights.where(idx >= 0, 0.0))
        assert buffer.combine(to_send, handle)[1] is None
    buffer.allow_multiple_reduction = True


@pytest.mark.parametrize("expand, waits", list(product((False, True), repeat=2)))
@pytest.mark.parametrize("nodes, exact", [(None, False), (None, True), (2, True)])
def test_layouts(pools, engine, expand, waits, nodes, exact):
    pools(RANKS).run(run_layouts, Case(engine, nodes, exact), expand, waits)
