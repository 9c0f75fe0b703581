"""Runs the parts of tests/test_nccl.py over the NCCL wire; its settings are read from the environment.

EP_DISPATCHER_WIRE=nccl python tests/nccl_wire.py NUM_RANKS RANKS_PER_NODE [PART...]

A node is the ranks of one GPU. NCCL takes no two ranks of a rail on one GPU of a host, so where there are fewer GPUs
than nodes, each node is a host of its own to NCCL, with messages over sockets. Every part has its own limit, and new
ranks after a failure.
"""

import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import pytest
import test_compile
import torch
import torch.distributed as dist
from lib import decode, node_limits, nodes, two_hosts
from lib import dispatch_combine as grid
from lib import round_trip as round_trips
from lib.dispatch_combine import GRID, Case, Inputs, check_case, expert_rows, to
from lib.round_trip import check_new_buffer, inputs, make_buffer, outputs, round_trip

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import RankError, RankPool, same_bits

PART_S = float(os.environ.get("PART_S", 60))
LIMIT_S = 3.0  # of operations that a rank waits for in vain
SLACK_S = 5.0
split_of = attrgetter("num_ranks", "ranks_per_node")


class ImpatientBuffer(ep.Buffer):
    def __init__(self, *args, **options):
        more = dict(timeout_s=min(options["timeout_s"], 10), nccl_sms=int(os.environ.get("NCCL_SMS", 4)))
        super().__init__(*args, **options | more)


def device_of_rank(engine: str, rank: int) -> str:
    return f"cuda:{torch.cuda.current_device()}"


def begin(rank: int, ranks_per_node: int) -> None:
    """Let the ranks of a node share a GPU. Their buffers soon give up a peer that does not come."""
    node, num_gpus = rank // ranks_per_node, torch.cuda.device_count()
    torch.cuda.set_device(node % num_gpus)
    if dist.get_world_size() > num_gpus * ranks_per_node:
        os.environ |= dict(NCCL_HOSTID=f"node {node}", NCCL_NET="Socket")
    for module in (grid, node_limits, nodes, round_trips):
        module.device_of = device_of_rank
    ep.Buffer = ImpatientBuffer


def start(num_ranks: int, ranks_per_node: int, hosts: two_hosts.Hosts | None = None) -> RankPool:
    """Start the ranks, on these hosts or all on this one."""
    options = dict(timeout_s=PART_S)
    pool = RankPool(num_ranks, **options) if hosts is None else two_hosts.HostsPool(hosts, ranks_per_node, **options)
    pool.run(begin, ranks_per_node)
    return pool


# ---- parts ----------------------------------------------------------------------------------------------------------


def check_cases(pool: RankPool, cases: list[Case]) -> None:
    for case in cases:
        check_case(lambda _: pool, "cuda", case)


def many(pool: RankPool, case: Case) -> None:
    """Several messages of rows and of sums, for some ranks without tokens."""
    shape = dict(tokens="many", num_topk=3, hidden=2880, dtype=torch.bfloat16)
    layouts = ("expert", "rank")
    check_cases(pool, [Case(case.num_ranks, case.ranks_per_node, layout=layout, **shape) for layout in layouts])


def check_decode(rank: int, case: Case) -> None:
    """Decode layout with weights, and hooks: the weighted sum is that of the rows that arrived."""
    options = dict(hidden=512, num_experts=4 * case.num_ranks, num_topk=3, max_tokens_per_rank=32, timeout_s=15)
    with ep.Buffer(engine="cuda", ranks_per_node=case.ranks_per_node, **options) as buffer:
        for seed in range(6):
            generator = torch.Generator().manual_seed(10 * seed + rank)
            num = 32 if seed % 2 else 5 + rank
            x = torch.randn(num, 512, generator=generator).to("cuda", torch.bfloat16)
            idx = torch.rand(num, 4 * case.num_ranks, generator=generator).topk(3).indices.to("cuda")
            weights = torch.rand(num, 3, generator=generator).to("cuda")
            out = buffer.dispatch(x, idx, layout="decode", return_hook=True)
            out.hook()
            y = out.x.clone()
            combined = buffer.combine(y, out.handle, weights=weights, return_hook=True)
            combined.hook()
            buffer.check()
            right = x.float() * weights.sum(1, keepdim=True)
            assert torch.allclose(combined.x.float(), right, rtol=3e-2, atol=3e-2), f"seed {seed}"


