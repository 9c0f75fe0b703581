"""moe_mlp in two parts of the tokens: the dense layer, whatever the tokens of the ranks; the order of operations."""

import contextlib
import dataclasses
import types
from functools import partial

import pytest
import torch
from conftest import exhaustive, on_ranks
from test_autograd import normal
from test_dispatch_combine import Case, Inputs, make_inputs
from test_dispatch_combine import make_buffer as buffer_of
from test_errors import error_of
from test_experts import CLOSE, MAX_TOKENS, NAMES, compare_with_dense, layer, weights_of
from torch.utils.flop_counter import FlopCounterMode

import ep_dispatcher as ep
from ep_dispatcher.engines.cuda import streams
from ep_dispatcher.moe import overlap
from ep_dispatcher.moe.grouped_mlp import Parameters
from ep_dispatcher.tools.testing import device_of

SIZES = [19, 12, 1, 0]  # tokens of the ranks


def inputs_of(
    num_ranks: int, ranks_per_node: int, dtype: torch.dtype = torch.float32, sizes: list[int] = SIZES
) -> tuple[Case, Inputs]:
    case = Case(num_ranks, ranks_per_node, dtype, num_topk=3, experts_per_rank=3, hidden=16)
    given = make_inputs(dataclasses.replace(case, routing="masked"))
    given.x[:] = [normal(x.shape, 20 + rank, dtype) for rank, x in enumerate(given.x)]
    lists = given.x, given.topk_idx, given.topk_weights
    return case, Inputs(*([t[:size] for t, size in zip(of_ranks, sizes)] for of_ranks in lists))


@pytest.mark.parametrize(
    "num_ranks, ranks_per_node, dtype, how",
    [
        (1, 1, torch.float32, "plain"),
        (2, 2, torch.bfloat16, "plain"),
        (2, 1, torch.float32, "fixed rows"),
        (2, 1, torch.bfloat16, "compiled"),
        (2, 1, torch.float16, "recomputed"),
        (2, 1, torch.float32, "keeps less"),
        (4, 2, torch.float32, "plain"),
        (4, 2, torch.float16, "fixed rows"),
    ],
    ids=lambda value: str(value).removeprefix("torch.").replace(" ", "-"),
)
def test_it_is_the_dense_layer(pools, engine, num_ranks, ranks_per_node, dtype, how):
    case, inputs = inputs_of(num_ranks, ranks_per_node, dtype)
    compare_with_dense(pools(num_ranks).run(layer, engine, case, inputs, how, 2), case, inputs)


@pytest.mark.parametrize("sizes", [[1, 17], [0, 1], [2, 0], [0, 0]], ids=str)
def test_few_tokens(pools, engine, sizes):
    """One token is all in the first part."""
    case, inputs = inputs_of(2, 1, sizes=sizes)
    assert [len(x) for x in inputs.x] == sizes
    compare_with_dense(pools(2).run(layer, engine, case, inputs, "plain", 2), case, inputs)


def ways(rank: int, engine: str, case: Case, inputs: Inputs) -> list:
    hows = ["plain", "no overlap", "fixed rows", "recomputed", "keeps less"]
    return [layer(rank, engine, case, inputs, how, 2) for how in hows] + [layer(rank, engine, case, inputs, "plain", 1)]


@pytest.mark.parametrize("dtype", [torch.float32, exhaustive(torch.bfloat16)], ids=str)
def test_every_way_gives_the_same_bits(pools, engine, dtype):
    """One part rounds the gradients of weights likewise, but sums rows in another order."""
    case, inputs = inputs_of(2, 1, dtype)
    for plain, *others, one_part in pools(2).run(ways, engine, case, inputs):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(plain, other))
        for name, a, b in zip(NAMES, plain, one_part):
            torch.testing.assert_close(a, b, **CLOSE[dtype], msg=name)


def taken(rank: int, engine: str, case: Case, inputs: Inputs) -> None:
    """As Megatron's main_grad: one write, with both parts in it, now or later."""
    device, first = device_of(engine, rank), rank * case.experts_per_rank
    w1, w2 = (w[first : first + case.experts_per_rank].to(device) for w in weights_of(case))
    x, idx, weights = (t[rank].to(device) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, exhaustive(torch.float32)], ids=str)
def test_gradients_of_weights_are_written_once(pools, engine, dtype):
    pools(2).run(taken, engine, *inputs_of(2, 1, dtype))


