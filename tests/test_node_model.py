"""Search a model of the protocol between nodes for deadlocks and for memory that is read too early or written too soon.

node_protocol.py writes the protocol down, node_model.py searches. No order of events may lead to a fault: every rank
completes every operation, every read finds the epoch that it waits for, nothing is written to a rank that has completed
the operation, no flag is set back, and an operation completes on a rank only after every rank has begun it.

Nearly all tests use ``check_order``: it answers for every order of events, so 2 nodes of 2 ranks take milliseconds.
``explore`` visits every state of 2 nodes of 1 rank with few blocks, and shows that both searches find the same.

The model leaves out: direct rows; the order in which stores inside a node become visible (a raise
covers all stores before it, as docs/protocol.md demands); the content of data, but for its epoch. test_node_aborts.py
has aborts.
"""

import random
from collections.abc import Iterator
from itertools import product

import node_messages as messages
import node_protocol as protocol
import pytest
from conftest import exhaustive
from node_model import check_order, explore
from node_protocol import CACHED, COMBINE, COUNTED, DISPATCH, FACTORED, HOOKED, Protocol, Routing

BOTH = ("few", "many")
OPERATIONS = (DISPATCH, COUNTED, CACHED, COMBINE, HOOKED)
RULES = [value for name, value in vars(protocol).items() if name.isupper() and isinstance(value, str) and " " in value]
RULES = [rule for rule in RULES if rule not in (*OPERATIONS, FACTORED)]
LATE, MIXED = (False,), (False, True, True, False, True)  # early rows: on no rank, or on some in some operations


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
    assert not findings.faults, f"{findings.faults} with {model.programs}, {model.unusable}:\n{findings.trace}"


def subsets(length: int) -> list[frozenset[int]]:
    """Return all sets of operations of a program."""
    return [frozenset(n + 1 for n in range(length) if bits >> n & 1) for bits in range(1 << length)]


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
    for program in product(OPERATIONS, repeat=length):
        assert_no_fault(build(shape, list(program), blocks=blocks))


@pytest.mark.parametrize("blocks", BOTH)
@pytest.mark.parametrize(
    "shape,kinds",
    [
        ((2, 1, 2), OPERATIONS),
        ((2, 2, 2), (DISPATCH, COMBINE)),
        exhaustive((2, 2, 2), (DISPATCH, CACHED, COMBINE)),
        exhaustive((2, 2, 3), (DISPATCH, HOOKED)),
        exhaustive((3, 2, 2), (DISPATCH, COMBINE)),
    ],
)
def test_ranks_that_differ_stay_in_step(shape, kinds, blocks):
    """Some ranks dispatch while others combine, in all ways, between operations in which all ranks agree."""
    for programs in differing(shape[0] * shape[1], kinds, kinds, kinds):
        assert_no_fault(build(shape, programs, blocks=blocks))


@pytest.mark.parametrize("blocks", BOTH)
@pytest.mark.parametrize("shape,length", [((2, 1, 2), 2), ((2, 2, 2), 2), exhaustive((2, 2, 2), 3)])
def test_unusable_plans(shape, length, blocks):
    """In all programs any operations have an unusable plan: a new one, or an old one's handle."""
    for program in product(OPERATIONS, repeat=length):
        for unusable in subsets(length):
            assert_no_fault(build(shape, list(program), blocks=blocks, unusable=unusable))


@pytest.mark.parametrize("early", [LATE, MIXED])
@pytest.mark.parametrize("shape,length", [((2, 2, 2), 2), exhaustive((2, 2, 3), 3)])
def test_late_rows(shape, length, early):
    """Rows go after the comparison on all ranks, or on some of them."""
    kinds = (DISPATCH, CACHED, COMBINE)
    for program, unusable, blocks in product(product(kinds, repeat=length), subsets(length), BOTH):
        assert_no_fault(build(shape, list(program), blocks=blocks, unusable=unusable, early=early))
    for programs, blocks in product(differing(4, (DISPATCH,), kinds, (COMBINE,)), BOTH):
        assert_no_fault(build((2, 2, 2), programs, blocks=blocks, early=early))


