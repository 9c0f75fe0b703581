"""The protocol of node_protocol.py over the NCCL wire: whole arrays in messages, in one order on all ranks.

A rank's side stream takes its messages in turn: it waits until one is ready, exchanges it with all rail peers, and
raises the wire flags behind it. Data crosses between two ranks once both have come to this message. An array without
content for the receiver crosses all the same, and overwrites what was there.

Flags beside those of node_protocol.py: ``ready`` (rank, node, wire flag and indices), ``posted`` (rank, message) and
``moved`` (receiver, sender's node, message).

In an exact operation the hosts know who needs what. Only such rows and sums cross, and a message without any, in either
direction, is left out between these two ranks. Rows are packed before they leave, into the memory of sums. In a limited
operation they are packed too, but every message crosses.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from lib.node_model import EPOCHS, LATE_WRITE, Agent, Place
from lib.node_protocol import (
    CACHED,
    COMBINE,
    COMBINES,
    COUNTED,
    DISPATCH,
    HEAD,
    RELAY_ROWS,
    RELAY_SUMS,
    Operation,
    Protocol,
    Rank,
)

READY = "a message waits until it is ready"
MOVED = "flags rise behind a message"
EPOCH = "no flag rises behind a message that was not ready: its sender has aborted"
SENT = "the relay waits for exact messages that only send, too"
PLANNED = "rows wait for the new plan that packs them"
GARBAGE = EPOCHS - 1  # content of such a message


class Message(NamedTuple):
    flag: str
    chunk: tuple[int, ...] = ()
    second: bool = False  # in a counted dispatch it follows the second launch


class MessageOperation(Operation):
    asks_for_inbox = False

    def begin(self) -> None:
        super().begin()
        operation = self.protocol.programs[self.me][self.epoch - 1]
        self.is_counted = operation == COUNTED
        self.exact = self.epoch in self.protocol.exact and operation in (COUNTED, CACHED, COMBINE)
        self.all_cross = not self.exact
        self.limited = self.epoch in self.protocol.limited and operation in (DISPATCH, COUNTED, CACHED, COMBINE)
        self.packs = self.exact or self.limited
        self.waits_for_plan = self.limited and self.is_new
        self.side_stream()

    def parts(self, message: Message, node: int) -> tuple[bool, bool]:
        """Return whether a message has something for a node, and from it."""
        if not self.exact or message.flag in ("call_arrived", "items_arrived"):
            return True, True
        (chunk,), peer = message.chunk, (node, self.local)
        there, back = (
            self.usable and any(at == to for at, _ in self.routing[source, chunk])
            for source, to in ((self.me, node), (peer, self.node))
        )
        return (back, there) if self.kind in COMBINES else (there, back)

    def raise_on_wire(self, agent: Agent, flag: Place) -> None:
        name, peer, _, *chunk = flag
        agent.raise_flag(("ready", self.me, peer[0], name, *chunk), self.epoch)

    def put(self, agent: Agent, there: Place, here: Place, content: int, *, may_be_late: bool = False) -> None:
        """Do nothing: a message brings it."""

    def messages(self) -> list[Message]:
        """List the messages of this operation, in the order of csrc/cuda/rail/messages.cu."""
        calls = [Message("call_arrived")]
        if self.kind in COMBINES:
            weights = [Message("rows_arrived", (0,))] * self.has_combine_weights
            return calls + weights + [Message("sums_arrived", (chunk,), True) for chunk in self.chunks]
        rows = [Message("rows_arrived", (chunk,), True) for chunk in self.chunks]
        early = 0 if self.packs else 1
        return calls + rows[:early] + [Message("items_arrived", (), True)] * self.is_new + rows[early:]

    def send_rows(self, agent: Agent, node: int, chunk: int) -> None:
        if not self.packs:
            super().send_rows(agent, node, chunk)
        elif self.limited:
            self.send_limited_rows(agent, node, chunk)
        elif self.parts(Message("rows_arrived", (chunk,)), node)[0] and self.may_send(agent):
            self.wait(agent, "staged", self.me, chunk)
            if self.is_new:
                agent.read(("sent_nodes", self.me), self.epoch)
            agent.read(("staging", self.me, self.node, chunk), self.epoch)
            agent.write(("sums", self.me, node, chunk), self.epoch)
            self.signal(agent, ("rows_arrived", (node, self.local), self.node, chunk))

    def send_limited_rows(self, agent: Agent, node: int, chunk: int) -> None:
        if not self.may_send(agent):
            return
        if self.is_new:
            self.wait(agent, "listed", self.me, rule=PLANNED)
            agent.read(("head", self.me), self.epoch)
        self.wait(agent, "staged", self.me, chunk)
        if self.usable:
            agent.read(("staging", self.me, self.node, chunk), self.epoch)
            agent.write(("sums", self.me, node, chunk), self.epoch)
        self.signal(agent, ("rows_arrived", (node, self.local), self.node, chunk))

    def relay_rows(self, agent: Agent, node: int, chunks: Iterable[int]) -> None:
        if not self.exact:
            super().relay_rows(agent, node, chunks)
        elif self.crosses(agent):
            if self.is_new:
                self.wait(agent, "listed", self.me, rule=HEAD)
                agent.read(("head", self.me), self.epoch)
            for chunk in chunks:
                self.wait_for_message(agent, Message("rows_arrived", (chunk,)), node, RELAY_ROWS)
                self.raise_at_neighbours(agent, "staged", (node, self.local), chunk)

    def send_sums(self, agent: Agent, node: int, chunk: int) -> None:
        if self.parts(Message("sums_arrived", (chunk,)), node)[0]:
            super().send_sums(agent, node, chunk)

    def relay_sums(self, agent: Agent, node: int) -> None:
        for chunk in self.chunks if self.crosses(agent) else ():
            self.wait_for_message(agent, Message("sums_arrived", (chunk,)), node, RELAY_SUMS)
            agent.raise_flag(("sums_relayed", self.me, node, chunk), self.epoch)

    def wait_for_message(self, agent: Agent, message: Message, node: int, rule: str) -> None:
        sends, receives = self.parts(message, node)
        if receives or (sends and self.keeps(SENT)):
            self.wait(agent, message.flag, node, *message.chunk, rule=rule)

    def arrays(self, message: Message, node: int) -> Iterator[tuple[Place, Place | None, int]]:
        """Yield (cell there, cell here, content); no cell here if the content is for nobody."""
        peer = (node, self.local)
        if not self.parts(message, node)[0]:
            return
        if message.flag == "call_arrived":
            for there, here in zip(self.call_cells(peer, self.me), self.call_cells(self.me, self.me)):
                yield there, here, self.epoch
        elif message.flag == "items_arrived":
            for receiver in self.protocol.locals:
                here = ("items_out", self.me, node, receiver)
                yield ("items", peer, self.node, receiver), here if self.usable else None, self.epoch
            yield ("table_in", peer, self.node), ("table_out", self.me, node) if self.usable else None, self.epoch
        elif message.flag == "rows_arrived" and self.kind in COMBINES:
            for chunk in self.chunks:
                cells = self.combine_weights(peer, self.node, chunk), self.combine_weights(self.me, self.node, chunk)
                for there, here in zip(*cells):
                    yield there, here, self.epoch
        elif message.flag == "rows_arrived":
            (chunk,) = message.chunk
            here: Place | None = ("staging", self.me, self.node, chunk)
            if self.packs:
                here = ("sums", self.me, node, chunk) if self.usable else None
            yield ("staging", peer, self.node, chunk), here, self.epoch
        else:
            (chunk,) = message.chunk
            receivers = self.receivers(peer, chunk) if self.usable else []
            mine = [k for k, receiver in enumerate(receivers) if receiver in self.neighbours]
            yield ("sums", peer, self.node, chunk), ("staging", self.me, node, chunk) if mine else None, self.sum
            for k in range(len(receivers) if not self.has_combine_weights else 0):
                here = ("weights", self.me, node, k, chunk) if k in mine else None
                yield ("rail weights", peer, self.node, k, chunk), here, self.epoch

    def side_stream(self) -> None:
        agent = self.agent("side stream")
        if self.epoch > 1:
            agent.wait(("streamed", self.me), self.epoch - 1)
        for number, message in enumerate(self.messages()):
            is_broken = self.is_broken(self.me, number)
            sends = [node for node in self.others if self.parts(message, node)[0]]
            nodes = [node for node in self.others if any(self.parts(message, node))]
            if not is_broken:
                agent.wait(("begun", self.me), self.epoch)
            if message.second and self.is_counted and not is_broken:
                agent.wait(("launched", self.me), self.epoch)
            for node in sends if self.keeps(READY) and not is_broken else ():
                agent.wait(("ready", self.me, node, message.flag, *message.chunk), self.epoch)
            agent.raise_flag(("posted", self.me, number), self.epoch)
            for node in nodes:
                self.move(number, message, node)
            for node in nodes if self.keeps(MOVED) else ():
                agent.wait(("moved", self.me, node, number), self.epoch)  # received
                agent.wait(("moved", (node, self.local), self.node, number), self.epoch)  # sent
            for node in nodes if not is_broken else ():
                if not (self.keeps(EPOCH) and self.is_broken((node, self.local), number)):
                    agent.raise_flag((message.flag, self.me, node, *message.chunk), self.epoch)
        agent.raise_flag(("streamed", self.me), self.epoch)
        agent.end_event()

    def is_broken(self, rank: Rank, number: int) -> bool:
        """Return whether a rank has aborted before this message was ready."""
        return rank in self.protocol.broken and (self.epoch, number) >= self.protocol.broken[rank]

    def move(self, number: int, message: Message, node: int) -> None:
        """Bring my part of a message to a rail peer, once both have posted it."""
        peer: Rank = (node, self.local)
        wire = self.agent(f"message {number} to {node}")
        wire.wait(("posted", self.me, number), self.epoch)
        wire.wait(("posted", peer, number), self.epoch)
        is_broken = self.is_broken(self.me, number)
        for there, here, content in self.arrays(message, node):
            if is_broken:
                wire._step("accesses", LATE_WRITE, there, GARBAGE, ends=("raises",))
                continue
            if here is not None:
                wire.read(here, content)
            if not self.is_broken(peer, number):  # else nobody reads it: that rank has stopped
                wire.write(there, content)
        if message.flag == "call_arrived" and self.epoch > 1 and not self.is_broken(peer, number):
            # The Call of the other parity comes again, with the content that it has there.
            there = ("call", peer, (self.epoch - 1) % 2, self.me)
            if not is_broken:
                wire.read(("call", self.me, (self.epoch - 1) % 2, self.me), self.epoch - 1)
            wire._step("accesses", LATE_WRITE, there, self.epoch - 1, ends=("raises",))
        wire.raise_flag(("moved", peer, self.node, number), self.epoch)
        wire.end_event()


class MessageProtocol(Protocol):
    """A Protocol over messages. All ranks have the same program: differing ranks end the buffer.

    ``broken``: ranks that abort, and of each the first message that was not ready: (epoch, number). Its side stream
    goes on, and exchanges all further messages at once, whatever its arrays hold. ``exact``: operations whose messages
    are exact, if they are of a kind that can be; ``limited``: likewise.
    """

    def __init__(
        self,
        *args,
        broken: Mapping[Rank, tuple[int, int]] | None = None,
        exact: Iterable[int] = (),
        limited: Iterable[int] = (),
        **options,
    ):
        self.broken, self.exact, self.limited = broken or {}, set(exact), set(limited)
        super().__init__(*args, **options)

    def make_operation(self, rank: Rank, epoch: int) -> None:
        MessageOperation(self, rank, epoch)
