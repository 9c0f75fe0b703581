"""Search a model of the combine kernel between nodes: its blocks, queues and progress flags, with windows of slots.

The ranks of one node push partial sums for tokens of other nodes' sources. Those of source (m, k) go to slots of rank k
of the own node, the *owner* here, which reduces them. With a window of W chunks the slots of a source have room for W
chunks of each pusher: chunk j lies in place j % W. A pusher waits until the owner has freed chunk j - W.

Why W = 1 is enough: let c be the first chunk that is not free everywhere. Its pushes wait for chunk c - W alone, which
is free, and in each agent only pushes of chunks up to c come before them. So all are made. Its reductions wait for
these pushes alone, and in each agent only reductions of chunks up to c come before them. So c becomes free.

The agents are those of the kernel: in each block a preparing warp that waits and queues works, and summing warps that
do them in turn. All blocks count themselves in for each progress flag (csrc/cuda/combine/progress_flags.h), and these
come in one order for blocks that push, that reduce, or that do both. A combine is one launch or two, and some ranks may
find that they differ.
"""

import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
from conftest import exhaustive, long
from lib.commands import ROOT
from lib.node_model import Agent, Event, check_order

Source = tuple[int, int]  # another node, and the local index there
Routing = Mapping[tuple[Source, int], frozenset[int]]  # by source and token: local indices of the ranks that push


class Windows(NamedTuple):
    """One node's part in a combine."""

    nodes: int  # the others
    ranks: int
    tokens: int  # of each source
    window: int = 1  # chunks
    per_chunk: int = 1  # tokens
    differs: bool = False  # nobody reduces; owners wait for what was promised

    @property
    def sources(self) -> list[Source]:
        return list(product(range(self.nodes), range(self.ranks)))


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


class ProgressFlags(NamedTuple):
    """Those of csrc/cuda/combine/progress_flags.h."""

    far: int
    own: int
    window: int
    others: int

    @property
    def num_early_sums(self) -> int:
        return (self.far - self.window) * self.others

    def needs_slots(self, chunk: int) -> bool:
        return self.window <= chunk < self.far


@cache
def in_order(m: ProgressFlags) -> list[tuple[str, int]]:
    """Name all: ("pushed", chunk) and ("summed", n)."""
    sums = [[("summed", chunk * m.others + i) for i in range(m.others)] for chunk in range(m.far)]
    order = [("pushed", chunk) for chunk in range(m.window)]
    for chunk in range(m.window, m.far):
        order += [*sums[chunk - m.window], ("pushed", chunk)]
    order += [("pushed", m.far + chunk) for chunk in range(m.own)]
    return order + [progress_flag for some in sums[m.far - m.window :] for progress_flag in some]


@cache
def number_of(m: ProgressFlags, name: str, n: int) -> int:
    """Return the place of a progress flag, or for the chunk behind the last one the end of the pushes."""
    order = in_order(m)
    return order.index((name, n)) if (name, n) in order else order.index(("pushed", n - 1)) + 1


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_order_of_progress_flags(tmp_path):
    program = tmp_path / "progress_flags"
    sources = ["-I", ROOT / "csrc", ROOT / "tests" / "progress_flags.cpp", "-o", program]
    subprocess.run(["c++", "-std=c++17", "-O1", *sources], check=True, timeout=300)
    for far, own, window, others in [*product((1, 2, 5, 8), (1, 3), (1, 2, 4, 8), (1, 3, 31)), (0, 4, 0, 0)]:
        m = ProgressFlags(far, own, min(window, far), others)
        order = in_order(m)
        said = subprocess.run([program, *map(str, m)], capture_output=True, text=True, check=True, timeout=60).stdout
        at, pushed, summed, waits = ([int(word) for word in line.split()] for line in said.splitlines())
        assert at == [n if name == "pushed" else ~n for name, n in order]
        # One more of each: the end of the pushes, and the end of all.
        assert pushed == [number_of(m, "pushed", chunk) for chunk in range(far + own + 1)]
        assert summed == [order.index(("summed", n)) for n in range(far * others)] + [len(order)]
        assert waits == [m.needs_slots(chunk) for chunk in range(far + own)]