def test_unusable_plans_where_ranks_differ():
    for programs in differing(2, *[(DISPATCH, CACHED, COMBINE)] * 3):
        for unusable, blocks in product(subsets(3), BOTH):
            assert_no_fault(build((2, 1, 2), programs, blocks=blocks, unusable=unusable))


@pytest.mark.parametrize("unusable", [(), (2,)])
def test_items_may_come_behind_any_chunk(unusable):
    """Behind none, some or all chunks of rows: the engine's limit kChunksAhead is for speed alone."""
    for behind in product(range(4), repeat=4):  # both ranks, in both dispatches
        program = [DISPATCH, DISPATCH, COMBINE]
        assert_no_fault(build((2, 1, 3), program, blocks="few", behind=behind, unusable=unusable))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_windows_of_slots(window, direct):
    """Of 3 chunks: a window of 3 has slots for all."""
    options = {"window": window, "direct": direct}
    for shape, blocks in product([(2, 2, 3), (3, 1, 3)], BOTH):
        for program in [[COMBINE, COMBINE], [DISPATCH, HOOKED, COMBINE, CACHED]]:
            assert_no_fault(build(shape, program, blocks=blocks, **options))
    for programs in differing(4, (COMBINE,), (DISPATCH, COMBINE), (COMBINE,)):
        for blocks in BOTH:
            assert_no_fault(build((2, 2, 3), programs, blocks=blocks, **options))


@pytest.mark.parametrize("shape,length", [((2, 2, 2), 2), exhaustive((2, 2, 3), 3)])
def test_combines_with_factors(shape, length):
    """Beside other operations, and where ranks differ."""
    kinds = (DISPATCH, COMBINE, FACTORED)
    for program, unusable, blocks in product(product(kinds, repeat=length), subsets(length), BOTH):
        assert_no_fault(build(shape, list(program), blocks=blocks, unusable=unusable))
    for programs in differing(4, (FACTORED,), (CACHED, COMBINE, FACTORED), (COMBINE,)):
        for blocks in BOTH:
            assert_no_fault(build(shape, programs, blocks=blocks))


@pytest.mark.parametrize("seeds", [range(40), exhaustive(range(40, 600))])
def test_long_programs_of_any_routing(seeds):
    for seed in seeds:
        choose = random.Random(seed)
        nodes, ranks, chunks = shape = choose.choice([(2, 1, 3), (2, 2, 2), (2, 2, 3), (3, 2, 2), (2, 3, 2)])
        length = choose.randint(3, 7)
        programs = [[choose.choice((*OPERATIONS, FACTORED)) for _ in range(length)]] * (nodes * ranks)
        programs = [
            tuple(choose.choice((DISPATCH, COMBINE)) if choose.random() < 0.1 else op for op in p) for p in programs
        ]
        plans = [somewhere(*shape, seed=choose.random()) for _ in range(3)]
        options = {
            "blocks": choose.choice(BOTH),
            "window": choose.randint(1, chunks),
            "direct": choose.random() < 0.3,
            "behind": [choose.randint(0, chunks) for _ in range(7)],
            "unusable": [epoch for epoch in range(1, length + 1) if choose.random() < 0.1],
            "early": [choose.random() < 0.7 for _ in range(7)],
        }
        assert_no_fault(Protocol(nodes, ranks, programs, plans, chunks=chunks, **options))


