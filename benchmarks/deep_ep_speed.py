"""Times deep_ep on this engine against the engine itself: the cost of the interface for programs written for DeepEP.

    python benchmarks/deep_ep_speed.py                          # a rank per GPU
    python benchmarks/deep_ep_speed.py --engine cpu --ranks 4 --tokens 512 --hidden 1024 --experts 64

Both sides do the same work in the same processes, and take turns. The engine's calls use rank layout, beside low
latency decode layout. In "host waits" dispatches the host waits, as with DeepEP without num_worst_tokens; in the others
it does not. "ranks agree" is without EP_DISPATCHER_MAX_TOKENS_PER_RANK.

It prints medians over all rounds, each of the slowest rank. Device: by events around one call, with an empty L2 cache
and with the host ahead. Host: until the call returns. Graph: the device's time of a CUDA graph of the call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.integrations.deep_ep import Buffer
from ep_dispatcher.tools.benchmark.cases import inputs_of
from ep_dispatcher.tools.benchmark.clock import DeviceClock, HostClock, make_clock
from ep_dispatcher.tools.benchmark.harness import make_parser
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json
from ep_dispatcher.tools.benchmark.ranks import attempt, largest_over_ranks
from ep_dispatcher.tools.testing import RankPool

SIDES = ("deep_ep", "engine")
TURNS, WARMUP = 4, 3  # calls of a side in a row, and before its first
MAX_TOKENS = "EP_DISPATCHER_MAX_TOKENS_PER_RANK"

Call = Callable[[], object]


class Case(NamedTuple):
    engine: str
    tokens: int
    few_tokens: int  # of low latency
    hidden: int
    experts: int
    topk: int
    sms: int
    rounds: int


class Pair(NamedTuple):
    """The same work by both sides; None for a side that does not have it."""

    deep_ep: Call
    engine: Call | None
    waits: bool = False  # a host waits, so no CUDA graph


class Found(NamedTuple):
    device: dict[tuple[str, str], float]  # microseconds, by operation and side
    host: dict[tuple[str, str], float]
    graph: dict[tuple[str, str], float]
    notes: list[str]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    case = Case(*(getattr(args, name) for name in Case._fields))
    backend = "gloo" if args.engine == "cpu" else "cpu:gloo,cuda:nccl"
    with RankPool(args.ranks, timeout_s=300, backend=backend) as pool:
        found = pool.run(measure, case)[0]
    print("\n".join(lines(case, args.ranks, found)), flush=True)
    if args.out:
        tables = {name: [[*key, us] for key, us in getattr(found, name).items()] for name in Found._fields[:3]}
        run = dict(machine=describe_machine(), case=case._asdict(), ranks=args.ranks, **tables, notes=found.notes)
        args.out.write_text(to_json(run))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    sizes = dict(tokens=4096, few_tokens=128, hidden=7168, experts=256, topk=8)
    parser = make_parser(__doc__, ranks=gpus or 4, **sizes, sms=24, rounds=8)
    parser.add_argument("--engine", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu", help="of both sides")
    parser.add_argument("--out", type=Path, help="a JSON file with the times")
    args = parser.parse_args(argv)
    if args.engine == "cuda" and args.ranks > gpus:
        parser.error(f"--ranks is {args.ranks}, but has to be at most {gpus}, a GPU each, with --engine cuda")
    return args


def measure(rank: int, case: Case) -> Found:
    clock, found = make_clock(case.engine), Found({}, {}, {}, [])
    os.environ |= {MAX_TOKENS: str(case.tokens), "EP_DISPATCHER_ENGINE": case.engine}
    Buffer.set_num_sms(case.sms)
    with pairs_of(case, rank, clock.device) as pairs:
        for name, pair in pairs.items():
            calls = {side: getattr(pair, side) for side in SIDES if getattr(pair, side)}
            time_in_turn(clock, name, calls, case.rounds, found)
        if case.engine == "cuda":
            time_graphs(clock, pairs, case.rounds, found)
    return found


@contextmanager
def pairs_of(case: Case, rank: int, device: torch.device) -> Iterator[dict[str, Pair]]:
    """Yield all pairs by operation, with buffers of their own. Collective."""
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    sizes = dict(hidden=case.hidden, num_experts=case.experts, num_topk=case.topk, num_sms=case.sms)
    with (
        ep.Buffer(max_tokens_per_rank=case.tokens, engine=case.engine, **sizes) as engine,
        ep.Buffer(max_tokens_per_rank=case.few_tokens, engine=case.engine, **sizes) as decode,
        torch.no_grad(),
    ):
        yield rank_layout(buffer, engine, case, rank, device) | low_latency(buffer, decode, case, rank, device)
        engine.check()
        decode.check()
    buffer.destroy()


def rank_layout(buffer: Buffer, engine: ep.Buffer, case: Case, rank: int, device: torch.device) -> dict[str, Pair]:
    x, idx, weights = inputs_of(rank, device, case.tokens, case.hidden, case.experts, case.topk)
    pair = tuple(ep.quantize(x))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, case.experts)
    layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
    most = case.tokens * dist.get_world_size()

    def theirs(x: Tensor | tuple[Tensor, Tensor], **options: int):
        return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout, **options)

    def ours(x: Tensor | tuple[Tensor, Tensor], **options: int):
        return engine.dispatch(x, idx, weights, layout="rank", **options)

    def agreeing() -> object:
        given = os.environ.pop(MAX_TOKENS)
        try:
            return theirs(x)
        finally:
            os.environ[MAX_TOKENS] = given

    recv_x, _, recv_weights, _, handle, _ = theirs(x, num_worst_tokens=most)
    own = ours(x, max_recv_rows=most).handle
    return {
        "layout": Pair(lambda: buffer.get_dispatch_layout(idx, case.experts), None),
        "dispatch, host waits": Pair(lambda: theirs(x), lambda: ours(x), True),
        "dispatch, ranks agree": Pair(agreeing, lambda: ours(x), True),
        "dispatch": Pair(lambda: theirs(x, num_worst_tokens=most), lambda: ours(x, max_recv_rows=most)),
        "dispatch FP8, host waits": Pair(lambda: theirs(pair), lambda: ours(pair), True),
        "dispatch FP8": Pair(lambda: theirs(pair, num_worst_tokens=most), lambda: ours(pair, max_recv_rows=most)),
        "cached dispatch": Pair(lambda: buffer.dispatch(x, handle=handle), lambda: engine.dispatch(x, handle=own)),
        "combine": Pair(lambda: buffer.combine(recv_x, handle), lambda: engine.combine(recv_x, own)),
        "combine with weights": Pair(
            lambda: buffer.combine(recv_x, handle, recv_weights),
            lambda: engine.combine(recv_x, own, topk_weights=recv_weights),
        ),
    }


def low_latency(buffer: Buffer, decode: ep.Buffer, case: Case, rank: int, device: torch.device) -> dict[str, Pair]:
    x, idx, weights = inputs_of(rank, device, case.few_tokens, case.hidden, case.experts, case.topk)

    def theirs(use_fp8: bool, hook: bool = False):
        return buffer.low_latency_dispatch(
            x, idx, case.few_tokens, case.experts, use_fp8=use_fp8, return_recv_hook=hook
        )

    def ours(quantize: str | None, hook: bool = False):
        return decode.dispatch(x, idx, layout="decode", quantize=quantize, return_hook=hook)

    recv_x, _, handle, *_ = theirs(False)
    own, sums = ours(None).handle, torch.empty_like(x)

    def combine(hook: bool = False):
        return buffer.low_latency_combine(recv_x, idx, weights, handle, out=sums, return_recv_hook=hook)

    def own_combine(hook: bool = False):
        return decode.combine(recv_x, own, weights=weights, out=sums, return_hook=hook)

    e4m3 = "e4m3_1x128"
    return {
        "low-latency dispatch FP8": Pair(lambda: theirs(True), lambda: ours(e4m3)),
        "low-latency dispatch FP8, hook": Pair(lambda: theirs(True, True)[-1](), lambda: ours(e4m3, True).hook()),
        "low-latency dispatch": Pair(lambda: theirs(False), lambda: ours(None)),
        "low-latency combine": Pair(combine, own_combine),
        "low-latency combine, hook": Pair(lambda: combine(True)[-1](), lambda: own_combine(True).hook()),
    }


def time_in_turn(clock: HostClock | DeviceClock, name: str, calls: dict[str, Call], rounds: int, found: Found) -> None:
    """Find the times of one operation on the device and on the host. Collective."""
    device: dict[str, list[float]] = {side: [] for side in calls}
    host: dict[str, list[float]] = {side: [] for side in calls}
    for turn in range(rounds):
        for side in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
            spent: list[float] = []
            device[side] += clock.seconds(timed(calls[side], spent), TURNS, WARMUP if turn == 0 else 0)
            host[side] += spent[-TURNS:]
    for side in calls:
        found.device[name, side] = median_us(device[side])
        found.host[name, side] = median_us(host[side])


def timed(call: Call, spent: list[float]) -> Call:
    def run() -> None:
        begin = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begin)

    return run


def time_graphs(clock: DeviceClock, pairs: dict[str, Pair], rounds: int, found: Found) -> None:
    for name, pair in pairs.items():
        for side in SIDES:
            call = None if pair.waits else getattr(pair, side)
            if call is not None:
                replay = attempt(f"{side}, {name}, CUDA graph", found.notes, lambda call=call: clock.capture(call))
                if replay is None:
                    return  # a capture that has failed may leave the device unusable
                found.graph[name, side] = median_us(clock.seconds(replay, TURNS * rounds, WARMUP))


def median_us(seconds: list[float]) -> float:
    return round(statistics.median(largest_over_ranks(seconds)) * 1e6, 2)


def lines(case: Case, ranks: int, found: Found) -> list[str]:
    sizes = f"{ranks} ranks, engine {case.engine}, {case.tokens} tokens (low latency: {case.few_tokens})"
    sizes += f", hidden {case.hidden}, {case.experts} experts, top-{case.topk}, {case.sms} SMs"
    columns = "".join(f"{f'{kind}: deep_ep':>18}{'engine':>10}{'ratio':>8}" for kind in Found._fields[:3])
    shown = [f"{sizes}; microseconds", f"{'operation':32}{columns}"]
    for name in dict.fromkeys(name for name, _ in found.device):
        row = f"{name:32}"
        for kind in Found._fields[:3]:
            theirs, own = (getattr(found, kind).get((name, side)) for side in SIDES)
            row += f"{'' if theirs is None else f'{theirs:.1f}':>18}{'' if own is None else f'{own:.1f}':>10}"
            row += f"{'' if theirs is None or own is None else f'{theirs / own:.3f}':>8}"
        shown.append(row.rstrip())
    return shown + found.notes


if __name__ == "__main__":
    main()
