"""Every mistake of a caller is a ValueError that names the argument, given and allowed, and breaks nothing."""

import gc
import pickle
import re
import time
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import NO_CUDA, exhaustive, on_ranks, sparsely
from lib.errors import DISAGREEMENTS, assert_refused, construct, error_of, make_disagreement
from lib.faults import hurry, make_hasty_buffer
from lib.round_trip import HIDDEN, MAX_TOKENS, NUM_EXPERTS, NUM_TOPK, device, inputs, make_buffer, outputs, round_trip
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks, errors, recompute
from ep_dispatcher.errors import OtherRoutingError, UnknownExpertError
from ep_dispatcher.integrations.deep_ep.buffer import Buffer as DeepEPBuffer
from ep_dispatcher.tools.testing import make_routing

TOO_LARGE = 2**31


# ---- the buffer -----------------------------------------------------------------------------------------------------


WRONG_CONFIGURATIONS = {
    "hidden": [0, -8, 64.0, True, "64", TOO_LARGE, 4],
    "num_experts": [13, 0, TOO_LARGE],
    "num_topk": [0, 13, 2.0],
    "max_tokens_per_rank": [0, -1, TOO_LARGE],
    "dtype": [torch.float64, torch.float8_e4m3fn, "bfloat16", None],
    "engine": ["gpu", None],
    "ranks_per_node": [0, 1.0, "1", True],
    "timeout_s": [0, -1.0, float("inf"), float("nan"), "3", True],
    "num_sms": [0],
}


@pytest.mark.parametrize(
    "name,value", [(name, value) for name, values in WRONG_CONFIGURATIONS.items() for value in values]
)
def test_a_wrong_configuration_is_an_error_on_all_ranks(pools, name, value):
    """Also if only one rank gives it: the others cannot know by themselves."""
    for changes in ([{name: value}] * 2, [{}, {name: value}]):
        (message,) = set(pools(2).run(construct, changes))
        assert message.startswith(f"{name} is {value!r}"), message
        assert message.endswith(" (on rank 1)") == (not changes[0])


def test_different_mistakes_are_one_error(pools):
    (message,) = set(pools(3).run(construct, [{}, dict(hidden=0), dict(num_topk=0)]))
    assert message.startswith("hidden is 0") and message.endswith("(on rank 1)")


OTHER_SIZES = dict(
    hidden=128, num_experts=24, num_topk=2, max_tokens_per_rank=33, dtype=torch.float16, ranks_per_node=1
)


@pytest.mark.parametrize("name,value", OTHER_SIZES.items())
@pytest.mark.parametrize("odd", [0, 2])
def test_configurations_that_differ_name_two_ranks(pools, engine, name, value, odd):
    changes = [{"engine": engine} | ({name: value} if rank == odd else {}) for rank in range(3)]
    (message,) = set(pools(3).run(construct, changes))
    assert message.startswith(f"{name}: rank 0 gave ") and f"rank {odd or 1} gave " in message
    assert f"rank {odd} gave {value}" in message


@on_ranks(2)
def test_limits_of_time_may_differ(rank, engine):
    with make_buffer(timeout_s=10 + rank, engine=engine) as buffer:
        round_trip(buffer)


@on_ranks(2)
def test_a_wrong_switch_on_one_rank_is_an_error_on_all(rank):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("EP_DISPATCHER_TIMEOUT_S", "soon")
        message = assert_refused("EP_DISPATCHER_TIMEOUT_S", make_buffer, timeout_s=None)
    assert message.endswith("(on rank 1)")
    with make_buffer() as buffer:
        round_trip(buffer)


def test_a_buffer_needs_torch_distributed():
    assert not dist.is_initialized()
    assert_refused("group", make_buffer)