# What goes wrong in some order when a rule is missing.
NEEDED = {
    protocol.FENCE: {
        f"{what} {cell}"
        for what in ("late", "stale")
        for cell in ("call", "counts", "items", "table_in", "staging", "sums", "weights", "rail weights")
    },
    protocol.QUIET: {
        *("stale staging", "stale weights"),
        *("falling inbox_free", "falling call_arrived", "falling items_arrived", "falling rows_arrived"),
    },
    protocol.RAIL_ENDS: {
        *("stale call", "stale staging", "stale weights", "stale sent_nodes", "stale head", "late staging"),
        *("falling inbox_free", "falling call_arrived", "falling items_arrived", "falling rows_arrived"),
        *("falling sums_arrived", "falling sums_relayed"),
    },
    protocol.TWO_CALLS: {"stale call"},
    protocol.TWO_COUNTS: {"stale counts"},
    protocol.SLOTS_FREE: {"stale slots", "stale weights"},
    protocol.AGREE_ALL: {
        *("early begun", "late call", "late counts"),
        *("stale call", "stale counts", "stale items", "stale table_in", "stale staging", "stale sums"),
        "stale rail weights",
    },
    protocol.INBOX_FREE: {"stale staging"},
    protocol.CONSUMED_BEFORE_INBOX: {"stale staging"},
    protocol.INBOX_OF_COMBINES: {"deadlock"},
    protocol.AGREE_BEFORE_ROWS: {"late staging", "stale sent_nodes", "stale staging"},
    protocol.AGREE_BEFORE_SUMS: {
        *("deadlock", "late sums", "late rail weights"),
        *("stale call", "stale slots", "stale staging", "stale sums", "stale rail weights"),
    },
    protocol.LISTED_BEFORE_ITEMS: {
        *("stale counts", "stale head", "stale items", "stale table_in", "stale items_out", "stale table_out"),
    },
    protocol.RELAY_CALLS: {
        *("early begun", "late call", "late counts"),
        *("stale call", "stale counts", "stale items", "stale table_in", "stale staging", "stale sums"),
        "stale rail weights",
    },
    protocol.RELAY_ITEMS: {"late items", "late table_in", "stale items", "stale table_in"},
    protocol.RELAY_ROWS: {"late staging", "stale staging"},
    protocol.RELAY_SUMS: {"late sums", "late rail weights", "stale sums", "stale rail weights"},
    protocol.RELAY_IN_ORDER: {"stale staging"},
    protocol.SUMS_RELAYED: {"stale sums", "stale rail weights"},
    protocol.SUMMED: {"stale staging", "stale weights"},
    protocol.EMPTY_SUMS: {"deadlock"},
    protocol.DRAIN: {"late slots", "late weights"},
    protocol.FREE_AFTER_DIFFERENCE: {"deadlock"},
    protocol.SUMS_IN_ORDER: {"stale slots"},
    protocol.OTHERS_FIRST: {"deadlock"},
    protocol.OWN_WARPS: {"deadlock"},
    protocol.FREED: {"stale slots"},
    protocol.AGREE_BEFORE_FREED: {"deadlock"},
    protocol.FLAGS_BEFORE_DRAIN: {"deadlock"},
    protocol.AGREE_BEFORE_COMBINE_WEIGHTS: {"stale weights", "late weights"},
    protocol.AGREE_BEFORE_PUSHES: {"deadlock"},
    protocol.COMBINE_WEIGHTS_HERE: {"stale weights"},
    protocol.RELAY_COMBINE_WEIGHTS: {"stale weights", "late weights"},
    protocol.HEAD: {"stale head"},
    protocol.EMPTY_ITEMS: {"deadlock"},
    protocol.UNUSED_ROWS: {"deadlock"},
    protocol.AWAIT_UNUSED_ROWS: {"late staging"},
}
# Rules that follow from others: an agreement means that every rank has begun the operation, so it has completed all
# operations before.
COVERED = {protocol.CONSUMED_BEFORE_CALL, protocol.CONSUMED_BEFORE_SUMS}


