"""What only GPUs have: graphs, streams, multiprocessors, errors that come later."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.cuda_region import Region
from lib.dispatch_combine import Case, assert_step, check_case, expected_of, expert_rows, make_inputs, to
from lib.dispatch_combine import make_buffer as buffer_of
from lib.errors import assert_refused

import ep_dispatcher as ep
from ep_dispatcher import engines, recompute
from ep_dispatcher.engines import suspension
from ep_dispatcher.errors import OtherRoutingError
from ep_dispatcher.tools.testing import device_of, make_routing

pytestmark = pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}")
EXPERTS, TOPK, HIDDEN, TOKENS = 12, 3, 512, 64


def make_buffer(group=None, **changes) -> ep.Buffer:
    device_of("cuda", dist.get_rank(group))
    sizes = dict(hidden=HIDDEN, num_experts=EXPERTS, num_topk=TOPK, max_tokens_per_rank=TOKENS, timeout_s=20)
    return ep.Buffer(group, engine="cuda", **(sizes | changes))


def inputs(rank: int, seed: int, num_tokens: int = TOKENS):
    device = device_of("cuda", rank)
    idx, weights = make_routing("masked", num_tokens, EXPERTS, TOPK, seed=10 * seed + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(10 * seed + rank)).bfloat16()
    return x.to(device), idx.to(device), weights.to(device)


def step(buffer: ep.Buffer, x, idx, weights, **options):
    """Forward and backward: received rows, result and gradients."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = ep.dispatch(buffer, x, idx, weights, max_recv_rows=200, **options)
    y = ep.combine(buffer, (out.x * out.topk_weights[:, None]).bfloat16(), out.handle)
    grads = torch.autograd.grad(y.float().square().sum(), (x, weights))
    return out.x.detach(), y.detach(), *grads


@on_ranks(2)
def test_ranks_that_have_made_different_numbers_of_buffers(rank):
    alone = [dist.new_group([member]) for member in range(2)]  # collective
    for _ in range(1 + 2 * rank):
        make_buffer(alone[rank]).destroy()
    with make_buffer() as buffer:
        step(buffer, *inputs(rank, 0))


