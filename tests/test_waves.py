"""moe_mlp with its communication under the GEMMs: the bits of one step after the other, and an end to every wait."""

import contextlib
import time
import types
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on
from gpu_layer import (
    ENOUGH,
    LIMIT_S,
    assert_graph,
    go_back,
    layer_inputs,
    make_buffer,
    raise_out_of_memory,
    run_layer,
    run_with_sums,
)

import ep_dispatcher as ep
from ep_dispatcher.engines import Waves
from ep_dispatcher.moe import grouped_gemm, waves
from ep_dispatcher.moe.grouped_mlp import grouped_swiglu_mlp
from ep_dispatcher.tools.testing import device_of

FEWEST = (1, 1, 1, 1, 1)  # waves.Sms
CYCLES_OF_A_LONG_TIME = 100_000_000  # 50 ms of an H200


@contextlib.contextmanager
def buffer_with(sms: waves.Sms, push_after: float | None = None, **changes) -> Iterator[ep.Buffer]:
    """A buffer whose layers have so many multiprocessors, and begin to push then."""
    with make_buffer(**changes) as buffer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(waves, "SMS", sms)
        patch.setattr(waves, "PUSH_AFTER", push_after)
        patch.setattr(waves, "MIN_TOKENS", 0)
        yield buffer


def both_ways(rank: int, kinds: list[str], sms: waves.Sms = waves.SMS, **changes) -> None:
    device_of("cuda", rank)
    one_part = dict(num_parts=1)
    with buffer_with(sms, **changes) as buffer:
        for step, kind in enumerate(kinds):
            num_tokens = 0 if (rank + step) % 5 == 4 else 2900 - 577 * rank - 41 * step
            given = layer_inputs(rank, kind, num_tokens, step, buffer._config.dtype)
            assert waves.can_overlap(buffer, wants_gradients=True, **one_part)
            plain = run_layer(buffer, given, overlap=False, **one_part)
            enough = ENOUGH * dist.get_world_size()
            for options in (one_part, dict(max_recv_rows=enough, **one_part)):
                found = run_layer(buffer, given, **options)
                for name, a, b in zip(("y", "x", "topk_weights", "w1", "w2"), plain, found):
                    assert torch.equal(a, b), f"step {step}, {kind}, {options}: {name} differs"
            buffer.check()


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_bits_of_one_step_after_the_other(pools, engine, num_ranks):
    """Whatever the routing, and whatever the tokens of the ranks; none among them."""
    pools(num_ranks).run(both_ways, ["uniform", "hot", "few", "one expert", "uniform", "uniform"])


@pytest.mark.parametrize("engine", [on("cuda")])
def test_float16(pools, engine):
    pools(2).run(partial(both_ways, dtype=torch.float16), ["uniform", "few"])


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("sms", [FEWEST, (24, 2, 132, 24, 3), (3, 8, 24, 24, 1), (1000, 1000, 40, 2, 1000)])
def test_launches_of_any_size(pools, engine, sms):
    pools(2).run(both_ways, ["uniform", "few", "one expert"], waves.Sms(*sms))


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_pushes_begin_with_the_first_row_or_after_the_last(pools, engine, share):
    pools(2).run(partial(both_ways, push_after=share), ["uniform", "few", "one expert"])


