"""Times the host in each of Megatron's six dispatcher steps, until it has launched everything.

    python benchmarks/host_time.py                                     # one rank on one GPU
    torchrun --nproc-per-node 2 benchmarks/host_time.py --tokens 256   # a rank per GPU

The GPU is idle before each pass, and there are no experts. So the time is that of the host, with its wait for counts.
It prints median and fastest tenth on rank 0, in microseconds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ep_dispatcher.tools.benchmark import megatron as benchmark
from ep_dispatcher.tools.benchmark.cases import inputs_of
from ep_dispatcher.tools.benchmark.harness import make_parser, use_gpu

STEPS = ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess", "token_combine", "combine_postprocess")
WARMUP = 50


def main() -> None:
    args = make_parser(__doc__, tokens=256, hidden=2048, experts=128, topk=8, sms=24, passes=1000).parse_args()
    os.environ.setdefault("EP_DISPATCHER_MAX_TOKENS_PER_RANK", str(args.tokens))
    for name, value in dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=29531).items():
        os.environ.setdefault(name, str(value))
    use_gpu(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    settings = dict(hidden=args.hidden, num_experts=args.experts, num_topk=args.topk, num_sms=args.sms)
    with benchmark.dispatchers(dist.group.WORLD, dtype=torch.bfloat16, **settings) as made:
        measure(made.ours, args)
    dist.destroy_process_group()


def measure(six: benchmark.SixSteps, args: argparse.Namespace) -> None:
    device, sizes = torch.device("cuda"), (args.tokens, args.hidden, args.experts, args.topk)
    given = benchmark.as_routed(*inputs_of(dist.get_rank(), device, *sizes), args.experts)
    x, routing_map, probs = given[0].requires_grad_(), given[1], given[2].requires_grad_()
    gradients = tuple(torch.ones_like(t) for t in six.forward(x, routing_map, probs))
    forward, backward = [], []
    run = partial(six.forward, x, routing_map, probs)
    alone = [timed(run)[0] for _ in range(args.passes)]
    for _ in range(args.passes):
        seconds, outputs = timed(run)
        forward.append(seconds)
        backward.append(timed(partial(torch.autograd.backward, outputs, gradients))[0])
    steps = [by_step(six.dispatcher, x, routing_map, probs) for _ in range(args.passes)]
    if dist.get_rank() == 0:
        passes = {"nothing but forward": alone, "forward, with backwards": forward, "backward": backward}
        for name, times in {**passes, **{f"  {step}": times for step, times in zip(STEPS, zip(*steps))}}.items():
            print(f"{name:32}{shown(times)}")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Time one call on the host, behind an idle GPU. Return its result too: the end of its graph is no part of it."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def by_step(dispatcher, x: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> list[float]:
    """Time every step of one forward pass on the host."""
    torch.cuda.synchronize()
    times, given = [time.perf_counter()], (x, routing_map, probs)
    kept = []  # until the end: a graph that is dropped is no part of a step
    for step in STEPS:
        found = getattr(dispatcher, step)(*given)
        times.append(time.perf_counter())
        kept.append(found)
        if step in STEPS[:2]:
            given = found
        else:
            given = (found[0] if isinstance(found, tuple) else found,)
    return [end - begin for begin, end in zip(times, times[1:])]


def shown(seconds) -> str:
    ordered = sorted(list(seconds)[WARMUP:])
    return f"{1e6 * ordered[len(ordered) // 2]:10.1f}{1e6 * ordered[len(ordered) // 10]:10.1f}"


if __name__ == "__main__":
    main()
