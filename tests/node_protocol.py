"""The protocol between nodes, written as programs of agents for the search in node_model.py.

A rank is a pair (node, local). Flags and cells have the names of csrc/cuda/region.h. A cell lies in the memory of the
rank that its name is followed by; ``node`` is the inbox, or the rail peer's node:

    call, counts   rank, parity, source       by the parity of the epoch
    items          rank, node, receiver       items of the inbox's source for one receiver, by its local index
    table_in       rank, node                 item numbers for the sums on the way back
    items_out      rank, node, receiver       items for a receiver of another node, as the source lists them
    table_out      rank, node
    staging        rank, node, chunk          rows and tails; in a combine, inboxes of other nodes hold outgoing sums
    slots          rank, node, pusher, chunk  partial sums of one chunk of tokens, by the pusher's local index
    weights        rank, node, k, chunk       gradients of weights: the k-th receiver of the chunk writes column k
    sums           rank, node, chunk          sums from another node
    rail weights   rank, node, k, chunk       weights from another node: RailArrays::weights

The owner waits for the wire flag sums_arrived itself. In the engine its relay does, and raises sums_here for it.
One token stands for each chunk. Routings say which ranks receive it, so an item of a receiver is a chunk of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import product

from node_model import Agent, Event, Place

Rank = tuple[int, int]
Routing = Mapping[tuple[Rank, int], frozenset[Rank]]  # receivers of a chunk of tokens, by source and chunk
DISPATCH, COUNTED, CACHED, COMBINE = "dispatch", "counted dispatch", "cached dispatch", "combine"

# Rules that a test may take away.
FENCE = "a fence stands between data and signal"
QUIET = "the rail waits until its puts are delivered before the operation ends"
RAIL_ENDS = "an operation ends after its rail blocks"
TWO_CALLS = "Calls lie in two places"
TWO_COUNTS = "counts lie in two places"
CONSUMED_BEFORE_CALL = "a dispatch waits for consumed before its counts and Call are sent"
SLOTS_FREE = "a combine waits for slots_free before it pushes and before its Call is sent"
CONSUMED_BEFORE_SUMS = "outgoing sums wait for consumed"
AGREE_ALL = "Calls of all ranks are waited for, not only those of the own node"
AGREE_BEFORE_LISTS = "lists and rows are sent after all agreed"
AGREE_BEFORE_SUMS = "sums are made and sent after all agreed"
CALL_ARRIVED_BEFORE_LISTS = "lists are sent after call_arrived of the receiving node"
CALL_ARRIVED_BEFORE_SUMS = "sums are sent after call_arrived of the owner's node"
RELAY_CALLS = "the relay of called waits for call_arrived"
RELAY_LISTS = "the relay of listed waits for items_arrived"
RELAY_ROWS = "the relay of staged waits for rows_arrived"
RELAY_IN_ORDER = "the relay of staged goes chunk by chunk"
SUMS_ARRIVED = "the owner waits for sums_arrived"
SUMMED = "the rail waits for summed"
DRAIN = "after a difference all wait for the chunks that were promised to them"
FREE_AFTER_DIFFERENCE = "after a difference both consumed and slots_free rise"
OTHERS_FIRST = "sums for other nodes come before own tokens"
SENDS_FIRST = "a rail block sends its own Call before it waits for those of peers"


class Protocol:
    """Build the events of all ranks.

    ``program`` lists operations, or for each rank (node by node) its own list. Operations take the routings in turn: a
    combine or a cached dispatch may have a handle of any earlier plan.
    ``blocks="many"`` gives each piece of work an agent of its own: as many orders as there can be. ``"few"`` gives a
    rank as few agents as the engine may run: as many waits behind each other as there can be.
    """

    def __init__(self, nodes: int, ranks: int, program, routings: Iterable[Routing], *, chunks: int = 2, blocks="many",
                 without: Iterable[str] = (), merges: bool = True):  # fmt: skip
        self.nodes, self.locals, self.chunks = range(nodes), range(ranks), range(chunks)
        self.ranks: list[Rank] = list(product(self.nodes, self.locals))
        programs = program if isinstance(program[0], tuple) else [tuple(program)] * len(self.ranks)
        self.programs = dict(zip(self.ranks, programs, strict=True))
        self.routings, self.few, self.without, self.merges = list(routings), blocks == "few", set(without), merges
        self.events: list[Event] = []
        for epoch, rank in product(range(1, len(programs[0]) + 1), self.ranks):
            Operation(self, rank, epoch)

    def kind(self, rank: Rank, epoch: int) -> str:
        """Return what all compare: a counted dispatch looks like any other to the peers."""
        return self.programs[rank][epoch - 1].replace(COUNTED, DISPATCH)

    def agrees(self, epoch: int) -> bool:
        return len({self.kind(rank, epoch) for rank in self.ranks}) == 1

    def last(self, rank: Rank, epoch: int, kinds: tuple[str, ...]) -> int:
        """Return the last operation before ``epoch`` that was one of ``kinds`` or in which ranks differed, or 0."""
        return max((e for e in range(1, epoch) if not self.agrees(e) or self.kind(rank, e) in kinds), default=0)

    def routing(self, epoch: int) -> Routing:
        return self.routings[(epoch - 1) % len(self.routings)]


class Operation:
    """The agents of one operation on one rank."""

    def __init__(self, protocol: Protocol, rank: Rank, epoch: int):
        self.protocol, self.me, self.epoch = protocol, rank, epoch
        self.node, self.local = rank
        self.kind, self.agrees = protocol.kind(rank, epoch), protocol.agrees(epoch)
        self.is_new = self.kind == DISPATCH
        self.routing, self.chunks = protocol.routing(epoch), protocol.chunks
        self.neighbours = [(self.node, local) for local in protocol.locals]  # ranks of the own node, me too
        self.others = [node for node in protocol.nodes if node != self.node]
        self.staged_epoch = protocol.last(rank, epoch, (DISPATCH, CACHED))
        self.pushed_epoch = protocol.last(rank, epoch, (COMBINE,))
        self.arrivals: list[Place] = []
        self.begin()
        if self.kind == COMBINE:
            self.combine()
        else:
            self.dispatch(is_counted=protocol.programs[rank][epoch - 1] == COUNTED)
        self.end()

    # What all operations share.

    def keeps(self, rule: str) -> bool:
        return rule not in self.protocol.without

    def agent(self, name: str) -> Agent:
        return Agent(self.protocol.events, f"{self.kind} {self.epoch} {self.me} {name}", merges=self.protocol.merges)

    def run(self, name: str, *tasks: Callable[[Agent], None], begin: str = "begun", counts: bool = True) -> None:
        """Run tasks one after the other in one agent, or each in an agent of its own."""
        for number, group in enumerate([tasks] if self.protocol.few else [[task] for task in tasks]):
            agent = self.agent(f"{name} {number}")
            agent.wait((begin, self.me), self.epoch)
            for task in group:
                task(agent)
            if name == "rail" and self.keeps(QUIET):
                agent.quiet()
            if name != "rail" or self.keeps(RAIL_ENDS):
                self.arrivals.append(("arrived", self.me, f"{name} {number} {begin}"))
                agent.raise_flag(self.arrivals[-1], self.epoch)
            agent.end_event()

    def raise_at_neighbours(self, agent: Agent, name: str, *indices) -> None:
        for rank in self.neighbours:
            agent.raise_flag((name, rank, *indices), self.epoch)

    def begin(self) -> None:
        agent = self.agent("begin")
        agent.wait(("complete", self.me), self.epoch - 1)
        agent.raise_flag(("begun", self.me), self.epoch)
        agent.end_event()

    def end(self) -> None:
        """Complete the operation, which every rank must have begun."""
        agent = self.agent("end")
        for arrival in self.arrivals:
            agent.wait(arrival, self.epoch)
        for rank in self.protocol.ranks:
            agent.check(("begun", rank), self.epoch)
        frees_both = not self.agrees and self.keeps(FREE_AFTER_DIFFERENCE)
        if self.kind != COMBINE or frees_both:
            self.raise_at_neighbours(agent, "consumed", self.local)
        if self.kind == COMBINE or frees_both:
            self.raise_at_neighbours(agent, "slots_free", self.local)
        agent.raise_flag(("complete", self.me), self.epoch)
        agent.end_event()

    def wait_for_consumed(self, agent: Agent) -> None:
        for _, local in self.neighbours:
            agent.wait(("consumed", self.me, local), self.staged_epoch)

    def wait_for_slots(self, agent: Agent) -> None:
        for _, local in self.neighbours if self.keeps(SLOTS_FREE) else ():
            agent.wait(("slots_free", self.me, local), self.pushed_epoch)

    def call_cells(self, at: Rank, source: Rank) -> list[Place]:
        """Return where the Call of a source lies, and the counts if its plan is new."""
        parities = {"call": self.epoch % 2 * self.keeps(TWO_CALLS), "counts": self.epoch % 2 * self.keeps(TWO_COUNTS)}
        names = ["call", "counts"] if self.protocol.kind(source, self.epoch) == DISPATCH else ["call"]
        return [(name, at, parities[name], source) for name in names]

    def announce(self, agent: Agent) -> None:
        for rank in self.neighbours:
            for cell in self.call_cells(rank, self.me):
                agent.write(cell, self.epoch)
        self.raise_at_neighbours(agent, "called", self.me)

    def agree(self, agent: Agent) -> bool:
        """Wait for the Calls of all ranks and compare them. If they differ, wait for all that is on its way to me."""
        ranks = self.protocol.ranks if self.keeps(AGREE_ALL) else self.neighbours
        for source in ranks:
            agent.wait(("called", self.me, source), self.epoch)
        for source in ranks:
            agent.read(self.call_cells(self.me, source)[0], self.epoch)
        if not self.agrees and self.keeps(DRAIN):
            for pusher in self.neighbours:
                if self.protocol.kind(pusher, self.epoch) == COMBINE:
                    for number in range(len(self.pushed_items(pusher, self.me))):
                        agent.wait(("pushed", self.me, pusher[1], number), self.epoch)
        return self.agrees

    # The rail in both operations.

    def send_call(self, agent: Agent) -> None:
        agent.wait(("called", self.me, self.me), self.epoch)
        for node in self.others:
            peer = (node, self.local)
            for there, here in zip(self.call_cells(peer, self.me), self.call_cells(self.me, self.me)):
                agent.put(there, here, self.epoch)
            self.signal(agent, ("call_arrived", peer, self.node))

    def signal(self, agent: Agent, flag: Place) -> None:
        if self.keeps(FENCE):
            agent.fence()
        agent.signal(flag, self.epoch)

    def relay_call(self, agent: Agent, node: int) -> None:
        source = (node, self.local)
        if self.keeps(RELAY_CALLS):
            agent.wait(("call_arrived", self.me, node), self.epoch)
        here = self.call_cells(self.me, source)
        for cell in here:
            agent.read(cell, self.epoch)
        for rank in self.neighbours:
            for cell in self.call_cells(rank, source) if rank != self.me else ():
                agent.write(cell, self.epoch)
        self.raise_at_neighbours(agent, "called", source)

    def rail_calls(self) -> list[Callable[[Agent], None]]:
        relays = [lambda agent, node=node: self.relay_call(agent, node) for node in self.others]
        return [self.send_call, *relays] if self.keeps(SENDS_FIRST) else [*relays, self.send_call]

    # Dispatch.

    def dispatch(self, is_counted: bool) -> None:
        rail_calls = self.rail_calls()
        pulls = [lambda agent, source=source: self.pull(agent, source) for source in self.protocol.ranks]
        looks = [lambda agent, source=source: self.pull(agent, source, looks=True) for source in self.protocol.ranks]
        nodes_chunks = list(product(self.others, self.chunks))
        if self.protocol.few:
            rail_data = [self.send_lists, self.relay_lists, self.exchange_rows]
        else:
            rail_data = [lambda agent, node=node: self.send_list(agent, node) for node in self.others]
            rail_data += [lambda agent, node=node: self.relay_list(agent, node) for node in self.others]
            rail_data += [lambda agent, at=at: self.send_rows(agent, *at) for at in nodes_chunks]
            if self.keeps(RELAY_IN_ORDER):
                rail_data += [
                    lambda agent, node=node: self.relay_rows(agent, node, self.chunks) for node in self.others
                ]
            else:
                rail_data += [lambda agent, at=at: self.relay_rows(agent, at[0], [at[1]]) for at in nodes_chunks]
        if is_counted:  # two launches: the second begins when all blocks of the first have ended
            self.run("mover", self.plan)
            self.run("helper", self.stage)
            self.run("rail", *rail_calls)
            agent = self.agent("launch")
            for arrival in self.arrivals:
                agent.wait(arrival, self.epoch)
            agent.raise_flag(("launched", self.me), self.epoch)
            agent.end_event()
            self.arrivals = []
            self.run("mover", *pulls, begin="launched")
            self.run("helper", *looks, begin="launched")
            self.run("rail", *rail_data, begin="launched")
        else:
            self.run("mover", self.plan, *pulls)
            self.run("helper", self.stage, *looks)
            self.run("rail", *rail_calls, *rail_data)

    def plan(self, agent: Agent) -> None:
        """Announce the operation. For a new plan also read the counts and list the items."""
        if self.keeps(CONSUMED_BEFORE_CALL):
            self.wait_for_consumed(agent)
        self.announce(agent)
        self.wait_for_consumed(agent)
        if not self.agree(agent) or not self.is_new:
            return
        self.read_counts(agent)
        for _, receiver in self.neighbours:
            agent.write(("items", self.me, self.node, receiver), self.epoch)
        for node in self.others:
            agent.write(("table_out", self.me, node), self.epoch)
            for receiver in self.protocol.locals:
                agent.write(("items_out", self.me, node, receiver), self.epoch)
        self.raise_at_neighbours(agent, "listed", self.me)

    def read_counts(self, agent: Agent) -> None:
        for source in self.protocol.ranks:
            agent.read(self.call_cells(self.me, source)[1], self.epoch)

    def stage(self, agent: Agent) -> None:
        self.wait_for_consumed(agent)
        for chunk in self.chunks:
            agent.write(("staging", self.me, self.node, chunk), self.epoch)
            self.raise_at_neighbours(agent, "staged", self.me, chunk)

    def pull(self, agent: Agent, source: Rank, *, looks: bool = False) -> None:
        """Take what a source has for me. With ``looks`` the last chunk's flag stands for all chunks."""
        if not self.agree(agent):
            return
        node, holder = source[0], (self.node, source[1])
        if self.is_new:
            self.read_counts(agent)
            agent.wait(("listed", self.me, source), self.epoch)
            agent.read(("items", holder, node, self.local), self.epoch)
            if node != self.node and holder == self.me:
                agent.read(("table_in", self.me, node), self.epoch)  # the plan keeps a copy
        mine = [chunk for chunk in self.chunks if self.me in self.routing[source, chunk]]
        for chunk in [self.chunks[-1]] if looks else mine:
            agent.wait(("staged", self.me, source, chunk), self.epoch)
            for part in mine if looks else [chunk]:
                agent.read(("staging", holder, node, part), self.epoch)

    def may_send(self, agent: Agent) -> bool:
        return self.agree(agent) if self.keeps(AGREE_BEFORE_LISTS) else True

    def send_list(self, agent: Agent, node: int) -> None:
        if not self.is_new or not self.may_send(agent):
            return
        peer = (node, self.local)
        agent.wait(("listed", self.me, self.me), self.epoch)
        if self.keeps(CALL_ARRIVED_BEFORE_LISTS):
            agent.wait(("call_arrived", self.me, node), self.epoch)
        for receiver in self.protocol.locals:
            agent.put(("items", peer, self.node, receiver), ("items_out", self.me, node, receiver), self.epoch)
        agent.put(("table_in", peer, self.node), ("table_out", self.me, node), self.epoch)
        self.signal(agent, ("items_arrived", peer, self.node))

    def relay_list(self, agent: Agent, node: int) -> None:
        if not self.is_new or not self.agree(agent):
            return
        if self.keeps(RELAY_LISTS):
            agent.wait(("items_arrived", self.me, node), self.epoch)
        self.raise_at_neighbours(agent, "listed", (node, self.local))

    def send_rows(self, agent: Agent, node: int, chunk: int) -> None:
        if not self.may_send(agent):
            return
        peer = (node, self.local)
        agent.wait(("staged", self.me, self.me, chunk), self.epoch)
        if any(receiver[0] == node for receiver in self.routing[self.me, chunk]):
            agent.put(("staging", peer, self.node, chunk), ("staging", self.me, self.node, chunk), self.epoch)
        self.signal(agent, ("rows_arrived", peer, self.node, chunk))

    def relay_rows(self, agent: Agent, node: int, chunks: Iterable[int]) -> None:
        if not self.agree(agent):
            return
        for chunk in chunks:
            if self.keeps(RELAY_ROWS):
                agent.wait(("rows_arrived", self.me, node, chunk), self.epoch)
            self.raise_at_neighbours(agent, "staged", (node, self.local), chunk)

    def send_lists(self, agent: Agent) -> None:
        for node in self.others:
            self.send_list(agent, node)

    def relay_lists(self, agent: Agent) -> None:
        for node in self.others:
            self.relay_list(agent, node)

    def exchange_rows(self, agent: Agent) -> None:
        for chunk in self.chunks:
            for node in self.others:
                self.send_rows(agent, node, chunk)
            for node in self.others:
                self.relay_rows(agent, node, [chunk])

    # Combine.

    def combine(self) -> None:
        others = [
            lambda agent, node=node, chunk=chunk: self.reduce_for(agent, node, chunk)
            for chunk, node in product(self.chunks, self.others)
        ]
        own = [lambda agent, chunk=chunk: self.reduce_own(agent, chunk) for chunk in self.chunks]
        reduce = [*others, *own] if self.keeps(OTHERS_FIRST) else [*own, *others]
        pushes = [lambda agent, owner=owner: self.push(agent, owner) for owner in self.neighbours]
        sums = [
            lambda agent, node=node, chunk=chunk: self.send_sums(agent, node, chunk)
            for chunk, node in product(self.chunks, self.others)
        ]
        self.run("block", self.begin_combine, *pushes, *reduce)
        self.run("rail", *self.rail_calls(), *sums)

    def begin_combine(self, agent: Agent) -> None:
        self.wait_for_slots(agent)
        self.announce(agent)

    def receivers(self, source: Rank, chunk: int) -> list[Rank]:
        return sorted(self.routing[source, chunk])

    def pushed_items(self, pusher: Rank, owner: Rank) -> list[tuple[int, int]]:
        """Return node and chunk of each item that ``pusher`` pushes to an inbox of ``owner``, in order."""
        at = product(self.chunks, self.protocol.nodes)
        return [(node, chunk) for chunk, node in at if pusher in self.routing[(node, owner[1]), chunk]]

    def push(self, agent: Agent, owner: Rank) -> None:
        self.wait_for_slots(agent)
        items = self.pushed_items(self.me, owner)
        for node, chunk in items:
            k = self.receivers((node, owner[1]), chunk).index(self.me)
            agent.write(("weights", owner, node, k, chunk), self.epoch)
        for number, (node, chunk) in enumerate(items):
            agent.write(("slots", owner, node, self.local, chunk), self.epoch)
            agent.raise_flag(("pushed", owner, self.local, number), self.epoch)

    def wait_for_pushed(self, agent: Agent, node: int, chunk: int) -> list[int]:
        """Wait for the partial sums of a chunk of (node, my local index). Return who pushed them."""
        pushers = [rank for rank in self.neighbours if rank in self.routing[(node, self.local), chunk]]
        for rank in pushers:
            number = self.pushed_items(rank, self.me).index((node, chunk))
            agent.wait(("pushed", self.me, rank[1], number), self.epoch)
        return [local for _, local in pushers]

    def reduce_for(self, agent: Agent, node: int, chunk: int) -> None:
        """Sum what my node has for the tokens of a rail peer."""
        if self.keeps(AGREE_BEFORE_SUMS) and not self.agree(agent):
            return
        pushers = self.wait_for_pushed(agent, node, chunk)
        if not pushers:
            return
        if self.keeps(CONSUMED_BEFORE_SUMS):
            self.wait_for_consumed(agent)
        for local in pushers:
            agent.read(("slots", self.me, node, local, chunk), self.epoch)
        agent.write(("staging", self.me, node, chunk), self.epoch)
        agent.raise_flag(("summed", self.me, node, chunk), self.epoch)

    def send_sums(self, agent: Agent, node: int, chunk: int) -> None:
        if self.keeps(AGREE_BEFORE_SUMS) and not self.agree(agent):
            return
        owner = (node, self.local)
        mine = [k for k, receiver in enumerate(self.receivers(owner, chunk)) if receiver in self.neighbours]
        if not mine:
            return
        if self.keeps(CALL_ARRIVED_BEFORE_SUMS):
            agent.wait(("call_arrived", self.me, node), self.epoch)
        if self.keeps(SUMMED):
            agent.wait(("summed", self.me, node, chunk), self.epoch)
        agent.put(("sums", owner, self.node, chunk), ("staging", self.me, node, chunk), self.epoch)
        for k in mine:
            here = ("weights", self.me, node, k, chunk)
            agent.put(("rail weights", owner, self.node, k, chunk), here, self.epoch)
        self.signal(agent, ("sums_arrived", owner, self.node, chunk))

    def reduce_own(self, agent: Agent, chunk: int) -> None:
        if not self.agree(agent):
            return
        receivers = self.receivers(self.me, chunk)
        pushers = self.wait_for_pushed(agent, self.node, chunk)
        nodes = sorted({node for node, _ in receivers} - {self.node})
        for node in nodes if self.keeps(SUMS_ARRIVED) else ():
            agent.wait(("sums_arrived", self.me, node, chunk), self.epoch)
        for local in pushers:
            agent.read(("slots", self.me, self.node, local, chunk), self.epoch)
        for node in nodes:
            agent.read(("sums", self.me, node, chunk), self.epoch)
        for k, (node, _) in enumerate(receivers):
            agent.read(("weights" if node == self.node else "rail weights", self.me, node, k, chunk), self.epoch)
