"""What ep.buffer_bytes says is what a rank allocates: byte by byte, on both engines, without a GPU or CUDA module."""

import os
import random
from pathlib import Path

import pytest
import torch
from conftest import exhaustive
from lib.cuda_build import needs_module
from lib.errors import assert_refused

import ep_dispatcher as ep
from ep_dispatcher import checks, memory

PAGE = (Path(__file__).parents[1] / "docs" / "memory.md").read_text()
EP8 = dict(num_ranks=8, hidden=7168, num_experts=256, num_topk=8, max_tokens_per_rank=4096)
EP64 = EP8 | dict(num_ranks=64, ranks_per_node=8)


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    monkeypatch.delenv("EP_DISPATCHER_RANKS_PER_NODE", raising=False)


def random_sizes(seed: int) -> dict:
    """Sizes of any buffer, at and beside the borders of chunks, lines and vectors."""
    rng = random.Random(seed)
    nodes, local = rng.choice([(rng.randint(1, 8), rng.randint(1, 8)), (rng.randint(9, 32), 16), (1, 64), (7, 72)])
    dtype = rng.choice(checks.DTYPES)
    num_experts = nodes * local * rng.choice([1, 2, 3, 4, 5, 8, *([32, 37] if nodes * local <= 64 else [])])
    near = rng.choice([1, 64, 512, 1024, 4096, 10_000]) + rng.randint(-2, 2)
    return dict(
        num_ranks=nodes * local,
        ranks_per_node=local,
        hidden=16 // dtype.itemsize * rng.choice([1, 3, 7, 31, 32, 33, 127, 255, 256, 257, 512, 896, 1000]),
        num_experts=num_experts,
        num_topk=rng.randint(1, min(num_experts, 64)),
        max_tokens_per_rank=max(1, near),
        dtype=dtype,
    )


def shape_of(sizes: dict) -> memory.Shape:
    names = ("ranks_per_node", "num_experts", "num_topk", "max_tokens_per_rank", "hidden", "dtype")
    num_nodes = sizes["num_ranks"] // sizes["ranks_per_node"]
    return memory.Shape(num_nodes, *(sizes[name] for name in names), sizes.get("mask_late_ranks", False))


@needs_module
def test_the_cuda_engine_allocates_as_much():
    from ep_dispatcher import _C_cuda

    shapes, num_masking = set(), 0
    for seed in range(2000):
        sizes, num_sms = random_sizes(seed), 4 + seed % 129
        if shape_of(sizes).plans_directly and seed % 2:
            sizes["mask_late_ranks"] = True
            num_masking += 1
        config = shape_of(sizes).cuda_config(_C_cuda.Config())
        found = ep.buffer_bytes(**sizes, num_sms=num_sms)
        assert found.region_bytes == _C_cuda.region_bytes(config), sizes
        assert found.state_bytes == _C_cuda.state_bytes(config, num_sms), (sizes, num_sms)
        assert found.total == found.region_bytes + found.state_bytes
        shapes.add((config.num_nodes, config.ranks_per_node))
    assert num_masking > 10
    assert len(shapes) == 90  # 1 to 8 nodes of 1 to 8 ranks, 9 to 32 of 16, one of 64, 7 of 72


@pytest.mark.parametrize("seed", [*range(40), *(exhaustive(seed) for seed in range(40, 200))])
def test_the_cpu_engine_allocates_as_much(seed):
    """Memory is reserved and not touched, so that large buffers cost no more than small ones."""
    from ep_dispatcher import _C_cpu

    sizes = random_sizes(seed)
    sizes["mask_late_ranks"] = sizes["num_ranks"] == sizes["ranks_per_node"] <= 32 and seed % 2 == 0
    config = shape_of(sizes).fill_sizes(_C_cpu.Config())
    config.rank_at = list(range(sizes["num_ranks"]))
    made = _C_cpu.Engine(config, 1)
    assert ep.buffer_bytes(**sizes, engine="cpu").total == os.fstat(made.fd()).st_size, sizes
    made.close_fd()
    made.close()


