"""Numbers of a peer that would lead kernels out of memory: every rank ends with an error that names the rank.

A host overwrites its region while kernels are held up, between the write of these numbers and their use. The numbers
are one too many, below zero, INT_MAX. Guards against unchecked counts and indices of peers.
"""

import struct
import time

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.cuda_region import Region
from lib.faults import LIMIT_S, SLACK_S
from lib.round_trip import HIDDEN, NUM_EXPERTS, NUM_TOPK, check_new_buffer, device, make_buffer

import ep_dispatcher as ep
from ep_dispatcher import engines

pytestmark = pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}")
MOST = 4096  # tokens of a rank: too many for direct plans
INT_MAX = 2**31 - 1


def given(buffer: ep.Buffer, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_TOPK).indices
    weights = torch.rand(num_tokens, NUM_TOPK, generator=generator)
    return tuple(t.to(device(buffer)) for t in (x, idx, weights))


def assert_ends(buffer: ep.Buffer, inputs, words: str, run) -> None:
    """Operations end in time on both ranks, with an error that names rank 1. Then a new buffer works.

    A rank that has not read the wrong numbers may complete the operation, so it begins another one.
    """
    begin, bad = time.monotonic(), 1
    with pytest.raises(RuntimeError) as caught:
        run()
        buffer.check()
        buffer.dispatch(*inputs, max_recv_rows=8 * MOST)
        buffer.check()
    assert time.monotonic() - begin < LIMIT_S + SLACK_S + 4
    error = caught.value
    if isinstance(error, ep.PeerTimeoutError):  # of a rank that has not read the numbers
        assert error.late_ranks == (bad,), error
    else:
        assert words in str(error) and f"written by rank {bad}" in str(error), error
    words_of_all: list = [None] * dist.get_world_size()
    dist.all_gather_object(words_of_all, str(error))
    assert any(words in text for text in words_of_all), words_of_all
    dist.barrier()
    buffer.destroy()
    torch.cuda.synchronize()  # no kernel has left its memory: that would be a sticky error
    check_new_buffer(engine="cuda")


@pytest.mark.parametrize("value", [MOST + 1, -1, INT_MAX])
@pytest.mark.parametrize("which", ["items", "tokens"])
@on_ranks(2)
def test_counts(rank, value, which):
    """Rank 1 waits for rank 0 with its own counts written, and they change meanwhile."""
    buffer = make_buffer(engine="cuda", timeout_s=LIMIT_S, max_tokens_per_rank=MOST)
    region = Region(buffer)
    assert not region.config.plans_directly
    inputs = given(buffer, 700)
    buffer.dispatch(*inputs, max_recv_rows=8 * MOST)
    buffer.check()  # epoch 1
    dist.barrier()

    def run():
        if rank == 0:
            time.sleep(1.5)
        buffer.dispatch(*inputs, max_recv_rows=8 * MOST)  # epoch 2
        if rank == 1:
            time.sleep(0.7)
            ints = region.at["counts_ints"]
            counts = region.at["counts"] + 4 * ints * rank  # of this rank; an even epoch has the first two
            # Counts are items by rank, then tokens by expert.
            region.write(1, counts + 4 * (rank if which == "items" else 2 + NUM_EXPERTS - 1), value)

    assert_ends(buffer, inputs, "counts out of range", run)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize(
    "field,value",
    [("token", MOST), ("token", -1), ("token", INT_MAX), ("copies", 99), ("copies", 0), ("copies", -1)]
    + [("value", 8 * MOST), ("value", -1), ("value", INT_MAX), ("k", NUM_TOPK)],
)
@on_ranks(2)
def test_lists(rank, field, value, layout):
    """Rank 1 changes an item for rank 0 in its own inbox, when it is listed and before rank 0 pulls."""
    buffer = make_buffer(engine="cuda", timeout_s=LIMIT_S, max_tokens_per_rank=MOST)
    engine, region = buffer.live_engine(), Region(buffer)
    inputs = given(buffer, 700)
    buffer.dispatch(*inputs, layout=layout)
    buffer.check()
    wait = engine._wait_for_counts
    max_copies = min(NUM_TOPK, NUM_EXPERTS // 2)

    def wait_and_write() -> int:
        rows = wait()
        torch.cuda.synchronize()  # the first launch has ended, so the lists are written
        dist.barrier()
        if rank == 1:
            item = region.at["items"] + 4 * region.at["item_ints"] * 5  # item 5 for rank 0
            at = {"token": 0, "copies": 4, "value": 8, "k": 8 + 4 * max_copies}[field]
            written = struct.unpack("<i", struct.pack("<4B", *[value] * 4))[0] if field == "k" else value
            region.write(1, item + at, written)
        dist.barrier()
        return rows

    engine._wait_for_counts = wait_and_write
    assert_ends(buffer, inputs, "lists out of range", lambda: buffer.dispatch(*inputs, layout=layout))


@pytest.mark.parametrize("layout", ["decode", "expert", "rank"])
@pytest.mark.parametrize("value", [NUM_EXPERTS, -2, 2**15 - 1])
@on_ranks(2)
def test_choices(rank, value, layout):
    """Few tokens: rank 1 changes its choices in the memory of rank 0, before rank 0 reads them."""
    buffer = make_buffer(engine="cuda", timeout_s=LIMIT_S)
    region = Region(buffer)
    assert region.config.plans_directly
    inputs = given(buffer, 8)
    options = dict(layout=layout) if layout == "decode" else dict(layout=layout, max_recv_rows=200)
    buffer.dispatch(*inputs[:2], **options)
    buffer.check()
    dist.barrier()

    def run():
        if rank == 0:
            time.sleep(1.5)
        buffer.dispatch(*inputs[:2], **options)  # epoch 2
        if rank == 1:
            time.sleep(0.7)
            # The first tagged word of rank 1: eight bytes of epoch, then four int16.
            words = buffer.config.max_tokens_per_rank * ((NUM_TOPK + 7) // 8 * 8) // 4
            number = struct.unpack("<i", struct.pack("<2h", value, -1))[0]
            region.write(0, region.at["choices"] + 16 * words * rank + 8, number)

    assert_ends(buffer, inputs, "experts out of range", run)


@pytest.mark.parametrize("value", [MOST + 1, -1, INT_MAX])
@pytest.mark.parametrize("field", ["num_tokens", "num_chunks"])
@on_ranks(2)
def test_arguments(rank, field, value):
    """Rank 1 changes its own Call while it waits for that of rank 0."""
    buffer = make_buffer(engine="cuda", timeout_s=LIMIT_S, max_tokens_per_rank=MOST)
    region = Region(buffer)
    inputs = given(buffer, 700)
    buffer.dispatch(*inputs, max_recv_rows=8 * MOST)
    buffer.check()
    dist.barrier()

    def run():
        if rank == 0:
            time.sleep(1.5)
        buffer.dispatch(*inputs, max_recv_rows=8 * MOST)  # epoch 2
        if rank == 1:
            time.sleep(0.7)
            call = region.at["called"] + 16 * 5 * rank  # five tagged words
            region.write(1, call + 16 * 4 + 8 + 4 * (field == "num_chunks"), value)

    assert_ends(buffer, inputs, "arguments out of range", run)
