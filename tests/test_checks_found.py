"""The words for what an engine finds: facts in, one text on every rank and for every engine out."""

import pickle

import pytest

from ep_dispatcher import checks
from ep_dispatcher.errors import UnknownExpertError, again

BACKWARD = ". So it looks if one of them is in a backward, and the other in a forward pass"


@pytest.mark.parametrize(
    "facts,said",
    [
        (
            ("handle", 1, 3, 0, 0),
            "handle: rank 1 gave the plan of epoch 3, rank 0 gave None; all ranks must give the same" + BACKWARD,
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
            "operation: rank 1 is in a combine, rank 0 is in a dispatch; all ranks must call the same" + BACKWARD,
        ),
    ],
)
def test_a_disagreement_names_both(facts, said):
    assert str(checks.disagreement(*facts)) == said


def test_too_few_rows_names_the_ranks_that_have_too_few():
    found = checks.too_few_rows([(40, 39), (3, 39), (70, -1), (8, 0)])
    assert str(found) == "max_recv_rows: too small: rank 0 needs 40 rows, given 39; rank 3 needs 8 rows, given 0"
    assert found.needed_rows == 40


def test_an_expert_above_the_last_one_is_an_error_with_its_token():
    found = checks.bad_entry((3, 1, 8, False), 8)
    assert type(found) is UnknownExpertError and found.token == 3
    for entry in ((3, 1, -2, False), (3, 1, 7, True)):
        assert type(checks.bad_entry(entry, 8)) is ValueError


@pytest.mark.parametrize(
    "found", [checks.too_few_rows([(40, 39)]), checks.bad_entry((3, 1, 8, False), 8), ValueError("x")], ids=str
)
def test_an_error_that_is_made_again_keeps_its_facts(found):
    made = pickle.loads(pickle.dumps(again(found, ". And more")))
    assert type(made) is type(found) and str(made) == f"{found}. And more" and made.args[1:] == found.args[1:]


def test_more_than_can_be_counted():
    said = str(checks.too_many_rows(64, 0, 2**40))
    assert said.startswith(
        f"expert_alignment: given 64, with which rank 0 receives {2**40} rows; allowed: up to 2147483647"
    )
    said = str(checks.too_many_choices(2, 2**31))
    assert said.startswith("topk_idx: rank 2 is given 2147483648 choices; allowed: up to")
