"""The compiled grouped GEMMs for compute capability 9.0: which GEMMs they take, and their bits beside Triton's."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ep_dispatcher.moe import float8_gemm, grouped_gemm, hopper_gemm
from ep_dispatcher.moe.expert_matrices import ExpertMatrices, QuantizedMatrices

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
    monkeypatch.setattr(hopper_gemm, "FEW_ROWS", 0)
    monkeypatch.setattr(hopper_gemm, "FEW_GRAD_ROWS", 0)
    with monkeypatch.context() as triton_fails:
        triton_fails.setattr(grouped_gemm.kernels(), "multiply", None)
        triton_fails.setattr(grouped_gemm.kernels(), "outer_products", None)
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
def test_added_gradients_have_the_bits_of_triton(monkeypatch, counts, n, k, num_sets, apart):
    torch.manual_seed(2)
    others = [(7 * i + 3) % 97 for i in range(len(counts))]
    sets = [(rows_of(c, n), rows_of(c, k), ends_of(c)) for c in (counts, others)[:num_sets]]
    main_grads = torch.randn(len(counts), n, k, device="cuda")

    def run() -> Tensor:
        held = main_grads.clone()
        out: ExpertMatrices = [held[i].clone() for i in range(len(counts))] if apart else held
        grouped_gemm.linear_grad_weights(sets, out, accumulate=True)
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
    right = float8_gemm.linear(pair, weights, ends)

    def run() -> Tensor:
        grouped_gemm.linear_grad_weights([(grads, rows, ends)], out, accumulate=True)
        return float8_gemm.linear(pair, weights, ends)

    run()
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
    compiled = SimpleNamespace(weight_grad=lambda *arguments: called.append(arguments))
    monkeypatch.setattr(hopper_gemm, "_compiled", lambda: compiled)
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
    weights = QuantizedMatrices(*[torch.empty(2, columns, 128)] * 4)
    out = torch.empty(num_rows * columns + first, dtype=dtype)[first:].view(num_rows, columns)
    assert hopper_gemm.takes_float8(torch.empty(num_rows, 128), weights, out) == taken
    assert not hopper_gemm.takes_float8(torch.empty(num_rows, 256)[:, :128], weights, out)


def grad_set(num_rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    ends = torch.tensor([num_rows // 2, num_rows], dtype=torch.int32)
    return torch.empty(num_rows, 16, dtype=dtype), torch.empty(num_rows, 24, dtype=dtype), ends


@pytest.mark.parametrize(
    "num_rows, dtype, out_dtype, taken",
    [
        (1537, torch.bfloat16, torch.float32, True),
        (1536, torch.bfloat16, torch.float32, False),
        (1537, torch.bfloat16, torch.bfloat16, False),
        (1537, torch.float16, torch.float32, False),
    ],
)
def test_which_gradients_are_taken(on_hopper, num_rows, dtype, out_dtype, taken):
    """More than 768 rows per expert in all sets, in bfloat16, added to float32."""
    first, second = grad_set(num_rows - 100, dtype), grad_set(100, dtype)
    out = torch.zeros(2, 16, 24, dtype=out_dtype)
    assert hopper_gemm.add_weight_grads([first, grad_set(0, dtype), second], out) == taken
    if not taken:
        assert on_hopper == []
        return
    ((sets, _, *sizes),) = on_hopper
    expected = [(g.data_ptr(), r.data_ptr(), 32, 48, len(g), e.data_ptr()) for g, r, e in (first, second)]
    assert sets == expected and sizes == [16, 24, 2, 132, 11]


def test_gradients_at_odd_addresses_are_not_taken(on_hopper):
    out = torch.zeros(2 * 16 * 24 + 1)[1:].view(2, 16, 24)
    assert not hopper_gemm.add_weight_grads([grad_set(1537)], out) and on_hopper == []
