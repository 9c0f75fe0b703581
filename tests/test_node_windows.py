"""Search a model of windows: slots of remote tokens that hold only a few chunks at a time must never deadlock.

In a combine between nodes the ranks of one node push partial sums for tokens of other nodes' sources. Those of source
(m, k) go to slots of rank k of the own node, the *owner* here. It reduces them into memory that no window bounds. With
a window of W chunks the slots of a source have room for W chunks of each pusher: chunk j lies in place j % W. A pusher
waits until chunk j - W is free, and the owner's reducing block raises that flag when it has reduced the chunk.

Why W = 1 is enough, in the order "by chunk": let c be the first chunk that is not free everywhere. Its pushes wait for
chunk c - W alone, which is free, and in each agent only pushes of chunks up to c come before them. So all are made, in
whatever order within the chunk and by however many blocks. Its reductions wait for these pushes alone, and in each
agent only reductions of chunks up to c come before them. So c becomes free. Three things carry this, and each is
removed below: all agents go chunk by chunk; a chunk is the same tokens for all pushers; pushing and reducing do not
wait for each other in one agent. After a difference nobody reduces: then pushers must not wait for credits either.
"""

import random
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

import pytest
from conftest import exhaustive
from node_model import Agent, Event, check_order, explore

Source = tuple[int, int]  # another node, and the local index there
Routing = Mapping[tuple[Source, int], frozenset[int]]  # by source and token: local indices of the ranks that push
# Orders of work. "Turned" ones begin with another source on each rank.
BY_CHUNK, BY_CHUNK_TURNED, BY_TOKEN = "by chunk", "by chunk, turned", "by token"
BY_SOURCE, BY_SOURCE_TURNED = "by source", "by source, turned"


