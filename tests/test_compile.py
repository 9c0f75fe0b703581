"""torch.compile keeps both operations whole, forward and backward, and changes nothing."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import exhaustive, on, on_ranks
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.tools.testing import device_of, make_routing

HIDDEN, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS, NUM_ROWS = 144, 12, 3, 20, 80
COMPILE_S = 300  # of a run that compiles, on a busy machine
TWO_STEPS, AOT_EAGER = (NUM_TOKENS, NUM_TOKENS), dict(backend="aot_eager")


def make_buffer(**changes) -> ep.Buffer:
    sizes = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, max_tokens_per_rank=4 * NUM_TOKENS)
    return ep.Buffer(**(sizes | dict(dtype=torch.float32, timeout_s=COMPILE_S) | changes))


def experts(out: ep.DispatchOutput, matrix: Tensor) -> Tensor:
    """One matrix for all experts, weighted where there are weights."""
    x = ep.dequantize(out.x) if isinstance(out.x, tuple) else out.x
    y = torch.tanh(x @ matrix.to(x.dtype))
    if out.topk_weights is None:
        return y
    weights = out.topk_weights if out.topk_weights.dim() == 1 else out.topk_weights.sum(1)
    return y * weights[:, None].to(y.dtype)


def one_layer(buffer: ep.Buffer, x, weights, matrix, idx, _, **options) -> tuple[Tensor, ...]:
    out = ep.dispatch(buffer, x, idx, weights, **options)
    return (ep.combine(buffer, experts(out, matrix), out.handle),)


def two_layers(buffer: ep.Buffer, x, weights, matrix, idx, other_idx, **options) -> tuple[Tensor, ...]:
    for layer_idx in (idx, other_idx):
        x = x + one_layer(buffer, x, weights, matrix, layer_idx, None, **options)[0]
    return (x,)


def cached_handle(buffer: ep.Buffer, x, weights, matrix, idx, _, **options) -> tuple[Tensor, ...]:
    """A recompute in the graph: the routing comes from the handle of a dispatch in the same graph."""
    first = ep.dispatch(buffer, x, idx, weights, **options)
    out = ep.dispatch(buffer, x * 2, None, weights, handle=first.handle)
    y = experts(out, matrix)
    if weights is None:
        return (ep.combine(buffer, y, first.handle),)
    return ep.combine(buffer, y, first.handle, topk_weights=out.topk_weights)


def leaves(rank: int, seed: int, buffer: ep.Buffer, has_weights: bool, num_tokens: int = NUM_TOKENS):
    """(x, topk_weights, matrix), which want gradients, and two routings."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    device, dtype = device_of(buffer.engine, rank), buffer.config.dtype
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    matrix = (torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5).to(device).requires_grad_()
    sizes = (num_tokens, NUM_EXPERTS, NUM_TOPK)
    idx, weights = make_routing("masked", *sizes, seed=100 * seed + rank)
    other_idx, _ = make_routing("uniform", *sizes, seed=100 * seed + 50 + rank)
    weights = weights.to(device).requires_grad_() if has_weights else None
    return x, weights, matrix, idx.to(device), other_idx.to(device)


def forward_and_backward(function, buffer: ep.Buffer, given, **options) -> list[Tensor]:
    results = function(buffer, *given, **options)
    sum(result.float().square().sum() for result in results).backward()
    return [result.detach() for result in results] + [t.grad for t in given[:3] if t is not None]


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def fresh_compile(function, **options):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, fullgraph=True, **options)


def assert_same(eager: list[Tensor], compiled: list[Tensor], backend: str) -> None:
    tolerance = 1e-4 if backend == "inductor" else 0  # its own kernels round otherwise than PyTorch's
    for right, seen in zip(eager, compiled, strict=True):
        assert right.abs().sum() > 0
        torch.testing.assert_close(seen, right, rtol=tolerance, atol=tolerance)


