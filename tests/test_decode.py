"""Decode layout: fixed places for rows, and a weighted combine, bit by bit as ep_dispatcher/reference.py has them."""

import itertools
import re
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import on, on_ranks
from lib import dispatch_combine as grid
from lib.decode import assert_case, check_graphs, run_case, weights_of
from lib.dispatch_combine import AXES, Case, Inputs, assert_same, make_buffer, make_inputs, pairwise, random_rows, to
from lib.errors import assert_refused, error_of
from lib.faults import hurry, operations_so_far
from lib.round_trip import device as device_name
from lib.round_trip import inputs as inputs_of
from lib.round_trip import make_buffer as make_small_buffer
from lib.round_trip import round_trip
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import PeerTimeoutError, float8, reference
from ep_dispatcher.decode.arguments import _takes_sums
from ep_dispatcher.request import Combined
from ep_dispatcher.tools.testing import device_of, same_bits

LIMIT_S = 1.0

RANKS = [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (4, 4), (6, 2)]
PAYLOADS = ["rows", "pair", "quantize", "quantize_pow2"]  # those of MXFP8 have a test of their own
ONLY = {"ranks": RANKS, "num_topk": [1, 3, 8], "layout": ["decode"], "weighted": [False], "payload": PAYLOADS}
GRID = pairwise({name: ONLY.get(name, axis) for name, axis in AXES.items() if name not in ("alignment", "recv")})


def check_case(pools, engine: str, case: Case, options: dict) -> None:
    inputs = make_inputs(case)
    again = [random_rows(case, idx.shape[0], 500 + rank) for rank, idx in enumerate(inputs.topk_idx)]
    assert_case(case, inputs, again, pools(case.num_ranks).run(run_case, engine, case, inputs, again, options))


SHAPE = dict(dtype=torch.bfloat16, hidden=512, layout="decode", weighted=False, tokens="uneven")
MORE_CHOICES_THAN_LANES = [
    Case(2, ranks_per_node, payload=payload, num_topk=64, experts_per_rank=40, **SHAPE)
    for ranks_per_node, payload in itertools.product((2, 1), ("rows", "quantize"))
]


@pytest.mark.parametrize("case", [*GRID, *MORE_CHOICES_THAN_LANES], ids=str)
def test_every_bit(pools, engine, case):
    check_case(pools, engine, case, {})


@pytest.mark.parametrize("options", [{}, {"return_hook": True}], ids=["plain", "hook"])
@pytest.mark.parametrize("tokens", ["some", "many"])
def test_more_items_than_a_chunk(pools, engine, tokens, options):
    """Of a direct plan, and of one with lists. With one chunk of items all blocks of a combine push before they reduce:
    here some of them only reduce."""
    case = Case(2, 2, torch.bfloat16, layout="decode", weighted=False, tokens=tokens, num_topk=3, experts_per_rank=3)
    items = [(idx // 3 == rank).any(1).sum().item() for idx in make_inputs(case).topk_idx for rank in range(2)]
    assert min(items) > 512, items
    check_case(pools, engine, case, options)


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(3, 3), (2, 2), (2, 1), (1, 1)])  # three have 69 tokens
@pytest.mark.parametrize(
    "payload, hidden", [("rows", 512), ("quantize", 512), ("quantize", 1152), ("quantize", 7168), ("quantize", 2880)]
)
def test_hooks_and_given_outputs_change_no_bit(pools, engine, payload, hidden, num_ranks, ranks_per_node):
    """Arguments may be overwritten before the hook."""
    case = Case(num_ranks, ranks_per_node, payload=payload, **(SHAPE | {"hidden": hidden}))
    check_case(pools, engine, case, {"return_hook": True})


