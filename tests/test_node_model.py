"""Search a model of the protocol between nodes for deadlocks and for memory that is read too early or written too soon.

node_protocol.py writes the protocol down, node_model.py searches. No order of events may lead to a fault: every rank
completes every operation, every read finds the epoch that it waits for, nothing is written to a rank that has completed
the operation, no flag is set back, and an operation completes on a rank only after every rank has begun it.

Nearly all tests use ``check_order``: it answers for every order of events, so 2 nodes of 2 ranks take milliseconds.
``explore`` visits every state. It can do so for 2 nodes of 1 rank with few blocks (a dispatch of 2 chunks: 266,043
states) and for a small combine of 2 nodes of 2 ranks, and shows that both searches find the same.

The model leaves out: aborts and hosts that stop; plans that do not fit; the order in which stores inside a node become
visible (a raise covers all stores before it, as docs/protocol.md demands); the content of data, but for its epoch.
"""

import random
from itertools import product

import node_protocol as protocol
import pytest
from conftest import exhaustive
from node_model import COMPLETE, check_order, explore
from node_protocol import CACHED, COMBINE, COUNTED, DISPATCH, Protocol, Routing

BOTH = ("few", "many")
RULES = [value for name, value in vars(protocol).items() if name.isupper() and isinstance(value, str) and " " in value]
RULES = [rule for rule in RULES if rule not in (COUNTED, CACHED)]


def everywhere(nodes: int, ranks: int, chunks: int) -> Routing:
    """Send every chunk of every rank to all ranks."""
    receivers = frozenset(product(range(nodes), range(ranks)))
    return {(source, chunk): receivers for source in receivers for chunk in range(chunks)}


def somewhere(nodes: int, ranks: int, chunks: int, seed: int) -> Routing:
    """Send each chunk to any ranks: to none, to some or to all."""
    choose = random.Random(seed).random
    routing = everywhere(nodes, ranks, chunks)
    return {at: frozenset(r for r in sorted(routing[at]) if choose() < 0.5) for at in sorted(routing)}


def routings(nodes: int, ranks: int, chunks: int) -> list[Routing]:
    return [everywhere(nodes, ranks, chunks), somewhere(nodes, ranks, chunks, 3)]


def build(shape: tuple[int, int, int], program, **options) -> Protocol:
    nodes, ranks, chunks = shape
    return Protocol(nodes, ranks, program, routings(*shape), chunks=chunks, **options)


def assert_no_fault(model: Protocol) -> None:
    findings = check_order(model.events)
    assert not findings.faults, f"{findings.faults} with {model.programs}:\n{findings.trace}"


def differing(num_ranks: int, before, kinds, after):
    """Yield programs of three operations; in the second one ranks do not all give the same."""
    for first, mixed, last in product(before, product(kinds, repeat=num_ranks), after):
        if len(set(mixed)) > 1:
            yield [(first, kind, last) for kind in mixed]


# Nodes, ranks of a node, chunks of tokens of a rank.
@pytest.mark.parametrize("blocks", BOTH)
@pytest.mark.parametrize(
    "shape,length",
    [((2, 1, 3), 3), ((2, 2, 2), 3), ((3, 2, 1), 2), exhaustive((2, 2, 3), 4), exhaustive((3, 3, 2), 3)],
)
def test_no_order_goes_wrong(shape, length, blocks):
    """All programs of so many operations."""
    for program in product((DISPATCH, COUNTED, CACHED, COMBINE), repeat=length):
        assert_no_fault(build(shape, list(program), blocks=blocks))


@pytest.mark.parametrize("blocks", BOTH)
@pytest.mark.parametrize(
    "shape,kinds",
    [
        ((2, 1, 2), (DISPATCH, COUNTED, CACHED, COMBINE)),
        ((2, 2, 2), (DISPATCH, COMBINE)),
        exhaustive((2, 2, 2), (DISPATCH, CACHED, COMBINE)),
        exhaustive((3, 2, 2), (DISPATCH, COMBINE)),
    ],
)
def test_ranks_that_differ_stay_in_step(shape, kinds, blocks):
    """Some ranks dispatch while others combine, in all ways, between operations in which all ranks agree."""
    for programs in differing(shape[0] * shape[1], kinds, kinds, kinds):
        assert_no_fault(build(shape, programs, blocks=blocks))


@pytest.mark.parametrize("seeds", [range(40), exhaustive(range(40, 600))])
def test_long_programs_of_any_routing(seeds):
    for seed in seeds:
        choose = random.Random(seed)
        nodes, ranks, chunks = shape = choose.choice([(2, 1, 3), (2, 2, 2), (2, 2, 3), (3, 2, 2), (2, 3, 2)])
        length = choose.randint(3, 7)
        programs = [[choose.choice((DISPATCH, COUNTED, CACHED, COMBINE)) for _ in range(length)]] * (nodes * ranks)
        programs = [
            tuple(choose.choice((DISPATCH, COMBINE)) if choose.random() < 0.1 else op for op in p) for p in programs
        ]
        plans = [somewhere(*shape, seed=choose.random()) for _ in range(3)]
        assert_no_fault(Protocol(nodes, ranks, programs, plans, chunks=chunks, blocks=choose.choice(BOTH)))


