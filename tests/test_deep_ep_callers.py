"""The calls that SGLang 0.5.23, vLLM and nemo-automodel make, with their keywords: each works, or says why not."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.deep_ep_case import (
    EXPERTS,
    HIDDEN,
    LOCAL,
    RANKS,
    Case,
    assert_received,
    environment,
    expected_rows,
    install,
    make_data,
    on_ranks,
    opened,
    routed,
)

import ep_dispatcher as ep

MOST = 24
PLAIN = dict(previous_event=None, async_finish=False, allocate_on_comm_stream=False)


def sizes(buffer_class) -> tuple[int, int]:
    """Bytes as the programs ask for them."""
    configs = buffer_class.get_dispatch_config(RANKS), buffer_class.get_combine_config(RANKS)
    nvl = max(config.get_nvl_buffer_size_hint(2 * HIDDEN, RANKS) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(2 * HIDDEN, RANKS) for config in configs)
    return nvl, max(rdma, buffer_class.get_low_latency_rdma_size_hint(MOST, HIDDEN, RANKS, EXPERTS))


def run_dispatch(buffer, data, rank: int, of_layout: dict, of_dispatch: dict):
    """A layout and a dispatch with all keywords, which bring the right rows. Return what the dispatch returns."""
    idx, weights = data.topk_idx[rank], data.weights[rank]
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=idx, num_experts=EXPERTS, **of_layout
    )
    layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, num_tokens_per_expert=per_expert)
    options = dict(previous_event=event if of_layout["async_finish"] else None) | of_dispatch
    found = buffer.dispatch(
        x=data.x[rank], topk_idx=idx, topk_weights=weights, is_token_in_rank=in_rank, **layout, **options
    )
    with found[-1]:
        pass
    assert_received(found, data, rank, options.get("expert_alignment", 1))
    return found


def assert_weighted(combined, data, rank: int) -> None:
    """What a decoding step returns with experts that return their rows."""
    weight = (data.weights[rank] * (data.topk_idx[rank] >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), data.x[rank].float() * weight, rtol=2e-2, atol=2e-2)


@on_ranks()
def test_calls_of_sglang(rank: int, case: Case):
    data = make_data(case, rank)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    with environment(case):
        install(rank)
        from deep_ep import Buffer

        options = dict(low_latency_mode=True, num_qps_per_rank=max(24, LOCAL), allow_mnnvl=True, use_fabric=True)
        buffer = Buffer(dist.group.WORLD, *sizes(Buffer), **options)
        for async_finish in (True, False):
            overlap = dict(async_finish=async_finish, allocate_on_comm_stream=async_finish)
            event = Buffer.capture() if async_finish else None
            of_layout, of_dispatch = dict(previous_event=event), dict(expert_alignment=128, config=None)
            recv_x, _, _, _, handle, _ = run_dispatch(buffer, data, rank, overlap | of_layout, overlap | of_dispatch)
            buffer.combine(recv_x, handle, **overlap, previous_event=event, config=None)
        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)

        def decode(hook: bool, **overlap):
            how = dict(async_finish=not hook, return_recv_hook=hook)
            recv_x, _, handle, event, receive = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False, **how)
            receive() if hook else event.current_stream_wait()
            combined, event, receive = buffer.low_latency_combine(
                x=recv_x, topk_idx=idx, topk_weights=weights, handle=handle, **how, **overlap
            )
            receive() if hook else event.current_stream_wait()
            return combined

        signal = torch.zeros(LOCAL, dtype=torch.int32, device=x.device)
        hopper = dict(packed_recv_count=signal, comp_signal=signal, block_m=64, threshold=0, num_sms=3)
        blackwell = dict(src_signals=signal, src_signal_expect_value=0)
        for overlap in ({}, hopper | dict(overlap=False), blackwell | dict(overlap=False)):
            assert_weighted(decode(True, **overlap), data, rank)
        decode(False)
        for overlap in (hopper, blackwell):  # refused before anything is sent
            with pytest.raises(NotImplementedError, match="overlap is True.*--enable-single-batch-overlap"):
                decode(True, overlap=True, **overlap)


@on_ranks()
def test_calls_of_vllm(rank: int, case: Case):
    data = make_data(case, rank)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    with environment(case):
        install(rank)
        import deep_ep

        nvl, rdma = sizes(deep_ep.Buffer)
        options = dict(group=dist.group.WORLD, num_nvl_bytes=nvl, num_rdma_bytes=rdma, explicitly_destroy=True)
        buffer = deep_ep.Buffer(low_latency_mode=False, num_qps_per_rank=1, **options)
        deep_ep.Buffer.set_num_sms(20)
        of_dispatch = dict(handle=None, expert_alignment=1, config=deep_ep.Buffer.get_dispatch_config(RANKS))
        recv_x, _, _, _, handle, event = run_dispatch(buffer, data, rank, PLAIN, PLAIN | of_dispatch)
        assert event.event is None
        config = deep_ep.Buffer.get_combine_config(RANKS)
        buffer.combine(x=recv_x, handle=handle, topk_weights=None, config=config, **PLAIN)
        buffer.destroy()

        decoding = dict(num_qps_per_rank=LOCAL, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False)
        buffer = deep_ep.Buffer(low_latency_mode=True, **decoding, **options, enable_shrink=True)
        hooked = dict(async_finish=False, return_recv_hook=True)
        recv_x, count, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, MOST, EXPERTS, use_fp8=False, round_scale=False, use_ue8m0=False, **hooked
        )
        hook()
        out = torch.empty_like(x)
        _, _, hook = buffer.low_latency_combine(recv_x, idx, weights, handle, zero_copy=False, out=out, **hooked)
        hook()
        assert_weighted(out, data, rank)
        # After a fault: zero the memory, then let all ranks in again.
        mask = torch.zeros(RANKS, dtype=torch.int32, device=x.device)
        buffer.low_latency_query_mask_buffer(mask)
        assert not mask.any()
        assert buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_().numel() == 0
        buffer.low_latency_clean_mask_buffer()
        buffer.destroy()


@pytest.mark.parametrize("exact, num_worst_tokens", [(True, 0), (True, 80), (False, 0)])
@on_ranks("exact")
def test_an_expert_twice_in_a_token(rank: int, case: Case, num_worst_tokens: int):
    """An expert twice in some tokens, as vLLM's simulated routing draws them."""
    data = make_data(case, rank)
    for idx in data.topk_idx:
        idx[::2, 1] = idx[::2, 0]
    with opened(case) as buffer:
        layout = routed(buffer, data.topk_idx[rank], data.weights[rank])

        def dispatch():
            return buffer.dispatch(data.x[rank], **layout, expert_alignment=4, num_worst_tokens=num_worst_tokens)

        if case.exact:
            received = recv_x, _, recv_weights, _, handle, _ = dispatch()
            assert_received(received, data, rank, alignment=4, worst=num_worst_tokens)
            combined = buffer.combine(recv_x, handle, topk_weights=recv_weights)[1]
            assert torch.equal(combined, data.given_weights(rank))
        elif case.engine == "cpu":  # on a GPU the engine finds it late
            with raises_if_given(data.x[rank], "expert twice .*EP_DISPATCHER_DEEP_EP_EXACT=1"):
                dispatch()
    if case.engine == "cpu":
        with opened(case) as buffer, raises_if_given(data.x[rank], "expert twice .* one place"):
            buffer.low_latency_dispatch(data.x[rank], data.topk_idx[rank], MOST, EXPERTS, use_fp8=False)


