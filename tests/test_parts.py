"""moe_mlp as one node of autograd, in one part of the tokens or two: the bits of separate steps, whatever the tokens of
the ranks; the order of operations."""

import contextlib
import itertools
import types
from functools import partial

import pytest
import torch
from conftest import exhaustive, on_ranks
from lib.dispatch_combine import make_buffer as buffer_of
from lib.errors import assert_refused, error_of
from lib.experts import MAX_TOKENS, SIZES, compare_with_dense, given_to, layer, make_case
from lib.faults import operations_so_far
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ep_dispatcher as ep
from ep_dispatcher.engines.cuda import streams
from ep_dispatcher.moe import float8_gemm, overlap
from ep_dispatcher.moe.grouped_mlp import Parameters
from ep_dispatcher.moe.mlp import run_grouped_nodes


@pytest.mark.parametrize("sizes", [[1, 17], [0, 1], [2, 0], [0, 0]], ids=str)
def test_few_tokens(pools, engine, sizes):
    """One token is all in the first part."""
    case, inputs = make_case(2, 1, sizes=sizes)
    assert [len(x) for x in inputs.x] == sizes
    compare_with_dense(pools(2).run(layer, engine, case, inputs, "two parts"), case, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, exhaustive(torch.float32)], ids=str)
@on_ranks(2)
def test_gradients_of_weights_are_written_once(rank: int, engine: str, dtype: torch.dtype) -> None:
    """As Megatron's main_grad: one write, with both parts in it, now or later."""
    case, inputs = make_case(2, 1, dtype, sizes=SIZES)
    x, idx, weights, w1, w2 = given_to(rank, engine, case, inputs)
    with buffer_of(case, engine, MAX_TOKENS) as buffer:
        plain = [t.clone().requires_grad_() for t in (w1, w2)]
        ep.moe_mlp(buffer, x, idx, weights, *plain, num_parts=2).sum().backward()
        for keep_activated, accumulate in itertools.product((True, False), repeat=2):
            take: list = []
            options = dict(keep_activated=keep_activated, take_grads=take.append, overlap=True)
            y = overlap.mlp_in_parts(buffer, x, idx, weights, Parameters(w1, w2), None, 2, **options)
            y.sum().backward()
            (write,) = take
            sums = [torch.ones_like(w, dtype=torch.float32 if accumulate else w.dtype) for w in (w1, w2)]
            write(Parameters(*sums), accumulate)
            for a, b in zip(sums, plain):
                if accumulate:
                    torch.testing.assert_close(a, b.grad.float() + 1, rtol=2e-2, atol=2e-2)
                else:
                    assert torch.equal(a, b.grad)


def one_node(buffer: ep.Buffer, idx: Tensor, max_recv_rows: int | None, num_parts: int, *leaves: Tensor, **options):
    """Run the layer as GPUs do. leaves: x, topk_weights, w1, w2 and perhaps b1, b2"""
    x, probs, *parameters = leaves
    inputs = buffer, x, idx, probs, Parameters(*parameters), max_recv_rows, num_parts
    return overlap.mlp_in_parts(*inputs, **dict(overlap=True) | options)


def separate_nodes(
    buffer: ep.Buffer, idx: Tensor, max_recv_rows: int | None, num_parts: int, *leaves: Tensor, **options
):
    """Run the same layer with an autograd node for each step."""
    x, probs, *parameters = leaves
    return run_grouped_nodes(buffer, x, idx, probs, Parameters(*parameters), max_recv_rows, num_parts, **options)


