"""moe_mlp: results and gradients of a dense layer of the same experts, whatever the ranks, dtypes and routings."""

import contextlib
import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import exhaustive, on_ranks
from test_autograd import dense_moe_layer, normal
from test_dispatch_combine import Case, Inputs, make_buffer, make_inputs
from test_errors import assert_refused
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of

NAMES = ("y", "x", "topk_weights", "w1", "w2")
INTERMEDIATE = 32
MAX_TOKENS = 64
MAX_RECV_ROWS = 200
QUANTIZE = "e4m3_1x128_pow2"
SIZES = [19, 12, 1, 0]  # tokens of the ranks
FIXED, KEEPS_LESS = dict(max_recv_rows=MAX_RECV_ROWS), dict(keep_activated=False)
OPTIONS = {  # of moe_mlp, by the way that a layer is run
    "fixed rows": FIXED,
    "compiled": FIXED,
    "compiled, keeps less": FIXED | KEEPS_LESS,
    "keeps less": KEEPS_LESS,
    "no overlap": dict(overlap=False),
    "two parts": dict(num_parts=2),
}
CLOSE = {
    torch.float32: dict(rtol=1e-4, atol=1e-5),
    torch.float16: dict(rtol=2e-2, atol=2e-2),
    torch.bfloat16: dict(rtol=1e-1, atol=1e-1),
}


def make_case(
    num_ranks: int, ranks_per_node: int, dtype: torch.dtype = torch.float32, *, hidden: int = 16, sizes=None
) -> tuple[Case, Inputs]:
    """sizes: tokens of the ranks; None: uneven ones, with a rank that has none"""
    sizes_of = dict(num_topk=3, experts_per_rank=3, hidden=hidden, tokens="even" if sizes else "uneven")
    case = Case(num_ranks, ranks_per_node, dtype, **sizes_of)
    inputs = make_inputs(dataclasses.replace(case, routing="masked"))
    inputs.x[:] = [normal(x.shape, 20 + rank, dtype) for rank, x in enumerate(inputs.x)]
    if sizes:
        lists = inputs.x, inputs.topk_idx, inputs.topk_weights
        inputs = Inputs(*([t[:size] for t, size in zip(of_ranks, sizes)] for of_ranks in lists))
    return case, inputs


def weights_of(case: Case) -> list[torch.Tensor]:
    """w1 and w2 of all experts."""
    w1 = normal((case.num_experts, 2 * INTERMEDIATE, case.hidden), 7) / case.hidden**0.5
    w2 = normal((case.num_experts, case.hidden, INTERMEDIATE), 8) / INTERMEDIATE**0.5
    return [w1.to(case.dtype), w2.to(case.dtype)]


def of_rank(case: Case, rank: int, matrices) -> list[torch.Tensor]:
    """The experts of a rank."""
    return [one[rank * case.experts_per_rank :][: case.experts_per_rank] for one in matrices]