def models_without(*rules: str) -> list[Protocol]:
    """Return programs of 2 nodes of 2 ranks: in some all ranks agree, in some they differ or plans are unusable."""
    by_node, by_local = (0, 0, 1, 1), (0, 1, 0, 1)

    def mixed(before, kinds, after, split):
        return [(before, kinds[part], after) for part in split]

    programs: list[tuple[list, tuple[int, ...]]] = [  # each with the operations that have an unusable plan
        ([DISPATCH, COMBINE, DISPATCH, COMBINE], ()),
        ([DISPATCH, DISPATCH, DISPATCH], ()),
        ([COMBINE, HOOKED, COMBINE], ()),
        ([CACHED, COUNTED, CACHED, COMBINE], ()),
        (mixed(DISPATCH, (DISPATCH, COMBINE), COMBINE, by_node), ()),
        (mixed(DISPATCH, (CACHED, COMBINE), COMBINE, by_local), ()),
        (mixed(COMBINE, (COMBINE, DISPATCH), DISPATCH, by_local), ()),
        (mixed(COMBINE, (COMBINE, CACHED), CACHED, by_node), ()),
        ([DISPATCH, CACHED, COMBINE, DISPATCH], (1, 2, 3)),
        ([DISPATCH, COUNTED, DISPATCH, COMBINE], (2, 3)),
        (mixed(DISPATCH, (DISPATCH, COMBINE), COMBINE, by_local), (1, 2)),
        (mixed(FACTORED, (DISPATCH, FACTORED), FACTORED, by_local), ()),
    ]
    models = [
        build((2, 2, 2), program, blocks=blocks, unusable=unusable, without=rules)
        for program, unusable in programs
        for blocks in BOTH
    ]
    late = [CACHED, DISPATCH, COMBINE], mixed(DISPATCH, (DISPATCH, COMBINE), COMBINE, by_node)
    models += [build((2, 2, 2), p, blocks=blocks, early=LATE, without=rules) for p in late for blocks in BOTH]
    gap = {at: receivers if at[1] != 1 else frozenset() for at, receivers in everywhere(2, 2, 3).items()}
    return models + [Protocol(2, 2, [COMBINE], [gap], chunks=3, blocks=blocks, without=rules) for blocks in BOTH]


def faults_without(*rules: str) -> set[str]:
    return set().union(*(check_order(model.events).faults for model in models_without(*rules)))


def test_all_rules_are_tried():
    assert set(RULES) == NEEDED.keys() | COVERED


@pytest.mark.parametrize("rule", NEEDED)
def test_each_rule_is_needed(rule):
    assert faults_without(rule) == NEEDED[rule]


def test_rules_that_agreement_covers():
    assert not faults_without(*COVERED)


def over_messages(shape: tuple[int, int, int], program, **options) -> Protocol:
    nodes, ranks, chunks = shape
    return messages.MessageProtocol(nodes, ranks, list(program), routings(*shape), chunks=chunks, **options)


@pytest.mark.parametrize("blocks", BOTH)
@pytest.mark.parametrize(
    "shape,length", [((2, 1, 3), 2), ((2, 2, 2), 2), ((3, 1, 2), 2), exhaustive((2, 2, 2), 3), exhaustive((3, 2, 2), 2)]
)
def test_no_order_goes_wrong_over_messages(shape, length, blocks):
    for program in product((*OPERATIONS, FACTORED), repeat=length):
        for unusable in ((), (1,)):
            assert_no_fault(over_messages(shape, program, blocks=blocks, unusable=unusable, early=MIXED))