def test_the_model_is_not_empty():
    """Every kind of memory is written and read, and every flag is raised and waited for."""
    events = build((2, 2, 2), [DISPATCH, COUNTED, COMBINE, CACHED, COMBINE], blocks="many").events
    accesses = {(kind, cell[0]) for event in events for kind, cell, _ in event.accesses}
    written, read = ({name for kind, name in accesses if kind == wanted} for wanted in ("write", "read"))
    assert written == read
    assert read == {
        *("call", "counts", "items", "table_in", "items_out", "table_out", "staging"),
        *("slots", "weights", "sums", "rail weights"),
    }
    raised = {flag[0] for event in events for flag, _ in event.raises}
    waited_for = {flag[0] for event in events for flag, _ in event.waits}
    assert raised == waited_for == {
        *("called", "listed", "staged", "pushed", "consumed", "slots_free", "summed"),
        *("call_arrived", "items_arrived", "rows_arrived", "sums_arrived"),
        *("begun", "launched", "arrived", COMPLETE),
    }  # fmt: skip


# What goes wrong in some order when a rule is missing.
NEEDED = {
    protocol.FENCE: {
        *("late call", "late counts", "late items", "late table_in", "late staging", "late sums", "late rail weights"),
        *(
            "stale call",
            "stale counts",
            "stale items",
            "stale table_in",
            "stale staging",
            "stale sums",
            "stale rail weights",
        ),
    },
    protocol.QUIET: {"stale staging", "stale weights", "falling call_arrived"},
    protocol.RAIL_ENDS: {"stale call", "stale staging", "stale weights", "falling call_arrived"},
    protocol.TWO_CALLS: {"stale call"},
    protocol.TWO_COUNTS: {"stale counts"},
    protocol.SLOTS_FREE: {"stale slots", "stale weights"},
    protocol.AGREE_ALL: {"early begun", "late call", "late counts", "stale counts", "stale staging"},
    protocol.AGREE_BEFORE_LISTS: {"deadlock", "late staging", "stale staging"},
    protocol.AGREE_BEFORE_SUMS: {"deadlock", "late sums", "late rail weights"},
    protocol.RELAY_CALLS: {"early begun", "late call", "late counts", "stale call", "stale counts", "stale staging"},
    protocol.RELAY_LISTS: {"late items", "late table_in", "stale items", "stale table_in"},
    protocol.RELAY_ROWS: {"late staging", "stale staging"},
    protocol.RELAY_IN_ORDER: {"stale staging"},
    protocol.SUMS_ARRIVED: {"late sums", "late rail weights", "stale sums", "stale rail weights"},
    protocol.SUMMED: {"stale staging", "stale weights"},
    protocol.DRAIN: {"late slots", "late weights"},
    protocol.FREE_AFTER_DIFFERENCE: {"deadlock"},
    protocol.OTHERS_FIRST: {"deadlock"},
    protocol.SENDS_FIRST: {"deadlock"},
}
# Rules that follow from others: an agreement means that every rank has begun the operation, so it has completed all
# operations before. Each with the rule that covers it, and what goes wrong without both but not without that one.
COVERED = {
    protocol.CONSUMED_BEFORE_CALL: (protocol.AGREE_ALL, {"stale items"}),
    protocol.CALL_ARRIVED_BEFORE_LISTS: (protocol.AGREE_ALL, {"stale items", "stale table_in"}),
    protocol.CALL_ARRIVED_BEFORE_SUMS: (protocol.AGREE_BEFORE_SUMS, {"stale sums", "stale rail weights"}),
    protocol.CONSUMED_BEFORE_SUMS: (protocol.AGREE_BEFORE_SUMS, {"stale staging"}),
}


def faults_without(*rules: str) -> set[str]:
    """Return the faults of some programs of 2 nodes of 2 ranks: in four all agree, in four one operation differs."""
    by_node, by_local = (0, 0, 1, 1), (0, 1, 0, 1)

    def mixed(before, kinds, after, split):
        return [(before, kinds[part], after) for part in split]

    programs = [
        [DISPATCH, COMBINE, DISPATCH, COMBINE],
        [DISPATCH, DISPATCH, DISPATCH],
        [COMBINE, COMBINE, COMBINE],
        [CACHED, COUNTED, CACHED, COMBINE],
        mixed(DISPATCH, (DISPATCH, COMBINE), COMBINE, by_node),
        mixed(DISPATCH, (CACHED, COMBINE), COMBINE, by_local),
        mixed(COMBINE, (COMBINE, DISPATCH), DISPATCH, by_local),
        mixed(COMBINE, (COMBINE, CACHED), CACHED, by_node),
    ]
    models = [build((2, 2, 2), program, blocks=blocks, without=rules) for program in programs for blocks in BOTH]
    return set().union(*(check_order(model.events).faults for model in models))


