"""Activations and biases of experts, against autograd in float64."""

from functools import partial

import pytest
import torch
from conftest import exhaustive
from lib.activations import FAMILIES, right
from lib.autograd import normal
from lib.dispatch_combine import Case
from lib.experts import CLOSE, INTERMEDIATE, dense_results, layer, make_case, weights_of
from lib.grouped_gemm import COUNTS, close, groups, rows_of

import ep_dispatcher as ep
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.activation import NAMED
from ep_dispatcher.tools.testing import device_of


@pytest.fixture(params=COUNTS)
def ends(request, engine) -> torch.Tensor:
    return torch.tensor(COUNTS[request.param]).cumsum(0).int().to(device_of(engine, 0))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_activation_and_its_gradients(ends, dtype, name):
    torch.manual_seed(3)
    act, columns, end = FAMILIES[name], 1100, int(ends[-1])  # more than a kernel takes at once
    hidden, grad = rows_of(ends, act.pair * columns, dtype), rows_of(ends, columns, dtype)
    weights = torch.rand(hidden.shape[0], device=ends.device)
    leaves = hidden[:end].double().requires_grad_(), weights[:end].double().requires_grad_()
    result = right(leaves[0], act) * leaves[1][:, None]
    result.backward(grad[:end].double())
    close(grouped_gemm.activate(hidden, weights, ends, act)[:end], result.detach(), dtype)
    grad_hidden, grad_weights, activated = grouped_gemm.activate_grad(grad, hidden, weights, ends, act)
    assert activated is None
    assert grad_hidden.dtype == dtype and grad_weights.dtype == torch.float32
    close(grad_hidden[:end], leaves[0].grad, dtype)
    close(grad_weights[:end], leaves[1].grad, torch.float32 if dtype == torch.float32 else torch.float16)
    assert not grad_weights[end:].any()


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_take_an_activation_as_plain_constants(monkeypatch, name):
    """Triton 3.8 makes a plain tuple of a NamedTuple, and its hooks write constants as JSON."""
    pytest.importorskip("triton")
    from ep_dispatcher.moe import activation_kernels, float8_gemm_kernels

    taken = []
    for module, kernel in (
        (activation_kernels, "activate"),
        (activation_kernels, "activate_grad"),
        (float8_gemm_kernels, "quantize"),
    ):
        monkeypatch.setattr(module, f"_launch_{kernel}", lambda grid, configuration, *_: taken.append(configuration))
    act, ends = FAMILIES[name], torch.tensor([2], dtype=torch.int32)
    grad, hidden, weights = torch.ones(2, 128), torch.ones(2, 128 * act.pair), torch.ones(2)
    activation_kernels.activate(hidden, weights, ends, act)
    activation_kernels.activate_grad(grad, hidden, weights, ends, act)
    for activation in (None, act):
        float8_gemm_kernels.quantize(hidden, ends, ep.QuantizedRows(grad, weights[:, None]), weights, activation)
    plain = (bool, int, float, str, type(None))
    assert len(taken) == 4 and all(type(value) in plain for one in taken for value in one.constants.values())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_row_gets_the_bias_of_its_expert(ends, dtype, apart, weighted):
    torch.manual_seed(5)
    n, k, experts, act = 264, 72, len(ends), NAMED["swiglu"]
    weights = (torch.randn(experts, n, k) / k**0.5).to(ends.device, dtype)
    bias = torch.randn(experts, n).to(ends.device, dtype)
    given = [one.clone() for one in bias] if apart else bias
    rows, grad = rows_of(ends, k, dtype), rows_of(ends, n, dtype)
    row_weights = torch.rand(rows.shape[0], device=ends.device)
    out = grouped_gemm.linear(rows, weights, ends, given, row_weights if weighted else None)
    factors = row_weights.double()[:, None] if weighted else torch.ones_like(row_weights.double()[:, None])
    sums = torch.ones(experts, n, dtype=torch.float32, device=ends.device)
    fresh = [torch.full_like(one, 7.0) for one in bias]
    sets = [(grad, ends, row_weights if weighted else None)]
    grouped_gemm.linear_grad_bias([*sets, *sets], sums, accumulate=True)
    grouped_gemm.linear_grad_bias(sets, fresh, accumulate=False)
    for e, group in enumerate(groups(ends)):
        close(out[group], rows[group].double() @ weights[e].double().t() + factors[group] * bias[e].double(), dtype)
        total = (factors[group] * grad[group].double()).sum(0)
        close(sums[e], 1 + 2 * total, torch.float32)
        close(fresh[e], total, dtype)
    hidden, grad_activated = rows_of(ends, 2 * 40, dtype), rows_of(ends, 40, dtype)
    without = grouped_gemm.activate_grad(grad_activated, hidden, row_weights, ends, act)
    grads = grouped_gemm.activate_grad(grad_activated, hidden, row_weights, ends, act, grad, given)
    end = int(ends[-1])
    assert torch.equal(grads[0][:end], without[0][:end])
    for e, group in enumerate(groups(ends)):
        close(grads[1][group], without[1][group].double() + grad[group].double() @ bias[e].double(), torch.float32)
    assert not grads[1][end:].any()


def matrices_of(case: Case, pair: int) -> list[torch.Tensor]:
    """w1, w2, b1 and b2 of all experts."""
    w1, w2 = weights_of(case)
    b1, b2 = normal((case.num_experts, pair * INTERMEDIATE), 9), normal((case.num_experts, case.hidden), 10)
    return [w1[:, : pair * INTERMEDIATE], w2, b1.to(case.dtype), b2.to(case.dtype)]


HOWS = ("plain", "fixed rows", "two parts", "compiled")
LAYERS = [(name, how) for name in FAMILIES for how in HOWS]


@pytest.mark.parametrize(
    "name, how", [one if "plain" in one or "gpt-oss" in one else exhaustive(*one) for one in LAYERS]
)
def test_a_layer_with_biases_is_the_dense_layer(pools, engine, name, how):
    dtype = torch.bfloat16 if how == "compiled" else torch.float32
    (case, inputs), act = make_case(2, 2, dtype), FAMILIES[name]

    def experts(x, w1, w2, b1, b2):
        hidden = torch.einsum("th,eih->tei", x, w1) + b1
        return torch.einsum("tei,ehi->teh", right(hidden, act), w2) + b2

    matrices = matrices_of(case, act.pair)
    run = partial(layer, activation=name if name in NAMED else act)
    ranks = pools(2).run(run, engine, case, inputs, how, matrices)
    for seen, expected in zip(ranks, dense_results(case, inputs, matrices, experts), strict=True):
        for value, wanted in zip(seen, expected, strict=True):
            if dtype == torch.bfloat16:  # rounding moves some values beyond a limit, where the gradient is another
                assert (value.double() - wanted).norm() <= 0.12 * wanted.norm()
            else:
                torch.testing.assert_close(value, wanted, check_dtype=False, **CLOSE[dtype])