def compare(rank: int, function, config, num_tokens=TWO_STEPS, has_weights=True, compiles=AOT_EAGER, **options):
    """Compare eager and compiled results of every step. Return the graphs made by then."""
    compiled, made, options = fresh_compile(function, **compiles), [], {"max_recv_rows": NUM_ROWS} | options
    device_of(config["engine"], rank)
    with make_buffer(**config) as buffer:
        for seed, num in enumerate(num_tokens):
            eager, ours = (
                forward_and_backward(f, buffer, leaves(rank, seed, buffer, has_weights, num), **options)
                for f in (function, compiled)
            )
            assert_same(eager, ours, compiles["backend"])
            made.append(graphs())
    return made


@pytest.mark.parametrize("has_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("function", [one_layer, two_layers, cached_handle], ids=lambda f: f.__name__)
@on_ranks(2, timeout_s=COMPILE_S)
def test_whole_graphs_and_the_same_bits(rank, engine, function, layout, has_weights):
    """The second step has another routing and needs no new graph."""
    assert compare(rank, function, dict(engine=engine), layout=layout, has_weights=has_weights) == [1, 1]


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2, timeout_s=COMPILE_S)
def test_quantized(rank, engine, ranks_per_node):
    quantize = ("e4m3_1x128", "mxfp8")[ranks_per_node - 1]
    config = dict(engine=engine, dtype=torch.bfloat16, ranks_per_node=ranks_per_node)
    compare(rank, two_layers, config, quantize=quantize, expert_alignment=4)


@pytest.mark.parametrize(
    "dynamic,num_rows,layout,graphs_made",
    [
        (None, NUM_ROWS * 4, "expert", [1, 2, 2, 2]),
        (None, None, "expert", [1, 2, 2, 2]),
        (True, NUM_ROWS * 4, "expert", [1, 1, 1, 1]),
        (True, None, "rank", [1, 1, 1, 1]),
    ],
)
@on_ranks(2, timeout_s=COMPILE_S)
def test_another_number_of_tokens(rank, engine, dynamic, num_rows, layout, graphs_made):
    """A second graph for sizes that vary, and no third; with dynamic=True one for every number of tokens."""
    num_tokens = [NUM_TOKENS, 2 * NUM_TOKENS, 3 * NUM_TOKENS, NUM_TOKENS - 1]
    options = dict(compiles=AOT_EAGER | dict(dynamic=dynamic), max_recv_rows=num_rows, layout=layout)
    assert compare(rank, one_layer, dict(engine=engine), num_tokens, **options) == graphs_made


@pytest.mark.parametrize("num_rows", [NUM_ROWS, None], ids=["fixed", "counted"])
@on_ranks(2, timeout_s=COMPILE_S)
def test_dynamic_shapes_with_float8_and_a_handle(rank, engine, num_rows):
    options = dict(compiles=AOT_EAGER | dict(dynamic=True), quantize="e4m3_1x128", max_recv_rows=num_rows)
    compare(rank, cached_handle, dict(engine=engine, dtype=torch.bfloat16), **options)


@pytest.mark.parametrize(
    "backend,dynamic,as_argument",
    [("eager", None, True), ("aot_eager", None, False), ("aot_eager", True, True), exhaustive("inductor", None, True)],
)
@on_ranks(2, timeout_s=COMPILE_S)
def test_another_buffer(rank, engine, backend, dynamic, as_argument):
    """A new buffer needs a new graph, and gets it; sizes that are dynamic already need no other.

    The first buffer is destroyed before the next. The function takes it from around, or as an argument.
    """
    device_of(engine, rank)

    def closure(x, weights, matrix, idx, other_idx):
        return one_layer(buffer, x, weights, matrix, idx, other_idx, max_recv_rows=4 * NUM_ROWS)

    def argument(buffer, *given):
        return one_layer(buffer, *given, max_recv_rows=4 * NUM_ROWS)

    compiled = fresh_compile(argument if as_argument else closure, backend=backend, dynamic=dynamic)
    for seed in range(2):
        with make_buffer(engine=engine) as buffer:
            for num_tokens in (NUM_TOKENS, NUM_TOKENS + seed):
                called = compiled if as_argument else lambda _, *given: compiled(*given)
                eager, ours = (
                    forward_and_backward(f, buffer, leaves(rank, seed, buffer, True, num_tokens))
                    for f in (argument, called)
                )
                assert_same(eager, ours, backend)
    assert graphs() <= 3