def pushes_first(rank: int) -> None:
    """A GEMM that cannot begin before the pushes: their wait for it ends, and they wait for its rows."""
    device_of("cuda", rank)
    ends = torch.tensor([40, 100], dtype=torch.int32, device="cuda")
    written, done = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    kernels = grouped_gemm.kernels()
    for counted, row, waits in ((0, 1, True), (1, 1, False), (1, 0, False)):  # nothing; all that is asked for
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        written.zero_()
        written[row] = counted
        begin.record()
        kernels.wait_for_share(written, ends, 120, 0.1 if row else 1.0)
        end.record()
        torch.cuda.synchronize()
        assert (begin.elapsed_time(end) > 900 * kernels.BEGIN_S) is waits, (counted, row)
    kernels.wait_for_share(done, torch.zeros_like(ends), 120, 0.5)  # of no rows
    kernels.wait_for_share(done[:0], ends, 0, 0.5)
    torch.cuda.synchronize()
    # A GEMM that has begun is waited for, however long it takes. Its first kernel is loaded before: that may wait.
    other, ends = torch.cuda.Stream(), torch.tensor([40, 190], dtype=torch.int32, device="cuda")
    for cycles in (1, CYCLES_OF_A_LONG_TIME):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        done.copy_(torch.tensor([0, 0, 1]))
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(cycles)
            done[:1].add_(1)
        begin.record()
        kernels.wait_for_share(done, ends, 192, 1.0)
        end.record()
        torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 3000 * kernels.BEGIN_S, begin.elapsed_time(end)


@pytest.mark.parametrize("engine", [on("cuda")])
def test_the_wait_for_a_share_ends(pools, engine):
    pools(1).run(pushes_first)


