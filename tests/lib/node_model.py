"""A small model of the protocol between nodes: agents, the memory they share, and a search for what goes wrong.

An *agent* is a block, or a part of it, in one operation of one rank. Its program is fixed: wait for flags, read and
write cells, raise flags, put over the wire. A *cell* holds the epoch of its content, a *flag* holds an epoch.

The wire delivers puts in any order. A fence orders the puts of one agent to one rank, a signal is a put of a flag, and
quiet waits for the agent's own puts. (The fences and quiets of the engine cover at least that.) A put reads its source
when it is delivered: a source that is overwritten too early shows.

An *event* is one step of an agent or one delivery. Local steps between two synchronisations make one event: a wait
belongs to the event behind it, a raise to the event before it. That leaves nothing out. No other agent can tell when
a wait ended, and all that a raise or a wait orders, it orders for the whole event.

``check_order`` takes one order and answers for all. That is right for these programs: flags only grow, so an event
that can happen stays possible until it happens. So every order has the same events and the same causes, and the orders
are those that keep causes before effects. A read is right in all of them if the write that it expects is a cause of it,
and each other write of the cell comes before that write or after the read. Otherwise ``check_order`` builds an order in
which the read is wrong and replays it. It also finds a flag that may fall; without one, the argument holds.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

Place = tuple  # of a cell or a flag: a name, the rank in whose memory it is, and indices
READ, WRITE, LATE_WRITE = "read", "write", "write, perhaps late,"  # late: after the rank has completed that epoch
COMPLETE = "complete"  # name of the flag that holds the last operation which a rank has completed
EPOCHS = 64  # content of a cell: an epoch below this number, and a multiple of it tells apart what has the same epoch


class Event(NamedTuple):
    """Something that happens at once. ``waits`` and ``checks`` list flags and the least epochs they must have."""

    agent: str
    after: tuple[int, ...]  # numbers of events that come before, whatever the flags say
    waits: tuple[tuple[Place, int], ...] = ()
    checks: tuple[tuple[Place, int], ...] = ()  # not waited for; wrong where it does not hold
    accesses: tuple[tuple[str, Place, int], ...] = ()  # a kind, a cell, the epoch that it must have or gets
    raises: tuple[tuple[Place, int], ...] = ()
    rank: Place = ()  # of the agent


class Wrong(NamedTuple):
    """Something wrong at an event. ``what`` is one of four:

    "stale": a read finds another epoch than it expects; "late": a WRITE of an epoch that the rank, in whose memory the
    cell is, has completed; "falling": a flag that a signal sets back; "early": a check that does not hold.
    """

    what: str
    number: int
    place: Place


class Findings(NamedTuple):
    """What is wrong. ``waiting`` lists the events that never happen although all events before them did."""

    wrong: frozenset[Wrong]
    waiting: frozenset[int]
    trace: str  # how the first fault comes about; empty where there is none

    @property
    def faults(self) -> set[str]:
        """Name each kind of fault once: "stale staging", "falling called", "early begun", "deadlock"."""
        return {f"{w.what} {w.place[0]}" for w in self.wrong} | ({"deadlock"} if self.waiting else set())


class Agent:
    """Append the steps of one agent to ``events``."""

    def __init__(self, events: list[Event], name: str, *, rank: Place = ()):
        self.events, self.name, self.rank = events, name, rank
        self.after: list[int] = []  # of the next event
        self.puts: dict[Place, list[int]] = defaultdict(list)  # by target: all so far, and those before a fence
        self.fenced: dict[Place, list[int]] = defaultdict(list)
        self.steps: dict[str, list] = defaultdict(list)  # of the next event
        self.seen: dict[Place, int] = {}  # flags waited for, and their epochs

    def _step(self, field: str, *step, ends: Sequence[str] = ()) -> None:
        if any(self.steps[e] for e in ends):
            self.end_event()
        self.steps[field].append(step)

    def end_event(self) -> None:
        if any(self.steps.values()):
            fields = {field: tuple(steps) for field, steps in self.steps.items()}
            self.events.append(Event(self.name, tuple(self.after), rank=self.rank, **fields))
            self.after = [len(self.events) - 1]
            self.steps.clear()

    def wait(self, flag: Place, epoch: int) -> None:
        if epoch > self.seen.get(flag, 0):
            self.seen[flag] = epoch
            self._step("waits", flag, epoch, ends=("checks", "accesses", "raises"))

    def check(self, flag: Place, epoch: int) -> None:
        self._step("checks", flag, epoch, ends=("accesses", "raises"))

    def read(self, cell: Place, epoch: int) -> None:
        self._step("accesses", READ, cell, epoch, ends=("raises",))

    def write(self, cell: Place, epoch: int, *, may_be_late: bool = False) -> None:
        self._step("accesses", LATE_WRITE if may_be_late else WRITE, cell, epoch, ends=("raises",))

    def raise_flag(self, flag: Place, epoch: int) -> None:
        self._step("raises", flag, epoch)

    def _deliver(self, target: Place, **fields) -> None:
        self.end_event()
        after = (*self.after, *self.fenced[target])
        self.events.append(Event(f"wire of {self.name}", after, rank=self.rank, **fields))
        self.puts[target].append(len(self.events) - 1)

    def put(self, cell: Place, source: Place, epoch: int, *, may_be_late: bool = False) -> None:
        """Put ``source`` of the own rank, which must have ``epoch``, to ``cell`` of another."""
        kind = LATE_WRITE if may_be_late else WRITE
        self._deliver(cell[1], accesses=((READ, source, epoch), (kind, cell, epoch)))

    def signal(self, flag: Place, epoch: int) -> None:
        self._deliver(flag[1], raises=((flag, epoch),))

    def fence(self) -> None:
        self.fenced = defaultdict(list, {target: list(puts) for target, puts in self.puts.items()})

    def quiet(self) -> None:
        self.end_event()
        self.after += [number for puts in self.puts.values() for number in puts]


def replay(events: Sequence[Event], numbers: Iterable[int]) -> tuple[set[Wrong], str]:
    """Run events in this order. Return what is wrong, and the order in words, one event a line.

    A fault is kept, and then all goes on as if it had been right.
    """
    content: dict[Place, int] = defaultdict(int)  # of cells and flags
    done, wrong, lines = set(), set(), []
    for number in numbers:
        event, before = events[number], set(wrong)
        assert done.issuperset(event.after), "no order of events"
        assert all(content[flag] >= epoch for flag, epoch in event.waits), "no order of events"
        wrong |= {Wrong("early", number, flag) for flag, epoch in event.checks if content[flag] < epoch}
        for kind, cell, epoch in event.accesses:
            if kind == READ and content[cell] != epoch:
                wrong.add(Wrong("stale", number, cell))
            if kind == WRITE and content[COMPLETE, cell[1]] >= epoch % EPOCHS:
                wrong.add(Wrong("late", number, cell))
            if kind != READ:
                content[cell] = epoch
        for flag, epoch in event.raises:
            if content[flag] >= epoch:
                wrong.add(Wrong("falling", number, flag))
            content[flag] = max(epoch, content[flag])
        done.add(number)
        lines.append(describe(event) + "".join(f" <- {w.what} {w.place}" for w in wrong - before))
    return wrong, "\n".join(lines)


def describe(event: Event) -> str:
    """Say in one line what an event does."""
    parts = [f"wait {place} >= {epoch}" for place, epoch in event.waits]
    parts += [f"{kind} {place} of {epoch}" for kind, place, epoch in event.accesses]
    parts += [f"raise {place} = {epoch}" for place, epoch in event.raises]
    return f"{event.agent}: {', '.join(parts)}"


Raised = dict[Place, list[tuple[int, int]]]  # by flag: epochs and the numbers of the events that raise to them


def one_order(events: Sequence[Event]) -> tuple[dict[int, int], Raised]:
    """Let events happen until none can. Return the causes of each as a bit mask, in the order of the events."""
    causes: dict[int, int] = {}
    raised: Raised = defaultdict(list)
    todo, turned_away = deque(range(len(events))), 0
    while todo and turned_away <= len(todo):
        number = todo.popleft()
        event = events[number]
        firsts = [next((n for epoch, n in raised[flag] if epoch >= least), None) for flag, least in event.waits]
        if None in firsts or any(n not in causes for n in event.after):
            todo.append(number)
            turned_away += 1
            continue
        causes[number] = 1 << number
        for before in (*event.after, *firsts):
            causes[number] |= causes[before]
        for flag, epoch in event.raises:
            raised[flag].append((epoch, number))
        turned_away = 0
    return causes, raised


def faults_of_order(
    events: Sequence[Event], causes: dict[int, int], raised: Raised
) -> Iterator[tuple[Wrong, list[int]]]:
    """Yield what is wrong in some order, and the events that must happen in turn, with their causes, to show it."""

    def is_before(number: int, later: int) -> bool:
        return bool(causes[later] >> number & 1)

    for flag, raises in raised.items():
        for (epoch, number), (next_epoch, later) in pairwise(raises):
            if next_epoch <= epoch or not is_before(number, later):
                yield Wrong("falling", later, flag), [later, number]
    writes: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    for number in causes:
        for kind, cell, epoch in events[number].accesses:
            if kind != READ:
                writes[cell].append((epoch, number))
            for completed, end in raised[COMPLETE, cell[1]] if kind == WRITE else ():
                if completed >= epoch % EPOCHS and not is_before(number, end):
                    yield Wrong("late", number, cell), [end, number]
    for number in causes:
        for flag, least in events[number].checks:
            if not any(epoch >= least and is_before(n, number) for epoch, n in raised[flag]):
                yield Wrong("early", number, flag), [number]
        for kind, cell, epoch in events[number].accesses:
            if kind == READ:
                other_writes = [(e, n) for e, n in writes[cell] if n != number]
                expected = [n for e, n in other_writes if e == epoch and is_before(n, number)][-1:]
                # Writes that may happen between the expected one and the read.
                between = [n for _, n in other_writes if expected and not is_before(n, expected[0])]
                between = [n for n in between if not is_before(number, n)]
                if not expected or between:
                    yield Wrong("stale", number, cell), [*expected, *between[:1], number]


def check_order(events: Sequence[Event]) -> Findings:
    """Find what goes wrong in any order of events, from the causes of each event in one order."""
    causes, raised = one_order(events)
    wrong, traces = set(), {}
    for fault, in_turn in faults_of_order(events, causes, raised):
        wrong.add(fault)
        kind = fault.what, fault.place[0]
        if kind not in traces:  # replay one of each kind
            numbers = list(dict.fromkeys(n for last in in_turn for n in causes if causes[last] >> n & 1))
            replayed, traces[kind] = replay(events, numbers)
            assert any((w.what, w.place) == (fault.what, fault.place) for w in replayed), f"all right:\n{traces[kind]}"
    left = set(range(len(events))) - causes.keys()
    waiting = frozenset(n for n in left if left.isdisjoint(events[n].after))
    if waiting:
        traces["deadlock"] = "\n".join(f"never: {describe(events[n])}" for n in sorted(waiting))
    trace = min(traces.values(), key=len, default="")
    return Findings(frozenset(wrong), waiting, trace)
