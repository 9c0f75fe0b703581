"""The protocol between nodes, written as programs of agents for the search in node_model.py.

A rank is a pair (node, local). Flags and cells have the names of csrc/cuda/region.h. A cell lies in the memory of the
rank that its name is followed by; ``node`` is the inbox, or the rail peer's node:

    call, counts   rank, parity, source       by the parity of the epoch
    items          rank, node, receiver       items of the inbox's source for one receiver, by its local index
    table_in       rank, node                 item numbers for the sums on the way back
    items_out      rank, node, receiver       items for a receiver of another node, as the source lists them
    table_out      rank, node
    sent_nodes     rank                       of the plan: the nodes of each token
    head           rank                       of the plan: whether it is usable
    staging        rank, node, chunk          rows and metadata; in a combine, inboxes of other nodes hold outgoing
                                              sums, with the content of `Operation.sum`
    slots          rank, node, pusher, chunk  partial sums of one chunk of tokens, by the pusher's local index. Slots of
                                              other nodes hold a window of chunks
    weights        rank, node, k, chunk       gradients of weights: the k-th receiver of the chunk writes column k. Or
                                              combine weights: the source writes all columns
    sums           rank, node, chunk          sums from another node
    rail weights   rank, node, k, chunk       weights from another node: RailArrays::weights

One token stands for each chunk, of all kinds of chunks. Routings say which ranks receive it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product

from lib.node_model import EPOCHS, Agent, Event, Place

Rank = tuple[int, int]
Routing = Mapping[tuple[Rank, int], frozenset[Rank]]  # receivers of a chunk of tokens, by source and chunk
Task = Callable[[Agent], None]
DISPATCH, COUNTED, CACHED = "dispatch", "counted dispatch", "cached dispatch"
PUSHED = "pushed dispatch"  # in decode layout with a hook: rows for the own node go to slots
COMBINE, HOOKED, FACTORED = "combine", "hooked combine", "factored combine"  # that with a hook is factored too
COMBINES, NEW = (COMBINE, FACTORED), (DISPATCH, PUSHED)
WIRE_FLAGS = ("inbox_free", "call_arrived", "items_arrived", "rows_arrived", "sums_arrived")

# Rules that a test may take away.
FENCE = "a fence stands between data and signal"
QUIET = "the rail waits until its puts are delivered before the operation ends"
RAIL_ENDS = "an operation ends after its rail blocks"
TWO_CALLS = "Calls lie in two places"
TWO_COUNTS = "counts lie in two places"
CONSUMED_BEFORE_CALL = "a dispatch waits for consumed before its counts and Call are sent"
SLOTS_FREE = "slots_free is waited for before pushes and before the Call is sent"
FREE_AFTER_ROWS = "slots_free rises after pushed rows too"
CONSUMED_BEFORE_SUMS = "outgoing sums wait for consumed"
AGREE_ALL = "Calls of all ranks are waited for, not only those of the own node"
INBOX_FREE = "early rows wait for inbox_free"
CONSUMED_BEFORE_INBOX = "inbox_free waits for consumed"
INBOX_OF_COMBINES = "inbox_free rises in combines too"
AGREE_BEFORE_ROWS = "late rows are sent after all agreed"
AGREE_BEFORE_SUMS = "sums are made and sent after all agreed"
LISTED_BEFORE_ITEMS = "items are sent after listed of the own rank"
RELAY_CALLS = "the relay of called waits for call_arrived"
RELAY_ITEMS = "the relay of listed waits for items_arrived"
RELAY_ROWS = "the relay of staged waits for rows_arrived"
RELAY_SUMS = "the relay of sums_relayed waits for sums_arrived"
RELAY_IN_ORDER = "the relay of staged goes chunk by chunk"
SUMS_RELAYED = "own tokens wait for sums_relayed"
SUMMED = "the rail waits for summed"
EMPTY_SUMS = "sums_arrived rises for chunks without sums too"
DRAIN = "after a difference all wait for the chunks that were promised to them"
FREE_AFTER_DIFFERENCE = "after a difference both consumed and slots_free rise"
SUMS_IN_ORDER = "sums for other nodes go chunk by chunk"
OTHERS_FIRST = "sums for other nodes come before own tokens"
OWN_WARPS = "relays and senders are different warps"
FREED = "pushes behind the window wait for freed"
AGREE_BEFORE_FREED = "after a difference nobody waits for freed"
FLAGS_BEFORE_DRAIN = "after a difference a rank raises what it promised before it waits for others"
AGREE_BEFORE_COMBINE_WEIGHTS = "combine weights are sent after all agreed"
AGREE_BEFORE_PUSHES = "with combine weights all agree before they push"
COMBINE_WEIGHTS_HERE = "pushes wait for the combine weights of ranks on other nodes"
RELAY_COMBINE_WEIGHTS = "the relay of combine weights waits for rows_arrived"
HEAD = "a relay waits for listed of its own rank before it reads whether the plan is usable"
EMPTY_ITEMS = "items_arrived rises for an unusable plan too"
UNUSED_ROWS = "all rows are sent, also those of an unusable plan"
AWAIT_UNUSED_ROWS = "a relay waits for the rows of an unusable plan too"


class Protocol:
    """Build the events of all ranks.

    ``program`` lists operations, or for each rank (node by node) its own list. Operations take the routings in turn: a
    combine or a cached dispatch may have a handle of any earlier plan.
    ``unusable`` lists the operations whose plan is unusable: rows do not fit, or did not when the plan was made.
    ``behind``: a sender puts the items of a new plan behind so many chunks of rows. Ranks and operations take the
    values in turn. In the engine it is up to chance, and at most kChunksAhead. ``window``: chunks of slots.
    ``direct``: sums for other nodes are stored there at once, without staging. ``early``: whether rows of a dispatch
    of one launch cross before the ranks agree; ranks and operations take the values in turn.
    ``blocks="many"`` gives each piece of work an agent of its own: as many orders as there can be. ``"few"`` gives a
    rank as few agents as the engine may run: as many waits behind each other as there can be.
    """

    def __init__(self, nodes: int, ranks: int, program, routings: Iterable[Routing], *, chunks: int = 2, blocks="many",
                 window: int = 1, behind: Sequence[int] = (1, 0, 2), unusable: Iterable[int] = (), direct=False,
                 early: Sequence[bool] = (True,), without: Iterable[str] = ()):  # fmt: skip
        self.nodes, self.locals, self.chunks = range(nodes), range(ranks), range(chunks)
        self.ranks: list[Rank] = list(product(self.nodes, self.locals))
        programs = program if isinstance(program[0], tuple) else [tuple(program)] * len(self.ranks)
        self.programs = dict(zip(self.ranks, programs, strict=True))
        self.routings, self.few, self.without = list(routings), blocks == "few", set(without)
        self.window, self.unusable, self.direct = window, set(unusable), direct
        self.behind, self.early = [min(chunks, number) for number in behind], early
        self.events: list[Event] = []
        for epoch, rank in product(range(1, len(programs[0]) + 1), self.ranks):
            self.make_operation(rank, epoch)

    def make_operation(self, rank: Rank, epoch: int) -> None:
        Operation(self, rank, epoch)

    def kind(self, rank: Rank, epoch: int) -> str:
        """Return what all compare: two launches look like one to the peers."""
        return self.programs[rank][epoch - 1].replace(COUNTED, DISPATCH).replace(HOOKED, FACTORED)

    def agrees(self, epoch: int) -> bool:
        return len({self.kind(rank, epoch) for rank in self.ranks}) == 1

    def last(self, rank: Rank, epoch: int, kinds: tuple[str, ...]) -> int:
        """Return the last operation before ``epoch`` that was one of ``kinds`` or in which ranks differed, or 0."""
        return max((e for e in range(1, epoch) if not self.agrees(e) or self.kind(rank, e) in kinds), default=0)


class Operation:
    """The agents of one operation on one rank."""

    all_cross = False  # whether everything crosses with any plan: messages of the NCCL wire do, unless they are exact
    asks_for_inbox = True  # whether early rows wait until the peer's inbox is free
    waits_for_plan = False  # whether rows wait for the new plan, which packs them

    def __init__(self, protocol: Protocol, rank: Rank, epoch: int):
        self.protocol, self.me, self.epoch = protocol, rank, epoch
        self.node, self.local = rank
        self.kind, self.agrees = protocol.kind(rank, epoch), protocol.agrees(epoch)
        self.is_new, self.pushes_rows = self.kind in NEW, self.kind == PUSHED
        self.usable = self.pushes_rows or epoch not in protocol.unusable  # in decode layout all rows fit
        self.routing = protocol.routings[(epoch - 1) % len(protocol.routings)]
        self.chunks, self.has_combine_weights = protocol.chunks, self.kind == FACTORED
        # Chunks that a rank pushes in a combine: far, then own ones.
        self.promised = len(self.chunks) * (1 if epoch in protocol.unusable else 2)
        turn = epoch + protocol.ranks.index(rank)
        self.behind = protocol.behind[turn % len(protocol.behind)]
        self.neighbours = [(self.node, local) for local in protocol.locals]  # ranks of the own node, me too
        self.others = [node for node in protocol.nodes if node != self.node]
        self.staged_epoch = protocol.last(rank, epoch, (*NEW, CACHED))
        self.pushed_epoch = protocol.last(rank, epoch, (*COMBINES, PUSHED))
        self.sum = epoch + EPOCHS  # content of sums: late rows of the same epoch may come to the same place
        self.arrivals: list[Place] = []
        self.compared: set[tuple[str, bool]] = set()  # agents that have compared the Calls, and whether they drained
        self.begin()
        operation = protocol.programs[rank][epoch - 1]
        twice, self.sends_first = operation in (COUNTED, HOOKED, PUSHED), operation in (HOOKED, PUSHED)
        self.early = protocol.early[turn % len(protocol.early)] and operation != COUNTED and not self.waits_for_plan
        if self.kind in COMBINES:
            self.combine(twice)
        else:
            self.dispatch(twice)
        self.end()

    # What all operations share.

    def keeps(self, rule: str) -> bool:
        return rule not in self.protocol.without

    def wait(self, agent: Agent, name: str, *indices, rule: str = "") -> None:
        """Wait for a flag at this rank, unless the rule is taken away."""
        if self.keeps(rule):
            agent.wait((name, self.me, *indices), self.epoch)

    def agent(self, name: str) -> Agent:
        name = f"{self.kind} {self.epoch} {self.me} {name}"
        return Agent(self.protocol.events, name, rank=self.me)

    def run(self, name: str, *tasks: Task, begin: str = "begun", rail: bool = False) -> None:
        """Run tasks one after the other in one agent, or each in an agent of its own."""
        for number, group in enumerate([tasks] if self.protocol.few else [[task] for task in tasks]):
            agent = self.agent(f"{name} {number}" + " again" * (begin == "launched"))
            agent.wait((begin, self.me), self.epoch)
            for task in group:
                task(agent)
            if rail and self.keeps(QUIET):
                agent.quiet()
            if not rail or self.keeps(RAIL_ENDS):
                self.arrivals.append(("arrived", self.me, f"{name} {number} {begin}"))
                agent.raise_flag(self.arrivals[-1], self.epoch)
            agent.end_event()

    def run_rail(self, senders: list[Task], relays: dict[int, list[Task]], begin: str = "begun") -> None:
        """Run the rail blocks: all senders, and a relay for each other node."""
        if self.keeps(OWN_WARPS):
            self.run("sender", *senders, begin=begin, rail=True)
            for node, tasks in relays.items():
                self.run(f"relay {node}", *tasks, begin=begin, rail=True)
        else:
            self.run("rail", *sum(relays.values(), []), *senders, begin=begin, rail=True)

    def raise_at_neighbours(self, agent: Agent, name: str, *indices) -> None:
        for rank in self.neighbours:
            agent.raise_flag((name, rank, *indices), self.epoch)

    def begin(self) -> None:
        agent = self.agent("begin")
        agent.wait(("complete", self.me), self.epoch - 1)
        agent.raise_flag(("begun", self.me), self.epoch)
        agent.end_event()

    def when_all_have_ended(self, name: str) -> Agent:
        """Return an agent that has waited for all blocks of a launch."""
        agent = self.agent(name)
        for arrival in self.arrivals:
            agent.wait(arrival, self.epoch)
        self.arrivals = []
        return agent

    def end(self) -> None:
        """Complete the operation, which every rank must have begun."""
        agent = self.when_all_have_ended("end")
        for rank in self.protocol.ranks:
            agent.check(("begun", rank), self.epoch)
        frees_both = not self.agrees and self.keeps(FREE_AFTER_DIFFERENCE)
        frees_slots = self.kind in COMBINES or (self.kind == PUSHED and self.keeps(FREE_AFTER_ROWS))
        for flag, is_mine in (("consumed", self.kind not in COMBINES), ("slots_free", frees_slots)):
            if is_mine or frees_both:
                self.raise_at_neighbours(agent, flag, self.local)
        agent.raise_flag(("complete", self.me), self.epoch)
        agent.end_event()

    def wait_for_consumed(self, agent: Agent) -> None:
        for local in self.protocol.locals:
            agent.wait(("consumed", self.me, local), self.staged_epoch)

    def wait_for_slots(self, agent: Agent) -> None:
        for local in self.protocol.locals if self.keeps(SLOTS_FREE) else ():
            agent.wait(("slots_free", self.me, local), self.pushed_epoch)

    def call_cells(self, at: Rank, source: Rank) -> list[Place]:
        """Return where the Call of a source lies, and the counts if its plan is new."""
        parities = {"call": self.epoch % 2 * self.keeps(TWO_CALLS), "counts": self.epoch % 2 * self.keeps(TWO_COUNTS)}
        names = ["call", "counts"] if self.protocol.kind(source, self.epoch) in NEW else ["call"]
        return [(name, at, parities[name], source) for name in names]

    def read_call(self, agent: Agent, node: int) -> None:
        """Read how many tokens a rail peer has."""
        agent.read(self.call_cells(self.me, (node, self.local))[0], self.epoch)

    def announce(self, agent: Agent) -> None:
        for rank in self.neighbours:
            for cell in self.call_cells(rank, self.me):
                agent.write(cell, self.epoch)
        self.raise_at_neighbours(agent, "called", self.me)

    def agree(self, agent: Agent, drains: bool = True) -> bool:
        """Wait for the Calls of all ranks and compare them. If they differ, wait for all that is on its way to me."""
        if (agent.name, drains) in self.compared:
            return self.agrees
        self.compared |= {(agent.name, False), (agent.name, drains)}
        ranks = self.protocol.ranks if self.keeps(AGREE_ALL) else self.neighbours
        for source in ranks:
            agent.wait(("called", self.me, source), self.epoch)
        for source in ranks:
            agent.read(self.call_cells(self.me, source)[0], self.epoch)
        if not self.agrees and drains and self.keeps(DRAIN):
            for pusher in self.neighbours:
                if self.protocol.kind(pusher, self.epoch) == COMBINE:  # with combine weights nothing is promised
                    agent.wait(("pushed", self.me, pusher[1], self.promised - 1), self.epoch)
        return self.agrees

    # The rail in both operations.

    def hand_over_inbox(self, agent: Agent, node: int) -> None:
        if self.kind in COMBINES and not self.keeps(INBOX_OF_COMBINES):
            return
        if self.keeps(CONSUMED_BEFORE_INBOX):
            self.wait_for_consumed(agent)
        self.raise_on_wire(agent, ("inbox_free", (node, self.local), self.node))

    def send_call(self, agent: Agent, node: int) -> None:
        self.wait(agent, "called", self.me)
        peer = (node, self.local)
        for there, here in zip(self.call_cells(peer, self.me), self.call_cells(self.me, self.me)):
            self.put(agent, there, here, self.epoch)
        self.signal(agent, ("call_arrived", peer, self.node))

    def signal(self, agent: Agent, flag: Place) -> None:
        if self.keeps(FENCE):
            agent.fence()
        self.raise_on_wire(agent, flag)

    def raise_on_wire(self, agent: Agent, flag: Place) -> None:
        agent.signal(flag, self.epoch)

    def put(self, agent: Agent, there: Place, here: Place, content: int, *, may_be_late: bool = False) -> None:
        agent.put(there, here, content, may_be_late=may_be_late)

    def relay_call(self, agent: Agent, node: int) -> None:
        source = (node, self.local)
        self.wait(agent, "call_arrived", node, rule=RELAY_CALLS)
        for cell in self.call_cells(self.me, source):
            agent.read(cell, self.epoch)
        for rank in self.neighbours:
            for cell in self.call_cells(rank, source) if rank != self.me else ():
                agent.write(cell, self.epoch)
        self.raise_at_neighbours(agent, "called", source)

    def crosses(self, agent: Agent, rule: str = "") -> bool:
        """Return whether what follows the comparison crosses to other nodes."""
        agrees = not self.keeps(rule) or self.agree(agent)
        return agrees and (self.is_new or self.usable or self.all_cross)

    def launch(self, twice: bool, blocks: dict[str, tuple[list[Task], list[Task]]], senders, relays) -> None:
        """Run what blocks do first and what they do later, and the rail, in one launch or in two.

        With a hook the first of two launches sends, and relays all but the last task of each relay.
        """
        calls = [self.hand_over_inbox, self.send_call]
        if self.kind in COMBINES:
            calls.reverse()
        first_senders = [partial(task, node=node) for task, node in product(calls, self.others)]
        first_relays = {node: [partial(self.relay_call, node=node)] for node in self.others}
        if twice:
            for name, (tasks, _) in blocks.items():
                self.run(name, *tasks)
            if self.sends_first:
                first_senders, senders = [*first_senders, *senders], []
                if self.kind in COMBINES:
                    first_relays = {node: first_relays[node] + relays[node][:-1] for node in self.others}
                    relays = {node: relays[node][-1:] for node in self.others}
            self.run_rail(first_senders, first_relays)
            agent = self.when_all_have_ended("launch")
            agent.raise_flag(("launched", self.me), self.epoch)
            agent.end_event()
            for name, (_, tasks) in blocks.items():
                self.run(name, *tasks, begin="launched")
            self.run_rail(senders, relays, begin="launched")
        else:
            for name, (tasks, later) in blocks.items():
                self.run(name, *tasks, *later)
            self.run_rail([*first_senders, *senders], {n: first_relays[n] + relays[n] for n in self.others})

    # Dispatch.

    def dispatch(self, twice: bool) -> None:
        pulls: list[Task] = [partial(self.pull, source=source) for source in self.protocol.ranks]
        looks: list[Task] = [partial(self.pull, source=source, looks=True) for source in self.protocol.ranks]
        senders: list[Task] = [partial(self.send_items, node=node) for node in self.others]
        for chunk, node in product(self.chunks, self.others):
            senders.append(partial(self.send_rows, node=node, chunk=chunk))
        parts = [self.chunks] if self.keeps(RELAY_IN_ORDER) else [[chunk] for chunk in self.chunks]
        relays = {
            node: [
                partial(self.relay_items, node=node),
                *(partial(self.relay_rows, node=node, chunks=part) for part in parts),
            ]
            for node in self.others
        }
        blocks = {"pull_warps": ([self.plan], pulls), "stage_warps": ([self.stage], looks)}
        self.launch(twice, blocks, [self.send_all] if self.protocol.few else senders, relays)

    def plan(self, agent: Agent) -> None:
        """Announce the operation. For a new plan count before that; afterwards read the counts and list the items."""
        if self.keeps(CONSUMED_BEFORE_CALL):
            self.wait_for_consumed(agent)
        if self.is_new:
            agent.write(("sent_nodes", self.me), self.epoch)
        self.announce(agent)
        agrees = self.agree(agent)
        if not self.is_new:
            return
        if agrees:
            for source in self.protocol.ranks:
                agent.read(self.call_cells(self.me, source)[1], self.epoch)
        agent.write(("head", self.me), self.epoch)
        if agrees and self.usable:
            for _, receiver in self.neighbours:
                agent.write(("items", self.me, self.node, receiver), self.epoch)
            for node in self.others:
                agent.write(("table_out", self.me, node), self.epoch)
                for receiver in self.protocol.locals:
                    agent.write(("items_out", self.me, node, receiver), self.epoch)
        self.raise_at_neighbours(agent, "listed", self.me)

    def stage(self, agent: Agent) -> None:
        self.wait_for_consumed(agent)
        if self.pushes_rows:
            self.wait_for_slots(agent)
        for chunk in self.chunks:
            agent.write(("staging", self.me, self.node, chunk), self.epoch)
            for owner in self.neighbours if self.pushes_rows else ():
                if owner in self.routing[self.me, chunk]:
                    agent.write(*self.slot(owner, self.node, self.local, chunk), may_be_late=not self.agrees)
            self.raise_at_neighbours(agent, "staged", self.me, chunk)

    def pull(self, agent: Agent, source: Rank, *, looks: bool = False) -> None:
        """Take what a source has for me. With ``looks`` the last chunk's flag stands for all chunks."""
        if not self.agree(agent):
            return
        node, holder = source[0], (self.node, source[1])
        if self.is_new:
            for rank in self.protocol.ranks:
                self.wait(agent, "listed", rank)
            agent.read(("head", self.me), self.epoch)
        if not self.usable:
            return
        if self.is_new:
            agent.read(("items", holder, node, self.local), self.epoch)
            if node != self.node and holder == self.me:
                agent.read(("table_in", self.me, node), self.epoch)  # the plan keeps a copy
        mine = [chunk for chunk in self.chunks if self.me in self.routing[source, chunk]]
        for chunk in [self.chunks[-1]] if looks else mine:
            self.wait(agent, "staged", source, chunk)
            for part in mine if looks else [chunk]:
                if self.pushes_rows and node == self.node:
                    agent.read(*self.slot(self.me, node, source[1], part))
                else:
                    agent.read(("staging", holder, node, part), self.epoch)

    def may_send(self, agent: Agent) -> bool:
        """Return whether rows cross: also those of a new plan that turns out to be unusable."""
        if not (self.is_new or self.usable or self.all_cross):
            return False
        return self.early or not self.keeps(AGREE_BEFORE_ROWS) or self.agree(agent)

    def send_all(self, agent: Agent) -> None:
        """Send rows chunk by chunk, and in between the items of a new plan."""
        for chunk in range(len(self.chunks) + 1):
            for node in self.others if chunk == self.behind else ():
                self.send_items(agent, node)
            for node in self.others if chunk < len(self.chunks) else ():
                self.send_rows(agent, node, chunk)
        self.agree(agent)

    def send_items(self, agent: Agent, node: int) -> None:
        if not self.is_new or not self.may_send(agent):
            return
        peer = (node, self.local)
        self.wait(agent, "listed", self.me, rule=LISTED_BEFORE_ITEMS)
        agent.read(("head", self.me), self.epoch)
        usable = self.usable and self.agrees  # as the head says
        if usable:
            agent.read(self.call_cells(self.me, self.me)[1], self.epoch)
            for receiver in self.protocol.locals:
                here = ("items_out", self.me, node, receiver)
                self.put(agent, ("items", peer, self.node, receiver), here, self.epoch)
            self.put(agent, ("table_in", peer, self.node), ("table_out", self.me, node), self.epoch)
        if usable or self.keeps(EMPTY_ITEMS):
            self.signal(agent, ("items_arrived", peer, self.node))

    def send_rows(self, agent: Agent, node: int, chunk: int) -> None:
        if not self.may_send(agent) or not (self.usable or chunk < self.behind or self.keeps(UNUSED_ROWS)):
            return
        peer = (node, self.local)
        self.wait(agent, "staged", self.me, chunk)
        if self.early and self.asks_for_inbox:
            self.wait(agent, "inbox_free", node, rule=INBOX_FREE)
        if self.is_new and not self.early:  # early rows look at the choices of experts, which the caller owns
            agent.read(("sent_nodes", self.me), self.epoch)
        if any(receiver[0] == node for receiver in self.routing[self.me, chunk]):
            there, here = (("staging", rank, self.node, chunk) for rank in (peer, self.me))
            self.put(agent, there, here, self.epoch, may_be_late=self.early and not self.agrees)
        self.signal(agent, ("rows_arrived", peer, self.node, chunk))

    def relay_items(self, agent: Agent, node: int) -> None:
        if self.agree(agent) and self.is_new:
            self.wait(agent, "items_arrived", node, rule=RELAY_ITEMS)
            self.raise_at_neighbours(agent, "listed", (node, self.local))

    def relay_rows(self, agent: Agent, node: int, chunks: Iterable[int]) -> None:
        if not self.crosses(agent):
            return
        if self.is_new:
            self.wait(agent, "listed", self.me, rule=HEAD)
            agent.read(("head", self.me), self.epoch)
        self.read_call(agent, node)
        for chunk in chunks if self.usable or self.keeps(AWAIT_UNUSED_ROWS) else ():
            self.wait(agent, "rows_arrived", node, chunk, rule=RELAY_ROWS)
            if self.usable:
                self.raise_at_neighbours(agent, "staged", (node, self.local), chunk)

    # Combine.

    def combine(self, twice: bool) -> None:
        """Push and sum as progress_flags.h demands: sums of a far chunk come just before pushes that need its slots.

        The first of two launches makes all but the sums of own tokens.
        """
        window, few = self.protocol.window, self.protocol.few

        def push(agent: Agent) -> None:
            self.begin_combine(agent)
            for chunk in self.chunks:
                if few and chunk >= window:
                    self.reduce_for_others(agent, [chunk - window])
                self.push_far(agent, chunk)
            self.push_own(agent)

        def sums(chunks: Sequence[int]) -> list[Task]:
            parts = [chunks] if self.keeps(SUMS_IN_ORDER) else [[chunk] for chunk in chunks]
            return [partial(self.reduce_for_others, chunks=part) for part in parts]

        own: list[Task] = [partial(self.reduce_own, chunk=chunk) for chunk in self.chunks]
        for_others = sums(self.chunks[-window:] if few else self.chunks)
        pushes: list[Task] = [push]
        if twice:
            pushes, for_others = [*pushes, *for_others], []
        reduces = [*for_others, *own] if self.keeps(OTHERS_FIRST) else [*own, *for_others]
        senders: list[Task] = []
        relays: dict[int, list[Task]] = {node: [] for node in self.others}
        if self.has_combine_weights:
            senders = [partial(self.send_combine_weights, node=node) for node in self.others]
            relays = {node: [partial(self.relay_combine_weights, node=node)] for node in self.others}
        for chunk, node in product(self.chunks, self.others):
            senders.append(partial(self.send_sums, node=node, chunk=chunk))
        for node, tasks in relays.items():
            tasks.append(partial(self.relay_sums, node=node))
        self.launch(twice, {"block": (pushes, reduces)}, senders, relays)

    def receivers(self, source: Rank, chunk: int) -> list[Rank]:
        return sorted(self.routing[source, chunk])

    def combine_weights(self, at: Rank, node: int, chunk: int) -> list[Place]:
        """Return where the combine weights of a chunk of (node, local index of ``at``) lie."""
        return [("weights", at, node, k, chunk) for k in range(len(self.receivers((node, at[1]), chunk)))]

    def send_combine_weights(self, agent: Agent, node: int) -> None:
        if self.crosses(agent, AGREE_BEFORE_COMBINE_WEIGHTS):
            peer = (node, self.local)
            for chunk in self.chunks:
                cells = (self.combine_weights(rank, self.node, chunk) for rank in (peer, self.me))
                for there, here in zip(*cells):
                    self.put(agent, there, here, self.epoch)
            self.signal(agent, ("rows_arrived", peer, self.node, 0))

    def relay_combine_weights(self, agent: Agent, node: int) -> None:
        if self.crosses(agent):
            self.wait(agent, "rows_arrived", node, 0, rule=RELAY_COMBINE_WEIGHTS)
            self.raise_at_neighbours(agent, "staged", (node, self.local), 0)

    def begin_combine(self, agent: Agent) -> None:
        """Announce, then push all weights. Or give combine weights, announce, agree and wait for those of others."""
        self.wait_for_slots(agent)
        for chunk in self.chunks if self.has_combine_weights else ():
            for cell in self.combine_weights(self.me, self.node, chunk):
                agent.write(cell, self.epoch)
        self.announce(agent)
        if self.has_combine_weights:
            agrees = not self.keeps(AGREE_BEFORE_PUSHES) or self.agree(agent)
            for source in self.protocol.ranks if agrees and self.usable else ():
                if source[0] != self.node:
                    self.wait(agent, "staged", source, 0, rule=COMBINE_WEIGHTS_HERE)
            return
        for owner, node, chunk in product(self.neighbours, self.protocol.nodes, self.chunks) if self.usable else ():
            receivers = self.receivers((node, owner[1]), chunk)
            if self.me in receivers:
                agent.write(("weights", owner, node, receivers.index(self.me), chunk), self.epoch)

    def slot(self, owner: Rank, node: int, pusher: int, chunk: int) -> tuple[Place, int]:
        """Return a slot and its content: the chunks of another node take turns in a window."""
        place = chunk if node == self.node else chunk % self.protocol.window
        return ("slots", owner, node, pusher, place), self.epoch + EPOCHS * chunk

    def push(self, agent: Agent, chunk: int, node: int) -> None:
        """Push the partial sums of a chunk of all sources of a node."""
        for owner in self.neighbours:
            receivers = self.receivers((node, owner[1]), chunk)
            if self.me in receivers:
                if self.has_combine_weights:
                    agent.read(("weights", owner, node, receivers.index(self.me), chunk), self.epoch)
                agent.write(*self.slot(owner, node, self.local, chunk))

    def push_far(self, agent: Agent, chunk: int) -> None:
        window, stops = self.protocol.window, self.has_combine_weights and not self.agrees
        sources = [(node, local) for node, local in self.protocol.ranks if node != self.node]
        has_items = self.usable and any(self.me in self.routing[source, chunk] for source in sources)
        if has_items and chunk >= window and not stops:
            if self.keeps(AGREE_BEFORE_FREED):
                stops = not self.agree(agent, drains=not self.keeps(FLAGS_BEFORE_DRAIN))
            for local in self.protocol.locals if not stops else ():
                self.wait(agent, "freed", local, chunk - window, rule=FREED)
        for node in self.others if has_items and not stops else ():
            self.push(agent, chunk, node)
        self.raise_at_neighbours(agent, "pushed", self.local, chunk)

    def push_own(self, agent: Agent) -> None:
        """Push own chunks, which follow far chunks in the numbers of flags."""
        for chunk in self.chunks if self.usable and (self.agrees or not self.has_combine_weights) else ():
            self.push(agent, chunk, self.node)
            self.raise_at_neighbours(agent, "pushed", self.local, len(self.chunks) + chunk)

    def wait_for_pushed(self, agent: Agent, node: int, chunk: int) -> list[int]:
        """Wait for the partial sums of a chunk of (node, my local index). Return who pushed them."""
        number = chunk + len(self.chunks) * (node == self.node)
        pushers = [local for at, local in self.receivers((node, self.local), chunk) if at == self.node]
        for local in pushers:
            self.wait(agent, "pushed", local, number)
        return pushers

    def reduce_for_others(self, agent: Agent, chunks: Iterable[int]) -> None:
        """Sum what my node has for the tokens of all rail peers, then free the slots."""
        if self.keeps(AGREE_BEFORE_SUMS) and not self.agree(agent, drains=False):
            return
        for chunk in chunks:
            for node in self.others if self.usable else ():
                pushers = self.wait_for_pushed(agent, node, chunk)
                if self.keeps(CONSUMED_BEFORE_SUMS):
                    self.wait_for_consumed(agent)
                self.read_call(agent, node)
                for local in pushers:
                    agent.read(*self.slot(self.me, node, local, chunk))
                direct = ("sums", (node, self.local), self.node, chunk)
                if pushers:
                    agent.write(direct if self.protocol.direct else ("staging", self.me, node, chunk), self.sum)
                agent.raise_flag(("summed", self.me, node, chunk), self.epoch)
            self.raise_at_neighbours(agent, "freed", self.local, chunk)

    def send_sums(self, agent: Agent, node: int, chunk: int) -> None:
        if not self.crosses(agent, AGREE_BEFORE_SUMS):
            return
        owner = (node, self.local)
        mine = [k for k, receiver in enumerate(self.receivers(owner, chunk)) if receiver in self.neighbours]
        if self.usable:
            self.wait(agent, "summed", node, chunk, rule=SUMMED)
        self.read_call(agent, node)
        if mine and not self.protocol.direct:
            self.put(agent, ("sums", owner, self.node, chunk), ("staging", self.me, node, chunk), self.sum)
        for k in mine if not self.has_combine_weights else ():
            here = ("weights", self.me, node, k, chunk)
            self.put(agent, ("rail weights", owner, self.node, k, chunk), here, self.epoch)
        if mine or self.keeps(EMPTY_SUMS):
            self.signal(agent, ("sums_arrived", owner, self.node, chunk))

    def relay_sums(self, agent: Agent, node: int) -> None:
        """Wait for all sums of a node, needed or not, and hand them to my other agents."""
        for chunk in self.chunks if self.crosses(agent) else ():
            self.wait(agent, "sums_arrived", node, chunk, rule=RELAY_SUMS)
            agent.raise_flag(("sums_relayed", self.me, node, chunk), self.epoch)

    def reduce_own(self, agent: Agent, chunk: int) -> None:
        if not self.agree(agent) or not self.usable:
            return
        receivers = self.receivers(self.me, chunk)
        pushers = self.wait_for_pushed(agent, self.node, chunk)
        nodes = sorted({node for node, _ in receivers} - {self.node})
        for node in nodes:
            self.wait(agent, "sums_relayed", node, chunk, rule=SUMS_RELAYED)
        for local in pushers:
            agent.read(*self.slot(self.me, self.node, local, chunk))
        for node in nodes:
            agent.read(("sums", self.me, node, chunk), self.sum)
        for k, (node, _) in enumerate(receivers if not self.has_combine_weights else ()):
            agent.read(("weights" if node == self.node else "rail weights", self.me, node, k, chunk), self.epoch)
