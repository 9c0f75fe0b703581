"""One line says what carries a framework's tokens: once a job, on its first rank.

The other frameworks have this test in files of their own: test_megatron_buffers, test_torchtitan, test_transformers.
"""

import io
import logging

import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.deep_ep_case import routed
from lib.in_use import lines_in_use
from lib.round_trip import make_buffer

import ep_dispatcher as ep
from ep_dispatcher.integrations import messages
from ep_dispatcher.integrations.deep_ep import Buffer, ElasticBuffer, EPBuffer, config, destroy_buffers

HIDDEN, EXPERTS, TOPK, MOST = 128, 4, 2, 8


@on_ranks(2)
def test_the_line_has_the_engine_the_ranks_and_the_wire(rank):
    with make_buffer(ranks_per_node=1) as first, make_buffer() as second:
        with lines_in_use() as said:
            messages.announce("titan 7.1", first, " (so many facts)")
            messages.announce("titan 7.1", second)
            messages.announce("another", second)
        expected = [
            f"ep_dispatcher {ep.__version__} carries the tokens of titan 7.1 (so many facts). First buffer: {first}",
            f"ep_dispatcher {ep.__version__} carries the tokens of another. First buffer: {second}",
        ]
    assert said == (expected if rank == 0 else [])
    if rank == 0:
        assert "2 nodes x 1" in said[0] and "CPU engine, shared memory, gloo between nodes" in said[0]


def deep_ep_operations(group) -> None:
    """Two operations of each interface that programs for DeepEP use."""
    x = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    topk_idx, topk_weights = torch.tensor([[0, 1], [2, -1], [3, 0]]), torch.ones(3, TOPK)
    buffer = Buffer(group, 0, 0, low_latency_mode=True, explicitly_destroy=True)
    buffer.dispatch(x, **routed(buffer, topk_idx, topk_weights, EXPERTS))
    buffer.low_latency_dispatch(x, topk_idx, MOST, EXPERTS, use_fp8=False)
    sizes = dict(num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK)
    for kind in (ElasticBuffer, EPBuffer):
        later = kind(group, **sizes, explicitly_destroy=True)
        later.dispatch(x=x, topk_idx=topk_idx, num_experts=EXPERTS)
        later.destroy()
    buffer.destroy()


@on_ranks(2)
def test_a_program_for_deep_ep_says_it_once(rank):
    with lines_in_use() as said:
        deep_ep_operations(dist.group.WORLD)
    destroy_buffers()
    assert len(said) == (rank == 0)
    assert all("of deep_ep (Buffer). First buffer: Buffer(rank 0 of 1 node x 2, hidden=128, " in line for line in said)


@on_ranks(2)
def test_the_line_names_the_interface_in_use(rank):
    with lines_in_use() as said:
        buffer = EPBuffer(
            dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, explicitly_destroy=True
        )
        x = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
        buffer.dispatch(x=x, topk_idx=torch.zeros(3, TOPK, dtype=torch.int64).sub(1), num_experts=EXPERTS)
        buffer.destroy()
    destroy_buffers()
    assert ["deep_ep (EPBuffer)" in line for line in said] == [True] * (rank == 0)


@on_ranks(2)
def test_only_the_first_rank_warns_of_arguments_without_effect(rank):
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    config.logger.addHandler(handler)
    try:
        for _ in range(2):
            config.warn_once("nothing: accepted, and without effect")
    finally:
        config.logger.removeHandler(handler)
    assert said.getvalue().count("ep_dispatcher as deep_ep: nothing") == (rank == 0)


def test_a_package_that_is_run_from_its_sources_has_no_version():
    assert messages.name_and_version("torch").startswith("torch 2.")
    assert messages.name_and_version("no-such-package") == "no-such-package"
