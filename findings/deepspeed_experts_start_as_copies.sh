#!/usr/bin/env bash
# DeepSpeed 0.19.8 with PyTorch 2.13.0, on a CPU: the initial weights of deepspeed.moe.layer.MoE.
#
# Seen: all experts of a layer have the same weights, bit for bit. The layer makes deep copies of the module that it gets,
# and no initialisation follows. With k=2 the router's gradient is then 0 but for rounding in the first step, because the
# weights of two equal experts add up to 1. With other weights in each expert it is as large as that of the experts.
#
# A good guess: the module is a pattern, and each expert has random weights of its own, as in Megatron-core, torchtitan and
# transformers. It matters for training from scratch: experts begin to differ only by the tokens that they happen to get,
# and the router has nothing to tell them apart by at first. nn.TransformerEncoder copies its layers too, but its
# documentation says so.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 deepspeed==0.19.8 numpy setuptools

cat > "$folder/initial.py" <<'PYTHON'
import os
import sys

import torch

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29745")
import deepspeed
import torch.distributed as dist
from deepspeed.moe.layer import MoE

HIDDEN, EXPERTS, TOKENS = 16, 8, 256
dist.init_process_group("gloo")
deepspeed.init_distributed("gloo")


def look(k, are_drawn_again):
    """Return whether all experts have the same weights, and the router's gradient over that of the experts."""
    torch.manual_seed(0)
    expert = torch.nn.Sequential(torch.nn.Linear(HIDDEN, 32), torch.nn.ReLU(), torch.nn.Linear(32, HIDDEN))
    layer = MoE(
        HIDDEN, expert, num_experts=EXPERTS, k=k, use_rts=False, top2_2nd_expert_sampling=False, drop_tokens=False
    )
    layer.set_deepspeed_parallelism()
    if are_drawn_again:
        for module in layer.deepspeed_moe.experts.modules():
            if isinstance(module, torch.nn.Linear):
                module.reset_parameters()
    of_experts = [list(one.parameters()) for one in layer.deepspeed_moe.experts.deepspeed_experts]
    are_equal = all(torch.equal(a, b) for one in of_experts for a, b in zip(one, of_experts[0]))
    y = layer(torch.randn(1, TOKENS, HIDDEN))[0]
    y.backward(torch.randn_like(y))
    router = layer.deepspeed_moe.gate.wg.weight.grad.norm()
    experts = torch.cat([p.grad.flatten() for one in of_experts for p in one if p.grad is not None]).norm()
    return are_equal, (router / experts).item()


seen = {(k, are_drawn_again): look(k, are_drawn_again) for k in (1, 2) for are_drawn_again in (False, True)}
print(
    f"DeepSpeed {deepspeed.__version__}, PyTorch {torch.__version__.partition('+')[0]}, {EXPERTS} experts, first step"
)
for (k, are_drawn_again), (are_equal, ratio) in seen.items():
    how = "drawn again" if are_drawn_again else "as they are"
    print(f"  k={k}, experts {how}: the same weights {are_equal!s:5}, gradient of the router / experts {ratio:.1e}")
are_equal = [equal for equal, _ in seen.values()]
ratios = [ratio for _, ratio in seen.values()]
as_described = are_equal == [True, False, True, False] and ratios[2] < 1e-5 < 1e-2 < min(
    ratios[0], ratios[1], ratios[3]
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

# DeepSpeed prints its own lines first.
if ! "$folder/venv/bin/python" -W ignore "$folder/initial.py" > "$folder/out" 2> "$folder/errors"; then
    cat "$folder/errors" "$folder/out"
    exit 1
fi
sed -n '/^DeepSpeed 0/,$p' "$folder/out"