def each_its_own_way(rank: int, **changes) -> None:
    """Ranks with few tokens take one step after the other, beside ranks that overlap. Not all inputs want gradients."""
    device_of("cuda", rank)
    with make_buffer(**changes) as buffer:
        for step, wanted in enumerate(((0, 1, 2, 3), (2, 3), (0,), ())):
            num_tokens = 2500 if (rank + step) % 2 else 700
            assert waves.can_overlap(buffer, True, num_tokens, num_parts=1) is (num_tokens == 2500)
            x, idx, *others = layer_inputs(rank, "uniform", num_tokens, seed=step)
            results = []
            for overlap in (False, True):
                leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, *others))]
                y = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], overlap=overlap, num_parts=1)
                if wanted:
                    go_back(y)
                results.append([y.detach(), *(t.grad for t in leaves if t.grad is not None)])
                assert len(results[-1]) == 1 + len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(*results)), wanted
        buffer.check()


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks, ranks_per_node", [(2, 2), (4, 2)])
def test_ranks_that_choose_differently(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(partial(each_its_own_way, ranks_per_node=ranks_per_node))


def a_pull_that_cannot_begin(rank: int) -> None:
    """The gate of a pull without its multiprocessors: the error names this rank, and no GEMM waits for rows."""
    device_of("cuda", rank)
    buffer = make_buffer(timeout_s=1)
    for num_begun in (3, 2):
        begun = torch.full((1,), num_begun, dtype=torch.int32, device="cuda")
        done = torch.zeros(200, dtype=torch.int32, device="cuda")
        buffer._engine.wait_until_begun(Waves(3, begun, done))
        torch.cuda.synchronize()
        assert done.tolist() == [0 if num_begun == 3 else grouped_gemm.WAVE_ROWS] * 200
    with pytest.raises(ep.PeerTimeoutError, match="phase 'multiprocessors'") as error:
        buffer.check()
    assert error.value.late_ranks == (rank,)
    buffer.destroy()


@pytest.mark.parametrize("engine", [on("cuda")])
def test_the_wait_for_a_pull_to_begin_ends(pools, engine):
    pools(1).run(a_pull_that_cannot_begin)


@contextlib.contextmanager
def a_late_last_gemm() -> Iterator[None]:
    """Pushes wait for no share of the last GEMM, which begins long after them."""
    kernels = grouped_gemm.kernels()
    multiply = kernels.multiply

    def late(*given, written=None, **options) -> None:
        if written is not None:
            torch.cuda._sleep(CYCLES_OF_A_LONG_TIME)
        multiply(*given, written=written, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BEGIN_S", 0.0)
        patch.setattr(kernels, "multiply", late)
        yield


def pushes_wait_for_rows(rank: int) -> None:
    device_of("cuda", rank)
    with a_late_last_gemm():
        both_ways(rank, ["uniform", "few", "one expert"])
        in_a_graph(rank, waves.SMS)


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pushes_that_start_before_the_last_gemm(pools, engine, num_ranks):
    """They hold their multiprocessors and wait for its rows, also in a graph."""
    pools(num_ranks).run(pushes_wait_for_rows)


def without_a_wait(rank: int) -> None:
    device_of("cuda", rank)
    with make_buffer() as buffer:
        given = layer_inputs(rank, "uniform", 2500, seed=0)
        enough = ENOUGH * dist.get_world_size()
        plain = run_layer(buffer, given, max_recv_rows=enough)
        torch.cuda.set_sync_debug_mode("error")  # raises where the host waits
        try:
            found = run_layer(buffer, given, max_recv_rows=enough)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(a, b) for a, b in zip(plain, found))


@pytest.mark.parametrize("engine", [on("cuda")])
def test_the_host_waits_for_nothing(pools, engine):
    pools(2).run(without_a_wait)


def at_the_edges(rank: int, sms: waves.Sms) -> None:
    """Each token has one item here: its number, and that of its row, lie at the edges of groups, batches and chunks."""
    device_of("cuda", rank)
    with buffer_with(sms) as buffer:
        for num_tokens in (1, 31, 33, 63, 64, 65, 511, 512, 513, 1024):
            given = layer_inputs(rank, "one expert", num_tokens + rank, seed=num_tokens)
            plain, found = run_layer(buffer, given, overlap=False), run_layer(buffer, given)
            assert all(torch.equal(a, b) for a, b in zip(plain, found)), f"{num_tokens} tokens"
        buffer.check()


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks, push", [(1, 1), (2, 2)])
def test_groups_and_chunks_that_are_just_full(pools, engine, num_ranks, push):
    pools(num_ranks).run(at_the_edges, waves.Sms(push=push))


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks, ranks_per_node", [(2, 1), (4, 2)])
def test_between_nodes(pools, engine, num_ranks, ranks_per_node):
    """In one part only the combine of the backward runs beside GEMMs."""
    pools(num_ranks).run(partial(both_ways, ranks_per_node=ranks_per_node), ["uniform", "hot", "few", "uniform"])


def in_a_graph(rank: int, sms: waves.Sms) -> None:
    device_of("cuda", rank)
    with buffer_with(sms) as buffer:
        assert_graph(rank, buffer, 2048, runs=[{}])


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks, sms", [(1, waves.SMS), (2, waves.SMS), (2, waves.Sms(*FEWEST))])
def test_a_graph_of_forward_and_backward(pools, engine, num_ranks, sms):
    pools(num_ranks).run(in_a_graph, sms)


def mistakes(rank: int) -> None:
    """Errors are those of dispatch, and nothing hangs. After a bad entry the buffer goes on."""
    device_of("cuda", rank)
    x, idx, *others = layer_inputs(rank, "uniform", 2100, seed=0)
    x.requires_grad_()
    wrong = idx.clone()
    wrong[17, 2] = 10_000
    with make_buffer() as buffer:
        with pytest.raises(ValueError, match=r"topk_idx\[17, 2\]: given 10000"):
            ep.moe_mlp(buffer, x, wrong, *others)
        plain, found = run_layer(buffer, (x, idx, *others), overlap=False), run_layer(buffer, (x, idx, *others))
        assert all(torch.equal(a, b) for a, b in zip(plain, found))
    buffer = make_buffer()
    with pytest.raises((ValueError, RuntimeError), match="max_recv_rows|aborted|given up"):  # found by either operation
        ep.moe_mlp(buffer, x, idx, *others, max_recv_rows=10)
        buffer.check()
    torch.cuda.synchronize()
    with contextlib.suppress(ValueError, RuntimeError):
        buffer.destroy()


@pytest.mark.parametrize("engine", [on("cuda")])
def test_mistakes_are_those_of_dispatch(pools, engine):
    pools(2).run(mistakes)


def another_operation(rank: int) -> str:
    """Rank 1 dispatches once more where rank 0 combines. Returns the error; the buffer works afterwards."""
    device_of("cuda", rank)
    given = layer_inputs(rank, "uniform", 2100, seed=0)
    one_part = dict(num_parts=1)
    with buffer_with(waves.SMS) as buffer:
        plain = run_layer(buffer, given, overlap=False, **one_part)
        with pytest.raises(ValueError) as error:
            if rank == 0:
                ep.moe_mlp(buffer, *given, **one_part)
                torch.cuda.synchronize()
                buffer.check()
            else:
                for _ in range(2):
                    buffer.dispatch(*given[:3])
        found = run_layer(buffer, given, **one_part)
        assert all(torch.equal(a, b) for a, b in zip(plain, found))
        return str(error.value)


@pytest.mark.parametrize("engine", [on("cuda")])
def test_another_operation_beside_a_layer_is_an_error_on_all_ranks(pools, engine):
    (text,) = set(pools(2).run(another_operation))
    assert text.startswith("operation: rank 1 is in a dispatch, rank 0 is in a combine")


def a_late_rank(rank: int, sms: waves.Sms) -> float:
    device_of("cuda", rank)
    buffer = make_buffer(timeout_s=LIMIT_S)
    given = layer_inputs(rank, "uniform", 2100, seed=0)
    run_layer(buffer, given)
    dist.barrier()
    if rank == 1:
        time.sleep(2 * LIMIT_S)
        buffer.destroy()
        return 0.0
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as error, pytest.MonkeyPatch.context() as patch:
        patch.setattr(waves, "SMS", sms)
        run_layer(buffer, given, max_recv_rows=ENOUGH * 2)
        buffer.check()
    torch.cuda.synchronize()  # the GEMMs that wait have ended too
    assert error.value.late_ranks == (1,)
    return time.monotonic() - begin


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("sms", [waves.SMS, exhaustive(waves.Sms(*FEWEST))])
def test_a_late_rank_is_named_and_the_gemms_end(pools, engine, sms):
    waited = pools(2).run(a_late_rank, sms)
    assert LIMIT_S - 1 < waited[0] < LIMIT_S + 5


def without_memory_on_a_gpu(rank: int) -> None:
    """Rank 0 fails between sending and receiving. Rank 1 hears of it before its limit."""
    device_of("cuda", rank)
    buffer, given = make_buffer(), layer_inputs(rank, "uniform", 2100, seed=0)
    run_layer(buffer, given)
    dist.barrier()
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(waves._Layer, "counters", raise_out_of_memory)
            with pytest.raises(torch.cuda.OutOfMemoryError, match="made up"):
                run_layer(buffer, given)
        with pytest.raises(RuntimeError, match="gave up while it ran the experts of a layer, by OutOfMemoryError"):
            run_layer(buffer, given)
    else:
        begin = time.monotonic()
        with pytest.raises(ep.PeerTimeoutError) as error:
            run_layer(buffer, given)
            buffer.check()
        assert error.value.late_ranks == (0,) and time.monotonic() - begin < 30
    torch.cuda.synchronize()
    buffer.destroy()


@pytest.mark.parametrize("engine", [on("cuda")])
def test_peers_hear_of_an_error_in_the_middle_of_a_layer(pools, engine):
    pools(2).run(without_memory_on_a_gpu)


def few_after_none(rank: int) -> None:
    """No rows at first, then few: a kernel of its own."""
    device_of("cuda", rank)
    with buffer_with(waves.SMS) as buffer:
        for num_tokens in (0, 3):
            given = layer_inputs(rank, "uniform", num_tokens, seed=1)
            plain, found = run_layer(buffer, given, overlap=False), run_layer(buffer, given)
            assert all(torch.equal(a, b) for a, b in zip(plain, found))
        x, idx, weights, w1, w2 = given
        apart = torch.empty(w1.numel() + 1, dtype=w1.dtype, device="cuda")[1:].view(w1.shape).copy_(w1)
        moved = ep.moe_mlp(buffer, x, idx, weights, apart, w2.mT.contiguous().mT)
        assert apart.data_ptr() % 16 and torch.equal(moved, plain[0])


@pytest.mark.parametrize("engine", [on("cuda")])
def test_few_rows_after_none_and_weights_anywhere(pools, engine):
    pools(2).run(few_after_none)


def one_after_the_other(buffer, x, idx, weights, w1, w2, max_recv_rows, **options) -> torch.Tensor:
    """Run the steps of waves.overlapped_mlp one after the other. The host waits for the counts."""
    out = ep.dispatch(buffer, x, idx, weights)
    ends = out.tokens_per_expert.cumsum(0, dtype=torch.int32)
    rows = grouped_swiglu_mlp(out.x, out.topk_weights, ends, w1, w2, **options)
    return ep.combine(buffer, rows, out.handle)


def weights_of_layers(rank: int) -> None:
    """As Megatron's experts: a tensor for each expert, neighbours in memory or not, and gradients added elsewhere."""
    device_of("cuda", rank)
    results = []
    with make_buffer() as buffer:
        x, idx, weights, *stacks = layer_inputs(rank, "uniform", 2500 - 300 * rank, seed=3)
        apart = [[w.clone() for w in stack] for stack in stacks]
        reverse = [list(stack.flip(0).contiguous().unbind(0))[::-1] for stack in stacks]
        for w1, w2 in (apart, reverse):
            for keep_activated in (True, False):
                for layer in (one_after_the_other, waves.overlapped_mlp):
                    given = buffer, x, idx, weights, w1, w2
                    found, write = run_with_sums(layer, *given, keep_activated=keep_activated)
                    write()
                    results.append(found)
        buffer.check()
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result))


