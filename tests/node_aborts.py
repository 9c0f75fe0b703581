"""Aborts in the protocol of node_protocol.py: who hears of them, and a search in which a rank aborts at any event.

A rank that aborts stops: each of its agents, at some event. It signals some other ranks. An agent that waits for a flag
listens to one rank, the flag's raiser: if this rank has aborted and the flag is still missing, its own rank aborts too.
Limits of waits are left out: what ends here ends without them.

An abort only takes events away. So all reads stay right: a read that happens has all its causes before it, as in the
order without the abort that begins with the same events. (``explore_aborts`` checks it all the same.) That no rank
waits for ever follows from three things, for any number of aborts at any time:

1. Without aborts no rank waits for ever (``check_order``), so no waits form a circle.
2. Each agent listens to the very rank that raises the flag (``deaf_waits``).
3. The abort of this rank is signalled to the agent's rank (``deaf_waits``).

Say that a rank has not aborted, and waits. The raiser of the flag has aborted: then the rank hears of it. Or the raiser
waits too, for a flag of another rank, and so on: by 1 this ends at a rank that has aborted.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from node_model import COMPLETE, Event, Findings, Memory, Place, Wrong, describe, one_order
from node_protocol import WIRE_FLAGS, Rank

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


class State(NamedTuple):
    done: int  # a bit for each event that has happened
    aborted: frozenset[Rank]
    content: bytes  # of the memory


class Search:
    """The steps of ranks of which some have aborted.

    A rank that has aborted may still do any of its next events, or none: its agents and its wire stop at different
    times. So a rank waits in vain if it can neither go on nor hear of an abort, whatever aborted ranks may still do.
    """

    def __init__(self, events: Sequence[Event], aborts: Aborts):
        self.events, self.aborts, self.memory = events, aborts, Memory(events)
        self.ranks = sorted({event.rank for event in events})
        self.after = [sum(1 << number for number in event.after) for event in events]
        self.first = State(0, frozenset(), self.memory.start)
        self.wrong: set[Wrong] = set()

    def next_events(self, state: State) -> Iterator[int]:
        """Yield the events that come next in their agents, whether or not they can happen."""
        for number, before in enumerate(self.after):
            if not state.done >> number & 1 and state.done & before == before:
                yield number

    def happen(self, state: State, number: int) -> State:
        content = self.memory.after(number, state.content, self.wrong)
        return State(state.done | 1 << number, state.aborted, content)

    def abort(self, state: State, rank: Rank) -> State:
        return state._replace(aborted=state.aborted | {rank})

    def steps(self, state: State) -> tuple[list[int], list[Rank]]:
        """Return all events that can happen, and the ranks that can abort because they hear of an abort."""
        possible, hearers = [], set()
        for number in self.next_events(state):
            event = self.events[number]
            if self.memory.may_happen(number, state.content):
                possible.append(number)
            elif state.aborted and event.rank not in state.aborted:
                missing = [flag for flag, least in event.waits if state.content[self.memory.index[flag]] < least]
                raisers = state.aborted.intersection(self.aborts.raiser(flag) for flag in missing)
                hearers |= {event.rank for raiser in raisers if self.aborts.hears(event.rank, raiser)}
        return possible, sorted(hearers)

    def goes_on(self, state: State, possible: Sequence[int], hearers: Sequence[Rank]) -> bool:
        """Return whether some step is sure to come: a step of a rank that has not aborted."""
        return bool(hearers) or any(self.events[number].rank not in state.aborted for number in possible)

    def waiting(self, state: State) -> set[int]:
        """Return the next events of ranks that have not aborted."""
        return {number for number in self.next_events(state) if self.events[number].rank not in state.aborted}


def explore_aborts(events: Sequence[Event], aborts: Aborts, *, most_states: int = 2_000_000) -> Findings:
    """Visit all states in which at most one rank aborts by itself, at any time, and others because of it."""
    search = Search(events, aborts)
    waiting: set[int] = set()
    reached_from: dict[State, tuple[State, str] | None] = {search.first: None}
    todo, bad = deque([search.first]), None
    while todo:
        state = todo.popleft()
        possible, hearers = search.steps(state)
        following = [(search.happen(state, number), number) for number in possible]
        following += [(search.abort(state, rank), -1) for rank in (hearers if state.aborted else search.ranks)]
        for new, number in following:
            if new not in reached_from:
                assert len(reached_from) < most_states, "too many states"
                what = describe(events[number]) if number >= 0 else f"aborts: {sorted(new.aborted - state.aborted)}"
                reached_from[new] = state, what
                todo.append(new)
        if not search.goes_on(state, possible, hearers):
            waiting |= search.waiting(state)
        bad = bad or (state if waiting or search.wrong else None)
    lines = []
    while bad is not None and (step := reached_from[bad]) is not None:
        bad, what = step
        lines.append(what)
    return Findings(frozenset(search.wrong), frozenset(waiting), len(reached_from), "\n".join(reversed(lines)))
