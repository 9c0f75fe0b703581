#!/usr/bin/env bash
# PyTorch 2.13.0, torch.amp.GradScaler on 2 ranks (gloo) in float16: a router in DDP, and an expert of each rank's own.
#
# Seen: the expert of rank 1 has a gradient that overflows, once. Rank 1 skips the step and halves its scale, rank 0 takes the
# step. From then on the ranks have different routers, which DDP takes for replicas, and different scales, so that DDP
# averages gradients that were multiplied by two numbers. Nothing is said. With the expert in DDP too, where every rank sees
# the overflow, both skip the step, and keep the same router and scale.
#
# A good guess: ranks skip together, as they do where all gradients go through DDP. It matters for expert parallelism written
# by hand, where experts are tensors that DDP does not know: an overflow is a matter of course with a scaler, which looks for
# the largest scale that works, and each one splits the replicas for the rest of the run.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat > "$folder/overflow.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

RANKS, HIDDEN, STEPS = 2, 8, 3


def train(rank, in_ddp):
    """Train a router and an expert for some steps. Return the sum of the router's weights and the scale after each."""
    torch.manual_seed(0)
    router = DistributedDataParallel(torch.nn.Linear(HIDDEN, HIDDEN))
    expert = torch.nn.Linear(HIDDEN, HIDDEN)
    if in_ddp:
        expert = DistributedDataParallel(expert)
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    for step in range(STEPS):
        tokens = torch.randn(16, HIDDEN)
        with torch.autocast("cpu", torch.float16):
            weights = router(tokens)
            rows = tokens * (1000 if (rank, step) == (1, 1) else 1)  # one batch of large numbers
            loss = expert(rows).float().sum() + (weights.float() ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        total = sum(p.detach().double().sum() for p in router.parameters()).item()
        seen.append((total, scaler.get_scale()))
    return seen


def run(rank, seen):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29747", rank=rank, world_size=RANKS)
    for in_ddp in (False, True):
        seen[in_ddp, rank] = train(rank, in_ddp)
    dist.destroy_process_group()


if __name__ == "__main__":
    with mp.Manager() as manager:
        seen = manager.dict()
        mp.spawn(run, (seen,), nprocs=RANKS)
        seen = dict(seen)
    print(f"PyTorch {torch.__version__.partition('+')[0]}, the expert of rank 1 overflows in step 1")
    same = {}
    for in_ddp in (False, True):
        for step in range(STEPS):
            (one, scale), (other, other_scale) = (seen[in_ddp, rank][step] for rank in range(RANKS))
            same[in_ddp, step] = one == other, scale == other_scale
            print(
                f"  expert {'in DDP' if in_ddp else 'of its own':10}, step {step}: the same router on both ranks"
                f" {one == other!s:5}, scales {scale:.0f} and {other_scale:.0f}"
            )
    skipped = all(seen[True, rank][1][1] == 512 for rank in range(RANKS))
    as_described = (
        skipped
        and all(same[True, step] == (True, True) for step in range(STEPS))
        and [same[False, step] for step in range(STEPS)] == [(True, True), (False, False), (False, False)]
    )
    print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
    sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/overflow.py"
