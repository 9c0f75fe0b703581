"""Which ranks share a node: from host ids or forced, and that the engine works on what was found."""

import itertools

import pytest
import torch
from lib.errors import error_of
from lib.round_trip import make_buffer, round_trip

from ep_dispatcher import buffer_arguments
from ep_dispatcher.topology import Topology


@pytest.mark.parametrize(
    "host_of,ranks_per_node,expected",
    [
        ("A", None, ((0,),)),
        ("AAA", None, ((0, 1, 2),)),
        ("AABB", None, ((0, 1), (2, 3))),
        ("ABAB", None, ((0, 2), (1, 3))),
        ("ABBA", None, ((0, 3), (1, 2))),
        ("BA", None, ((0,), (1,))),  # in the order of their first rank, not of their names
        ("ABCABC", None, ((0, 3), (1, 4), (2, 5))),
        ("AAAA", 4, ((0, 1, 2, 3),)),
        ("AAAA", 2, ((0, 1), (2, 3))),
        ("AAAA", 1, ((0,), (1,), (2,), (3,))),
        ("AAAABB", 2, ((0, 1), (2, 3), (4, 5))),  # uneven hosts, split into even nodes
        ("ABAB", 1, ((0,), (1,), (2,), (3,))),
    ],
)
def test_nodes_are_the_hosts_or_forced(host_of, ranks_per_node, expected):
    """Whichever rank asks."""
    for rank in range(len(host_of)):
        assert Topology.make(rank, list(host_of), ranks_per_node).nodes == expected


@pytest.mark.parametrize(
    "argument,host_of,ranks_per_node",
    [
        ("group", "AAB", None),
        ("group", "AAAABB", None),
        ("ranks_per_node", "AAAA", 3),
        ("ranks_per_node", "AAAA", 8),
        ("ranks_per_node", "AAAA", 0),
        ("ranks_per_node", "AAAA", -2),
        ("ranks_per_node", "ABAB", 2),
        ("ranks_per_node", "AAABBB", 2),
    ],
)
def test_hosts_that_cannot_be_split_are_the_same_error_whichever_rank_asks(argument, host_of, ranks_per_node):
    make = lambda rank: Topology.make(rank, list(host_of), ranks_per_node)  # noqa: E731
    (text,) = {error_of(make, rank) for rank in range(len(host_of))}
    assert text.startswith(argument)


@pytest.mark.parametrize("host_of,ranks_per_node", [("AAAA", None), ("ABAB", None), ("AAAAAA", 2), ("AABB", 1)])
def test_places_of_the_ranks(host_of, ranks_per_node):
    all_ranks = range(len(host_of))
    topologies = [Topology.make(rank, list(host_of), ranks_per_node) for rank in all_ranks]
    for rank, t in enumerate(topologies):
        assert (t.num_ranks, t.num_nodes * t.ranks_per_node) == (len(host_of), len(host_of))
        assert t.nodes[t.node][t.local_rank] == rank and t.node_ranks == t.nodes[t.node]
        assert len(t.rail) == t.num_nodes and t.rail[t.node] == rank
    for one, other in itertools.product(topologies, topologies):
        assert (other.rank in one.node_ranks) == (one.node == other.node)
        assert (other.rank in one.rail) == (one.local_rank == other.local_rank)
    assert sorted(rank for ranks in {t.rail for t in topologies} for rank in ranks) == list(all_ranks)


def on_hosts(rank, host_of, ranks_per_node, expected_nodes, dtype=torch.bfloat16):
    """A whole round on ranks that say that they are on these hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_arguments, "host_id", lambda: host_of[rank])
        buffer = make_buffer(ranks_per_node=ranks_per_node, dtype=dtype)
    with buffer:
        assert buffer.topology.nodes == expected_nodes
        for seed in range(3):
            round_trip(buffer, seed=seed)
        rail = {ranks[buffer.topology.local_rank] for ranks in expected_nodes} - {rank}
        sent = buffer.counters()["inter_node_bytes_sent"]
        assert {peer for peer, count in enumerate(sent) if count} == rail, "bytes between nodes leave the rail"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)  # rounding of partial sums; their order
@pytest.mark.parametrize(
    "host_of,expected_nodes",
    [("ABAB", ((0, 2), (1, 3))), ("ABBA", ((0, 3), (1, 2))), ("ABCABC", ((0, 3), (1, 4), (2, 5)))],
)
def test_interleaved_hosts_work(pools, host_of, expected_nodes, dtype):
    pools(len(host_of)).run(on_hosts, host_of, None, expected_nodes, dtype)


def fails_on_hosts(rank, host_of, ranks_per_node):
    return error_of(on_hosts, rank, host_of, ranks_per_node, None)


@pytest.mark.parametrize("host_of,ranks_per_node", [("AABA", None), ("ABAB", 2)])
def test_hosts_that_cannot_be_split_are_the_same_error_on_every_rank(pools, host_of, ranks_per_node):
    (message,) = set(pools(4).run(fails_on_hosts, host_of, ranks_per_node))
    assert message.startswith("group has " if ranks_per_node is None else "ranks_per_node is 2")
    pools(4).run(on_hosts, "AAAA", None, ((0, 1, 2, 3),))
