"""Between (virtual) nodes: what crosses, that it is right however the routing changes, and who may form nodes."""

import importlib
import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import test_dispatch_combine as grid
import torch
from conftest import exhaustive, on, on_ranks
from test_dispatch_combine import Case, Inputs, assert_same, expected_of, expert_rows, make_buffer, random_rows, to

import ep_dispatcher as ep
import ep_dispatcher.buffer as buffer_module
from ep_dispatcher.engines import ENGINES
from ep_dispatcher.tools.testing import device_of, make_routing

SMALL = dict(dtype=torch.bfloat16, num_topk=3, experts_per_rank=4, hidden=512)
NUM_TOKENS = 600  # more than a chunk of sums
NUM_ROWS = 8 * NUM_TOKENS
# Rows in one or several pieces, and tails that go with the last piece; those of 4608 bytes leave too little room.
LONG_ROWS = [
    dict(dtype=torch.bfloat16, num_topk=8, experts_per_rank=8, **long)
    for long in (
        dict(hidden=7168),
        dict(hidden=7168, recv="exact"),
        dict(hidden=7168, payload="pair"),
        dict(hidden=4608, payload="pair", recv="exact"),
        dict(hidden=7168, payload="quantize", recv="exact"),
    )
]
needs_pace = pytest.mark.skipif(
    "cuda" not in ENGINES or not importlib.import_module("ep_dispatcher._C_cuda").has_pace,
    reason="built without a pace",
)
FAST = 10000.0  # GB/s: data waits for nothing, but takes the way of a paced wire
cuda = pytest.mark.parametrize("engine", [on("cuda")])


def make_inputs(case: Case, num_tokens: list[int], kind: str, seed: int) -> Inputs:
    x, topk_idx, topk_weights = [], [], []
    for rank_seed, num in enumerate(num_tokens, 100 * seed):
        idx, weights = make_routing(kind, num, case.num_experts, case.num_topk, seed=rank_seed)
        topk_idx.append(idx)
        topk_weights.append(weights)
        x.append(random_rows(case, num, rank_seed))
    return Inputs(x, topk_idx, topk_weights)


def assert_step(case: Case, rank: int, given: Inputs, out, combined, max_recv_rows: int | None, where: str) -> None:
    expected = expected_of(case, given, max_recv_rows)[rank]
    grid.assert_step((out, (combined.x, combined.topk_weights)), expected, where)


def assert_equal(seen, expected, where: str) -> None:
    assert_same(to("cpu", seen), to("cpu", expected), where)


# ---- what crosses ---------------------------------------------------------------------------------------------------


