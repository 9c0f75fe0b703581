#!/usr/bin/env bash
# PyTorch 2.13.0, FSDP2 (torch.distributed.fsdp.fully_shard) on a mesh of one rank.
#
# Seen: with module.set_gradient_divide_factor(4) and module.set_force_sum_reduction_for_comms(True) the gradient is
# divided by 16. With the factor alone it is divided by 4, and on a mesh of two ranks by 4 with both. The branch for one
# rank, which has nothing to reduce, divides by the factor, and "force sum" has made the factor one to divide by after the
# reduction too.
#
# A good guess: both settings say how to reduce, so the gradient is sum / 4 whatever the size of the mesh. It matters
# where experts or tensors are sharded over a mesh that has one rank in some jobs: the gradient is silently too small.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0

cat > "$folder/one_rank.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FACTOR = 4.0


def gradients(rank, num_ranks, port, seen):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    for force_sum in (False, True):
        if num_ranks > 1 and not force_sum:
            continue  # gloo cannot multiply and sum in one operation
        module = nn.Linear(2, 2, bias=False)
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(FACTOR)
        module.set_force_sum_reduction_for_comms(force_sum)
        module(torch.full((1, 2), 16.0)).sum().backward()
        gradient = module.weight.grad.full_tensor()[0, 0].item()
        if rank == 0:
            seen[num_ranks, force_sum] = 16.0 * num_ranks / gradient
    dist.destroy_process_group()


if __name__ == "__main__":
    with mp.Manager() as manager:
        seen = manager.dict()
        for num_ranks, port in ((1, 29741), (2, 29742)):
            mp.spawn(gradients, (num_ranks, port, seen), nprocs=num_ranks)
        seen = dict(seen)
    print(f"PyTorch {torch.__version__}, set_gradient_divide_factor({FACTOR:g})")
    for (num_ranks, force_sum), divisor in sorted(seen.items()):
        print(f"  ranks {num_ranks}, force sum {force_sum!s:5}: the sum of the gradients is divided by {divisor:g}")
    as_described = seen == {(1, False): 4.0, (1, True): 16.0, (2, True): 4.0}
    print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
    sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/one_rank.py"
