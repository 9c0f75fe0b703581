"""torch.autocast casts rows and the experts' matrices as it casts those of PyTorch's matrix products."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from conftest import exhaustive, on_ranks
from lib.dispatch_combine import make_buffer
from lib.errors import assert_refused
from lib.experts import MAX_RECV_ROWS, MAX_TOKENS, given_to, layer, make_case, weights_of

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of

COMPILE_S = 300  # of a run that compiles, on a busy machine


def autocast(engine: str, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(engine, dtype)  # engines have the names of their devices


def operations(cast, buffer: ep.Buffer, x, idx, weights, w1, w2) -> torch.Tensor:
    """Steps around a norm and a softmax, whose results autocast keeps in float32."""
    out = ep.dispatch(buffer, cast(F.layer_norm(x, x.shape[1:])), idx, weights, max_recv_rows=MAX_RECV_ROWS)
    return ep.combine(buffer, cast(out.x.float().softmax(1) * out.topk_weights[:, None]), out.handle)


def moe_mlp(cast, buffer: ep.Buffer, x, idx, weights, w1, w2) -> torch.Tensor:
    x = cast(F.layer_norm(x, x.shape[1:]))
    return ep.moe_mlp(buffer, x, idx, weights, cast(w1), cast(w2), max_recv_rows=MAX_RECV_ROWS)


@pytest.mark.parametrize(
    "function,dtype,compiled",
    [
        (operations, torch.bfloat16, False),
        (operations, torch.bfloat16, True),
        (moe_mlp, torch.bfloat16, False),
        (moe_mlp, torch.bfloat16, True),
        exhaustive(operations, torch.float16, True),
        (moe_mlp, torch.float16, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@on_ranks(2, timeout_s=COMPILE_S)
def test_it_casts_as_a_caller_would(rank, engine, function, dtype, compiled):
    """Bits of results and gradients, and the caller's own dtype of each gradient."""
    case, inputs = make_case(2, 2, dtype)
    x, idx, *others = given_to(rank, engine, case, inputs)
    given = [t.float() for t in (x, *others)]

    def run(call, cast, around) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in given]
        with around:
            y = call(cast, buffer, leaves[0], idx, *leaves[1:])
        y.float().square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        torch._dynamo.reset()
        call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
        by_hand = run(call, lambda t: t.to(case.dtype), contextlib.nullcontext())
        seen = run(call, lambda t: t, autocast(engine, case.dtype))
    assert [t.dtype for t in seen] == [case.dtype] + [torch.float32] * (len(by_hand) - 1)
    assert len(seen) == len(by_hand) and all(map(torch.equal, seen, by_hand))
    assert rank == 1 or all(t.any() for t in seen)


@on_ranks(1)
def test_operations_without_gradients_cast_too(rank, engine):
    case, inputs = make_case(1, 1, torch.bfloat16)
    device = device_of(engine, rank)
    exact = inputs.x[0].float().to(device) + 1e-4
    rounded, idx = exact.bfloat16(), inputs.topk_idx[0].to(device)
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        expected = buffer.dispatch(rounded, idx)
        decoded = buffer.dispatch(rounded, idx, layout="decode")
        weights = inputs.topk_weights[0].to(device)
        sums = buffer.combine(expected.x, expected.handle).x
        weighted = buffer.combine(decoded.x, decoded.handle, weights=weights).x
        with autocast(engine, torch.bfloat16):
            out, decode = buffer.dispatch(exact, idx), buffer.dispatch(exact, idx, layout="decode")
            assert torch.equal(out.x, expected.x)
            assert torch.equal(buffer.combine(out.x.float(), out.handle).x, sums)
            assert torch.equal(buffer.combine(decode.x.float(), decode.handle, weights=weights).x, weighted)


@on_ranks(1)
def test_what_it_does_not_cast_is_refused(rank, engine):
    """Nothing is cast to a dtype that nobody asked for, and the error says what autocast does."""
    device = device_of(engine, rank)
    case, inputs = make_case(1, 1, torch.bfloat16)
    x, idx, weights = (t[0].to(device) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights))
    w1, w2 = (w.to(device) for w in weights_of(case))
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        for other in (x.float(), x.half()):
            outside = assert_refused("x", ep.dispatch, buffer, other, idx)
            with autocast(engine, torch.float16):
                assert assert_refused("x", ep.dispatch, buffer, other, idx).startswith(f"{outside}; torch.autocast")
                assert "torch.autocast" in assert_refused("x", ep.moe_mlp, buffer, other, idx, weights, w1, w2)
        with autocast(engine, torch.bfloat16):
            assert_refused("x", ep.dispatch, buffer, x.double(), idx)
            assert_refused("topk_weights", ep.dispatch, buffer, x, idx, weights.bfloat16())
            assert_refused("topk_weights", ep.moe_mlp, buffer, x, idx, weights.bfloat16(), w1, w2)
        ep.dispatch(buffer, x, idx)


@on_ranks(1)
def test_a_layer_of_another_dtype_is_left_alone(rank, engine):
    """The buffer's dtype decides: float32 under autocast of bfloat16 has every bit of float32 without."""
    case, inputs = make_case(1, 1)
    # PyTorch's own matrix products, those of the loop, cast in a backward under autocast.
    for how, num_compared in ("plain", 5), ("two parts", 5), ("loop", 1):
        expected = layer(rank, engine, case, inputs, how)
        with autocast(engine, torch.bfloat16):
            seen = layer(rank, engine, case, inputs, how)
        assert all(map(torch.equal, seen[:num_compared], expected[:num_compared]))
