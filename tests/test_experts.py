"""moe_mlp: results and gradients of a dense layer of the same experts, whatever the ranks, dtypes and routings."""

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import on_ranks
from test_autograd import dense_moe_layer, normal
from test_dispatch_combine import Case, Inputs, make_buffer, make_inputs
from test_errors import assert_refused
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of

NAMES = ("y", "x", "topk_weights", "w1", "w2")
INTERMEDIATE = 24
MAX_TOKENS = 64
MAX_RECV_ROWS = 200
CLOSE = {
    torch.float32: dict(rtol=1e-4, atol=1e-5),
    torch.float16: dict(rtol=2e-2, atol=2e-2),
    torch.bfloat16: dict(rtol=1e-1, atol=1e-1),
}


def make_case(num_ranks: int, ranks_per_node: int, dtype: torch.dtype = torch.float32) -> tuple[Case, Inputs]:
    case = Case(num_ranks, ranks_per_node, dtype, num_topk=3, experts_per_rank=3, hidden=16, tokens="uneven")
    inputs = make_inputs(dataclasses.replace(case, routing="masked"))
    inputs.x[:] = [normal(x.shape, 20 + rank, dtype) for rank, x in enumerate(inputs.x)]
    return case, inputs


def weights_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """w1 and w2 of all experts."""
    w1 = normal((case.num_experts, 2 * INTERMEDIATE, case.hidden), 7) / case.hidden**0.5
    w2 = normal((case.num_experts, case.hidden, INTERMEDIATE), 8) / INTERMEDIATE**0.5
    return w1.to(case.dtype), w2.to(case.dtype)


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


def layer(rank: int, engine: str, case: Case, inputs: Inputs, how: str, num_parts: int | None = None):
    """Return y, and the gradients of x, topk_weights, w1 and w2; the loss is y times fixed random numbers."""
    device, first = device_of(engine, rank), rank * case.experts_per_rank
    own = [w[first : first + case.experts_per_rank] for w in weights_of(case)]
    leaves = [t.to(device).requires_grad_() for t in (inputs.x[rank], inputs.topk_weights[rank], *own)]
    topk_idx = inputs.topk_idx[rank].to(device)
    compiles, keeps_less = how.startswith("compiled"), how.endswith("keeps less")
    options = {"max_recv_rows": MAX_RECV_ROWS} if how == "fixed rows" or compiles else {}
    options |= {"keep_activated": False} if keeps_less else {}
    options |= {"overlap": False} if how == "no overlap" else {}
    options |= {"num_parts": 2 if how == "two parts" else num_parts}

    def forward(x, topk_weights, w1, w2):
        return ep.moe_mlp(buffer, x, topk_idx, topk_weights, w1, w2, **options)

    around = {"fixed rows": uninitialised_memory_is_nan, "loop": without_grouped_mm}
    with make_buffer(case, engine, MAX_TOKENS) as buffer, around.get(how, contextlib.nullcontext)():
        if how == "recomputed":
            y = checkpoint(forward, *leaves, use_reentrant=False)
        elif compiles:
            y = torch.compile(forward, backend="aot_eager", fullgraph=True)(*leaves)
        else:
            y = forward(*leaves)
        (y * normal(y.shape, 50 + rank).to(device)).sum().backward()
    return y.detach(), *(leaf.grad for leaf in leaves)


def swiglu_experts(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = torch.einsum("th,eih->tei", x, w1).chunk(2, dim=2)
    return torch.einsum("tei,ehi->teh", F.silu(gate) * up, w2)


@pytest.mark.parametrize(
    "num_ranks,ranks_per_node,dtype,how",
    [
        (1, 1, torch.float32, "plain"),
        (2, 2, torch.float32, "fixed rows"),
        (2, 2, torch.float32, "loop"),
        (2, 2, torch.bfloat16, "compiled"),
        (3, 3, torch.float16, "plain"),
        (4, 2, torch.float32, "recomputed"),
        (1, 1, torch.bfloat16, "compiled, keeps less"),
        (2, 2, torch.float32, "keeps less"),
        (4, 1, torch.bfloat16, "fixed rows"),
    ],
    ids=lambda value: str(value).removeprefix("torch.").replace(" ", "-"),
)
def test_it_is_the_dense_layer(pools, engine, num_ranks, ranks_per_node, dtype, how):
    case, inputs = make_case(num_ranks, ranks_per_node, dtype)
    x_grads, weight_grads, matrices = compare_with_dense(
        pools(num_ranks).run(layer, engine, case, inputs, how), case, inputs
    )
    assert all(float(grad.abs().sum()) > 1 for grad in (x_grads[0], weight_grads[0], *matrices))


def compare_with_dense(ranks: list, case: Case, inputs: Inputs) -> tuple:
    """Compare what ``layer`` returned on all ranks. Return the right gradients of x, topk_weights, w1 and w2."""
    results, x_grads, weight_grads, matrices = dense_moe_layer(case, inputs, weights_of(case), swiglu_experts)
    for rank, seen in enumerate(ranks):
        own = slice(rank * case.experts_per_rank, (rank + 1) * case.experts_per_rank)
        expected = results[rank], x_grads[rank], weight_grads[rank], *(of_all[own] for of_all in matrices)
        dtypes = case.dtype, case.dtype, torch.float32, case.dtype, case.dtype
        for name, value, right, of_dtype in zip(NAMES, seen, expected, dtypes, strict=True):
            assert value.dtype == of_dtype
            torch.testing.assert_close(value, right, check_dtype=False, **CLOSE[case.dtype], msg=name)
    return x_grads, weight_grads, matrices


@on_ranks(2)
def test_every_way_gives_the_same_bits(rank, engine):
    """A recompute, static shapes and a second run: the same operations in the same order."""
    case, inputs = make_case(2, 1, torch.bfloat16)
    plain = layer(rank, engine, case, inputs, "plain")
    for how in ("plain", "fixed rows", "recomputed", "keeps less"):
        assert all(map(torch.equal, plain, layer(rank, engine, case, inputs, how))), how


@on_ranks(1)
def test_without_keep_activated_less_is_kept(rank, engine):
    """`intermediate` values less of each received row."""
    (case, inputs), device = make_case(1, 1, torch.bfloat16), device_of(engine, rank)
    w1, w2 = (w.to(device).requires_grad_() for w in weights_of(case))
    x, idx, weights = (t[rank].to(device) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights))
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
    device = device_of(engine, rank)
    given = [t[0].to(device) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights)]
    matrices = [w.to(device).requires_grad_() for w in weights_of(case)]
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
    (case, inputs), device = make_case(1, 1), device_of(engine, rank)
    x, idx, weights, w1, w2 = (
        t.to(device) for t in (inputs.x[0], inputs.topk_idx[0], inputs.topk_weights[0], *weights_of(case))
    )
    wrong = [
        ("activation", dict(activation="relu")),
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
        for argument, change in wrong:
            assert_refused(argument, ep.moe_mlp, **(right | change))
        with pytest.raises(ValueError, match="torch.func"):
            torch.func.grad(lambda w: ep.moe_mlp(**(right | dict(w1=w))).sum())(w1)
        if engine == "cpu":
            assert buffer._engine._c.epoch == epoch, "something was sent"
        ep.moe_mlp(**right)
