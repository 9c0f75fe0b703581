"""``deep_ep.Buffer`` on GPUs: CUDA graphs, hosts that wait for nothing, other streams, and wrong values in tensors.

Wrong values were device-side asserts, after which the process could not use CUDA any more.
"""

import pytest
import torch
from conftest import on_ranks
from lib.deep_ep_case import EXPERTS, RANKS, Case, Data, make_data, opened, routed

import ep_dispatcher as ep
from ep_dispatcher import engines

pytestmark = pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}")
HIDDEN, TOKENS = 512, 24
CASE = Case("cuda", lengths=(TOKENS,) * RANKS)


def given_to(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    data: Data = make_data(CASE, rank, seed=seed, hidden=HIDDEN)
    return data.x[rank], data.topk_idx[rank], data.weights[rank]


def step(buffer, x, idx, weights, hook: bool = False, **options) -> list[torch.Tensor]:
    """Every operation for which no host waits, and what they give; unused rows are 0."""
    layout = routed(buffer, idx, weights)
    worst = dict(num_worst_tokens=RANKS * TOKENS)
    wait = (lambda event: event.current_stream_wait()) if options else (lambda event: None)
    rows, local_idx, row_weights, _, handle, event = buffer.dispatch(x, **layout, **worst, **options)
    wait(event)
    again, *_, event = buffer.dispatch(x * 2, handle=handle, **options)
    wait(event)
    sums, back, event = buffer.combine(rows, handle, topk_weights=row_weights, **options)
    wait(event)
    counted = [layout[f"num_tokens_per_{of}"] for of in ("rank", "expert")]
    found = [*counted, layout["is_token_in_rank"], rows, local_idx, row_weights, again, sums, back]
    stats = torch.zeros(EXPERTS // RANKS, dtype=torch.int32, device=x.device)
    late = dict(return_recv_hook=True) if hook else options
    for use_fp8 in (False, True):
        recv_x, count, handle, event, receive = buffer.low_latency_dispatch(
            x, idx, TOKENS, EXPERTS, stats, use_fp8=use_fp8, **late
        )
        receive() if hook else wait(event)
        here = torch.arange(RANKS * TOKENS, device=x.device) < count[:, None]
        parts = recv_x if use_fp8 else (recv_x,)
        found += [count, *(part.float().where(here[:, :, None], 0.0) for part in parts)]
        if not use_fp8:
            out = torch.zeros_like(x)
            _, event, receive = buffer.low_latency_combine(recv_x, idx, weights, handle, out=out, **late)
            receive() if hook else wait(event)
            found.append(out)
    return [*found, stats]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize("hook", [False, True])
@on_ranks(RANKS)
def test_a_graph_replays_with_new_routing(rank: int, hook: bool) -> None:
    with opened(CASE) as buffer:
        given = given_to(rank, 0)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(buffer, *given, hook=hook)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            captured = step(buffer, *given, hook=hook)
        for seed in range(1, 4):
            fresh = given_to(rank, seed)
            for t, new in zip(given, fresh):
                t.copy_(new)
            expected = step(buffer, *fresh)
            graph.replay()
            assert_same(captured, expected)


@on_ranks(RANKS)
def test_no_host_waits(rank: int) -> None:
    with opened(CASE) as buffer:
        given = given_to(rank, 0)
        asked = (dict(), dict(hook=True), dict(async_finish=True))

        def step_with_copies() -> None:
            """Values that nothing vouches for: the device compares them."""
            x, idx, weights = given
            routing = routed(buffer, idx, weights)
            routing["is_token_in_rank"] = routing["is_token_in_rank"].clone()
            buffer.dispatch(x, **routing, num_worst_tokens=RANKS * TOKENS)
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, use_fp8=False)
            buffer.low_latency_combine(rows, idx.clone(), weights, handle)

        for options in asked:
            step(buffer, *given, **options)
        step_with_copies()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for options in asked:
                step(buffer, *given, **options)
            step_with_copies()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@on_ranks(RANKS)
def test_operations_in_another_stream(rank: int) -> None:
    """Inputs that are late in the caller's stream, and memory that is given back at once."""
    with opened(CASE) as buffer:
        for seed in range(4):
            x, idx, weights = given_to(rank, seed)
            expected = step(buffer, x, idx, weights)
            torch.cuda._sleep(20_000_000 if rank == seed else 2_000_000)
            found = step(buffer, x + 0, idx + 0, weights + 0, async_finish=True)
            torch.full((1 << 24,), float("nan"), device=x.device)  # may get memory that is free by then
            assert_same(found, expected)


@on_ranks(RANKS)
def test_weights_of_other_ranks_are_nan(rank: int) -> None:
    """Rank 1 gives weights to experts of other ranks: NaN in what they belong to, and nothing else is lost."""
    with opened(CASE) as buffer:
        x, idx, weights = given_to(rank, 0)
        rows, local_idx, row_weights, _, handle, _ = buffer.dispatch(x, **routed(buffer, idx, weights))
        sums, back, _ = buffer.combine(rows, handle, topk_weights=row_weights)
        given = torch.where(local_idx < 0, 2.0, row_weights) if rank == 1 else row_weights
        again, found, _ = buffer.combine(rows, handle, topk_weights=given)
        is_lost = (idx // (EXPERTS // RANKS) == 1) & ((idx // (EXPERTS // RANKS)) != 1).any(1, keepdim=True)
        assert torch.equal(again, sums) and bool(is_lost.any())
        assert torch.equal(found.isnan(), is_lost) and torch.equal(found[~is_lost], back[~is_lost])


def other_experts(idx: torch.Tensor) -> torch.Tensor:
    """A combine's choices, with one expert that the token was not sent to."""
    other = idx.clone()
    other[0, 0] = EXPERTS + 5
    return other


def assert_cuda_lives(device: torch.device) -> None:
    torch.cuda.synchronize()
    assert int(torch.ones(8, device=device).sum()) == 8


@on_ranks(RANKS)
def test_a_hand_made_layout_where_the_host_waits(rank: int) -> None:
    """Rank 0 alone gives it, and gets the error from this dispatch. The buffer stays usable."""
    with opened(CASE) as buffer:
        x, idx, weights = given_to(rank, 0)
        routing = routed(buffer, idx, weights)
        wanted = buffer.dispatch(x, **routing)[0]
        if rank == 0:
            wrong = dict(is_token_in_rank=torch.zeros_like(routing["is_token_in_rank"]))
            with pytest.raises(ValueError, match="^is_token_in_rank has another routing"):
                buffer.dispatch(x, **routing | wrong)
        else:
            assert torch.equal(buffer.dispatch(x, **routing)[0], wanted)
        assert torch.equal(buffer.dispatch(x, **routing)[0], wanted)
        assert_cuda_lives(x.device)


@pytest.mark.parametrize("operation", ["dispatch", "low_latency_combine", "graph"])
@on_ranks(RANKS)
def test_wrong_values_where_no_host_waits(rank: int, operation: str) -> None:
    """The next operation of rank 0 raises ValueError, the others PeerTimeoutError, and all can begin again."""
    x, idx, weights = given_to(rank, 0)
    with opened(CASE) as buffer:
        expected = step(buffer, x, idx, weights)
        routing = routed(buffer, idx, weights)
        in_rank = torch.zeros_like(routing["is_token_in_rank"]) if rank == 0 else routing["is_token_in_rank"]
        worst = dict(num_worst_tokens=RANKS * TOKENS)
        if operation == "low_latency_combine":
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, use_fp8=False)
            given = other_experts(idx) if rank == 0 else idx
            sums, _, _ = buffer.low_latency_combine(rows, given, weights, handle)
            assert bool(sums.isfinite().all())
        elif operation == "dispatch":
            buffer.dispatch(x, **routing | dict(is_token_in_rank=in_rank), **worst)
        else:
            graph, given = torch.cuda.CUDAGraph(), routing["is_token_in_rank"].clone()
            hand_made = routing | dict(is_token_in_rank=given)
            buffer.dispatch(x, **hand_made, **worst)
            with torch.cuda.graph(graph):
                buffer.dispatch(x, **hand_made, **worst)
            graph.replay()
            given.copy_(in_rank)
            graph.replay()
        torch.cuda.synchronize()
        name = "topk_idx" if operation == "low_latency_combine" else "is_token_in_rank"
        with pytest.raises(ValueError if rank == 0 else ep.PeerTimeoutError) as raised:
            buffer.dispatch(x, **routing, **worst)
            torch.cuda.synchronize()
            buffer.dispatch(x, **routing, **worst)  # a late rank is found at the next call
        if rank == 0:
            raised.match(f"^{name} has ")
        assert_cuda_lives(x.device)
    with opened(CASE) as buffer:
        assert_same(step(buffer, x, idx, weights), expected)


@pytest.mark.parametrize("expert", [EXPERTS, -2, 2**62])
@on_ranks(RANKS)
def test_experts_that_do_not_exist(rank: int, expert: int) -> None:
    """get_dispatch_layout counts them as none, and the dispatch refuses them, on the rank that gives them."""
    with opened(CASE) as buffer:
        x, idx, weights = given_to(rank, 0)
        wrong = idx.clone()
        wrong[3, 1] = expert if rank == 0 else idx[3, 1]
        routing, plain = routed(buffer, wrong, weights), routed(buffer, wrong.where(wrong != expert, -1), weights)
        for key in ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"):
            assert torch.equal(routing[key], plain[key])
        without = {key: value for key, value in routing.items() if not key.startswith("topk")}
        for given, start in ((routing, rf"topk_idx\[3, 1\] is {expert}, "), (without, "topk_idx was given to ")):
            if rank == 0:
                with pytest.raises(ValueError, match=f"^{start}"):
                    buffer.dispatch(x, **given)
            else:
                buffer.dispatch(x, **given)
        buffer.dispatch(x, **routed(buffer, idx, weights))
        assert_cuda_lives(x.device)
