"""Search a model of the protocol between nodes for deadlocks and for memory that is read too early or written too soon.

node_protocol.py writes the protocol down, node_model.py searches. No order of events may lead to a fault: every rank
completes every operation, every read finds the epoch that it waits for, nothing is written to a rank that has completed
the operation, no flag is set back, and an operation completes on a rank only after every rank has begun it.

The model leaves out: direct rows; the order in which stores inside a node become visible (a raise covers all stores
before it, as docs/protocol.md demands); the content of data, but for its epoch. test_node_aborts.py has aborts.
"""

import random
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product

import pytest
from conftest import exhaustive, long, sparsely
from lib import node_messages as messages
from lib import node_protocol as protocol
from lib.node_model import check_order
from lib.node_model_cases import BOTH, OPERATIONS, build, differing, everywhere, somewhere, subsets
from lib.node_protocol import CACHED, COMBINE, COUNTED, DISPATCH, FACTORED, HOOKED, PUSHED, Protocol

RULES = [value for name, value in vars(protocol).items() if name.isupper() and isinstance(value, str) and " " in value]
RULES = [rule for rule in RULES if rule not in (*OPERATIONS, FACTORED)]
LATE, MIXED = (False,), (False, True, True, False, True)  # early rows: on no rank, or on some in some operations


over_messages = partial(build, kind=messages.MessageProtocol)


def check(shape: tuple[int, int, int], programs, *, unusable=((),), blocks=BOTH, **options) -> None:
    """Find no fault in any of these programs, with any of these sets of operations that have an unusable plan."""
    for program, unusable_plans, few_or_many in product(programs, unusable, blocks):
        assert_no_fault(build(shape, program, unusable=unusable_plans, blocks=few_or_many, **options))


def assert_no_fault(model: Protocol) -> None:
    findings = check_order(model.events)
    assert not findings.faults, f"{findings.faults} with {model.programs}, {model.unusable}:\n{findings.trace}"


# Nodes, ranks of a node, chunks of tokens of a rank.
@pytest.mark.parametrize("blocks", BOTH)
@pytest.mark.parametrize(
    "shape,length",
    [exhaustive((2, 1, 3), 3), exhaustive((2, 2, 2), 3), ((3, 2, 1), 2), long((2, 2, 3), 4), long((3, 3, 2), 3)]
    + [((12, 1, 1), 1), long((9, 2, 2), 2), exhaustive((32, 1, 1), 1)],
)
def test_no_order_goes_wrong(shape, length, blocks):
    """All programs of so many operations."""
    check(shape, product(OPERATIONS, repeat=length), blocks=[blocks])


@pytest.mark.parametrize("blocks", BOTH)
@pytest.mark.parametrize(
    "shape,kinds",
    [
        ((2, 1, 2), OPERATIONS),
        exhaustive((2, 2, 2), (DISPATCH, COMBINE)),
        exhaustive((2, 2, 2), (DISPATCH, CACHED, COMBINE)),
        exhaustive((2, 2, 3), (DISPATCH, HOOKED)),
        long((3, 2, 2), (DISPATCH, COMBINE)),
    ],
)
def test_ranks_that_differ_stay_in_step(shape, kinds, blocks):
    """Some ranks dispatch while others combine, in all ways, between operations in which all ranks agree."""
    check(shape, differing(shape[0] * shape[1], kinds, kinds, kinds), blocks=[blocks])


@pytest.mark.parametrize("blocks", BOTH)
@pytest.mark.parametrize("shape,length", [((2, 1, 2), 2), ((2, 2, 2), 2), exhaustive((2, 1, 2), 3), long((2, 2, 2), 3)])
def test_unusable_plans(shape, length, blocks):
    """In all programs any operations have an unusable plan: a new one, or an old one's handle."""
    check(shape, product(OPERATIONS, repeat=length), unusable=subsets(length), blocks=[blocks])


def test_unusable_plans_where_ranks_differ():
    check((2, 1, 2), differing(2, *[(DISPATCH, CACHED, COMBINE)] * 3), unusable=subsets(3))


