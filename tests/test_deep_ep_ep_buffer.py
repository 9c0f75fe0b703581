"""``deep_ep.EPBuffer`` of DeepEP 2.5: what it does otherwise than ElasticBuffer, whose operations it has."""

from functools import partial
from itertools import product

import conftest
import pytest
import torch
import torch.distributed as dist
from lib.deep_ep_case import EXPERTS, HIDDEN, RANKS, TOPK, Case, make_data, on_ranks
from lib.deep_ep_elastic import assert_rows, expected, expected_layer, opened_as, scaled

from ep_dispatcher.integrations.deep_ep import config

MISSING = "EngramBuffer PPBuffer BucketBuffer BucketSession"


opened = partial(opened_as, "deep_ep_v25", "EPBuffer")


@pytest.mark.parametrize("ranks_per_node", [None, 2])
@on_ranks("ranks_per_node")
def test_a_layer(rank: int, case: Case):
    """Both layouts, deferred or not: rows, sums with biases, and the handle."""
    data = make_data(case, rank)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    with opened(case, rank) as buffer:
        for expand, waits, defers in product((False, True), repeat=3):
            wanted = expected(data, rank, expand)
            keywords = dict(num_experts=EXPERTS, do_expand=expand, do_cpu_sync=waits, async_with_compute_stream=True)
            received = buffer.dispatch(x, idx, weights, **keywords, defer_epilogue=defers)
            if defers:
                event = received
                recv_x, recv_idx, recv_weights, handle = event.current_stream_wait(release_handle=True)
                assert event.event is None
            else:
                recv_x, recv_idx, recv_weights, handle, event = received
                assert event.wait() is None
            num_rows = handle.num_rows
            assert num_rows == len(wanted.x) if waits else num_rows >= len(wanted.x)
            assert_rows(recv_x, wanted.x, num_rows)
            assert_rows(recv_weights, wanted.topk_weights, num_rows)
            assert handle.topk_idx is idx
            y = scaled(recv_x.float(), recv_idx, recv_weights, handle).to(torch.bfloat16)
            bias = torch.zeros_like(x)
            keywords = dict(bias=bias, topk_weights=recv_weights, async_with_compute_stream=True)
            combined = buffer.combine(y, handle, **keywords, defer_epilogue=defers)
            if defers:
                bias.fill_(1.0)  # deferred biases may be written until the wait
                sums, back = combined.wait()
            else:
                sums, back, event = combined
                event.current_stream_wait()
            wanted_sums = expected_layer(data, rank, x.float(), weights) + float(defers)
            torch.testing.assert_close(sums.float(), wanted_sums, rtol=2e-2, atol=3e-2)
            assert torch.equal(back, weights.where(idx >= 0, 0.0)) and sums.dtype == torch.bfloat16
            again = buffer.dispatch(x, topk_weights=weights, handle=handle, do_expand=expand)
            assert again[3] is handle
            assert_rows(again[0], wanted.x, num_rows)


@on_ranks()
def test_a_changed_topk_idx(rank: int, case: Case):
    """A handle keeps the caller's tensor. A change in place would give another routing: it is a ValueError."""
    data = make_data(case, rank)
    x, idx = data.x[rank], data.topk_idx[rank].clone()
    with opened(case, rank) as buffer:
        rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=EXPERTS)
        idx.fill_(0)
        for use in (
            lambda: buffer.combine(rows, handle),
            lambda: buffer.dispatch(x.float(), handle=handle),
            lambda: handle.topk_idx,
        ):
            with pytest.raises(ValueError, match="topk_idx was changed in place"):
                use()


@pytest.mark.parametrize("ranks_per_node", [None, 2])
@on_ranks("ranks_per_node")
def test_domains(rank: int, case: Case):
    domain = (RANKS // (case.ranks_per_node or RANKS), case.ranks_per_node or RANKS)
    with opened(case, rank, allow_hybrid_mode=False) as buffer:
        import deep_ep

        for ask in (deep_ep.get_physical_domain_size, deep_ep.comm.get_physical_domain_size):
            assert ask(buffer) == ask(dist.group.WORLD) == buffer.context.get_physical_domain_size() == domain
        assert deep_ep.get_logical_domain_size(buffer) == buffer.get_logical_domain_size() == (1, RANKS)
        assert deep_ep.get_logical_domain_size(dist.group.WORLD) == domain
        assert deep_ep.get_logical_domain_size(dist.group.WORLD, False) == (1, RANKS)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == domain
        assert buffer.main_context is buffer.context and buffer.num_lb_bytes == 0
        deep_ep.comm.barrier(buffer, with_cpu_sync=True)
        deep_ep.destroy_all_managed_nccl_comm()
    assert buffer.context is None


@conftest.on_ranks(1)
def test_refusals_and_hints(rank: int):
    """One rank alone: nothing of this is sent."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.logger, "warning", lambda text, *args: lines.append(text % args))
        patch.setattr(config, "_said", set())
        with opened(Case("cpu"), rank, sl_idx=3) as buffer:
            import deep_ep

            assert buffer.get_theoretical_num_sms(EXPERTS, TOPK) == 24
            idx, x = torch.arange(2 * TOPK).view(2, TOPK), torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
            keywords = dict(x=x, topk_idx=idx, num_experts=EXPERTS)
            for wrong in (dict(do_handle_copy=True), dict(defer_epilogue=True), dict(num_experts=0)):
                with pytest.raises(ValueError, match=next(iter(wrong))):
                    buffer.dispatch(**keywords | wrong)
            with pytest.raises(ValueError, match="context_idx"):
                buffer.barrier(context_idx=1)
            event = buffer.dispatch(**keywords, async_with_compute_stream=True, defer_epilogue=True)
            with pytest.raises(ValueError, match="hook_after_wait"):
                event.register_hook_after_wait(lambda: None)
            rows, *_, handle = event.wait()
            assert event.wait() is None and len(rows) == 2
            with pytest.raises(ValueError, match="defer_epilogue"):
                buffer.combine(rows, handle, defer_epilogue=True)
            for name in ("sl_idx", "defer_epilogue"):
                assert sum(line.startswith(f"ep_dispatcher as deep_ep: {name}: ") for line in lines) == 1
            with pytest.raises(NotImplementedError, match="print_memory_usage: "):
                buffer.print_memory_usage()
            for name in MISSING.split():
                with pytest.raises(NotImplementedError, match=f"^{name}: "):
                    getattr(deep_ep, name)(dist.group.WORLD, 1, 1)
            with pytest.raises(NotImplementedError, match="EngramBuffer.get_storage_size_hint"):
                deep_ep.EngramBuffer.get_storage_size_hint(dist.group.WORLD, [1], 8, 1, 1)
            with pytest.raises(NotImplementedError, match="context.barrier: .*EPBuffer"):
                buffer.context.barrier()
            assert not hasattr(buffer, "engram_write"), "a method of ElasticBuffer alone"