# ---- the blocks -----------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One node's part in a combine. Blocks push, or reduce, or without ``reducing`` do both."""

    windows: Windows
    pushing: int
    reducing: int = 0
    two_launches: frozenset[int] = frozenset()  # ranks with a hook: pushes and sums for others, then own tokens
    raises_early: bool = True  # a block raises the flags of its pushes before it waits for slots
    frees: bool = True  # owners say what they have read

    @property
    def progress_flags(self) -> ProgressFlags:
        w = self.windows
        far = -(-w.tokens // w.per_chunk)
        return ProgressFlags(far, 1, min(w.window, far), w.nodes)

    @property
    def blocks(self) -> range:
        """Those of a launch."""
        return range(self.pushing + self.reducing)

    def events(self, routing: Routing) -> list[Event]:
        events: list[Event] = []
        for rank in range(self.windows.ranks):
            for launch, block in product((0, 1) if rank in self.two_launches else (0,), self.blocks):
                Block(self, routing, events, rank, launch, block).run()
        return events

    def pushing_blocks(self, rank: int) -> range:
        return self.blocks if rank in self.two_launches else self.blocks[: self.pushing]

    def summing_blocks(self, rank: int) -> range:
        """Which blocks make sums for other nodes."""
        return self.blocks if rank in self.two_launches or not self.reducing else self.blocks[self.pushing :]


class Block:
    """The program of one block in a launch: ``Pusher``, ``Reducer`` and ``queue_sums`` of csrc/cuda."""

    def __init__(self, kernel: Kernel, routing: Routing, events: list[Event], rank: int, launch: int, block: int):
        self.kernel, self.windows, self.progress_flags = kernel, kernel.windows, kernel.progress_flags
        self.routing, self.rank, self.launch, self.block = routing, rank, launch, block
        self.pushes, self.reduces = launch == 0, launch == 1 or rank not in kernel.two_launches
        name = f"rank {rank}, launch {launch}, block {block}"
        self.preparing, self.summing = Agent(events, f"{name} prepares"), Agent(events, f"{name} sums")
        self.works = self.finished = 0  # works queued; progress flags finished
        self.sums = self.sums_for_others() if self.pushes else []
        self.does_push = self.pushes and block in kernel.pushing_blocks(rank)
        self.does_sum = block in kernel.summing_blocks(rank)
        self.agreed = not self.pushes
        self.entered, self.summed = self.progress_flags.window - 1, self.progress_flags.window

    # ---- the queue

    def queue(self, progress_flag: int, accesses: list[tuple[str, tuple, int]] = ()) -> None:
        queued = ("queued", (0, self.rank), self.launch, self.block, self.works)
        self.works += 1
        self.preparing.raise_flag(queued, 1)
        self.summing.wait(queued, 1)
        for number in range(self.finished, progress_flag):
            self.finish(number)
        self.finished = max(self.finished, progress_flag)
        for kind, cell, value in accesses:
            (self.summing.read if kind == "read" else self.summing.write)(cell, value)

    def finish(self, number: int) -> None:
        m = self.progress_flags
        name, n = in_order(m)[number]
        if name == "pushed":
            raises = self.does_push
        else:  # the last sum of a chunk frees its slots
            raises = self.does_sum and self.kernel.frees and self.pushes
            name, raises, n = "freed", raises and (n + 1) % m.others == 0, n // m.others
        for peer in range(self.windows.ranks) if raises else ():
            self.summing.raise_flag((name, (0, peer), self.rank, n, self.block), 1)

    def wait_for_pushed(self, pusher: int, chunk: int) -> None:
        for block in self.kernel.pushing_blocks(pusher):
            self.preparing.wait(("pushed", (0, self.rank), pusher, chunk, block), 1)

    # ---- pushing

    def far_items(self) -> Iterator[tuple[int, list]]:
        """Yield chunk and item, in this block's order."""
        w, blocks = self.windows, self.kernel.pushing_blocks(self.rank)
        for chunk in range(self.progress_flags.far):
            items = [
                (source, token)
                for node, i in product(range(w.nodes), range(w.ranks))
                for source in [(node, (self.rank + i) % w.ranks)]
                for token in range(chunk * w.per_chunk, min(w.tokens, (chunk + 1) * w.per_chunk))
                if self.rank in self.routing[source, token]
            ]
            share = (self.block + chunk) % len(blocks)
            begin, end = (len(items) * n // len(blocks) for n in (share, share + 1))
            for item in items[begin:end]:
                yield chunk, item

    def slot(self, owner: int, source, pusher: int, token: int) -> tuple:
        w = self.windows
        return ("slots", (0, owner), source, pusher, token % (w.window * w.per_chunk))

    def enter(self, chunk: int) -> bool:
        """Prepare to push a chunk; False after a difference."""
        m = self.progress_flags
        if chunk <= self.entered or m.far == m.window:
            return True
        while True:
            waits = m.needs_slots(chunk)
            if not waits and not self.does_sum:
                return True
            if not self.agreed:
                self.agree()
                if self.windows.differs:
                    return False
                self.agreed = True
            if not self.does_sum or self.summed > min(chunk, m.far - 1):
                break
            if self.kernel.raises_early:
                self.queue(number_of(m, "pushed", self.summed - 1) + 1)
            self.summed += 1
            self.make_sums((self.summed - m.window) * m.others)
            next_chunk = self.sums[0][0] // m.others if self.sums else m.far
            self.summed = max(self.summed, next_chunk + m.window)
        self.entered = chunk
        if waits:
            if self.kernel.raises_early:
                self.queue(number_of(m, "pushed", chunk))
            for owner in range(self.windows.ranks) if self.kernel.frees else ():
                for block in self.kernel.summing_blocks(owner):
                    freed = ("freed", (0, self.rank), owner, chunk - m.window, block)
                    self.preparing.wait(freed, 1)
        return True

    def push(self) -> None:
        m, agrees = self.progress_flags, True
        for chunk, (source, token) in self.far_items():
            agrees = self.enter(chunk)
            if not agrees:
                break
            slot = self.slot(source[1], source, self.rank, token)
            self.queue(number_of(m, "pushed", chunk), [("write", slot, token + 1)])
        if agrees and self.enter(m.far) and self.block == 0:
            own = [("write", ("own", (0, owner), self.rank), 1) for owner in range(self.windows.ranks)]
            self.queue(number_of(m, "pushed", m.far), own)
        self.queue(number_of(m, "pushed", m.far + m.own))

    # ---- reducing

    def sums_for_others(self) -> list[tuple[int, int]]:
        """Return this block's tokens: number of the sum progress flag, and token."""
        w, m, blocks = self.windows, self.progress_flags, self.kernel.summing_blocks(self.rank)
        if self.block not in blocks:
            return []
        tokens = []
        for n in range(m.far * m.others):
            first = n // m.others * w.per_chunk
            begin = (blocks.index(self.block) + n) % len(blocks)
            tokens += [(n, t) for t in range(first + begin, min(w.tokens, first + w.per_chunk), len(blocks))]
        return tokens

    def reach_sums(self, until: int) -> None:
        """Count the progress flags in before which this block has no tokens left."""
        n = min([until, *(n for n, _ in self.sums[:1])])
        if n > 0:
            self.queue(number_of(self.progress_flags, "summed", n - 1) + 1)

    def make_sums(self, until: int) -> None:
        m = self.progress_flags
        self.reach_sums(until)
        while self.sums and self.sums[0][0] < until:
            n, token = self.sums.pop(0)
            source = (n % m.others, self.rank)
            pushers = sorted(self.routing[source, token])
            for pusher in pushers:
                self.wait_for_pushed(pusher, n // m.others)
            reads = [("read", self.slot(self.rank, source, pusher, token), token + 1) for pusher in pushers]
            self.queue(number_of(m, "summed", n), reads)
            self.reach_sums(until)

    def agree(self, *, drains: bool = False) -> None:
        for rank in range(self.windows.ranks):
            self.preparing.wait(("called", (0, self.rank), rank), 1)
        if drains and self.windows.differs:
            for rank in range(self.windows.ranks):
                self.wait_for_pushed(rank, self.progress_flags.far)  # the last chunk, which every Call promises

    # ---- both

    def run(self) -> None:
        m = self.progress_flags
        if self.launch:
            for block in self.kernel.blocks:
                self.preparing.wait(("ended", (0, self.rank), block), 1)
        if self.pushes and self.block == 0:
            for rank in range(self.windows.ranks):
                self.preparing.raise_flag(("called", (0, rank), self.rank), 1)
        if not self.pushes:
            self.agree(drains=True)
        if self.does_push:
            self.push()
        if self.pushes:
            self.agree(drains=True)
        if not self.windows.differs:
            if self.pushes and self.does_sum:
                self.make_sums(m.far * m.others)
            if self.reduces and self.block == 0:  # own tokens
                for pusher in range(self.windows.ranks):
                    self.wait_for_pushed(pusher, m.far)
                    self.queue(0, [("read", ("own", (0, self.rank), pusher), 1)])
        self.preparing.end_event()
        self.summing.raise_flag(("ended", (0, self.rank), self.block, *[self.launch] * self.launch), 1)
        self.summing.end_event()


def faults(kernel: Kernel, routings: Iterator[Routing]) -> set[str]:
    return set().union(*(check_order(kernel.events(routing)).faults for routing in routings))


def assert_no_fault(kernel: Kernel, routings: Iterator[Routing]) -> None:
    for routing in routings:
        findings = check_order(kernel.events(routing))
        assert not findings.faults, f"{findings.faults} with {kernel}, {routing}:\n{findings.trace}"


FEW_BLOCKS = [(1, 0), (2, 0), (1, 1), (2, 2)]
BLOCKS = [*FEW_BLOCKS, (7, 0), (4, 4)]
HOOKS = [(), (0,), (0, 1)]


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("pushing,reducing", FEW_BLOCKS)
@pytest.mark.parametrize("tokens,window", [(2, 1), long(3, 1), long(3, 2)])
def test_every_routing_of_few_tokens(tokens, window, pushing, reducing, hooks):
    windows = Windows(1, 2, tokens, window)
    assert_no_fault(Kernel(windows, pushing, reducing, frozenset(hooks)), all_routings(windows))


@pytest.mark.parametrize("count", [6, exhaustive(20), long(100)])
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("pushing,reducing", BLOCKS)
def test_larger_nodes(pushing, reducing, hooks, count):
    for sizes in (1, 2, 8, 1, 2), (2, 2, 6, 1, 1), (2, 3, 5, 2, 1), (3, 1, 6, 2, 1):
        windows = Windows(*sizes)
        assert_no_fault(Kernel(windows, pushing, reducing, frozenset(hooks)), some_routings(windows, count))


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("pushing,reducing", BLOCKS)
def test_after_a_difference_all_promised_flags_rise(pushing, reducing, hooks):
    windows = Windows(2, 2, 4, differs=True)
    assert_no_fault(Kernel(windows, pushing, reducing, frozenset(hooks)), some_routings(windows, 10))


@pytest.mark.parametrize("pushing,reducing", BLOCKS)
def test_a_block_raises_its_flags_before_it_waits(pushing, reducing):
    windows = Windows(1, 2, 5)
    assert faults(Kernel(windows, pushing, reducing, raises_early=False), some_routings(windows, 40)) == {"deadlock"}


def test_pushers_wait_for_slots():
    windows = Windows(1, 2, 5)
    assert faults(Kernel(windows, 1, 1, frees=False), some_routings(windows, 20)) == {"stale slots"}
