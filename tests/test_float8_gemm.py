"""Float8 GEMMs of experts against float64, and the Triton kernels against the loops that define them."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import exhaustive
from lib.activations import FAMILIES
from lib.grouped_gemm import ROWS_BEHIND, groups

import ep_dispatcher as ep
from ep_dispatcher.moe import activation as formulas
from ep_dispatcher.moe import float8_gemm, grouped_gemm
from ep_dispatcher.moe.expert_matrices import QuantizedMatrices

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
COUNTS = {"uneven": [5, 0, 170, 1, 128], "none": [0, 0, 0], "one expert": [257]}
BLOCK = 128


@pytest.fixture(params=COUNTS)
def counts(request) -> list[int]:
    return COUNTS[request.param]


def repair_interpreter(monkeypatch) -> None:
    """Of Triton 3.6: it rounds wrongly to bfloat16 and float8, and a loop's end is no integer for NumPy 2.4."""
    from triton.runtime import interpreter

    convert, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor

    def to_nearest(given, from_dtype, dtype, rounding):
        if from_dtype.name != "fp32" or dtype.name not in ("bf16", "fp8e4nv"):
            return convert(given, from_dtype, dtype, rounding)
        values = torch.from_numpy(given)
        if dtype.name == "bf16":
            return values.bfloat16().view(torch.int16).numpy().view("uint16")
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def with_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_convert_float", to_nearest)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)


@pytest.fixture(params=["interpreter"] if INTERPRETS else ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request, monkeypatch) -> str:
    """Where operands lie. With "interpreter" Triton's kernels run on the CPU."""
    if request.param != "interpreter":
        return request.param
    repair_interpreter(monkeypatch)
    monkeypatch.setattr(float8_gemm, "has_kernels", lambda rows: True)
    monkeypatch.setattr(grouped_gemm.kernels(), "_num_sms", lambda device: 2)  # programs that loop over tiles
    return "cpu"


@pytest.mark.skipif(INTERPRETS, reason="it runs this file in the interpreter")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_the_kernels_in_tritons_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not exhaustive", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