def given_to(rank: int, engine: str, case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """x, topk_idx, topk_weights, w1 and w2 of a rank, on its device."""
    own = inputs.x[rank], inputs.topk_idx[rank], inputs.topk_weights[rank], *of_rank(case, rank, weights_of(case))
    return [t.to(device_of(engine, rank)) for t in own]


@contextlib.contextmanager
def uninitialised_memory_is_nan():
    """Rows that nobody writes must not reach a result."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def without_grouped_mm():
    """As on PyTorch before 2.10."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(F, "grouped_mm")
        yield


def layer(rank: int, engine: str, case: Case, inputs: Inputs, how: str, matrices=None, **options):
    """Return y, and the gradients of x, topk_weights and matrices; the loss is y times fixed random numbers.

    matrices: w1 and w2, or these and b1 and b2, of all experts; None: those of ``weights_of``
    """
    device = device_of(engine, rank)
    own = [one.contiguous() for one in of_rank(case, rank, matrices or weights_of(case))]
    leaves = [t.to(device).requires_grad_() for t in (inputs.x[rank], inputs.topk_weights[rank], *own)]
    topk_idx = inputs.topk_idx[rank].to(device)
    options = OPTIONS.get(how, {}) | options

    def forward(x, topk_weights, w1, w2, *biases):
        biases = dict(zip(("b1", "b2"), biases))
        return ep.moe_mlp(buffer, x, topk_idx, topk_weights, w1, w2, **biases, **options)

    around = {"fixed rows": uninitialised_memory_is_nan, "loop": without_grouped_mm}
    with make_buffer(case, engine, MAX_TOKENS) as buffer, around.get(how, contextlib.nullcontext)():
        if how == "recomputed":
            y = checkpoint(forward, *leaves, use_reentrant=False)
        elif how.startswith("compiled"):
            torch.compiler.reset()  # PyTorch compiles one function 8 times at most
            y = torch.compile(forward, backend="aot_eager", fullgraph=True)(*leaves)
        else:
            y = forward(*leaves)
        (y * normal(y.shape, 50 + rank).to(device)).sum().backward()
    return y.detach(), *(leaf.grad for leaf in leaves)


def swiglu_experts(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = torch.einsum("th,eih->tei", x, w1).chunk(2, dim=2)
    return torch.einsum("tei,ehi->teh", F.silu(gate) * up, w2)


def dense_results(case: Case, inputs: Inputs, matrices, experts=swiglu_experts):
    """Yield what ``layer`` returns on each rank, in float64."""
    results, x_grads, weight_grads, grads = dense_moe_layer(case, inputs, matrices, experts)
    for rank in range(case.num_ranks):
        yield results[rank], x_grads[rank], weight_grads[rank], *of_rank(case, rank, grads)


def compare_with_dense(ranks: list, case: Case, inputs: Inputs) -> None:
    """Compare what ``layer`` returned on all ranks."""
    dtypes = case.dtype, case.dtype, torch.float32, case.dtype, case.dtype
    for seen, expected in zip(ranks, dense_results(case, inputs, weights_of(case)), strict=True):
        for name, value, right, of_dtype in zip(NAMES, seen, expected, dtypes, strict=True):
            assert value.dtype == of_dtype
            torch.testing.assert_close(value, right, check_dtype=False, **CLOSE[case.dtype], msg=name)


@pytest.mark.parametrize(
    "num_ranks,ranks_per_node,dtype,how,num_parts",
    [
        (1, 1, torch.float32, "plain", 1),
        (2, 2, torch.float32, "fixed rows", 1),
        (2, 2, torch.float32, "loop", 1),
        (2, 2, torch.bfloat16, "compiled", 1),
        (3, 3, torch.float16, "plain", 1),
        (4, 2, torch.float32, "recomputed", 1),
        (1, 1, torch.bfloat16, "compiled, keeps less", 1),
        (2, 2, torch.float32, "keeps less", 1),
        (4, 1, torch.bfloat16, "fixed rows", 1),
        (1, 1, torch.float32, "plain", 2),
        (2, 2, torch.bfloat16, "plain", 2),
        (2, 1, torch.float32, "fixed rows", 2),
        (2, 1, torch.bfloat16, "compiled", 2),
        (2, 1, torch.float16, "recomputed", 2),
        (2, 1, torch.float32, "keeps less", 2),
        (4, 2, torch.float32, "plain", 2),
        (4, 2, torch.float16, "fixed rows", 2),
    ],
    ids=lambda value: str(value).removeprefix("torch.").replace(" ", "-"),
)
def test_it_is_the_dense_layer(pools, engine, num_ranks, ranks_per_node, dtype, how, num_parts):
    case, inputs = make_case(num_ranks, ranks_per_node, dtype, sizes=SIZES if num_parts == 2 else None)
    ranks = pools(num_ranks).run(partial(layer, num_parts=num_parts), engine, case, inputs, how)
    compare_with_dense(ranks, case, inputs)
    assert all(float(sum(grad.abs().sum() for grad in grads)) > 1 for grads in list(zip(*ranks))[1:])


@pytest.mark.parametrize("num_parts, dtype", [(1, torch.bfloat16), (2, torch.float32), exhaustive(2, torch.bfloat16)])
@on_ranks(2)
def test_every_way_gives_the_same_bits(rank, engine, num_parts, dtype):
    """The same operations in the same order. One part and two sum the rows of a gradient in other orders."""
    case, inputs = make_case(2, 1, dtype, sizes=SIZES if num_parts == 2 else None)
    run = partial(layer, rank, engine, case, inputs, num_parts=num_parts)
    plain = run("plain")
    for how in ("plain", "no overlap", "fixed rows", "recomputed", "keeps less"):
        assert all(map(torch.equal, plain, run(how))), how
    for name, one, other in zip(NAMES, plain, run("plain", num_parts=3 - num_parts)):
        torch.testing.assert_close(one, other, **CLOSE[dtype], msg=name)


@on_ranks(1)
def test_without_keep_activated_less_is_kept(rank, engine):
    """`intermediate` values less of each received row."""
    case, inputs = make_case(1, 1, torch.bfloat16)
    x, idx, weights, *matrices = given_to(rank, engine, case, inputs)
    w1, w2 = (w.requires_grad_() for w in matrices)
    sizes = []
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        for keep_activated in (True, False):
            found: dict[int, int] = {}

            def keep(t: torch.Tensor, found: dict[int, int] = found) -> torch.Tensor:
                found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                y = ep.moe_mlp(buffer, x, idx, weights, w1, w2, max_recv_rows=100, keep_activated=keep_activated)
            y.sum().backward()
            sizes.append(sum(found.values()))
    assert sizes[0] - sizes[1] == 100 * INTERMEDIATE * x.itemsize, sizes


@on_ranks(1)
def test_why_it_does_not_overlap(rank, engine):
    """A reason where its steps run one after the other; the choice that moe_mlp makes."""
    case, _ = make_case(1, 1)
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        wanted = f"its engine is {engine}" if engine == "cpu" else "its rows are torch.float32"
        assert ep.why_no_overlap(buffer) == ep.why_no_overlap(buffer, num_parts=2) == wanted
        assert_refused("num_parts", ep.why_no_overlap, buffer, num_parts=3)
        assert_refused("buffer", ep.why_no_overlap, None)
    assert_refused("buffer", ep.why_no_overlap, buffer)


@on_ranks(1)
def test_torch_compile_in_float32_breaks_the_graph_and_changes_no_bit(rank, engine):
    """A whole graph is refused."""
    case, inputs = make_case(1, 1)
    *given, w1, w2 = given_to(rank, engine, case, inputs)
    matrices = w1.requires_grad_(), w2.requires_grad_()
    with make_buffer(case, engine, MAX_TOKENS) as buffer:

        def forward(*matrices):
            return ep.moe_mlp(buffer, *given, *matrices, max_recv_rows=MAX_RECV_ROWS)

        eager, broken = (call(*matrices) for call in (forward, torch.compile(forward, backend="aot_eager")))
        assert torch.equal(broken, eager)
        grads = [torch.autograd.grad(y.sum(), matrices) for y in (eager, broken)]
        assert all(map(torch.equal, *grads))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="buffer: given one of torch.float32"):
            torch.compile(forward, backend="aot_eager", fullgraph=True)(*matrices)


@on_ranks(1)
def test_wrong_arguments_are_refused_before_anything_is_sent(rank, engine):
    case, inputs = make_case(1, 1, sizes=SIZES)
    x, idx, weights, w1, w2 = given_to(rank, engine, case, inputs)
    bad = idx.clone()
    bad[-1, 1] = 77
    two_parts = dict(topk_idx=bad, num_parts=2)
    too_many = dict(x=torch.cat([x] * 4), topk_idx=torch.cat([idx] * 4), topk_weights=torch.cat([weights] * 4))
    wrong = [
        ("activation", dict(activation="relu")),
        ("activation.function", dict(activation=ep.Activation("relu"))),
        ("activation.gated", dict(activation=ep.Activation("gelu", gated=False, limit=1.0))),
        ("activation.limit", dict(activation=ep.Activation(limit=0.0))),
        ("activation.alpha", dict(activation=ep.Activation(alpha=float("nan")))),
        ("w1", dict(activation="gelu")),
        ("b1", dict(b1=w1[:, :-1, 0])),
        ("b2", dict(b2=w2[:, :, 0].double())),
        ("quantize", dict(quantize="e5m2")),
        ("quantize", dict(quantize=True)),
        ("quantize", dict(quantize=QUANTIZE)),  # of float32
        ("num_parts", dict(num_parts=3)),
        ("num_parts", dict(num_parts="2")),
        ("max_recv_rows", dict(max_recv_rows=-1)),
        ("x", too_many),
        ("w1", dict(w1=w1[:, 1:])),
        ("w1", dict(w1=w1[:2])),
        ("w1", dict(w1=w1.double())),
        ("w2", dict(w2=w2.transpose(1, 2))),
        ("w2", dict(w2=None)),
        ("x", dict(x=(x.to(torch.float8_e4m3fn), weights))),
        ("topk_weights", dict(topk_weights=None)),
        ("topk_idx", dict(topk_idx=idx[1:])),
        ("buffer", dict(buffer=None)),
    ]
    if engine == "cuda":
        wrong.append(("w2", dict(w1=w1[:, :4], w2=w2[:, :, :2])))  # intermediate is no multiple of 4
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        right = dict(buffer=buffer, x=x, topk_idx=idx, topk_weights=weights, w1=w1, w2=w2)
        epoch = buffer._engine._c.epoch if engine == "cpu" else 0
        for num_parts in (1, 2):
            for argument, change in wrong:
                assert_refused(argument, ep.moe_mlp, **(right | dict(num_parts=num_parts) | change))
        assert_refused(
            f"topk_idx[{18 if engine == 'cpu' else 8}, 1]", ep.moe_mlp, **(right | two_parts)
        )  # or of its part
        with pytest.raises(ValueError, match="torch.func"):
            torch.func.grad(lambda w: ep.moe_mlp(**(right | dict(w1=w))).sum())(w1)
        if engine == "cpu":
            assert buffer._engine._c.epoch == epoch, "something was sent"
        ep.moe_mlp(**right)