@pytest.mark.parametrize(
    "kind, dtype",
    [
        *((kind, torch.bfloat16) for kind in ("plain", "fixed rows", "keeps less", "biases", "float8")),
        exhaustive("plain", torch.float32),
    ],
    ids=str,
)
@on_ranks(2)
def test_one_part_has_the_bits_of_separate_nodes(rank: int, engine: str, kind: str, dtype: torch.dtype) -> None:
    """Also under a recompute, where gradients accumulate, and where only one of the two ranks runs a single node."""
    case, inputs = make_case(2, 1, dtype, sizes=SIZES)
    x, idx, probs, w1, w2 = given_to(rank, engine, case, inputs)
    given = [x, probs, w1, w2]
    if kind == "biases":
        given += [torch.linspace(-1, 1, w[..., 0].numel()).view(w.shape[:-1]).to(w) for w in (w1, w2)]
    options: dict = {"keeps less": dict(keep_activated=False)}.get(kind, {})
    if kind == "float8":
        quantized = float8_gemm.quantize_weights(w1), float8_gemm.quantize_weights(w2)
        options = dict(quantize="e4m3_1x128_pow2", float8=quantized)
    max_recv_rows = 100 if kind == "fixed rows" else None

    def results_of(buffer: ep.Buffer, run, recomputes: bool) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in given]
        run = partial(run, buffer, idx, max_recv_rows, 1, **options)
        results = []
        for factor in (1, 3):  # the second pass accumulates
            if recomputes:
                y = checkpoint(run, *leaves, use_reentrant=False, context_fn=ep.recompute_contexts)
            else:
                y = run(*leaves)
            y.backward(torch.linspace(-factor, factor, y.numel(), device=y.device).view(y.shape).to(y.dtype))
            results.append(y.detach())
        return [*results, *(leaf.grad for leaf in leaves)]

    with buffer_of(case, engine, MAX_TOKENS) as buffer:
        for recomputes in (False, True):
            plain = results_of(buffer, separate_nodes, recomputes)
            for run in (one_node, one_node if rank == 0 else separate_nodes):
                found = results_of(buffer, run, recomputes)
                assert all(map(torch.equal, plain, found)), (recomputes, run)


@contextlib.contextmanager
def small_layer(rank: int, num_ranks: int = 1):
    """A buffer of the CPU engine; x, topk_weights, w1, w2 and topk_idx."""
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8, timeout_s=10, ranks_per_node=1)
    generator, own = torch.Generator().manual_seed(rank), 4 // num_ranks
    leaves = [torch.randn(shape, generator=generator) for shape in ((5, 16), (5, 2), (own, 8, 16), (own, 16, 4))]
    idx = torch.rand(5, 4, generator=generator).topk(2).indices
    with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer:
        yield buffer, [leaf.requires_grad_() for leaf in leaves], idx


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("asked", [(0, 1, 2, 3), (2, 3), (0,), (1, 2)])
@on_ranks(2)
def test_the_order_of_operations_is_that_of_autograd(rank: int, asked: tuple[int, ...], num_parts: int) -> None:
    """Rank 0 runs overlap.py, rank 1 the steps as nodes of autograd, as torch.compile does: the order is the same."""
    out = {1: ["dispatch 5"], 2: ["dispatch 3", "dispatch 2"]}[num_parts]
    back = [operation.replace("dispatch", "combine") for operation in out]
    with small_layer(rank, 2) as (buffer, leaves, idx), pytest.MonkeyPatch.context() as patch:
        x, probs, *_ = leaves
        operations: list[str] = []
        for name in ("dispatch", "combine"):
            engine = buffer.live_engine()
            call = getattr(engine, name)

            def noted(*given, call=call, name=name, **options):
                operations.append(f"{name} {given[0].rows.shape[0] if name == 'dispatch' else given[0].num_tokens}")
                return call(*given, **options)

            patch.setattr(engine, name, noted)
        for separate in (False, rank == 1, True):
            operations.clear()
            y = (separate_nodes if separate else one_node)(buffer, idx, None, num_parts, *leaves)
            torch.autograd.grad(y.sum(), [leaves[i] for i in asked])
            right = [*out, *back, *reversed(out)]
            assert operations == right + [*reversed(back)] * bool({0, 1} & set(asked))
        ep.dispatch(buffer, x.detach(), idx, probs.detach())  # all ranks are in step


