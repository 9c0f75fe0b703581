"""How long every rank waits for every other one: tensors that operations add to."""

import time

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on, on_ranks
from lib.errors import error_of
from lib.round_trip import device, inputs, make_buffer, outputs, round_trip
from torch import Tensor

import ep_dispatcher as ep

NUM_RANKS, LATE_S = 4, 0.5
LATE_NS = int(LATE_S * 1e9)


def make_waits(buffer: ep.Buffer) -> tuple[Tensor, Tensor]:
    waits = [torch.zeros(buffer.topology.num_ranks, dtype=torch.int64, device=device(buffer)) for _ in range(2)]
    buffer.dispatch_wait_ns, buffer.combine_wait_ns = waits
    assert buffer.dispatch_wait_ns is waits[0] and buffer.combine_wait_ns is waits[1]
    return waits[0], waits[1]


@pytest.mark.parametrize("ranks_per_node", [4, 2, exhaustive(1)])
@pytest.mark.parametrize("operation,victim", [("dispatch", 1), exhaustive("combine", 2), ("backward", 3)])
@on_ranks(NUM_RANKS)
def test_the_late_rank_is_waited_for(rank, engine, operation, victim, ranks_per_node):
    """One rank comes late to one operation."""
    with make_buffer(engine=engine, ranks_per_node=ranks_per_node) as buffer:
        round_trip(buffer)
        waits = make_waits(buffer)
        round_trip(buffer)
        given = inputs(rank, device=device(buffer))
        out = buffer.dispatch(*given)
        y = outputs(rank, len(out.x), device=device(buffer))
        if operation == "dispatch":
            run = lambda: buffer.dispatch(*given)  # noqa: E731
        elif operation == "combine":
            run = lambda: buffer.combine(y, out.handle)  # noqa: E731
        else:  # the backward of a combine is a dispatch
            run = ep.combine(buffer, y.requires_grad_(), out.handle).float().sum().backward
        buffer.check()
        before = [t.clone() for t in waits]
        dist.barrier()
        begin = time.monotonic_ns()
        if rank == victim:
            time.sleep(LATE_S)
        run()
        buffer.check()
        elapsed = time.monotonic_ns() - begin
        dispatched, combined = ((now - then).tolist() for now, then in zip(waits, before))
        buffer.dispatch_wait_ns = buffer.combine_wait_ns = None
        after = [t.clone() for t in waits]
        if rank == 0:
            time.sleep(0.05)
        round_trip(buffer)
        assert all(torch.equal(now, then) for now, then in zip(waits, after)), "nobody asks, and it measures"
    grown, other = (combined, dispatched) if operation == "combine" else (dispatched, combined)
    assert other == [0] * NUM_RANKS, "the other kind of operation was not run"
    assert grown[rank] == 0 and min(grown) >= 0
    if rank == victim:
        assert max(grown) < LATE_NS / 2, "the others were there"
        return
    most = max(range(NUM_RANKS), key=lambda r: grown[r])
    # On the CPU engine sums of another node come from the rail peer there, which waits for the late one.
    is_near = rank // ranks_per_node == victim // ranks_per_node
    if engine == "cpu" and operation == "combine" and not is_near:
        assert most // ranks_per_node == victim // ranks_per_node
    elif engine == "cuda" and is_near:  # the late one is the relay of its rail peers on other nodes
        assert most % ranks_per_node == victim % ranks_per_node
        assert grown[victim] > LATE_NS / 2
    else:
        assert most == victim
    assert LATE_NS / 2 < grown[most] <= elapsed


@on_ranks(2)
def test_hooks(rank, engine):
    """Rank 1 comes late to a dispatch in two halves; tokens of each expert are added up beside it."""
    with make_buffer(engine=engine) as buffer:
        x, topk_idx, weights = inputs(rank, device=device(buffer))
        dispatched, _ = make_waits(buffer)
        total = torch.zeros(buffer.num_local_experts, dtype=torch.int32, device=device(buffer))
        for step in range(3):
            buffer.check()
            dist.barrier()
            if rank == 1 and step == 2:
                time.sleep(LATE_S)
            out = buffer.dispatch(x, topk_idx, layout="decode", return_hook=True)
            out.hook()
            total += out.tokens_per_expert
            buffer.combine(out.x, out.handle, weights=weights, return_hook=True).hook()
        buffer.check()
        assert torch.equal(total, 3 * out.tokens_per_expert)
        assert dispatched[1] > LATE_NS / 2 if rank == 0 else dispatched[0] < LATE_NS / 2


@pytest.mark.parametrize("engine", [on("cuda")])
@on_ranks(2)
def test_graphs(rank, engine):
    """The tensor of the capture grows with every replay, whatever is set by then."""
    with make_buffer(engine=engine) as buffer:
        given = inputs(rank, device=device(buffer))
        buffer.dispatch(*given, max_recv_rows=200)
        waits, _ = make_waits(buffer)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            buffer.dispatch(*given, max_recv_rows=200)
        buffer.dispatch_wait_ns = None
        for replays in range(1, 3):
            torch.cuda.synchronize()
            dist.barrier()
            if rank == 1:
                time.sleep(LATE_S)
            graph.replay()
            buffer.check()
            assert rank == 1 or int(waits[1]) > replays * LATE_NS / 2


@on_ranks(2)
def test_wrong_tensors(rank: int, engine: str) -> None:
    with make_buffer(engine=engine) as buffer:
        good = torch.zeros(2, dtype=torch.int64, device=device(buffer))
        for wrong, words in [
            (good.int(), "[2] of torch.int32"),
            (good[:1], "[1] of torch.int64"),
            ([0, 0], "of type list"),
            (good.repeat(2)[::2], "strides are (2,)"),
        ]:
            for name in ("dispatch_wait_ns", "combine_wait_ns"):
                text = error_of(setattr, buffer, name, wrong)
                assert text.startswith(name) and words in text, text
                assert getattr(buffer, name) is None
        round_trip(buffer)
    assert "destroyed" in error_of(setattr, buffer, "dispatch_wait_ns", good)