@pytest.mark.parametrize("hidden", [1024, 7168])
@on_ranks(2)
def test_packed_scales(rank, engine, hidden):
    """Powers of two, four exponents in an int32; the rows of an expert lie beside each other in memory."""
    case = Case(2, 2, torch.bfloat16, payload="quantize", hidden=hidden, layout="decode", weighted=False)
    inputs = make_inputs(case)
    rows_per_group, words = 2 * inputs.most_tokens, hidden // 512
    pairs = [float8.quantize(x, "e4m3_1x128_pow2") for x in inputs.x]
    options = dict(num_experts=case.num_experts, layout="decode", max_tokens_per_rank=inputs.most_tokens)
    right_rows, right_scales = reference.dispatch(pairs, inputs.topk_idx, None, **options)[rank].x
    x, topk_idx, _ = inputs.on(rank, device_of(engine, rank))
    with make_buffer(case, engine, inputs.most_tokens) as buffer:
        dispatch = partial(buffer.dispatch, x, topk_idx, layout="decode")
        plain = dispatch(quantize="e4m3_1x128").x[1]
        out, same = (dispatch(quantize=f"e4m3_1x128{kind}", scale_format="ue8m0") for kind in ("", "_pow2"))
    rows, packed = out.x
    assert plain.stride() == (4 * words * rows_per_group, 1, rows_per_group)
    assert packed.stride() == (words * rows_per_group, 1, rows_per_group)
    assert packed.dtype == torch.int32 and packed.shape == (2, rows_per_group, words)
    values = ep.dequantize(out.x, torch.float32)
    for e, count in enumerate(out.tokens_per_expert.tolist()):
        assert all(same_bits(*(t[e, :count] for t in pair)) for pair in zip(out.x, same.x, strict=True))
        own = slice(e * rows_per_group, e * rows_per_group + count)
        scales = (packed[e, :count].contiguous().view(torch.uint8).float() - 127).exp2()
        assert_same(to("cpu", (rows[e, :count], scales)), (right_rows[own], right_scales[own]), f"expert {e}")
        right_values = ep.dequantize((right_rows[own], right_scales[own]), torch.float32)  # they were refused
        assert same_bits(values[e, :count].cpu(), right_values)