@pytest.mark.parametrize("early", [LATE, MIXED])
@pytest.mark.parametrize("shape,length", [((2, 2, 2), 2), exhaustive((2, 1, 3), 3), long((2, 2, 3), 3)])
def test_late_rows(shape, length, early):
    """Rows go after the comparison on all ranks, or on some of them."""
    kinds = (DISPATCH, CACHED, COMBINE)
    check(shape, product(kinds, repeat=length), unusable=subsets(length), early=early)
    check((2, 2, 2), differing(4, (DISPATCH,), kinds, (COMBINE,)), early=early)


@pytest.mark.parametrize("unusable", [(), (2,)])
def test_items_may_come_behind_any_chunk(unusable):
    """Behind none, some or all chunks of rows: the engine's limit kChunksAhead is for speed alone."""
    for behind in product(range(4), repeat=4):  # both ranks, in both dispatches
        check((2, 1, 3), [[DISPATCH, DISPATCH, COMBINE]], unusable=[unusable], blocks=["few"], behind=behind)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_windows_of_slots(window, direct):
    """Of 3 chunks: a window of 3 has slots for all."""
    options = {"window": window, "direct": direct}
    for shape in [(2, 2, 3), (3, 1, 3)]:
        check(shape, [[COMBINE, COMBINE], [DISPATCH, HOOKED, COMBINE, CACHED]], **options)
    check((2, 2, 3), differing(4, (COMBINE,), (DISPATCH, COMBINE), (COMBINE,)), **options)


@pytest.mark.parametrize("shape,length", [((2, 2, 2), 2), exhaustive((2, 2, 3), 3)])
def test_combines_with_factors(shape, length):
    """Beside other operations, and where ranks differ."""
    check(shape, product((DISPATCH, COMBINE, FACTORED), repeat=length), unusable=subsets(length))
    check(shape, differing(4, (FACTORED,), (CACHED, COMBINE, FACTORED), (COMBINE,)))


@pytest.mark.parametrize("seeds", [range(40), exhaustive(range(40, 150)), long(range(150, 600))])
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


def faults(**places: str) -> set[str]:
    """``faults(stale="call, head")`` is {"stale call", "stale head"}."""
    return {f"{what} {place}" for what, listed in places.items() for place in listed.split(", ")}