def least_rows(case: Case, topk_idx: torch.Tensor, rank: int) -> list[int]:
    """Of this rank's tokens: how many have an expert on each node, by node; its own node needs nothing."""
    nodes = torch.where(topk_idx < 0, -1, topk_idx // (case.experts_per_rank * case.ranks_per_node))
    own = rank // case.ranks_per_node
    return [0 if n == own else int((nodes == n).any(1).sum()) for n in range(case.num_ranks // case.ranks_per_node)]


def sent_by(buffer: ep.Buffer, run) -> tuple[list[int], list[int]]:
    """Bytes of rows, and of lists, that an operation sends to each rank."""
    before, result = buffer.counters(), run()
    after = buffer.counters()
    names = ("inter_node_bytes_sent", "inter_node_list_bytes_sent")
    return result, *([b - a for a, b in zip(before[name], after[name], strict=True)] for name in names)


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2), (4, 1)])
@on_ranks()
def test_a_row_crosses_once_per_token_and_node(rank, engine, num_ranks, ranks_per_node):
    case = Case(num_ranks, ranks_per_node, **SMALL)
    device, given = device_of(engine, rank), make_inputs(case, [NUM_TOKENS] * num_ranks, "masked", 3)
    x, idx, weights = given.on(rank, device)
    own, per_node = divmod(rank, case.ranks_per_node)
    rail = [node * case.ranks_per_node + per_node for node in range(case.num_ranks // case.ranks_per_node)]
    slack = 0 if engine == "cuda" else 512  # the CPU engine's messages have headings, and aligned parts

    def expect(sent: list[int], rows: list[int], row_bytes: int) -> None:
        for node, peer in enumerate(rail):
            least = rows[node] * row_bytes
            assert least <= sent[peer] <= least + slack * (node != own), f"to rank {peer}: {sent[peer]}, least {least}"
        assert not any(count for peer, count in enumerate(sent) if peer not in rail), "bytes leave the rail"

    there = least_rows(case, given.topk_idx[rank], rank)
    back = [0] * len(rail)  # tokens of the rail peers that have an expert on this node
    for node, peer in enumerate(rail):
        back[node] = least_rows(case, given.topk_idx[peer], peer)[own]
    tail = -(-case.num_topk * 4 // 16) * 16 if engine == "cuda" else case.num_topk * 4
    with make_buffer(case, engine, NUM_TOKENS) as buffer:
        out, sent, lists = sent_by(buffer, lambda: buffer.dispatch(x, idx, weights))
        expect(sent, there, case.hidden * 2 + tail)
        assert all((lists[peer] > 0) == (peer != rank) for peer in rail)
        _, sent, lists = sent_by(buffer, lambda: buffer.dispatch(x, handle=out.handle))
        expect(sent, there, case.hidden * 2)
        assert all(count <= 80 for count in lists), "a cached dispatch has no lists, only Calls"
        y, row_weights = to(device, expert_rows(case, out, rank))
        _, sent, _ = sent_by(buffer, lambda: buffer.combine(y, out.handle, topk_weights=row_weights))
        if engine == "cuda":
            expect(sent, back, case.hidden * 2 + case.num_topk * 4)
        _, sent, _ = sent_by(buffer, lambda: buffer.combine(y, out.handle))
        expect(sent, back, case.hidden * 2)


# ---- many steps -----------------------------------------------------------------------------------------------------


def steps_of(case: Case, num_steps: int, first_seed: int = 0) -> Iterator[tuple[int, Inputs, int | None]]:
    """Yield the number of a step, its inputs and max_recv_rows."""
    for step in range(num_steps):
        rng = random.Random(first_seed + step)
        num_tokens = [rng.choice([0, 1, 32, 33, 256, 257, NUM_TOKENS]) for _ in range(case.num_ranks)]
        given = make_inputs(case, num_tokens, rng.choice(["uniform", "masked", "skewed"]), step)
        yield step, given, rng.choice([None, NUM_ROWS])


def change_routing(rank: int, engine: str, case: Case, num_steps: int) -> None:
    device = device_of(engine, rank)
    with make_buffer(case, engine, NUM_TOKENS) as buffer:
        for step, given, max_recv_rows in steps_of(case, num_steps):
            x, idx, weights = given.on(rank, device)
            out = buffer.dispatch(x, idx, weights, max_recv_rows=max_recv_rows)
            if step % 3 == 0:
                again = buffer.dispatch(x, None, weights, handle=out.handle)
                assert_equal(again.x, out.x, f"step {step}: the cached dispatch")
            buffer.check()
            y, row_weights = to(device, expert_rows(case, out, rank))
            combined = buffer.combine(y, out.handle, topk_weights=row_weights)
            buffer.check()
            if step % 5 == rank % 5 or step == num_steps - 1:
                assert_step(case, rank, given, out, combined, max_recv_rows, f"step {step}")


@pytest.mark.parametrize(
    "num_ranks,ranks_per_node", [(2, 1), (4, 2), exhaustive(4, 1), exhaustive(8, 4), exhaustive(8, 2), exhaustive(8, 1)]
)
def test_every_step_has_another_routing(pools, engine, num_ranks, ranks_per_node):
    num_steps = 200 if engine == "cuda" else 20
    pools(num_ranks).run(change_routing, engine, Case(num_ranks, ranks_per_node, **SMALL), num_steps)


def too_few_rows(rank: int, engine: str, case: Case, num_steps: int) -> None:
    """Every other dispatch finds that the rows do not fit, when some have crossed. Its peers' next operation is a
    combine, or a dispatch."""
    device, last = device_of(engine, rank), None
    with make_buffer(case, engine, NUM_TOKENS) as buffer:
        for step in range(num_steps):
            num_tokens = [NUM_TOKENS] * (case.num_ranks - 1) + [0 if step % 3 == 2 else NUM_TOKENS]
            given = make_inputs(case, num_tokens, "uniform", step)
            x, idx, weights = given.on(rank, device)
            with pytest.raises(ValueError, match="max_recv_rows: too small: rank 0 needs"):  # of others where counted
                buffer.dispatch(x, idx, weights, max_recv_rows=100 if rank == 0 or step % 2 else None)
                buffer.check()
            if last is not None and step % 2:
                y, handle, expected = last
                assert_equal(buffer.combine(y, handle).x, expected, f"step {step}: the combine after it")
            out = buffer.dispatch(x, idx, weights, max_recv_rows=NUM_ROWS)
            y, row_weights = to(device, expert_rows(case, out, rank))
            combined = buffer.combine(y, out.handle, topk_weights=row_weights)
            buffer.check()
            assert_step(case, rank, given, out, combined, NUM_ROWS, f"step {step}")
            last = y, out.handle, buffer.combine(y, out.handle).x


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2)])
def test_rows_that_do_not_fit_leave_nothing_behind(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(too_few_rows, engine, Case(num_ranks, ranks_per_node, **SMALL), 6)


def train(rank: int, engine: str, case: Case, num_steps: int) -> None:
    """Steps with another routing each: dispatch, now and then by the handle, combine, and the backward of both.

    The host looks at no output before ``check``: tests/remote_wire.cu says why.
    """
    device = device_of(engine, rank)
    with make_buffer(case, engine, NUM_TOKENS) as buffer:
        for step, given, max_recv_rows in steps_of(case, num_steps, first_seed=1000):
            rows = [random_rows(case, len(x), 7000 + r) for r, x in enumerate(given.x)]
            grads = Inputs(rows, given.topk_idx, None)
            x, idx, weights = given.on(rank, device)
            x, weights, grad = x.requires_grad_(), weights.requires_grad_(), to(device, rows[rank])
            out = ep.dispatch(buffer, x, idx, weights, max_recv_rows=max_recv_rows)
            buffer.check()
            if step % 3 == 0:
                again = buffer.dispatch(x.detach(), None, weights.detach(), handle=out.handle)
                buffer.check()
                assert_equal(again.x, out.x, f"step {step}: the cached dispatch")
            y, row_weights = to(device, expert_rows(case, out, rank))
            y = y.requires_grad_()
            combined, combined_weights = ep.combine(buffer, y, out.handle, topk_weights=row_weights)
            buffer.check()
            (y_grad,) = torch.autograd.grad(combined, y, grad)
            buffer.check()
            grads_in = torch.autograd.grad((out.x, out.topk_weights), (x, weights), (y.detach(), row_weights))
            buffer.check()
            if step % 5 != rank % 5 and step < num_steps - 1:
                continue
            both = SimpleNamespace(x=combined, topk_weights=combined_weights)
            assert_step(case, rank, given, out, both, max_recv_rows, f"step {step}")
            # The backward of a dispatch is a combine, and that of a combine a dispatch.
            assert_equal(grads_in, (both.x, both.topk_weights), f"step {step}: gradients of x and of topk_weights")
            expected, _ = expected_of(case, grads, max_recv_rows)[rank]
            assert_equal(y_grad, expected.x, f"step {step}: gradient of y")


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), exhaustive(4, 2), exhaustive(4, 1)])
def test_gradients_of_changing_routing(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(train, engine, Case(num_ranks, ranks_per_node, **SMALL), 40 if engine == "cuda" else 10)


def replay(rank: int, engine: str, case: Case) -> None:
    """Dispatch and combine in one graph, with other inputs at each replay."""
    device = device_of(engine, rank)
    first = make_inputs(case, [NUM_TOKENS] * case.num_ranks, "uniform", 0)
    x, idx, weights = first.on(rank, device)
    with make_buffer(case, engine, NUM_TOKENS) as buffer:

        def step():
            out = buffer.dispatch(x, idx, weights, layout="rank", max_recv_rows=NUM_ROWS)
            return out, buffer.combine(out.x, out.handle, topk_weights=out.topk_weights)

        step()
        buffer.check()
        graph = torch.cuda.CUDAGraph()
        # NVSHMEM's threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out, combined = step()
        for seed in range(1, 6):
            given = make_inputs(case, [NUM_TOKENS] * case.num_ranks, "masked", seed)
            for to_fill, new in zip((x, idx, weights), (given.x, given.topk_idx, given.topk_weights)):
                to_fill.copy_(new[rank])
            graph.replay()
            buffer.check()
            once = buffer.dispatch(x, idx, weights, layout="rank", max_recv_rows=NUM_ROWS)
            again = buffer.combine(once.x, once.handle, topk_weights=once.topk_weights)
            buffer.check()
            assert_equal((out.x, combined.x), (once.x, again.x), f"replay {seed}: out and combined")
            expected, _ = expected_of(case, given, NUM_ROWS)[rank]
            assert_equal(out.x, expected.x, f"replay {seed}: out")


@cuda
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2)])
def test_graphs_replay_between_nodes(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(replay, engine, Case(num_ranks, ranks_per_node, layout="rank", **SMALL))


def at_pace(rank: int, gb_per_s: float | None, run, *given):
    with pytest.MonkeyPatch.context() as patch:
        if gb_per_s is not None:
            patch.setenv("EP_DISPATCHER_WIRE_GBPS", str(gb_per_s))
        return run(rank, *given)


@cuda
@pytest.mark.parametrize("gb_per_s", [None, pytest.param(FAST, marks=needs_pace)])
@pytest.mark.parametrize(
    "row", LONG_ROWS, ids=lambda row: f"{row.get('payload', 'rows')}-{row['hidden']}-{row.get('recv')}"
)
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), exhaustive(4, 2), exhaustive(4, 1)])
def test_long_rows_cross_in_pieces(pools, engine, num_ranks, ranks_per_node, row, gb_per_s):
    case = Case(num_ranks, ranks_per_node, **row)
    given = grid.make_inputs(case)
    again = grid.other_rows(case, given)
    rows = None if case.recv == "counted" else max(grid.rows_needed(case, given.topk_idx))
    run = pools(num_ranks).run
    ranks = run(at_pace, gb_per_s, grid.run_case, engine, case, given, again, rows)
    grid.check_results(case, ranks, given, again, rows)


