"""Times a layer of experts with a hot rank: as it is, with redundant experts, and with a perfectly balanced router.

    python benchmarks/balance.py                                     # a rank per GPU, the cases below: a few minutes
    python benchmarks/balance.py --cases 4096x7168x128x2048 --popularity trace lognormal:1.0 --json balance.json
    python benchmarks/balance.py --quantize e4m3_1x128_pow2          # float8 experts
    python benchmarks/balance.py --engine cpu --ranks 8 --ranks-per-node 4 --cases 512x256x32x256 --rounds 3

A case is tokens per rank x hidden x experts x intermediate; top-8, bfloat16 (on CPUs float32, without ``--quantize``).
``--popularity`` says how experts are chosen:

    trace          choices of a router that was trained without a balance loss (routing_trace.py), with its experts
                   numbered anew so that the fullest rank has --fullest times the mean
    lognormal:S    experts are S times a normal number apart, in the logarithm of their popularity; numbered likewise
    trace:as-drawn, lognormal:S:as-drawn   as they come
    balanced       the same number of rows for every expert

Sides take turns, each in a CUDA graph (on CPUs one call after the other); figures are medians of the slowest rank:

    today      a buffer without redundant experts
    copies     one with --redundant experts per rank
    balanced   a buffer without, whose router is perfectly balanced
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy
import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.argument_types import QuantizeBlocks
from ep_dispatcher.tools.benchmark.harness import (
    make_parser,
    median_times,
    number,
    on_device,
    on_host,
    start_gpu_ranks,
    use_gpu,
)
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json
from ep_dispatcher.tools.benchmark.ranks import largest_of
from ep_dispatcher.tools.testing import RankPool

CASES = ["4096x7168x128x2048", "8192x2048x128x768"]
TOPK, SEED = 8, 11
TRACE = Path(__file__).parent / "results" / "routing-trace.npz"
PASSES = ("forward", "forward+backward")
NODE_COUNTERS = ("inter_node_bytes_sent", "inter_node_list_bytes_sent")


class Case(NamedTuple):
    tokens: int
    hidden: int
    experts: int
    intermediate: int
    popularity: str
    fullest: float
    redundant: int
    ranks: int
    ranks_per_node: int
    engine: str
    quantize: QuantizeBlocks | None = None


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.engine == "cuda":
        pool = start_gpu_ranks(args.ranks)
    else:
        pool = RankPool(args.ranks, timeout_s=600.0)
    found = []
    with pool:
        for sizes in args.cases:
            for popularity in args.popularity:
                case = Case(
                    *map(int, sizes.split("x")),
                    popularity=popularity,
                    fullest=args.fullest,
                    redundant=args.redundant,
                    ranks=args.ranks,
                    ranks_per_node=args.ranks_per_node or args.ranks,
                    engine=args.engine,
                    quantize=args.quantize,
                )
                found.append(report(case, pool.run(measure, case, args.rounds)))
    if args.json:
        args.json.write_text(to_json(dict(machine=describe_machine(), rounds=args.rounds, cases=found)))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, ranks=max(1, torch.cuda.device_count()), rounds=10, redundant=1)
    add = parser.add_argument
    add(
        "--engine",
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="of the buffer",
    )
    add("--cases", nargs="+", default=CASES, metavar="TOKENSxHIDDENxEXPERTSxINTERMEDIATE", help="sizes")
    add("--popularity", nargs="+", default=["trace", "lognormal:1.0", "balanced"], help="of experts")
    add("--fullest", type=number(float, 1), default=1.6, help="rows of the fullest rank over the mean")
    add("--quantize", choices=get_args(QuantizeBlocks), help="rows and experts in float8, as in ep.moe_mlp")
    add("--ranks-per-node", type=number(int, 1), help="virtual nodes of N ranks; None: one node")
    add("--json", type=Path, help="write the figures there")
    return parser.parse_args(argv)


# ---- routings -------------------------------------------------------------------------------------------------------


def choices_of(case: Case, rank: int) -> Tensor:
    """Return int64 [tokens, TOPK] of a rank, the experts numbered as the case says."""
    if case.popularity == "balanced":
        # A token's experts are far apart, so that it goes to as many ranks as with other routings.
        token, k = torch.arange(case.tokens)[:, None] + rank, torch.arange(TOPK)
        return (token + k * (case.experts // TOPK)) % case.experts
    kind, *rest = case.popularity.split(":")
    if kind == "trace":
        trace = torch.from_numpy(numpy.load(TRACE)["topk_idx"]).long()  # of all ranks, one after the other
        if trace.shape[1] != TOPK or int(trace.max()) >= case.experts:
            raise SystemExit(f"the trace has top-{trace.shape[1]} of {int(trace.max()) + 1} experts or more")
        everyone = [trace.roll(-r * case.tokens, 0).repeat(-(-case.tokens // len(trace)), 1) for r in range(case.ranks)]
    elif kind == "lognormal":
        logits = float(rest[0]) * torch.randn(case.experts, generator=_generator(SEED), dtype=torch.float64)
        everyone = [draw(logits, case.tokens, 1000 + r) for r in range(case.ranks)]
    else:
        raise SystemExit(f"--popularity is {case.popularity!r}, but has to be trace, lognormal:S or balanced")
    everyone = [chosen[: case.tokens] for chosen in everyone]
    if rest[-1:] == ["as-drawn"]:
        return everyone[rank]
    return number_anew(torch.cat(everyone), case)[everyone[rank]]


def draw(logits: Tensor, num_tokens: int, seed: int) -> Tensor:
    """Return the choices of tokens, each of TOPK different experts, drawn in proportion to exp(logits)."""
    noise = torch.rand(num_tokens, len(logits), generator=_generator(seed), dtype=torch.float64)
    return (logits - (-noise.log()).log()).topk(TOPK, dim=1).indices


def number_anew(chosen: Tensor, case: Case) -> Tensor:
    """Return a new number for each expert, so that hot ones share rank 0, which has about `fullest` times the mean.

    chosen: of all ranks. Rank 0 takes so many of the hottest experts, and beside them the coldest ones, that its share
    is nearest to that. The rest are dealt out.
    """
    rows = torch.bincount(chosen.flatten(), minlength=case.experts)
    order = rows.argsort(descending=True, stable=True).tolist()
    local, wanted = case.experts // case.ranks, case.fullest * int(rows.sum()) / case.ranks

    def of_rank_0(num_hot: int) -> list[int]:
        return order[:num_hot] + order[len(order) - (local - num_hot) :]

    hot = min((of_rank_0(number) for number in range(local + 1)), key=lambda one: abs(int(rows[one].sum()) - wanted))
    rest = [expert for expert in order if expert not in hot]
    ranks: list[list[int]] = [hot, *([] for _ in range(case.ranks - 1))]
    for i, expert in enumerate(rest):  # there and back again, so that every rank gets as much
        lap, place = divmod(i, case.ranks - 1)
        ranks[1 + (place if lap % 2 == 0 else case.ranks - 2 - place)].append(expert)
    new = torch.empty(case.experts, dtype=torch.int64)
    new[torch.tensor([expert for of_rank in ranks for expert in of_rank])] = torch.arange(case.experts)
    return new


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- measuring ------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    times: dict[tuple[str, str], float]  # microseconds by pass and side
    balance: dict[str, float]
    rows: dict[str, int]  # of the fullest rank, by side
    node_bytes: dict[str, tuple[int, int]]  # sent_to_nodes of a forward and backward, by side
    slot_bytes: int


def measure(rank: int, case: Case, rounds: int) -> Measured:
    """Return the median microseconds of each pass of each side on this rank."""
    on_gpu = case.engine == "cuda"
    device = use_gpu(rank) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu or case.quantize else torch.float32
    local = case.experts // case.ranks

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype) / shape[-1] ** 0.5

    given = [normal(case.tokens, case.hidden), torch.rand(case.tokens, TOPK, device=device)]
    given += [normal(local, 2 * case.intermediate, case.hidden), normal(local, case.hidden, case.intermediate)]
    skewed = choices_of(case, rank).to(device)
    even = choices_of(case._replace(popularity="balanced"), rank).to(device)
    sizes = dict(hidden=case.hidden, num_experts=case.experts, num_topk=TOPK, max_tokens_per_rank=case.tokens)
    options = dict(engine=case.engine, dtype=dtype, timeout_s=60, ranks_per_node=case.ranks_per_node)
    sides, rows, node_bytes = {}, {}, {}
    with (
        ep.Buffer(**sizes, **options) as plain,
        ep.Buffer(**sizes, **options, redundant_experts_per_rank=case.redundant) as redundant,
    ):
        for name, buffer, idx in (("today", plain, skewed), ("copies", redundant, skewed), ("balanced", plain, even)):
            ep.moe_mlp(buffer, given[0], idx, *given[1:], quantize=case.quantize)  # makes the slots
            rows[name] = fullest_rows(buffer, idx)
            for pass_name in PASSES:
                options = dict(max_recv_rows=rows[name], quantize=case.quantize)
                run = partial(layer, pass_name, buffer, idx, options, given)
                sides[pass_name, name] = run
            node_bytes[name] = sent_to_nodes(buffer, sides[PASSES[-1], name])
        redundant.check()
        plan = redundant.balancer().balance(skewed).plan  # stats() has it too, but would add to the times
        (before, after), mean = plan.rows.amax(1).tolist(), float(plan.rows[0].double().mean())
        num_copies = int((plan.copies[..., 0] >= 0).sum())
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        replays = {key: on_device(run, pool=pool) if on_gpu else on_host(run, 1) for key, run in sides.items()}
        medians = median_times(replays, rounds)
        for buffer in (plain, redundant):
            buffer.check()
        slots = redundant.balancer().slot_bytes
        replays.clear()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    balance = dict(before=before / mean, after=after / mean, copies=num_copies)
    return Measured(medians, balance, rows, node_bytes, slots)


def fullest_rows(buffer: ep.Buffer, idx: Tensor) -> int:
    """Return the rows of the fullest rank, as max_recv_rows. Collective."""
    if buffer.redundant_experts_per_rank:
        return int(buffer.balancer().balance(idx).plan.rows[1].max())
    out = buffer.plan(idx)
    assert out.rows_on_host is not None
    return largest_of(int(out.rows_on_host.sum()))


def sent_to_nodes(buffer: ep.Buffer, run: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that this rank sends to other nodes in one run: of rows and sums, and of counts and lists.

    With redundant experts the counts of all ranks are among the rows.
    """

    def sent() -> Tensor:
        counters = buffer.counters()
        return torch.tensor([sum(counters[name]) for name in NODE_COUNTERS])

    before = sent()
    run()
    rows, lists = (sent() - before).tolist()
    return rows, lists


