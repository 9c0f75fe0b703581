"""The compiled grouped GEMMs for compute capability 9.0: which GEMMs they take, and their bits beside Triton's."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ep_dispatcher.moe import float8_gemm, grouped_gemm, hopper_gemm
from ep_dispatcher.moe.expert_matrices import ExpertMatrices, Places, QuantizedMatrices, WithCopies, places_of

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no GPU of compute capability 9.0",
)
COUNTS = {
    "partial tiles": [5, 0, 170, 1, 128, 700],
    "full tiles": [256, 128],
    "one expert": [257],
    "one row": [0, 1],
    "more rows than tiles in a column": [2500, 3],
    "more experts than a warp has lanes": [37 * i % 201 for i in range(70)],
    "none": [0, 0],
}
BEHIND = 300  # rows of no expert, which are no numbers; so none of these cases has few rows


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)


def rows_of(counts: list[int], width: int) -> Tensor:
    rows = torch.randn(sum(counts) + BEHIND, width, device="cuda").bfloat16()
    rows[sum(counts) :] = float("nan")
    return rows


def quantized(counts: list[int], n: int, k: int) -> tuple[tuple[Tensor, Tensor], QuantizedMatrices]:
    rows = rows_of(counts, k) * torch.exp2(torch.randint(-6, 6, (k,), device="cuda"))
    weights = (torch.randn(len(counts), n, k, device="cuda") / k**0.5).bfloat16()
    return float8_gemm.quantize_rows(rows, ends_of([*counts, BEHIND])), float8_gemm.quantize_weights(weights)


def by_both(monkeypatch, call) -> tuple[Tensor, Tensor]:
    """The result of the compiled kernel, and that of Triton's. Only the first one uses the compiled module."""
    for few_rows in ("FEW_ROWS", "FEW_ROWS_BACK", "FEW_ADDED_ROWS"):
        monkeypatch.setattr(hopper_gemm, few_rows, 0)
    with monkeypatch.context() as triton_fails:
        triton_fails.setattr(grouped_gemm.kernels(), "multiply", None)
        triton_fails.setattr(grouped_gemm.gradient_kernels(), "outer_products", None)
        compiled = call()
    with monkeypatch.context() as on_others:
        on_others.setattr(hopper_gemm, "num_sms", lambda device: 0)
        return compiled, call()


def is_same(seen: Tensor, right: Tensor) -> None:
    assert torch.equal(seen.view(torch.uint8), right.view(torch.uint8))  # also of entries that are no numbers


@needs_hopper
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n, k", [(336, 208), (512, 1024), (136, 2048), (640, 128)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_float8_has_the_bits_of_triton(monkeypatch, counts, n, k, bias):
    torch.manual_seed(1)
    pair, weights = quantized(counts, n, k)
    added = None if bias is None else torch.randn(len(counts), n, device="cuda").to(bias)
    row_weights = torch.rand(pair[0].shape[0], device="cuda") if bias == torch.float32 else None

    def run() -> Tensor:
        out = torch.full((pair[0].shape[0], n), 7, dtype=torch.bfloat16, device="cuda")
        return float8_gemm.linear(pair, weights, ends_of(counts), added, row_weights, out=out)

    seen, right = by_both(monkeypatch, run)
    is_same(seen, right)
    assert (seen[sum(counts) :] == 7).all()


@needs_hopper
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n, k", [(336, 208), (512, 1024), (136, 2048), (640, 72)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_bfloat16_has_the_bits_of_triton(monkeypatch, counts, n, k, bias):
    """Forward and the gradient of rows; rows of no expert are neither read into results nor written."""
    torch.manual_seed(3)
    rows, grads, ends = rows_of(counts, k), rows_of(counts, n), ends_of(counts)
    weights = (torch.randn(len(counts), n, k, device="cuda") / k**0.5).bfloat16()
    added = None if bias is None else torch.randn(len(counts), n, device="cuda").to(bias)
    row_weights = torch.rand(rows.shape[0], device="cuda") if bias == torch.float32 else None

    def run() -> Tensor:
        out, back = torch.full_like(grads, 7), torch.full_like(rows, 7)
        grouped_gemm.linear(rows, weights, ends, added, row_weights, out=out)
        return torch.cat([out, grouped_gemm.linear_grad_rows(grads, weights, ends, out=back)], 1)

    seen, right = by_both(monkeypatch, run)
    is_same(seen, right)
    assert (seen[sum(counts) :] == 7).all()