@cuda
@needs_pace
@pytest.mark.parametrize("gb_per_s", [FAST, 2.0])  # so that puts have crossed at once, or not before the next ones
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2), (3, 1)])
def test_every_step_over_a_paced_wire(pools, engine, num_ranks, ranks_per_node, gb_per_s):
    case = Case(num_ranks, ranks_per_node, **SMALL)
    pools(num_ranks).run(at_pace, gb_per_s, change_routing, engine, case, 30)


# ---- the peer wire, and who may form nodes --------------------------------------------------------------------------


@cuda
@needs_pace
@pytest.mark.parametrize("gb_per_s,leaves", [(0.01, False), (0.0001, True)])  # 60 ms for the rows, or 6 s
@on_ranks(2)
def test_a_paced_wire_takes_as_long_as_it_says_and_is_left_at_once(rank, engine, gb_per_s, leaves):
    """The time of a cached dispatch, or until destroy() has ended a dispatch, beside that of the rows to cross."""
    case = Case(2, 1, **SMALL)
    device, given = device_of(engine, rank), make_inputs(case, [NUM_TOKENS] * case.num_ranks, "uniform", 0)
    x, idx, _ = given.on(rank, device)
    least = sum(least_rows(case, given.topk_idx[rank], rank)) * case.hidden * 2 / gb_per_s / 1e9
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISPATCHER_WIRE_GBPS", str(gb_per_s))
        buffer = make_buffer(case, engine, NUM_TOKENS)
    with buffer:
        if leaves:
            begin = time.monotonic()
            buffer.dispatch(x, idx, max_recv_rows=NUM_ROWS)
            watchdog = threading.Timer(0.3, buffer.destroy)  # now data is crossing
            watchdog.start()
            watchdog.join()
        else:
            out = buffer.dispatch(x, idx)
            buffer.check()
            begin = time.monotonic()
            buffer.dispatch(x, handle=out.handle)
            buffer.check()
        ratio = (time.monotonic() - begin) / least
        assert ratio < 0.5 if leaves else 0.98 < ratio < 1.5


@cuda
@pytest.mark.parametrize(
    "hosts,options,argument", [("ABAB", {}, "group"), ("AAAA", dict(ranks_per_node=2, num_sms=1), "num_sms")]
)
@on_ranks(4)
def test_nodes_that_the_engine_cannot_serve(rank, engine, hosts, options, argument):
    sizes = dict(hidden=64, num_experts=8, num_topk=2, max_tokens_per_rank=8)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=f"^{argument}: given "):
        patch.setattr(buffer_module, "host_id", lambda: hosts[rank])
        ep.Buffer(engine=engine, **sizes, **options)
