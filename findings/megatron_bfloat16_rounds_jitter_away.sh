#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: moe_input_jitter_eps of a router whose input is bfloat16.
#
# Seen: the noise is drawn in the dtype of the input, between 1 - eps and 1 + eps as bfloat16 has them. With eps 0.001 both
# are 1, and there is no noise at all. With 0.002 a factor is 1 or 0.996: the noise only makes the input smaller. With 0.01,
# the value of the Switch Transformer paper, there are 5 factors, from 0.988 to 1.008. With 0.1 there are 40 and the mean is
# 1, as in float32 with any eps. moe_router_dtype="fp32" comes too late to change this. megatron-core 0.19.2 (Python 3.12)
# does the same.
#
# A good guess: factors are uniform in [1 - eps, 1 + eps], mean 1, in whatever precision the model is. It matters because
# nothing fails: a small eps in a recipe does nothing, or less than it says, or shifts the logits to one side.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/jitter.py" <<'PYTHON'
import sys
from types import SimpleNamespace

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

EPS = (0.001, 0.002, 0.01, 0.1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
itself = SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD, tp_cp=dist.group.WORLD, tp_dp_cp=dist.group.WORLD)


def factors(eps, dtype):
    """Return the factors that the router's input is multiplied by, in float32."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_input_jitter_eps=eps,
        use_cpu_initialization=True,
    )
    router = TopKRouter(config, itself).to(dtype)
    return router.apply_input_jitter(torch.ones(100_000, dtype=dtype)).float()


print(f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}, 100,000 factors")
seen = {}
for dtype in (torch.float32, torch.bfloat16):
    for eps in EPS:
        drawn = factors(eps, dtype)
        seen[dtype, eps] = [drawn.unique().numel(), round(drawn.min().item(), 4), round(drawn.max().item(), 4)]
        number, least, largest = seen[dtype, eps]
        print(f"  {dtype}, eps {eps:5}: {number:5} different ones from {least} to {largest}, mean {drawn.mean():.4f}")
of_float32 = [seen[torch.float32, eps][1:] for eps in EPS[:3]]
of_bfloat16 = [seen[torch.bfloat16, eps] for eps in EPS[:3]]
are_uniform = of_float32 == [[0.999, 1.001], [0.998, 1.002], [0.99, 1.01]]
as_described = are_uniform and of_bfloat16 == [[1, 1.0, 1.0], [2, 0.9961, 1.0], [5, 0.9883, 1.0078]]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/jitter.py"
