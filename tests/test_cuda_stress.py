"""A hard life for the CUDA engine: dirty memory, many steps, more than 2^31 bytes, other streams, one queue."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib import dispatch_combine as grid
from lib.commands import ROOT, run_module
from lib.cuda_faults import spin
from lib.decode import weights_of
from lib.dispatch_combine import Case, Inputs, Received, expected_of, expert_rows, make_buffer, make_inputs, to
from lib.experts import uninitialised_memory_is_nan
from lib.round_trip import device
from lib.steps import resources

import ep_dispatcher as ep
from ep_dispatcher import engines
from ep_dispatcher.tools.testing import ROUTINGS, device_of, make_routing

pytestmark = pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}")


# ---- dirty memory ---------------------------------------------------------------------------------------------------


def soil_region(buffer: ep.Buffer) -> None:
    """All that peers read and write, but for the flags, holds NaN, or -1 where it is integers."""
    from ep_dispatcher import _C_cuda

    torch.cuda.synchronize()
    dist.barrier()
    engine = buffer._engine
    engine._regions.memory[_C_cuda.flag_bytes(engine._c_config) :].fill_(255)
    torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("recv", ["counted", "spare"])
@pytest.mark.parametrize("layout,alignment", [("expert", 8), ("rank", 1)])
@pytest.mark.parametrize("dtype,payload", [(torch.bfloat16, "rows"), (torch.float32, "rows"), (torch.bfloat16, "pair")])
@on_ranks(3)
def test_nothing_of_what_the_memory_held_is_seen(rank, dtype, payload, layout, alignment, recv):
    shape = dict(num_topk=3, experts_per_rank=3, hidden=256, payload=payload, routing="masked", tokens="uneven")
    case = Case(3, 3, dtype, layout=layout, alignment=alignment, recv=recv, **shape)
    inputs, device, steps, handle = make_inputs(case), device_of("cuda", rank), [], None
    max_recv_rows = max(grid.rows_needed(case, inputs.topk_idx)) + 17 if recv == "spare" else None
    with make_buffer(case, "cuda", max_tokens_per_rank=64) as buffer:
        x, topk_idx, weights = inputs.on(rank, device)
        options = dict(layout=layout, expert_alignment=alignment, max_recv_rows=max_recv_rows)
        for given in ((topk_idx, options), (None, {})):
            soil_region(buffer)
            with uninitialised_memory_is_nan():
                out = buffer.dispatch(x, given[0], weights, handle=handle, **given[1])
            handle = out.handle
            y, row_weights = to(device, expert_rows(case, out, rank))
            soil_region(buffer)
            with uninitialised_memory_is_nan():
                result = buffer.combine(y, handle, topk_weights=row_weights)
            steps.append((out, (result.x, result.topk_weights)))
    expected = expected_of(case, inputs, max_recv_rows)[rank]
    for turn, seen in enumerate(steps):
        grid.assert_step(seen, expected, f"turn {turn}")


# ---- many steps -----------------------------------------------------------------------------------------------------

NUM_STEPS, WARM_UP, MAX_TOKENS = 1000, 200, 96
STEPS = Case(2, 2, torch.bfloat16, num_topk=4, experts_per_rank=5, hidden=512)


def step_of(number: int) -> tuple[Case, Inputs, int | None]:
    """(case, inputs, max_recv_rows): other tokens on every rank, another routing, layout, alignment, way to count."""
    layout = ("expert", "rank")[number // 3 % 2]
    case = dataclasses.replace(STEPS, layout=layout, alignment=1 + number % 7)
    x, topk_idx, weights = [], [], []
    for seed in (2 * number, 2 * number + 1):
        num_tokens = (seed * 37 + seed // 11) % (MAX_TOKENS + 1)
        routing = ROUTINGS[number % len(ROUTINGS)]
        idx, w = make_routing(routing, num_tokens, case.num_experts, case.num_topk, seed=seed)
        x.append(torch.randn(num_tokens, case.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16())
        topk_idx.append(idx)
        weights.append(w)
    return case, Inputs(x, topk_idx, weights), (None, 2 * case.num_topk * MAX_TOKENS + 64)[number % 2]


def one_step(buffer: ep.Buffer, number: int, checked: bool) -> None:
    rank = buffer.topology.rank
    case, given, max_recv_rows = step_of(number)
    x, topk_idx, weights = given.on(rank, device(buffer))
    options = dict(layout=case.layout, expert_alignment=case.alignment, max_recv_rows=max_recv_rows)
    out = buffer.dispatch(x, topk_idx, weights, **options)
    y, row_weights = to(device(buffer), expert_rows(case, out, rank)) if checked else (out.x, out.topk_weights)
    result = buffer.combine(y, out.handle, topk_weights=row_weights)
    if checked:
        right = expected_of(case, given, max_recv_rows)[rank]
        grid.assert_step((Received.of(out), (result.x, result.topk_weights)), right, f"step {number}")


@on_ranks(2, timeout_s=120)
def test_a_thousand_steps_of_changing_sizes(rank):
    device_of("cuda", rank)
    used = []
    with make_buffer(STEPS, "cuda", MAX_TOKENS) as buffer:
        for number in range(NUM_STEPS):
            one_step(buffer, number, checked=number % 50 == 0 or number >= NUM_STEPS - 3)
            if number in (WARM_UP, NUM_STEPS - 1):
                torch.cuda.synchronize()
                process = resources()  # collects garbage first
                gpu = dict(allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved())
                used.append(process | gpu)
    before, after = used
    allowed_growth = dict(private=2 << 20, shared=1 << 20, files=0, mappings=8, allocated=0, reserved=8 << 20)
    for name, allowed in allowed_growth.items():
        assert after[name] - before[name] <= allowed, f"{name} went from {before} to {after}"


# ---- more than 2^31 bytes and elements ------------------------------------------------------------------------------


@on_ranks(2)
def test_more_than_two_billion_elements(rank):
    """Staging, slots and outputs of more than 2^31 bytes, outputs of more than 2^31 elements: about 20 GB a rank."""
    device, tokens, hidden = device_of("cuda", rank), 155_000, 7168
    shape = dict(hidden=hidden, num_experts=4, num_topk=2, max_tokens_per_rank=tokens, timeout_s=60)

    def rows_of(source: int) -> torch.Tensor:
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
        return x.normal_(generator=torch.Generator(device).manual_seed(source))

    with ep.Buffer(engine="cuda", **shape) as buffer:
        x, t = rows_of(rank), torch.arange(tokens, device=device)
        idx = torch.stack([t % 2, 2 + t // 2 % 2], 1)
        assert x.numel() * 2 > 2**31
        out = buffer.dispatch(x, idx)
        assert out.x.numel() > 2**31
        begin = 0
        for expert in (2 * rank, 2 * rank + 1):
            for source in range(2):
                right = rows_of(source)[idx[:, rank] == expert]
                assert torch.equal(out.x[begin : begin + len(right)], right), f"expert {expert}, source {source}"
                begin += len(right)
                del right
        assert begin == len(out.x)
        total = buffer.combine(out.x, out.handle).x
        assert torch.equal(total, x + x)
    del x, out, total
    torch.cuda.empty_cache()


# ---- streams and the allocator --------------------------------------------------------------------------------------

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@on_ranks(2)
def test_asynchronous_operations_keep_their_memory(rank):
    """Inputs and outputs of asynchronous operations go out of use, and others take their memory, while they wait."""
    case, device = Case(2, 2, torch.bfloat16, num_topk=3, experts_per_rank=3, hidden=1024), device_of("cuda", rank)
    inputs = [make_inputs(case, seed) for seed in range(4)]
    right = [expected_of(case, given, 300)[rank] for given in inputs]
    with make_buffer(case, "cuda", 64) as buffer:

        def scribble():
            shapes = [(19, 1024), (19, 3), (300, 1024), (300,), (2**16,)] * 4
            return [torch.full(shape, float("nan"), dtype=dtype, device=device) for shape in shapes for dtype in DTYPES]

        for turn in range(20):
            given, (expected, combined) = inputs[turn % 4], right[turn % 4]
            tensors = given.on(rank, device)
            if turn > 0:
                with torch.cuda.stream(buffer._engine._own_stream):
                    spin(0.01)  # the operations wait, the current stream does not
            out = buffer.dispatch(*tensors, max_recv_rows=300, async_finish=True)
            del tensors
            scribble()
            out.event.wait()
            received = Received.of(out)
            y = to(device, expert_rows(case, expected, rank)[0])
            with torch.cuda.stream(buffer._engine._own_stream):
                spin(0.01)
            result = buffer.combine(y, out.handle, async_finish=True)
            del y, out
            scribble()
            result.event.wait()
            scribble()
            grid.assert_step((received, (result.x, None)), (expected, (combined[0], None)), f"turn {turn}")


@on_ranks(2)
def test_two_buffers_in_two_streams(rank):
    """Two buffers, each in a stream of its own; ranks launch them in different orders, as they may."""
    device, turns = device_of("cuda", rank), 10
    cases = [
        Case(2, 2, torch.bfloat16, num_topk=3, experts_per_rank=3, hidden=2048),
        Case(2, 2, torch.float32, num_topk=2, hidden=256, layout="rank"),
    ]
    right, given, results = [[], []], [[], []], [[], []]
    for b, case in enumerate(cases):
        for turn in range(turns):  # everything is on the GPU before, so that no host waits for one of the streams
            inputs = make_inputs(case, seed=turn)
            right[b].append(expected_of(case, inputs, 300)[rank])
            given[b].append((*inputs.on(rank, device), *to(device, expert_rows(case, right[b][turn][0], rank))))
    streams = [torch.cuda.Stream() for _ in cases]
    with make_buffer(cases[0], "cuda", 64) as first, make_buffer(cases[1], "cuda", 64) as second:
        buffers = (first, second)
        for b in (0, 1):  # the first use loads kernels and takes memory, and for both the host may wait
            kept = [run_in(streams[b], buffers[b], cases[b], *given[b][turn]) for turn in range(turns)]
            torch.cuda.synchronize()
            del kept
        for turn in range(turns):
            for b in (0, 1) if (rank + turn) % 2 else (1, 0):
                results[b].append(run_in(streams[b], buffers[b], cases[b], *given[b][turn]))
        torch.cuda.synchronize()
        for b, turn in itertools.product((0, 1), range(turns)):
            grid.assert_step(results[b][turn], right[b][turn], f"buffer {b}, turn {turn}")


def run_in(stream, buffer: ep.Buffer, case: Case, x, topk_idx, topk_weights, y, row_weights):
    with torch.cuda.stream(stream):
        out = buffer.dispatch(x, topk_idx, topk_weights, layout=case.layout, max_recv_rows=300)
        result = buffer.combine(y, out.handle, topk_weights=row_weights)
    return Received.of(out), (result.x, result.topk_weights)


@on_ranks(2)
def test_two_buffers_of_decode_in_two_streams(rank):
    """As above, each with as many multiprocessors as it takes by default: they are on the GPU together."""
    case, turns = Case(2, 2, torch.bfloat16, layout="decode", weighted=False, num_topk=3, hidden=2048), 20
    steps = [make_inputs(case, seed) for seed in range(turns)]
    given = [inputs.on(rank, device_of("cuda", rank))[:2] for inputs in steps]
    weights = [to(device_of("cuda", rank), weights_of(case, inputs, rank)) for inputs in steps]
    streams = [torch.cuda.Stream() for _ in range(2)]
    with make_buffer(case, "cuda", 64) as first, make_buffer(case, "cuda", 64) as second:

        def run(buffer: ep.Buffer, turn: int) -> torch.Tensor:
            out = buffer.dispatch(*given[turn], layout="decode")
            return buffer.combine(out.x, out.handle, weights=weights[turn]).x

        alone = [[run(buffer, turn) for turn in range(turns)] for buffer in (first, second)]
        torch.cuda.synchronize()
        together = [[], []]
        for turn in range(turns):
            for b in (0, 1) if (rank + turn) % 2 else (1, 0):
                with torch.cuda.stream(streams[b]):
                    together[b].append(run((first, second)[b], turn))
        torch.cuda.synchronize()
        for b, turn in itertools.product((0, 1), range(turns)):
            assert torch.equal(together[b][turn], alone[0][turn]), f"buffer {b}, turn {turn}"
        assert all(map(torch.equal, *alone))


def test_one_queue_to_the_gpu(monkeypatch):
    """As Megatron sets it: what is launched first starts first, whatever its stream."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    names = [
        "test_cuda_engine.py::test_asynchronous_operations_in_their_own_stream",
        "test_cuda_engine.py::test_a_graph_replays_with_new_routing[2]",
        "test_cuda_faults.py::test_a_mistake_found_by_a_later_operation_ends_the_buffer_on_all_ranks[1]",
        "test_cuda_stress.py::test_asynchronous_operations_keep_their_memory",
        "test_parts_gpu.py::test_the_bits_of_one_part_after_the_other[2-1]",
        "test_parts_gpu.py::test_a_graph_of_forward_and_backward[2-1-2]",
    ]
    tests = [str(ROOT / "tests" / name) for name in names]
    code, output, _ = run_module("pytest", "-q", "-p", "no:cacheprovider", *tests, timeout_s=200)
    assert code == 0 and f"{len(tests)} passed" in output, output
