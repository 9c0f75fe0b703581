"""Experts in float8: what is lost beside float64, and that every way of running a layer gives the same bits."""

import pytest
import torch
from conftest import on_ranks
from lib.activations import FAMILIES
from lib.dispatch_combine import Case, Inputs, make_buffer
from lib.errors import assert_refused
from lib.experts import (
    INTERMEDIATE,
    MAX_RECV_ROWS,
    MAX_TOKENS,
    QUANTIZE,
    dense_results,
    given_to,
    layer,
    make_case,
    uninitialised_memory_is_nan,
    weights_of,
)
from lib.faults import operations_so_far
from lib.grouped_mlp import ends_of, exact_layer, loss, operands

import ep_dispatcher as ep
from ep_dispatcher.moe import float8_gemm
from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp
from ep_dispatcher.tools.testing import device_of

COUNTS = [100, 0, 300, 7]
# Decibels of signal to noise beside float64, of results and of gradients. Measured with random operands: 23.7 to 24.1
# and 22.9 to 24.2 without biases, 26.9 to 27.5 and 24.2 to 27.9 with them. bfloat16 has 47 to 53, and so has the
# gradient of b2, whose rows are not quantized.
LEAST, LEAST_OF_GRADS, MOST = 23, 22, 35


def snr(seen: torch.Tensor, exact: torch.Tensor) -> float:
    noise = (seen.double().cpu() - exact.cpu()).square().sum()
    return float(10 * torch.log10(exact.cpu().square().sum() / noise))


def quantized(w1, w2) -> tuple:
    return float8_gemm.quantize_weights(w1), float8_gemm.quantize_weights(w2)


def float8_layer(given: list, act: ep.Activation, counts: list[int], **options) -> list[torch.Tensor]:
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
        (FAMILIES["gpt-oss"]._replace(limit=7.0), 2880, 240, True, [60, 0, 9]),
        (FAMILIES["squared_relu"], 208, 144, True, COUNTS),
    ],
    ids=["swiglu", "gpt-oss", "squared_relu"],
)
def test_what_is_lost(device, act, hidden, intermediate, biased, counts):
    given = operands(device, hidden, intermediate, act, counts)[: 6 if biased else 4]
    exact = exact_layer(given, act, counts)
    seen = float8_layer(given, act, counts)
    assert [t.dtype for t in seen] == [torch.bfloat16] * 2 + [torch.float32] + [torch.bfloat16] * len(given[2:])
    lost = [snr(*pair) for pair in zip(seen, exact)]
    assert lost[0] > LEAST and all(db > LEAST_OF_GRADS for db in lost), lost
    assert all(db < MOST for db in lost[:6]), ("float8 was not used", lost)
    if 0 in counts:
        assert not any(grad[counts.index(0)].any() for grad in seen[3:])
    again = float8_layer(given, act, counts, keep_activated=False)
    assert all(map(torch.equal, seen, again))


def test_no_rows(device):
    given = [t[:0] if i < 2 else t for i, t in enumerate(operands(device, 64, 48, FAMILIES["swiglu"], [0, 0]))]
    out, *grads = float8_layer(given, FAMILIES["swiglu"], [0, 0])
    assert out.shape == (0, 64)
    assert [t.shape for t in grads] == [t.shape for t in given] and not any(t.any() for t in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_sets_of_rows_quantized_or_not(device, dtype):
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


def case_of(num_ranks: int, ranks_per_node: int) -> tuple[Case, Inputs]:
    return make_case(num_ranks, ranks_per_node, torch.bfloat16, hidden=144)


def float8_way(rank: int, engine: str, case: Case, inputs: Inputs, how: str, **options) -> tuple:
    """What test_experts.layer returns."""
    with uninitialised_memory_is_nan():
        return layer(rank, engine, case, inputs, how, quantize=QUANTIZE, **options)


@pytest.mark.parametrize("how", ["plain", "two parts"])
def test_a_layer_is_the_dense_layer_nearly(pools, engine, how):
    case, inputs = case_of(2, 2)
    ranks = pools(2).run(float8_way, engine, case, inputs, how)
    lost = []
    for seen, exact in zip(ranks, dense_results(case, inputs, weights_of(case)), strict=True):
        lost.append([snr(*pair) for pair in zip(seen, exact, strict=True) if pair[0].numel()])  # a rank has no tokens
        assert all(LEAST_OF_GRADS < db < MOST for db in lost[-1]), lost
    assert lost[0][0] > LEAST


@on_ranks(2)
def test_every_way_gives_the_same_bits(rank, engine):
    case, inputs = case_of(2, 1)
    plain, in_parts = (float8_way(rank, engine, case, inputs, how) for how in ("plain", "two parts"))
    for how in ("plain", "fixed rows", "recomputed", "keeps less"):
        assert all(map(torch.equal, plain, float8_way(rank, engine, case, inputs, how))), how
    assert all(map(torch.equal, in_parts, float8_way(rank, engine, case, inputs, "two parts", overlap=False)))
    assert torch.equal(plain[0], in_parts[0])


@on_ranks(1)
def test_the_module(rank, engine):
    """ep.MoELayer passes it on."""
    case, inputs = case_of(1, 1)
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
def test_what_cannot_be_quantized_is_refused_before_anything_is_sent(rank, engine):
    """test_experts has the arguments that are wrong everywhere."""
    case, inputs = case_of(1, 1)
    x, idx, weights, w1, w2 = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        epoch = operations_so_far(buffer)
        if engine == "cuda":
            narrow = w1[:, :48].contiguous(), w2[:, :, :24].contiguous()  # 24 is no multiple of 16
            assert_refused("quantize", ep.moe_mlp, buffer, x, idx, weights, *narrow, quantize=QUANTIZE)

        def forward(x):
            return ep.moe_mlp(buffer, x, idx, weights, w1, w2, quantize=QUANTIZE, max_recv_rows=MAX_RECV_ROWS)

        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="quantize is 'e4m3_1x128"):
            torch.compile(forward, backend="aot_eager", fullgraph=True)(x)
        assert operations_so_far(buffer) == epoch, "something was sent"
        forward(x)
