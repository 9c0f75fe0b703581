#!/usr/bin/env bash
# PyTorch 2.13.0, torch.distributed.checkpoint on 2 ranks (gloo): experts of each rank as a plain tensor, with one name.
#
# Seen: save() writes one rank's tensor and drops that of the other, because it takes tensors that are no DTensor for
# replicas. It compares neither values nor shapes, returns, and says nothing. After load() both ranks have the experts of
# rank 0. Where ranks have unequal numbers of experts, save() is content too, and the loss shows when load() raises
# "Size mismatch". As a DTensor with Shard(0), or with the rank in the name, all experts are there.
#
# A good guess: each rank's tensors are kept, as torch.save per rank does, or save() refuses tensors that differ under one
# name. It matters for expert parallelism written by hand, where module.state_dict() on each rank has the same names and
# other experts: the checkpoints look fine until the day that one is needed, and then all experts but one rank's are lost.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat > "$folder/checkpoint.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RANKS = 2


def experts_of(rank, num_experts):
    """Return the weights of a rank's experts [num_experts, 3], which all have the number of the rank."""
    return torch.full((num_experts, 3), float(rank))


def round_trip(state, folder):
    """Save a state and load it into zeros. Return the smallest and the largest number of this rank's experts then."""
    dcp.save(state, checkpoint_id=folder)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    try:
        dcp.load(loaded, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        return "load() raises: " + str(next(iter(error.failures.values()))[0]).partition(" between")[0]
    (experts,) = loaded.values()
    local = experts.to_local() if isinstance(experts, DTensor) else experts
    return sorted(set(local.flatten().tolist()))


def run(rank, folder, seen):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29744", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = DTensor.from_local(experts_of(rank, 2), mesh, [Shard(0)])
    states = {
        "DTensors": {"experts": sharded},
        "plain, the rank in the name": {f"experts.{rank}": experts_of(rank, 2)},
        "plain, one name": {"experts": experts_of(rank, 2)},
        "plain, one name, 2 and 1 experts": {"experts": experts_of(rank, 2 - rank)},
    }
    for number, (name, state) in enumerate(states.items()):
        seen[name, rank] = round_trip(state, f"{folder}/{number}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with mp.Manager() as manager:
        seen = manager.dict()
        mp.spawn(run, (sys.argv[1], seen), nprocs=RANKS)
        seen = dict(seen)
    print(f"PyTorch {torch.__version__.partition('+')[0]}, saved and loaded: rank 0 has zeros, rank 1 ones")
    for name in dict.fromkeys(name for name, _ in seen):
        print(f"  {name:33} rank 0: {seen[name, 0]}, rank 1: {seen[name, 1]}")
    as_described = (
        all(seen[name, rank] == [rank] for name in ("DTensors", "plain, the rank in the name") for rank in range(RANKS))
        and all(seen["plain, one name", rank] == [0] for rank in range(RANKS))
        and all("Size mismatch" in seen["plain, one name, 2 and 1 experts", rank] for rank in range(RANKS))
    )
    print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
    sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/checkpoint.py" "$folder/saved"
