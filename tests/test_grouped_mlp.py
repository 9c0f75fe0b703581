"""grouped_mlp: results and gradients of one expert after the other, and gradients that go elsewhere."""

import weakref

import pytest
import torch
from lib.errors import assert_refused
from lib.grouped_mlp import BEHIND, ends_of, exact_layer, loss, operands
from torch.utils.checkpoint import checkpoint

from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.activation import SWIGLU
from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp

COUNTS = [5, 0, 7, 1, 0]  # rows of each expert, some without
INSIDE = sum(COUNTS)


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


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_backward_frees_what_nobody_needs_next(device, monkeypatch, keeps, is_late):
    """Gradients of rows, and the rows of the first GEMM in float8, take more memory than anything before them."""
    results, alive, later = [], {}, []

    def noting(name: str):
        usual = getattr(grouped_gemm, name)

        def call(*given, **options):
            alive.setdefault(name, []).append([reference() is not None for reference in results])
            result = usual(*given, **options)
            tensor = result.activated if name == "activate_grad" else result
            if tensor is not None:
                results.append(weakref.ref(tensor))
            return result

        monkeypatch.setattr(grouped_gemm, name, call)

    given, _ = make_inputs(device)
    *_, w1, w2 = given
    outs = Parameters(*([torch.zeros_like(w) for w in of] for of in (w1, w2)))
    take = later.append if is_late else lambda write: write(outs, False)
    out = loss(run(*given, keep_activated=keeps, take_grads=take), COUNTS)
    for name in ("linear_grad_rows", "activate_grad", "linear_grad_weights"):
        noting(name)
    out.backward()
    for write in later:
        write(outs, False)
    gradient_of_activated, activated_again = [False], [] if keeps else [True]
    assert alive["linear_grad_rows"] == [[], gradient_of_activated + activated_again]
    of_w2, of_w1 = alive["linear_grad_weights"]
    assert of_w2[: 1 + len(activated_again)] == gradient_of_activated + activated_again
    assert not any(of_w1[: 1 + len(activated_again)])


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


def test_second_derivatives_are_refused(device):
    given, _ = make_inputs(device)
    rows, *_ = given
    out = run(*given)
    (grad,) = torch.autograd.grad(out.float().square().sum(), [rows], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
