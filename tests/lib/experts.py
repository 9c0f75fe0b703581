"""Cases of layers of experts, and a dense computation of the same."""

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of
from lib.autograd import dense_moe_layer, normal
from lib.dispatch_combine import Case, Inputs, make_buffer, make_inputs

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


def layer(rank: int, engine: str, case: Case, inputs: Inputs, how: str, matrices=None, redundant: int = 0, **options):
    """Return y, and the gradients of x, topk_weights and matrices; the loss is y times fixed random numbers.

    matrices: w1 and w2, or these and b1 and b2, of all experts; None: those of ``weights_of``
    redundant: redundant experts of each rank, with copies of any size
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
    sizes = dict(redundant_experts_per_rank=redundant)
    with make_buffer(case, engine, MAX_TOKENS, **sizes) as buffer, around.get(how, contextlib.nullcontext)():
        if redundant:
            buffer.balancer().smallest_copy = 1
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
