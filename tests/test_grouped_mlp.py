"""grouped_mlp: results and gradients of one expert after the other, and gradients that go elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from test_errors import assert_refused
from torch.utils.checkpoint import checkpoint

from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp

HIDDEN, INTERMEDIATE = 16, 24
COUNTS = [5, 0, 7, 1, 0]  # rows of each expert, some without
BEHIND = 3  # rows of no expert, at the end


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request) -> str:
    return request.param


def make_inputs(device: str, dtype: torch.dtype) -> tuple:
    """rows, row_weights, w1, w2 as leaves, and ends; the rows of no expert are no numbers."""
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype) / shape[-1] ** 0.5

    num_rows = sum(COUNTS) + BEHIND
    rows, row_weights = leaf(num_rows, HIDDEN), leaf(num_rows).float()
    rows[-BEHIND:] = row_weights[-BEHIND:] = float("nan")
    w1 = [leaf(2 * INTERMEDIATE, HIDDEN).requires_grad_() for _ in COUNTS]
    w2 = [leaf(HIDDEN, INTERMEDIATE).requires_grad_() for _ in COUNTS]
    ends = torch.tensor(COUNTS, device=device).cumsum(0, dtype=torch.int32)
    return rows.requires_grad_(), row_weights.requires_grad_(), ends, w1, w2


def run(rows, row_weights, ends, w1, w2, **options) -> torch.Tensor:
    (out,) = grouped_mlp([(rows, row_weights, ends)], Parameters(w1, w2), **options)
    return out


def one_after_the_other(rows, row_weights, ends, w1, w2) -> torch.Tensor:
    """In float32, for the rows that have an expert."""
    parts, begin = [], 0
    for end, first, second in zip(ends.tolist(), w1, w2):
        gate, up = (rows[begin:end].float() @ first.float().t()).chunk(2, dim=1)
        parts.append((F.silu(gate) * up * row_weights[begin:end, None]) @ second.float().t())
        begin = end
    return torch.cat(parts)


def loss(out: torch.Tensor) -> torch.Tensor:
    out = out[: sum(COUNTS)].float()
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.device)).sum()


def gradients(inputs: tuple) -> list[torch.Tensor]:
    rows, row_weights, _, w1, w2 = inputs
    inside = sum(COUNTS)
    return [rows.grad[:inside], row_weights.grad[:inside], *(w.grad for w in (*w1, *w2))]


def assert_close(got, wanted, dtype: torch.dtype) -> None:
    assert len(got) == len(wanted)
    close = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-2)
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other, check_dtype=False, **close)


@pytest.mark.parametrize("how", ["plain", "keeps less", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_one_expert_after_the_other(device, dtype, how):
    mine, other = make_inputs(device, dtype), make_inputs(device, dtype)
    if how == "recomputed":
        out = checkpoint(run, *mine, use_reentrant=False)
    else:
        out = run(*mine, keep_activated=how == "plain")
    wanted = one_after_the_other(*other)
    assert out.dtype == dtype and out.shape == (sum(COUNTS) + BEHIND, HIDDEN)
    assert_close([out[: sum(COUNTS)]], [wanted], dtype)
    loss(out).backward()
    loss(wanted).backward()
    assert [w.grad.dtype for w in (*mine[3], *mine[4])] == [dtype] * 10
    assert_close(gradients(mine), gradients(other), dtype)
    assert not mine[3][1].grad.any() and mine[3][1].grad.isfinite().all(), "an expert without rows"


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_weights_go_where_take_grads_writes_them(device, grad_dtype):
    mine, other = make_inputs(device, torch.bfloat16), make_inputs(device, torch.bfloat16)
    rows, row_weights, ends, w1, w2 = mine
    outs = [torch.full(w.shape, 7.0, dtype=grad_dtype, device=device) for w in (*w1, *w2)]
    grad_w1, grad_w2 = outs[: len(w1)], outs[len(w1) :]
    later = []
    for accumulate in (False, True):  # what was there is overwritten, then added to
        out = run(*mine, take_grads=later.append)
        loss(out).backward()
        assert len(later) == 1, "once in every backward"
        later.pop()(Parameters(grad_w1, grad_w2), accumulate)
        loss(one_after_the_other(*other)).backward()
        assert all(w.grad is None for w in (*w1, *w2))
        close = dict(rtol=3e-2, atol=6e-2)
        for got, weight in zip(outs, (*other[3], *other[4])):
            torch.testing.assert_close(got, weight.grad, check_dtype=False, **close)
    assert_close([rows.grad[: sum(COUNTS)]], [other[0].grad[: sum(COUNTS)]], torch.bfloat16)


def test_take_grads_is_called_where_only_weights_want_a_gradient(device):
    rows, row_weights, ends, w1, w2 = make_inputs(device, torch.bfloat16)
    calls = []
    out = run(rows.detach(), row_weights.detach(), ends, w1, w2, take_grads=calls.append)
    loss(out).backward()
    assert len(calls) == 1


def test_an_anchor_gets_what_take_grads_returns(device):
    """As its gradient, once in every backward, also where only the weights want one."""
    rows, row_weights, ends, w1, w2 = make_inputs(device, torch.bfloat16)
    dummy, writes = torch.ones_like(w2[0]), []

    def take(write):
        writes.append(write)
        return dummy

    for given in ((rows, row_weights), (rows.detach(), row_weights.detach())):
        w2[0].grad = None
        out = run(*given, ends, w1, w2, take_grads=take, anchor=w2[0])
        loss(out).backward()
        assert torch.equal(w2[0].grad, dummy)
        assert all(weight.grad is None for weight in (*w1, *w2[1:]))
    assert len(writes) == 2 and rows.grad is not None


def test_frozen_weights_get_no_gradient(device):
    rows, row_weights, ends, w1, w2 = mine = make_inputs(device, torch.bfloat16)
    for weight in (*w1, *w2):
        weight.requires_grad_(False)
    loss(run(*mine)).backward()
    assert rows.grad is not None and row_weights.grad is not None
    assert all(weight.grad is None for weight in (*w1, *w2))


def test_a_changed_weight_is_found_by_the_backward(device):
    *_, w1, _ = mine = make_inputs(device, torch.bfloat16)
    out = loss(run(*mine))
    with torch.no_grad():
        w1[0].add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.backward()


def test_other_dtypes_are_refused(device):
    rows, row_weights, ends, w1, w2 = make_inputs(device, torch.bfloat16)
    assert_refused("w2", run, rows, row_weights, ends, w1, [w.float() for w in w2])
