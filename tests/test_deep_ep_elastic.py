"""``deep_ep.ElasticBuffer`` of DeepEP 2: both layouts against the reference, handles, callers, and what is refused."""

from functools import partial
from itertools import product

import conftest
import pytest
import torch
import torch.distributed as dist
from lib.deep_ep_case import EXPERTS, HIDDEN, LOCAL, RANKS, TOPK, Case, environment, install, make_data, on_ranks
from lib.deep_ep_elastic import ALIGNMENT, MOST, assert_rows, expected, expected_layer, opened_as, scaled

import ep_dispatcher as ep
from ep_dispatcher import reference
from ep_dispatcher.integrations.deep_ep import ElasticBuffer, config

LARGEST = torch.iinfo(torch.int32).max


opened = partial(opened_as, "deep_ep", "ElasticBuffer")


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


@pytest.mark.parametrize("expand, waits", list(product((False, True), repeat=2)))
@pytest.mark.parametrize("ranks_per_node, exact", [(None, False), (None, True), (2, True)])
@on_ranks("ranks_per_node", "exact")
def test_layouts(rank: int, case: Case, expand: bool, waits: bool):
    data = make_data(case, rank)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    pairs, local_ranks = [tuple(ep.quantize(one)) for one in data.x], case.ranks_per_node or RANKS
    with opened(case, rank) as buffer:
        domain = RANKS // local_ranks, local_ranks
        assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == domain
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(rank, local_ranks)
        stats = torch.ones(LOCAL, dtype=torch.int32, device=x.device)
        sizes = dict(num_experts=EXPERTS, expert_alignment=ALIGNMENT, do_cpu_sync=waits, do_expand=expand)
        for value, all_values in ((x, data.x), (pairs[rank], pairs)):
            wanted = expected(data, rank, expand, ALIGNMENT, all_values)
            num_rows = len(wanted.topk_weights) if waits else most_rows(expand)
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
                assert handle.recv_src_metadata.shape[1] == 2 + TOPK
                assert bool((handle.recv_src_metadata == LARGEST).all())
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


# ---- callers: each makes the calls of its program, with the program's keywords --------------------------------------


@on_ranks()
def test_deepspeed(rank: int, case: Case):
    """As DeepSpeed 0.19.8's autograd functions: a dispatch is the backward of a combine, and the reverse."""
    data = make_data(case, rank, dtype=torch.float32)
    x, weights = data.x[rank].requires_grad_(), data.weights[rank].requires_grad_()
    with opened(case, rank, num_allocated_qps=16, allow_hybrid_mode=True, use_fp8_dispatch=False) as buffer:
        from deep_ep import topk_idx_t

        keywords = dict(topk_idx=data.topk_idx[rank].to(topk_idx_t), topk_weights=weights.detach().float())
        layout = dict(num_experts=EXPERTS, do_expand=True, expert_alignment=1)
        recv_x, _, recv_weights, handle, _ = buffer.dispatch(x.detach(), **keywords, **layout, num_sms=12)
        rows, row_weights = recv_x.requires_grad_(), recv_weights.requires_grad_()
        y = scaled(rows, None, row_weights, handle)
        out, _, _ = buffer.combine(y.detach(), handle=handle, num_sms=12)
        grad = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        grad_y = buffer.dispatch(grad, handle=handle, num_sms=12, do_expand=handle.do_expand)[0]
        y.backward(grad_y)
        grad_weights = row_weights.grad.contiguous()
        grad_x, grad_topk, _ = buffer.combine(rows.grad, handle=handle, topk_weights=grad_weights, num_sms=12)
        again = buffer.dispatch(x.detach(), topk_weights=keywords["topk_weights"], handle=handle, do_expand=True)
        assert torch.equal(again[0], rows) and torch.equal(again[2], row_weights)  # a recompute
        dense = expected_layer(data, rank, x, weights)
        for a, b in zip((out, grad_x, grad_topk), (dense, *torch.autograd.grad(dense, (x, weights), grad))):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@on_ranks()
