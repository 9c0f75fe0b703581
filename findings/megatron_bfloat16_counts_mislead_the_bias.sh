#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: an expert bias (moe_router_enable_expert_bias) in a bfloat16 model.
#
# Seen: Float16Module makes the model bfloat16, and with it the router's count of tokens per expert. The router takes its
# bias back to float32, but not the count. A step of 8 microbatches moves the bias of 6 % of 64 experts the wrong way or
# not at all, and one of 256 microbatches that of 19 %. A count stands still once a microbatch adds less than half of its
# last bit: after 1024 microbatches of 64 tokens all experts are at 4,096 to 4,320, where they had 7,055 to 9,378, and half
# of the directions are wrong. The counts of "global_aux_loss" are bfloat16 as well, and its number of microbatches stops
# at 256. megatron-core 0.19.2 (Python 3.12) does the same.
#
# A good guess: counts are exact, as the buffer is made in float32 and the bias is kept there. It matters because the bias
# moves by the sign of the difference from the mean alone: near balance, where a run spends its time, the sign of some
# experts is that of a rounding error, more of them the more microbatches are accumulated, and nothing reports it.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/counts.py" <<'PYTHON'
import sys
from types import SimpleNamespace

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS, TOPK = 64, 8
torch.cuda.current_device = lambda: "cpu"  # the router makes its buffers there
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
itself = SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD, tp_cp=dist.group.WORLD, tp_dp_cp=dist.group.WORLD)


def router(**options):
    """Return a router as it is in a bfloat16 model."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        bf16=True,
        **options,
    )
    return Float16Module(config, TopKRouter(config, itself)).module


def step(num_microbatches, num_tokens):
    """Return the router's counts and the exact ones."""
    torch.manual_seed(0)
    one = router(
        moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", moe_router_load_balancing_type="none"
    )
    popularity = 0.05 * torch.randn(EXPERTS)
    exact = torch.zeros(EXPERTS, dtype=torch.long)
    for _ in range(num_microbatches):
        _, routing_map = one.routing((popularity + torch.randn(num_tokens, 1, EXPERTS)).bfloat16())
        exact += routing_map.sum(0)
    return one.local_tokens_per_expert, exact


print(f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}, a bfloat16 model")
wrong = {}
for num_microbatches, num_tokens in ((1, 1024), (8, 1024), (256, 1024), (1024, 64)):
    counted, exact = step(num_microbatches, num_tokens)
    # The direction of the update, as in get_updated_expert_bias.
    direction = torch.sign(counted.sum(-1, keepdim=True) / EXPERTS - counted)
    right = torch.sign(exact.sum() / EXPERTS - exact)
    wrong[num_microbatches] = (direction != right).float().mean().item()
    print(
        f"  {num_microbatches:4} microbatches of {num_tokens:4}: counts {counted.min():.0f} to {counted.max():.0f}, exact"
        f" {exact.min()} to {exact.max()}, a wrong direction for {wrong[num_microbatches]:.0%} of the experts"
    )

with_loss = router(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1.0)
for _ in range(300):
    with_loss.routing(torch.randn(16, 1, EXPERTS).bfloat16())
print(f"  global_aux_loss, after 300 microbatches: ga_steps is {with_loss.ga_steps:.0f}")
as_described = (
    wrong[1] == 0 and wrong[8] > 0.01 and wrong[256] > 0.1 and wrong[1024] > 0.3 and with_loss.ga_steps == 256
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/counts.py"
