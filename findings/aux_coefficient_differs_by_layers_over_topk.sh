#!/usr/bin/env bash
# megatron-core 0.16.1 and transformers 5.24.0 with PyTorch 2.13.0, on a CPU: the coefficient of the auxiliary loss.
#
# Seen: the same router logits and the same coefficient give another gradient. transformers' loss of a perfectly balanced
# model is top-k, and a mean over the layers. Megatron's is 1, and each layer has its own, so they add up. With the same
# logits in all layers Megatron's gradient is layers / top-k times that of transformers, and points the same way: a half
# for one layer with top-2, and 6 times for the 48 layers and top-8 of Qwen3-MoE. megatron-core 0.19.2 (Python 3.12) does
# the same.
#
# A good guess: both are the loss of the Switch Transformer, as both say, so a coefficient of 0.001 is one of 0.001. It
# matters to whoever carries a recipe from one to the other, or compares their logs: the weight of the balance is another
# one, and how much other depends on the model, so that the factor that was right for one is wrong for the next.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 transformers==5.24.0 numpy

cat > "$folder/coefficient.py" <<'PYTHON'
import sys
from types import SimpleNamespace

import megatron.core
import torch
import torch.distributed as dist
import transformers
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

TOKENS, COEFFICIENT = 256, 0.001
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
itself = SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD, tp_cp=dist.group.WORLD, tp_dp_cp=dist.group.WORLD)


def of_megatron(layers, num_experts, topk):
    """Return the gradients of the loss alone, by the logits of each layer."""
    config = TransformerConfig(
        num_layers=len(layers),
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=num_experts,
        moe_router_topk=topk,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=COEFFICIENT,
    )
    gradients = []
    for logits in layers:
        router = TopKRouter(config, itself)
        router.set_layer_number(1)  # where the loss is logged
        own = logits.clone().requires_grad_()
        probs, _ = router.routing(own[:, None])
        (0 * probs).sum().backward()  # what is left is the gradient that the loss adds
        gradients.append(own.grad.flatten())
    return torch.cat(gradients)


def of_transformers(layers, num_experts, topk):
    own = tuple(logits.clone().requires_grad_() for logits in layers)
    (COEFFICIENT * load_balancing_loss_func(own, num_experts, topk)).backward()
    return torch.cat([logits.grad.flatten() for logits in own])


print(
    f"megatron-core {megatron.core.__version__}, transformers {transformers.__version__}, PyTorch"
    f" {torch.__version__.partition('+')[0]}, Megatron's gradient over that of transformers"
)
as_described = True
for num_layers, num_experts, topk in ((1, 8, 2), (32, 8, 2), (16, 64, 8), (48, 128, 8)):
    torch.manual_seed(0)
    layers = num_layers * [torch.randn(TOKENS, num_experts) + 0.5 * torch.randn(num_experts)]
    one, other = (of(layers, num_experts, topk) for of in (of_megatron, of_transformers))
    ratio = (one.norm() / other.norm()).item()
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=0).item()
    print(
        f"  {num_layers:2} layers, {num_experts:3} experts, top-{topk}: {ratio:.3g} times the gradient, cosine {cosine:.3f}"
    )
    as_described &= abs(ratio * topk / num_layers - 1) < 1e-3 and cosine > 0.999
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/coefficient.py"
