#!/usr/bin/env bash
# DeepSeek's EPLB as SGLang 0.5.23 has it (eplb_algorithms/deepseek.py), with PyTorch 2.13.0, on a CPU.
#
# Seen: 64 experts and 8 replicas more on 8 GPUs. In a third of the layers a GPU has two replicas of the same expert, and
# with 64 replicas more in nearly all of them. Three of 100 experts with replicas have all of them on one GPU. Replicas are
# packed by their load, and which expert they are of is not looked at. A packing by the same loads that never takes an
# expert twice is as balanced (1.007 times the mean for the busiest GPU, both).
#
# A good guess: replicas of an expert are on different GPUs, as the second one on a GPU adds nothing: the GPU multiplies
# the same rows by the same weights. It matters because replicas are paid for: by memory, and by the copies of a
# rebalancing. And whoever counts on a second replica when a GPU is lost may have lost it on the same GPU.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/pip" install --quiet --no-deps sglang==0.5.23  # one file of it, which needs PyTorch alone

cat > "$folder/replicas.py" <<'PYTHON'
import importlib.util
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import torch

LAYERS, EXPERTS, GPUS = 200, 64, 8
sglang = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
spec = importlib.util.spec_from_file_location("eplb", sglang / "srt/eplb/eplb_algorithms/deepseek.py")
eplb = importlib.util.module_from_spec(spec)
spec.loader.exec_module(eplb)


def busiest_without_twins(loads, counts, slots):
    """Pack the replicas of a layer by load, no expert twice on a GPU. Return the busiest GPU's load over the mean."""
    replicas = [(load / count, expert) for expert, (load, count) in enumerate(zip(loads, counts)) for _ in range(count)]
    gpus = [[0.0, set()] for _ in range(GPUS)]
    for load, expert in sorted(replicas, reverse=True):
        gpu = min((g for g in gpus if len(g[1]) < slots and expert not in g[1]), key=lambda g: g[0])
        gpu[0] += load
        gpu[1].add(expert)
    return max(load for load, _ in gpus) * GPUS / sum(loads)


def figures(num_physical):
    """Return the shares of layers and of replicated experts with the fault, and the busiest GPU's load over the mean."""
    torch.manual_seed(0)
    loads = torch.exp(0.7 * torch.randn(LAYERS, EXPERTS))
    placed, _, counts = eplb.rebalance_experts(loads, num_physical, 1, 1, GPUS, enable_hierarchical=False)
    layers_with_twins, on_one_gpu = 0, []
    for of_layer in placed.view(LAYERS, GPUS, -1).tolist():
        gpus_of = defaultdict(list)
        for gpu, experts in enumerate(of_layer):
            for expert in experts:
                gpus_of[expert].append(gpu)
        layers_with_twins += any(len(set(gpus)) < len(gpus) for gpus in gpus_of.values())
        on_one_gpu += [len(set(gpus)) == 1 for gpus in gpus_of.values() if len(gpus) > 1]
    of_gpus = (loads / counts).gather(1, placed).view(LAYERS, GPUS, -1).sum(-1)
    busiest = (of_gpus.amax(1) / of_gpus.mean(1)).mean().item()
    return layers_with_twins / LAYERS, sum(on_one_gpu) / len(on_one_gpu), busiest, loads, counts


print(f"SGLang {version('sglang')}, {EXPERTS} experts on {GPUS} GPUs, {LAYERS} layers")
seen = {}
for num_physical in (72, 128):
    layers, experts, busiest, loads, counts = figures(num_physical)
    seen[num_physical] = layers, experts
    print(
        f"  {num_physical:3} places: in {layers:.0%} of the layers a GPU has an expert twice,"
        f" {experts:.0%} of the experts with replicas are on one GPU, busiest GPU {busiest:.4f}"
    )
    if num_physical == 72:
        packed = [busiest_without_twins(*row, num_physical // GPUS) for row in zip(loads.tolist(), counts.tolist())]
        without = sum(packed) / LAYERS
        print(f"      no expert twice on a GPU: busiest GPU {without:.4f}")
        as_balanced = abs(without - busiest) < 1e-3
as_described = as_balanced and seen[72][0] > 0.2 and seen[128][0] > 0.9 and min(seen[72][1], seen[128][1]) > 0.01
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" "$folder/replicas.py"