class Windows(NamedTuple):
    """One node's part in a combine."""

    nodes: int  # the others
    ranks: int
    tokens: int  # of each source
    window: int = 1  # chunks
    per_chunk: int = 1  # tokens or items
    chunks_of: str = "tokens"  # of the source, or "items" of one pusher
    pushes: str = BY_CHUNK_TURNED
    reduces: str = BY_CHUNK
    credits: bool = True
    one_agent: bool = False  # pushes and then reduces
    differs: bool = False  # nobody reduces; owners wait for what was promised
    stops: bool = True  # after a difference pushers raise their flags without waiting for credits

    @property
    def sources(self) -> list[Source]:
        return list(product(range(self.nodes), range(self.ranks)))

    def chunk(self, routing: Routing, source: Source, pusher: int, token: int) -> int:
        if self.chunks_of == "tokens":
            return token // self.per_chunk
        return sum(pusher in routing[source, before] for before in range(token)) // self.per_chunk

    def items(self, routing: Routing, pusher: int) -> Iterator[tuple[Source, int, int]]:
        """Yield source, token and chunk of all items of a pusher."""
        for source, token in product(self.sources, range(self.tokens)):
            if pusher in routing[source, token]:
                yield source, token, self.chunk(routing, source, pusher, token)

    def in_order(self, items: list[tuple[Source, int, int]], order: str, rank: int) -> list[tuple[Source, int, int]]:
        def key(item):
            source, token, chunk = item
            turned = (self.sources.index(source) + rank * ("turned" in order)) % len(self.sources)
            if order == BY_TOKEN:
                return token, turned
            return (chunk, turned, token) if order in (BY_CHUNK, BY_CHUNK_TURNED) else (turned, chunk, token)

        return sorted(items, key=key)

    def push(self, agent: Agent, routing: Routing, pusher: int) -> None:
        items = self.in_order(list(self.items(routing, pusher)), self.pushes, pusher)
        last = {(source, chunk): token for source, token, chunk in items}
        for source, token, chunk in items:
            owner, place = (0, source[1]), (source, pusher, chunk % self.window, token % self.per_chunk)
            has_room = chunk < self.window
            if self.differs and self.stops and not has_room:
                agent.wait(("differs", (0, pusher)), 1)
            else:
                if not has_room and self.credits:
                    agent.wait(("freed", (0, pusher), source, chunk - self.window), 1)
                agent.write(("slots", owner, *place), token + 1)
            if last[source, chunk] == token:
                agent.raise_flag(("pushed", owner, source, pusher, chunk), 1)

    def reduce(self, agent: Agent, routing: Routing, owner: int) -> None:
        """Reduce the tokens of the owner's sources, and free each chunk behind its last token."""
        sources = [source for source in self.sources if source[1] == owner]
        tokens = [(source, token, token // self.per_chunk) for source, token in product(sources, range(self.tokens))]
        for source, token, _ in self.in_order(tokens, self.reduces, 0):
            pushers = sorted(routing[source, token])
            chunks = {pusher: self.chunk(routing, source, pusher, token) for pusher in pushers}
            for pusher in pushers:
                agent.wait(("pushed", (0, owner), source, pusher, chunks[pusher]), 1)
            for pusher in pushers:
                place = (source, pusher, chunks[pusher] % self.window, token % self.per_chunk)
                agent.read(("slots", (0, owner), *place), token + 1)
            for pusher in range(self.ranks):
                for chunk in self.freed_behind(routing, source, token, pusher):
                    agent.raise_flag(("freed", (0, pusher), source, chunk), 1)

    def freed_behind(self, routing: Routing, source: Source, token: int, pusher: int) -> Iterator[int]:
        """Yield the chunk of a pusher that ends with a token."""
        if self.chunks_of == "tokens":
            if (token + 1) % self.per_chunk == 0 or token + 1 == self.tokens:
                yield token // self.per_chunk
        elif pusher in routing[source, token]:
            chunk = self.chunk(routing, source, pusher, token)
            later = [t for t in range(token + 1, self.tokens) if pusher in routing[source, t]]
            if not any(self.chunk(routing, source, pusher, t) == chunk for t in later):
                yield chunk

    def drain(self, agent: Agent, routing: Routing, owner: int) -> None:
        for pusher in range(self.ranks):
            for source, _, chunk in self.items(routing, pusher):
                if source[1] == owner:
                    agent.wait(("pushed", (0, owner), source, pusher, chunk), 1)
        agent.raise_flag(("done", (0, owner)), 1)

    def events(self, routing: Routing) -> list[Event]:
        events: list[Event] = []
        for rank in range(self.ranks):
            agent = Agent(events, f"rank {rank} pushes")
            self.push(agent, routing, rank)
            if not self.one_agent:
                agent.end_event()
                agent = Agent(events, f"rank {rank} reduces")
            if self.differs:
                agent.raise_flag(("differs", (0, rank)), 1)
                self.drain(agent, routing, rank)
            else:
                self.reduce(agent, routing, rank)
            agent.end_event()
        return events


def all_routings(windows: Windows) -> Iterator[Routing]:
    """Yield every routing: each token of each source was at no rank of the node, at some or at all."""
    places = list(product(windows.sources, range(windows.tokens)))
    subsets = [frozenset(r for r in range(windows.ranks) if bits >> r & 1) for bits in range(1 << windows.ranks)]
    for choice in product(subsets, repeat=len(places)):
        yield dict(zip(places, choice))


def some_routings(windows: Windows, count: int) -> Iterator[Routing]:
    choose = random.Random(count)
    for _ in range(count):
        share = choose.choice((0.2, 0.5, 0.8, 1.0))
        yield {
            at: frozenset(r for r in range(windows.ranks) if choose.random() < share)
            for at in product(windows.sources, range(windows.tokens))
        }


def assert_no_fault(windows: Windows, routings: Iterator[Routing]) -> None:
    for routing in routings:
        findings = check_order(windows.events(routing))
        assert not findings.faults, f"{findings.faults} with {windows}, {routing}:\n{findings.trace}"


def faults(windows: Windows, routings: Iterator[Routing]) -> set[str]:
    return set().union(*(check_order(windows.events(routing)).faults for routing in routings))


@pytest.mark.parametrize("pushes", [BY_CHUNK, BY_CHUNK_TURNED])
@pytest.mark.parametrize("nodes,ranks,tokens,per_chunk", [(1, 2, 3, 1), (2, 1, 4, 2), exhaustive(1, 2, 4, 2)])
def test_a_window_of_one_chunk_for_every_routing(nodes, ranks, tokens, per_chunk, pushes):
    windows = Windows(nodes, ranks, tokens, per_chunk=per_chunk, pushes=pushes)
    assert_no_fault(windows, all_routings(windows))


@pytest.mark.parametrize("count", [150, exhaustive(3000)])
@pytest.mark.parametrize("window", [1, 2])
def test_windows_of_larger_nodes(window, count):
    for nodes, ranks, tokens, per_chunk in (1, 3, 6, 2), (2, 2, 6, 1), (3, 2, 5, 2):
        windows = Windows(nodes, ranks, tokens, window, per_chunk)
        assert_no_fault(windows, some_routings(windows, count))


def test_every_state_of_a_window():
    windows = Windows(1, 2, 4)
    routing = dict.fromkeys(product(windows.sources, range(4)), frozenset((0, 1)))
    findings = explore(windows.events(routing))
    assert not findings.faults, findings.trace
    assert findings.states == 59  # a window of one chunk leaves few orders
    assert explore(windows._replace(window=4).events(routing)).states == 485


@pytest.mark.parametrize("window", [1, 2])
def test_pushers_wait_for_credits(window):
    windows = Windows(1, 2, 3, window, credits=False)
    assert faults(windows, some_routings(windows, 50)) == {"stale slots"}


@pytest.mark.parametrize("pushes,deadlocks", [(BY_SOURCE, True), (BY_SOURCE_TURNED, True), (BY_CHUNK_TURNED, False)])
def test_pushers_go_chunk_by_chunk(pushes, deadlocks):
    windows = Windows(2, 2, 3, pushes=pushes)
    assert ("deadlock" in faults(windows, some_routings(windows, 200))) == deadlocks


@pytest.mark.parametrize("reduces,deadlocks", [(BY_SOURCE, True), (BY_CHUNK, False)])
def test_reducers_go_chunk_by_chunk(reduces, deadlocks):
    windows = Windows(2, 2, 3, reduces=reduces)
    assert ("deadlock" in faults(windows, some_routings(windows, 200))) == deadlocks


def test_pushing_and_reducing_blocks_are_different():
    windows = Windows(1, 2, 3, one_agent=True)
    assert "deadlock" in faults(windows, some_routings(windows, 50))


def test_chunks_are_the_same_tokens_for_all_pushers():
    """Chunks of a pusher's own items deadlock: two ranks have many tokens of one source and few of the other each.

    Rank 0 has all tokens of source 1 and only the first and last of source 0, rank 1 the other way round. Each waits
    for room behind its first two items of the source that it has much of. These are not free before the other rank's
    only chunk there is complete, which ends with the last token.
    """
    few, much = (0, 3), range(4)
    routing = {
        ((0, source), token): frozenset(r for r in range(2) if token in (few if r == source else much))
        for source, token in product(range(2), range(4))
    }
    by_items = Windows(1, 2, 4, per_chunk=2, chunks_of="items", pushes=BY_TOKEN)
    assert check_order(by_items.events(routing)).faults == {"deadlock"}
    assert_no_fault(by_items._replace(chunks_of="tokens"), iter([routing]))


@pytest.mark.parametrize("pushes,per_chunk", [(BY_TOKEN, 2), (BY_CHUNK, 2), (BY_CHUNK, 1)])
def test_chunks_of_items_deadlock_in_each_order(pushes, per_chunk):
    windows = Windows(1, 2, 8, per_chunk=per_chunk, pushes=pushes, chunks_of="items")
    routings = list(some_routings(windows, 400))
    assert "deadlock" in faults(windows, iter(routings))
    assert_no_fault(windows._replace(pushes=BY_CHUNK, chunks_of="tokens"), iter(routings))


@pytest.mark.parametrize("stops", [True, False])
def test_after_a_difference_nobody_waits_for_credits(stops):
    windows = Windows(1, 2, 3, differs=True, stops=stops)
    assert ("deadlock" in faults(windows, some_routings(windows, 50))) != stops
