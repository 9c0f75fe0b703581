"""Times a layer of experts on GPUs: ep.moe_mlp with and without overlap, and NCCL's all-to-all with grouped_mm.

    python benchmarks/moe_mlp.py                                    # a rank per GPU, the cases below: some minutes
    python benchmarks/moe_mlp.py --cases 4096x2048x128x768 --routings uniform --rounds 3 --paths serial nccl
    python benchmarks/moe_mlp.py --cases 512x7168x256x2048 --max-tokens 4096 --sms 16 24
    python benchmarks/moe_mlp.py --ranks-per-node 1 --paths serial parts parts-serial       # virtual nodes
    python benchmarks/moe_mlp.py --ranks 2 --paths nodes serial whole --cases 8192x2048x128x768 4096x7168x256x2048

A case is tokens per rank x hidden x experts x intermediate; top-8, bfloat16. Times are microseconds of one layer in a
CUDA graph of ten, medians over rounds in which all paths take turns, on the slowest rank. Exposed is the time of a path
less that of its GEMMs and activation, alone on all multiprocessors and with their rows in place.

whole takes all tokens in one part, and the combine of its backward runs under the GEMMs of the gradients of weights.
serial runs the same steps one after the other, and nodes does so with an autograd node for each step. parts takes the
tokens in two parts, so that communication of one part runs under the GEMMs of the other; parts-serial runs these two
one after the other. Each of the two parts has as many rows as the fullest part of a rank. The pass "recompute" is a
forward without saved activations and a backward that runs it again, with its plans (ep.recompute_contexts).

NCCL needs a GPU for each rank. Its splits are fixed: its host knows all counts in advance (all_to_all_layer.py).

--ranks-per-node makes virtual nodes. NCCL does not know of them, so compare with it on one node only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from all_to_all_layer import AllToAllLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher import envs
from ep_dispatcher.moe import overlap
from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp
from ep_dispatcher.moe.mlp import run_grouped_nodes
from ep_dispatcher.tools.benchmark.harness import (
    make_parser,
    median_times,
    on_device,
    on_host,
    start_gpu_ranks,
    use_gpu,
)
from ep_dispatcher.tools.benchmark.ranks import most_rows
from ep_dispatcher.tools.testing import make_routing

SHAPES = ["2048x128x768", "7168x256x2048"]
CASES = [f"{tokens}x{shape}" for shape in SHAPES for tokens in (128, 512, 4096)]
USUAL_PATHS = ["serial", "nccl"]
PATHS = dict.fromkeys(["nodes", "serial", "whole", "parts", "parts-serial"], "GEMMs") | {"nccl": "grouped_mm"}
PASSES = ("forward", "forward+backward", "recompute")
TOPK = 8


class Case(NamedTuple):
    tokens: int
    hidden: int
    experts: int
    intermediate: int
    routing: str
    sms: int
    max_tokens: int
    ranks: int
    ranks_per_node: int


class Measured(NamedTuple):
    times: dict[tuple[str, str], float]  # microseconds by pass and path
    ran: dict[tuple[str, str], str]  # how each ran, in words


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    os.environ.setdefault("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")  # or a capture keeps every exchanged row
    if "nccl" in args.paths and args.ranks > torch.cuda.device_count():
        print(f"NCCL left out: {args.ranks} ranks on {torch.cuda.device_count()} GPUs", flush=True)
        args.paths = [path for path in args.paths if path != "nccl"]
    with start_gpu_ranks(args.ranks) as pool:
        for case in cases_of(args):
            ranks = pool.run(measure, case, args.paths, args.rounds, args.nccl_eager)
            times = {key: max(rank.times[key] for rank in ranks) for key in ranks[0].times}
            print("\n".join(lines(case, Measured(times, ranks[0].ran))), flush=True)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, ranks=max(1, torch.cuda.device_count()), rounds=10)
    add = parser.add_argument
    add("--cases", nargs="+", default=CASES, metavar="TOKENSxHIDDENxEXPERTSxINTERMEDIATE", help="sizes")
    add("--routings", nargs="+", default=["uniform", "skewed"], choices=["uniform", "skewed"], help="of all cases")
    add("--paths", nargs="+", choices=PATHS, default=USUAL_PATHS, help="what to time")
    nodes = "virtual nodes of N ranks; None: EP_DISPATCHER_RANKS_PER_NODE, or one node. NCCL does not know them"
    add("--ranks-per-node", type=int, metavar="N", help=nodes)
    add("--sms", type=int, nargs="+", default=[24], help="multiprocessors of a rank")
    add("--max-tokens", type=int, help="tokens per rank of the buffer; None: those of the case")
    add("--nccl-eager", action="store_true", help="time NCCL's path without a CUDA graph")
    args = parser.parse_args(argv)
    if args.ranks_per_node is None:
        args.ranks_per_node = envs.ranks_per_node()
    if args.ranks_per_node is None:
        args.ranks_per_node = args.ranks
    elif args.ranks_per_node < 1 or args.ranks % args.ranks_per_node:
        parser.error(f"--ranks-per-node is {args.ranks_per_node}, but has to be a divisor of the {args.ranks} ranks")
    return args


def cases_of(args: argparse.Namespace) -> list[Case]:
    return [
        Case(*sizes, routing, sms, max(args.max_tokens or 0, sizes[0]), args.ranks, args.ranks_per_node)
        for sizes in (tuple(map(int, case.split("x"))) for case in args.cases)
        for routing in args.routings
        for sms in args.sms
    ]


def measure(rank: int, case: Case, paths: list[str], rounds: int, nccl_eager: bool) -> Measured:
    """Return the median microseconds of each pass of each path on this rank."""
    device = use_gpu(rank)
    idx, weights = (t.to(device) for t in make_routing(case.routing, case.tokens, case.experts, TOPK, seed=rank))
    x, w1, w2 = inputs(case, device)
    sizes = dict(hidden=case.hidden, num_experts=case.experts, num_topk=TOPK, max_tokens_per_rank=case.max_tokens)
    placed = dict(num_sms=case.sms, ranks_per_node=case.ranks_per_node)
    with ep.Buffer(engine="cuda", timeout_s=20, **placed, **sizes) as buffer:
        sides, ran = sides_of(buffer, paths, idx, [x, weights, w1, w2])
        replays, pool = {}, torch.cuda.graph_pool_handle()  # one for all: each backward makes large gradients
        for key, side in sides.items():
            eager = nccl_eager and key[1] in ("nccl", "grouped_mm")
            ran[key] = ran.get(key, "") + ("eager" if eager else "CUDA graph")
            replays[key] = on_host(side) if eager else on_device(side, pool=pool)
        medians = median_times(replays, rounds)
        buffer.check()
        replays.clear()
        sides.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of the graphs: the next case needs the memory
        return Measured(medians, ran)


def inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, w1 and w2 of one rank."""
    local = case.experts // dist.get_world_size()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5

    w1, w2 = normal(local, 2 * case.intermediate, case.hidden), normal(local, case.hidden, case.intermediate)
    return normal(case.tokens, case.hidden), w1, w2


