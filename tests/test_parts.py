"""moe_mlp in two parts of the tokens: the dense layer, whatever the tokens of the ranks; the order of operations."""

import contextlib
import types
from functools import partial

import pytest
import torch
from conftest import exhaustive, on_ranks
from lib.dispatch_combine import make_buffer as buffer_of
from lib.errors import assert_refused, error_of
from lib.experts import MAX_TOKENS, SIZES, compare_with_dense, given_to, layer, make_case
from lib.faults import operations_so_far
from torch.utils.flop_counter import FlopCounterMode

import ep_dispatcher as ep
from ep_dispatcher.engines.cuda import streams
from ep_dispatcher.moe import overlap
from ep_dispatcher.moe.grouped_mlp import Parameters


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
        for keep_activated in (True, False):
            take: list = []
            options = dict(keep_activated=keep_activated, take_grads=take.append, overlap=True)
            y = overlap.mlp_in_parts(buffer, x, idx, weights, Parameters(w1, w2), None, **options)
            y.sum().backward()
            (write,) = take
            sums = [torch.empty_like(w) for w in (w1, w2)]
            write(Parameters(*sums), False)
            assert all(torch.equal(a, b.grad) for a, b in zip(sums, plain))
            sums = [torch.ones_like(w, dtype=torch.float32) for w in (w1, w2)]
            write(Parameters(*sums), True)
            for a, b in zip(sums, plain):
                torch.testing.assert_close(a, b.grad.float() + 1, rtol=2e-2, atol=2e-2)


@contextlib.contextmanager
def small_layer(rank: int, num_ranks: int = 1):
    """A buffer of the CPU engine; x, topk_weights, w1, w2 and topk_idx."""
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8, timeout_s=10, ranks_per_node=1)
    generator, own = torch.Generator().manual_seed(rank), 4 // num_ranks
    leaves = [torch.randn(shape, generator=generator) for shape in ((5, 16), (5, 2), (own, 8, 16), (own, 16, 4))]
    idx = torch.rand(5, 4, generator=generator).topk(2).indices
    with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer:
        yield buffer, [leaf.requires_grad_() for leaf in leaves], idx


@pytest.mark.parametrize("asked", [(0, 1, 2, 3), (2, 3), (0,), (1, 2)])
@on_ranks(2)
def test_the_order_of_operations_is_that_of_autograd(rank: int, asked: tuple[int, ...]) -> None:
    """Rank 0 runs overlap.py, rank 1 the steps as nodes of autograd, as torch.compile does: the order is the same."""
    with small_layer(rank, 2) as (buffer, leaves, idx), pytest.MonkeyPatch.context() as patch:
        x, probs, w1, w2 = leaves
        operations: list[str] = []
        for name in ("dispatch", "combine"):
            engine = buffer.live_engine()
            call = getattr(engine, name)

            def noted(*given, call=call, name=name, **options):
                operations.append(f"{name} {given[0].rows.shape[0] if name == 'dispatch' else given[0].num_tokens}")
                return call(*given, **options)

            patch.setattr(engine, name, noted)
        for observed in (False, rank == 1, True):
            patch.setattr("ep_dispatcher.moe.mlp.is_observed", lambda _, observed=observed: observed)
            operations.clear()
            y = ep.moe_mlp(buffer, x, idx, probs, w1, w2, num_parts=2)
            torch.autograd.grad(y.sum(), [leaves[i] for i in asked])
            right = ["dispatch 3", "dispatch 2", "combine 3", "combine 2", "dispatch 2", "dispatch 3"]
            assert operations == right + ["combine 2", "combine 3"] * bool({0, 1} & set(asked))
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


class Stream:
    """Notes in a log what is launched in it. Everything runs at once, in that order."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list[str]):
        self.name, self.log, self.num_events = name, log, 0

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.num_events += 1
        self.log.append(f"{self.name}: event {self.num_events}")
        return f"event {self.num_events} of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


FORWARD = """
    side waits for main
    side: dispatch 3; side: event 1
    side: dispatch 2; side: event 2
    main waits for event 1 of side; main: experts; main: event 1
    side waits for event 1 of main; side: combine 3
    main waits for event 2 of side; main: experts; main: event 2
    side waits for event 2 of main; side: combine 2
    main waits for side
    side waits for main