def half_at_home(case: Case, num_tokens: list[int], seed: int = 0) -> Inputs:
    """Two nodes. Every second token has experts on its own node only."""
    given = nodes.make_inputs(case, num_tokens, "uniform", seed)
    for rank, idx in enumerate(given.topk_idx):
        scores = torch.rand(len(idx), 2, case.num_experts // 2, generator=torch.Generator().manual_seed(seed + rank))
        scores[::2, 1 - case.node_of[rank]] = -1
        idx.copy_(scores.flatten(1).topk(case.num_topk).indices)
    return given


SIZES = ([600, 333, 257, 600], [0, 600, 600, 1], [600, 0, 0, 0])  # tokens of the ranks


def check_sizes(rank: int, case: Case, num_tokens: list[int]) -> None:
    """A message has the rows that its receiver needs where all hosts know the counts, else those of all tokens."""
    most, given = nodes.NUM_TOKENS + 100, half_at_home(case, num_tokens[: case.num_ranks])
    x, idx, weights = given.on(rank, "cuda")
    peer = (rank + case.ranks_per_node) % case.num_ranks
    sent, received = (
        few if num_tokens[r] - few > num_tokens[r] // 16 else num_tokens[r]  # a few tokens are not left out
        for r, few in ((r, sum(nodes.least_rows(case, given.topk_idx[r], r))) for r in (rank, peer))
    )
    row_bytes, num_rows = case.hidden * 2, nodes.NUM_ROWS
    with grid.make_buffer(case, "cuda", most) as buffer:

        def check_sent(num_bytes: int, run):
            before = buffer.live_engine()._c.message_bytes()
            result, counted, lists = nodes.sent_by(buffer, run)
            by_host = buffer.live_engine()._c.message_bytes() - before
            assert counted == [num_bytes * (r == peer) for r in range(case.num_ranks)], num_bytes
            assert num_bytes <= by_host <= num_bytes + lists[peer] + 4096, (num_bytes, by_host, lists)
            return result

        out = check_sent(sent * (row_bytes + 16), lambda: buffer.dispatch(x, idx, weights))
        again = check_sent(sent * row_bytes, lambda: buffer.dispatch(x, handle=out.handle))
        nodes.assert_equal(again.x, out.x, "the cached dispatch")
        y, row_weights = to("cuda", expert_rows(case, out, rank))
        sums_bytes = row_bytes + 4 * case.num_topk
        run = partial(buffer.combine, y, out.handle, topk_weights=row_weights)
        nodes.assert_step(case, rank, given, out, check_sent(received * sums_bytes, run), None, "exact")
        # Not where no host waits, or not every one.
        for size in (num_rows, num_rows if rank == 0 else None):
            other = check_sent(most * row_bytes, partial(buffer.dispatch, x, idx, max_recv_rows=size))
            nodes.assert_equal(other.x[: len(out.x)], out.x, "all tokens")
            check_sent(most * row_bytes, partial(buffer.combine, other.x, other.handle))
        # A hook on saved tensors copies the plan: the host reads the sizes from it.
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda plan: plan):
            leaf = x.clone().requires_grad_()
            out = ep.dispatch(buffer, leaf, idx)
            sums = ep.combine(buffer, out.x, out.handle)
        run = partial(torch.autograd.grad, sums, leaf, x)
        (grad,) = check_sent((sent + received) * row_bytes, run)
        nodes.assert_equal(grad, sums, "the gradient")


