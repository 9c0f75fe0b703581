"""Times dispatch and combine against the all-to-all that a user writes otherwise, in the same run and routing.

    python -m ep_dispatcher.bench                      # starts 4 ranks here: one node, then 2 virtual nodes
    torchrun --nproc-per-node 4 -m ep_dispatcher.bench # uses the ranks that torchrun started
    python -m ep_dispatcher.bench --chart FILE.json    # draws the chart of an earlier run again

Prints a table, writes JSON with every single time and a chart. The JSON's fields are explained in ``bench_report.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import bench_report
from ep_dispatcher.bench_baseline import AllToAllBaseline
from ep_dispatcher.testing import ROUTINGS, make_routing, run_ranks

DTYPES = ("bfloat16", "float16", "float32")
OPERATIONS = ("dispatch", "combine", "dispatch+combine", "cached dispatch", "forward+backward")
WIRES = ("between nodes", "inside nodes", "local")


class EngineSide:
    """This package behind the methods that ``AllToAllBaseline`` has too."""

    def __init__(self, buffer, layout: str):
        self.buffer = buffer
        self.layout = layout

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor):
        return self.buffer.dispatch(x, topk_idx, topk_weights, layout=self.layout)

    def dispatch_cached(self, x: Tensor, topk_weights: Tensor, handle):
        return self.buffer.dispatch(x, None, topk_weights, handle=handle)

    def combine(self, y: Tensor, handle) -> Tensor:
        return self.buffer.combine(y, handle).x

    def forward_backward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.detach().requires_grad_()
        topk_weights = topk_weights.detach().requires_grad_()
        out = ep.dispatch(self.buffer, x, topk_idx, topk_weights, layout=self.layout)
        y = ep.combine(self.buffer, identity_experts(out), out.handle)
        torch.autograd.backward([y, out.topk_weights], [x.detach(), out.topk_weights.detach()])
        return y.detach(), x.grad, topk_weights.grad


def identity_experts(received) -> Tensor:
    """Rows as the experts return them; in rank layout the caller sums a row's local experts, which are all the same."""
    topk_idx = getattr(received, "topk_idx", None)
    if topk_idx is None:
        return received.x
    return received.x * (topk_idx >= 0).sum(1, keepdim=True).to(received.x.dtype)


