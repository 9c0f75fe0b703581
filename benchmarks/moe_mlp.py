"""Times ep.moe_mlp with and without overlap, and its GEMMs alone, on GPUs.

    python benchmarks/moe_mlp.py                                    # a rank per GPU, the cases below
    python benchmarks/moe_mlp.py --cases 4096x2048x128x768 --sms 16

A case is tokens per rank x hidden x experts x intermediate; top-8 of uniform routing, bfloat16. Times are microseconds
of one layer in a CUDA graph of ten, medians over rounds in which all sides take turns, on the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from compare_builds import on_device

import ep_dispatcher as ep
from ep_dispatcher import grouped_gemm
from ep_dispatcher.testing import RankPool, make_routing

CASES = ["4096x2048x128x768", "4096x7168x256x2048", "512x7168x256x2048"]
TOPK, ROUNDS = 8, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="TOKENSxHIDDENxEXPERTSxINTERMEDIATE")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--sms", type=int, nargs="+", default=[24])
    args = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    with RankPool(args.ranks, timeout_s=120) as pool:
        for case in args.cases:
            for sms in args.sms:
                ranks = pool.run(measure, sms, *map(int, case.split("x")))
                times = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
                print(f"{case}, {sms} SMs: " + "   ".join(f"{name} {us:.0f}" for name, us in times.items()), flush=True)


def measure(rank: int, sms: int, tokens: int, hidden: int, experts: int, intermediate: int) -> dict[str, float]:
    """Return the median microseconds of each side on this rank."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    local, device = experts // dist.get_world_size(), torch.device("cuda")
    idx, weights = (t.to(device) for t in make_routing("uniform", tokens, experts, TOPK, seed=rank))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5

    x, w1, w2 = normal(tokens, hidden), normal(local, 2 * intermediate, hidden), normal(local, hidden, intermediate)
    sizes = dict(hidden=hidden, num_experts=experts, num_topk=TOPK, max_tokens_per_rank=4096, num_sms=sms)
    with ep.Buffer(engine="cuda", timeout_s=20, **sizes) as buffer:
        out = buffer.dispatch(x, idx, weights.float())
        most = torch.tensor(out.x.shape[0])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        rows, ends = int(most), out.tokens_per_expert.cumsum(0).int()
        leaves = [t.requires_grad_() for t in (x, weights.float(), w1, w2)]
        given, of_y = [t.detach() for t in leaves], torch.randn_like(x)

        def layer(overlap: bool, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return ep.moe_mlp(buffer, x, idx, *others, overlap=overlap, max_recv_rows=rows)

        def gemms() -> None:
            hidden_rows = grouped_gemm.linear(out.x, given[2], ends)
            grouped_gemm.linear(grouped_gemm.weighted_swiglu(hidden_rows, out.topk_weights, ends), given[3], ends)

        sides: dict[str, Callable[[], object]] = {"GEMMs of forward": gemms}
        for name, overlap in (("serial", False), ("overlap", True)):
            sides[f"forward {name}"] = lambda overlap=overlap: layer(overlap, *given)
            sides[f"both {name}"] = lambda overlap=overlap: torch.autograd.grad(layer(overlap, *leaves), leaves, of_y)
        replays = {name: on_device(side) for name, side in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(ROUNDS):
            for name, replay in replays.items():
                dist.barrier()
                times[name].append(replay())
        buffer.check()
        replays.clear()
        return {name: statistics.median(of_side) for name, of_side in times.items()}


if __name__ == "__main__":
    main()