def sizes(pool: RankPool, case: Case) -> None:
    for num_tokens in SIZES:
        pool.run(check_sizes, case, num_tokens)
    long = replace(case, tokens="many", hidden=7168, layout="rank")  # several messages
    for seed in range(2):
        num_tokens = grid.NUM_TOKENS["many"][: case.num_ranks][:: 1 - 2 * seed]
        check_case(lambda _: pool, "cuda", long, half_at_home(long, list(num_tokens), seed))


def limits(pool: RankPool, case: Case) -> None:
    """Messages of Buffer.max_tokens_to_node, and what they send with top-2 of 256 experts."""
    pool.run(node_limits.change_routing, "cuda", case, 30)
    pool.run(node_limits.too_many_to_node, "cuda", case, 6)
    for captures in (False, True):
        if case.ranks_per_node == 1:
            pool.run(node_limits.send_little, "cuda", case.num_ranks, 2, case.num_ranks, captures)
    pool.run(node_limits.replay, "cuda", case)


def check_limited_sizes(rank: int, case: Case, most: int) -> None:
    """Every message has exactly the limit, however few tokens there are, and also after an overflow."""
    given = node_limits.some_nodes(case, [nodes.NUM_TOKENS] * case.num_ranks, 0)
    x, idx, _ = given.on(rank, "cuda")
    needed = max(node_limits.most_to_a_node(case, given))
    rail = [r for r in range(case.num_ranks) if r % case.ranks_per_node == rank % case.ranks_per_node]
    sent = [2 * case.hidden * most * (r in rail and r != rank) for r in range(case.num_ranks)]
    with grid.make_buffer(case, "cuda", nodes.NUM_TOKENS) as buffer:
        buffer.max_tokens_to_node = most

        def check_sent(run, *args, **options):
            result, counted, _ = nodes.sent_by(buffer, partial(run, *args, **options))
            assert counted == sent, (counted, sent)
            return result

        for size in (nodes.NUM_ROWS, nodes.NUM_ROWS if rank == 0 else None):
            if needed > most:
                with pytest.raises(ep.TooFewRowsError, match=f"{needed} is enough"):
                    buffer.dispatch(x, idx, max_recv_rows=size)
                    buffer.check()
                continue
            out = check_sent(buffer.dispatch, x, idx, max_recv_rows=size)
            check_sent(buffer.dispatch, x, handle=out.handle)
            check_sent(buffer.combine, out.x, out.handle)
            buffer.max_tokens_to_node = None  # an old plan keeps its limit
            check_sent(buffer.combine, out.x, out.handle)
            buffer.max_tokens_to_node = most


def limited_sizes(pool: RankPool, case: Case) -> None:
    for most in (100, 500, 599):
        pool.run(check_limited_sizes, case, most)


def check_compiled(rank: int, case: Case) -> None:
    """A compiler captures CUDA graphs of static rows, here of limited messages."""
    test_compile.device_of = device_of_rank
    num_tokens = test_compile.NUM_TOKENS
    config = dict(engine="cuda", ranks_per_node=case.ranks_per_node, max_tokens_to_node=num_tokens)
    compiles = dict(backend="inductor", options={"triton.cudagraphs": True})
    test_compile.compare(rank, test_compile.two_layers, config, 5 * (num_tokens,), compiles=compiles)
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def check_two_buffers(rank: int, case: Case) -> None:
    """Operations of two buffers in two streams, in the same order on all ranks."""
    options = dict(engine="cuda", ranks_per_node=case.ranks_per_node)
    with make_buffer(**options) as one, make_buffer(**options) as other:
        side = torch.cuda.Stream()
        for seed in range(6):
            round_trip(one, seed=seed)
            with torch.cuda.stream(side):
                round_trip(other, seed=seed, max_recv_rows=200)
            given = inputs(rank, seed=seed, device="cuda")
            first = one.dispatch(*given, max_recv_rows=200)
            with torch.cuda.stream(side):
                second = other.dispatch(*given, max_recv_rows=200)
            sums = one.combine(first.x, first.handle).x
            with torch.cuda.stream(side):
                other_sums = other.combine(second.x, second.handle).x
            torch.cuda.synchronize()
            assert same_bits(sums, other_sums)