def layer(pass_name: str, buffer: ep.Buffer, idx: Tensor, options: dict[str, Any], given: list[Tensor]) -> None:
    """Run one pass with options of ep.moe_mlp. Gradients are dropped at once: they are large."""
    x, weights, w1, w2 = given
    if pass_name == "forward":
        ep.moe_mlp(buffer, x, idx, weights, w1, w2, **options)
        return
    leaves = [t.detach().requires_grad_() for t in given]
    y = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], **options)
    torch.autograd.grad(y, leaves, y.detach())


def report(case: Case, ranks: list[Measured]) -> dict[str, object]:
    """Print one case. Return it for the JSON."""
    slowest = {key: max(rank.times[key] for rank in ranks) for key in ranks[0].times}
    balance, rows = ranks[0].balance, ranks[0].rows
    node_bytes = {side: [sum(sent) for sent in zip(*(rank.node_bytes[side] for rank in ranks))] for side in rows}
    nodes = f"{case.ranks // case.ranks_per_node} x {case.ranks_per_node}"
    print(
        f"\n{case.tokens} x {case.hidden} x {case.intermediate}, top-{TOPK} of {case.experts}, {case.popularity}, "
        f"{nodes} ranks, {case.engine}{', float8' if case.quantize else ''}: max/mean {balance['before']:.3f} -> "
        f"{balance['after']:.3f} with {balance['copies']:.1f} copies, slots of {ranks[0].slot_bytes / 1e9:.2f} GB",
        flush=True,
    )
    for name in PASSES:
        today, copies, even = (slowest[name, side] for side in ("today", "copies", "balanced"))
        print(
            f"  {name:17} today {today:9.0f}  copies {copies:9.0f} = {copies / today:.3f} of today  "
            f"balanced {even:9.0f}: copies take {copies / even:.3f} of it",
            flush=True,
        )
    for what, today, copies in zip(("rows", "lists"), node_bytes["today"], node_bytes["copies"]):
        print(f"  {what} between nodes: today {today / 1e6:.3f} MB, copies {copies / 1e6:.3f} MB", flush=True)
    return dict(
        case=case._asdict(),
        microseconds={f"{name}, {side}": time for (name, side), time in slowest.items()},
        balance=balance,
        fullest_rows=rows,
        node_bytes=dict(of=["rows and sums", "counts and lists"], **node_bytes),
        slot_bytes=ranks[0].slot_bytes,
    )


if __name__ == "__main__":
    main()
