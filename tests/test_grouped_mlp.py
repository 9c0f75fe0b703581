"""grouped_mlp: results and gradients of one expert after the other, and gradients that go elsewhere."""

import pytest
import torch
from test_activations import right
from test_errors import assert_refused
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher.moe.activation import SWIGLU
from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp

COUNTS = [5, 0, 7, 1, 0]  # rows of each expert, some without
BEHIND = 3  # rows of no expert, at the end
INSIDE = sum(COUNTS)


def ends_of(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def operands(
    device: str, hidden: int, intermediate: int, act: ep.Activation, counts: list[int], dtype=torch.bfloat16
) -> list[torch.Tensor]:
    """rows, row_weights, w1, w2, b1 and b2; the rows of no expert are no numbers."""
    torch.manual_seed(1)
    num_rows, pair, experts = sum(counts) + BEHIND, act.pair * intermediate, len(counts)
    rows, row_weights = torch.randn(num_rows, hidden), torch.rand(num_rows)
    rows[sum(counts) :] = row_weights[sum(counts) :] = float("nan")
    w1, w2 = torch.randn(experts, pair, hidden) / hidden**0.5, torch.randn(experts, hidden, intermediate)
    others = w1, w2 / intermediate**0.5, torch.randn(experts, pair), torch.randn(experts, hidden)
    return [rows.to(device, dtype), row_weights.to(device), *(t.to(device, dtype) for t in others)]


def loss(out: torch.Tensor, counts: list[int]) -> torch.Tensor:
    factors = torch.randn(sum(counts), out.shape[1], generator=torch.Generator().manual_seed(2)).to(out.device)
    return (out[: sum(counts)].double() * factors).sum()


def exact_layer(given: list[torch.Tensor], act: ep.Activation, counts: list[int]) -> list[torch.Tensor]:
    """The result and all gradients in float64, without the rows of no expert."""
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


def make_inputs(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple:
    """rows, row_weights, ends, and w1 and w2 as a tensor for each expert: all leaves. And what is right."""
    given = operands(device, 16, 24, SWIGLU, COUNTS, dtype)[:4]
    rows, row_weights = (t.clone().requires_grad_() for t in given[:2])
    w1, w2 = ([one.clone().requires_grad_() for one in stack] for stack in given[2:])
    return (rows, row_weights, ends_of(COUNTS, device), w1, w2), exact_layer(given, SWIGLU, COUNTS)


def run(rows, row_weights, ends, w1, w2, **options) -> torch.Tensor:
    (out,) = grouped_mlp([(rows, row_weights, ends)], Parameters(w1, w2), **options)
    return out


@pytest.mark.parametrize("how", ["plain", "keeps less", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_one_expert_after_the_other(device, dtype, how):
    given, exact = make_inputs(device, dtype)
    rows, row_weights, _, w1, w2 = given
    if how == "recomputed":
        out = checkpoint(run, *given, use_reentrant=False)
    else:
        out = run(*given, keep_activated=how == "plain")
    assert out.dtype == dtype and out.shape == (INSIDE + BEHIND, 16)
    loss(out, COUNTS).backward()
    assert [w.grad.dtype for w in (*w1, *w2)] == [dtype] * 10
    found = (
        out[:INSIDE],
        rows.grad[:INSIDE],
        row_weights.grad[:INSIDE],
        *(torch.stack([w.grad for w in stack]) for stack in (w1, w2)),
    )
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-2)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, **close)
    assert not w1[1].grad.any() and w1[1].grad.isfinite().all(), "an expert without rows"


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_weights_go_where_take_grads_writes_them(device, grad_dtype):
    given, (_, grad_rows, _, *exact) = make_inputs(device)
    rows, _, _, w1, w2 = given
    outs = [[torch.full(w.shape, 7.0, dtype=grad_dtype, device=device) for w in of] for of in (w1, w2)]
    later = []
    for accumulate in (False, True):  # what was there is overwritten, then added to
        rows.grad = None
        loss(run(*given, take_grads=later.append), COUNTS).backward()
        assert len(later) == 1, "once in every backward"
        later.pop()(Parameters(*outs), accumulate)
        assert all(w.grad is None for w in (*w1, *w2))
        for got, right_one in zip(outs, exact):
            torch.testing.assert_close(torch.stack(got).double(), right_one * (1 + accumulate), rtol=3e-2, atol=6e-2)
    torch.testing.assert_close(rows.grad[:INSIDE].double(), grad_rows, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("is_anchored", [False, True])
def test_an_anchor_gets_what_take_grads_returns(device, is_anchored):
    """As its gradient; take_grads is called once in every backward, also where only the weights want a gradient."""
    (rows, row_weights, ends, w1, w2), _ = make_inputs(device)
    dummy, writes = torch.ones_like(w2[0]) if is_anchored else None, []

    def take(write):
        writes.append(write)
        return dummy

    for given in ((rows, row_weights), (rows.detach(), row_weights.detach())):
        w2[0].grad = None
        loss(run(*given, ends, w1, w2, take_grads=take, anchor=w2[0] if is_anchored else None), COUNTS).backward()
        assert torch.equal(w2[0].grad, dummy) if is_anchored else w2[0].grad is None
        assert all(weight.grad is None for weight in (*w1, *w2[1:]))
    assert len(writes) == 2 and rows.grad is not None


def test_frozen_weights_get_no_gradient(device):
    given, _ = make_inputs(device)
    rows, row_weights, _, w1, w2 = given
    for weight in (*w1, *w2):
        weight.requires_grad_(False)
    loss(run(*given), COUNTS).backward()
    assert rows.grad is not None and row_weights.grad is not None
    assert all(weight.grad is None for weight in (*w1, *w2))


def test_a_changed_weight_is_found_by_the_backward(device):
    given, _ = make_inputs(device)
    out = loss(run(*given), COUNTS)
    with torch.no_grad():
        given[3][0].add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.backward()


def test_other_dtypes_are_refused(device):
    (*given, w2), _ = make_inputs(device)
    assert_refused("w2", run, *given, [w.float() for w in w2])