def test_sglang(rank: int, case: Case):
    """As SGLang 0.5.23, decoding and prefilling."""
    data = make_data(case, rank)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    options = dict(use_fp8_dispatch=True, allow_hybrid_mode=False, sl_idx=0, prefer_overlap_with_compute=False)
    with opened(case, rank, **options) as buffer:
        assert buffer.num_bytes > 0 and buffer.get_logical_domain_size() == (1, RANKS)
        keywords = dict(topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST)
        keywords |= dict(expert_alignment=128, num_sms=24, use_tma_aligned_col_major_sf=True)
        for expand, waits in product((True, False), repeat=2):
            recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
                tuple(ep.quantize(x)), **keywords, do_cpu_sync=waits, do_expand=expand
            )
            assert event.event is None
            rows = ep.dequantize(ep.QuantizedRows(recv_x[0], recv_x[1].contiguous()))
            y = scaled(rows.float(), recv_idx, recv_weights, handle).to(torch.bfloat16)
            combined, back, event = buffer.combine(y, handle=handle, topk_weights=recv_weights)
            wanted = expected_layer(data, rank, x.float(), weights)
            torch.testing.assert_close(combined.float(), wanted, rtol=0.1, atol=0.1)
            assert torch.equal(back, weights.where(idx >= 0, 0.0))


@on_ranks()
def test_vllm(rank: int, case: Case):
    """As vLLM's main branch in 2026-11."""
    data = make_data(case, rank)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    with opened(case, rank, use_fp8_dispatch=True, allow_multiple_reduction=False) as buffer:
        for expand in (True, False):
            keywords = dict(num_experts=EXPERTS, do_expand=expand, do_cpu_sync=expand, async_with_compute_stream=False)
            most = None if expand else min(1 << (max(case.lengths) - 1).bit_length(), MOST)
            recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
                x=x, topk_idx=idx, topk_weights=weights, num_max_tokens_per_rank=most, **keywords
            )
            y = scaled(recv_x.float(), recv_idx, recv_weights, handle).to(torch.bfloat16)
            keywords = dict(async_with_compute_stream=True, allocate_on_comm_stream=True)
            combined, _, event = buffer.combine(x=y, handle=handle, topk_weights=None, **keywords)
            event.current_stream_wait(release_handle=True)
            assert event.event is None
            wanted = expected_layer(data, rank, x.float(), weights)
            torch.testing.assert_close(combined.float(), wanted, rtol=2e-2, atol=2e-2)


def run_torchtitan(rank: int, backend: str) -> list[tuple[float, float]]:
    """torchtitan's own backend ``deepep`` in its own trainer, unmodified. Its operators are also made for CPUs."""
    from lib.torchtitan_case import train

    if backend == "deepep":
        install(rank)
        from torchtitan.distributed.deepep import deepep

        for name in ("dispatch", "combine"):
            torch.library.impl(deepep._lib, name, "CPU")(getattr(deepep, f"_{name}_op_impl"))
    return train(rank, parallel=dict(expert_parallel_degree=4), moe_comm_backend=backend)


def test_torchtitan(pools):
    pytest.importorskip("torchtitan", reason="no torchtitan: .ci/run installs it")
    for ours, theirs in zip(pools(4).run(run_torchtitan, "deepep"), pools(4).run(run_torchtitan, "standard")):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)


# ---- streams, and what is refused or has no effect ------------------------------------------------------------------


@on_ranks()
def test_events(rank: int, case: Case):
    data = make_data(case, rank)
    x, idx = data.x[rank], data.topk_idx[rank]
    wanted = expected(data, rank, False).x
    with opened(case, rank, num_gpu_timeout_secs=30) as buffer:
        sizes = dict(num_experts=EXPERTS, do_handle_copy=False)
        for finish, before in product((True, False), repeat=2):
            keywords = dict(previous_event=buffer.capture(), allocate_on_comm_stream=True) if before else {}
            keywords |= dict(async_with_compute_stream=finish, previous_event_before_epilogue=buffer.capture())
            rows, _, _, handle, event = buffer.dispatch(x, idx, **sizes, **keywords)
            with event(release_handle=True):
                assert (event.event is not None) == finish
            assert event.event is None and handle.topk_idx is idx
            assert_rows(rows, wanted, len(wanted))
            combined, _, event = buffer.combine(rows, handle, **keywords)
            if finish:
                event.current_stream_wait()
            assert torch.equal(combined, buffer.combine(rows, handle)[0])


