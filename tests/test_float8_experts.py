"""Experts in float8: what is lost beside float64, and that every way of running a layer gives the same bits."""

import dataclasses

import pytest
import torch
from conftest import on_ranks
from test_activations import FAMILIES, right
from test_autograd import dense_moe_layer, normal
from test_dispatch_combine import Case, Inputs, make_buffer, make_inputs
from test_errors import assert_refused
from test_experts import swiglu_experts, uninitialised_memory_is_nan
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher.moe import float8_gemm
from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp
from ep_dispatcher.tools.testing import device_of

COUNTS = [100, 0, 300, 7]
BEHIND = 3  # rows of no expert
GPT_OSS = ep.Activation("silu", alpha=1.702, limit=7.0, offset=1.0)
# Decibels of signal to noise beside float64, of results and of gradients. Measured with random operands: 23.7 to 24.1
# and 22.9 to 24.2 without biases, 26.9 to 27.5 and 24.2 to 27.9 with them. bfloat16 has 47 to 53, and so has the
# gradient of b2, whose rows are not quantised.
LEAST, LEAST_OF_GRADS, MOST = 23, 22, 35


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request) -> str:
    return request.param


def snr(seen: torch.Tensor, exact: torch.Tensor) -> float:
    noise = (seen.double().cpu() - exact.cpu()).square().sum()
    return float(10 * torch.log10(exact.cpu().square().sum() / noise))


def operands(device: str, hidden: int, intermediate: int, act: ep.Activation, counts: list[int]) -> tuple:
    """rows, row_weights, w1, w2, b1 and b2 in bfloat16; the rows of no expert are no numbers."""
    torch.manual_seed(1)
    num_rows, pair, experts = sum(counts) + BEHIND, act.pair * intermediate, len(counts)
    rows, row_weights = torch.randn(num_rows, hidden), torch.rand(num_rows)
    rows[sum(counts) :] = row_weights[sum(counts) :] = float("nan")
    w1, w2 = torch.randn(experts, pair, hidden) / hidden**0.5, torch.randn(experts, hidden, intermediate)
    others = w1, w2 / intermediate**0.5, torch.randn(experts, pair), torch.randn(experts, hidden)
    return rows.bfloat16().to(device), row_weights.to(device), *(t.bfloat16().to(device) for t in others)


def quantized(w1, w2) -> tuple:
    return float8_gemm.quantize_weights(w1), float8_gemm.quantize_weights(w2)


