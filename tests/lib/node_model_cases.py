"""Operations and differences that the models of several nodes go through."""

import random
from itertools import product

from lib.node_protocol import CACHED, COMBINE, COUNTED, DISPATCH, HOOKED, PUSHED, Protocol, Routing

BOTH = ("few", "many")

OPERATIONS = (DISPATCH, COUNTED, CACHED, PUSHED, COMBINE, HOOKED)


def everywhere(nodes: int, ranks: int, chunks: int) -> Routing:
    """Send every chunk of every rank to all ranks."""
    receivers = frozenset(product(range(nodes), range(ranks)))
    return {(source, chunk): receivers for source in receivers for chunk in range(chunks)}


def somewhere(nodes: int, ranks: int, chunks: int, seed: int) -> Routing:
    """Send each chunk to any ranks: to none, to some or to all."""
    choose = random.Random(seed).random
    routing = everywhere(nodes, ranks, chunks)
    return {at: frozenset(r for r in sorted(routing[at]) if choose() < 0.5) for at in sorted(routing)}


def build(shape: tuple[int, int, int], program, *, kind: type[Protocol] = Protocol, **options) -> Protocol:
    nodes, ranks, chunks = shape
    return kind(nodes, ranks, program, [everywhere(*shape), somewhere(*shape, 3)], chunks=chunks, **options)


def subsets(length: int) -> list[frozenset[int]]:
    """Return all sets of operations of a program."""
    return [frozenset(n + 1 for n in range(length) if bits >> n & 1) for bits in range(1 << length)]


def differing(num_ranks: int, before, kinds, after):
    """Yield programs of three operations; in the second one ranks do not all give the same."""
    for first, mixed, last in product(before, product(kinds, repeat=num_ranks), after):
        if len(set(mixed)) > 1:
            yield [(first, kind, last) for kind in mixed]