WHEN_DYNAMO_IS_IMPORTED = """
import sys
import weakref
import torch
import torch.distributed as dist
import ep_dispatcher as ep

def seen(when):
    print(when, "torch._dynamo" in sys.modules)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
seen("before")
buffer = ep.Buffer(hidden=64, num_experts=2, num_topk=1, max_tokens_per_rank=8, dtype=torch.float32)
seen("buffer")
modules = {name for name in sys.modules if name.startswith("torch.")}
x = torch.ones(8, 64, requires_grad=True)
out = ep.dispatch(buffer, x, torch.ones(8, 1, dtype=torch.long))
ep.combine(buffer, out.x, out.handle).sum().backward()
print("operations", [name for name in sys.modules if name.startswith("torch._dynamo") and name not in modules])
group = weakref.ref(dist.group.WORLD)
buffer.destroy()
del buffer, out
dist.destroy_process_group()
print("group is held", group() is not None)
"""


LATE_IMPORT = """
import weakref
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import ep_dispatcher

group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
print("group is held", group() is not None)
"""


@pytest.mark.parametrize(
    "script,expected",
    [
        (WHEN_DYNAMO_IS_IMPORTED, ["before False", "buffer False", "operations []", "group is held False"]),
        (LATE_IMPORT, ["group is held False"]),
    ],
    ids=["buffer", "import"],
)
def test_dynamo_is_not_imported_and_holds_no_group(script, expected):
    """Importing it takes a second and more. Eager operations do without.

    destroy_process_group would leave the threads of a group that is held, which can abort a process at its end.
    """
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
    assert result.stdout.splitlines() == expected, result.stderr


@on_ranks(2, timeout_s=COMPILE_S)
def test_inductor(rank):
    assert compare(rank, two_layers, dict(engine="cpu"), compiles=dict(backend="inductor")) == [1, 1]


@pytest.mark.parametrize("engine", [on("cuda")])
@on_ranks(2, timeout_s=COMPILE_S)
def test_cuda_graphs_of_a_compiler(rank, engine):
    """Steps warm up, are captured, and are replayed with another routing."""
    compiles = dict(backend="inductor", options={"triton.cudagraphs": True})
    compare(rank, two_layers, dict(engine=engine), 5 * (NUM_TOKENS,), compiles=compiles)
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@on_ranks(1)
def test_static_shapes_come_without_a_tensor_of_the_host(rank):
    """A tensor on the CPU, as the rows of messages are, would keep a compiler from capturing CUDA graphs."""
    x, idx = (torch.empty(NUM_TOKENS, n, dtype=t, device="meta") for n, t in ((HIDDEN, torch.float32), (3, torch.long)))
    with make_buffer() as buffer:
        buffer.live_engine().num_message_rows = 8
        dispatch = torch.ops.ep_dispatcher.dispatch
        outputs = dispatch(x, None, idx, None, None, None, "expert", 1, NUM_ROWS, None, buffer.id)
    assert {output.device.type for output in outputs} == {"meta"}


@on_ranks(2, timeout_s=COMPILE_S)
def test_a_plan_keeps_its_limit_between_nodes(rank):
    """A compiled function hands it to all operations with the plan. A new value needs another graph, and no third."""
    compiled, limits = fresh_compile(one_layer, backend="aot_eager"), []
    with make_buffer(ranks_per_node=1) as buffer:
        engine = buffer.live_engine()
        for name in ("dispatch", "combine"):
            run = getattr(engine, name)
            setattr(engine, name, lambda request, run=run: limits.append(request.max_tokens_to_node) or run(request))
        for most in (30, 40, None, 50):
            buffer.max_tokens_to_node = most
            for function in (one_layer, compiled):
                forward_and_backward(function, buffer, leaves(rank, 0, buffer, True), max_recv_rows=NUM_ROWS)
                assert limits == [most or 0] * 4  # forward and backward
                limits.clear()
    assert graphs() <= 3  # 0 is a constant of its own