@pytest.mark.parametrize("asked", [(0, 1, 2, 3), (2, 3), (0,), (1, 2)])
@on_ranks(2)
def test_the_order_of_operations_is_that_of_autograd(rank: int, asked: tuple[int, ...]) -> None:
    """Rank 0 runs overlap.py, rank 1 the steps as nodes of autograd, as torch.compile does: the order is the same."""
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8, timeout_s=10, ranks_per_node=1)
    generator = torch.Generator().manual_seed(rank)
    shapes = (5, 16), (5, 2), (2, 8, 16), (2, 16, 4)
    x, probs, w1, w2 = leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    idx = torch.rand(5, 4, generator=generator).topk(2).indices
    with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer, pytest.MonkeyPatch.context() as patch:
        operations: list[str] = []
        for name in ("dispatch", "combine"):
            engine = buffer.live_engine()
            call = getattr(engine, name)

            def noted(*given, call=call, name=name, **options):
                operations.append(f"{name} {given[0][0].shape[0] if name == 'dispatch' else given[0].num_tokens}")
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
def test_mistakes_are_value_errors(rank: int, engine: str) -> None:
    case, inputs = inputs_of(1, 1)
    device = device_of(engine, rank)
    w1, w2 = (w.to(device) for w in weights_of(case))
    x, idx, weights = (t[0].to(device) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights))
    given = dict(x=x, topk_idx=idx, topk_weights=weights, w1=w1, w2=w2, num_parts=2)
    bad = idx.clone()
    bad[-1, 1] = 77
    too_many = {name: torch.cat([given[name]] * 4) for name in ("x", "topk_idx", "topk_weights")}
    wrong = [
        (dict(num_parts=3), "num_parts: given 3, allowed: 1, 2, None"),
        (dict(num_parts="2"), "num_parts: given '2', allowed: 1, 2, None"),
        (dict(topk_idx=idx[1:]), "topk_idx: given [18, 3]"),
        (dict(topk_idx=bad), f"topk_idx[{18 if engine == 'cpu' else 8}, 1]: given 77"),  # on a GPU: of its part
        (dict(max_recv_rows=-1), "max_recv_rows: given -1"),
        (too_many, "x: given 76 rows, allowed: at most max_tokens_per_rank = 64"),
    ]
    with buffer_of(case, engine, MAX_TOKENS) as buffer:
        epoch = buffer._engine._c.epoch if engine == "cpu" else 0
        for change, text in wrong:
            found = error_of(lambda change=change: ep.moe_mlp(buffer, **(given | change)))
            assert found.startswith(text), found
        assert error_of(lambda: ep.why_no_overlap(buffer, num_parts=0)).startswith("num_parts: given 0")
        if engine == "cpu":
            assert buffer._engine._c.epoch == epoch, "something was sent"
        y = ep.moe_mlp(buffer, **given)
        torch.testing.assert_close(y, ep.moe_mlp(buffer, **(given | dict(num_parts=1))))
        if engine == "cpu":
            epoch = buffer._engine._c.epoch
            with FlopCounterMode(display=False):
                found = error_of(lambda: ep.moe_mlp(buffer, **(given | dict(topk_idx=bad))))
            assert found.startswith("topk_idx[18, 1]: given 77"), found
            assert buffer._engine._c.epoch == epoch, "something was sent"
            text = error_of(lambda: ep.moe_mlp(buffer, **given, max_recv_rows=1))
            assert text.startswith("max_recv_rows: too small"), text


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
COUNTED = """
    side waits for main
    side: dispatch 3; side: event 1
    main waits for event 1 of side; main: experts; main: event 1
    side: dispatch 2; side: event 2
    side waits for event 1 of main; side: combine 3
    main waits for event 2 of side; main: experts; main: event 2
    side waits for event 2 of main; side: combine 2
    main waits for side
    side waits for main
"""
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
        steps = dict(run_rows="experts", grads_of_rows="gradients of rows", write_grads="gradients of weights")
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
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8, ranks_per_node=1)
    generator = torch.Generator().manual_seed(rank)
    shapes = (5, 16), (5, 2), (2, 8, 16), (2, 16, 4)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    idx = torch.rand(5, 4, generator=generator).topk(2).indices
    with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer:
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
    generator = torch.Generator().manual_seed(rank)
    shapes = (5, 16), (5, 2), (4, 8, 16), (4, 16, 4)
    x, probs, w1, w2 = (torch.randn(shape, generator=generator) for shape in shapes)
    idx, take = torch.rand(5, 4, generator=generator).topk(2).indices, []
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8)
    with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer, pytest.MonkeyPatch.context() as patch:
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
    sizes = dict(hidden=16, num_experts=4, num_topk=2, max_tokens_per_rank=8)
    shapes = (5, 16), (5, 2), (4, 8, 16), (4, 16, 4)
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    idx = torch.rand(5, 4).topk(2).indices
    with ep.Buffer(engine="cpu", dtype=torch.float32, **sizes) as buffer:
        for place, kind, ends in (
            ("run_rows", torch.cuda.OutOfMemoryError, True),
            ("run_rows", ValueError, False),
            ("grads_of_rows", torch.cuda.OutOfMemoryError, True),
            ("write_grads", torch.cuda.OutOfMemoryError, False),
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
    monkeypatch.setattr(streams, "_streams", {})
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
    config = types.SimpleNamespace(topology=topology, max_tokens_per_rank=2048, hidden=512, dtype=torch.bfloat16)
    engine = types.SimpleNamespace(device="cuda")
    buffer = types.SimpleNamespace(config=config, live_engine=lambda: engine)
    assert overlap.num_parts_of(buffer) == 2 and overlap.why_not(buffer) is None
    assert overlap.why_not(buffer, num_parts=1) == "num_parts is 1"
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert overlap.why_not(buffer) == "CUDA_LAUNCH_BLOCKING is set" and overlap.num_parts_of(buffer) == 2
    changes = [
        (topology, "num_nodes", 1, "its ranks are one node"),
        (config, "max_tokens_per_rank", 2047, "max_tokens_per_rank is 2047, less than 2048"),
        (config, "dtype", torch.float32, "its rows are torch.float32"),
        (engine, "device", "cpu", "its engine is cpu"),
    ]
    for of, name, value, reason in changes:
        with monkeypatch.context() as patch:
            patch.setattr(of, name, value)
            assert overlap.why_not(buffer) == reason and overlap.num_parts_of(buffer) == 1
            assert overlap.num_parts_of(buffer, 2) == 2 and overlap.num_parts_of(buffer, 1) == 1
    assert overlap.num_parts_of(buffer) == 2