def sides_of(
    buffer: ep.Buffer, paths: list[str], idx: Tensor, given: list[Tensor]
) -> tuple[dict[tuple[str, str], Callable[[], None]], dict[tuple[str, str], str]]:
    """Return the calls to time by pass and path, and what each overlapped call chooses by itself. Collective."""
    x, weights, w1, w2 = given
    out = buffer.dispatch(x, idx, weights)
    assert out.topk_weights is not None
    most = {
        1: most_rows(out),
        2: max(most_rows(buffer.dispatch(*part)) for part in zip(*(overlap.split_tokens(t, 2) for t in (x, idx)))),
    }
    ends = out.tokens_per_expert.cumsum(0).int()

    def layer(path: str, x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        num_parts = 2 if path.startswith("parts") else 1
        if path == "nodes":
            return run_grouped_nodes(buffer, x, idx, weights, Parameters(w1, w2), most[1], 1)
        options = dict(overlap=path in ("parts", "whole"), num_parts=num_parts, max_recv_rows=most[num_parts])
        return ep.moe_mlp(buffer, x, idx, weights, w1, w2, **options)

    def experts(rows: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return grouped_mlp([(rows, weights, ends)], Parameters(w1, w2))[0]

    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {}  # what to run, and its arguments
    ran: dict[tuple[str, str], str] = {}
    for path in paths:
        if path == "nccl":
            plain = AllToAllLayer(idx, buffer.num_local_experts * dist.get_world_size(), nccl_group())
            rows = x.index_select(0, torch.arange(sum(plain.received), device=x.device) % len(x))
            calls[path], calls["grouped_mm"] = (plain, given), (plain.experts, [rows, w1, w2])
            continue
        calls[path] = partial(layer, path), given
        calls["GEMMs"] = experts, [out.x, out.topk_weights, w1, w2]
        if path == "parts":
            chosen = "overlap" if overlap.no_overlap_reason(buffer, num_parts=2) is None else "serial"
            ran |= {(name, path): f"chose {chosen}, " for name in PASSES}
    sides: dict[tuple[str, str], Callable[[], None]] = {}
    for path, (call, arguments) in calls.items():
        once = partial(forward, call, [t.detach() for t in arguments])
        leaves = [t.detach().requires_grad_() for t in arguments]
        runs = once, partial(both, call, leaves), partial(both, partial(recomputed, call), leaves)
        sides |= {(name, path): run for name, run in zip(PASSES, runs, strict=True)}
    return sides, ran


def forward(call: Callable[..., Tensor], given: list[Tensor]) -> None:
    call(*given)


def both(call: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    """Forward, and a backward for every argument. The gradients are dropped at once: they are large."""
    y = call(*leaves)
    torch.autograd.grad(y, leaves, y.detach())


def recomputed(call: Callable[..., Tensor], *given: Tensor) -> Tensor:
    # A CUDA graph has no random states to keep.
    options = dict(use_reentrant=False, preserve_rng_state=False, context_fn=ep.recompute_contexts)
    return checkpoint(call, *given, **options)


@cache
def nccl_group() -> dist.ProcessGroup:
    """Return the group of all ranks with NCCL. Collective the first time."""
    return dist.new_group(backend="nccl")


def nodes(case: Case) -> str:
    """Return the nodes in words."""
    if case.ranks == case.ranks_per_node:
        return f"one node of {case.ranks}"
    return f"{case.ranks // case.ranks_per_node} virtual nodes of {case.ranks_per_node}"


def lines(case: Case, measured: Measured) -> list[str]:
    """The case and its times, a line for each path and pass."""
    sizes = f"{case.tokens} tokens, hidden {case.hidden}, {case.experts} experts, intermediate {case.intermediate}"
    rest = f"{nodes(case)}, {case.routing}, {case.sms} SMs, buffer of {case.max_tokens} tokens"
    shown = [f"{sizes}, {rest}: us"]
    for name in PASSES:
        for path in (path for of, path in measured.times if of == name and path in PATHS):
            us, gemms, how = measured.times[name, path], measured.times[name, PATHS[path]], measured.ran[name, path]
            alone = f"{PATHS[path]} alone{gemms:9.0f}   exposed{us - gemms:9.0f}"
            shown.append(f"  {name:16} {path:26}{us:9.0f}   {alone}   {how}")
    return shown


if __name__ == "__main__":
    main()
