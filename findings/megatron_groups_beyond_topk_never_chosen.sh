#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: moe_router_group_topk above moe_router_topk.
#
# Seen: with top-2 routing over 8 groups of experts, of which a token may use 4, all 1000 tokens use the same 4 groups.
# No token ever gets an expert of the others, whatever the logits. The score of a group is the sum of its best
# topk // group_topk experts. That is the sum of none here, so all groups have the score 0 and a tie decides. The
# TransformerConfig takes these arguments. megatron-core 0.19.2 (Python 3.12) does the same.
#
# A good guess: a group is as good as its best expert, or as its two best, as in DeepSeek-V3. A limit of groups that no
# token could exceed then changes nothing: two experts lie in at most two groups. It matters where groups are nodes or
# devices: half of the experts get no token, hence no gradient, and their ranks idle, without an error.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/groups.py" <<'PYTHON'
import sys

import megatron.core
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS, EXPERTS, GROUPS, TOPK = 1000, 32, 8, 2
logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
print(f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}")
print(f"top-{TOPK} of {EXPERTS} experts in {GROUPS} groups, {TOKENS} tokens with random logits")
groups_in_use = {}
for group_topk in (None, 1, 2, 3, 4):
    TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_num_groups=GROUPS,
        moe_router_group_topk=group_topk,
    )
    _, routing_map = topk_routing_with_score_function(logits, TOPK, num_groups=GROUPS, group_topk=group_topk)
    tokens = routing_map.view(TOKENS, GROUPS, -1).any(-1).sum(0)
    groups_in_use[group_topk] = int((tokens > 0).sum())
    print(f"  group_topk {group_topk!s:4}: tokens of each group {tokens.tolist()}")
as_described = groups_in_use == {None: 8, 1: 8, 2: 8, 3: 3, 4: 4}
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/groups.py"
