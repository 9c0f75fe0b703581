"""Times work beside operations on GPUs: GEMMs and a copy beside a dispatch, and a decode beside a large dispatch.

    python benchmarks/neighbours.py                                # a rank per GPU; a minute
    python benchmarks/neighbours.py --only waiting --rounds 5 --json neighbours.json

    waiting   rank 0 runs `work` while its dispatch waits for the other ranks, which come later
    moving    every rank runs `work` beside dispatches one after the other
    decode    a dispatch and combine of few tokens in decode layout, alone and beside large dispatches of another buffer

`work` is torch.mm, a copy in memory, the grouped GEMM of this package, and that of PyTorch: as it is, and with margins
of multiprocessors that it leaves free. Figures of `waiting` and `moving` are times beside the dispatch over times
alone, medians of the rounds; work that only loses the multiprocessors of the dispatch takes as much as the line "share"
says. Figures of `decode` are microseconds of single calls, as the median and the 99th percentile of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gemm_margin import dispatching

import ep_dispatcher as ep
from ep_dispatcher.integrations.megatron.dispatcher.gemm_sm_margin import set_pytorch
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.tools.benchmark.cases import inputs_of
from ep_dispatcher.tools.benchmark.harness import captured, make_parser, start_gpu_ranks, use_gpu
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json

TOKENS, HIDDEN, EXPERTS, TOPK, FEW = 4096, 7168, 256, 8, 128
LATE_S = 0.06  # by which the other ranks come late
WORK_S = 0.03  # of work beside it
NOT_COUNTED = 10  # decodes of a round: in the first ones ranks still wait for each other's hosts
KINDS = ("waiting", "moving", "decode")

Call = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    found: dict[str, object] = {}
    with start_gpu_ranks(args.ranks) as pool:
        for kind in args.only:
            ranks = pool.run(globals()[f"measure_{kind}"], args.sms, args.rounds)
            found[kind] = report(kind, ranks)
    if args.json:
        args.json.write_text(to_json(dict(machine=describe_machine(), sms=args.sms, rounds=args.rounds, **found)))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, ranks=max(2, torch.cuda.device_count()), rounds=5, sms=24)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="what to measure")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(argv)


def report(kind: str, ranks: list[dict[str, float]]) -> dict[str, float]:
    """Print the figures of the slowest rank, and return them. A rank that measures nothing has none."""
    slowest = {name: max(rank[name] for rank in ranks if name in rank) for name in ranks[0]}
    print(f"\n{kind}", flush=True)
    for name, figure in slowest.items():
        print(f"  {name:40} {figure:8.3f}" if kind != "decode" else f"  {name:40} {figure:8.1f} us", flush=True)
    return slowest


# ---- what runs beside ------------------------------------------------------------------------------------------------


def works(sms: int) -> dict[str, Call]:
    """Return the calls that run beside a dispatch of so many SMs. Each takes some 0.3 to 2 ms on an H200."""
    options = dict(device="cuda", dtype=torch.bfloat16)
    a, b = torch.randn(8192, 8192, **options), torch.randn(8192, 8192, **options)
    source = torch.zeros(1 << 29, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    groups, rows, k, n = 64, 32768, 2048, 1536
    x = torch.randn(rows, k, **options)
    weights = torch.randn(groups, n, k, **options)
    ends = torch.arange(rows // groups, rows + 1, rows // groups, device="cuda", dtype=torch.int32)
    found: dict[str, Call] = {
        "torch.mm": lambda: torch.mm(a, b),
        "copy": lambda: target.copy_(source),
        "grouped GEMM of this package": lambda: grouped_gemm.linear(x, weights, ends),
    }
    if hasattr(torch, "_grouped_mm"):
        columns = weights.transpose(1, 2)

        def with_margin(margin: int) -> None:
            set_pytorch(margin)
            try:
                torch._grouped_mm(x, columns, offs=ends)
            finally:
                set_pytorch(None)

        found["grouped_mm of PyTorch"] = lambda: torch._grouped_mm(x, columns, offs=ends)
        for margin in dict.fromkeys((8, sms)):
            found[f"grouped_mm, margin of {margin}"] = partial(with_margin, margin)
    return found


def milliseconds_each(call: Call, times: int) -> float:
    """Return the median milliseconds of a call. The first one is left out."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 2)]
    call()
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    events[-1].synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def share_of(sms: int) -> float:
    """Return how much longer work takes that is spread over the multiprocessors which a dispatch leaves."""
    has = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return has / (has - sms)


