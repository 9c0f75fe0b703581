"""One rank's small dispatches and combines of every kind, right to the bit: what compute-sanitizer looks at.

compute-sanitizer --tool racecheck python tests/sanitize.py          # one rank alone
python tests/sanitize.py RANK NUM_RANKS RANKS_PER_NODE FILE          # one of several, which meet in a new FILE
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from lib import decode
from lib import dispatch_combine as grid
from lib.dispatch_combine import Case, expected_of, expert_rows, make_inputs, random_rows, to

import ep_dispatcher as ep
from ep_dispatcher import memory
from ep_dispatcher.tools.testing import device_of

KINDS = [
    dict(dtype=torch.bfloat16, num_topk=3, experts_per_rank=4, hidden=512, alignment=8, recv="spare"),
    dict(dtype=torch.float32, num_topk=2, experts_per_rank=2, hidden=64, layout="rank"),
    dict(dtype=torch.bfloat16, num_topk=4, experts_per_rank=4, hidden=256, payload="pair", routing="masked"),
]
DECODE_KINDS = [
    dict(dtype=torch.bfloat16, num_topk=3, experts_per_rank=4, hidden=512),
    dict(dtype=torch.bfloat16, num_topk=4, experts_per_rank=4, hidden=256, payload="quantize", routing="masked"),
    dict(dtype=torch.bfloat16, num_topk=3, experts_per_rank=4, hidden=512, payload="quantize", tokens="uneven"),
]


def run(case: Case, rank: int, engine: str) -> None:
    device, inputs = device_of(engine, rank), make_inputs(case)
    max_recv_rows = max(grid.rows_needed(case, inputs.topk_idx)) + 5 if case.recv == "spare" else None
    x, topk_idx, weights = inputs.on(rank, device)
    options = dict(layout=case.layout, expert_alignment=case.alignment, max_recv_rows=max_recv_rows)
    with grid.make_buffer(case, engine, 300, num_sms=4, timeout_s=200) as buffer:
        handle = None
        for given, more in ((topk_idx, options), (None, {})):  # a new plan, and the same plan again
            out = buffer.dispatch(x, given, weights, handle=handle, **more)
            handle = out.handle
            y, row_weights = to(device, expert_rows(case, out, rank))
            result = buffer.combine(y, handle, topk_weights=row_weights)
            expected = expected_of(case, inputs, max_recv_rows)[rank]
            grid.assert_step((out, (result.x, result.topk_weights)), expected, str(case))


def run_decode(case: Case, rank: int, engine: str, options: dict) -> None:
    inputs = make_inputs(case)
    again = [random_rows(case, len(x), seed=10 + of_rank) for of_rank, x in enumerate(inputs.x)]
    results = decode.run_case(rank, engine, case, inputs, again, options)
    on_the_host = [(tuple(t.cpu() for t in rows), counts.cpu(), sums.cpu()) for rows, counts, sums in results]
    decode.assert_case(case, inputs, again, {rank: on_the_host})


def run_layer(num_ranks: int, ranks_per_node: int, rank: int, engine: str) -> None:
    """A layer of experts, its steps one after the other and with overlap: the same bits. In one part, and in two."""
    generator, sizes = torch.Generator().manual_seed(rank), dict(hidden=256, num_experts=6 * num_ranks, num_topk=4)
    device, dtype = device_of(engine, rank), torch.bfloat16
    given = torch.randn(500, 256, generator=generator), torch.rand(500, 4, generator=generator)
    weights = torch.randn(6, 384, 256, generator=generator) / 16, torch.randn(6, 256, 192, generator=generator) / 14
    leaves = [t.to(device, dtype).requires_grad_() for t in (given[0], *weights)]
    row_weights = given[1].to(device).requires_grad_()
    topk_idx = torch.rand(500, 6 * num_ranks, generator=generator).topk(4).indices.to(device)
    placed = dict(engine=engine, max_tokens_per_rank=3000, ranks_per_node=ranks_per_node, timeout_s=100, num_sms=24)
    with ep.Buffer(**sizes, **placed) as buffer:
        for num_parts in (1, 2):
            results = []
            for overlap in (False, True):
                options = dict(overlap=overlap, num_parts=num_parts)
                y = ep.moe_mlp(buffer, leaves[0], topk_idx, row_weights, *leaves[1:], **options)
                results.append([y, *torch.autograd.grad(y.float().square().sum(), (*leaves, row_weights))])
            if engine == "cuda":
                assert num_parts == 1 or ep.why_no_overlap(buffer, num_parts=2) is None
                buffer.check()
            assert all(torch.equal(a, b) for a, b in zip(*results))


def main(rank: int = 0, num_ranks: int = 1, ranks_per_node: int = 1, file: str = "", engine: str = "cuda") -> None:
    file = file or tempfile.mkdtemp() + "/store"
    if engine == "cuda":
        memory.DECODE_SMS = 4  # of run_decode; tools watch every block
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=num_ranks)
    for kind in KINDS:
        run(Case(num_ranks, ranks_per_node, tokens="few chunks", **kind), rank, engine)
    for kind in DECODE_KINDS:
        shape = dict(layout="decode", weighted=False, tokens="few chunks") | kind
        options = {"return_hook": True} if shape["tokens"] == "uneven" else {}
        run_decode(Case(num_ranks, ranks_per_node, **shape), rank, engine, options)
    run_layer(num_ranks, ranks_per_node, rank, engine)
    dist.destroy_process_group()
    print(f"rank {rank} of {num_ranks}: right")


if __name__ == "__main__":
    main(*(kind(value) for kind, value in zip((int, int, int, str, str), sys.argv[1:])))
