"""What ep.quantize and ep.dequantize refuse, and that torch.compile keeps both whole. test_decode.py has the scales."""

import pytest
import torch

import ep_dispatcher as ep

PAIR = ep.quantize(torch.randn(4, 256))


@pytest.mark.parametrize(
    "x, given",
    [
        (torch.randn(4, 100), r"\[4, 100\] of torch.float32"),
        (torch.ones(4, 256, dtype=torch.int32), r"\[4, 256\] of torch.int32"),
        (torch.ones(4, 256, dtype=torch.bool), r"\[4, 256\] of torch.bool"),
        (torch.tensor(1.0), r"\[\] of torch.float32"),
        ([1.0], "list"),
    ],
)
def test_quantize_refuses(x, given):
    with pytest.raises(ValueError, match=f"^x: given {given}, allowed: a floating point tensor .*multiple of 128"):
        ep.quantize(x)


@pytest.mark.parametrize(
    "pair, given",
    [
        ((PAIR.rows, PAIR.scales[:3]), r"torch.float8_e4m3fn \[4, 256\] and scales of torch.float32 \[3, 2\]"),
        ((PAIR.rows, PAIR.scales[:1]), r".* scales of torch.float32 \[1, 2\]"),  # no broadcast
        ((PAIR.rows, PAIR.scales[:, :1]), r".* scales of torch.float32 \[4, 1\]"),
        ((PAIR.rows, PAIR.scales[0]), r".* scales of torch.float32 \[2\]"),
        ((PAIR.rows, PAIR.scales.double()), r".* scales of torch.float64 \[4, 2\]"),
        ((PAIR.rows[:, :100], PAIR.scales[:, :1]), r"torch.float8_e4m3fn \[4, 100\] .*"),
        ((PAIR.rows.view(torch.int8), PAIR.scales), r"torch.int8 \[4, 256\] .*"),
        ((PAIR.rows.float(), PAIR.scales), r"torch.float32 \[4, 256\] .*"),
        ((PAIR.rows[0, 0], PAIR.scales[0, 0]), r"torch.float8_e4m3fn \[\] .*"),
    ],
)
def test_dequantize_refuses(pair, given):
    with pytest.raises(ValueError, match=f"^pair: given rows of {given}, allowed: rows of torch.float8_e4m3fn"):
        ep.dequantize(pair)


@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (128,), (2, 3, 128)])
def test_other_shapes(shape):
    x = torch.randn(shape).bfloat16()
    pair = ep.quantize(x)
    assert pair.scales.shape == (*shape[:-1], shape[-1] // 128)
    torch.testing.assert_close(ep.dequantize(pair), x, rtol=1 / 16, atol=1 / 32)


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_compiled_whole(powers_of_two):
    """One graph for any number of rows."""

    def round_trip(x):
        pair = ep.quantize(x, powers_of_two=powers_of_two)
        return *pair, ep.dequantize(pair, torch.float32)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(round_trip, fullgraph=True, dynamic=True, backend="eager")
    for n in (3, 5, 8):
        x = torch.randn(n, 256)
        assert all(torch.equal(ours.float(), right.float()) for ours, right in zip(compiled(x), round_trip(x)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "pair, given",
    [
        (torch.zeros(2, 128), "Tensor"),
        (None, "NoneType"),
        ((torch.zeros(1, 128),), "tuple"),
        ((torch.zeros(1), 3), "tuple"),
    ],
)
def test_dequantize_refuses_what_is_no_pair(pair, given):
    with pytest.raises(ValueError, match=f"^pair: given {given}, allowed: two tensors"):
        ep.dequantize(pair)