@needs_hopper
@pytest.mark.parametrize("num_copies", [0, 1, 3])
def test_bfloat16_weights_may_lie_anywhere(monkeypatch, num_copies):
    """Also without even steps between them, and behind them those of copies."""
    counts, n, k = [300, 129, 0, 64, 500], 256, 512
    rows, grads, ends = rows_of(counts, k), rows_of(counts, n), ends_of(counts)
    memory = torch.randn(9, n, k, device="cuda").bfloat16()
    apart: ExpertMatrices = [memory[place] for place in (7, 0, 3, 1, 4)]
    if num_copies:
        apart = WithCopies(apart[:-num_copies], apart[-num_copies:])
    right = [torch.stack(tuple(apart))]

    def run() -> Tensor:
        weights = right[0] if use_one_tensor else apart
        out = grouped_gemm.linear(rows, weights, ends), grouped_gemm.linear_grad_rows(grads, weights, ends)
        return torch.cat(out, 1)[: sum(counts)]

    use_one_tensor = False
    seen, by_triton = by_both(monkeypatch, run)
    is_same(seen, by_triton)
    use_one_tensor = True
    is_same(run(), seen)


@needs_hopper
def test_float8_weights_may_lie_anywhere(monkeypatch):
    """Also without even steps between them, and behind them those of copies."""
    counts = [300, 129, 0, 64]
    pair, weights = quantized(counts, 256, 512)
    order = [3, 0, 1, 2]
    apart = QuantizedMatrices(*([field[order][order.index(e)] for e in range(4)] for field in weights))
    copies = QuantizedMatrices(*(field[2:] for field in weights))
    joined = QuantizedMatrices(*(field[:2] for field in weights)).with_copies(copies)
    right = float8_gemm.linear(pair, weights, ends_of(counts))[: sum(counts)]
    for one in (apart, joined):
        is_same(float8_gemm.linear(pair, one, ends_of(counts))[: sum(counts)], right)