NEEDED_BY_MESSAGES = {
    messages.READY: {f"stale {cell}" for cell in ("call", "counts", "items_out", "table_out", "staging", "weights")},
    messages.MOVED: {
        *("early begun", "falling moved", "stale items_out", "stale table_out"),
        *(
            f"{what} {cell}"
            for what in ("late", "stale")
            for cell in ("call", "counts", "items", "table_in", "staging", "sums", "weights", "rail weights")
        ),
    },
    protocol.RELAY_CALLS: {"early begun", "stale call", "stale counts"},
    protocol.RELAY_ITEMS: {"stale items", "stale table_in"},
    protocol.RELAY_ROWS: {"late staging", "stale staging"},
    protocol.RELAY_SUMS: {"late rail weights", "late sums", "stale rail weights", "stale sums"},
    protocol.RELAY_COMBINE_WEIGHTS: {"stale weights"},
    protocol.AWAIT_UNUSED_ROWS: {"late staging", "stale staging"},
    protocol.SUMMED: {"stale staging", "stale weights"},
    protocol.LISTED_BEFORE_ITEMS: {"stale counts", "stale head", "stale items_out", "stale table_out"},
    # A rank receives when its own part is ready: that is behind `consumed`, and needs no flag of the peer.
    protocol.INBOX_FREE: set(),
    protocol.CONSUMED_BEFORE_INBOX: set(),
}


@pytest.mark.parametrize("rule", NEEDED_BY_MESSAGES)
def test_each_rule_is_needed_by_messages(rule):
    programs = [DISPATCH, COMBINE, DISPATCH, COMBINE], [COUNTED, CACHED, CACHED], [FACTORED, HOOKED, FACTORED]
    models = [
        over_messages((2, 2, 2), program, blocks=blocks, unusable=unusable, without=[rule])
        for program in programs
        for blocks in BOTH
        for unusable in ((), (1, 2))
    ]
    assert set().union(*(check_order(model.events).faults for model in models)) == NEEDED_BY_MESSAGES[rule]


PROGRAMS_OF_MESSAGES = [DISPATCH, COMBINE, DISPATCH, COMBINE], [COUNTED, CACHED, HOOKED], [FACTORED, HOOKED, FACTORED]


def broken(program, **options) -> Iterator[Protocol]:
    """A rank aborts before a message, any one of the program."""
    for epoch, number, blocks in product(range(1, len(program) + 1), range(4), BOTH):
        yield over_messages((2, 2, 2), program, broken={(0, 1): (epoch, number)}, blocks=blocks, **options)


@pytest.mark.parametrize("program", PROGRAMS_OF_MESSAGES)
def test_nobody_takes_the_messages_of_a_rank_that_has_aborted(program):
    for model in broken(program):
        assert check_order(model.events).faults <= {"deadlock"}, model.broken  # the limits of waits end it


def test_messages_of_a_rank_that_has_aborted_would_be_taken():
    faults = set()
    for program in PROGRAMS_OF_MESSAGES:
        for model in broken(program, without=[messages.EPOCH]):
            faults |= check_order(model.events).faults
    cells = ("call", "counts", "items", "table_in", "staging", "weights", "sums", "rail weights")
    assert faults >= {f"stale {cell}" for cell in cells}


def falls(findings) -> bool:
    return any(fault.startswith("falling") for fault in findings.faults)


@pytest.mark.parametrize(
    "program,unusable",
    [
        ([(COMBINE,), (DISPATCH,)], ()),
        exhaustive([COMBINE, COMBINE], ()),
        exhaustive([(COMBINE,), (CACHED,)], ()),
        exhaustive([DISPATCH], (1,)),
        exhaustive([CACHED, CACHED], ()),
        exhaustive([CACHED, COMBINE], ()),
    ],
)
def test_both_searches_find_the_same(program, unusable):
    """Without any one rule, the same events go wrong. Where a flag may fall, only that is sure to be found by both."""
    found, right = set(), build((2, 1, 1), program, blocks="few", unusable=unusable).events
    for rule in (None, *RULES):
        events = build((2, 1, 1), program, blocks="few", unusable=unusable, without=[rule]).events
        if rule and events == right:
            continue  # the program does not need it
        one, all_ = check_order(events), explore(events)
        assert one.waiting == all_.waiting, rule
        assert falls(one) == falls(all_), rule
        assert falls(one) or one.wrong == all_.wrong, rule
        found |= all_.faults
        # Each search gives an order of events that ends in a fault.
        assert bool(one.trace) == bool(all_.trace) == bool(one.faults)
    assert len(found) > 4