@on_ranks(2)
def test_a_group_is_one_that_has_this_rank_or_a_mesh_of_one_dimension(rank, engine):
    assert_refused("group", make_buffer, "world")
    group, beside = dist.new_group([0]), dist.DeviceMesh("cpu", [0])  # collective of all ranks
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    for make in (make_buffer, DeepEPBuffer):
        message = assert_refused("group", make, mesh)
        assert "('dp', 'ep')" in message and 'mesh["ep"]' in message
    assert DeepEPBuffer(mesh["ep"]).group is mesh["ep"].get_group()
    if rank == 0:
        with make_buffer(group, engine=engine) as buffer:
            round_trip(buffer)
    else:
        assert_refused("group", make_buffer, group, engine=engine)
        assert_refused("group", make_buffer, beside, engine=engine)
    with make_buffer(mesh["ep"], engine=engine) as buffer:
        assert buffer.topology.num_ranks == 2 and buffer.config.group is mesh["ep"].get_group()
        round_trip(buffer)


# ---- the arguments of dispatch and combine --------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """What a rank has before it makes its mistake."""

    buffer: ep.Buffer
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    out: ep.DispatchOutput  # of a dispatch without mistakes
    y: Tensor
    other: ep.Handle  # of another buffer

    def dispatch(self, *args, **options):
        x, topk_idx, topk_weights = [*args, *(self.x, self.topk_idx, self.topk_weights)[len(args) :]]
        return self.buffer.dispatch(x, topk_idx, topk_weights, **options)

    def route(self, topk_idx):
        return self.dispatch(self.x, topk_idx)

    def weigh(self, topk_weights):
        return self.dispatch(self.x, self.topk_idx, topk_weights)

    def plan(self, topk_idx, **options):
        return self.buffer.plan(topk_idx, **options)

    def with_entry(self, token: int, k: int, expert: int) -> Tensor:
        topk_idx = self.topk_idx.clone()
        topk_idx[token] = torch.tensor([0, 1, -1], device=topk_idx.device)
        topk_idx[token, k] = expert
        return topk_idx

    def more_tokens(self):
        x, idx, weights = (t[:1].repeat(MAX_TOKENS + 1, 1) for t in (self.x, self.topk_idx, self.topk_weights))
        return self.dispatch(x, idx, weights)

    def reuse(self, x=None, topk_idx=None, **options):
        return self.buffer.dispatch(self.x if x is None else x, topk_idx, handle=self.out.handle, **options)

    def combine(self, y, topk_weights=None, handle=None):
        return self.buffer.combine(y, self.out.handle if handle is None else handle, topk_weights=topk_weights)


def each(call, *given) -> list:
    """call(g, value) as calls of g alone, for each of these values. A function makes its value from g."""
    return [lambda g, value=value: call(g, value(g) if callable(value) else value) for value in given]