@needs_hopper
@pytest.mark.parametrize("apart", [False, True], ids=["one tensor", "tensors anywhere"])
@pytest.mark.parametrize("num_sets", [1, 2])
@pytest.mark.parametrize("n, k", [(208, 336), (384, 512), (128, 136)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("result", ["added", "float32", "bfloat16"])
def test_gradients_have_the_bits_of_triton(monkeypatch, result, counts, n, k, num_sets, apart):
    """Added to float32, or stored; an expert without rows has gradients of 0."""
    torch.manual_seed(2)
    others = [(7 * i + 3) % 97 for i in range(len(counts))]
    sets = [(rows_of(c, n), rows_of(c, k), ends_of(c)) for c in (counts, others)[:num_sets]]
    before = torch.randn(len(counts), n, k, device="cuda").to(torch.bfloat16 if result == "bfloat16" else torch.float32)

    def run() -> Tensor:
        held = before.clone()
        out: ExpertMatrices = [held[i].clone() for i in range(len(counts))] if apart else held
        grouped_gemm.linear_grad_weights(sets, out, accumulate=result == "added")
        return torch.stack(tuple(out)) if apart else held

    is_same(*by_both(monkeypatch, run))


@needs_hopper
def test_ends_behind_the_last_row(monkeypatch):
    """As after a dispatch that had too little room."""
    pair, weights = quantized([300, 200], 256, 512)
    grads, ends = rows_of([300, 200], 256), ends_of([300, 900])
    main_grads = torch.randn(2, 256, 512, device="cuda")
    rows = float8_gemm.dequantize_rows(pair, ends_of([300, 200 + BEHIND])).nan_to_num()

    def run() -> Tensor:
        out = main_grads.clone()
        grouped_gemm.linear_grad_weights([(grads.nan_to_num(), rows, ends)], out, accumulate=True)
        return torch.cat([out.flatten(), float8_gemm.linear(pair, weights, ends).float().nan_to_num().flatten()])

    is_same(*by_both(monkeypatch, run))


@needs_hopper
def test_the_gradient_of_rows_and_biases_at_odd_places(monkeypatch):
    counts = [300, 129, 0, 64]
    pair, weights = quantized(counts, 384, 512)
    bias = torch.randn(4 * 512 + 1, device="cuda").bfloat16()[1:].view(4, 512)
    grads, _ = quantized(counts, 512, 384)
    for added in (None, bias):
        run = lambda: float8_gemm.linear(grads, weights.t(), ends_of(counts), added)[: sum(counts)]  # noqa: B023, E731
        is_same(*by_both(monkeypatch, run))


@needs_hopper
def test_in_a_captured_graph():
    """With other numbers of rows in each replay."""
    counts = [1400, 0, 1600]
    pair, weights = quantized(counts, 256, 512)
    ends, end = ends_of(counts), sum(counts)
    rows, grads, out = rows_of(counts, 512), rows_of(counts, 256), torch.zeros(3, 256, 512, device="cuda")
    plain = torch.randn(3, 256, 512, device="cuda").bfloat16()

    def run() -> Tensor:
        grouped_gemm.linear_grad_weights([(grads, rows, ends)], out, accumulate=True)
        return torch.cat([float8_gemm.linear(pair, weights, ends), grouped_gemm.linear(rows, plain, ends)], 1)

    right = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    ends.copy_(ends_of([1600, 0, 1400]))
    out.zero_()
    graph.replay()
    replayed = out.clone(), result[:end].clone()
    out.zero_()
    is_same(replayed[1], run()[:end])
    is_same(replayed[0], out)
    assert not torch.equal(replayed[1][1400:1600], right[1400:1600]) and out.any()


@pytest.fixture
def on_hopper(monkeypatch) -> list[tuple]:
    """A stand-in for a GPU of compute capability 9.0 and the compiled module: the arguments that it was called with."""
    called: list[tuple] = []
    note = lambda *arguments: called.append(arguments)  # noqa: E731
    compiled = SimpleNamespace(weight_grad=note, float8_gemm=note, bfloat16_gemm=note)
    monkeypatch.setattr(hopper_gemm, "_compiled", lambda: compiled)
    monkeypatch.setattr(hopper_gemm, "_dtype", lambda dtype: str(dtype).removeprefix("torch."))
    monkeypatch.setattr(hopper_gemm, "num_sms", lambda device: 132)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 11, raising=False)
    return called


@pytest.mark.parametrize(
    "num_rows, columns, first, dtype, taken",
    [
        (128, 64, 0, torch.bfloat16, False),
        (129, 64, 0, torch.bfloat16, True),
        (129, 68, 0, torch.bfloat16, False),
        (129, 64, 1, torch.bfloat16, False),
        (129, 64, 0, torch.float16, False),
    ],
)
def test_which_float8_gemms_are_taken(on_hopper, num_rows, columns, first, dtype, taken):
    """More than 64 rows per expert, and results in bfloat16 that are stored 16 bytes at a time."""
    weights = QuantizedMatrices(*[torch.empty(2, columns, 128, dtype=torch.float8_e4m3fn)] * 4)
    out = torch.empty(num_rows * columns + first, dtype=dtype)[first:].view(num_rows, columns)
    pair, ends = (torch.empty(num_rows, 128), torch.empty(num_rows, 1)), torch.empty(2, dtype=torch.int32)
    assert hopper_gemm.multiply_float8(pair, weights, ends, out, None, None) == taken == bool(on_hopper)
    strided = torch.empty(num_rows, 256)[:, :128], pair[1]
    assert not hopper_gemm.multiply_float8(strided, weights, ends, out, None, None)
    if not taken:
        return
    (((_, _, _, places, _, experts, *results), scales, *_),) = on_hopper
    step = columns * 128 // 16
    assert places == (weights.rows.data_ptr(), 0, step + 1, 0, step) and experts == 2
    assert results == [out.data_ptr(), columns, 0, "float32", 0]
    assert scales == (pair[1].data_ptr(), weights.scales.data_ptr(), 0, columns * 128, 128)


@pytest.mark.parametrize(
    "num_rows, transposed, dtype, weight_dtype, taken",
    [
        (128, True, torch.bfloat16, torch.bfloat16, False),
        (129, True, torch.bfloat16, torch.bfloat16, True),
        (256, False, torch.bfloat16, torch.bfloat16, False),
        (257, False, torch.bfloat16, torch.bfloat16, True),
        (257, True, torch.float16, torch.float16, False),
        (257, True, torch.bfloat16, torch.float32, False),  # the Triton kernel says so
    ],
)
def test_which_bfloat16_gemms_are_taken(on_hopper, num_rows, transposed, dtype, weight_dtype, taken):
    """More than 64 rows per expert, in a gradient 128; also with weights of copies, which lie elsewhere."""
    own, copies = (torch.empty(1, 64, 32, dtype=one) for one in (dtype, weight_dtype))
    length, columns = (32, 64) if transposed else (64, 32)
    rows, out = torch.empty(num_rows, length, dtype=dtype), torch.empty(num_rows, columns, dtype=dtype)
    bias, row_weights = torch.empty(2, columns, dtype=torch.bfloat16), torch.empty(num_rows)
    options = dict(transposed=transposed, bias=bias, row_weights=row_weights)
    ends = torch.empty(2, dtype=torch.int32)
    assert hopper_gemm.multiply(rows, WithCopies(own, copies), ends, out, **options) == taken == bool(on_hopper)
    if not taken:
        return
    gemm = (
        rows.data_ptr(),
        num_rows,
        length,
        (own.data_ptr(), 0, 1, 0, 256),
        ends.data_ptr(),
        2,
        out.data_ptr(),
        columns,
    )
    gemm += bias.data_ptr(), "bfloat16", row_weights.data_ptr()
    assert on_hopper == [(gemm, transposed, (copies.data_ptr(), 0, 1, 0, 256), 1, 132, 11)]


@pytest.mark.parametrize("kind", ["bfloat16", "copies", "float8"])
def test_weights_that_were_copied_are_there_when_the_kernel_is_launched(monkeypatch, on_hopper, kind):
    """Weights at odd addresses are copied. Memory of the copies could belong to others before the launch."""
    dtype = torch.float8_e4m3fn if kind == "float8" else torch.bfloat16
    odd = [torch.empty(32 * 128 + 1, dtype=dtype)[1:].view(32, 128) for _ in range(2)]
    copied: list[weakref.ref[Tensor]] = []

    def find(weights: ExpertMatrices) -> Places:
        places = places_of(weights)
        copied.append(weakref.ref(places.base))
        return places

    def launch(*_: object) -> None:
        on_hopper.append((len(copied), all(one() is not None for one in copied)))

    monkeypatch.setattr(hopper_gemm, "places_of", find)
    stand_in = hopper_gemm._compiled()
    stand_in.bfloat16_gemm = stand_in.float8_gemm = launch
    rows, out, ends = torch.empty(999, 128), torch.empty(999, 32).bfloat16(), torch.empty(4, dtype=torch.int32)
    if kind == "float8":
        scales = torch.empty(2, 1, 1)
        assert hopper_gemm.multiply_float8(
            (rows, rows), QuantizedMatrices(odd, scales, odd, scales), ends, out, None, None
        )
    else:
        matrices = WithCopies(odd, odd) if kind == "copies" else odd
        assert hopper_gemm.multiply(rows.bfloat16(), matrices, ends, out, transposed=True)
    assert on_hopper == [(len(copied), True)] and len(copied) == 1 + (kind == "copies")


def test_what_a_kernel_would_misread_is_not_taken(on_hopper):
    rows, out, weights = (torch.empty(shape).bfloat16() for shape in ((999, 128), (999, 32), (2, 32, 128)))
    ends = torch.empty(2, dtype=torch.int64)
    assert not hopper_gemm.multiply(rows, weights, ends, out, transposed=True)
    grad, wide, grad_rows = (torch.empty(999, width).bfloat16() for width in (16, 104, 24))
    assert not hopper_gemm.write_weight_grads([(grad, grad_rows, ends)], torch.empty(2, 16, 24), False)
    for out_dtype in (torch.bfloat16, torch.float32):  # rows of these have no multiple of 16 bytes
        narrow = wide[:, :98]
        grads = torch.empty(2, 16, 98, dtype=out_dtype)
        assert not hopper_gemm.write_weight_grads([(grad, narrow, ends.int())], grads, False)
    assert on_hopper == []


def grad_set(num_rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    ends = torch.tensor([num_rows // 2, num_rows], dtype=torch.int32)
    return torch.empty(num_rows, 16, dtype=dtype), torch.empty(num_rows, 24, dtype=dtype), ends


@pytest.mark.parametrize(
    "num_rows, dtype, out_dtype, accumulate, taken",
    [
        (1537, torch.bfloat16, torch.float32, True, True),
        (1536, torch.bfloat16, torch.float32, True, False),
        (1537, torch.bfloat16, torch.bfloat16, True, False),
        (1537, torch.float16, torch.float32, True, False),
        (101, torch.bfloat16, torch.float32, False, True),
        (101, torch.bfloat16, torch.bfloat16, False, True),
        (257, torch.float16, torch.float16, False, False),
    ],
)
def test_which_gradients_are_taken(on_hopper, num_rows, dtype, out_dtype, accumulate, taken):
    """In bfloat16, and with more than 768 rows per expert in all sets if they are added to float32."""
    first, second = grad_set(num_rows - 100, dtype), grad_set(100, dtype)
    out = torch.zeros(2, 16, 24, dtype=out_dtype)
    assert hopper_gemm.write_weight_grads([first, grad_set(0, dtype), second], out, accumulate) == taken
    if not taken:
        assert on_hopper == []
        return
    ((sets, _, result, *others),) = on_hopper
    expected = [(g.data_ptr(), r.data_ptr(), 32, 48, len(g), e.data_ptr()) for g, r, e in (first, second)]
    assert sets == expected and f"torch.{result}" == str(out_dtype) and others == [accumulate, 16, 24, 2, 132, 11]


@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_without_rows_are_not_taken(on_hopper, accumulate):
    assert not hopper_gemm.write_weight_grads([grad_set(0)], torch.zeros(2, 16, 24), accumulate) and on_hopper == []


@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_at_odd_addresses_are_not_taken(on_hopper, accumulate):
    out = torch.zeros(2 * 16 * 24 + 1)[1:].view(2, 16, 24)
    assert not hopper_gemm.write_weight_grads([grad_set(1537)], out, accumulate) and on_hopper == []
