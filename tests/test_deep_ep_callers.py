"""The calls that SGLang 0.5.23, vLLM and xtuner make, with their keywords: each works, or says why not."""

import pytest
import torch
import torch.distributed as dist
from deep_ep_case import (
    EXPERTS,
    HIDDEN,
    LOCAL,
    RANKS,
    TOPK,
    Case,
    environment,
    expected_rows,
    install,
    make_data,
    opened,
    routed,
)

MOST = 24


def sizes(buffer_class) -> tuple[int, int]:
    """Bytes as all three programs ask for them."""
    configs = buffer_class.get_dispatch_config(RANKS), buffer_class.get_combine_config(RANKS)
    nvl = max(config.get_nvl_buffer_size_hint(2 * HIDDEN, RANKS) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(2 * HIDDEN, RANKS) for config in configs)
    return nvl, max(rdma, buffer_class.get_low_latency_rdma_size_hint(MOST, HIDDEN, RANKS, EXPERTS))


def weighted(data, rank: int):
    """What a decoding step returns with experts that return their rows."""
    there = (data.topk_idx[rank] >= 0).sum(1, keepdim=True)
    return data.x[rank].float() * (data.weights[rank] * (data.topk_idx[rank] >= 0)).sum(1, keepdim=True), there


# ---- SGLang ---------------------------------------------------------------------------------------------------------


def run_sglang(rank: int, case: Case):
    data = make_data(case, rank)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    rows, *_ = expected_rows(data, case, rank)
    with environment(case):
        install(rank)
        from deep_ep import Buffer

        options = dict(low_latency_mode=True, num_qps_per_rank=max(24, LOCAL), allow_mnnvl=True, use_fabric=True)
        buffer = Buffer(dist.group.WORLD, *sizes(Buffer), **options)
        for async_finish in (True, False):
            event = Buffer.capture() if async_finish else None
            per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
                idx, EXPERTS, previous_event=event, async_finish=async_finish, allocate_on_comm_stream=event is not None
            )
            recv_x, _, _, counts, handle, event = buffer.dispatch(
                x,
                topk_idx=idx,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                previous_event=event,
                async_finish=async_finish,
                allocate_on_comm_stream=event is not None and async_finish,
                expert_alignment=128,
                config=None,
            )
            assert torch.equal(recv_x, rows) and all(count % 128 == 0 for count in counts)
            event = Buffer.capture() if async_finish else None
            buffer.combine(
                recv_x,
                handle,
                async_finish=async_finish,
                previous_event=event,
                allocate_on_comm_stream=event is not None,
                config=None,
            )
        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)

        def decode(hook: bool, **overlap):
            recv_x, count, handle, event, receive = buffer.low_latency_dispatch(
                x, idx, MOST, EXPERTS, use_fp8=False, async_finish=not hook, return_recv_hook=hook
            )
            receive() if hook else event.current_stream_wait()
            combined, event, receive = buffer.low_latency_combine(
                x=recv_x,
                topk_idx=idx,
                topk_weights=weights,
                handle=handle,
                async_finish=not hook,
                return_recv_hook=hook,
                **overlap,
            )
            receive() if hook else event.current_stream_wait()
            return combined

        signal = torch.zeros(LOCAL, dtype=torch.int32, device=x.device)
        hopper = dict(packed_recv_count=signal, comp_signal=signal, block_m=64, threshold=0, num_sms=3)
        blackwell = dict(src_signals=signal, src_signal_expect_value=0)
        for overlap in ({}, hopper | dict(overlap=False), blackwell | dict(overlap=False)):
            torch.testing.assert_close(decode(True, **overlap).float(), weighted(data, rank)[0], rtol=2e-2, atol=2e-2)
        decode(False)
        for overlap in (hopper, blackwell):  # refused before anything is sent
            with pytest.raises(NotImplementedError, match="overlap: given True.*--enable-single-batch-overlap"):
                decode(True, overlap=True, **overlap)
        for nvfp4 in (dict(use_nvfp4=True), dict(x_global_scale=signal.float())):
            with pytest.raises(NotImplementedError, match=f"{next(iter(nvfp4))}: .* 4-bit"):
                buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False, **nvfp4)


def test_sglang(pools, engine):
    pools(RANKS).run(run_sglang, Case(engine))


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def run_vllm(rank: int, case: Case):
    data = make_data(case, rank)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    rows, *_ = expected_rows(data, case, rank)
    with environment(case):
        install(rank)
        import deep_ep

        nvl, rdma = sizes(deep_ep.Buffer)
        options = dict(group=dist.group.WORLD, num_nvl_bytes=nvl, num_rdma_bytes=rdma, explicitly_destroy=True)
        buffer = deep_ep.Buffer(low_latency_mode=False, num_qps_per_rank=1, **options)
        deep_ep.Buffer.set_num_sms(20)
        plain = dict(previous_event=None, async_finish=False, allocate_on_comm_stream=False)
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx=idx, num_experts=EXPERTS, **plain
        )
        recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
            x=x,
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            topk_weights=weights,
            expert_alignment=1,
            config=deep_ep.Buffer.get_dispatch_config(RANKS),
            **plain,
        )
        assert torch.equal(recv_x, rows) and event.event is None
        config = deep_ep.Buffer.get_combine_config(RANKS)
        buffer.combine(x=recv_x, handle=handle, topk_weights=None, config=config, **plain)
        buffer.destroy()

        decoding = dict(num_qps_per_rank=LOCAL, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False)
        buffer = deep_ep.Buffer(low_latency_mode=True, **decoding, **options, enable_shrink=True)
        recv_x, count, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, MOST, EXPERTS, use_fp8=False, round_scale=False, use_ue8m0=False, async_finish=False,
            return_recv_hook=True,
        )  # fmt: skip
        hook()
        out = torch.empty_like(x)
        options = dict(async_finish=False, zero_copy=False, return_recv_hook=True, out=out)
        _, _, hook = buffer.low_latency_combine(recv_x, idx, weights, handle, **options)
        hook()
        torch.testing.assert_close(out.float(), weighted(data, rank)[0], rtol=2e-2, atol=2e-2)
        # After a fault: zero the memory, then let all ranks in again.
        mask = torch.zeros(RANKS, dtype=torch.int32, device=x.device)
        buffer.low_latency_query_mask_buffer(mask)
        assert not mask.any()
        assert buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_().numel() == 0
        buffer.low_latency_clean_mask_buffer()
        for part in (dict(size=torch.Size([4])), dict(offset=4)):
            with pytest.raises(NotImplementedError, match="get_local_buffer_tensor: given size or offset"):
                buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True, **part)
        buffer.destroy()