def ends_of(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def rows_of(counts: list[int], width: int, device: str) -> torch.Tensor:
    """Rows of many magnitudes; those of no expert are no numbers."""
    rows = torch.randn(sum(counts) + ROWS_BEHIND, width) * torch.exp2(torch.randint(-9, 9, (width,)))
    rows[sum(counts) :] = float("nan")
    return rows.bfloat16().to(device)


def matrices(experts: int, n: int, k: int, device: str) -> torch.Tensor:
    return (torch.randn(experts, n, k) / k**0.5).bfloat16().to(device)


def spread(scales: torch.Tensor, shape: torch.Size, dims: tuple[int, ...]) -> torch.Tensor:
    """A scale for each entry of the shape, in float64."""
    for dim in dims:
        scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scales.double()


def value_of(pair) -> torch.Tensor:
    rows, scales = pair
    return rows.double() * spread(scales, rows.shape, (1,))


def close(seen: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    """Nearly equal, in units of the largest value."""
    assert seen.shape == right.shape
    if right.numel():
        assert seen.isfinite().all()
        assert float((seen.double() - right).abs().max()) <= tolerance * float(right.abs().max())


def is_quantized(seen: torch.Tensor, exact: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> None:
    """Float8 to the nearest, with the least power of two by which amax is at most 448 as its scale."""
    mantissa, exponent = torch.frexp(amax.double() / 448)  # a GPU's log2 is not exact
    exponent = torch.where(mantissa == 0, -126, exponent - (mantissa == 0.5).int()).clamp_min(-126)
    right = torch.ldexp(torch.ones_like(mantissa), exponent)
    assert torch.equal(scales.double(), right)
    step = torch.maximum(exact.abs() / 16, scales.double() * 2**-10)  # half of the distance of two float8
    assert ((seen - exact).abs() <= step).all()


@pytest.mark.parametrize("width", [256, 208])
def test_rows(counts, device, width):
    torch.manual_seed(1)
    ends, rows = ends_of(counts, device), rows_of(counts, width, device)
    pair, end = float8_gemm.quantize_rows(rows, ends), sum(counts)
    exact = rows[:end].double()
    amax = F.pad(exact, (0, -width % BLOCK)).unflatten(1, (-1, BLOCK)).abs().amax(2)
    scales, amax = (spread(of_blocks, exact.shape, (1,)) for of_blocks in (pair.scales[:end], amax))
    is_quantized(value_of(pair)[:end], exact, scales, amax)
    for one, other in zip(ep.quantize(rows[:end], "e4m3_1x128_pow2"), pair):
        assert torch.equal(one.float(), other[:end].float())
    again = float8_gemm.dequantize_rows(pair, ends)
    assert again.dtype == torch.bfloat16 and torch.equal(again[:end].double(), value_of(pair)[:end])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("n, k", [(256, 128), (208, 176)])
def test_weights(device, n, k, apart):
    torch.manual_seed(2)
    weights = matrices(3, n, k, device)
    weights[1, :128, :128] = 0
    found = float8_gemm.quantize_weights(list(weights.unbind()) if apart else weights)
    exact = weights.double()
    padded = F.pad(exact, (0, -k % BLOCK, 0, -n % BLOCK))
    amax = padded.view(3, -(-n // BLOCK), BLOCK, -1, BLOCK).abs().amax((2, 4))
    scales = spread(found.scales, exact.shape, (1, 2))
    is_quantized(found.rows.double() * scales, exact, scales, spread(amax, exact.shape, (1, 2)))
    assert torch.equal(found.transposed.float(), found.rows.float().mT)
    assert torch.equal(found.transposed_scales, found.scales.mT)


@pytest.mark.parametrize("n, k", [(256, 128), (336, 400)])
def test_a_flag_on_the_device_skips_weights(device, n, k):
    """What replays of CUDA graphs do: they write the copies in place, or leave them as they are."""
    torch.manual_seed(6)
    before, after = matrices(3, n, k, device), matrices(3, n, k, device)
    skip = torch.zeros(1, device=device)

    def bits(quantized: QuantizedMatrices) -> list[torch.Tensor]:
        return [field.view(torch.uint8).clone() for field in quantized]

    def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, one, other))

    found = float8_gemm.quantize_weights(before, skip=skip)
    old, new = (bits(float8_gemm.quantize_weights(weights)) for weights in (before, after))
    assert same(bits(found), old) and not same(old, new)
    skip.fill_(1)
    assert float8_gemm.quantize_weights(after, found, skip) is found and same(bits(found), old)
    skip.fill_(0)
    assert float8_gemm.quantize_weights(after, found, skip) is found and same(bits(found), new)
    float8_gemm.quantize_weights(before, found)
    assert same(bits(found), old), "without a flag"


def elsewhere(weights: QuantizedMatrices) -> QuantizedMatrices:
    """Each expert's matrices in memory of their own, and their scales in wider rows, as Transformer Engine has them."""
    apart = [[matrix.clone() for matrix in field] for field in weights]
    for i in (1, 3):
        apart[i] = [F.pad(s, (0, 3), value=float("nan"))[:, : s.shape[1]] for s in apart[i]]
    return QuantizedMatrices(*apart)


@pytest.mark.parametrize("how", ["plain", "apart", "bias", "weighted bias"])
@pytest.mark.parametrize("n, k", [(256, 128), (144, 176)])
def test_each_row_meets_the_weights_of_its_expert(counts, device, n, k, how):
    torch.manual_seed(3)
    ends, end = ends_of(counts, device), sum(counts)
    weights = float8_gemm.quantize_weights(matrices(len(counts), n, k, device))
    pair, grad = (float8_gemm.quantize_rows(rows_of(counts, width, device), ends) for width in (k, n))
    bias = torch.randn(len(counts), n).bfloat16().to(device) if "bias" in how else None
    row_weights = torch.rand(end + ROWS_BEHIND).to(device) if "weighted" in how else None
    given = elsewhere(weights) if how == "apart" else weights
    out = float8_gemm.linear(pair, given, ends, bias, row_weights)
    grad_rows = float8_gemm.linear_grad_rows(grad, given, ends)
    assert out.dtype == grad_rows.dtype == torch.bfloat16
    exact = weights.rows.double() * spread(weights.scales, weights.rows.shape, (1, 2))
    for e, group in enumerate(groups(ends)):
        right = value_of(pair)[group] @ exact[e].t()
        if bias is not None:
            right += bias[e].double() * (1 if row_weights is None else row_weights[group, None].double())
        close(out[group], right, 2**-8)
        close(grad_rows[group], value_of(grad)[group] @ exact[e], 2**-8)


@pytest.mark.parametrize("n, k", [(256, 128), (144, 176)])
def test_copies_that_lie_elsewhere_are_the_experts_behind(counts, device, n, k):
    """In one call or in two, with the bits of one tensor of all experts, and without what only the other way reads."""
    torch.manual_seed(4)
    own, counts = len(counts), [*counts, 3, 140]
    ends, end, end_of_own = ends_of(counts, device), sum(counts), sum(counts[:-2])
    magnitudes = torch.exp2(torch.arange(len(counts)) % 4).bfloat16().to(device)  # experts have other scales
    weights = float8_gemm.quantize_weights(matrices(len(counts), n, k, device) * magnitudes[:, None, None])
    first, last = (QuantizedMatrices(*(field[part] for field in weights)) for part in (slice(own), slice(own, None)))
    pair, grad = (float8_gemm.quantize_rows(rows_of(counts, width, device), ends) for width in (k, n))
    bias, row_weights = torch.randn(len(counts), n).bfloat16().to(device), torch.rand(len(pair.rows)).to(device)
    for linear, given, unread, options in (
        (float8_gemm.linear, pair, "transposed_scales", dict(bias=bias, row_weights=row_weights)),
        (float8_gemm.linear_grad_rows, grad, "scales", {}),
    ):
        right, behind = linear(given, weights, ends, **options), elsewhere(last)
        for scales in getattr(behind, unread):
            scales.fill_(float("nan"))
        assert torch.equal(linear(given, first.with_copies(behind), ends, **options)[:end], right[:end])
        out = torch.zeros_like(right)
        linear(given, first, ends, out=out, **options)
        assert not out[end_of_own:].any()
        linear(given, behind, ends, out=out, first_expert=own, **options)
        assert torch.equal(out[:end], right[:end]) and not out[end:].any()


USUAL = [("swiglu", 256), ("gpt-oss", 80), ("squared_relu", 80)]


ACTIVATIONS = [
    *USUAL,
    *(exhaustive(name, width) for name in FAMILIES for width in (256, 80) if (name, width) not in USUAL),
]


@pytest.mark.parametrize("name, width", ACTIVATIONS)
def test_the_activation(device, name, width):
    """That of grouped_gemm in float32, quantized."""
    torch.manual_seed(5)
    counts, act = COUNTS["uneven"], FAMILIES[name]
    ends, end = ends_of(counts, device), sum(counts)
    hidden = torch.randn(end + ROWS_BEHIND, act.pair * width).bfloat16().to(device)
    hidden[end:] = float("nan")
    row_weights = torch.rand(end + ROWS_BEHIND).to(device)
    pair = float8_gemm.activate(hidden, row_weights, ends, act)
    seen, right = value_of(pair)[:end], grouped_gemm.activate(hidden.float(), row_weights, ends, act)[:end]
    half_step = right.abs() / 15.9 + right.abs().max() * 2**-17  # what is tiny is subnormal
    assert ((seen - right).abs() <= half_step).all()
    assert (seen - right).norm() <= 0.03 * right.double().norm()


WIDE = [("swiglu", 1280), ("squared_relu", 1856)]  # more than a step of the kernel, with and without whole blocks


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name, width", [*ACTIVATIONS, *WIDE])
def test_the_gradients_of_the_activation(device, name, width, biased):
    """One kernel has the bits of three: of the gradients, of what quantizes them, and of the activation."""
    torch.manual_seed(6)
    counts, act = [5, 0, 2] if (name, width) in WIDE else COUNTS["uneven"], FAMILIES[name]
    ends, end = ends_of(counts, device), sum(counts)
    grad, hidden = rows_of(counts, width, device), rows_of(counts, act.pair * width, device).clamp(-8, 8)
    row_weights = torch.rand(end + ROWS_BEHIND).to(device)
    grad_out, bias = rows_of(counts, 64, device), torch.randn(len(counts), 64).bfloat16().to(device)
    inputs = grad, hidden, row_weights, ends, act, *((grad_out, bias) if biased else ())
    grads, pair = float8_gemm.activate_grad(*inputs, with_activated=True)
    in_one = act.pair == 1 or width % BLOCK == 0
    by = grouped_gemm.activation_kernels() if INTERPRETS and in_one else grouped_gemm  # in the interpreter too
    alone, activated = by.activate_grad(*inputs), by.activate(hidden, row_weights, ends, act)
    assert alone.activated is None and grads.activated is not None
    assert grads.rows.dtype == grads.activated.dtype == torch.bfloat16
    assert torch.equal(grads.rows[:end], alone.rows[:end])
    assert torch.equal(grads.row_weights, alone.row_weights) and not grads.row_weights[end:].any()
    assert torch.equal(grads.activated[:end], activated[:end])
    for seen, right in zip(pair, float8_gemm.quantize_rows(alone.rows, ends)):
        assert torch.equal(seen[:end].float(), right[:end].float())
    by_formula, _ = formulas.activate_grad(grad[:end].float(), hidden[:end].float(), row_weights[:end], act)
    close(grads.rows[:end], by_formula.double(), 2**-8)
    without, again = float8_gemm.activate_grad(*inputs)
    assert without.activated is None and torch.equal(again.rows[:end].float(), pair.rows[:end].float())
