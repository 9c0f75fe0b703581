"""Windows of slots on GPUs: the smallest ones, where pushers wait for slots at every chunk, change no bit.

tests/test_window_kernel.py is a model of it, without a GPU.
"""

import time

import pytest
import torch
from conftest import exhaustive, on
from lib import round_trip
from lib.decode import assert_case as assert_decoded
from lib.decode import replay as replay_decode
from lib.decode import run_case as run_decode
from lib.dispatch_combine import (
    Case,
    assert_same,
    check_results,
    make_buffer,
    make_inputs,
    other_rows,
    random_rows,
    run_case,
)
from lib.errors import DISAGREEMENTS, make_disagreement
from lib.nodes import SMALL, change_routing, replay

from ep_dispatcher import PeerTimeoutError, memory

cuda = pytest.mark.parametrize("engine", [on("cuda")])
LIMIT_S = 2.0


def narrow(rank: int, chunk: int, chunks: int, num_sms: int | None, run, *given):
    """Call ``run`` where a window has ``chunks`` of ``chunk`` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.Shape, "window_chunk", property(lambda shape: chunk))
        patch.setattr(memory, "WINDOW_CHUNKS", chunks)
        if num_sms is not None:
            for name in ("DEFAULT_SMS", "DECODE_SMS"):
                patch.setattr(memory, name, num_sms)
        return run(rank, *given)


def configured(rank: int, engine: str, case: Case) -> tuple[int, int, int]:
    with make_buffer(case, engine, 600) as buffer:
        engine_of, config = buffer._engine, buffer._engine._c_config
        return config.window_chunk, config.window_chunks, engine_of._compiled.region_bytes(config)


@cuda
def test_a_narrow_window_takes_less_memory(pools, engine):
    case = Case(2, 1, **SMALL)
    for narrow_one, usual in zip(
        pools(2).run(narrow, 64, 1, None, configured, engine, case), pools(2).run(configured, engine, case), strict=True
    ):
        assert narrow_one[:2] == (64, 1) and usual[:2] == (128, 4)
        assert usual[2] - narrow_one[2] > 400 * 1024  # 512 - 64 slots, less some flags


@cuda
@pytest.mark.parametrize("chunk,chunks", [(64, 1), exhaustive(48, 2), exhaustive(16, 4)])
@pytest.mark.parametrize(
    "num_ranks,ranks_per_node", [(2, 1), (4, 2), (4, 1), (4, 4), exhaustive(6, 2), exhaustive(6, 3), exhaustive(8, 2)]
)
def test_every_step_has_another_routing(pools, engine, num_ranks, ranks_per_node, chunk, chunks):
    """Skewed, masked and uniform ones, with up to 600 tokens of a rank and with none."""
    case = Case(num_ranks, ranks_per_node, **SMALL)
    pools(num_ranks).run(narrow, chunk, chunks, None, change_routing, engine, case, 50)


@cuda
@pytest.mark.parametrize("num_sms", [2, 3, 5, 8, 9])
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2)])
def test_few_multiprocessors(pools, engine, num_ranks, ranks_per_node, num_sms):
    """With up to 8 every block pushes and reduces by turns: one of them serves the wire. With 9 blocks divide."""
    case = Case(num_ranks, ranks_per_node, **SMALL)
    pools(num_ranks).run(narrow, 64, 1, num_sms, change_routing, engine, case, 10)


def with_chunks(rank: int, rows: int, sums: int, run, *given):
    """Call ``run`` where flags cover so many tokens: staged rows, and sums that have crossed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.Shape, "token_chunk", rows)
        patch.setattr(memory.Shape, "sum_chunk", sums)
        return run(rank, *given)


@cuda
@pytest.mark.parametrize("rows,sums", [(64, 32), exhaustive(256, 128), exhaustive(32, 512)])
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2), (2, 2)])
def test_other_chunks_of_rows_and_sums(pools, engine, num_ranks, ranks_per_node, rows, sums):
    case = Case(num_ranks, ranks_per_node, **SMALL)
    pools(num_ranks).run(with_chunks, rows, sums, change_routing, engine, case, 30)