def operations_of(side, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict[str, Callable[[], object]]:
    received = side.dispatch(x, topk_idx, topk_weights)
    y = identity_experts(received)

    def dispatch_combine():
        out = side.dispatch(x, topk_idx, topk_weights)
        return side.combine(out.x, out.handle)

    return {
        "dispatch": lambda: side.dispatch(x, topk_idx, topk_weights),
        "combine": lambda: side.combine(y, received.handle),
        "dispatch+combine": dispatch_combine,
        "cached dispatch": lambda: side.dispatch_cached(x, topk_weights, received.handle),
        "forward+backward": lambda: side.forward_backward(x, topk_idx, topk_weights),
    }


def _time_cpu(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _time_cuda(call: Callable[[], object]) -> float:
    """From the launch to the end of the device's work: host time that a caller cannot hide counts."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def device_and_timer(engine: str) -> tuple[torch.device, Callable[[Callable[[], object]], float]]:
    """The one place of the benchmark that knows engines: where the tensors live and how a call is timed."""
    if engine == "cuda":
        return torch.device("cuda", torch.cuda.current_device()), _time_cuda
    return torch.device("cpu"), _time_cpu


def least_rows(topk_idx: Tensor, rank: int, num_ranks: int, ranks_per_node: int, num_experts: int) -> list[int]:
    """Rows of this rank's tokens that must cross each of ``WIRES`` in a dispatch; a combine is its mirror.

    A token goes once to every other node it needs, to the rank there with the source's local index, and from
    there once to every rank of that node that it needs.
    """
    dst = topk_idx.div(num_experts // num_ranks, rounding_mode="floor")  # "no expert" stays -1
    reached = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool)
    reached.scatter_(1, dst + 1, torch.ones_like(dst, dtype=torch.bool))
    reached = reached[:, 1:]
    node, local_rank = divmod(rank, ranks_per_node)
    nodes = reached.view(-1, num_ranks // ranks_per_node, ranks_per_node).any(2)
    per_rank = reached.sum(0).view(-1, ranks_per_node)
    local = int(per_rank[:, local_rank].sum())
    return [int(nodes.sum() - nodes[:, node].sum()), int(per_rank.sum()) - local, local]


def baseline_rows(send_rows: list[int], rank: int, ranks_per_node: int) -> list[int]:
    own_node = sum(n for dst, n in enumerate(send_rows) if dst // ranks_per_node == rank // ranks_per_node)
    return [sum(send_rows) - own_node, own_node - send_rows[rank], send_rows[rank]]


def counted_bytes(buffer, rank: int, call: Callable[[], object]) -> list[int]:
    """What the buffer's counters say this rank moved over each of ``WIRES`` during a call."""
    before = buffer.counters()
    call()
    after = buffer.counters()

    def moved(name: str) -> list[int]:
        return [b - a for a, b in zip(before[name], after[name], strict=True)]

    pulled, pushed = moved("intra_node_bytes_read"), moved("intra_node_bytes_written")
    inside = [a + b for a, b in zip(pulled, pushed, strict=True)]
    return [sum(moved("inter_node_bytes_sent")), sum(inside) - inside[rank], inside[rank]]


def sum_over_ranks(values: list[int]) -> list[int]:
    total = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(total)
    return total.tolist()


def wire_bytes(sides: dict, config: argparse.Namespace, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict:
    """Bytes of rows over each wire, all ranks together, for a dispatch (known plan, no weights) and for a combine."""
    rank, num_ranks, ranks_per_node = dist.get_rank(), dist.get_world_size(), config.ranks_per_node
    least = least_rows(topk_idx.cpu(), rank, num_ranks, ranks_per_node, config.experts)
    buffer = sides["engine"].buffer
    received = sides["engine"].dispatch(x, topk_idx, topk_weights)
    y = identity_experts(received)
    engine = {
        "dispatch": counted_bytes(buffer, rank, lambda: buffer.dispatch(x, None, None, handle=received.handle)),
        "combine": counted_bytes(buffer, rank, lambda: buffer.combine(y, received.handle)),
    }
    rows = {"least": least}
    if config.baseline:
        rows["baseline"] = baseline_rows(sides["baseline"].plan(topk_idx).send_rows, rank, ranks_per_node)
    row_bytes = x.shape[1] * x.element_size()
    moved = {name: [n * row_bytes for n in per_wire] for name, per_wire in rows.items()}
    return {
        operation: {
            name: dict(zip(WIRES, sum_over_ranks(per_wire), strict=True))
            for name, per_wire in {"least": moved["least"], "engine": engine[operation], **moved}.items()
        }
        for operation in engine
    }


def compare(ours, other, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, layout: str) -> dict:
    """Do both sides give the same? Rows and weights bit by bit, sums within the rounding of the dtype."""
    tolerance = 2 * torch.finfo(x.dtype).eps
    same = True
    if layout == "expert":
        a, b = (side.dispatch(x, topk_idx, topk_weights) for side in (ours, other))
        same = torch.equal(a.x, b.x) and torch.equal(a.topk_weights, b.topk_weights)
    (y, grad_x, grad_weights), expected = (side.forward_backward(x, topk_idx, topk_weights) for side in (ours, other))
    same = same and torch.equal(grad_weights, expected[2])
    worst = 0.0
    for got, want in ((y, expected[0]), (grad_x, expected[1])):
        # With identity experts all addends of a sum are the same, so the relative error is bounded.
        error = (got.float() - want.float()).abs() / want.float().abs().clamp_min(torch.finfo(x.dtype).tiny)
        worst = max(worst, float(error.max()) if error.numel() else 0.0)
    ranks_that_differ, _ = sum_over_ranks([int(not same or not worst <= tolerance), 0])
    worst = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"same": ranks_that_differ == 0, "largest_relative_error": worst.item(), "allowed": tolerance}


def measure_times(sides: dict, config: argparse.Namespace, timer: Callable, *inputs: Tensor) -> dict[str, dict]:
    """ "seconds" and "cpu_seconds" (of the process, all its threads): operation -> side -> [iteration][rank].

    The sides take turns, so that a disturbance meets all of them; the CPU time hardly depends on other processes.
    """
    calls = {name: operations_of(side, *inputs) for name, side in sides.items()}
    results = {"seconds": {}, "cpu_seconds": {}}
    for operation in OPERATIONS:
        mine = {name: [] for name in sides}
        for iteration in range(-config.warmup, config.iters):
            for name in sides:
                dist.barrier()
                cpu_begin = time.process_time()
                seconds = timer(calls[name][operation])
                if iteration >= 0:
                    mine[name].append((seconds, time.process_time() - cpu_begin))
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for i, result in enumerate(results.values()):
            result[operation] = {
                name: [[times[i] for times in ranks] for ranks in zip(*(e[name] for e in everyone))] for name in sides
            }
    return results


def measure_nodes(config: argparse.Namespace) -> dict:
    """One topology: bytes, times and the comparison of results. Collective; every rank returns the same."""
    group, rank = dist.group.WORLD, dist.get_rank()
    device, timer = device_and_timer(config.engine)
    topk_idx, topk_weights = make_routing(config.routing, config.tokens, config.experts, config.topk, seed=rank)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(config.tokens, config.hidden, generator=generator).to(getattr(torch, config.dtype))
    inputs = [tensor.to(device) for tensor in (x, topk_idx, topk_weights)]
    with ep.Buffer(
        group,
        hidden=config.hidden,
        num_experts=config.experts,
        num_topk=config.topk,
        max_tokens_per_rank=config.tokens,
        dtype=x.dtype,
        engine=config.engine,
        ranks_per_node=config.ranks_per_node,
    ) as buffer:
        sides = {"engine": EngineSide(buffer, config.layout)}
        if config.baseline:
            sides["baseline"] = AllToAllBaseline(group, config.experts)
            sides["baseline, fast sum"] = AllToAllBaseline(group, config.experts, fast_sum=True)
        compared = {
            name: compare(sides["engine"], side, *inputs, config.layout)
            for name, side in sides.items()
            if name != "engine"
        }
        rows = {name: sum_over_ranks([side.dispatch(*inputs).x.shape[0]])[0] for name, side in sides.items()}
        moved = wire_bytes(sides, config, *inputs)
        times = measure_times(sides, config, timer, *inputs)
    return {
        "ranks_per_node": config.ranks_per_node,
        "num_nodes": dist.get_world_size() // config.ranks_per_node,
        "row_bytes": config.hidden * x.element_size(),
        "received_rows": rows,
        "compared": compared,
        "wire_bytes": moved,
        **times,
    }


def measure(rank: int, config: argparse.Namespace) -> list[dict] | None:
    """Every topology of ``config.topologies``, on one rank of an initialised default group; None but on rank 0."""
    results = [measure_nodes(argparse.Namespace(**vars(config), ranks_per_node=n)) for n in config.topologies]
    return results if rank == 0 else None


def parse_args(argv: list[str] | None, world_size: int | None) -> argparse.Namespace:
    """``world_size``: the number of ranks that torchrun started, None without torchrun."""
    parser = argparse.ArgumentParser(prog="python -m ep_dispatcher.bench", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=world_size or 4, help="processes to start; under torchrun the ranks it started")
    add("--ranks-per-node", type=int, nargs="+", help="topologies to measure (default: one node, and two nodes)")
    add("--tokens", type=int, default=1024, help="tokens per rank")
    add("--hidden", type=int, default=1024)
    add("--experts", type=int, default=64, help="experts of all ranks together")
    add("--topk", type=int, default=8)
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--routing", choices=ROUTINGS, default="uniform")
    add("--layout", choices=("expert", "rank"), default="expert", help="layout of the received rows")
    add("--iters", type=int, default=20)
    add("--warmup", type=int, default=3)
    add("--threads", type=int, default=1, help="threads per rank")
    add("--engine", choices=("cpu", "cuda"), default="cpu")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON and the chart")
    add("--no-baseline", dest="baseline", action="store_false", help="measure the engine alone")
    add("--chart", type=Path, metavar="FILE.json", help="only draw the chart of this JSON again")
    args = parser.parse_args(argv)

    def refuse(argument: str, given: object, allowed: str) -> None:
        parser.error(f"{argument}: given {given}, allowed {allowed}")

    if args.chart is not None:
        if not args.chart.is_file():
            refuse("--chart", args.chart, "a JSON file that this benchmark wrote")
        return args
    for name in ("ranks", "tokens", "hidden", "experts", "topk", "iters", "threads"):
        if getattr(args, name) < 1:
            refuse(f"--{name}", getattr(args, name), "1 or more")
    if args.warmup < 0:
        refuse("--warmup", args.warmup, "0 or more")
    if world_size is not None and args.ranks != world_size:
        refuse("--ranks", args.ranks, f"the {world_size} ranks that torchrun started")
    if args.experts % args.ranks:
        refuse("--experts", args.experts, f"multiples of the {args.ranks} ranks")
    if args.topk > args.experts:
        refuse("--topk", args.topk, f"at most the {args.experts} experts")
    if args.engine == "cuda" and (world_size is None or not torch.cuda.is_available()):
        refuse("--engine", "cuda", "cpu; cuda needs torchrun and GPUs")
    if args.out.exists() and not args.out.is_dir():
        refuse("--out", args.out, "a folder")
    args.topologies = args.ranks_per_node or default_topologies(args.ranks)
    for n in args.topologies:
        if n < 1 or args.ranks % n:
            refuse("--ranks-per-node", n, f"divisors of the {args.ranks} ranks")
    del args.ranks_per_node
    return args


def default_topologies(num_ranks: int) -> list[int]:
    """Ranks per node: as torchrun started them; of one node also its halves as virtual nodes."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    return [num_ranks, num_ranks // 2] if per_host == num_ranks and num_ranks % 2 == 0 else [per_host]


def main(argv: list[str] | None = None) -> int:
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    args = parse_args(argv, int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
    if args.chart is not None:
        print(f"chart: {bench_report.draw_chart(args.chart)}")
        return 0
    machine = bench_report.describe_machine()  # before the run: its load is not the benchmark's own
    if under_torchrun:
        torch.set_num_threads(args.threads)
        if args.engine == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if args.engine == "cuda" else "gloo")
        results = measure(dist.get_rank(), args)
        dist.destroy_process_group()
    else:
        results = run_ranks(args.ranks, measure, args, threads_per_rank=args.threads, timeout_s=3600.0)[0]
    return 0 if results is None else bench_report.report(args, machine, results)


if __name__ == "__main__":
    sys.exit(main())