@on_ranks(1, timeout_s=COMPILE_S)
def test_operations_keep_their_order(rank):
    """All ranks must run them in one order. Layers of other sizes tempt a compiler that saves memory to reorder."""
    sizes = [60, 3, 25]
    with make_buffer() as buffer:
        seen, engine = [], buffer.live_engine()

        def launch(request, name, run):
            num_rows = request.num_rows if name == "dispatch" else len(request.y)
            seen.append((name, num_rows - 4 * NUM_ROWS))
            return run(request)

        for name in ("dispatch", "combine"):
            setattr(engine, name, partial(launch, name=name, run=getattr(engine, name)))

        def layers(xs, idxs):
            ys = []
            for layer, (x, idx) in enumerate(zip(xs, idxs)):
                out = ep.dispatch(buffer, x, idx, max_recv_rows=4 * NUM_ROWS + layer)
                ys.append(ep.combine(buffer, torch.tanh(out.x * 2), out.handle))
            return ys

        idxs = [make_routing("uniform", n, NUM_EXPERTS, NUM_TOPK, seed=n)[0] for n in sizes]
        xs = [torch.randn(n, HIDDEN).requires_grad_() for n in sizes]
        ys = torch.compile(layers, fullgraph=True, backend="inductor")(xs, idxs)
        sum(y.sum() for y in ys).backward()
    forward = [(operation, layer) for layer in range(3) for operation in ("dispatch", "combine")]
    backward = [(operation, layer) for layer in (2, 1, 0) for operation in ("dispatch", "combine")]
    assert seen == forward + backward


@on_ranks(1, timeout_s=COMPILE_S)
def test_the_operators_are_what_torch_library_wants(rank):
    dispatch, combine = (torch.ops.ep_dispatcher.dispatch.default, torch.ops.ep_dispatcher.combine.default)
    results = {}
    with make_buffer(dtype=torch.bfloat16) as buffer:
        idx, weights = make_routing("masked", NUM_TOKENS, NUM_EXPERTS, NUM_TOPK, seed=0)
        x = torch.randn(NUM_TOKENS, HIDDEN).bfloat16().requires_grad_()
        pair = x.detach().to(torch.float8_e4m3fn), torch.rand(NUM_TOKENS, checks.num_scales(HIDDEN))
        weights.requires_grad_()

        def check(name, operator, arguments, *without):
            tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
            tests = [test for test in tests if test not in without]
            results[name] = torch.library.opcheck(operator, arguments, test_utils=tests, raise_exception=False)

        for layout in ("expert", "rank"):
            tail = (layout, 1, NUM_ROWS, None, buffer.id)
            # test_aot_dispatch_dynamic wants the same twice, and the plan of a routing has the number of its dispatch;
            # test_schema compares the arguments before and after, which PyTorch cannot do with float8.
            same = "test_aot_dispatch_dynamic"
            check(f"dispatch, {layout}", dispatch, (x, None, idx, weights, None, None, *tail), same)
            check(f"dispatch without weights, {layout}", dispatch, (x, None, idx, None, None, None, *tail), same)
            counted = (layout, 1, -1, None, buffer.id)
            check(f"dispatch of any size, {layout}", dispatch, (x, None, idx, weights, None, None, *counted), same)
            check(
                f"dispatch of a pair, {layout}", dispatch, (*pair, idx, weights, None, None, *tail), same, "test_schema"
            )
            quantized = (layout, 1, NUM_ROWS, "mxfp8" if layout == "rank" else "e4m3_1x128_pow2", buffer.id)
            check(f"dispatch, quantized, {layout}", dispatch, (x, None, idx, weights, None, None, *quantized), same)
            received = dispatch(x, None, idx, weights, None, None, *tail)
            plan, out_weights = received[6], received[2].detach().requires_grad_()
            check(f"dispatch with a plan, {layout}", dispatch, (x, None, None, weights, plan, None, *tail))
            y = torch.randn(NUM_ROWS, HIDDEN).bfloat16().requires_grad_()
            check(f"combine, {layout}", combine, (y, plan, out_weights, None, NUM_TOKENS, layout, buffer.id))
            check(f"combine without weights, {layout}", combine, (y, plan, None, None, NUM_TOKENS, layout, buffer.id))
    assert len(results) == 16
    failed = {name: tests for name, tests in results.items() if {*map(str, tests.values())} != {"SUCCESS"}}
    assert not failed, failed
