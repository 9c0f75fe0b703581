"""Properties that hold for every routing, on routings that nobody would write by hand."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_dispatch_combine import Case, Inputs, check_case, make_buffer, to

from ep_dispatcher.tools.testing import device_of, same_bits, with_negative_zeros

EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
NODES = [(4, 2), (1, 1), (2, 2), (2, 1), (6, 3), (3, 1), (4, 4), (6, 2)]


@st.composite
def cases(draw, **fixed) -> tuple[Case, list[torch.Tensor]]:
    """A configuration and the ``topk_idx`` of every rank."""
    num_ranks, ranks_per_node = draw(st.sampled_from(NODES))
    experts_per_rank = draw(st.integers(1, 4))
    num_experts = num_ranks * experts_per_rank
    layout = draw(st.sampled_from(["expert", "rank"]))
    options = dict(
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        num_topk=draw(st.integers(1, min(6, num_experts))),
        hidden=draw(st.sampled_from([8, 16, 40])),
        experts_per_rank=experts_per_rank,
        layout=layout,
        alignment=draw(st.sampled_from([1, 2, 3, 16])) if layout == "expert" else 1,
        recv=draw(st.sampled_from(["counted", "exact", "spare"])),
        index_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        weighted=draw(st.booleans()),
    )
    case = Case(num_ranks, ranks_per_node, **(options | fixed))
    # A permutation cut to num_topk, with some of it masked: every row without a repetition is possible.
    experts = st.permutations(range(num_experts)).map(lambda order: order[: case.num_topk])
    masks = st.lists(st.booleans(), min_size=case.num_topk, max_size=case.num_topk)
    row = st.builds(lambda chosen, mask: [-1 if m else e for e, m in zip(chosen, mask)], experts, masks)
    topk_idx = [draw(st.lists(row, max_size=6)) for _ in range(num_ranks)]
    return case, [torch.tensor(idx, dtype=case.index_dtype).reshape(-1, case.num_topk) for idx in topk_idx]


def small_integers(case: Case, topk_idx: list[torch.Tensor]) -> Inputs:
    """Rows and weights that no dtype rounds, not even after some of them were summed."""
    generator = torch.Generator().manual_seed(3)
    x = [torch.randint(-8, 9, (idx.shape[0], case.hidden), generator=generator).to(case.dtype) for idx in topk_idx]
    x = [with_negative_zeros(rows, seed=rank) for rank, rows in enumerate(x)]
    weights = [torch.randint(1, 9, idx.shape, generator=generator).float() for idx in topk_idx]
    return Inputs(x, topk_idx, weights if case.weighted else None)


@EXAMPLES
@given(example=cases())
def test_every_routing_has_the_bits_of_the_definition(pools, engine, example):
    case, topk_idx = example
    inputs = small_integers(case, topk_idx)
    inputs.x[:] = [x * 0.37 for x in inputs.x]  # now sums do round, and their order shows
    check_case(pools, engine, case, inputs)


def there_and_back(rank: int, engine: str, case: Case, inputs: Inputs):
    """Dispatch, experts that return what they get, combine."""
    device = device_of(engine, rank)
    with make_buffer(case, engine, max_tokens_per_rank=6) as buffer:
        weights = to(device, inputs.topk_weights[rank]) if case.weighted else None
        options = dict(layout=case.layout, expert_alignment=case.alignment)
        out = buffer.dispatch(to(device, inputs.x[rank]), to(device, inputs.topk_idx[rank]), weights, **options)
        y = out.x
        if case.layout == "rank":  # one row stands for all local experts of the token
            y = y * (out.topk_idx >= 0).sum(1, keepdim=True).to(y.dtype)
        result = buffer.combine(y, out.handle, topk_weights=out.topk_weights)
        return result.x, result.topk_weights, out.tokens_per_expert, out.rows_per_expert, out.x.shape[0]


@EXAMPLES
@given(example=cases(recv="counted"))
def test_what_goes_out_comes_back_once_per_expert(pools, engine, example):
    case, topk_idx = example
    inputs = small_integers(case, topk_idx)
    ranks = pools(case.num_ranks).run(there_and_back, engine, case, inputs)
    for (x, weights, *_), given_x, idx, rank in zip(ranks, inputs.x, topk_idx, range(case.num_ranks)):
        assert same_bits(x, 0.0 + given_x * (idx >= 0).sum(1, keepdim=True).to(case.dtype))  # sums begin with +0.0
        if case.weighted:
            assert same_bits(weights, torch.where(idx >= 0, inputs.topk_weights[rank], 0))
        else:
            assert weights is None
    counts = torch.cat([tokens for _, _, tokens, _, _ in ranks])
    every_choice = torch.cat(topk_idx).flatten()
    assert torch.equal(counts, torch.bincount(every_choice[every_choice >= 0], minlength=case.num_experts))
    for _, _, tokens, rows, num_rows in ranks:
        assert (rows >= tokens).all() and (rows - tokens < case.alignment).all() and (rows % case.alignment == 0).all()
        assert num_rows == rows.sum() if case.layout == "expert" else tokens.max() <= num_rows <= tokens.sum()
