"""Cases of decode layout: inputs, the definition's results, and comparisons with them."""

import torch
from torch import Tensor

from ep_dispatcher import reference
from ep_dispatcher.tools.testing import RankPool, device_of
from lib import dispatch_combine as grid
from lib.dispatch_combine import Case, Inputs, assert_same, make_buffer, make_inputs, to
from lib.errors import assert_refused
from lib.experts import uninitialised_memory_is_nan


def results_of_experts(case: Case, counts: list[int], rows_per_group: int, rank: int) -> Tensor:
    """Random [num_local_experts, rows_per_group, hidden], NaN where there is no token."""
    generator = torch.Generator().manual_seed(1000 + rank)
    y = torch.randn(case.experts_per_rank, rows_per_group, case.hidden, generator=generator).to(case.dtype)
    for group, count in zip(y, counts):
        group[count:] = float("nan")
    return y


def weights_of(case: Case, inputs: Inputs, rank: int) -> Tensor:
    """Random, with zeros and negative ones; NaN where the token has no expert."""
    idx = inputs.topk_idx[rank]
    weights = torch.randn(idx.shape, generator=torch.Generator().manual_seed(2000 + rank))
    weights[::5] = 0
    return weights.masked_fill(idx < 0, float("nan"))


def at_no_multiple_of_16_bytes(x: Tensor) -> Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def run_case(rank: int, engine: str, case: Case, inputs: Inputs, again: list, options: dict):
    """Dispatch and combine, then the same with other rows on the cached handle. Unwritten memory is NaN."""
    device = device_of(engine, rank)
    torch.set_num_threads(case.threads)
    quantize, results, handle = case.quantize, [], None
    with make_buffer(case, engine, inputs.most_tokens) as buffer, uninitialised_memory_is_nan():
        for x in (inputs.x[rank], again[rank]):
            x, topk_idx = to(device, x), to(device, inputs.topk_idx[rank].clone()) if handle is None else None
            if options:
                x = x.clone() if handle is None else at_no_multiple_of_16_bytes(x)
            layout = {} if handle else {"layout": "decode"}
            received = buffer.dispatch(x, topk_idx, quantize=quantize, handle=handle, **layout, **options)
            if options:
                x.fill_(float("nan"))
                if handle is None:
                    topk_idx.fill_(-1)
                assert_refused("hook", buffer.dispatch, x, to(device, inputs.topk_idx[rank]))
                received.hook()
            handle = received.handle
            counts = received.tokens_per_expert
            rows = received.x if isinstance(received.x, tuple) else (received.x,)
            y = to(device, results_of_experts(case, counts.tolist(), rows[0].shape[1], rank))
            weights, num_tokens, out = to(device, weights_of(case, inputs, rank)), len(inputs.topk_idx[rank]), None
            if options:
                out = torch.empty(num_tokens, case.hidden, dtype=case.dtype, device=device, requires_grad=True)
            combined = buffer.combine(y, handle, weights=weights, out=out, **options)
            if options:
                assert_refused("hook", buffer.combine, y, handle, weights=weights)
                y.fill_(float("nan"))
                weights.fill_(float("nan"))
                combined.hook()
                combined.hook()  # a second call does nothing
                assert combined.x is out
            else:
                assert received.hook() is combined.hook() is None  # they do nothing
            assert received.rows_per_expert is counts and counts.dtype == torch.int32
            assert received.topk_weights is received.topk_idx is combined.topk_weights is None
            results.append((tuple(rows), counts, combined.x.detach()))
    torch.set_num_threads(1)
    return results


def expected_of(case: Case, inputs: Inputs, x: list):
    options = dict(num_experts=case.num_experts, layout="decode")
    x = [grid.quantized(rows, case.quantize) for rows in x] if case.quantize else x
    received = reference.dispatch(x, inputs.topk_idx, None, max_tokens_per_rank=inputs.most_tokens, **options)
    rows_per_group = case.num_ranks * inputs.most_tokens
    counts = [out.tokens_per_expert.tolist() for out in received]
    y = [results_of_experts(case, own, rows_per_group, rank) for rank, own in enumerate(counts)]
    factors = [weights_of(case, inputs, rank) for rank in range(case.num_ranks)]
    flat = [rows.flatten(0, 1) for rows in y]
    combined = reference.combine(flat, received, inputs.topk_idx, node_of=case.node_of, factors=factors, **options)
    return received, [x for x, _ in combined]


def assert_case(case: Case, inputs: Inputs, again: list, ranks: list | dict) -> None:
    """Compare what ``run_case`` returned on these ranks with the definition."""
    rows_per_group = case.num_ranks * inputs.most_tokens
    for use, x in enumerate((inputs.x, again)):
        received, combined = expected_of(case, inputs, x)
        for rank, results in ranks.items() if isinstance(ranks, dict) else enumerate(ranks):
            rows, counts, sums = results[use]
            right = received[rank]
            assert_same(counts.long(), right.tokens_per_expert, f"rank {rank}: counts")
            assert_same(sums, combined[rank], f"rank {rank}, use {use}: sums")
            right_rows = right.x if isinstance(right.x, tuple) else (right.x,)
            for seen, wanted in zip(rows, right_rows, strict=True):
                assert seen.shape == (case.experts_per_rank, rows_per_group, wanted.shape[1])
                for e, count in enumerate(counts.tolist()):
                    begin = e * rows_per_group
                    assert_same(seen[e, :count], wanted[begin : begin + count], f"rank {rank}, expert {e}")
                    assert seen[e, count:].float().isnan().all(), "a row behind the count was written"


def replay(rank: int, case: Case, steps: list[Inputs], hooked: bool, max_tokens: int) -> list[Tensor]:
    """Capture a dispatch and a combine once, and replay them for every step."""
    device, results = device_of("cuda", rank), []
    with make_buffer(case, "cuda", max_tokens) as buffer:
        given = [t.clone() for t in steps[0].on(rank, device)[:2]]
        weights = to(device, weights_of(case, steps[0], rank))

        def run() -> Tensor:
            out = buffer.dispatch(*given, layout="decode", return_hook=hooked)
            if hooked:
                out.hook()
            combined = buffer.combine(out.x, out.handle, weights=weights, return_hook=hooked)
            if hooked:
                combined.hook()
            return combined.x

        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = run()
        for inputs in steps:
            for tensor, value in zip(
                (*given, weights), (inputs.x[rank], inputs.topk_idx[rank], weights_of(case, inputs, rank))
            ):
                tensor.copy_(value)
            graph.replay()
            buffer.check()
            results.append(result.cpu())
    return results


def check_graphs(pool: RankPool, num_ranks: int, ranks_per_node: int, hooked: bool, max_tokens: int = 32) -> None:
    case = Case(num_ranks, ranks_per_node, torch.bfloat16, layout="decode", weighted=False, num_topk=3)
    steps, options = [make_inputs(case, seed) for seed in range(5)], dict(num_experts=case.num_experts, layout="decode")
    for rank, results in enumerate(pool.run(replay, case, steps, hooked, max_tokens)):
        for inputs, seen in zip(steps, results, strict=True):
            received = reference.dispatch(inputs.x, inputs.topk_idx, None, max_tokens_per_rank=max_tokens, **options)
            factors = [weights_of(case, inputs, source) for source in range(num_ranks)]
            y = [out.x for out in received]
            combined = reference.combine(y, received, inputs.topk_idx, node_of=case.node_of, factors=factors, **options)
            assert_same(seen, combined[rank][0], f"rank {rank}")