def raises_if_given(x, text: str):
    """The ranks that have tokens refuse them, and the others learn that these ranks have left."""
    return pytest.raises(NotImplementedError, match=text) if len(x) else pytest.raises(ep.PeerTimeoutError)


# ---- nemo-automodel -------------------------------------------------------------------------------------------------

NEMO = importlib.util.find_spec("nemo_automodel")


@pytest.mark.skipif(NEMO is None, reason="no nemo-automodel: .ci/run installs its wheel")
@on_ranks()
def test_nemo_automodel(rank: int, case: Case):
    """components/moe/megatron/fused_a2a.py as in the wheel: a layer with gradients, and a recompute by its recorder."""
    data = make_data(case, rank, dtype=torch.float32)
    idx = data.topk_idx[rank]
    with environment(case):
        install(rank)
        path = Path(next(iter(NEMO.submodule_search_locations)), "components/moe/megatron/fused_a2a.py")
        spec = importlib.util.spec_from_file_location("fused_a2a", path)
        fused = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fused)
        assert fused.HAVE_DEEP_EP
        for options in ({}, dict(async_finish=True, allocate_on_comm_stream=True)):
            recorder, seen = fused.DispatchReplayRecorder(), []
            x, weights = data.x[rank].clone().requires_grad_(), data.weights[rank].clone().requires_grad_()
            for mode in ("record", "replay"):
                with fused.dispatch_replay_scope(recorder, mode):
                    arguments = x, idx, weights, EXPERTS, dist.group.WORLD
                    seen.append(fused.fused_dispatch(*arguments, **options))
            rows, recv_idx, recv_weights, counts, handle = seen[0]
            assert torch.equal(seen[1][0], rows) and recorder.replay_misses == 0
            assert counts.tolist() == expected_rows(data, rank)[3]
            y = rows * (recv_weights * torch.where(recv_idx >= 0, 1.0 + recv_idx, 0.0)).sum(1, keepdim=True)
            out, _ = fused.fused_combine(y, dist.group.WORLD, handle, **options)
            scales = torch.where(idx >= 0, 1.0 + idx % LOCAL, 0.0)
            dense = x * (weights * scales).sum(1, keepdim=True)
            torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
            grad = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
            for a, b in zip(*(torch.autograd.grad(one, (x, weights), grad) for one in (out, dense))):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
