#!/usr/bin/env bash
# DeepSpeed 0.19.8 with PyTorch 2.13.0, on a CPU: the argument used_token of deepspeed.moe.layer.MoE, "mask only used tokens".
#
# Seen: with k=1 unused tokens reach no expert: their rows of the output are 0, and the counts leave them out. With k=2 and
# more the argument is accepted and nothing reads it. Unused tokens are computed and counted, and take the room of experts:
# where the first half of 512 tokens is padding, all of it the same token, real tokens keep 81 % of their choices with k=2
# and 72 % with k=4, with the mask as without. With k=1 they keep 88 % without the mask and all of them with it.
#
# A good guess: the mask means the same for every k, or is refused where it is not implemented. It matters for padded
# batches: whoever moves from k=1 to k=2 keeps the argument, and from then on padding drops real tokens, and the counts that
# are logged are those of padding.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 deepspeed==0.19.8 numpy setuptools

cat > "$folder/unused.py" <<'PYTHON'
import os
import sys

import torch

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29746")
import deepspeed
import torch.distributed as dist
from deepspeed.moe.layer import MoE

HIDDEN, EXPERTS, TOKENS, UNUSED = 16, 8, 512, 256
dist.init_process_group("gloo")
deepspeed.init_distributed("gloo")


@torch.no_grad()
def look(k, masked):
    """Return the rows that experts count, the unused tokens with an output, and the kept share of used tokens' choices."""
    torch.manual_seed(0)
    layer = MoE(
        HIDDEN, torch.nn.Linear(HIDDEN, HIDDEN), num_experts=EXPERTS, k=k, use_rts=False, top2_2nd_expert_sampling=False
    )
    layer.set_deepspeed_parallelism()
    tokens = torch.randn(1, TOKENS, HIDDEN)
    tokens[:, :UNUSED] = tokens[:, :1]  # padding is the same token again and again
    is_used = torch.ones(TOKENS, dtype=torch.long)
    is_used[:UNUSED] = 0
    output, _, counts = layer(tokens, is_used if masked else None)
    _, _, rows, _ = layer.deepspeed_moe.gate(tokens[0], is_used if masked else None)
    kept = rows[UNUSED:].sum().item() / (k * (TOKENS - UNUSED))
    return counts.sum().item(), output[0, :UNUSED].any(-1).sum().item(), kept


print(
    f"DeepSpeed {deepspeed.__version__}, PyTorch {torch.__version__.partition('+')[0]}, {UNUSED} of {TOKENS} tokens unused"
)
seen = {}
for k in (1, 2, 4):
    for masked in (False, True):
        seen[k, masked] = counts, outputs, kept = look(k, masked)
        print(
            f"  k={k}, {'with' if masked else 'without'} used_token: {counts} rows counted, {outputs} unused tokens with"
            f" an output, used tokens keep {kept:.0%} of their choices"
        )
as_described = (
    seen[1, True][:2] == (TOKENS - UNUSED, 0)
    and seen[1, True][2] > seen[1, False][2]
    and all(seen[k, True] == seen[k, False] and seen[k, True][0] == k * TOKENS for k in (2, 4))
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

# DeepSpeed prints its own lines first.
if ! "$folder/venv/bin/python" -W ignore "$folder/unused.py" > "$folder/out" 2> "$folder/errors"; then
    cat "$folder/errors" "$folder/out"
    exit 1
fi
sed -n '/^DeepSpeed 0/,$p' "$folder/out"
