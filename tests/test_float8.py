"""What ep.quantize and ep.dequantize refuse, and that torch.compile keeps both whole. test_decode.py has the scales."""

import itertools

import pytest
import torch
from conftest import sparsely
from lib.errors import assert_refused

import ep_dispatcher as ep
from ep_dispatcher import float8
from ep_dispatcher.tools.testing import same_bits

PAIR = ep.quantize(torch.randn(4, 256))
KINDS = ("e4m3_1x128", "e4m3_1x128_pow2", "mxfp8")


@pytest.mark.parametrize("x", [torch.ones(4, 256).int(), torch.ones(4, 256).bool(), torch.tensor(1.0), [1.0]])
def test_quantize_refuses(x):
    assert_refused("x", ep.quantize, x)


@pytest.mark.parametrize(
    "pair",
    [
        (PAIR.rows, PAIR.scales[:3]),
        (PAIR.rows, PAIR.scales[:1]),  # no broadcast
        (PAIR.rows, PAIR.scales[:, :1]),
        (PAIR.rows, PAIR.scales[0]),
        (PAIR.rows, PAIR.scales.double()),
        (PAIR.rows, PAIR.scales.to(torch.uint8)),
        (PAIR.rows[:, :100], PAIR.scales),
        (PAIR.rows[:, :130], PAIR.scales[:, :1]),
        (PAIR.rows.view(torch.int8), PAIR.scales),
        (PAIR.rows, torch.zeros(4, 1).int()),  # 256 entries have scales of no whole integer
        (PAIR.rows, torch.zeros(4, 2, 1).int()),
        (PAIR.rows, PAIR.scales.long()),
        (PAIR.rows.float(), PAIR.scales),
        (PAIR.rows[0, 0], PAIR.scales[0, 0]),
        torch.zeros(2, 128),
        None,
        (torch.zeros(1, 128),),
        (torch.zeros(1), 3),
    ],
)
def test_dequantize_refuses(pair):
    assert_refused("pair", ep.dequantize, pair)


@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (128,), (2, 3, 128), (0, 100), (4, 1), (100,), (2, 3, 2880)])
def test_other_shapes(shape):
    x = torch.randn(shape).bfloat16()
    pair = ep.quantize(x)
    assert pair.scales.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert pair.rows.is_contiguous() and pair.scales.is_contiguous() and ep.dequantize(pair).is_contiguous()
    torch.testing.assert_close(ep.dequantize(pair), x, rtol=1 / 16, atol=1 / 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [16, 300, 2880])
def test_the_last_block_has_what_is_left(hidden, kind):
    """As if each of the blocks were a row of its own."""
    x = torch.randn(5, hidden).bfloat16()
    pair = ep.quantize(x, kind)
    for i, block in enumerate(x.split(128, 1)):
        padded = torch.zeros(5, 128, dtype=x.dtype)
        padded[:, : block.shape[1]] = block
        alone = ep.quantize(padded, kind)
        of_block = alone.scales.shape[1]
        assert same_bits(pair.scales[:, i * of_block : (i + 1) * of_block], alone.scales)
        own = slice(128 * i, 128 * i + block.shape[1])
        assert torch.equal(pair.rows[:, own].float(), alone.rows[:, : block.shape[1]].float())
        assert torch.equal(ep.dequantize(pair)[:, own], ep.dequantize(alone)[:, : block.shape[1]])


def test_scales_of_mxfp8():
    """2^(e - 127), the smallest that is at least the largest magnitude / 448. A bfloat16 above 448 is 450."""
    exponents = {0.0: 0, 2.0**-130: 0, 448 * 2.0**-127: 0, 450 * 2.0**-127: 1, 1.0: 119, 448.0: 127, -450.0: 128}
    exponents |= {3e38: 247, torch.inf: 254, -torch.inf: 254, torch.nan: 255}
    x = torch.zeros(len(exponents), 32).bfloat16()
    x[:, 1], x[:, 2] = torch.tensor([*exponents]), 2.0**-131
    pair = ep.quantize(x, "mxfp8")
    assert pair.scales.view(torch.uint8)[:, 0].tolist() == [*exponents.values()]
    assert not pair.scales.view(torch.uint8)[:, 1:].any()
    found = ep.dequantize(pair, torch.float32)
    assert found[-1].isnan().all() and found[-2, 1] == -torch.inf and not found[:-1].isnan().any()
    torch.testing.assert_close(found[:-3, 1], x[:-3, 1].float(), rtol=1 / 16, atol=0)
    assert same_bits(ep.dequantize(ep.quantize(found, "mxfp8"), torch.float32)[:-3], found[:-3])  # once more: exact


@pytest.mark.parametrize("hidden, kind", [(512, KINDS[1]), (1536, KINDS[1]), (512, "mxfp8"), (16, "mxfp8")])
def test_packed_scales(hidden, kind):
    """Those of decode layout, which were refused: four exponents in an int32, rows beside each other in memory."""
    rows, scales = pair = ep.quantize(torch.randn(3, 5, hidden).bfloat16(), kind)
    packed = scales.view(torch.int32) if kind == "mxfp8" else float8.packed_exponents(scales)
    assert same_bits(ep.dequantize((rows, float8.column_major(packed))), ep.dequantize(pair))


@pytest.mark.parametrize("hidden, kind", sparsely(itertools.product((256, 300), KINDS)))
def test_compiled_whole(hidden, kind):
    """One graph for any number of rows."""

    def round_trip(x):
        pair = ep.quantize(x, kind)
        return *pair, ep.dequantize(pair, torch.float32)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(round_trip, fullgraph=True, dynamic=True, backend="eager")
    for n in (3, 5, 8):
        x = torch.randn(n, hidden)
        assert all(torch.equal(ours.float(), right.float()) for ours, right in zip(compiled(x), round_trip(x)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