@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_and_gradients_that_lie_anywhere(pools, engine, num_ranks):
    pools(num_ranks).run(weights_of_layers)


def most_multiprocessors(rank: int) -> None:
    device_of("cuda", rank)
    most = torch.cuda.get_device_properties(0).multi_processor_count
    for num_sms, can in ((most, False), (most // 2 + 1, False), (most // 2, True)):
        with make_buffer(num_sms=num_sms) as buffer:
            assert waves.can_overlap(buffer, wants_gradients=True) is can


@pytest.mark.parametrize("engine", [on("cuda")])
def test_the_gemms_keep_half_of_the_multiprocessors(pools, engine):
    pools(1).run(most_multiprocessors)


def test_the_cpu_engine_has_no_waves(pools):
    pools(2).run(on_a_cpu)


def on_a_cpu(rank: int) -> None:
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8)
    with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer:
        x, w1, w2 = torch.randn(5, 16), torch.randn(2, 8, 16), torch.randn(2, 16, 4)
        idx, weights = torch.rand(5, 4).topk(2).indices, torch.rand(5, 2)
        assert waves.why_not(buffer, wants_gradients=True) == "its engine is cpu"
        assert not waves.can_overlap(buffer, wants_gradients=True)
        plain = ep.moe_mlp(buffer, x, idx, weights, w1, w2, overlap=False)
        assert torch.equal(ep.moe_mlp(buffer, x, idx, weights, w1, w2, overlap=True), plain)


class Machine:
    """What stands for a GPU: streams that note what is launched in them. Everything runs at once, in that order."""

    def __init__(self, patch: pytest.MonkeyPatch, buffer: ep.Buffer):
        self.log: list[str] = []
        self.main, self.side = FakeStream("main", self), FakeStream("side", self)
        self.current, self.engine = self.main, EngineOnACpu(self, buffer._engine)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "stream", self.using)
        patch.setattr(torch.Tensor, "record_stream", lambda t, stream: None)
        patch.setattr(grouped_gemm, "kernels", lambda: KernelsOnACpu(self))
        patch.setattr(buffer, "_launch_dispatch", partial(self.launch_dispatch, buffer._launch_dispatch))
        patch.setattr(buffer, "_launch_combine", partial(self.launch_combine, buffer._launch_combine))
        patch.setattr(waves, "_Layer", partial(LayerOnACpu, self))

    def note(self, text: str) -> None:
        self.log.append(f"{self.current.name}: {text}")

    @contextlib.contextmanager
    def using(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch_dispatch(self, launch, request, only_sends=False, by_expert=False, **rest):
        self.note("stage" if only_sends else "dispatch")
        return launch(request, only_sends=only_sends, **rest)

    def launch_combine(self, launch, request, only_sends=False, waves=None):
        blocks = "" if waves is None else f" by {waves.num_blocks}"
        self.note(("push" if only_sends else "combine") + blocks)
        return launch(request, only_sends=only_sends)


class FakeStream:
    def __init__(self, name: str, machine: Machine):
        self.name, self.machine = name, machine

    def wait_stream(self, other) -> None:
        self.machine.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.machine.log.append(f"{self.name} records an event")
        return "the event"

    def wait_event(self, event: str) -> None:
        self.machine.log.append(f"{self.name} waits for {event}")


class EngineOnACpu:
    """The CPU engine, which takes no waves."""

    num_sms, all_sms = 100, 132

    def __init__(self, machine: Machine, engine):
        self.machine, self.engine, self.given_up = machine, engine, []

    unreceived = property(lambda self: self.engine.unreceived)
    sent = ()

    def side_stream(self):
        return self.machine.side

    def receive(self, waves: Waves) -> None:
        self.machine.note(f"receive the {self.unreceived} by {waves.num_blocks}")
        self.engine.receive()

    def wait_until_begun(self, waves: Waves) -> None:
        self.machine.note(f"until {waves.num_blocks} have begun")

    def give_up(self, doing: str, error: BaseException) -> None:
        self.given_up.append(f"{doing}: {error}")


class LayerOnACpu(waves._Layer):
    def __init__(self, machine: Machine, buffer, rows):
        self.buffer, self.engine, self.rows = buffer, machine.engine, rows
        self.main, self.side = machine.main, machine.side


class KernelsOnACpu:
    """Stand for the Triton kernels: loops over experts."""

    def __init__(self, machine: Machine):
        self.machine = machine

    def multiply(self, rows, weights, ends, out, *, transposed, arrived=None, written=None):
        self.machine.note("GEMM" + " that waits" * (arrived is not None) + " that counts" * (written is not None))
        call = grouped_gemm.linear if transposed else grouped_gemm.linear_grad_rows
        out.copy_(call(rows, weights, ends))

    def wait_for_share(self, written, ends, num_rows, share):
        self.machine.note("until rows are written")

    def outer_products(self, *given, **options):
        self.machine.note("GEMM of weights")
        grouped_gemm.linear_grad_weights(*given, **options)

    weighted_swiglu = staticmethod(grouped_gemm.weighted_swiglu)
    weighted_swiglu_grad = staticmethod(grouped_gemm.weighted_swiglu_grad)
    pieces_of_row = staticmethod(lambda *given, **options: 1)


FORWARD = """
    main: stage
    side waits for main
    side: receive the dispatch by 11
    main: until 11 have begun
    main: GEMM that waits
    main waits for side
    main records an event
    main: GEMM that counts
    side waits for the event
    side: until rows are written
    side: push by 12
    main waits for side
    main: receive the combine by 132
    main waits for side
"""
BACKWARD = """
    main: stage
    side waits for main
    side: receive the dispatch by 13
    main: until 13 have begun
    main: GEMM that waits
    main: GEMM
    side waits for main
    side: combine by 14
    main: GEMM of weights
    main: GEMM of weights
    main waits for side
"""
# Of several nodes: rows and sums cross as ever, and the combine of the backward runs beside GEMMs.
FORWARD_OF_NODES = """
    main: dispatch
    main: GEMM
    main: GEMM
    main: combine
"""
BACKWARD_OF_NODES = """
    main: dispatch
    main: GEMM
    main: GEMM
    side waits for main
    side: combine
    main: GEMM of weights
    main: GEMM of weights
    main waits for side
"""


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def with_stand_ins(rank: int, kind: str) -> None:
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8)
    generator = torch.Generator().manual_seed(rank)
    x, w1, w2 = (torch.randn(shape, generator=generator) for shape in ((5 + rank, 16), (2, 8, 16), (2, 16, 4)))
    idx = torch.rand(5 + rank, 4, generator=generator).topk(2).indices
    probs, of_y = torch.rand(5 + rank, 2, generator=generator), torch.randn(5 + rank, 16, generator=generator)
    results = []
    with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer, pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, buffer)
        patch.setattr(waves, "SMS", waves.Sms(pull=11, push=12, grad_pull=13, grad_combine=14))
        launches = {True: (FORWARD, BACKWARD), False: (FORWARD_OF_NODES, BACKWARD_OF_NODES)}
        for overlaps, has_waves in ((False, False), (True, False), (True, True)):
            patch.setattr(type(buffer._engine), "has_waves", has_waves)
            machine.log.clear()
            tensors = [t.clone() for t in (x, probs, w1, w2)]
            weights, taken = tensors[2:], []
            if kind != "one tensor":
                weights = [list(w.unbind()) for w in weights]
            options = {} if kind in ("one tensor", "a tensor each") else dict(take_grads=taken.append)
            options |= dict(keep_activated=kind != "added elsewhere, keeps less")
            wanted = tensors[:2] if kind != "weights alone" else []
            if not options.get("take_grads"):
                wanted = wanted + (weights if kind == "one tensor" else [*weights[0], *weights[1]])
            for t in wanted:
                t.requires_grad_()
            layer = waves.overlapped_mlp if overlaps else one_after_the_other
            y = layer(buffer, tensors[0], idx, tensors[1], *weights, 40, **options)
            forward, backward = map(lines_of, launches[has_waves])
            if overlaps:
                assert machine.log == forward
            machine.log.clear()
            y.backward(of_y)
            if kind == "weights alone":
                del backward[-6:-3]  # nobody wants the gradients that a combine brings back
            if taken:
                del backward[-3:-1]
            if kind == "weights alone" and not has_waves:
                del backward[-1]  # nothing is beside the main stream
            if overlaps:
                assert machine.log == backward
            found = [y.detach(), *(t.grad for t in wanted)]
            if taken:
                sums = [[torch.ones_like(w) for w in of] for of in weights]
                taken[0](*sums, True)
                found += [*sums[0], *sums[1]]
            assert len(taken) == ("take_grads" in options)
            results.append(found)
    assert len(results[0]) >= 5 and all(t is not None for t in results[0])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize(
    "kind", ["one tensor", "a tensor each", "added elsewhere", "added elsewhere, keeps less", "weights alone"]
)
def test_gradients_with_stand_ins_for_the_gpu(pools, kind):
    """Every kind of weights and of receivers of their gradients. Each launch has its own number of blocks."""
    pools(2).run(with_stand_ins, kind)