def test_documented_cases():
    """The table of docs/memory.md."""
    for nodes, per_node in ((1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (1, 64), (1, 72)):
        shape = dict(num_ranks=nodes * per_node, ranks_per_node=per_node, num_experts=288 if per_node == 72 else 256)
        found = ep.buffer_bytes(**EP8 | shape)
        large = [found.region.get(name, 0) for name in ("slots", "staging", "sums")]
        windows = (nodes - 1) * 4 * memory.Shape(nodes, per_node, 256, 8, 4096, 7168, torch.bfloat16).window_chunk
        rows = per_node * (4096 + windows), nodes * 4096, (nodes - 1) * 4096
        assert large == [14336 * num for num in rows]
        cells = [f"{size / 2**20:,.1f}" for size in (*large, found.total - sum(large), found.total)]
        assert f"| {' | '.join(cells[:-1])} | **{cells[-1]}** |" in PAGE
    assert f"{ep.buffer_bytes(**EP8, engine='cpu').total / 2**20:,.1f} MiB" in PAGE
    found = ep.buffer_bytes(**EP64)
    assert f"one.total            # {found.total} bytes" in PAGE
    assert f"# {found.region['slots']} of them" in PAGE


def test_many_nodes_fit():
    """Windows bound what a rank has for its rail peers."""
    most = 1536 * 2**20
    assert ep.buffer_bytes(**EP64).total <= most < ep.buffer_bytes(**EP64 | dict(max_tokens_per_rank=8192)).total
    slots = [ep.buffer_bytes(**EP8 | dict(num_ranks=8 * n, ranks_per_node=8)).region["slots"] for n in (1, 2, 4, 8)]
    assert all(0 < more - slots[0] <= 8 * 2048 * 14336 for more in slots[1:])


@pytest.mark.parametrize("nodes", [*range(2, 9), 16, 32])
@pytest.mark.parametrize("tokens", [1, 100, 4096, 70_000, 2**19])
def test_windows(nodes, tokens):
    shape = memory.Shape(nodes, 8, 256, 8, tokens, 7168, torch.bfloat16)
    others, chunks = nodes - 1, shape.chunks(shape.window_chunk)
    assert shape.window_chunk % 16 == 0 and min(64, 512 // others) - 16 < shape.window_chunk
    assert shape.window_chunk <= max(256, tokens // 1024, tokens * others // 8192 + 16)
    assert chunks <= memory.MAX_WINDOW_CHUNKS and chunks * others <= memory.MAX_SUMMED_CHUNKS


def test_arguments_left_at_their_defaults(monkeypatch):
    assert ep.buffer_bytes(**EP8) == ep.buffer_bytes(
        **EP8, ranks_per_node=8, dtype=torch.bfloat16, num_sms=64, engine="cuda"
    )
    monkeypatch.setenv("EP_DISPATCHER_RANKS_PER_NODE", "4")
    assert ep.buffer_bytes(**EP8) == ep.buffer_bytes(**EP8, ranks_per_node=4)
    monkeypatch.setenv("EP_DISPATCHER_RANKS_PER_NODE", "3")
    assert_refused("ranks_per_node", ep.buffer_bytes, **EP8)
    assert ep.buffer_bytes(**EP8, ranks_per_node=8).total > 0  # an argument wins


@pytest.mark.parametrize(
    "argument,most,wrong",
    [
        ("num_ranks", "", dict(num_ranks=0)),
        ("num_ranks", "", dict(num_ranks=True)),
        ("ranks_per_node", "", dict(ranks_per_node=0)),
        ("ranks_per_node", "", dict(ranks_per_node=3)),
        ("hidden", "", dict(hidden=7)),
        ("num_experts", "", dict(num_experts=255)),
        ("dtype", "", dict(dtype=torch.int8)),
        ("num_sms", "", dict(num_sms=0)),
        ("engine", "", dict(engine="auto")),
        ("max_tokens_per_rank", "", dict(max_tokens_per_rank=2**31 - 1)),
        # What the CUDA engine refuses, by the same functions.
        ("group", "32 nodes", dict(num_ranks=64, ranks_per_node=1)),
        ("group", "72 ranks", dict(num_ranks=128)),
        ("group", "512 ranks", dict(num_ranks=1024, ranks_per_node=64, num_experts=1024)),
        ("num_experts", "8192", dict(num_experts=8200)),
        ("max_tokens_per_rank", "4194304", dict(max_tokens_per_rank=2**22 + 1, hidden=8)),
        ("max_tokens_per_rank", "524288", dict(max_tokens_per_rank=2**19 + 1, hidden=8, ranks_per_node=4)),
        ("num_sms", "2", dict(num_sms=1, ranks_per_node=4)),
        ("num_sms", "3", dict(num_sms=2, num_ranks=16, ranks_per_node=1)),  # a warp for each relay
    ],
)
def test_mistakes_are_those_of_a_buffer(argument, most, wrong):
    text = assert_refused(argument, ep.buffer_bytes, **EP8 | wrong)
    assert most in text
