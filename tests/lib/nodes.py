"""Several nodes: inputs, steps with other routings, training, and replays."""

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of, make_routing
from lib import dispatch_combine as grid
from lib.dispatch_combine import Case, Inputs, assert_same, expected_of, expert_rows, make_buffer, random_rows, to

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


def too_few_rows(rank: int, engine: str, case: Case, num_steps: int) -> None:
    """Every other dispatch finds that the rows do not fit, when some have crossed. Its peers' next operation is a
    combine, or a dispatch."""
    device, last = device_of(engine, rank), None
    with make_buffer(case, engine, NUM_TOKENS) as buffer:
        for step in range(num_steps):
            num_tokens = [NUM_TOKENS] * (case.num_ranks - 1) + [0 if step % 3 == 2 else NUM_TOKENS]
            given = make_inputs(case, num_tokens, "uniform", step)
            x, idx, weights = given.on(rank, device)
            with pytest.raises(ValueError, match="max_recv_rows is too small: rank 0 needs"):  # of others where counted
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


class CapturedStep:
    """A dispatch in rank layout and its combine, in one CUDA graph."""

    def __init__(self, buffer: ep.Buffer, *inputs: torch.Tensor):
        self._buffer, self._inputs = buffer, inputs  # tokens, their experts and weights: those of every replay
        self._run()
        buffer.check()
        self._graph = torch.cuda.CUDAGraph()
        # NVSHMEM's threads may call CUDA meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.out, self.combined = self._run()

    def _run(self):
        x, idx, weights = self._inputs
        out = self._buffer.dispatch(x, idx, weights, layout="rank", max_recv_rows=NUM_ROWS)
        return out, self._buffer.combine(out.x, out.handle, topk_weights=out.topk_weights)

    def replay(self, rank: int, given: Inputs) -> None:
        for to_fill, new in zip(self._inputs, (given.x, given.topk_idx, given.topk_weights)):
            to_fill.copy_(new[rank])
        self._graph.replay()

    def assert_same_without_graph(self, what: str) -> None:
        out, combined = self._run()
        self._buffer.check()
        assert_equal((self.out.x, self.combined.x), (out.x, combined.x), f"{what}: out and combined")
        assert_equal(self.combined.topk_weights, combined.topk_weights, f"{what}: weights")


def replay(rank: int, engine: str, case: Case) -> None:
    """Dispatch and combine in one graph, with other inputs at each replay."""
    first = make_inputs(case, [NUM_TOKENS] * case.num_ranks, "uniform", 0)
    with make_buffer(case, engine, NUM_TOKENS) as buffer:
        step = CapturedStep(buffer, *first.on(rank, device_of(engine, rank)))
        for seed in range(1, 6):
            given = make_inputs(case, [NUM_TOKENS] * case.num_ranks, "masked", seed)
            step.replay(rank, given)
            buffer.check()
            step.assert_same_without_graph(f"replay {seed}")
            expected, _ = expected_of(case, given, NUM_ROWS)[rank]
            assert_equal(step.out.x, expected.x, f"replay {seed}: out")
