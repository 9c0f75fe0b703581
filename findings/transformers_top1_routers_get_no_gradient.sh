#!/usr/bin/env bash
# transformers 5.24.0 with PyTorch 2.13.0, on a CPU: tiny models with num_experts_per_tok=1.
#
# Seen: in Mixtral, gpt-oss, Granite-MoE, Qwen3-Next, GLM-4.5 and DeepSeek-V3 the router's gradient of the loss is 0 but for
# rounding, 1e-7 or less of that of the experts. These models divide the weights of the chosen experts by their sum, or take
# the softmax of them alone, and for one expert that is 1 whatever the router says. OLMoE and Qwen3-MoE do not divide and
# have a gradient. Qwen3-MoE with norm_topk_prob=True, as its published checkpoints have it, has none. No configuration is
# refused.
#
# A good guess: top-1 works as in the Switch Transformer, where the weight of the expert is its probability, or is refused,
# as Megatron-core does ("Please use --moe-router-pre-softmax when topk is 1"). It matters because the model trains and its
# loss falls, but the router learns nothing from it: tokens stay where the initial weights, and an auxiliary loss if there
# is one, have sent them.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0

cat > "$folder/top1.py" <<'PYTHON'
import sys

import torch
import transformers

WORDS = 64
transformers.logging.set_verbosity_error()
SIZES = dict(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    pad_token_id=0,
)
MIXTRAL = dict(num_local_experts=8)
QWEN = dict(num_experts=8)
DEEPSEEK = dict(n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=0)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
MODELS = {
    "Mixtral": MIXTRAL,
    "GptOss": MIXTRAL,
    "GraniteMoe": MIXTRAL,
    "Qwen3Next": QWEN | dict(shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2),
    "Glm4Moe": DEEPSEEK,
    "DeepseekV3": DEEPSEEK | LATENT,
    "Qwen3Moe, norm_topk_prob": QWEN | dict(norm_topk_prob=True),
    "Qwen3Moe": QWEN,
    "Olmoe": QWEN,
}
tokens = torch.randint(1, WORDS, (4, 32), generator=torch.Generator().manual_seed(0))


def ratio(family, topk, options):
    """Return the norm of the gradient of all routers over that of all experts."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options, num_experts_per_tok=topk)
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    gradients = {"router": [], "experts": []}
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.router.weight")):
            gradients["router"].append(parameter.grad)
        elif ".experts." in name:
            gradients["experts"].append(parameter.grad)
    norms = {part: torch.cat([g.flatten() for g in those]).norm().item() for part, those in gradients.items()}
    return norms["router"] / norms["experts"]


print(
    f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}, gradients of routers/experts"
)
has_gradient = {}
for name, options in MODELS.items():
    of_one, of_two = (ratio(name.partition(",")[0], topk, options) for topk in (1, 2))
    has_gradient[name] = of_one > 1e-5
    print(f"  {name:25} top-1 {of_one:.0e}, top-2 {of_two:.0e}")
as_described = [name for name, has in has_gradient.items() if has] == ["Qwen3Moe", "Olmoe"]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/top1.py"