@pytest.mark.parametrize("hidden", [1024, 2880])
@pytest.mark.parametrize("payload", ["pair_mx", "quantize_mx"])
@on_ranks(2)
def test_scales_of_mxfp8(rank, engine, payload, hidden):
    """Four exponents in an int32, as the pair has them, with the rows of an expert beside each other in memory."""
    case = Case(2, 2, torch.bfloat16, payload=payload, hidden=hidden, layout="decode", weighted=False)
    inputs = make_inputs(case)
    rows_per_group, words = 2 * inputs.most_tokens, -(-hidden // 128)
    pairs = [grid.quantized(x, case.quantize) if case.quantize else x for x in inputs.x]
    pairs = [(rows, scales.view(torch.int32)) for rows, scales in pairs]
    options = dict(num_experts=case.num_experts, layout="decode", max_tokens_per_rank=inputs.most_tokens)
    right = reference.dispatch(pairs, inputs.topk_idx, None, **options)[rank].x
    x, topk_idx, _ = inputs.on(rank, device_of(engine, rank))
    with make_buffer(case, engine, inputs.most_tokens) as buffer:
        dispatch = partial(buffer.dispatch, x, topk_idx, layout="decode", quantize=case.quantize)
        assert_refused("scale_format", dispatch)
        out = dispatch(scale_format="ue8m0")
    assert out.x[1].shape == (2, rows_per_group, words)
    assert out.x[1].stride() == (words * rows_per_group, 1, rows_per_group)
    for e, count in enumerate(out.tokens_per_expert.tolist()):
        own = slice(e * rows_per_group, e * rows_per_group + count)
        assert_same(to("cpu", tuple(t[e, :count] for t in out.x)), tuple(t[own] for t in right), f"expert {e}")
        right_values = ep.dequantize((right[0][own], right[1][own].view(torch.uint8)))
        assert same_bits(ep.dequantize(out.x)[e, :count].cpu(), right_values)


def of_any_magnitude() -> torch.Tensor:
    """Two rows of four scale blocks, the first element of each block as large as it says."""
    largest = torch.tensor([[0.0, 2.0**-130, 1.0, 450.0], [3e38, torch.inf, torch.nan, -448.0]])
    x = torch.linspace(-1, 1, 128).expand(2, 4, 128) * largest.clamp_max(3e38).nan_to_num()[:, :, None]
    x[:, :, 0] = largest
    return x.flatten(1).bfloat16()


@on_ranks(1)
def test_packed_scales_of_any_magnitude(rank, engine):
    """Exponent e stands for 2^(e - 127). 255 is NaN in ue8m0, and stands for infinite scales too, but not in MXFP8."""
    device, found = device_of(engine, rank), {}
    with ep.Buffer(engine=engine, timeout_s=30, num_experts=2, num_topk=1, max_tokens_per_rank=8, hidden=512) as buffer:
        topk_idx = torch.zeros(2, 1, dtype=torch.int64, device=device)
        for kind in ("e4m3_1x128_pow2", "mxfp8"):
            options = dict(layout="decode", quantize=kind, scale_format="ue8m0")
            rows, packed = (
                t[0, :2].cpu() for t in buffer.dispatch(of_any_magnitude().to(device), topk_idx, **options).x
            )
            right_rows, right_scales = float8.quantize(of_any_magnitude(), kind)
            assert same_bits(rows, right_rows) and rows.float().isnan().any()
            found[kind] = packed.flatten().view(torch.uint8).view(2, -1), right_scales
    exponents, right_scales = found["e4m3_1x128_pow2"]
    assert exponents.tolist() == [[1, 1, 119, 128], [247, 255, 255, 127]]
    assert torch.equal(exponents.float() - 127, right_scales.log2().nan_to_num(128, posinf=128))
    exponents, right_scales = found["mxfp8"]
    assert exponents[:, ::4].tolist() == [[0, 0, 119, 128], [247, 254, 255, 127]]
    assert torch.equal(exponents, right_scales.view(torch.uint8))


def times_its_weights(case: Case, inputs: Inputs, rank: int) -> Tensor:
    """Every token times the sum of its weights: what comes back from experts that change nothing."""
    weights = torch.nan_to_num(weights_of(case, inputs, rank))
    return torch.nan_to_num(inputs.x[rank]) * weights.sum(1, keepdim=True)


@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
@on_ranks(4)
def test_many_steps(rank, engine, ranks_per_node):
    """Operations of all layouts take turns."""
    case = Case(4, ranks_per_node, layout="decode", weighted=False, tokens="uneven", num_topk=3, routing="masked")
    device, steps, results = device_of(engine, rank), [make_inputs(case, seed) for seed in range(25)], []
    with make_buffer(case, engine, 64) as buffer:
        for inputs in steps:
            x, topk_idx, _ = inputs.on(rank, device)
            out = buffer.dispatch(x, topk_idx, layout="decode")
            other = buffer.dispatch(x, topk_idx)
            buffer.combine(other.x, other.handle)
            weights = to(device, weights_of(case, inputs, rank))
            results.append(buffer.combine(torch.nan_to_num(out.x), out.handle, weights=weights).x)
    expected = [times_its_weights(case, inputs, rank) for inputs in steps]
    torch.testing.assert_close([result.cpu() for result in results], expected, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_sums_go_straight_into_an_output_where_they_can_and_are_copied_elsewhere(rank, engine):
    case = Case(2, 2, torch.bfloat16, layout="decode", weighted=False, num_topk=3, experts_per_rank=3)
    inputs = make_inputs(case)
    x, topk_idx, _ = inputs.on(rank, device_of(engine, rank))
    weights, num_tokens = to(x.device, weights_of(case, inputs, rank)), len(x)
    with make_buffer(case, engine, 32) as buffer:
        received = buffer.dispatch(x, topk_idx, layout="decode")
        y = torch.nan_to_num(received.x)
        memory = y.new_empty(y.numel() + num_tokens * case.hidden)
        shared = memory[: y.numel()].view_as(y).copy_(y)
        right, allocated = buffer.combine(y, received.handle, weights=weights).x, []
        launch = buffer._engine.combine
        buffer._engine.combine = lambda *given: allocated.append(launch(*given).x) or Combined(allocated[-1], None)
        for out, rows, is_direct in (
            (torch.empty_like(right), y, True),
            (right.new_empty(num_tokens, 2 * case.hidden)[:, : case.hidden], y, False),
            (right.new_empty(right.numel() + 1)[1:].view_as(right), y, False),
            (memory[y.numel() :].view_as(right), shared, True),
            (torch.from_dlpack(memory[: right.numel()]).view_as(right), shared, False),  # a storage of its own
        ):
            version = out._version
            combined = buffer.combine(rows, received.handle, weights=weights, out=out)
            assert combined.x is out and torch.equal(out, right) and out._version > version
            assert (allocated.pop().data_ptr() == out.data_ptr()) is is_direct
        with torch.inference_mode():
            out = torch.empty_like(right)
            assert torch.equal(buffer.combine(y, received.handle, weights=weights, out=out).x, right)


def test_an_output_on_another_device_takes_no_sums():
    assert not _takes_sums(torch.empty(2, 8, device="meta"), torch.empty(2, 8))


@on_ranks(2)
def test_wrong_arguments_are_refused_before_anything_is_sent(rank, engine):
    case = Case(2, 2, layout="decode", weighted=False)
    inputs = make_inputs(case)
    x, idx, _ = inputs.on(rank, device_of(engine, rank))
    weights = to(x.device, weights_of(case, inputs, rank))
    with make_buffer(case, engine, 32) as buffer:
        out = buffer.dispatch(x, idx, layout="decode")
        y, flat = torch.zeros_like(out.x), buffer.dispatch(x, idx)
        decode_of_x = partial(buffer.dispatch, x, idx, layout="decode")
        sums, flat_sums = partial(buffer.combine, y, out.handle), partial(buffer.combine, flat.x, flat.handle)
        before = operations_so_far(buffer)
        for argument, call, options in [
            ("topk_weights", decode_of_x, dict(topk_weights=weights)),
            ("max_recv_rows", decode_of_x, dict(max_recv_rows=9)),
            ("expert_alignment", decode_of_x, dict(expert_alignment=8)),
            ("scale_format", decode_of_x, dict(scale_format="e8")),
            ("scale_format", decode_of_x, dict(scale_format="ue8m0")),  # without quantize
            ("scale_format", buffer.dispatch, dict(x=x, topk_idx=idx, scale_format="ue8m0")),
            ("return_hook", buffer.dispatch, dict(x=x, topk_idx=idx, return_hook=True)),
            ("async_finish", decode_of_x, dict(return_hook=True, async_finish=True)),
            ("x", buffer.dispatch, dict(x=x[1:], handle=out.handle)),
            ("layout", buffer.dispatch, dict(x=x, handle=out.handle, layout="rank")),
            ("layout", decode_of_x, dict(layout="dense")),
            ("async_finish", sums, dict(weights=weights, return_hook=True, async_finish=True)),
            ("weights", sums, {}),
            ("weights", sums, dict(weights=weights[1:])),
            ("topk_weights", sums, dict(weights=weights, topk_weights=weights)),
            ("out", sums, dict(weights=weights, out=x[1:])),
            ("y", buffer.combine, dict(y=y.flatten(0, 1), handle=out.handle, weights=weights)),
            ("weights", flat_sums, dict(weights=weights)),
            ("out", flat_sums, dict(out=x)),
            ("return_hook", flat_sums, dict(return_hook=True)),
            ("layout", ep.dispatch, dict(buffer=buffer, x=x, topk_idx=idx, layout="decode")),
            ("layout", ep.dispatch, dict(buffer=buffer, x=x, topk_idx=idx, layout="dense")),
            ("layout", ep.dispatch, dict(buffer=buffer, x=x, handle=out.handle)),
            ("handle", ep.combine, dict(buffer=buffer, y=y, handle=out.handle)),
        ]:
            assert_refused(argument, call, **options)
        assert operations_so_far(buffer) == before, "something was sent"
        buffer.combine(y, out.handle, weights=weights)


@on_ranks(1)
def test_more_rows_than_an_engine_counts_are_refused(rank):
    options = dict(hidden=8, num_experts=1024, num_topk=1, max_tokens_per_rank=2**22, dtype=torch.float32)
    with ep.Buffer(engine="cpu", **options) as buffer:
        topk_idx = torch.zeros(1, 1, dtype=torch.long)
        assert_refused("max_tokens_per_rank", buffer.dispatch, torch.zeros(1, 8), topk_idx, layout="decode")


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_counters_have_the_bytes_of_weights(rank, ranks_per_node):
    case = Case(2, ranks_per_node, layout="decode", weighted=False, num_topk=3)
    inputs = make_inputs(case)
    with make_buffer(case, "cpu", 32) as buffer:
        items = buffer.dispatch(inputs.x[rank], inputs.topk_idx[rank], layout="rank").x.shape[0]
        out = buffer.dispatch(inputs.x[rank], inputs.topk_idx[rank], layout="decode")
        before = sum(buffer.counters()["intra_node_bytes_read"])
        buffer.combine(torch.zeros_like(out.x), out.handle, weights=weights_of(case, inputs, rank))
        assert sum(buffer.counters()["intra_node_bytes_read"]) - before == items * 3 * 4 > 0


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("operation", ["combine", "dispatch"])
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(4, 4), (4, 2), (4, 1), (2, 2)])  # two have 64 tokens
@on_ranks()
def test_another_handle_is_an_error_on_all_ranks(rank, engine, operation, num_ranks, ranks_per_node, hooked):
    """The last rank combines, or dispatches again, with another handle than the others."""
    with make_small_buffer(engine=engine, ranks_per_node=ranks_per_node) as buffer:
        x, topk_idx, topk_weights = inputs_of(rank, device=device_name(buffer))
        first, second = (buffer.dispatch(x, topk_idx, layout="decode") for _ in range(2))
        last = num_ranks - 1
        handle = (second if rank == last else first).handle

        def operate() -> None:
            if operation == "combine":
                out = buffer.combine(torch.zeros_like(first.x), handle, weights=topk_weights, return_hook=hooked)
            else:
                out = buffer.dispatch(x, handle=handle, return_hook=hooked)
            if hooked:
                out.hook()
            out.event.synchronize()

        said = error_of(operate)
        assert said.startswith(f"handle: rank {last} gave the plan of epoch 2, rank 0 gave the plan of epoch 1")
        round_trip(buffer)