def some_gradients(rank: int, asked: tuple[int, ...], by_grad: bool) -> None:
    """Rank 0 overlaps, rank 1 takes one step after the other, and both ask for the same gradients alone."""
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8, timeout_s=10)
    generator = torch.Generator().manual_seed(rank)
    shapes = (5, 16), (5, 2), (2, 8, 16), (2, 16, 4)
    x, probs, w1, w2 = leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    idx = torch.rand(5, 4, generator=generator).topk(2).indices
    results = []
    with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer, pytest.MonkeyPatch.context() as patch:
        for overlaps in (False, rank == 0):
            if overlaps:
                Machine(patch, buffer)
                patch.setattr(type(buffer._engine), "has_waves", True)
            layer = waves.overlapped_mlp if overlaps else one_after_the_other
            y = layer(buffer, x, idx, probs, w1, w2, 40)
            wanted = [leaves[i] for i in asked]
            if by_grad:
                found = torch.autograd.grad(y.sum(), wanted)
            else:
                for t in leaves:
                    t.grad = None
                y.sum().backward(inputs=wanted)
                found = [t.grad for t in wanted]
            results.append([y.detach(), *found])
        ep.dispatch(buffer, x.detach(), idx, probs.detach())  # all ranks are in step
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("by_grad", [True, False])
@pytest.mark.parametrize("asked", [(2, 3), (0,), (1, 2)])
def test_ranks_that_choose_differently_and_ask_for_some_gradients(pools, asked, by_grad):
    """Autograd leaves out the backward of a dispatch where nobody asks for its gradients. So does a layer."""
    pools(2).run(some_gradients, asked, by_grad)