def ends_of(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def loss(out: torch.Tensor, counts: list[int]) -> torch.Tensor:
    wanted = torch.randn(sum(counts), out.shape[1], generator=torch.Generator().manual_seed(2)).to(out.device)
    return (out[: sum(counts)].double() * wanted).sum()


def exact_layer(given: tuple, act: ep.Activation, counts: list[int]) -> list[torch.Tensor]:
    """The result and all gradients in float64."""
    end, parts, begin = sum(counts), [], 0
    leaves = [t.double().requires_grad_() for t in (given[0][:end], given[1][:end], *given[2:])]
    rows, row_weights, w1, w2, *biases = leaves
    for e, count in enumerate(counts):
        group = slice(begin, begin + count)
        hidden = rows[group] @ w1[e].t() + (biases[0][e] if biases else 0)
        out = right(hidden, act) * row_weights[group, None] @ w2[e].t()
        parts.append(out + (row_weights[group, None] * biases[1][e] if biases else 0))
        begin += count
    out = torch.cat(parts)
    loss(out, counts).backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def float8_layer(given: tuple, act: ep.Activation, counts: list[int], **options) -> list[torch.Tensor]:
    """The same by grouped_mlp, without the rows of no expert."""
    end = sum(counts)
    rows, row_weights, *matrices = leaves = [t.clone().requires_grad_() for t in given]
    ends = ends_of(counts, rows.device)
    options |= dict(activation=act, float8=quantized(*matrices[:2]))
    (out,) = grouped_mlp([(rows, row_weights, ends)], Parameters(*matrices), **options)
    loss(out, counts).backward()
    return [out[:end].detach(), rows.grad[:end], row_weights.grad[:end], *(leaf.grad for leaf in leaves[2:])]


@pytest.mark.parametrize(
    "act, hidden, intermediate, biased, counts",
    [
        (FAMILIES["swiglu"], 512, 256, False, COUNTS),
        (GPT_OSS, 2880, 240, True, [60, 0, 9]),
        (FAMILIES["squared_relu"], 208, 144, True, COUNTS),
    ],
    ids=["swiglu", "gpt-oss", "squared_relu"],
)
def test_what_is_lost(device, act, hidden, intermediate, biased, counts):
    given = operands(device, hidden, intermediate, act, counts)[: 6 if biased else 4]
    exact = exact_layer(given, act, counts)
    seen = float8_layer(given, act, counts)
    assert [t.dtype for t in seen] == [torch.bfloat16, torch.bfloat16, torch.float32] + [torch.bfloat16] * len(
        given[2:]
    )
    lost = [snr(*pair) for pair in zip(seen, exact)]
    assert lost[0] > LEAST and all(db > LEAST_OF_GRADS for db in lost), lost
    assert all(db < MOST for db in lost[:6]), ("float8 was not used", lost)
    if 0 in counts:
        assert not any(grad[counts.index(0)].any() for grad in seen[3:])
    again = float8_layer(given, act, counts, keep_activated=False)
    assert all(map(torch.equal, seen, again))


def test_no_rows(device):
    given = [t[:0] if i < 2 else t for i, t in enumerate(operands(device, 64, 48, FAMILIES["swiglu"], [0, 0]))]
    out, *grads = float8_layer(tuple(given), FAMILIES["swiglu"], [0, 0])
    assert out.shape == (0, 64)
    assert [t.shape for t in grads] == [t.shape for t in given] and not any(t.any() for t in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_sets_of_rows_quantised_or_not(device, dtype):
    """A pair with an anchor is the same as the rows; gradients of weights are added where take_grads says."""
    act = FAMILIES["swiglu"]
    rows, row_weights, w1, w2, *_ = given = operands(device, 256, 80, act, COUNTS)
    wanted = float8_layer(given[:4], act, COUNTS)
    ends = ends_of(COUNTS, device)
    pair = float8_gemm.quantize_rows(rows, ends)
    anchor = torch.zeros((), dtype=torch.bfloat16, device=device).expand(rows.shape).requires_grad_()
    sets = [
        (rows.clone().requires_grad_(), row_weights.clone().requires_grad_(), ends),
        (ep.QuantizedRows(*pair, anchor), row_weights.clone().requires_grad_(), ends),
    ]
    sums = [torch.ones(w.shape, dtype=dtype, device=device) for w in (*w1, *w2)]
    writes = []
    both = grouped_mlp(
        sets, Parameters(list(w1), list(w2)), float8=quantized(w1, w2), take_grads=writes.append, keep_activated=False
    )
    (loss(both[0], COUNTS) + loss(both[1], COUNTS)).backward()
    (write,) = writes
    write(Parameters(sums[: len(COUNTS)], sums[len(COUNTS) :]), True)
    end = sum(COUNTS)
    for out, leaf, (_, its_row_weights, _) in zip(both, (sets[0][0], anchor), sets):
        assert torch.equal(out[:end], wanted[0])
        assert torch.equal(leaf.grad[:end], wanted[1]) and torch.equal(its_row_weights.grad[:end], wanted[2])
    close = dict(rtol=1e-6, atol=2**-6) if dtype == torch.float32 else dict(rtol=2**-7, atol=2**-6)
    for total, grad in zip(sums, (*wanted[3], *wanted[4])):
        torch.testing.assert_close(total.float(), 1 + 2 * grad.float(), **(close | {"rtol": 2**-6}))


def test_wrong_arguments_of_grouped_mlp(device):
    rows, row_weights, w1, w2, *_ = operands(device, 64, 48, FAMILIES["swiglu"], COUNTS)
    ends, float8 = ends_of(COUNTS, device), quantized(w1, w2)
    pair = float8_gemm.quantize_rows(rows, ends)
    for argument, given, options in (
        ("sets", pair, {}),
        ("sets", (pair.rows, pair.scales.mT.contiguous().mT.expand(-1, 2)), dict(float8=float8)),
        ("sets", (pair.rows[:, :32], pair.scales), dict(float8=float8)),
        ("sets", (rows, pair.scales), dict(float8=float8)),
        ("float8", rows.float(), dict(float8=float8)),
        ("float8", rows, dict(float8=float8[::-1])),
        ("float8", rows, dict(float8=(float8[0], float8_gemm.quantize_weights(w2[:1])))),
        ("w1", pair, dict(float8=float8, parameters=Parameters(w1.float(), w2))),
    ):
        options.setdefault("parameters", Parameters(w1, w2))
        assert_refused(argument, grouped_mlp, [(given, row_weights, ends)], **options)


# ---- the whole layer -------------------------------------------------------------------------------------------------

QUANTIZE = "e4m3_1x128_pow2"
INTERMEDIATE, MAX_TOKENS, MAX_RECV_ROWS = 48, 64, 200


def make_case(num_ranks: int, ranks_per_node: int) -> tuple[Case, Inputs]:
    case = Case(num_ranks, ranks_per_node, torch.bfloat16, num_topk=3, experts_per_rank=3, hidden=144, tokens="uneven")
    inputs = make_inputs(dataclasses.replace(case, routing="masked"))
    inputs.x[:] = [normal(x.shape, 20 + rank, torch.bfloat16) for rank, x in enumerate(inputs.x)]
    return case, inputs


def weights_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    w1 = normal((case.num_experts, 2 * INTERMEDIATE, case.hidden), 7) / case.hidden**0.5
    return w1.bfloat16(), (normal((case.num_experts, case.hidden, INTERMEDIATE), 8) / INTERMEDIATE**0.5).bfloat16()


def layer(rank: int, engine: str, case: Case, inputs: Inputs, how: str) -> tuple:
    """Return y, and the gradients of x, topk_weights, w1 and w2."""
    device, first = device_of(engine, rank), rank * case.experts_per_rank
    own = [w[first : first + case.experts_per_rank] for w in weights_of(case)]
    leaves = [t.to(device).requires_grad_() for t in (inputs.x[rank], inputs.topk_weights[rank], *own)]
    topk_idx = inputs.topk_idx[rank].to(device)
    options: dict = {"max_recv_rows": MAX_RECV_ROWS} if how == "fixed rows" else {}
    options |= {"keep_activated": False} if how == "keeps less" else {}
    options |= {"num_parts": 2, "overlap": how != "two parts in turn"} if how.startswith("two parts") else {}

    def forward(x, topk_weights, w1, w2):
        return ep.moe_mlp(buffer, x, topk_idx, topk_weights, w1, w2, quantize=QUANTIZE, **options)

    with make_buffer(case, engine, MAX_TOKENS) as buffer, uninitialised_memory_is_nan():
        y = checkpoint(forward, *leaves, use_reentrant=False) if how == "recomputed" else forward(*leaves)
        (y * normal(y.shape, 50 + rank).to(device)).sum().backward()
    return y.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("how", ["plain", "two parts"])
def test_a_layer_is_the_dense_layer_nearly(pools, engine, how):
    case, inputs = make_case(2, 2)
    results, x_grads, weight_grads, matrices = dense_moe_layer(case, inputs, weights_of(case), swiglu_experts)
    ranks = pools(2).run(layer, engine, case, inputs, how)
    for rank, seen in enumerate(ranks):
        own = slice(rank * case.experts_per_rank, (rank + 1) * case.experts_per_rank)
        exact = results[rank], x_grads[rank], weight_grads[rank], *(grad[own] for grad in matrices)
        lost = [snr(*pair) for pair in zip(seen, exact, strict=True) if pair[0].numel()]  # a rank has no tokens
        assert all(LEAST_OF_GRADS < db < MOST for db in lost), lost
    assert snr(ranks[0][0], results[0]) > LEAST


@on_ranks(2)
def test_every_way_gives_the_same_bits(rank, engine):
    case, inputs = make_case(2, 1)
    plain, in_parts = (layer(rank, engine, case, inputs, how) for how in ("plain", "two parts"))
    for how in ("plain", "fixed rows", "recomputed", "keeps less"):
        assert all(map(torch.equal, plain, layer(rank, engine, case, inputs, how))), how
    assert all(map(torch.equal, in_parts, layer(rank, engine, case, inputs, "two parts in turn")))
    assert torch.equal(plain[0], in_parts[0])


@on_ranks(1)
def test_the_module(rank, engine):
    """ep.MoELayer passes it on."""
    case, inputs = make_case(1, 1)
    device = device_of(engine, rank)
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        torch.manual_seed(3)
        module = ep.MoELayer(buffer, INTERMEDIATE, device=device, dtype=torch.bfloat16, quantize=QUANTIZE)
        x = inputs.x[rank].to(device)
        y = module(x)
        w1, w2 = (p.to_local() for p in module.experts.parameters())
        assert torch.equal(y, ep.moe_mlp(buffer, x, *module.router(x), w1, w2, quantize=QUANTIZE))
        assert not torch.equal(y, ep.moe_mlp(buffer, x, *module.router(x), w1, w2))


@on_ranks(1)
def test_wrong_arguments_are_refused_before_anything_is_sent(rank, engine):
    case, inputs = make_case(1, 1)
    device = device_of(engine, rank)
    x, idx, weights, w1, w2 = (
        t.to(device) for t in (inputs.x[0], inputs.topk_idx[0], inputs.topk_weights[0], *weights_of(case))
    )
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        epoch = buffer._engine._c.epoch if engine == "cpu" else 0
        for wrong in ("e5m2", True, 1):
            assert_refused("quantize", ep.moe_mlp, buffer, x, idx, weights, w1, w2, quantize=wrong)
        if engine == "cuda":
            narrow = w1[:, :80].contiguous(), w2[:, :, :40].contiguous()  # 40 is no multiple of 16
            assert_refused("quantize", ep.moe_mlp, buffer, x, idx, weights, *narrow, quantize=QUANTIZE)

        def forward(x):
            return ep.moe_mlp(buffer, x, idx, weights, w1, w2, quantize=QUANTIZE, max_recv_rows=MAX_RECV_ROWS)

        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="quantize: given 'e4m3_1x128"):
            torch.compile(forward, backend="aot_eager", fullgraph=True)(x)
        if engine == "cpu":
            assert buffer._engine._c.epoch == epoch, "something was sent"
        forward(x)
    with make_buffer(dataclasses.replace(case, dtype=torch.float32), engine, MAX_TOKENS) as buffer:
        exact = (t.float() for t in (x, weights, w1, w2))
        x, weights, w1, w2 = exact
        assert_refused("quantize", ep.moe_mlp, buffer, x, idx, weights, w1, w2, quantize=QUANTIZE)