@on_ranks(1)
def test_an_error_of_either_part_comes_before_anything_is_sent(rank: int) -> None:
    """Also where the steps are nodes of autograd. test_experts has the other arguments."""
    with small_layer(rank) as (buffer, (x, *others), idx):
        bad, epoch = idx.clone(), operations_so_far(buffer)
        bad[-1, 1] = 77
        for around in (contextlib.nullcontext(), FlopCounterMode(display=False)):
            with around:
                assert_refused("topk_idx[4, 1]", ep.moe_mlp, buffer, x, bad, *others, num_parts=2)
        assert operations_so_far(buffer) == epoch, "something was sent"
        text = error_of(ep.moe_mlp, buffer, x, idx, *others, num_parts=2, max_recv_rows=1)
        assert text.startswith("max_recv_rows is too small"), text


# ---- order of launches, with stand-ins for streams ------------------------------------------------------------------


class SideStream:
    """Stands for streams.SideStream. Everything runs at once, in the order of the log."""

    def __init__(self, machine: "Machine"):
        self.machine, self.num_events = machine, 0

    @contextlib.contextmanager
    def current(self):
        before, self.machine.current = self.machine.current, "side"
        yield
        self.machine.current = before

    def follow_main(self) -> None:
        self.machine.log.append("side waits for main")

    def main_follows(self) -> None:
        self.machine.log.append("main waits for side")

    def record_event(self) -> str:
        assert self.machine.current == "side"
        self.num_events += 1
        self.machine.log.append(f"side: event {self.num_events}")
        return f"event {self.num_events}"

    def main_waits(self, event: str) -> None:
        assert self.machine.current == "main"
        self.machine.log.append(f"main waits for {event}")

    def order_memory(self) -> None:
        self.machine.log.append(f"memory of side waits for {self.machine.current}")


FORWARD = """
    side waits for main
    side: dispatch 3; side: event 1
    side: dispatch 2; side: event 2
    main waits for event 1; main: experts
    side waits for main; side: combine 3
    main waits for event 2; main: experts
    side waits for main; side: combine 2
    main waits for side
    memory of side waits for main
"""
# The dispatch of B, where the host waits for its counts, and what then comes before it.
B, AFTER = "    side: dispatch 2; side: event 2\n", "main waits for event 1; main: experts\n"
COUNTED = FORWARD.replace(B, "").replace(AFTER, AFTER + B)
BACKWARD = """
    side waits for main
    side: dispatch 2; side: event 1
    side: dispatch 3; side: event 2
    main waits for event 1; main: gradients of rows
    side waits for main; side: combine 2
    main waits for event 2; main: gradients of rows
    side waits for main; side: combine 3
    main: gradients of weights
    memory of side waits for main
    main waits for side; main: parts of the gradients of topk_weights
    main waits for side
    memory of side waits for main
"""
FORWARD_OF_ONE_PART = "main: dispatch 5; main: experts; main: combine 5"
BACKWARD_OF_ONE_PART = """
    side waits for main
    main: dispatch 5
    main: gradients of rows
    side waits for main; side: combine 5
    main: gradients of weights
    memory of side waits for main
    main waits for side; main: parts of the gradients of topk_weights
    main waits for side
    memory of side waits for main
"""
CAT = "parts of the gradients of topk_weights"


def lines_of(text: str) -> list[str]:
    return [step.strip() for line in text.strip().splitlines() for step in line.split(";")]