def test_all_rules_are_tried():
    assert set(RULES) == NEEDED.keys() | COVERED.keys()


@pytest.mark.parametrize("rule", NEEDED)
def test_each_rule_is_needed(rule):
    assert faults_without(rule) == NEEDED[rule]


def test_rules_that_agreement_covers():
    assert not faults_without(*COVERED)


@pytest.mark.parametrize("rule", COVERED)
def test_covered_rules_are_needed_without_agreement(rule):
    other, faults = COVERED[rule]
    assert faults_without(rule, other) - faults_without(other) == faults


# Programs of 2 nodes of 1 rank with few blocks, and how many states their events lead to in any order.
@pytest.mark.parametrize(
    "program,chunks,states",
    [
        ([COMBINE, COMBINE, COMBINE], 2, 28_169),
        ([CACHED, CACHED], 1, 38_019),
        ([DISPATCH], 1, 106_172),
        ([(DISPATCH, COMBINE), (COMBINE, COMBINE)], 1, 4_940),
        ([(CACHED, COMBINE, COMBINE), (CACHED, CACHED, COMBINE)], 1, 26_506),
        exhaustive([COMBINE], 3, 83_589),
        exhaustive([COUNTED], 1, 85_720),
        exhaustive([DISPATCH], 2, 266_043),
        exhaustive([DISPATCH, DISPATCH], 1, 222_063),
        exhaustive([DISPATCH, COMBINE], 2, 273_207),
    ],
)
def test_every_state(program, chunks, states):
    findings = explore(build((2, 1, chunks), program, blocks="few").events)
    assert not findings.faults, findings.trace
    assert findings.states == states


@pytest.mark.parametrize("one_source,states", [(True, 28_954), exhaustive(False, 297_697)])
def test_every_state_of_two_ranks_a_node(one_source, states):
    """A combine of 2 nodes of 2 ranks. The chunk of each source was at one rank: of the other node, off the rail."""
    receivers = {(0, 0): (1, 1), (0, 1): (1, 0), (1, 0): (0, 1), (1, 1): (0, 0)}
    is_used = {source: source == (0, 0) or not one_source for source in receivers}
    routing = {(source, 0): frozenset([to] * is_used[source]) for source, to in receivers.items()}
    findings = explore(Protocol(2, 2, [COMBINE], [routing], chunks=1, blocks="few").events)
    assert not findings.faults, findings.trace
    assert findings.states == states


def falls(findings) -> bool:
    return any(fault.startswith("falling") for fault in findings.faults)


@pytest.mark.parametrize(
    "program",
    [
        [COMBINE, COMBINE],
        [(DISPATCH, COMBINE), (COMBINE, COMBINE)],
        [(COMBINE, COMBINE), (CACHED, COMBINE)],
        exhaustive([CACHED, CACHED]),
        exhaustive([CACHED, COMBINE]),
        exhaustive([(CACHED, CACHED), (COMBINE, CACHED)]),
    ],
)
def test_both_searches_find_the_same(program):
    """Without any one rule, the same events go wrong. Where a flag may fall, only that is sure to be found by both."""
    found = set()
    for rule in (None, *RULES):
        events = build((2, 1, 1), program, blocks="few", without=[rule]).events
        one, all_ = check_order(events), explore(events)
        assert one.waiting == all_.waiting, rule
        assert falls(one) == falls(all_), rule
        assert falls(one) or one.wrong == all_.wrong, rule
        found |= all_.faults
        # Each search gives an order of events that ends in a fault.
        assert bool(one.trace) == bool(all_.trace) == bool(one.faults)
    assert len(found) > 4


@pytest.mark.parametrize("rule", [None, protocol.QUIET, protocol.RELAY_CALLS, protocol.SUMMED, protocol.OTHERS_FIRST])
def test_merged_steps_leave_nothing_out(rule):
    """Events of single steps go wrong in the same ways."""
    for program in [COMBINE, COMBINE], [DISPATCH, COMBINE, CACHED], [(DISPATCH, COMBINE), (COMBINE, COMBINE)]:
        merged, single = (
            check_order(build((2, 1, 2), program, blocks="many", without=[rule], merges=merges).events)
            for merges in (True, False)
        )
        assert single.states > merged.states
        assert merged.faults == single.faults
        assert {w.place for w in merged.wrong} == {w.place for w in single.wrong}


def test_single_steps_in_every_state():
    events = build((2, 1, 1), [COMBINE], blocks="few", merges=False).events
    findings = explore(events)
    assert not findings.faults, findings.trace
    assert findings.states > 20 * explore(build((2, 1, 1), [COMBINE], blocks="few").events).states
