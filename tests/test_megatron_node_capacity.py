"""Optimizer steps that are skipped because a rank has more tokens for another node than the node capacity allows."""

import contextlib

import pytest
import torch
from lib.megatron_layer import Layout, assert_same_bits, environment, on_ranks
from lib.megatron_skipped_step import ALL, ENOUGH, FACTOR, NODE_FACTOR, ON_CPU, STEPS, lines_of, run_job
from lib.megatron_training import batches, forward_step, training

from ep_dispatcher.errors import TooFewRowsError
from ep_dispatcher.integrations.megatron.dispatcher import buffers, rank_capacity, skipped_step
from ep_dispatcher.integrations.megatron.dispatcher.rank_capacity import Overflow


@contextlib.contextmanager
def nodes_of_one_rank():
    buffers.destroy_buffers()  # of another number of nodes
    try:
        with environment(EP_DISPATCHER_RANKS_PER_NODE="1"):
            yield
    finally:
        buffers.destroy_buffers()


@ON_CPU
@on_ranks(4, Layout(ep=4))
def test_steps_with_too_many_tokens_for_a_node_are_skipped(rank: int):
    """Everything else is as in a job without the limit in which Megatron skips these two steps, bit by bit."""
    skewed = {3: 0.5, 7: ALL}
    with nodes_of_one_rank():
        given = dict(skewed=skewed, num_microbatches=1)
        wanted = run_job(rank, ENOUGH, leaves_out=skewed, **given)
        got = run_job(rank, ENOUGH, node_factor=1.6, **given)
        assert got.succeeded == wanted.succeeded == [step not in skewed for step in range(1, STEPS + 1)], got.printed
        assert_same_bits(got.tensors, wanted.tensors)
        lines = lines_of(got.printed)
        assert got.skipped == 2 and len(lines) == 2 * (rank == 0), lines
        most = 28 / 13  # of 8 experts and top-2 a node with 2 has an expert of 13 / 28 of the tokens
        assert set(got.factors) == {0} and 1.6 < got.node_factors[5] < got.node_factors[-1] == pytest.approx(most, 1e-3)
        if rank == 0:
            assert "tokens of a rank for another node, more than node capacity factor 1.6 has room for" in lines[0]
            assert f"Start with {NODE_FACTOR} {got.node_factors[-1]:g} to avoid them" in lines[1], lines


@ON_CPU
@on_ranks(4, Layout(ep=4))
def test_both_capacities_may_grow_at_once(rank: int):
    """Each by the rank that needs most of it. An evaluation names the factors that are enough."""
    overflows = [Overflow(2.5, rows=320, layer=2, most=4)] if rank == 1 else []
    overflows += [Overflow(1.5 + rank / 10, rows=50 + rank, layer=1, most=28 / 13, argument="max_tokens_to_node")]
    with nodes_of_one_rank(), training(2, node_factor=1.2) as of:
        facts = skipped_step._facts_of([of.model])
        with pytest.raises(TooFewRowsError) as caught:
            skipped_step._conclude(overflows, [of.model], facts, trains=False)
        assert str(caught.value).endswith(f"{FACTOR} 2.5 and {NODE_FACTOR} 1.8 is enough for these dispatches")
        skipped_step._conclude(overflows, [of.model], facts, trains=True)
        state = rank_capacity.state()
        assert (state.grown_factor, state.grown_node_factor, state.num_skipped) == (2.75, 1.98, 1)
        text = of.printed.getvalue()
        if rank == 0:
            assert "layer 2 needs 320 rows on a rank, more than rank capacity factor 2 has room for" in text, text
            assert "layer 1 has 53 tokens of a rank for another node, more than node capacity" in text, text


@ON_CPU
@on_ranks(2, Layout(ep=2))
def test_an_evaluation_with_too_many_tokens_for_a_node(rank: int):
    with nodes_of_one_rank(), training(2, node_factor=0.9) as of:
        of.skew.share = ALL
        with pytest.raises(TooFewRowsError) as caught, torch.no_grad():
            of.schedule(forward_only=True)
        assert caught.value.argument == "max_tokens_to_node" and caught.value.needed_rows == 64
        assert f"{NODE_FACTOR} 1.28 is enough" in str(caught.value)
        with pytest.raises(TooFewRowsError, match=f"{NODE_FACTOR} 1.28 is enough"):
            forward_step(batch_of=batches(), model=of.model)


def test_the_share_of_a_node():
    share = rank_capacity.share_of_node
    assert share(1, 8, 2) == 1 and share(2, 8, 8) == 1
    assert share(4, 256, 2) == pytest.approx(1 / 2.28, 1e-2)
    assert share(8, 256, 8) == pytest.approx(1 / 1.5, 2e-2)
    assert share(8, 256, 8, 8, 4) == 0.5 and share(8, 256, 8, 4, 2) > 0.6, "groups of two nodes"
    capacities = rank_capacity.Capacities(8, 2, max_tokens=100, share_of_node=0.5)
    assert [capacities.max_tokens_to_node(factor) for factor in (0.9, 1.2, 2, 5)] == [45, 60, 100, 100]