MISTAKES = {  # by the argument that the error names
    "x": [
        *each(Given.dispatch, lambda g: g.x.float(), lambda g: g.x.half(), lambda g: g.x[:, :32], lambda g: g.x[0]),
        *each(Given.dispatch, lambda g: g.x[None], lambda g: g.x.tolist(), None),
        lambda g: g.more_tokens(),
        lambda g: g.reuse(g.x[:28]),
        lambda g: ep.dispatch(g.buffer, g.x.float(), g.topk_idx),
    ],
    "topk_idx": [
        *each(Given.route, lambda g: g.topk_idx.float(), lambda g: g.topk_idx.short(), lambda g: g.topk_idx[:, :2]),
        *each(Given.route, lambda g: g.topk_idx[1:], None),
        lambda g: g.reuse(g.x, g.topk_idx),
        *each(Given.plan, None, [[0, 1]], lambda g: g.topk_idx.float(), lambda g: g.topk_idx[:, :1]),
        *each(Given.plan, lambda g: g.topk_idx.repeat(2, 1)),
    ],
    "topk_weights": [
        *each(Given.weigh, lambda g: g.topk_weights.bfloat16(), lambda g: g.topk_weights[:, :2]),
        *each(Given.weigh, lambda g: g.topk_weights[:-1], [1.0]),
        lambda g: g.combine(g.y, g.out.topk_weights.double()),
        lambda g: g.combine(g.y, g.x.new_zeros(len(g.y), NUM_TOPK, dtype=torch.float32)),  # of the other layout
        lambda g: g.combine(g.y, g.out.topk_weights.to("meta")),
    ],
    "quantize": [lambda g: g.dispatch(quantize=True), lambda g: g.dispatch(quantize="int8")],
    "layout": [
        lambda g: g.dispatch(layout="experts"),
        lambda g: g.dispatch(layout=None),
        lambda g: g.reuse(layout="rank"),
        lambda g: g.plan(g.topk_idx, layout="decode"),
    ],
    "expert_alignment": [
        *each(lambda g, value: g.dispatch(expert_alignment=value), 0, 1.5, True, TOO_LARGE),
        lambda g: g.reuse(expert_alignment=8),
        lambda g: g.plan(g.topk_idx, expert_alignment=0),
    ],
    "max_recv_rows": [
        *each(lambda g, value: g.dispatch(max_recv_rows=value), -1, 9.0, TOO_LARGE),
        lambda g: g.reuse(max_recv_rows=1),
        lambda g: g.plan(g.topk_idx, max_recv_rows=-1),
    ],
    "handle": [
        lambda g: g.dispatch(g.x, None, handle="h"),
        lambda g: g.dispatch(g.x, None, handle=g.other),
        lambda g: g.combine(g.y, handle=g.out.handle.plan),
        lambda g: g.combine(g.y, handle=g.other),
        lambda g: ep.combine(g.buffer, g.y, None),
    ],
    "y": [
        *each(Given.combine, lambda g: g.y.float(), lambda g: g.y[1:], lambda g: g.y.repeat(2, 1)),
        *each(Given.combine, lambda g: g.y[:, :8], lambda g: (g.y, g.y), None),
        lambda g: ep.combine(g.buffer, g.y.float(), g.out.handle),
    ],
    "buffer": [lambda g: ep.dispatch(g.x, g.topk_idx), lambda g: ep.combine(None, g.y, g.out.handle)],
}
# Entries that a GPU's kernels read, in an operation that all ranks are in.
WRONG_ENTRIES = {
    "topk_idx[7, 2]": each(lambda g, expert: g.route(g.with_entry(7, 2, expert)), NUM_EXPERTS, 2**32),
    "topk_idx[0, 0]": [lambda g: g.route(g.with_entry(0, 0, -2))],
    "topk_idx[28, 1]": [lambda g: g.route(g.with_entry(28, 1, 99).int())],
    "topk_idx[3, 2]": [lambda g: g.route(g.with_entry(3, 2, 0))],  # expert 0 again
}
WITH_GRADIENTS = {"topk_idx[0, 0]": [lambda g: ep.dispatch(g.buffer, g.x.requires_grad_(), g.with_entry(0, 0, 12))]}


def make_mistakes(
    rank: int, engine: str, mistakes: dict, ranks_per_node: int | None, together: bool, weighted: bool = True
) -> None:
    """Rank 1 makes each mistake, alone or while the others do it right; then all ranks do it right."""
    options = dict(engine=engine, timeout_s=20)
    with (
        make_buffer(ranks_per_node=ranks_per_node, **options) as buffer,
        make_buffer(ranks_per_node=1, **options) as other_buffer,
    ):
        x, topk_idx, topk_weights = inputs(rank, device=device(buffer))
        other = other_buffer.dispatch(x, topk_idx, topk_weights).handle
        out = buffer.dispatch(x, topk_idx, topk_weights)
        y = outputs(rank, len(out.x), device=device(buffer))
        given = Given(buffer, x, topk_idx, topk_weights, out, y, other)
        for argument, calls in mistakes.items():
            for seed, call in enumerate(calls):
                if rank == 1:
                    moved = buffer.counters()
                    assert_refused(argument, call, given)
                    assert together or buffer.counters() == moved, "something was sent before the error"
                elif together:
                    buffer.dispatch(x, topk_idx, topk_weights if weighted else None)
                round_trip(buffer, seed=seed % 5)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_wrong_arguments_on_one_rank_are_refused_before_anything_is_sent(rank, engine, ranks_per_node):
    make_mistakes(rank, engine, MISTAKES, ranks_per_node, False)
    if engine == "cpu":
        make_mistakes(rank, engine, WRONG_ENTRIES, ranks_per_node, False)
        make_mistakes(rank, engine, WITH_GRADIENTS, ranks_per_node, False)