def measure_waiting(rank: int, sms: int, rounds: int) -> dict[str, float]:
    """Return rank 0's times of work beside a waiting dispatch, over those of the work alone. Collective."""
    use_gpu(rank)
    todo, side = works(sms), torch.cuda.Stream()
    ratios: dict[str, list[float]] = {name: [] for name in todo}
    alone = {name: milliseconds_each(call, 3) for name, call in todo.items()}
    counts = {name: max(3, int(1e3 * WORK_S / ms)) for name, ms in alone.items()}
    with dispatching(sms, TOKENS, HIDDEN, EXPERTS) as dispatch:
        for _ in range(rounds):
            for name, call in todo.items():
                torch.cuda.synchronize()
                dist.barrier()
                if rank > 0:
                    time.sleep(LATE_S)
                    dispatch()
                else:
                    alone_ms = milliseconds_each(call, counts[name] // 2)
                    torch.cuda.synchronize()
                    with torch.cuda.stream(side):
                        dispatch()
                        ended = side.record_event()
                    time.sleep(0.001)  # it has begun
                    beside_ms = milliseconds_each(call, counts[name] // 2)
                    if ended.query():
                        raise SystemExit(f"the dispatch ended before {name}: raise LATE_S")
                    ratios[name].append(beside_ms / alone_ms)
                torch.cuda.synchronize()
    if rank > 0:
        return {}
    return {name: statistics.median(found) for name, found in ratios.items()} | {"share": share_of(sms)}


def measure_moving(rank: int, sms: int, rounds: int) -> dict[str, float]:
    """Return the times of work beside dispatches, over those of the work alone, and of the dispatches. Collective."""
    use_gpu(rank)
    todo, side = works(sms), torch.cuda.Stream()
    found: dict[str, list[float]] = {}
    with dispatching(sms, TOKENS, HIDDEN, EXPERTS) as dispatch:
        for _ in range(rounds):
            for name, call in todo.items():
                torch.cuda.synchronize()
                dist.barrier()
                alone_ms, dispatch_ms = milliseconds_each(call, 5), milliseconds_each(dispatch, 5)
                torch.cuda.synchronize()
                dist.barrier()
                with torch.cuda.stream(side):
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(33)]
                    for event in events[:-1]:
                        event.record()
                        dispatch()
                    events[-1].record()
                beside_ms = milliseconds_each(call, 5)
                torch.cuda.synchronize()
                moved_ms = statistics.median(a.elapsed_time(b) for a, b in zip(events[1:9], events[2:10]))
                found.setdefault(name, []).append(beside_ms / alone_ms)
                found.setdefault(f"dispatch beside {name}", []).append(moved_ms / dispatch_ms)
    return {name: statistics.median(ratios) for name, ratios in found.items()} | {"share": share_of(sms)}


def measure_decode(rank: int, sms: int, rounds: int) -> dict[str, float]:
    """Return microseconds of a decode's dispatch and combine, alone and beside large dispatches. Collective."""
    use_gpu(rank)
    side = torch.cuda.Stream()
    sizes = dict(hidden=HIDDEN, num_experts=EXPERTS, num_topk=TOPK, max_tokens_per_rank=FEW)
    x, idx, weights = inputs_of(rank, torch.device("cuda"), FEW, HIDDEN, EXPERTS, TOPK)
    figures: dict[str, float] = {}
    with dispatching(sms, TOKENS, HIDDEN, EXPERTS) as dispatch, ep.Buffer(engine="cuda", timeout_s=20, **sizes) as few:

        def decode() -> object:
            out = few.dispatch(x, idx, layout="decode")
            return few.combine(out.x, out.handle, weights=weights)

        graph, kept = captured(decode, 1, meet=dist.barrier)
        for name in ("alone", "beside"):
            times: list[float] = []
            for _ in range(rounds):
                torch.cuda.synchronize()
                dist.barrier()
                if name == "beside":
                    with torch.cuda.stream(side):
                        for _ in range(40):
                            dispatch()
                    time.sleep(0.001)
                events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
                for event in events[:-1]:
                    event.record()
                    graph.replay()
                events[-1].record()
                torch.cuda.synchronize()
                of_round = [1e3 * a.elapsed_time(b) for a, b in zip(events, events[1:])]
                times += of_round[NOT_COUNTED:]
            times.sort()
            figures[f"{FEW} tokens, {name}: median"] = statistics.median(times)
            figures[f"{FEW} tokens, {name}: 99th percentile"] = times[int(0.99 * (len(times) - 1))]
        few.check()
        del graph, kept
    return figures


if __name__ == "__main__":
    main()
