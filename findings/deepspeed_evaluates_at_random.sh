#!/usr/bin/env bash
# DeepSpeed 0.19.8 with PyTorch 2.13.0, on a CPU: deepspeed.moe.layer.MoE in eval(), with its default arguments.
#
# Seen: the same input twice gives two outputs, without noise or dropout in the model. With k=2 the second expert of a token
# is drawn at random (top2_2nd_expert_sampling, which is on), in an evaluation as in training. With k=1 each expert drops
# tokens beyond its capacity, and which ones is random too (use_rts, which is on). Both flags off, or k=3, give the same
# output each time. noisy_gate_policy, the argument whose name says noise, is off by default and off in eval().
#
# A good guess: eval() makes a layer deterministic, as it does for dropout and for noisy_gate_policy. It matters for
# every validation loss and every generated text, for comparisons of a converted checkpoint with its source, and for a
# dispatcher that is checked against this one: two runs differ, and nothing is broken.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 deepspeed==0.19.8 numpy setuptools

cat > "$folder/twice.py" <<'PYTHON'
import os
import sys

import torch

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29743")
import deepspeed
import torch.distributed as dist
from deepspeed.moe.layer import MoE

HIDDEN, EXPERTS, TOKENS = 16, 8, 256
dist.init_process_group("gloo")
deepspeed.init_distributed("gloo")


def fraction_that_differs(k, **options):
    """Return the fraction of tokens whose output is another one when the layer runs a second time."""
    torch.manual_seed(0)
    layer = MoE(HIDDEN, torch.nn.Linear(HIDDEN, HIDDEN), num_experts=EXPERTS, k=k, **options)
    layer.set_deepspeed_parallelism()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)  # the experts are copies of one, which would hide the choice of another
    layer.eval()
    x = torch.randn(1, TOKENS, HIDDEN)
    with torch.no_grad():
        first, second = layer(x)[0], layer(x)[0]
    return (~torch.isclose(first, second, rtol=1e-4, atol=1e-4)).any(-1).float().mean().item()


cases = {
    "k=1, as it is": dict(k=1),
    "k=1, use_rts=False": dict(k=1, use_rts=False),
    "k=2, as it is": dict(k=2),
    "k=2, all tokens kept": dict(k=2, drop_tokens=False),
    "k=2, top2_2nd_expert_sampling=False": dict(k=2, top2_2nd_expert_sampling=False),
    "k=3, as it is": dict(k=3),
}
seen = {name: fraction_that_differs(**options) for name, options in cases.items()}
print(f"DeepSpeed {deepspeed.__version__}, PyTorch {torch.__version__.partition('+')[0]}, eval(), the same input twice")
for name, fraction in seen.items():
    print(f"  {name:36} {fraction:4.0%} of the tokens differ")
is_random = [fraction > 0.05 for fraction in seen.values()]
as_described = is_random == [True, False, True, True, False, False] and all(f > 0.05 or f == 0 for f in seen.values())
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

# DeepSpeed prints its own lines first.
if ! "$folder/venv/bin/python" -W ignore "$folder/twice.py" > "$folder/out" 2> "$folder/errors"; then
    cat "$folder/errors" "$folder/out"
    exit 1
fi
sed -n '/^DeepSpeed 0/,$p' "$folder/out"
