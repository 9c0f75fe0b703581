#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: TopKRouter with moe_expert_capacity_factor and a padding mask.
#
# Seen: a batch is half padding. The 512 real tokens are spread evenly over 8 experts, 64 each, and an expert has room for
# 128. The padding tokens are all the same one, so they all want expert 0, with a higher probability. Expert 0 keeps 128
# padding tokens and none of its 64 real ones. Without the padding in the batch no token is dropped, although there is
# half the room. The mask keeps padding out of the auxiliary losses and of the z loss only.
# megatron-core 0.19.2 (Python 3.12) does the same.
#
# A good guess: tokens that the router is told to be padding are not routed, or are the first to be dropped. It matters for
# fine-tuning on padded batches: real tokens lose an expert, more of them the longer the padding is, and the result for a
# sample depends on the lengths of the others in its batch.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/room.py" <<'PYTHON'
import sys
from types import SimpleNamespace

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS, TOKENS, PADDING = 8, 512, 512
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
itself = SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD, tp_cp=dist.group.WORLD, tp_dp_cp=dist.group.WORLD)
config = TransformerConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    num_moe_experts=EXPERTS,
    moe_router_topk=1,
    moe_router_pre_softmax=True,
    moe_router_load_balancing_type="none",
    moe_expert_capacity_factor=1.0,
    moe_token_dispatcher_type="alltoall",
)
router = TopKRouter(config, itself)
one_hot = torch.nn.functional.one_hot
tokens = 1.0 * one_hot(torch.arange(TOKENS) % EXPERTS, EXPERTS)
padding = 2.0 * one_hot(torch.zeros(PADDING, dtype=torch.long), EXPERTS)
print(f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}, capacity factor 1")
seen = []
for name, logits in {"without padding": tokens, "half padding": torch.cat([tokens, padding])}.items():
    mask = (torch.arange(len(logits)) >= TOKENS)[:, None]
    _, kept = router.routing(logits[:, None], padding_mask=mask)
    seen.append([kept[:TOKENS].sum(0).tolist(), kept[TOKENS:].sum(0).tolist()])
    print(f"  {name:15}: experts keep {seen[-1][0]} tokens and {seen[-1][1]} of the padding")
even = [TOKENS // EXPERTS] * EXPERTS
none = [0] * EXPERTS
as_described = seen == [[even, none], [[0, *even[1:]], [(TOKENS + PADDING) // EXPERTS, *none[1:]]]]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/room.py"