class Machine:
    """What stands for a GPU: two streams, and a log of what is launched in them."""

    def __init__(self, patch: pytest.MonkeyPatch, buffer: ep.Buffer):
        self.log: list[str] = []
        self.current, self.given_up = "main", []
        patch.setattr(overlap, "no_side_stream_reason", lambda buffer: None)
        patch.setattr(overlap, "_Operations", partial(self.lane, overlap._Operations))
        for name, size in (("dispatch", lambda request: len(request.rows)), ("combine", lambda of: of.num_tokens)):
            engine = buffer.live_engine()
            patch.setattr(engine, name, partial(self.note, getattr(engine, name), name, size))
        steps = dict(
            forward_rows="experts", backward_rows="gradients of rows", write_parameter_grads="gradients of weights"
        )
        patch.setattr(
            overlap, "torch", types.SimpleNamespace(**vars(torch) | dict(cat=partial(self.note, torch.cat, CAT, None)))
        )
        for name, text in steps.items():
            patch.setattr(overlap, name, partial(self.note, getattr(overlap, name), text, None))

    def note(self, call, text: str, size, *given, **options):
        self.log.append(f"{self.current}: {text}{f' {size(given[0])}' if size else ''}")
        return call(*given, **options)

    def lane(self, make, buffer, x, num_parts, overlaps, num_operations) -> overlap._Operations:
        """A lane as on a GPU. Its engine notes who gives it up."""
        lane = make(buffer, x, num_parts, overlaps, num_operations)
        if overlaps:
            lane.side = SideStream(self)
        lane.engine = types.SimpleNamespace(give_up=lambda doing, error: self.given_up.append(f"{doing}: {error}"))
        return lane


@on_ranks(2)
def test_the_order_of_launches(rank: int) -> None:
    with small_layer(rank, 2) as (buffer, leaves, idx):
        plain = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], num_parts=2)
        of_plain = torch.autograd.grad(plain.sum(), leaves)
        for given, forward in (dict(max_recv_rows=40), FORWARD), ({}, COUNTED):
            with pytest.MonkeyPatch.context() as patch:
                machine = Machine(patch, buffer)
                y = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], num_parts=2, **given)
                assert machine.log == lines_of(forward)
                machine.log.clear()
                found = torch.autograd.grad(y.sum(), leaves)
                assert machine.log == lines_of(BACKWARD)
            assert torch.equal(y, plain) and all(torch.equal(a, b) for a, b in zip(found, of_plain))


@on_ranks(2)
def test_one_part_launches_its_last_combine_before_the_gradients_of_weights(rank: int) -> None:
    with small_layer(rank, 2) as (buffer, leaves, idx):
        for max_recv_rows, overlaps in ((None, True), (40, True), (40, False)):
            with pytest.MonkeyPatch.context() as patch:
                machine = Machine(patch, buffer)
                y = one_node(buffer, idx, max_recv_rows, 1, *leaves, overlap=overlaps)
                assert machine.log == lines_of(FORWARD_OF_ONE_PART)
                machine.log.clear()
                found = torch.autograd.grad(y.sum(), leaves)
                if overlaps:
                    assert machine.log == lines_of(BACKWARD_OF_ONE_PART)
                else:
                    steps = "dispatch 5", "gradients of rows", "combine 5", "gradients of weights", CAT
                    assert machine.log == [f"main: {step}" for step in steps]
            plain = separate_nodes(buffer, idx, max_recv_rows, 1, *leaves)
            assert torch.equal(y, plain) and all(map(torch.equal, found, torch.autograd.grad(plain.sum(), leaves)))
        with pytest.MonkeyPatch.context() as patch:
            machine = Machine(patch, buffer)
            y = one_node(buffer, idx, 40, 1, *leaves)
            machine.log.clear()
            torch.autograd.grad(y.sum(), leaves[2:])
            assert not any("combine" in step for step in machine.log), "a combine whose result nobody asks for"


@on_ranks(1)
def test_a_later_write_orders_the_memory_that_it_reads(rank: int) -> None:
    """Gradients of weights in another stream, when the layer is over: it reads memory of the side stream."""
    take: list = []
    with small_layer(rank) as (buffer, leaves, idx), pytest.MonkeyPatch.context() as patch:
        x, probs, w1, w2 = (leaf.detach() for leaf in leaves)
        machine = Machine(patch, buffer)
        given = buffer, x, idx, probs, Parameters(w1, w2), 40, 2
        overlap.mlp_in_parts(*given, overlap=True, take_grads=take.append).sum().backward()
        machine.log.clear()
        machine.current = "other"
        (write,) = take
        write(Parameters(w1, w2).empty_like(), False)
        assert machine.log == ["other: gradients of weights", "memory of side waits for other"]


