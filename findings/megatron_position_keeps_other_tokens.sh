#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: moe_utils.apply_router_token_dropping(drop_policy="position").
#
# Seen: an expert that gets more tokens than its capacity does not keep the first ones. With 64 tokens for an expert with
# room for 8 it keeps none of the first 8. The policy is a top-k of the routing map, whose entries are all 1, and
# torch.topk promises no order among equal values. megatron-core 0.19.2 (Python 3.12) does the same.
#
# A good guess: as the documentation of moe_token_drop_policy says, "tokens at the end of each batch will be dropped", so
# an expert keeps its first tokens. It matters to whoever compares two dispatchers under this policy, or resumes a job on
# other hardware: which tokens are dropped is up to the top-k of the device and the size of the batch.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/position.py" <<'PYTHON'
import sys

import megatron.core
import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

print(f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}")
are_the_first = []
for num_tokens, num_experts, factor in ((8, 2, 0.5), (64, 4, 0.5), (256, 8, 1.0), (1000, 8, 4.0)):
    # Top-1 routing: all tokens choose expert 0.
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    routing_map[:, 0] = True
    probs = routing_map.float()
    _, kept = apply_router_token_dropping(
        probs, routing_map, router_topk=1, capacity_factor=factor, drop_policy="position"
    )
    tokens = kept[:, 0].nonzero().flatten().tolist()
    capacity = len(tokens)
    are_the_first.append(tokens == list(range(capacity)))
    print(f"  {num_tokens} tokens, room for {capacity}: {sum(t < capacity for t in tokens)} of the first {capacity} are kept")
as_described = not any(are_the_first)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/position.py"