@pytest.mark.parametrize("ranks_per_node,phase", [(2, "weights"), (1, "weights between nodes")])
@on_ranks(2)
def test_a_rank_that_is_late_with_its_weights_is_named(rank, ranks_per_node, phase):
    case = Case(2, ranks_per_node, layout="decode", weighted=False)
    inputs, buffer = make_inputs(case), make_buffer(case, "cpu", 32)
    with buffer:
        out = buffer.dispatch(inputs.x[rank], inputs.topk_idx[rank], layout="decode")
        hurry(buffer, LIMIT_S)
        if rank == 1:
            time.sleep(3 * LIMIT_S)
            return
        with pytest.raises(PeerTimeoutError) as caught:
            buffer.combine(torch.zeros_like(out.x), out.handle, weights=weights_of(case, inputs, rank))
    assert (caught.value.operation, caught.value.phase, caught.value.late_ranks) == ("combine", phase, (1,))


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("ranks_per_node,max_tokens", [(2, 32), (2, 33), (1, 32)])
@pytest.mark.parametrize("engine", [on("cuda")])
def test_graphs(pools, engine, ranks_per_node, max_tokens, hooked):
    check_graphs(pools(2), 2, ranks_per_node, hooked, max_tokens)


@pytest.mark.parametrize("engine", [on("cuda")])
@on_ranks(2)
def test_a_hook_belongs_to_the_graph_of_its_call(rank, engine):
    with make_small_buffer(engine=engine) as buffer:
        x, topk_idx, _ = inputs_of(rank, device=device_name(buffer))
        buffer.dispatch(x, topk_idx, layout="decode")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = buffer.dispatch(x, topk_idx, layout="decode", return_hook=True)
        assert_refused("hook", out.hook)


