"""The words for what an engine finds: facts in, one text on every rank and for every engine out."""

import pytest

from ep_dispatcher import checks


@pytest.mark.parametrize(
    "facts,said",
    [
        (
            ("handle", 1, 3, 0, 0),
            "handle: rank 1 gave the plan of epoch 3, rank 0 gave None; all ranks must give the same",
        ),
        (("layout", 2, 1, 0, 0), "layout: rank 2 gave 'expert', rank 0 gave 'rank'; all ranks must give the same"),
        (
            ("expert_alignment", 1, 8, 0, 1),
            "expert_alignment: rank 1 gave 8, rank 0 gave 1; all ranks must give the same",
        ),
        (
            ("topk_weights", 2, 0, 0, 1),
            "topk_weights: rank 2 gave None, rank 0 gave them; all ranks must give the same",
        ),
        (
            ("x: bytes per row", 1, 64, 0, 128),
            "x: bytes per row: rank 1 gave 64, rank 0 gave 128; all ranks must give the same",
        ),
        (
            ("operation", 1, 1, 0, 0),
            "operation: rank 1 is in a combine, rank 0 is in a dispatch; all ranks must call the same",
        ),
    ],
)
def test_a_disagreement_names_both(facts, said):
    assert checks.disagreement(*facts) == said


def test_too_few_rows_names_the_ranks_that_have_too_few():
    said = checks.too_few_rows([(40, 39), (3, 39), (7, -1), (8, 0)])
    assert said == "max_recv_rows: too small: rank 0 needs 40 rows, given 39; rank 3 needs 8 rows, given 0"


def test_more_than_can_be_counted():
    said = checks.too_many_rows(64, 0, 2**40)
    assert said.startswith(
        f"expert_alignment: given 64, with which rank 0 receives {2**40} rows; allowed: up to 2147483647"
    )
    assert checks.too_many_choices(2, 2**31).startswith("topk_idx: rank 2 is given 2147483648 choices; allowed: up to")