@cuda
@pytest.mark.parametrize("tokens", ["uneven", "many"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("routing", ["skewed", "one_expert"])
@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_few_receivers(pools, engine, ranks_per_node, routing, layout, tokens):
    """Most tokens go to few ranks; ranks have 0 to 23 tokens, or 0 to 2500."""
    case = Case(4, ranks_per_node, torch.bfloat16, tokens=tokens, num_topk=3, routing=routing, layout=layout)
    inputs = make_inputs(case)
    again, chunk = other_rows(case, inputs), 4 if tokens == "uneven" else 256
    ranks = pools(4).run(narrow, chunk, 1, None, run_case, engine, case, inputs, again, None)
    check_results(case, ranks, inputs, again)


@cuda
@pytest.mark.parametrize("num_sms", [None, 3])
@pytest.mark.parametrize("options", [{}, {"return_hook": True}], ids=["whole", "hooks"])
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2), (4, 1)])
def test_decode_layout(pools, engine, num_ranks, ranks_per_node, options, num_sms):
    """With a hook the first launch makes the sums that free slots for its pushes."""
    tokens = "even" if num_ranks == 2 else "uneven"
    case = Case(num_ranks, ranks_per_node, torch.bfloat16, layout="decode", weighted=False, tokens=tokens, num_topk=3)
    inputs = make_inputs(case)
    again = [random_rows(case, idx.shape[0], 500 + rank) for rank, idx in enumerate(inputs.topk_idx)]
    given = (run_decode, engine, case, inputs, again, options)
    assert_decoded(case, inputs, again, pools(num_ranks).run(narrow, 4, 1, num_sms, *given))


@cuda
@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 1), (4, 2)])
def test_graphs(pools, engine, num_ranks, ranks_per_node):
    case = Case(num_ranks, ranks_per_node, layout="rank", **SMALL)
    pools(num_ranks).run(narrow, 64, 1, None, replay, engine, case)


@cuda
@pytest.mark.parametrize("hooked", [False, True])
def test_graphs_of_decode_layout(pools, engine, hooked):
    """As without windows: bit by bit what larger windows give."""
    case = Case(2, 1, torch.bfloat16, layout="decode", weighted=False, num_topk=3)
    steps = [make_inputs(case, seed) for seed in range(5)]
    usual = pools(2).run(replay_decode, case, steps, hooked, 32)
    for rank, results in enumerate(pools(2).run(narrow, 4, 1, None, replay_decode, case, steps, hooked, 32)):
        for step, (seen, expected) in enumerate(zip(results, usual[rank], strict=True)):
            assert_same(seen, expected, f"rank {rank}, replay {step}")


@cuda
@pytest.mark.parametrize("num_sms", [None, 3])
@pytest.mark.parametrize("odd", [0, exhaustive(3)])
@pytest.mark.parametrize("kind", [kind for kind in DISAGREEMENTS if kind.startswith("combined")])
@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_after_a_difference_nobody_waits_for_slots(pools, engine, ranks_per_node, kind, odd, num_sms):
    given = (make_disagreement, engine, kind, odd, ranks_per_node, 30)
    for message in pools(4).run(narrow, 2, 1, num_sms, *given):
        assert message.startswith(kind.split()[-1]) and f"rank {odd} " in message


def come_late(rank: int, engine: str, late: int) -> None:
    """Rank ``late`` does not combine."""
    with round_trip.make_buffer(engine=engine, ranks_per_node=2, timeout_s=LIMIT_S) as buffer:
        out = buffer.dispatch(*round_trip.inputs(rank, device=round_trip.device(buffer)))
        buffer.check()
        if rank == late:
            time.sleep(3 * LIMIT_S)
            return
        with pytest.raises(PeerTimeoutError) as caught:
            buffer.combine(out.x, out.handle)
            buffer.check()
        assert (caught.value.operation, caught.value.late_ranks) == ("combine", (late,))


@cuda
@pytest.mark.parametrize("late", [0, 3])
def test_a_late_rank_is_named(pools, engine, late):
    pools(4).run(narrow, 2, 1, None, come_late, engine, late)