def check_late(rank: int, case: Case, operation: str) -> None:
    """The last rank does not come to an operation. The others say so in time, and their memory is free at once."""
    last = case.num_ranks - 1
    buffer = make_buffer(engine="cuda", ranks_per_node=case.ranks_per_node, timeout_s=LIMIT_S)
    for seed in range(2):
        round_trip(buffer, seed=seed)
    given = inputs(rank, device="cuda")
    out = buffer.dispatch(*given, max_recv_rows=200)
    buffer.check()
    dist.barrier()
    if rank != last:
        begin = time.monotonic()
        with pytest.raises(ep.PeerTimeoutError) as caught:
            if operation == "combine":
                buffer.combine(outputs(rank, 200, device="cuda"), out.handle)
            else:
                buffer.dispatch(*given, max_recv_rows=None if operation == "counted" else 200)
            buffer.check()
        assert LIMIT_S - 1 < time.monotonic() - begin < LIMIT_S + SLACK_S
        assert caught.value.late_ranks == (last,), caught.value
    dist.barrier()  # until then the last rank does nothing
    begin = time.monotonic()
    buffer.destroy()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 8, f"destroy took {time.monotonic() - begin:.1f} s"
    dist.barrier()
    check_new_buffer(engine="cuda", ranks_per_node=case.ranks_per_node)


def late(pool: RankPool, case: Case) -> None:
    for operation in ("counted", "dispatch", "combine"):
        pool.run(check_late, case, operation)


def check_differ(rank: int, case: Case) -> None:
    """One rank is in another operation: all find it, and the buffer has ended."""
    buffer = make_buffer(engine="cuda", ranks_per_node=case.ranks_per_node, timeout_s=10)
    given = inputs(rank, device="cuda")
    out = buffer.dispatch(*given, max_recv_rows=200)
    buffer.check()
    begin = time.monotonic()
    with pytest.raises(ValueError, match="operation|handle|layout"):
        if rank == 0:
            buffer.combine(outputs(rank, 200, device="cuda"), out.handle)
        else:
            buffer.dispatch(*given, max_recv_rows=200)
        torch.cuda.synchronize()  # messages that do not fit together end meanwhile
        buffer.check()
    with pytest.raises(ValueError):
        buffer.dispatch(*given, max_recv_rows=200)
    buffer.destroy()
    assert time.monotonic() - begin < 9
    check_new_buffer(engine="cuda", ranks_per_node=case.ranks_per_node)


def check_broken(rank: int, case: Case) -> None:
    """Rank 0 aborts, but its messages are enqueued, and leave. Nobody takes them."""
    buffer = make_buffer(engine="cuda", ranks_per_node=case.ranks_per_node, timeout_s=LIMIT_S)
    given = inputs(rank, device="cuda")
    buffer.dispatch(*given, max_recv_rows=200)
    buffer.check()
    dist.barrier()
    if rank == 0:
        torch.cuda._sleep(10**9)  # the abort comes before the kernel
        buffer.dispatch(*given, max_recv_rows=200)
        buffer.live_engine()._aborts.run()
    else:
        with pytest.raises(ep.PeerTimeoutError) as caught:
            buffer.dispatch(*given, max_recv_rows=200)
            buffer.check()
        assert 0 in caught.value.late_ranks, caught.value
    dist.barrier()
    buffer.live_engine().give_up("was tested", RuntimeError("the abort of rank 0"))
    buffer.destroy()
    dist.barrier()
    check_new_buffer(engine="cuda", ranks_per_node=case.ranks_per_node)