DEADLOCK = {"deadlock"}
ON_THE_WIRE = "call, counts, items, table_in, staging, sums, weights, rail weights"
WITHOUT_CALLS = faults(
    early="begun", late="call, counts", stale="call, counts, items, table_in, staging, sums, rail weights"
)
NEEDED = {  # what goes wrong in some order when a rule is missing
    protocol.FENCE: faults(late=ON_THE_WIRE, stale=ON_THE_WIRE),
    protocol.QUIET: faults(stale="staging, weights", falling="inbox_free, call_arrived, items_arrived, rows_arrived"),
    protocol.RAIL_ENDS: faults(
        stale="call, staging, weights, sent_nodes, head",
        late="staging",
        falling="inbox_free, call_arrived, items_arrived, rows_arrived, sums_arrived, sums_relayed",
    ),
    protocol.TWO_CALLS: faults(stale="call"),
    protocol.TWO_COUNTS: faults(stale="counts"),
    protocol.SLOTS_FREE: faults(stale="slots, weights"),
    protocol.AGREE_ALL: WITHOUT_CALLS,
    protocol.INBOX_FREE: faults(stale="staging"),
    protocol.CONSUMED_BEFORE_INBOX: faults(stale="staging"),
    protocol.INBOX_OF_COMBINES: DEADLOCK,
    protocol.AGREE_BEFORE_ROWS: faults(late="staging", stale="sent_nodes, staging"),
    protocol.AGREE_BEFORE_SUMS: DEADLOCK
    | faults(late="sums, rail weights", stale="call, slots, staging, sums, rail weights"),
    protocol.LISTED_BEFORE_ITEMS: faults(stale="counts, head, items, table_in, items_out, table_out"),
    protocol.RELAY_CALLS: WITHOUT_CALLS,
    protocol.RELAY_ITEMS: faults(late="items, table_in", stale="items, table_in"),
    protocol.RELAY_ROWS: faults(late="staging", stale="staging"),
    protocol.RELAY_SUMS: faults(late="sums, rail weights", stale="sums, rail weights"),
    protocol.RELAY_IN_ORDER: faults(stale="staging"),
    protocol.SUMS_RELAYED: faults(stale="sums, rail weights"),
    protocol.SUMMED: faults(stale="staging, weights"),
    protocol.EMPTY_SUMS: DEADLOCK,
    protocol.DRAIN: faults(late="slots, weights"),
    protocol.FREE_AFTER_DIFFERENCE: DEADLOCK,
    protocol.FREE_AFTER_ROWS: DEADLOCK,
    protocol.SUMS_IN_ORDER: faults(stale="slots"),
    protocol.OTHERS_FIRST: DEADLOCK,
    protocol.OWN_WARPS: DEADLOCK,
    protocol.FREED: faults(stale="slots"),
    protocol.AGREE_BEFORE_FREED: DEADLOCK,
    protocol.FLAGS_BEFORE_DRAIN: DEADLOCK,
    protocol.AGREE_BEFORE_COMBINE_WEIGHTS: faults(stale="weights", late="weights"),
    protocol.AGREE_BEFORE_PUSHES: DEADLOCK,
    protocol.COMBINE_WEIGHTS_HERE: faults(stale="weights"),
    protocol.RELAY_COMBINE_WEIGHTS: faults(stale="weights", late="weights"),
    protocol.HEAD: faults(stale="head"),
    protocol.EMPTY_ITEMS: DEADLOCK,
    protocol.UNUSED_ROWS: DEADLOCK,
    protocol.AWAIT_UNUSED_ROWS: faults(late="staging"),
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
        ([COMBINE, COMBINE, HOOKED, PUSHED, COMBINE], ()),
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
    late = [CACHED, DISPATCH, COMBINE], mixed(DISPATCH, (DISPATCH, COMBINE), COMBINE, by_node)
    gap = {at: receivers if at[1] != 1 else frozenset() for at, receivers in everywhere(2, 2, 3).items()}
    models = []
    for options in ({"blocks": blocks, "without": rules} for blocks in BOTH):
        models += [build((2, 2, 2), program, unusable=unusable, **options) for program, unusable in programs]
        models += [build((2, 2, 2), program, early=LATE, **options) for program in late]
        models.append(Protocol(2, 2, [COMBINE], [gap], chunks=3, **options))
    return models


def faults_in(models: Iterable[Protocol]) -> set[str]:
    return set().union(*(check_order(model.events).faults for model in models))


def test_all_rules_are_tried():
    assert set(RULES) == NEEDED.keys() | COVERED


@pytest.mark.parametrize("rule", sparsely(NEEDED, 4))
def test_each_rule_is_needed(rule):
    assert faults_in(models_without(rule)) == NEEDED[rule]


def test_rules_that_agreement_covers():
    assert not faults_in(models_without(*COVERED))


@pytest.mark.parametrize("blocks", BOTH)
@pytest.mark.parametrize(
    "shape,length",
    [((2, 1, 3), 2), exhaustive((2, 2, 2), 2), exhaustive((3, 1, 2), 2), long((2, 2, 2), 3), exhaustive((3, 2, 2), 2)]
    + [((10, 1, 1), 1)],
)
def test_no_order_goes_wrong_over_messages(shape, length, blocks):
    options = dict(unusable=((), (1,)), blocks=[blocks], kind=messages.MessageProtocol, early=MIXED)
    check(shape, product((*OPERATIONS, FACTORED), repeat=length), **options)
    for exact in ([1, 2, 3], [2]):
        check(shape, product((COUNTED, CACHED, COMBINE), repeat=length), exact=exact, **options)
    for limited in ([1, 2, 3], [2]):
        check(shape, product((DISPATCH, COUNTED, CACHED, COMBINE), repeat=length), limited=limited, **options)


NEEDED_BY_MESSAGES = {
    messages.READY: faults(stale="call, counts, items_out, table_out, staging, weights"),
    messages.MOVED: faults(
        early="begun", falling="moved", late=ON_THE_WIRE, stale=f"{ON_THE_WIRE}, items_out, table_out"
    ),
    protocol.RELAY_CALLS: faults(early="begun", stale="call, counts"),
    protocol.RELAY_ITEMS: faults(stale="items, table_in"),
    protocol.RELAY_ROWS: faults(late="staging", stale="staging"),
    protocol.RELAY_SUMS: faults(late="rail weights, sums", stale="rail weights, sums"),
    protocol.RELAY_COMBINE_WEIGHTS: faults(stale="weights"),
    protocol.AWAIT_UNUSED_ROWS: faults(late="staging", stale="staging"),
    protocol.SUMMED: faults(stale="staging, weights"),
    protocol.LISTED_BEFORE_ITEMS: faults(stale="counts, head, items_out, table_out"),
    # A rank receives when its own part is ready: that is behind `consumed`, and needs no flag of the peer.
    protocol.INBOX_FREE: set(),
    protocol.CONSUMED_BEFORE_INBOX: set(),
}


@pytest.mark.parametrize("rule", NEEDED_BY_MESSAGES)
def test_each_rule_is_needed_by_messages(rule):
    programs = [DISPATCH, COMBINE, DISPATCH, COMBINE], [COUNTED, CACHED, CACHED], [FACTORED, HOOKED, FACTORED]
    models = (
        over_messages((2, 2, 2), program, blocks=blocks, unusable=unusable, without=[rule])
        for program, blocks, unusable in product(programs, BOTH, ((), (1, 2)))
    )
    assert faults_in(models) == NEEDED_BY_MESSAGES[rule]


def test_messages_that_only_send_are_awaited_too():
    programs = [COUNTED, CACHED, CACHED], [COMBINE, COMBINE, COMBINE, CACHED]
    models = (
        over_messages(shape, program, exact=range(1, 5), blocks=blocks, without=[messages.SENT])
        for shape, program, blocks in product(((2, 1, 2), (2, 2, 2)), programs, BOTH)
    )
    assert faults_in(models) == faults(stale="sums, weights")


def test_packed_rows_wait_for_their_plan():
    programs = [DISPATCH, COMBINE, DISPATCH], [COMBINE, DISPATCH, CACHED]
    options = dict(limited=range(1, 5), without=[messages.PLANNED])
    models = (
        over_messages((2, 1, 2), program, blocks=blocks, unusable=unusable, **options)
        for program, blocks, unusable in product(programs, BOTH, ((), (1,)))
    )
    assert faults_in(models) == faults(stale="head")


PROGRAMS_OF_MESSAGES = [DISPATCH, COMBINE, DISPATCH, COMBINE], [COUNTED, CACHED, HOOKED], [FACTORED, HOOKED, FACTORED]


def broken(program, **options) -> Iterator[Protocol]:
    """A rank aborts before a message, any one of the program."""
    for epoch, number, blocks in product(range(1, len(program) + 1), range(4), BOTH):
        yield over_messages((2, 2, 2), program, broken={(0, 1): (epoch, number)}, blocks=blocks, **options)


@pytest.mark.parametrize("program", PROGRAMS_OF_MESSAGES)
def test_nobody_takes_the_messages_of_a_rank_that_has_aborted(program):
    assert faults_in(broken(program)) <= DEADLOCK  # the limits of waits end it


def test_messages_of_a_rank_that_has_aborted_would_be_taken():
    models = (model for program in PROGRAMS_OF_MESSAGES for model in broken(program, without=[messages.EPOCH]))
    assert faults_in(models) >= faults(stale=ON_THE_WIRE)