def capture(buffer, *given):
    """Return a graph of one step, and the tensors that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(buffer, *given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(buffer, *given)
    return graph, captured


def replay(graph, given, fresh) -> None:
    """Replay with other inputs."""
    for t, new in zip(given, fresh):
        t.copy_(new)
    graph.replay()


@pytest.mark.parametrize("max_tokens, is_direct", [(TOKENS, True), (4096, False)])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@on_ranks(2)
def test_few_tokens_take_direct_plans(rank, layout, max_tokens, is_direct):
    """A new plan in a buffer for few tokens is made from choices, which arrive as words with the epoch; one with a
    handle, and one in a buffer for many tokens, is not. Ranks with and without a waiting host make one dispatch."""
    with make_buffer(max_tokens_per_rank=max_tokens) as buffer:
        x, idx, weights = inputs(rank, 0, 8)
        buffer.dispatch(x, idx, weights, layout=layout)
        handle = buffer.dispatch(x, idx, weights, layout=layout, max_recv_rows=200).handle
        buffer.dispatch(x, None, weights, handle=handle)
        buffer.dispatch(x, idx, weights, layout=layout, max_recv_rows=None if rank == 0 else 200)
        buffer.check()
        region = Region(buffer)
        assert region.config.plans_directly == is_direct
        if is_direct:
            words = max_tokens * ((TOPK + 7) // 8 * 8) // 4  # of a rank, of 16 bytes: an epoch and four choices
            for source in range(2):  # words of odd epochs come behind those of even ones
                at = [region.at["choices"] + 16 * words * (2 * odd + source) for odd in (0, 1)]
                assert [region.read(rank, offset) for offset in at] == [4, 1]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_ranks()
def test_a_graph_replays_with_new_routing(rank, num_ranks):
    with make_buffer() as buffer:
        given = inputs(rank, 0)
        graph, captured = capture(buffer, *given)
        for seed in range(1, 6):
            fresh = inputs(rank, seed)
            expected = [t.clone() for t in step(buffer, *fresh)]
            replay(graph, given, fresh)
            assert all(map(torch.equal, captured, expected))


@on_ranks(2)
def test_a_graph_finds_another_routing_than_that_of_its_plan(rank):
    with make_buffer() as buffer:
        x, given, _ = inputs(rank, 0)
        planned = given.clone()
        handle = buffer.plan(planned, max_recv_rows=200)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recompute.compare_routing(buffer.live_engine(), planned, given, (3, 4))
            received = buffer.dispatch(x, handle=handle).x
        expected = buffer.dispatch(x, handle=handle).x
        for changes in (False, True, False):
            given.copy_(planned)
            if changes:
                given[-1, -1] = EXPERTS
            graph.replay()
            if changes:
                with pytest.raises(OtherRoutingError, match=f"topk_idx.{TOKENS - 1}, {TOPK - 1}. is {EXPERTS}, "):
                    buffer.check()
            buffer.check()
            assert torch.equal(received, expected)
        recompute.compare_routing(buffer.live_engine(), planned, inputs(rank, 1)[1], (3, 4))
        torch.cuda.synchronize()
        buffer.dispatch(x, handle=handle)  # publishes it
        torch.cuda.synchronize()
        with pytest.raises(OtherRoutingError, match="destroy") as caught:
            buffer.dispatch(x, handle=handle)
        assert caught.value.where == (3, 4)


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 2), (4, 2)])
def test_a_graph_replays_after_suspend_and_resume(pools, num_ranks, ranks_per_node):
    pytest.importorskip("cuda.bindings", reason="no cuda-bindings")
    pools(num_ranks).run(replay_after_suspend, ranks_per_node)


def replay_after_suspend(rank: int, ranks_per_node: int) -> None:
    """A graph replays rightly after each resume. A replay while the buffer is suspended harms nobody."""
    with make_buffer(max_tokens_per_rank=8192, ranks_per_node=ranks_per_node, suspendable=True) as buffer:
        given = inputs(rank, 0)
        graph, captured = capture(buffer, *given)
        for turn in range(1, 21):
            fresh = inputs(rank, turn % 3)
            replay(graph, given, fresh)  # suspend() waits for it
            buffer.suspend()
            if turn % 5 == 0:
                graph.replay()
                torch.cuda.synchronize()
            spoilt = torch.full((2**24,), turn, dtype=torch.uint8, device="cuda")  # PyTorch may get the same memory
            buffer.resume()
            expected = [t.clone() for t in step(buffer, *fresh)]
            graph.replay()
            assert all(map(torch.equal, captured, expected)) and (spoilt == turn).all()
        buffer.check()


@pytest.mark.parametrize("max_tokens,stream", [(TOKENS, "current"), (TOKENS, "other"), (4096, "other")])
def test_suspend_ends_a_replay_that_one_rank_began_alone(pools, max_tokens, stream):
    """After resume() no word of that replay passes for one of the next operation.

    Such words had the epoch of the next operation. So rank 1 took the Call and the choices of rank 0's replay (with
    direct plans, thus few tokens), or the Call alone, before rank 0 began, and received wrong rows. In the current
    stream suspend() waited behind the replay, until that found rank 1 late.
    """
    pytest.importorskip("cuda.bindings", reason="no cuda-bindings")
    pools(2).run(catch_a_replay, max_tokens, stream)


def catch_a_replay(rank: int, max_tokens: int, stream: str) -> None:
    with make_buffer(max_tokens_per_rank=max_tokens, suspendable=True) as buffer:
        assert buffer.live_engine()._c_config.plans_directly == (max_tokens == TOKENS)
        given = inputs(rank, 0)
        graph, captured = capture(buffer, *given)
        replayed_in = torch.cuda.current_stream() if stream == "current" else torch.cuda.Stream()
        own = suspension.change

        def change(name, meet, health, first, *then) -> None:
            def settle_and_replay() -> None:
                first()
                with torch.cuda.stream(replayed_in):
                    graph.replay()  # as another thread may
                time.sleep(0.2)  # it has begun, and waits for rank 1

            own(name, meet, health, settle_and_replay, *then)

        for turn in range(1, 4):
            fresh = inputs(rank, turn)
            expected = [t.clone() for t in step(buffer, *fresh)]
            with mock.patch.object(suspension, "change", change if rank == 0 else own):
                begin = time.monotonic()
                buffer.suspend()
                assert time.monotonic() - begin < 10
            buffer.resume()
            if rank == 0:
                time.sleep(0.3)  # rank 1 begins alone, and would find words of the replay
            assert all(map(torch.equal, step(buffer, *fresh), expected))
            replay(graph, given, fresh)
            assert all(map(torch.equal, captured, expected))
        buffer.check()


@on_ranks(2)
def test_operations_of_two_streams_stay_in_order_in_a_graph(rank):
    """A graph in which an operation runs in the buffer's own stream and the next one in the captured stream."""
    with make_buffer() as buffer:
        given = inputs(rank, 0)

        def run():
            out = buffer.dispatch(*given, max_recv_rows=200, async_finish=True)
            again = buffer.dispatch(*given, max_recv_rows=200)
            out.event.wait()
            return out.x, again.x, buffer.combine(again.x, out.handle).x

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for seed in range(1, 4):
            for t, new in zip(given, inputs(rank, seed)):
                t.copy_(new)
            expected = run()
            graph.replay()
            assert all(map(torch.equal, captured, expected))
        buffer.check()


