"""Float8 GEMMs of experts against float64, and the Triton kernels against the loops that define them."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import exhaustive
from test_activations import FAMILIES
from test_grouped_gemm import ROWS_BEHIND, groups

import ep_dispatcher as ep
from ep_dispatcher.moe import float8_gemm, grouped_gemm
from ep_dispatcher.moe.float8_gemm import QuantizedMatrices

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


def value_of_columns(columns, counts: list[int]) -> torch.Tensor:
    """The rows in float64, in their places; none lies elsewhere."""
    values, scales = columns
    exact = values.double() * spread(scales.t(), values.shape, (1,))
    rows, first = [], 0
    for count in counts:
        rows.append(exact[:, first : first + count])
        first += -(-count // BLOCK) * BLOCK
        rows_behind = values[:, first - -count % BLOCK : first] if count else values[:, :0]
        assert not rows_behind.float().any()
    assert values.shape[1] >= first
    return torch.cat(rows, 1).t()


def close(seen: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    """Nearly equal, in units of the largest value."""
    assert seen.shape == right.shape
    if right.numel():
        assert seen.isfinite().all()
        assert float((seen.double() - right).abs().max()) <= tolerance * float(right.abs().max())


def is_quantized(seen: torch.Tensor, exact: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> None:
    """Float8 to the nearest, with the least power of two by which amax is at most 448 as its scale."""
    right = torch.exp2(torch.ceil(torch.log2(amax.double() / 448).clamp_min(-126)))
    assert torch.equal(scales.double(), right)
    step = torch.maximum(exact.abs() / 16, scales.double() * 2**-10)  # half of the distance of two float8
    assert ((seen - exact).abs() <= step).all()


@pytest.mark.parametrize("width", [256, 208])
def test_rows_and_columns(counts, device, width):
    torch.manual_seed(1)
    ends, rows = ends_of(counts, device), rows_of(counts, width, device)
    pair, columns = float8_gemm.quantize_both(rows, ends)
    end = sum(counts)
    exact = rows[:end].double()
    amax = F.pad(exact, (0, -width % BLOCK)).unflatten(1, (-1, BLOCK)).abs().amax(2)
    scales, amax = (spread(of_blocks, exact.shape, (1,)) for of_blocks in (pair.scales[:end], amax))
    is_quantized(value_of(pair)[:end], exact, scales, amax)
    for one, other in zip(float8_gemm.quantize_rows(rows, ends), pair):
        assert torch.equal(one[:end].float(), other[:end].float())
    for one, other in zip(ep.quantize(rows[:end], powers_of_two=True), pair):
        assert torch.equal(one.float(), other[:end].float())
    again = float8_gemm.quantize_columns(pair, ends)
    for found, right in ((columns, exact), (again, value_of(pair)[:end])):
        seen, block = value_of_columns(found, counts), 0
        for group in groups(ends):
            for chunk in range(group.start, group.stop, BLOCK):
                few = right[chunk : min(chunk + BLOCK, group.stop)]
                is_quantized(seen[chunk : chunk + len(few)], few, found.scales[block].double(), few.abs().amax(0))
                block += 1


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


@pytest.mark.parametrize("num_sets", [1, 2])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_weights_is_written_or_added(counts, device, num_sets, accumulate, dtype):
    torch.manual_seed(4)
    n, k = 144, 80
    out = [one.clone().to(dtype) for one in matrices(len(counts), n, k, device)]
    rights = [one.double() if accumulate else torch.zeros_like(one, dtype=torch.float64) for one in out]
    sets = []
    for its_counts in (counts, [*counts[1:], 3])[:num_sets]:
        ends = ends_of(its_counts, device)
        grad, rows = (float8_gemm.quantize_both(rows_of(its_counts, width, device), ends)[1] for width in (n, k))
        exact = [value_of_columns(one, its_counts) for one in (grad, rows)]
        for right, group in zip(rights, groups(ends)):
            right += exact[0][group].t() @ exact[1][group]
        sets.append((grad, rows, ends))
    float8_gemm.linear_grad_weights(sets, out, accumulate=accumulate)
    for seen, right in zip(out, rights):
        close(seen, right, 2**-20 if dtype == torch.float32 else 2**-8)


USUAL = [("swiglu", 256), ("gpt-oss", 80), ("squared_relu", 80)]


@pytest.mark.parametrize(
    "name, width",
    [*USUAL, *(exhaustive(name, width) for name in FAMILIES for width in (256, 80) if (name, width) not in USUAL)],
)
def test_the_activation_and_its_gradients(device, name, width):
    """Those of grouped_gemm in float32, quantised."""
    torch.manual_seed(5)
    counts, act = COUNTS["uneven"], FAMILIES[name]
    ends, end = ends_of(counts, device), sum(counts)
    hidden, grad, grad_out = (
        torch.randn(end + ROWS_BEHIND, columns).bfloat16().to(device) for columns in (act.pair * width, width, 144)
    )
    for one in (hidden, grad, grad_out):
        one[end:] = float("nan")
    row_weights, bias = torch.rand(end + ROWS_BEHIND).to(device), torch.randn(len(counts), 144).bfloat16().to(device)
    pair = float8_gemm.activate(hidden, row_weights, ends, act)
    found = float8_gemm.activate_grad(grad, hidden, row_weights, ends, act, grad_out, bias, exact=True)
    value = grouped_gemm.activate(hidden.float(), row_weights, ends, act)[:end]
    grad_hidden, grad_row_weights = grouped_gemm.activate_grad(
        grad, hidden.float(), row_weights, ends, act, grad_out, bias
    )
    grad_hidden = grad_hidden[:end]
    for seen, right in (
        (value_of(pair)[:end], value),
        (value_of_columns(found.activated, counts), value),
        (value_of(found.pair)[:end], grad_hidden),
        (value_of_columns(found.columns, counts), grad_hidden),
    ):
        half_step = right.abs() / 15.9 + right.abs().max() * 2**-17  # what is tiny is subnormal
        assert ((seen - right).abs() <= half_step).all()
        assert (seen - right).norm() <= 0.03 * right.double().norm()
    close(found.exact[:end], grad_hidden, 2**-8)
    close(found.grad_row_weights[:end], grad_row_weights[:end], 1e-5)
    assert not found.grad_row_weights[end:].any()
    without = float8_gemm.activate_grad(grad, hidden, row_weights, ends, act)
    assert without.exact is None
    grad_row_weights = grouped_gemm.activate_grad(grad, hidden.float(), row_weights, ends, act)[1]
    close(without.grad_row_weights[:end], grad_row_weights[:end], 1e-5)
