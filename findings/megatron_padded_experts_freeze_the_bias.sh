#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: an expert bias (moe_router_enable_expert_bias) together with
# moe_pad_expert_input_to_capacity.
#
# Seen: 1000 tokens, of which 824 want expert 0. In each step the router drops those that are too many for the experts'
# capacity, and 100 updates later the bias is still 0, so it drops as many. Tokens are counted after the padding to
# capacity, when every expert has the same number, and the update goes by the sign of the difference from the mean. With
# the capacity alone the bias works, and nearly no token is dropped in the end. The TransformerConfig takes these
# arguments. megatron-core 0.19.2 (Python 3.12) does the same.
#
# A good guess: the bias counts the tokens that chose an expert, or the pair is refused. It matters because the bias is
# the only balance there is ("aux-loss-free"), and padding is what one adds for static shapes or CUDA graphs: from then on
# nothing balances, without an error, and what is logged as tokens per expert is perfectly even.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/bias.py" <<'PYTHON'
import sys

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection, get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS, EXPERTS, STEPS, RATE = 1000, 4, 100, 0.01
torch.cuda.current_device = lambda: "cpu"  # where the router puts its counters
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
logits = torch.randn(TOKENS, 1, EXPERTS, generator=torch.Generator().manual_seed(0)) + torch.tensor([2.0, 0, 0, 0])
print(f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}: {STEPS} steps")
seen = {}
for padded in (False, True):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=RATE,
        moe_router_load_balancing_type="none",
        moe_expert_capacity_factor=1.25,
        moe_pad_expert_input_to_capacity=padded,
        moe_token_dispatcher_type="alltoall",
    )
    router = TopKRouter(config, get_default_pg_collection())
    dropped = []
    for _ in range(STEPS):
        probs, _ = router.routing(logits)
        dropped.append(int((probs.sum(1) == 0).sum()))
        counted = router.local_tokens_per_expert.clone()
        router.expert_bias.copy_(get_updated_expert_bias(counted, router.expert_bias, RATE))
        router.local_tokens_per_expert.zero_()
    bias = [round(one, 2) for one in router.expert_bias.tolist()]
    seen[padded] = dropped[0], dropped[-1], any(bias)
    print(f"  padded to capacity: {padded!s:5}  dropped in step 1 {dropped[0]}, in step {STEPS} {dropped[-1]}, bias {bias}")
    print(f"    tokens of experts as counted in the last step {[int(n) for n in counted]}")
as_described = seen[True][0] == seen[True][1] > 400 and not seen[True][2]
as_described &= seen[False][0] == seen[True][0] and seen[False][1] < 50 and seen[False][2]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/bias.py"
