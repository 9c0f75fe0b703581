"""The one sum of the CPU engine: float32, in the order given, rounded once to nearest even; bit by bit."""

from functools import reduce

import pytest
import torch
from torch import Tensor

from ep_dispatcher import _C_cpu
from ep_dispatcher.tools.testing import different_bits, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}
MIN_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}  # of a normal number
BLOCK = 512  # of the engine; sizes around it are tested


def sum_rows(*rows: Tensor) -> Tensor:
    """The engine's sum; what lies around the output must stay as it was."""
    rows = [row.contiguous() for row in rows]
    n, dtype, guard = rows[0].numel(), rows[0].dtype, 16
    around = torch.full((n + 2 * guard,), 7.0, dtype=dtype)
    out = around[guard : guard + n]
    name = str(dtype).removeprefix("torch.")
    _C_cpu.sum_rows([row.data_ptr() for row in rows], out.data_ptr(), n, getattr(_C_cpu.DType, name))
    assert (around[:guard] == 7).all() and (around[guard + n :] == 7).all(), "written beside the output"
    return out


def torch_sum(*rows: Tensor) -> Tensor:
    return reduce(torch.add, (row.float() for row in rows), torch.zeros(())).to(rows[0].dtype)


def assert_same_bits(seen: Tensor, expected: Tensor) -> None:
    assert same_bits(seen, expected), f"differ at {different_bits(seen, expected).nonzero().flatten().tolist()[:9]}"


def all_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def random_rows(num_rows: int, n: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Of very different magnitudes, so that the sums round."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 7, (num_rows, n), generator=generator)
    return list((torch.randn(num_rows, n, generator=generator) * 2.0**exponents).to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_one_row_is_copied_but_for_a_negative_zero(dtype):
    bits = all_patterns(dtype).view(torch.int16)
    expected = torch.where(bits == -(1 << 15), 0, bits)
    assert torch.equal(sum_rows(bits.view(dtype)).view(torch.int16), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pattern_plus_others(dtype):
    patterns, generator = all_patterns(dtype), torch.Generator().manual_seed(1)
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps  # the smallest subnormal
    special = [0.0, -0.0, 1.0, -1.0, 1 + info.eps, info.max, -info.max, info.tiny, -info.tiny, smallest, -smallest]
    special += [info.tiny - smallest, float("inf"), float("-inf"), float("nan")]
    for value in special:
        other = torch.full_like(patterns, value)
        assert other[0].item() == value or value != value, "the dtype has no such number"
        assert_same_bits(sum_rows(patterns, other), torch_sum(patterns, other))
    assert_same_bits(sum_rows(patterns, patterns), torch_sum(patterns, patterns))
    assert_same_bits(sum_rows(patterns, -patterns), torch_sum(patterns, -patterns))
    for _ in range(40):  # each pattern meets 40 random ones
        other = patterns[torch.randperm(len(patterns), generator=generator)]
        assert_same_bits(sum_rows(patterns, other), torch_sum(patterns, other))
    for _ in range(40):  # and 40 whose exponent is near its own, where the sums round or cancel
        distance = torch.randint(-12 << 7, 12 << 7, (len(patterns),), generator=generator)
        bits = patterns.view(torch.int16).int() & 0x7FFF
        other = (bits + distance).clamp(0, 0x7FFF).to(torch.int16).view(dtype)
        other = torch.where(torch.rand(len(patterns), generator=generator) < 0.5, other, -other)
        assert_same_bits(sum_rows(patterns, other), torch_sum(patterns, other))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_ties_go_to_the_even_neighbour(dtype):
    """Not against torch: the neighbours of a number are the patterns next to its own."""
    mantissa = MANTISSA_BITS[dtype]
    bits = torch.arange(0, 1 << 15, dtype=torch.int32)
    exponent = (bits >> mantissa) - (1 - MIN_EXPONENT[dtype])
    # Normal numbers for which a half and an eighth of the distance to the next are numbers of this dtype too.
    chosen = (exponent >= MIN_EXPONENT[dtype] + 3) & bits.to(torch.int16).view(dtype).isfinite()
    bits, exponent = bits[chosen], exponent[chosen].double()
    number = bits.to(torch.int16).view(dtype)
    half, eighth = (torch.exp2(exponent - mantissa - n).to(dtype) for n in (1, 3))
    assert (eighth > 0).all() and number[-1] == torch.finfo(dtype).max
    for sign in (1, -1):
        for rows, expected in [
            ((number, half), bits + bits % 2),  # the largest number is odd: this overflows to infinity
            ((number, half, eighth), bits + 1),
            ((number, half, -eighth), bits),
        ]:
            seen = sum_rows(*(sign * row for row in rows)).view(torch.int16).int()
            wrong = (seen & 0x7FFF) != expected
            assert not wrong.any(), f"{int(wrong.sum())} wrong, first: {number[wrong][0].item()}"
            assert ((seen < 0) == (sign < 0)).all()


LARGEST, INF, NAN = torch.finfo(torch.float32).max, float("inf"), float("nan")


@pytest.mark.parametrize(
    "dtype,rows,expected",
    [
        (
            torch.float32,
            [[LARGEST, -LARGEST, INF, INF, NAN], [LARGEST, -LARGEST, 1, -INF, 1]],
            [INF, -INF, INF, NAN, NAN],
        ),
        (torch.float32, [[2**-149, -(2**-149), 2**-126], [2**-149, 0, -(2**-127)]], [2**-148, -(2**-149), 2**-127]),
        (torch.float16, [[65504], [65504], [-65504]], [65504]),  # it leaves the range of the dtype on the way
        # Four quarters of the last place of 1 count, though each alone would be rounded away.
        *((dtype, [[1], *[[torch.finfo(dtype).eps / 4]] * 4], [1 + torch.finfo(dtype).eps]) for dtype in HALVES),
    ],
    ids=["overflow", "subnormals", "range", "bfloat16 rounded once", "float16 rounded once"],
)
def test_exact_sums(dtype, rows, expected):
    rows, expected = ([torch.tensor(row, dtype=dtype) for row in each] for each in (rows, [expected]))
    assert_same_bits(sum_rows(*rows), *expected)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 31, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 2 * BLOCK + 3, 7168])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(dtype, num_rows, n):
    """No sum of zeros is negative."""
    rows, zeros = random_rows(num_rows, n, dtype, seed=n), torch.zeros(n, dtype=dtype)
    assert_same_bits(sum_rows(*rows), torch_sum(*rows))
    assert_same_bits(sum_rows(*[-zeros] * num_rows), zeros)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_order_of_the_rows_is_kept(dtype):
    large, (first, second) = torch.full((3000,), 2.0**15, dtype=dtype), random_rows(2, 3000, dtype)
    rows = [large, first, -large, second]  # of the first, float32 keeps only what stands beside 2^15
    forward, backward = sum_rows(*rows), sum_rows(*rows[::-1])
    assert_same_bits(backward, torch_sum(*rows[::-1]))
    assert not torch.equal(forward, backward), "these rows cannot tell one order from the other"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_begin_at_any_element(dtype):
    base = torch.cat(random_rows(3, 1000, dtype))
    rows = [base[start : start + 700] for start in (1, 1003, 2005)]
    assert_same_bits(sum_rows(*rows), torch_sum(*rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows_sum_to_zero(dtype):
    out = torch.full((1000,), 7.0, dtype=dtype)
    _C_cpu.sum_rows([], out.data_ptr(), 999, getattr(_C_cpu.DType, str(dtype).removeprefix("torch.")))
    assert (out[:999] == 0).all() and out[999] == 7
