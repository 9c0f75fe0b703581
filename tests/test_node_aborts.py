"""In the model of the protocol between nodes no rank waits for ever when a rank aborts, at any event.

A rank that aborts stops: each of its agents, at some event. It signals some other ranks. An agent that waits for a flag
listens to one rank, the flag's raiser: if this rank has aborted and the flag is still missing, its own rank aborts too.
Limits of waits are left out: what ends here ends without them.

An abort only takes events away. So all reads stay right: a read that happens has all its causes before it, as in the
order without the abort that begins with the same events. (Messages of the NCCL wire go on: test_node_model.py.) That no
rank waits for ever follows from three things, for any number of aborts at any time:

1. Without aborts no rank waits for ever (``check_order``), so no waits form a circle.
2. Each agent listens to the very rank that raises the flag (``deaf_waits``).
3. The abort of this rank is signalled to the agent's rank (``deaf_waits``).

Say that a rank has not aborted, and waits. The raiser of the flag has aborted: then the rank hears of it. Or the raiser
waits too, for a flag of another rank, and so on: by 1 this ends at a rank that has aborted.

(Between hosts the host of a rank signals its own node alone when it aborts by itself. Then rail peers wait until their
limit is over: SIGNAL_RAIL is left out.) Who is named as late is not modelled; tests/waits.cpp tests that.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import pytest
from conftest import exhaustive
from lib.node_model import COMPLETE, Event, Place, one_order
from lib.node_model_cases import BOTH, OPERATIONS, build, differing, subsets
from lib.node_protocol import CACHED, COMBINE, COUNTED, DISPATCH, FACTORED, QUIET, RAIL_ENDS, WIRE_FLAGS, Protocol, Rank

# Rules that a test may take away.
LISTEN_TO_RELAY = "a wait for a relayed flag listens to the relay"
SIGNAL_NODE = "a rank that aborts signals the ranks of its node"
SIGNAL_RAIL = "a rank that aborts signals its rail peers"
POLL_OWN = "a wait for other blocks of the rank ends when the rank aborts"


class Aborts(NamedTuple):
    """Who listens to whom. All flags of a rank lie in its own memory: place[1] is the rank that waits."""

    without: str = ""

    def raiser(self, flag: Place) -> Rank:
        """Return the rank that a wait for ``flag`` listens to: `raiser` of wait_until, or the rank itself."""
        name, me = flag[:2]
        if name in ("called", "listed", "staged"):  # Context::raiser_of
            source = flag[2]
            return source if self.without == LISTEN_TO_RELAY else (me[0], source[1])
        if name in ("consumed", "slots_free", "pushed", "freed"):
            return me[0], flag[2]
        if name in WIRE_FLAGS:  # RailWarp::wait_for_peer
            return flag[2], me[1]
        return me  # summed, sums_relayed, and what agents of one rank hand each other

    def hears(self, me: Rank, other: Rank) -> bool:
        """Return whether ``me`` hears of an abort of ``other``: State::aborted, or the flag `aborted`."""
        if me == other:
            return self.without != POLL_OWN
        if me[0] == other[0]:
            return self.without != SIGNAL_NODE
        return me[1] == other[1] and self.without != SIGNAL_RAIL


def deaf_waits(events: Sequence[Event], aborts: Aborts) -> set[str]:
    """Name the flags that an agent waits for, but does not hear of an abort of the rank that raises them."""
    _, raised = one_order(events)
    deaf = set()
    for event in events:
        for flag, least in event.waits:
            number = next(n for epoch, n in raised[flag] if epoch >= least)
            raiser = events[number].rank
            if aborts.raiser(flag) != raiser or not aborts.hears(event.rank, raiser):
                deaf.add(flag[0])
    return deaf


def late_raises(events: Sequence[Event]) -> set[str]:
    """Name the flags that a rank may raise at another one when it has completed the operation.

    Without any, nobody aborts because of a rank that leaves after its last operation. Nor because of one that ends its
    buffer for a mistake, which it publishes when the operation is complete.
    """
    causes, raised = one_order(events)
    ends = {(flag[1], epoch): n for flag, raises in raised.items() if flag[0] == COMPLETE for epoch, n in raises}
    late = set()
    for flag, raises in raised.items():
        for epoch, number in raises:
            rank = events[number].rank
            if rank != flag[1] and not causes[ends[rank, epoch]] >> number & 1:
                late.add(flag[0])
    return late


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
    LISTEN_TO_RELAY: {"called", "listed", "staged"},
    SIGNAL_NODE: {"called", "listed", "staged", "pushed", "freed", "consumed", "slots_free"},
    SIGNAL_RAIL: set(WIRE_FLAGS),
    POLL_OWN: {
        *("called", "listed", "staged", "pushed", "freed", "consumed", "slots_free", "summed", "sums_relayed"),
        *("begun", "launched", "arrived", "complete"),
    },
}


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