def check_suspend(rank: int, case: Case) -> None:
    with make_buffer(engine="cuda", ranks_per_node=case.ranks_per_node, suspendable=True) as buffer:
        for seed in range(3):
            round_trip(buffer, seed=seed)
            buffer.suspend()
            buffer.resume()
            round_trip(buffer, seed=seed + 3)


def check_suspend_with_graph(rank: int, case: Case) -> None:
    """Refused while NCCL may keep memory for the graph. NCCL reads its switch once, so both happen in one process."""
    options = dict(engine="cuda", ranks_per_node=case.ranks_per_node, suspendable=True)
    with make_buffer(**options) as buffer:
        given, graph = inputs(rank, device="cuda"), torch.cuda.CUDAGraph()
        right = buffer.dispatch(*given, max_recv_rows=200).x
        buffer.check()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = buffer.dispatch(*given, max_recv_rows=200)
        graph.replay()
        buffer.check()
        assert same_bits(out.x, right)
        if os.environ.get("NCCL_GRAPH_REGISTER") != "0":
            with pytest.raises(ValueError, match="suspend: buffer cannot be suspended after a CUDA graph"):
                buffer.suspend()
            return
        for _ in range(3):
            buffer.suspend()
            buffer.resume()
            out.x.zero_()
            graph.replay()
            buffer.check()
            assert same_bits(out.x, right)


def suspend(pool: RankPool, case: Case) -> None:
    pool.run(check_suspend, case)
    pool.run(check_suspend_with_graph, case)


def check_wide(rank: int, case: Case) -> None:
    """Bytes are counted in 64 bits: a message for all tokens of a large buffer has 7.5 GB. They wrapped at 4 GiB.

    The dispatch itself has four tokens, so only the buffer and its message are large.
    """
    most, hidden, num_topk = 1 << 19, 7168, 2
    options = dict(hidden=hidden, num_experts=4 * case.num_ranks, num_topk=num_topk, max_tokens_per_rank=most)
    with ep.Buffer(engine="cuda", ranks_per_node=case.ranks_per_node, timeout_s=30, **options) as buffer:
        x = torch.randn(4, hidden, device="cuda").to(torch.bfloat16)
        idx = torch.arange(4 * num_topk, device="cuda").view(4, num_topk) % (4 * case.num_ranks)
        out = buffer.dispatch(x, idx, max_recv_rows=64)
        buffer.combine(out.x, out.handle)
        buffer.check()
        counted = buffer.counters()
        peer = (rank + case.ranks_per_node) % case.num_ranks
        # The rows of the dispatch for all tokens, and the sums of the combine.
        right = [2 * most * hidden * 2 * (other == peer) for other in range(case.num_ranks)]
        assert counted["inter_node_bytes_sent"] == right, counted
        assert 0 < counted["inter_node_list_bytes_sent"][peer] < 1 << 32, counted


def free_bytes(rank: int) -> int:
    return torch.cuda.mem_get_info()[0]


def wide(pool: RankPool, case: Case) -> None:
    if min(pool.run(free_bytes)) < 45 << 30:
        print("wide: left out, as it needs 45 GB of each GPU", flush=True)
    else:
        pool.run(check_wide, case)