@pytest.mark.skipif(NO_CUDA is not None, reason=f"no GPU: {NO_CUDA}")
@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_wrong_entries_that_a_kernel_finds_are_an_error_of_the_rank_that_gave_them(rank, ranks_per_node):
    """The others have the rows of all right entries, and all can go on."""
    make_mistakes(rank, "cuda", WRONG_ENTRIES, ranks_per_node, True)
    make_mistakes(rank, "cuda", WITH_GRADIENTS, ranks_per_node, True, weighted=False)


@pytest.mark.skipif(NO_CUDA is not None, reason=f"no GPU: {NO_CUDA}")
@pytest.mark.parametrize("num_topk", [1, 3, 7, 33, 64])
@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_wrong_entries_of_many_tokens_are_named(rank, ranks_per_node, num_topk):
    """An invalid one goes before a repeated one of its token. The last batch of 32 tokens is not full."""
    num_tokens, num_experts = 301, 128
    config = dict(num_experts=num_experts, num_topk=num_topk, max_tokens_per_rank=num_tokens)
    with make_buffer(engine="cuda", ranks_per_node=ranks_per_node, **config) as buffer:
        x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device(buffer))
        right, _ = make_routing("uniform", num_tokens, num_experts, num_topk, seed=rank)
        for token in 0, 33, num_tokens - 1:
            for invalid, k in (False, num_topk // 2), (True, num_topk - 1):
                topk_idx = right.clone()
                topk_idx[token, num_topk // 2] = topk_idx[token, 0]
                topk_idx[token, k] = num_experts if invalid else topk_idx[token, k]
                if rank == 1 and (invalid or k > 0):
                    assert_refused(f"topk_idx[{token}, {k}]", buffer.dispatch, x, topk_idx.to(x.device))
                else:
                    buffer.dispatch(x, right.to(x.device))


@on_ranks(2)
def test_wrong_pairs_of_rows_and_scales_are_refused(rank, engine):
    with make_buffer(hidden=256, engine=engine) as buffer:
        topk_idx, _ = make_routing("uniform", 5, NUM_EXPERTS, NUM_TOPK, seed=0)
        rows, scales = torch.zeros(5, 256).to(torch.float8_e4m3fn), torch.ones(5, 2)
        rows, scales, topk_idx = (t.to(device(buffer)) for t in (rows, scales, topk_idx))
        for argument, x, quantize in [
            ("x[0]", (rows.bfloat16(), scales), None),
            ("x[1]", (rows, scales.bfloat16()), None),
            ("x[1]", (rows, scales[:, :1]), None),
            ("x[1]", (rows, scales[1:]), None),
            ("x[1]", (rows, scales.to(torch.uint8)), None),  # 8 of them for 256 elements
            ("x[0]", (rows[:, :128], scales), None),
            ("x", (rows,), None),
            ("x", (rows, scales, scales), None),
            ("x", rows, None),
            ("quantize", (rows, scales), "e4m3_1x128"),
        ]:
            if rank == 1:
                assert_refused(argument, buffer.dispatch, x, topk_idx, quantize=quantize)
            out = buffer.dispatch((rows, scales), topk_idx)
            assert out.x[0].dtype == torch.float8_e4m3fn and (out.x[1] == 1).all()


@on_ranks(2)
def test_float8_rows_are_of_whole_16_bytes(rank, engine):
    for hidden, dtype, allowed in ((72, torch.bfloat16, False), (80, torch.float32, True)):
        with make_buffer(hidden=hidden, dtype=dtype, engine=engine) as buffer:
            topk_idx, _ = make_routing("uniform", 5, NUM_EXPERTS, NUM_TOPK, seed=0)
            x, topk_idx = torch.zeros(5, hidden, dtype=dtype, device=device(buffer)), topk_idx.to(device(buffer))
            if rank == 1:
                assert_refused("quantize", buffer.dispatch, x, topk_idx, quantize="e4m3_1x128")
            if rank == 1 and not allowed:
                assert_refused("x", buffer.dispatch, ep.quantize(x), topk_idx)
            assert buffer.dispatch(ep.quantize(x) if allowed else x, topk_idx).handle.num_tokens == 5


@on_ranks(2)
def test_combined_weights_in_rank_layout_have_a_column_for_each_choice(rank, engine):
    with make_buffer(engine=engine) as buffer:
        x, topk_idx, topk_weights = inputs(rank, device=device(buffer))
        out = buffer.dispatch(x, topk_idx, topk_weights, layout="rank")
        assert_refused("topk_weights", buffer.combine, out.x, out.handle, topk_weights=out.topk_weights[:, 0])
        back = buffer.combine(out.x, out.handle, topk_weights=out.topk_weights).topk_weights
        assert torch.equal(back, topk_weights.masked_fill(topk_idx < 0, 0))


# ---- ranks that do not agree ----------------------------------------------------------------------------------------


DISAGREEMENTS += ["combined handle", "combined topk_weights"]


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_disagreement_is_an_error_on_all_ranks(pools, engine, kind, ranks_per_node, odd):
    for message in pools(4).run(make_disagreement, engine, kind, odd, ranks_per_node, 30):
        assert message.startswith(kind.split()[-1]) and f"rank {odd} " in message, message


def operations_of(buffer: ep.Buffer, rank: int):
    """Operations that ranks may take for one another, by name, each complete when it returns."""
    given = inputs(rank, device=device(buffer))
    out = buffer.dispatch(*given)
    calls = {
        "dispatch": lambda: buffer.dispatch(*given),
        "dispatch of fixed rows": lambda: buffer.dispatch(*given, max_recv_rows=1000),
        "cached dispatch": lambda: buffer.dispatch(given[0], None, given[2], handle=out.handle),
        "combine": lambda: buffer.combine(out.x, out.handle),
    }
    decoded = buffer.dispatch(*given[:2], layout="decode")
    calls["decode combine"] = lambda: buffer.combine(decoded.x, decoded.handle, weights=given[2])
    return {name: lambda call=call: call().event.synchronize() for name, call in calls.items()}


MIXED = [("dispatch", "cached dispatch"), ("combine", "dispatch"), ("cached dispatch", "combine")]
DECODE_MIXED = [("decode combine", "combine"), ("decode combine", "cached dispatch")]


def mix_operations_on_one_node(rank: int, engine: str, operation: str, other: str, odd: int) -> list[str]:
    """One rank calls another operation than the others, twice, and all go on."""
    with make_buffer(engine=engine, timeout_s=60) as buffer:
        calls, messages = operations_of(buffer, rank), []
        begin = time.monotonic()
        for _ in range(2):
            messages.append(error_of(calls[other if rank == odd else operation]))
            round_trip(buffer)
        assert time.monotonic() - begin < 30
        return messages


@pytest.mark.parametrize(
    "operation,other,odd",
    [
        *((*pair, odd) for pair in [*MIXED, ("dispatch of fixed rows", "cached dispatch")] for odd in (0, 3)),
        *((*pair, 3) for pair in [*DECODE_MIXED, ("decode combine", "dispatch")]),
    ],
)
def test_different_operations_on_one_node_are_an_error_on_all_ranks(pools, engine, operation, other, odd):
    decodes = operation == "decode combine"
    field = "operation" if decodes or "combine" in (operation, other) else "handle"
    if engine == "cuda" and decodes and other == "combine":  # there it is a combine like others, with another plan
        field = "handle"
    ranks = pools(4).run(mix_operations_on_one_node, engine, operation, other, odd)
    (message,) = {message for messages in ranks for message in messages}
    assert message.startswith(f"{field}: rank {odd or 1} ") and "rank 0 " in message
    assert ("of decode layout" in message) == (decodes and engine == "cpu")


def mix_operations(rank: int, operation: str, other: str, ranks_per_node: int) -> list[tuple[str, str]]:
    """Rank 1 calls another operation than the others. Returns the errors of it and of a right one after it."""
    errors = []
    with make_hasty_buffer(engine="cpu", ranks_per_node=ranks_per_node) as buffer:
        calls = operations_of(buffer, rank)
        hurry(buffer, 1.5)
        for call in (calls[other if rank == 1 else operation], calls["dispatch"]):
            with pytest.raises((ValueError, ep.PeerTimeoutError)) as caught:
                call()
            errors.append((type(caught.value).__name__, str(caught.value)))
    return errors


@pytest.mark.parametrize("ranks_per_node", [2, exhaustive(1)])
@pytest.mark.parametrize("operation,other", sparsely([*MIXED, *DECODE_MIXED]))
def test_different_operations_on_several_nodes_go_through_on_no_rank(pools, operation, other, ranks_per_node):
    """No process dies, and no rank takes rows of another operation for its own. The buffer has ended."""
    ranks = pools(4).run(mix_operations, operation, other, ranks_per_node)
    for rank, ((first, text), (second, again)) in enumerate(ranks):
        assert first in ("DisagreementError", "PeerTimeoutError") and "destroy() this buffer" in text
        assert (second, again) == (first, text)
        if ranks_per_node == 2 and first == "DisagreementError":
            assert rank < 2 and "rank 1 " in text and "all ranks must" in text


@on_ranks(1)
def test_a_caught_error_keeps_nothing_alive(rank):
    gc.disable()
    try:
        x, topk_idx, topk_weights = inputs(rank)
        topk_idx[0, 0] = -7
        buffer = make_buffer(engine="cpu")
        error_of(buffer.dispatch, x, topk_idx, topk_weights)
        buffer.destroy()
        references = [weakref.ref(buffer), weakref.ref(x)]
        del buffer, x
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


# ---- too few rows ---------------------------------------------------------------------------------------------------


def with_too_few_rows(rank: int, engine: str, ranks_per_node: int, layout: str, given: list[int]):
    """The rows that the rank needs, its error, and those that the error names: they are enough, and one less is not."""
    with make_buffer(engine=engine, ranks_per_node=ranks_per_node) as buffer:
        arguments = inputs(rank, device=device(buffer))

        def dispatch(max_recv_rows: int) -> ep.DispatchOutput:
            out = buffer.dispatch(*arguments, layout=layout, max_recv_rows=max_recv_rows)
            out.event.synchronize()  # here an engine whose host does not wait raises
            return out

        plain = buffer.dispatch(*arguments, layout=layout)
        message = error_of(dispatch, given[rank])
        round_trip(buffer)
        named = {int(r): int(rows) for r, rows in re.findall(r"rank (\d+) needs (\d+) rows", message)}
        enough = named.get(rank, given[rank])
        assert f"rank 1 needs {named[1]} rows" in error_of(dispatch, enough - (rank == 1))
        out = dispatch(enough)
        assert torch.equal(out.x[: len(plain.x)], plain.x) and not out.x[len(plain.x) :].any()
        assert torch.equal(buffer.combine(out.x, out.handle).x, buffer.combine(plain.x, plain.handle).x)
        return len(plain.x), message, named


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
def test_too_few_receive_rows_are_an_error_that_says_which_ranks_need_how_many(pools, engine, ranks_per_node, layout):
    ranks = pools(4).run(with_too_few_rows, engine, ranks_per_node, layout, [3, 0, 1000, 5])
    needed = [rows for rows, _, _ in ranks]
    assert all(rows > 5 for rows in needed)
    for _, message, named in ranks:
        assert message == ranks[0][1] and named == {rank: needed[rank] for rank in (0, 1, 3)}
        assert message.startswith("max_recv_rows ")


# ---- another routing than that of a plan -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, 200])
@on_ranks(2)
def test_a_routing_is_compared_with_that_of_a_plan(rank, engine, rows):
    """At once on the CPU engine; a GPU finds it with the next operation, and check() raises it there."""
    with make_buffer(engine=engine) as buffer:
        x, planned, _ = inputs(rank, device=device(buffer))
        out = buffer.dispatch(x, planned, max_recv_rows=rows)

        def again(given: torch.Tensor) -> None:
            recompute.compare_routing(buffer.live_engine(), planned, given, (7, rank))
            assert torch.equal(buffer.dispatch(x, handle=out.handle).x, out.x)
            buffer.check()

        again(planned.clone())
        other = planned.clone()
        other[3, 1] = -1 if planned[3, 1] >= 0 else 0
        entry = f"topk_idx[3, 1] is {int(other[3, 1])}, but has to be {int(planned[3, 1])}, "
        shorter = partial(recompute.compare_routing, buffer.live_engine(), planned, planned[1:], (7, rank))
        for call, text in ((partial(again, other), entry), (shorter, "topk_idx is ")):
            with pytest.raises(OtherRoutingError) as caught:
                call()
            assert str(caught.value).startswith(f"checkpointed forward pass 7, dispatch {rank}, recompute: {text}")
            assert caught.value.where == (7, rank)
        again(planned.t().contiguous().t())
        round_trip(buffer)


@pytest.mark.parametrize("max_recv_rows", [None, 200])
@on_ranks(2)
def test_more_rows_than_can_be_counted_are_an_error(rank, engine, max_recv_rows):
    with make_buffer(engine=engine) as buffer:
        given = inputs(rank, device=device(buffer))
        options = dict(expert_alignment=TOO_LARGE - 1, max_recv_rows=max_recv_rows)
        text = assert_refused("expert_alignment", lambda: buffer.dispatch(*given, **options).event.synchronize())
        assert "rank 0" in text
        round_trip(buffer)


# ---- after the end --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_destroyed_buffer_and_its_handles_are_refused(rank, engine):
    buffer, living = make_buffer(engine=engine), make_buffer(engine=engine)
    x, topk_idx, topk_weights = inputs(rank, device=device(buffer))
    leaf = x.clone().requires_grad_()
    out = ep.dispatch(buffer, leaf, topk_idx, topk_weights)
    buffer.destroy()
    buffer.destroy()
    rows = out.x.detach()
    for call in (
        lambda: buffer.dispatch(x, topk_idx, topk_weights),
        lambda: buffer.combine(rows, out.handle),
        buffer.counters,
        buffer.check,
        lambda: ep.dispatch(buffer, x, topk_idx),
        lambda: ep.combine(buffer, rows, out.handle),
    ):
        assert_refused("buffer", call)
    with pytest.raises(ValueError, match="^buffer was destroyed before this backward"):
        out.x.sum().backward()
    assert_refused("handle", living.dispatch, x, handle=out.handle)
    assert_refused("handle", living.combine, rows, out.handle)
    with buffer, living:  # leaving is a destroy, which may come after another one
        round_trip(living)
        living.destroy()
    with make_buffer(engine=engine) as buffer:
        round_trip(buffer)


# ---- facts that an engine found -------------------------------------------------------------------------------------


def test_errors_have_the_largest_need_and_the_token_of_an_expert_above_the_last_one():
    assert checks.too_few_rows_error([(40, 39), (3, 39), (70, -1), (8, 0)]).needed_rows == 40
    unknown, *others = (
        checks.invalid_entry_error(entry, 8) for entry in ((3, 1, 8, False), (3, 1, -2, False), (3, 1, 7, True))
    )
    assert type(unknown) is UnknownExpertError and unknown.token == 3
    assert all(type(other) is ValueError for other in others)


@pytest.mark.parametrize(
    "found",
    [checks.too_few_rows_error([(40, 39)]), checks.invalid_entry_error((3, 1, 8, False), 8), ValueError("x")],
    ids=str,
)
def test_an_error_that_is_made_again_keeps_its_facts(found):
    made = pickle.loads(pickle.dumps(errors.copy_error(found, ". And more")))
    assert type(made) is type(found) and str(made) == f"{found}. And more" and made.args[1:] == found.args[1:]


def test_more_choices_than_can_be_counted_are_an_error_of_topk_idx():
    assert str(checks.too_many_choices_error(2, 2**31)).startswith("topk_idx has ")