"""
# The dispatch of B, where the host waits for its counts, and what then comes before it.
B, AFTER = "    side: dispatch 2; side: event 2\n", "main: experts; main: event 1\n"
COUNTED = FORWARD.replace(B, "").replace(AFTER, AFTER + B)
BACKWARD = """
    side waits for main
    side: dispatch 2; side: event 3
    side: dispatch 3; side: event 4
    main waits for event 3 of side; main: gradients of rows; main: event 3
    side waits for event 3 of main; side: combine 2
    main waits for event 4 of side; main: gradients of rows; main: event 4
    side waits for event 4 of main; side: combine 3
    main: gradients of weights
    side waits for main
    main waits for side; main: parts of the gradients of topk_weights
    main waits for side
    side waits for main
"""
CAT = "parts of the gradients of topk_weights"


def lines_of(text: str) -> list[str]:
    return [step.strip() for line in text.strip().splitlines() for step in line.split(";")]


class Machine:
    """What stands for a GPU: two streams, and a log of what is launched in them."""

    def __init__(self, patch: pytest.MonkeyPatch, buffer: ep.Buffer):
        self.log: list[str] = []
        self.main, self.side = Stream("main", self.log), Stream("side", self.log)
        self.current, self.is_captured, self.given_up = self.main, False, []
        patch.setattr(torch.cuda, "stream", self.using)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_captured)
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
        self.log.append(f"{self.current.name}: {text}{f' {size(given[0])}' if size else ''}")
        return call(*given, **options)

    @contextlib.contextmanager
    def using(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def lane(self, make, *given, **options) -> overlap._Operations:
        """A lane as on a GPU. Its engine notes who gives it up."""
        lane = make(*given, **options)
        lane.main, lane.side = self.main, self.side
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
        with pytest.MonkeyPatch.context() as patch:
            machine = Machine(patch, buffer)
            machine.is_captured = True  # a wait behind the join would leave the capture without a join
            ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], num_parts=2, max_recv_rows=40).sum().backward()
            right = [*lines_of(FORWARD)[:-1], *lines_of(BACKWARD)]
            del right[-5], right[-1]  # behind the gradients of weights, and at the end
            assert machine.log == right


@on_ranks(1)
def test_a_later_write_orders_the_memory_that_it_reads(rank: int) -> None:
    """Gradients of weights in another stream, when the layer is over: it reads memory of the side stream."""
    take: list = []
    with small_layer(rank) as (buffer, leaves, idx), pytest.MonkeyPatch.context() as patch:
        x, probs, w1, w2 = (leaf.detach() for leaf in leaves)
        machine = Machine(patch, buffer)
        given = buffer, x, idx, probs, Parameters(w1, w2), 40
        overlap.mlp_in_parts(*given, overlap=True, take_grads=take.append).sum().backward()
        machine.log.clear()
        machine.current = Stream("other", machine.log)
        (write,) = take
        write(Parameters(w1, w2).empty_like(), False)
        assert machine.log == ["other: gradients of weights", "side waits for other"]


@on_ranks(1)
def test_an_error_while_peers_wait_ends_the_buffer(rank: int) -> None:
    """An error while operations are left ends the buffer; a ValueError does not, nor one behind the last operation."""
    with small_layer(rank) as (buffer, leaves, idx):
        for place, kind, ends in (
            ("forward_rows", torch.cuda.OutOfMemoryError, True),
            ("forward_rows", ValueError, False),
            ("backward_rows", torch.cuda.OutOfMemoryError, True),
            ("write_parameter_grads", torch.cuda.OutOfMemoryError, False),
        ):

            def fail(*_, kind=kind):
                raise kind("made up")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(overlap, place, fail)
                machine = Machine(patch, buffer)
                with pytest.raises(kind, match="made up"):
                    ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], num_parts=2).sum().backward()
                assert machine.given_up == ["ran the experts of a layer: made up"] * ends, place
                assert machine.log[-2:] == ["main waits for side", "side waits for main"]


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