def check_gone(rank: int, case: Case, step: str, does: str) -> None:
    """The last rank dies or stops while the communicator is made. The others get an error in time, and go on.

    Guards against an NCCL kernel that waits for the dead rank, and that nobody can abort.
    """
    from ep_dispatcher.engines.cuda import nccl

    last, limit_s = case.num_ranks - 1, 10.0

    old = nccl._C_cuda

    def act(comm, *given):
        if does == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(limit_s + 5)
        getattr(old.NcclComm, step)(comm, *given)

    if rank == last:
        nccl._C_cuda = SimpleNamespace(NcclComm=type("Victim", (old.NcclComm,), {step: act}))
    begin = time.monotonic()
    try:
        with pytest.raises(ep.PeerTimeoutError) as caught:
            make_buffer(engine="cuda", ranks_per_node=case.ranks_per_node, timeout_s=limit_s)
    finally:
        nccl._C_cuda = old
    assert time.monotonic() - begin < limit_s + 8, time.monotonic() - begin
    assert last in caught.value.late_ranks, caught.value
    if does == "dies":
        assert caught.value.late_ranks == (last,), caught.value
    begin = time.monotonic()
    torch.cuda.synchronize()  # no kernel waits for the dead rank
    assert time.monotonic() - begin < 2
    if does == "stops":
        time.sleep(limit_s)  # until the thread of the last rank has left NCCL
        return check_new_buffer(engine="cuda", ranks_per_node=case.ranks_per_node)
    if rank < case.ranks_per_node:  # a node that has lost nobody
        group = dist.new_group(list(range(case.ranks_per_node)), use_local_synchronization=True)
        check_new_buffer(group, engine="cuda")


def gone(pool: RankPool, case: Case) -> None:
    pool.run(check_gone, case, "connect", "stops")
    for step in ("join", "connect"):
        with start(case.num_ranks, case.ranks_per_node) as fresh:
            fresh.run(check_gone, case, step, "dies", allow_dead={case.num_ranks - 1})


def check_line(rank: int, case: Case) -> None:
    with make_buffer(engine="cuda", ranks_per_node=case.ranks_per_node) as buffer:
        assert "1 of them for the NCCL wire between nodes, at most 4 more for NCCL 2." in repr(buffer), repr(buffer)
        if rank == 0:
            print(repr(buffer), flush=True)
        round_trip(buffer)


PARTS = dict(
    line=lambda pool, case: pool.run(check_line, case),
    routing=lambda pool, case: pool.run(nodes.change_routing, "cuda", case, 30),
    gradients=lambda pool, case: pool.run(nodes.train, "cuda", case, 12),
    graph=lambda pool, case: pool.run(nodes.replay, "cuda", replace(case, layout="rank")),
    rows=lambda pool, case: check_cases(pool, [replace(case, **row) for row in nodes.LONG_ROWS]),
    many=many,
    cases=lambda pool, case: check_cases(pool, [one for one in GRID if split_of(one) == split_of(case)]),
    too_few=lambda pool, case: pool.run(nodes.too_few_rows, "cuda", case, 6),
    decode=lambda pool, case: pool.run(check_decode, case),
    hooks_in_graphs=lambda pool, case: decode.check_graphs(pool, *split_of(case), hooked=True),
    sizes=sizes,
    limits=limits,
    limited_sizes=limited_sizes,
    compiled=lambda pool, case: pool.run(check_compiled, case),
    two_buffers=lambda pool, case: pool.run(check_two_buffers, case),
    late=late,
    differ=lambda pool, case: pool.run(check_differ, case),
    broken=lambda pool, case: pool.run(check_broken, case),
    gone=gone,
    wide=wide,
    suspend=suspend,
)


def main(num_ranks: int, ranks_per_node: int, *names: str) -> int:
    case, pool, failed = Case(num_ranks, ranks_per_node, **nodes.SMALL), None, []
    for name in names or PARTS:
        if pool is None or pool.closed:
            pool = start(num_ranks, ranks_per_node)
        since = time.monotonic()
        try:
            PARTS[name](pool, case)
            print(f"{name}: right, {time.monotonic() - since:.1f} s", flush=True)
        except (RankError, AssertionError, pytest.fail.Exception):
            failed.append(name)
            print(f"{name}: WRONG, {time.monotonic() - since:.1f} s\n{traceback.format_exc()}", flush=True)
            pool.close()  # ranks that have failed may have left something
    if pool is not None:
        pool.close()
    print(f"wrong: {', '.join(failed)}" if failed else "all: right", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), *sys.argv[3:]))