@on_ranks(1)
def test_a_graph_needs_max_recv_rows(rank):
    with make_buffer() as buffer:
        given = inputs(rank, 0)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="^max_recv_rows is None"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            buffer.dispatch(*given)


@on_ranks(2)
def test_no_host_waits_with_max_recv_rows(rank):
    with make_buffer() as buffer:
        given = inputs(rank, 0)
        step(buffer, *given)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(buffer, *given)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@on_ranks(2)
def test_asynchronous_operations_in_their_own_stream(rank):
    with make_buffer() as buffer, make_buffer() as other:
        for seed in range(8):
            x, idx, weights = inputs(rank, seed)
            right = buffer.dispatch(x, idx, weights)
            right_sum = buffer.combine(right.x, right.handle).x
            if rank == seed % 2:
                torch.cuda._sleep(20_000_000)  # this rank is late
            out = buffer.dispatch(x, idx, weights, async_finish=True, max_recv_rows=right.x.shape[0])
            beside = other.dispatch(x, idx, weights)  # meanwhile, in another stream
            out.event.wait()
            res = buffer.combine(out.x, out.handle, async_finish=True)
            res.event.wait()
            assert torch.equal(out.x, right.x) and torch.equal(res.x, right_sum) and torch.equal(beside.x, right.x)
            res.event.synchronize()
            assert res.event.query()


@on_ranks(2)
def test_errors_that_the_device_finds(rank):
    with make_buffer() as buffer:
        x, idx, weights = inputs(rank, 0)
        right = buffer.dispatch(x, idx, weights)
        out = buffer.dispatch(x, idx, weights, max_recv_rows=3)
        with pytest.raises(ValueError, match="^max_recv_rows is too small: rank 0 needs .*but has 3"):
            out.event.synchronize()
        dist.barrier()
        bad = idx.clone()
        bad[5, 1] = EXPERTS
        with pytest.raises(ValueError, match=rf"^topk_idx\[5, 1\] is {EXPERTS}, but has to be -1"):
            buffer.dispatch(x, bad, weights)
        dist.barrier()
        again = buffer.dispatch(x, idx, weights)  # the buffer is as good as before
        assert torch.equal(again.x, right.x)