MISTAKES = [
    (dict(previous_event=True), "allocate_on_comm_stream is False"),
    (dict(do_zero_padding=True), "do_zero_padding is True"),
    (dict(num_experts=0), "num_experts is 0"),
    (dict(topk_idx=None), "topk_idx is of type NoneType"),
    (dict(expert_alignment=0), "expert_alignment is 0"),
    (dict(handle=()), "handle is of type tuple"),
    (dict(num_sms=-1), "num_sms is -1"),
]
BESIDE = [
    (dict(do_cpu_sync=True), "do_cpu_sync is True"),
    (dict(num_experts=2 * EXPERTS), "num_experts is 16"),
    (dict(expert_alignment=2), "expert_alignment is 2"),
    (dict(topk_idx=torch.zeros(2, TOPK)), "topk_idx is given beside handle"),
    (
        dict(cumulative_local_expert_recv_stats=torch.zeros(2)),
        "local_expert_recv_stats is given beside handle",
    ),
]
REFUSED = "engram_write engram_fetch pp_set_config pp_send pp_recv create_agrs_session destroy_agrs_session all_gather "
REFUSED += "get_engram_storage_size_hint get_pp_buffer_size_hint get_agrs_buffer_size_hint"
HINTS = dict(prefer_overlap_with_compute=False, sl_idx=0, num_allocated_qps=9, num_cpu_timeout_secs=1)


@conftest.on_ranks(1)
def test_refusals_and_hints(rank: int):
    """One rank alone: nothing of this is sent."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.logger, "warning", lambda text, *args: lines.append(text % args))
        patch.setattr(config, "_said", set())
        with opened(Case("cpu"), rank, **HINTS), opened(Case("cpu"), rank, **HINTS) as buffer:
            assert buffer.get_theoretical_num_sms(EXPERTS, TOPK) == 24 and buffer.get_theoretical_num_qps(24) == 9
            idx, x = torch.arange(2 * TOPK).view(2, TOPK), torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
            keywords = dict(x=x, topk_idx=idx, num_experts=EXPERTS, num_qps=9)
            *_, handle, _ = buffer.dispatch(**keywords)
            assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == [2]
            assert bool((handle.dst_buffer_slot_idx == LARGEST).all())  # memory that all missing items share
            for wrong, text in MISTAKES:
                with pytest.raises(ValueError, match=text):
                    buffer.dispatch(**keywords | wrong)
            for wrong, text in BESIDE:
                with pytest.raises(ValueError, match=text):
                    buffer.dispatch(x, handle=handle, **wrong)
            for name in [*HINTS, "num_qps"]:
                assert sum(line.startswith(f"ep_dispatcher as deep_ep: {name}: accepted") for line in lines) == 1
            buffer.dispatch(x, handle=handle, num_sms=8)
            assert lines[-1].endswith("num_sms is 8; buffers that were made before keep 24 multiprocessors")
            slower = type(buffer)(dist.group.WORLD, num_max_tokens_per_rank=MOST, num_gpu_timeout_secs=7)
            slower.dispatch(**keywords)
            assert "num_gpu_timeout_secs is 7; buffers that were made before keep " in lines[-1]
            for name in REFUSED.split():
                for owner in (buffer, type(buffer)):
                    with pytest.raises(NotImplementedError, match=f"{name}: of DeepEP's"):
                        getattr(owner, name)(1, 2)
            with pytest.raises(NotImplementedError, match="num_cpu_bytes"):
                type(buffer)(dist.group.WORLD, num_cpu_bytes=1)
            with pytest.raises(NotImplementedError, match="num_scaleout_topk"):
                buffer.get_theoretical_num_sms(EXPERTS, TOPK, 1)
            with pytest.raises(ValueError, match="needs a buffer made with explicitly_destroy"):
                type(buffer)(dist.group.WORLD).destroy()
            hint = type(buffer).get_buffer_size_hint
            assert hint(dist.group.WORLD, 8, 512) % (2 << 20) == 0 < hint(dist.group.WORLD, 8, 512)
            assert hint(dist.group.WORLD, 4096, 7168) > hint(dist.group.WORLD, 4096, 7168, use_fp8_dispatch=True)
        with pytest.raises(ValueError, match="buffer was destroyed"):
            buffer.dispatch(**keywords)


@conftest.on_ranks(2)
def test_num_gpu_timeout_secs_is_the_limit(rank: int):
    with environment(Case("cpu")):
        buffer = ElasticBuffer(dist.group.WORLD, num_gpu_timeout_secs=3, explicitly_destroy=True)
        buffer.barrier()
        if rank == 0:
            with pytest.raises(ep.PeerTimeoutError):
                buffer.barrier(with_cpu_sync=True)
        buffer.destroy()
