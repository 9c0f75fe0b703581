"""The errors for what an engine finds: facts in, one error on every rank and for every engine out."""

import pickle

import pytest

from ep_dispatcher import checks
from ep_dispatcher.errors import UnknownExpertError, again


@pytest.mark.parametrize(
    "facts,given",
    [
        (("handle", 1, 3, 0, 0), ("the plan of epoch 3", "None")),
        (("layout", 2, 1, 0, 0), ("'expert'", "'rank'")),
        (("expert_alignment", 1, 8, 0, 1), ("8", "1")),
        (("topk_weights", 2, 0, 0, 1), ("None", "them")),
        (("x: bytes per row", 1, 64, 0, 128), ("64", "128")),
        (("operation", 1, 1, 0, 0), ("a combine", "a dispatch")),
    ],
)
def test_a_disagreement_names_both(facts, given):
    said = str(checks.disagreement(*facts))
    assert said.startswith(f"{facts[0]}: ") and ("backward" in said) == (facts[0] in ("handle", "operation"))
    assert f"rank {facts[1]}" in said and "rank 0" in said and all(each in said for each in given)


def test_too_few_rows_names_the_ranks_that_have_too_few():
    found = checks.too_few_rows([(40, 39), (3, 39), (70, -1), (8, 0)])
    assert str(found).startswith("max_recv_rows: ") and found.needed_rows == 40
    assert all(f"rank {rank}" in str(found) for rank in (0, 3))
    assert not any(f"rank {rank}" in str(found) for rank in (1, 2))


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
    assert str(checks.too_many_rows(64, 0, 2**40)).startswith("expert_alignment: given 64")
    assert str(checks.too_many_choices(2, 2**31)).startswith("topk_idx: rank 2")