@on_ranks(2)
def test_a_tensor_on_another_device_is_refused_and_the_buffer_works_on(rank):
    with make_buffer() as buffer:
        x, idx, weights = inputs(rank, 0)
        right = buffer.dispatch(x, idx, weights)
        right_sum = buffer.combine(right.x, right.handle).x
        decoded = buffer.dispatch(x, idx, layout="decode")
        for argument, call in [
            ("x", lambda: buffer.dispatch(x.cpu(), idx, weights)),
            ("x", lambda: buffer.dispatch(x.cpu(), handle=right.handle)),
            ("topk_idx", lambda: buffer.dispatch(x, idx.cpu(), weights)),
            ("topk_weights", lambda: buffer.dispatch(x, idx, weights.cpu())),
            ("y", lambda: buffer.combine(right.x.cpu(), right.handle)),
            ("topk_weights", lambda: buffer.combine(right.x, right.handle, topk_weights=right.topk_weights.cpu())),
            ("weights", lambda: buffer.combine(decoded.x, decoded.handle, weights=weights.cpu())),
        ]:
            assert "cpu" in assert_refused(argument, call)
        again = buffer.dispatch(x, idx, weights)
        assert torch.equal(again.x, right.x) and torch.equal(buffer.combine(again.x, again.handle).x, right_sum)


@pytest.mark.parametrize("num_sms", [1, 2, 5, 132])
@on_ranks(2)
def test_any_number_of_multiprocessors(rank, num_sms):
    case = Case(2, 2, torch.bfloat16, num_topk=3, experts_per_rank=3, alignment=8, tokens="many")
    given, device = make_inputs(case), device_of("cuda", rank)
    right, (right_x, _) = expected_of(case, given, None)[rank]
    with buffer_of(case, "cuda", 2500, num_sms=num_sms) as buffer:
        out = buffer.dispatch(*given.on(rank, device), expert_alignment=case.alignment)
        y, _ = to(device, expert_rows(case, out, rank))
        assert_step((out, (buffer.combine(y, out.handle).x, None)), (right, (right_x, None)), f"rank {rank}")
        # Warps and blocks have taken rows from a counter; each operation finds it at 0 again.
        again = buffer.dispatch(given.on(rank, device)[0], handle=out.handle, expert_alignment=case.alignment)
        assert torch.equal(again.x, out.x) and torch.equal(buffer.combine(y, again.handle).x.cpu(), right_x)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("num_sms", [1, 2])
@on_ranks(3)
def test_pull_warps_take_long_rows(rank, num_sms, layout):
    """Each row comes once, also of a number of sources that does not divide those dealt; and in replays of a graph."""
    case = Case(3, 3, torch.bfloat16, num_topk=2, experts_per_rank=3, hidden=8192, layout=layout, tokens="some")
    given, device = make_inputs(case), device_of("cuda", rank)
    right, _ = expected_of(case, given, 2000)[rank]
    with buffer_of(case, "cuda", 4096, num_sms=num_sms) as buffer:
        x, idx, weights = given.on(rank, device)
        out = buffer.dispatch(x, idx, weights, layout=layout, max_recv_rows=2000)
        assert torch.equal(out.x.cpu(), right.x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = buffer.dispatch(x, idx, weights, layout=layout, max_recv_rows=2000)
        for _ in range(3):
            out.x.zero_()
            graph.replay()
            assert torch.equal(out.x.cpu(), right.x)


@pytest.mark.parametrize(
    "num_ranks,dtype,hidden,num_topk,experts_per_rank",
    [
        (3, torch.float16, 8, 3, 2),  # rows of 16 bytes
        (5, torch.bfloat16, 24, 5, 3),  # of 48
        (6, torch.float32, 4, 2, 1),
        (7, torch.float16, 1000, 8, 4),
        (8, torch.bfloat16, 520, 32, 256),  # 2048 experts
        (8, torch.float32, 7168, 1, 1),
    ],
)
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_ranks_and_rows_of_all_kinds(pools, num_ranks, dtype, hidden, num_topk, experts_per_rank, layout):
    shape = dict(hidden=hidden, num_topk=num_topk, experts_per_rank=experts_per_rank, tokens="uneven", recv="spare")
    check_case(pools, "cuda", Case(num_ranks, num_ranks, dtype, layout=layout, **shape))


@pytest.mark.parametrize("num_topk,experts_per_rank", [(64, 40), (32, 16), (8, 1024), (1, 1)])
def test_extreme_numbers_of_experts(pools, num_topk, experts_per_rank):
    shape = dict(num_topk=min(num_topk, 2 * experts_per_rank), experts_per_rank=experts_per_rank)
    check_case(pools, "cuda", Case(2, 2, torch.bfloat16, **shape))