@on_ranks(2)
def test_what_a_hook_has_received_is_free(rank, engine):
    """A hook that outlives its operation keeps neither the tokens nor the experts' rows."""
    with make_small_buffer(engine=engine) as buffer:
        x, topk_idx, weights = inputs_of(rank, device=device_name(buffer))
        out = buffer.dispatch(x, topk_idx, layout="decode", return_hook=True)
        of_dispatch, x_seen = out.hook, weakref.ref(x)
        of_dispatch()
        del x
        assert x_seen() is None
        y = torch.nan_to_num(out.x)
        combined, y_seen = buffer.combine(y, out.handle, weights=weights, return_hook=True), weakref.ref(y)
        of_combine = combined.hook
        of_combine()
        del y
        assert y_seen() is None


TWO_MICROBATCHES = re.search(
    r"## Two microbatches of decoding.*?```python\n(.*?)```",
    (Path(__file__).parents[1] / "docs" / "examples.md").read_text(),
    re.DOTALL,
)[1]


@pytest.mark.parametrize("ranks_per_node", [4, 2])
@on_ranks(4)
def test_two_microbatches_under_way(rank, engine, ranks_per_node):
    """The lines of docs/examples.md, step after step, with two buffers."""
    case = Case(4, ranks_per_node, layout="decode", weighted=False, tokens="uneven", num_topk=3)
    steps = [(make_inputs(case, seed), make_inputs(case, 100 + seed)) for seed in range(10)]
    device, results = device_of(engine, rank), []
    with make_buffer(case, engine, 32) as buffer_a, make_buffer(case, engine, 32) as buffer_b:
        for step in steps:
            names = dict(buffer_a=buffer_a, buffer_b=buffer_b, experts=lambda x, counts: torch.nan_to_num(x) * 2)
            for name, inputs in zip("ab", step):
                names[f"x_{name}"], names[f"topk_idx_{name}"], _ = inputs.on(rank, device)
                names[f"weights_{name}"] = to(device, weights_of(case, inputs, rank))
            exec(TWO_MICROBATCHES, names)
            results += [names["res_a"].x, names["res_b"].x]
    expected = [2 * times_its_weights(case, inputs, rank) for step in steps for inputs in step]
    torch.testing.assert_close([result.cpu() for result in results], expected, rtol=1e-5, atol=1e-5)
