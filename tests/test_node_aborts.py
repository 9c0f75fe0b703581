"""Search the model of the protocol between nodes for ranks that wait for ever when a rank aborts, at any event.

node_aborts.py says why no rank does, and checks what this follows from, for all orders of events at once. A search lets
ranks abort, and visits all states of 2 nodes of 1 rank.

A rank that has not aborted completes all its operations, or it hears of an abort, without any limit. What it reads is
right. (Between hosts the host of a rank signals its own node alone when it aborts by itself. Then rail peers wait until
their limit is over: SIGNAL_RAIL is left out.) Who is named as late is not modelled; tests/waits.cpp tests that.
"""

from itertools import product

import node_aborts
import pytest
from conftest import exhaustive
from node_aborts import Aborts, deaf_waits, explore_aborts, late_raises
from node_protocol import CACHED, COMBINE, COUNTED, DISPATCH, FACTORED, QUIET, RAIL_ENDS, WIRE_FLAGS, Protocol
from test_node_model import BOTH, OPERATIONS, build, differing, subsets

RULES = [
    value for name, value in vars(node_aborts).items() if name.isupper() and isinstance(value, str) and " " in value
]


def models(*, longest: int, **options) -> list[Protocol]:
    """Return programs of all operations, with usable and unusable plans, and of ranks that differ."""
    shapes = [(2, 1, 2), (2, 2, 2), (3, 2, 1)]
    found = [
        build(shape, list(program), blocks=blocks, unusable=unusable, **options)
        for shape, blocks in product(shapes, BOTH)
        for program in product(OPERATIONS, repeat=longest)
        for unusable in subsets(longest)
    ]
    for programs in differing(4, (FACTORED,), (DISPATCH, COMBINE), (FACTORED,)):
        found += [build((2, 2, 2), programs, blocks=blocks, **options) for blocks in BOTH]
    return found


@pytest.mark.parametrize("longest", [1, exhaustive(2)])
def test_every_wait_hears_of_an_abort(longest):
    for model in models(longest=longest):
        assert not deaf_waits(model.events, Aborts()), model.programs


# Flags that an agent waits for in vain without a rule.
NEEDED = {
    node_aborts.LISTEN_TO_RELAY: {"called", "listed", "staged"},
    node_aborts.SIGNAL_NODE: {"called", "listed", "staged", "pushed", "freed", "consumed", "slots_free"},
    node_aborts.SIGNAL_RAIL: set(WIRE_FLAGS),
    node_aborts.POLL_OWN: {
        *("called", "listed", "staged", "pushed", "freed", "consumed", "slots_free", "summed", "sums_relayed"),
        *("begun", "launched", "arrived", "complete"),
    },
}


def test_all_rules_are_tried():
    assert set(RULES) == NEEDED.keys()


@pytest.mark.parametrize("rule", NEEDED)
def test_each_rule_is_needed(rule):
    program = [DISPATCH, COMBINE, COUNTED, COMBINE, CACHED]
    found = [deaf_waits(build((2, 2, 2), program, blocks=blocks).events, Aborts(rule)) for blocks in BOTH]
    assert set().union(*found) == NEEDED[rule]


@pytest.mark.parametrize("longest", [1, exhaustive(2)])
def test_a_rank_that_leaves_has_raised_all_its_flags(longest):
    for model in models(longest=longest):
        assert not late_raises(model.events), model.programs


@pytest.mark.parametrize("rule", [QUIET, RAIL_ENDS])
def test_flags_that_rise_late_are_found(rule):
    models = [build((2, 2, 2), [DISPATCH, COMBINE], blocks=blocks, without=[rule]) for blocks in BOTH]
    late = set().union(*(late_raises(model.events) for model in models))
    assert late == {"inbox_free", "items_arrived", "rows_arrived", "sums_arrived"}


# Programs of 2 nodes of 1 rank with few blocks, chunks, operations with an unusable plan, and the number of states.
@pytest.mark.parametrize(
    "program,chunks,unusable,states",
    [
        ([COMBINE], 1, (), 50_772),
        ([(COMBINE,), (DISPATCH,)], 1, (), 43_012),
        exhaustive([COMBINE, COMBINE], 1, (), 83_636),
        exhaustive([COMBINE], 2, (), 338_152),
        exhaustive([CACHED], 1, (), 178_720),
        exhaustive([DISPATCH], 1, (1,), 119_640),
        exhaustive([DISPATCH], 1, (), 399_480),
    ],
)
def test_an_abort_in_every_state(program, chunks, unusable, states):
    events = build((2, 1, chunks), program, blocks="few", unusable=unusable).events
    findings = explore_aborts(events, Aborts())
    assert not findings.faults, findings.trace
    assert findings.states == states


def test_a_wait_in_vain_is_found_in_some_state():
    events = build((2, 1, 1), [COMBINE], blocks="few").events
    findings = explore_aborts(events, Aborts(node_aborts.SIGNAL_RAIL))
    assert findings.faults == {"deadlock"}
    assert "aborts" in findings.trace
    assert {events[number].rank for number in findings.waiting} == {(0, 0), (1, 0)}
