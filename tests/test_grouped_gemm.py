"""Grouped GEMMs against one matrix product per expert in float64, and what they leave alone."""

import pytest
import torch
from lib.grouped_gemm import COUNTS, close, groups, rows_of

from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.address_table import address_table, table_of
from ep_dispatcher.moe.expert_matrices import (
    DescribedMatrices,
    WithCopies,
    _shift_table,
    lowest_and_shifts,
    places_of,
)
from ep_dispatcher.tools.testing import device_of

PLACES = ("together", "backwards", "apart", "parted", "odd")


@pytest.fixture(params=COUNTS)
def ends(request, engine) -> torch.Tensor:
    return torch.tensor(COUNTS[request.param]).cumsum(0).int().to(device_of(engine, 0))


def matrices(place: str, experts: int, n: int, k: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """ExpertMatrices [n, k], one per expert.

    Neighbours in one tensor, in either order; tensors of their own; with unequal gaps between them; at odd addresses.
    """
    stack = (torch.randn(experts, n, k) / k**0.5).to(device, dtype)
    if place == "apart":
        return [matrix.clone() for matrix in stack]
    if place in ("parted", "odd"):
        begins = [e * n * k + (8 * e * e if place == "parted" else e + 1) for e in range(experts)]
        memory = stack.new_empty(begins[-1] + n * k)
        found = [memory[begin:][: n * k].view(n, k) for begin in begins]
        for to, matrix in zip(found, stack):
            to.copy_(matrix)
        return found
    return list(stack)[:: -1 if place == "backwards" else 1]


@pytest.mark.parametrize("experts", [1, 5])
def test_a_table_has_the_address_of_each_matrix(engine, experts):
    """Of one tensor its strides give them, also where all experts share one matrix."""
    stack = torch.zeros(experts, 4, 8, device=device_of(engine, 0))
    for given in (stack, list(stack), stack.flip(0), stack[:1].expand(5, 4, 8), [*stack[:1]] * 5, stack[:, 1:]):
        table, is_aligned = address_table(given, stack.device)
        assert is_aligned and table.tolist() == [one.data_ptr() for one in given]
    table, is_aligned = address_table(stack.view(-1)[1:9].expand(2, 8), stack.device)
    assert not is_aligned and table.tolist() == [stack.data_ptr() + 4] * 2


def test_where_weights_can_lie_without_a_copy():
    """At multiples of 16 bytes."""
    memory = torch.arange(28 * 8, dtype=torch.float32)
    four = [memory[4 * i :][:32].view(4, 8) for i in (0, 9, 20, 40)]
    for weights, right in (
        (four, (0, 9, 20, 40)),
        (four[::-1], (40, 20, 9, 0)),
        ([four[0], four[0], four[0]], (0, 0, 0)),
        (memory.view(7, 4, 8), tuple(range(0, 56, 8))),
        (four[3:], (0,)),
    ):
        base, shifts = lowest_and_shifts(weights)
        assert shifts == right and base.data_ptr() == min(weight.data_ptr() for weight in weights)
    columns = torch.arange(32.0).view(8, 4)
    for weights in ([columns.t(), columns.t()], [memory[1:][:32].view(4, 8), four[1]], columns.view(2, 4, 4).mT):
        base, shifts = lowest_and_shifts(weights)
        step = weights[0].nbytes // 16
        assert shifts == (0, step) and torch.equal(base, weights[0]), "copied"
        copies = base.as_strided((2, *base.shape), (4 * step, base.shape[1], 1))
        assert torch.equal(copies[1], weights[1])


def test_matrices_are_described_again_where_they_have_moved():
    weights = DescribedMatrices(torch.zeros(8, 16) for _ in range(3))
    for _ in range(2):
        before = places_of(weights)
        assert places_of(weights) is before and str(before) == str(places_of([*weights]))
        weights[2].data = torch.zeros(8, 16)
    weights[0].data = torch.zeros(16, 8).t()
    assert torch.equal(places_of(weights).base, weights[0]), "copied"
    weights[0].data.fill_(1)
    assert places_of(weights).base[0, 0] == 1, "copied anew"


def test_tables_from_the_host_are_refused_during_a_capture(monkeypatch):
    """Of weights and of gradients at irregular steps. Even steps need none."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu = torch.device("cuda", 0)
    for make, irregular in ((_shift_table, (0, 3, 7)), (table_of, (16, 64, 160))):
        with pytest.raises(ValueError, match="3 matrices lie at new addresses, and at irregular steps"):
            make(irregular, gpu)
    assert _shift_table((0, 3, 6), gpu) == (7, None, 0, 3)


def test_ends_are_those_of_the_counts(engine):
    counts = torch.tensor([3, 0, 5, 1], device=device_of(engine, 0))
    for rows in (torch.zeros(9, 8, dtype=dtype, device=counts.device) for dtype in (torch.bfloat16, torch.float32)):
        for given in (counts, counts[:1], counts.new_zeros(4)):
            ends = grouped_gemm.ends_of(given, rows)
            assert ends.dtype == torch.int32 and torch.equal(ends, given.cumsum(0).int())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n, k, dtype", [(48, 72, torch.bfloat16), (304, 128, torch.float16), (264, 40, torch.float32)])
def test_each_row_meets_the_weights_of_its_expert(ends, place, n, k, dtype):
    torch.manual_seed(1)
    weights = matrices(place, len(ends), n, k, dtype, ends.device)
    rows, grad = rows_of(ends, k, dtype), rows_of(ends, n, dtype)
    forward, grad_rows = grouped_gemm.linear(rows, weights, ends), grouped_gemm.linear_grad_rows(grad, weights, ends)
    assert forward.dtype == grad_rows.dtype == dtype and forward.shape[0] == grad_rows.shape[0] == rows.shape[0]
    for group, weight in zip(groups(ends), weights):
        close(forward[group], rows[group].double() @ weight.double().t(), dtype)
        close(grad_rows[group], grad[group].double() @ weight.double(), dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype, of_sums", [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
def test_the_gradient_of_weights_is_written_or_added(ends, place, accumulate, dtype, of_sums):
    torch.manual_seed(2)
    n, k = 136, 72
    sums = matrices(place, len(ends), n, k, of_sums, ends.device)
    before = [matrix.double() for matrix in sums]
    grad, rows = rows_of(ends, n, dtype), rows_of(ends, k, dtype)
    grouped_gemm.linear_grad_weights([(grad, rows, ends)], sums, accumulate=accumulate)
    for group, seen, old in zip(groups(ends), sums, before):
        close(seen, grad[group].double().t() @ rows[group].double() + (old if accumulate else 0), dtype)


@pytest.mark.parametrize("more", COUNTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_over_two_sets_of_rows_are_rounded_once(ends, more, dtype):
    torch.manual_seed(4)
    n, k, experts = 136, 72, len(ends)
    counts = (COUNTS[more] * 4)[:experts]
    sets = [
        (rows_of(end, n, dtype), rows_of(end, k, dtype), end)
        for end in (ends, torch.tensor(counts).cumsum(0).int().to(ends.device))
    ]
    right = torch.zeros(experts, n, k, dtype=torch.float64, device=ends.device)
    for grad, rows, end in sets:
        for e, group in enumerate(groups(end)):
            right[e] += grad[group].double().t() @ rows[group].double()
    found = torch.empty_like(right, dtype=dtype)
    grouped_gemm.linear_grad_weights(sets, found, accumulate=False)
    # Half a unit of the last place, and what sums in float32 lose.
    allowed = right.abs() * torch.finfo(dtype).eps / 2 + 1e-3
    assert ((found.double() - right).abs() <= allowed).all()
    sums = torch.ones_like(right, dtype=torch.float32)
    grouped_gemm.linear_grad_weights(sets, sums, accumulate=True)
    close(sums, right + 1, dtype)  # on a CPU the sum is rounded before it is added
    nothing = [(grad[:0], rows[:0], torch.zeros_like(end)) for grad, rows, end in sets]
    for first, second in ((sets[0], nothing[1]), (nothing[0], sets[0])):
        alone, with_none = torch.empty_like(found), torch.empty_like(found)
        grouped_gemm.linear_grad_weights(sets[:1], alone, accumulate=False)
        grouped_gemm.linear_grad_weights([first, second], with_none, accumulate=False)
        assert torch.equal(alone, with_none)


def test_nobody_writes_behind_the_last_row(engine):
    """Nor reads there: what lies there may be no number."""
    device = device_of(engine, 0)
    ends = torch.tensor([3, 40], dtype=torch.int32, device=device)
    rows, weights = rows_of(ends, 64, torch.bfloat16), matrices("together", 2, 32, 64, torch.bfloat16, device)
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN
    try:
        out = grouped_gemm.linear(rows, weights, ends)
        for t in (out, grouped_gemm.linear_grad_rows(out, weights, ends)):
            assert t[:40].isfinite().all() and t[40:].isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_same_bits_each_time(engine):
    device = device_of(engine, 0)
    ends = torch.tensor([100, 100, 333], dtype=torch.int32, device=device)
    rows, weights = rows_of(ends, 256, torch.bfloat16), matrices("apart", 3, 384, 256, torch.bfloat16, device)
    first = grouped_gemm.linear(rows, weights, ends)[:333]
    for _ in range(3):
        assert torch.equal(grouped_gemm.linear(rows, weights, ends)[:333], first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, and so no CUDA graph")
def test_gradients_in_a_list_are_written_by_a_graph():
    """While a graph was captured their addresses were copied from the host, which is an error there."""
    ends = torch.tensor([40, 40, 100], dtype=torch.int32, device="cuda")
    grad, rows = rows_of(ends, 48, torch.bfloat16), rows_of(ends, 64, torch.bfloat16)
    right = torch.empty(3, 48, 64, dtype=torch.bfloat16, device="cuda")
    grouped_gemm.linear_grad_weights([(grad, rows, ends)], right, accumulate=False)
    grouped_gemm.linear_grad_weights([(grad, rows, ends)], list(torch.empty_like(right)), accumulate=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.zeros_like(right)
        grouped_gemm.linear_grad_weights([(grad, rows, ends)], list(found), accumulate=False)
    for _ in range(2):
        found.zero_()
        graph.replay()
        assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_that_lie_far_away_are_the_experts_behind(engine, dtype):
    """In one call or in two, with the bits of one tensor of all experts; gradients of copies go where they belong."""
    device, own, n, k = device_of(engine, 0), 3, 48, 64
    ends = torch.tensor([40, 40, 170, 300, 301], dtype=torch.int32, device=device)
    weights = torch.randn(5, n, k).to(device, dtype)
    bias, row_weights = torch.randn(5, n).to(device, dtype), torch.rand(310, device=device)
    rows, grad = torch.randn(310, k).to(device, dtype), torch.randn(310, n).to(device, dtype)
    both = WithCopies(weights[:own], [weights[3].clone(), weights[4].clone()])
    right = grouped_gemm.linear(rows, weights, ends, bias, row_weights)[:301]
    assert torch.equal(grouped_gemm.linear(rows, both, ends, bias, row_weights)[:301], right)
    out = rows.new_zeros(310, n)
    grouped_gemm.linear(rows, both.own, ends, bias, row_weights, out=out)
    assert not out[170:].any()
    grouped_gemm.linear(rows, both.copies, ends, bias, row_weights, out=out, first_expert=own)
    assert torch.equal(out[:301], right)
    right = grouped_gemm.linear_grad_rows(grad, weights, ends)[:301]
    assert torch.equal(grouped_gemm.linear_grad_rows(grad, both, ends)[:301], right)
    grouped_gemm.linear_grad_rows(grad, both.own, ends, out=rows)
    grouped_gemm.linear_grad_rows(grad, both.copies, ends, out=rows, first_expert=own)
    assert torch.equal(rows[:301], right)

    whole = torch.empty(5, n, k, dtype=torch.float32, device=device)
    grouped_gemm.linear_grad_weights([(grad, rows, ends)], whole, accumulate=False)
    for first, number in ((0, own), (own, 2)):
        part = torch.empty(number, n, k, dtype=torch.float32, device=device)
        grouped_gemm.linear_grad_weights([(grad, rows, ends)], part, accumulate=False, first_expert=first)
        assert torch.equal(part, whole[first : first + number])
        sums = torch.empty(number, n, dtype=torch.float32, device=device)
        grouped_gemm.linear_grad_bias([(grad, ends, row_weights)], sums, accumulate=False, first_expert=first)
        assert sums.isfinite().all()


def test_a_free_slot_keeps_what_it_has_and_an_empty_copy_gets_zeros(engine):
    device = device_of(engine, 0)
    ends = torch.tensor([40, 40, 40], dtype=torch.int32, device=device)
    held = torch.tensor([[-1, 0, 0], [7, 0, 0]], dtype=torch.int32, device=device)
    rows = torch.randn(50, 64).to(device, torch.bfloat16)
    out = torch.full((2, 64, 64), 7.0, device=device)
    grouped_gemm.linear_grad_weights([(rows, rows, ends)], out, accumulate=False, first_expert=1, held=held)
    assert not out[1].any() and (engine == "cpu" or bool((out[0] == 7).all()))