def without_memory(rank: int) -> None:
    """An error behind what a layer has sent and not received ends the buffer; one elsewhere does not."""
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8)
    given = torch.randn(5, 16), torch.rand(5, 4).topk(2).indices, torch.rand(5, 2), torch.randn(2, 8, 16)

    for place, ends in ((waves._Layer, "counters"), (KernelsOnACpu, "weighted_swiglu")):
        with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer, pytest.MonkeyPatch.context() as patch:
            machine = Machine(patch, buffer)
            patch.setattr(type(buffer._engine), "has_waves", True)
            patch.setattr(place, ends, raise_out_of_memory)
            with pytest.raises(torch.cuda.OutOfMemoryError, match="made up"):
                waves.overlapped_mlp(buffer, *given, torch.randn(2, 16, 4), 40)
            is_sent = ends == "counters"
            assert machine.engine.given_up == ["ran the experts of a layer: made up"] * is_sent
            assert (buffer._engine.unreceived == "dispatch") is is_sent
            assert (machine.log[-1] == "main waits for side") is not is_sent  # it has received then


def test_an_error_in_the_middle_of_a_layer(pools):
    pools(2).run(without_memory)


@pytest.mark.parametrize(
    "variable, value, captures, reason",
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", True, "it is captured in a CUDA graph with CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", False, None),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", True, None),
        ("CUDA_LAUNCH_BLOCKING", "1", False, "CUDA_LAUNCH_BLOCKING is set"),
    ],
)
def test_where_kernels_cannot_run_side_by_side(variable, value, captures, reason):
    topology = types.SimpleNamespace(num_nodes=1)
    config = types.SimpleNamespace(topology=topology, max_tokens_per_rank=4096, hidden=7168, dtype=torch.bfloat16)
    engine = types.SimpleNamespace(device="cuda", has_waves=True)
    buffer = types.SimpleNamespace(_config=config, _live_engine=lambda: engine)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"):
            patch.delenv(name, raising=False)
        patch.setenv(variable, value)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
        assert waves.why_not(buffer, wants_gradients=False) == reason
        patch.delenv(variable)
        config.dtype = torch.float32  # no kernels take it
        assert waves.why_not(buffer, wants_gradients=False) == "its rows are torch.float32"
        config.dtype = torch.float16
        assert waves.why_not(buffer, wants_gradients=False, num_tokens=2048) is None
        reason = waves.why_not(buffer, wants_gradients=True, num_tokens=2047)
        assert reason == "this rank has 2047 tokens, less than 2048"
        config.max_tokens_per_rank = 2047
        assert waves.why_not(buffer, wants_gradients=False) == "max_tokens_per_rank is 2047, less than 2048"


def test_when_pushes_begin():
    """The later, the shorter they are beside the GEMM."""
    usual = dict(num_ranks=2, num_topk=8, intermediate=2048, itemsize=2)
    assert 0.75 < waves.push_after(**usual) < 0.85
    assert waves.push_after(**usual) == waves.push_after(**usual | dict(num_ranks=1))  # loads take longest in both
    for sooner in (dict(intermediate=768), dict(num_ranks=8), dict(itemsize=4)):
        assert 0 < waves.push_after(**usual | sooner) < waves.push_after(**usual), sooner
    assert waves.push_after(**usual | dict(num_ranks=8, intermediate=512)) == 0
    assert waves.push_after(**usual | dict(intermediate=10**6)) < 1


@pytest.mark.parametrize("most, blocks", [(1, 1), (16, 16), (24, 24), (waves.SMS.grad_combine, 24)])
def test_launches_beside_gemms_keep_to_the_buffers_multiprocessors(most, blocks):
    layer = types.SimpleNamespace(engine=types.SimpleNamespace(num_sms=24))
    assert waves._Layer.beside(layer, most) == Waves(blocks)