def test_vllm(pools, engine):
    pools(RANKS).run(run_vllm, Case(engine))


def repeated(case: Case, rank: int):
    """Data with an expert twice in some tokens, as vLLM's simulated routing draws them."""
    data = make_data(case, rank)
    for idx in data.topk_idx:
        idx[::2, 1] = idx[::2, 0]
    return data


def run_repeated(rank: int, case: Case, num_worst_tokens: int):
    data = repeated(case, rank)
    rows, local_idx, weights, counts = expected_rows(data, case, rank)
    with opened(case) as buffer:
        layout = routed(buffer, data.topk_idx[rank], data.weights[rank])

        def dispatch():
            return buffer.dispatch(data.x[rank], **layout, expert_alignment=4, num_worst_tokens=num_worst_tokens)

        if case.exact:
            recv_x, recv_idx, recv_weights, recv_list, handle, _ = dispatch()
            assert torch.equal(recv_x[: len(rows)], rows) and torch.equal(recv_idx[: len(rows)], local_idx)
            assert torch.equal(recv_weights[: len(rows)], weights) and bool((recv_idx[len(rows) :] == -1).all())
            assert recv_list == ([] if num_worst_tokens else [-(-count // 4) * 4 for count in counts])
            combined = buffer.combine(recv_x, handle, topk_weights=recv_weights)[1]
            assert torch.equal(combined, data.weights[rank].where(data.topk_idx[rank] >= 0, 0.0))
        elif len(data.x[rank]):
            with pytest.raises(NotImplementedError, match="expert twice .*EP_DISPATCHER_DEEP_EP_EXACT=1"):
                dispatch()
        if len(data.x[rank]) and case.engine == "cpu":
            with pytest.raises(NotImplementedError, match="expert twice .* one place"):
                buffer.low_latency_dispatch(data.x[rank], data.topk_idx[rank], MOST, EXPERTS, use_fp8=False)


@pytest.mark.parametrize("num_worst_tokens", [0, 80])
def test_an_expert_twice_in_a_token(pools, engine, num_worst_tokens):
    pools(RANKS).run(run_repeated, Case(engine, exact=True), num_worst_tokens)


def test_an_expert_twice_in_a_token_is_refused(pools):
    pools(RANKS).run(run_repeated, Case("cpu"), 0)  # on a GPU the engine finds it late


# ---- xtuner ---------------------------------------------------------------------------------------------------------


def run_xtuner(rank: int, case: Case):
    data = make_data(case, rank)
    rows, *_ = expected_rows(data, case, rank)
    with environment(case):
        install(rank)
        from deep_ep import Buffer, EventOverlap
        from deep_ep_cpp import EventHandle

        Buffer.set_num_sms(20)
        nvl, rdma = sizes(Buffer)
        options = dict(low_latency_mode=True, num_qps_per_rank=max(LOCAL, Buffer.num_sms // 2))
        buffer = Buffer(dist.group.WORLD, nvl, rdma, **options)
        assert buffer.group == dist.group.WORLD and nvl <= buffer.num_nvl_bytes and rdma <= buffer.num_rdma_bytes
        for previous in (None, EventOverlap(EventHandle())):
            per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
                data.topk_idx[rank],
                EXPERTS,
                previous_event=previous,
                async_finish=True,
                allocate_on_comm_stream=previous is not None,
            )
            recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
                data.x[rank],
                topk_idx=data.topk_idx[rank],
                topk_weights=data.weights[rank],
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                previous_event=event,
                async_finish=True,
                allocate_on_comm_stream=True,
            )
            event.current_stream_wait()
            assert torch.equal(recv_x, rows) and recv_weights.shape == (len(rows), TOPK)
            later = dict(previous_event=EventOverlap(EventHandle()), async_finish=True, allocate_on_comm_stream=True)
            combined, weights, event = buffer.combine(recv_x, handle, topk_weights=recv_weights, **later)
            event.current_stream_wait()
            assert torch.equal(weights, data.weights[rank].where(data.topk_idx[rank] >= 0, 0.0))
            again, *_, event = buffer.dispatch(combined, handle=handle, **later)
            event.current_stream_wait()
            assert again.shape == recv_x.shape


def test_xtuner(pools, engine):
    """test_deep_ep_handles.py has its autograd functions."""
    pools(RANKS).run(run_xtuner, Case(engine))
