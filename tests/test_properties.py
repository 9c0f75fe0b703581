"""Properties that hold for every routing, on routings that nobody would write by hand."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lib.dispatch_combine import Case, Inputs, check_case

from ep_dispatcher import reference
from ep_dispatcher.tools.testing import same_bits, with_negative_zeros

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


@EXAMPLES
@given(example=cases(recv="counted"))
def test_what_goes_out_comes_back_once_per_expert(example):
    """By the definition, from experts that return what they get."""
    case, topk_idx = example
    inputs, options = small_integers(case, topk_idx), dict(num_experts=case.num_experts, layout=case.layout)
    given = (inputs.x, topk_idx, inputs.topk_weights)
    received = reference.dispatch(*given, expert_alignment=case.alignment, **options)
    y = [out.x for out in received]
    if case.layout == "rank":  # one row stands for all local experts of the token
        y = [out.x * (out.topk_idx >= 0).sum(1, keepdim=True).to(case.dtype) for out in received]
    row_weights = [out.topk_weights for out in received] if case.weighted else None
    combined = reference.combine(y, received, topk_idx, row_weights, node_of=case.node_of, **options)
    for rank, ((x, weights), given_x, idx) in enumerate(zip(combined, inputs.x, topk_idx)):
        assert same_bits(x, 0.0 + given_x * (idx >= 0).sum(1, keepdim=True).to(case.dtype))  # sums begin with +0.0
        if case.weighted:
            assert same_bits(weights, torch.where(idx >= 0, inputs.topk_weights[rank], 0))
        else:
            assert weights is None
    counts = torch.cat([out.tokens_per_expert for out in received])
    every_choice = torch.cat(topk_idx).flatten()
    assert torch.equal(counts, torch.bincount(every_choice[every_choice >= 0], minlength=case.num_experts))
    for out in received:
        tokens, rows, num_rows = out.tokens_per_expert, out.rows_per_expert, len(out.x)
        assert (rows >= tokens).all() and (rows - tokens < case.alignment).all() and (rows % case.alignment == 0).all()
        assert num_rows == rows.sum() if case.layout == "expert" else tokens.max() <= num_rows <= tokens.sum()
