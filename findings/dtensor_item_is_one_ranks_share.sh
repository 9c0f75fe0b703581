#!/usr/bin/env bash
# PyTorch 2.13.0, DTensor on 2 ranks (gloo): numbers read by .item() from the sum, mean, norm or maximum of a sharded tensor.
#
# Seen: the result of a reduction is a DTensor that still waits for the sum over the ranks, and .item() reads what this rank
# has of it, without a word: 2 and 8 for a sum of 10. float() and int() do the same, and so does .item() after a product
# with 2. Comparisons and full_tensor() reduce first, and clip_grad_norm_ returns the norm of the whole gradient. But
# torch.optim.Adafactor takes its step size from norm().item(), so each rank takes steps of its own: 0.25 and 0.97 times
# the step of the whole tensor here.
#
# A good guess: .item() gives the number of the whole tensor, as every other operator of a DTensor means the whole, or it is
# refused, as .tolist() is. It matters where experts or other parameters are DTensors, as FSDP2 makes them: the logged norm
# of a weight is that of a part, "if norm > 100" and "if norm.item() > 100" decide otherwise, and Adafactor trains each
# shard with a learning rate of its own, so that another number of ranks is another training.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat > "$folder/item.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2
REDUCTIONS = {
    "sum()": lambda t: t.sum(),
    "sum() * 2": lambda t: t.sum() * 2,
    "mean()": lambda t: t.mean(),
    "norm()": lambda t: t.norm(),
    "max()": lambda t: t.max(),
}


def step_of_adafactor(weight, gradient):
    """Return how far one step takes the weight."""
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    torch.optim.Adafactor([parameter], lr=0.1).step()
    moved = parameter.detach() - weight
    return moved.full_tensor() if hasattr(moved, "full_tensor") else moved


def run(rank, seen):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29746", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = torch.tensor([[1.0, 1.0], [4.0, 4.0]])
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    for name, reduction in REDUCTIONS.items():
        result = reduction(sharded)
        seen[name, rank] = [round(x, 3) for x in (result.item(), result.full_tensor().item(), reduction(whole).item())]

    seen["sum() > 9", rank] = bool(sharded.sum() > 9)

    torch.manual_seed(0)
    weight, gradient = torch.randn(2, 8, 8) * torch.tensor([1.0, 4.0])[:, None, None], torch.randn(2, 8, 8)
    moved = step_of_adafactor(*(distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (weight, gradient)))
    expected = step_of_adafactor(weight, gradient)
    seen["Adafactor", rank] = [(a.norm() / b.norm()).item() for a, b in zip(moved, expected)]
    dist.destroy_process_group()


if __name__ == "__main__":
    with mp.Manager() as manager:
        seen = manager.dict()
        mp.spawn(run, (seen,), nprocs=RANKS)
        seen = dict(seen)
    print(f"PyTorch {torch.__version__.partition('+')[0]}, rank 0 has [1, 1] and rank 1 [4, 4]")
    differs = []
    for name in REDUCTIONS:
        (first, full, whole), (second, _, _) = seen[name, 0], seen[name, 1]
        differs.append(first != second and full == whole)
        print(
            f"  {name:9} .item() on rank 0 {first:5}, on rank 1 {second:5}, full_tensor() {full:5}, whole tensor {whole:5}"
        )
    compared = [seen["sum() > 9", rank] for rank in range(RANKS)]
    steps = seen["Adafactor", 0]
    print(f"  sum() > 9 on rank 0 {compared[0]}, on rank 1 {compared[1]}")
    print("  Adafactor's step over that of the whole tensor: rank 0 {:.2f}, rank 1 {:.2f}".format(*steps))
    as_described = all(differs) and all(compared) and steps[0] < 0.5 and abs(steps[1] - 1) > 0.01
    print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
    sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/item.py"