@on_ranks(1)
def test_an_error_while_peers_wait_ends_the_buffer(rank: int) -> None:
    """An error while operations are left ends the buffer; a ValueError does not, nor one behind the last operation."""
    with small_layer(rank) as (buffer, leaves, idx):
        for num_parts, (place, kind, ends) in itertools.product(
            (1, 2),
            (
                ("forward_rows", torch.cuda.OutOfMemoryError, True),
                ("forward_rows", ValueError, False),
                ("backward_rows", torch.cuda.OutOfMemoryError, True),
                ("write_parameter_grads", torch.cuda.OutOfMemoryError, False),
            ),
        ):

            def fail(*_, kind=kind):
                raise kind("made up")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(overlap, place, fail)
                machine = Machine(patch, buffer)
                with pytest.raises(kind, match="made up"):
                    one_node(buffer, idx, None, num_parts, *leaves).sum().backward()
                assert machine.given_up == ["ran the experts of a layer: made up"] * ends, place
                if num_parts == 2 or place != "forward_rows":
                    assert machine.log[-2:] == ["main waits for side", "memory of side waits for main"]


def test_main_streams_do_not_share_a_side_stream(monkeypatch):
    """PyTorch returns its streams in turn, and a main stream may be one of them."""
    pool, current, drawn = [100 + n for n in range(streams.POOL)], [0], []

    def make(device, priority):
        assert priority == -1
        drawn.append(pool[len(drawn) % len(pool)])
        return types.SimpleNamespace(cuda_stream=drawn[-1], device=device)

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: current[0], raising=False)
    monkeypatch.setattr(streams, "_side_streams", {})
    found = {}
    for main in (0, 7, 102, *range(1000, 1028)):
        current[0] = main
        found[main] = streams.side_stream(0)
        assert found[main].cuda_stream != main
        for _ in range(5):  # others draw too
            make(0, -1)
    assert len({one.cuda_stream for one in found.values()}) == len(found)
    current[0] = 0
    assert streams.side_stream(0) is found[0], "of every engine"
    assert streams.side_stream(1) is not found[0]
    for main in range(2000, 2040):  # more than there are: some share one
        current[0] = main
        assert streams.side_stream(0).cuda_stream in pool


def test_when_a_layer_runs_in_two_parts(monkeypatch):
    """What ranks have alike decides: not their tokens, nor their environment."""
    topology = types.SimpleNamespace(num_nodes=2)
    sizes = dict(max_tokens_per_rank=2048, hidden=512, dtype=torch.bfloat16, redundant_experts_per_rank=0)
    config = types.SimpleNamespace(topology=topology, **sizes)
    engine = types.SimpleNamespace(device="cuda")
    buffer = types.SimpleNamespace(config=config, live_engine=lambda: engine)
    assert overlap.resolve_num_parts(buffer) == 2 and overlap.no_overlap_reason(buffer) is None
    assert overlap.no_overlap_reason(buffer, num_parts=1) == "num_parts is 1"
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert overlap.no_overlap_reason(buffer) == "CUDA_LAUNCH_BLOCKING is set" and overlap.resolve_num_parts(buffer) == 2
    changes = [
        (topology, "num_nodes", 1, "its ranks are one node"),
        (config, "max_tokens_per_rank", 2047, "max_tokens_per_rank is 2047, less than 2048"),
        (config, "dtype", torch.float32, "its rows are torch.float32"),
        (engine, "device", "cpu", "its engine is cpu"),
    ]
    for of, name, value, reason in changes:
        with monkeypatch.context() as patch:
            patch.setattr(of, name, value)
            assert overlap.no_overlap_reason(buffer) == reason and overlap.resolve_num_parts(buffer) == 1
            assert overlap.resolve_num_parts(buffer, 2) == 2 and overlap.resolve_num_parts(buffer, 1) == 1
    assert overlap.resolve_num_parts(buffer) == 2
