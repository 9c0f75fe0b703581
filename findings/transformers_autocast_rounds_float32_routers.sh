#!/usr/bin/env bash
# transformers 5.24.0 with PyTorch 2.13.0, on a CPU: routers of MoE models under torch.autocast("cpu", torch.bfloat16).
#
# Seen: the routers of DeepSeek-V3, GLM-4.5, Nemotron-H and EXAONE-MoE convert their input and their weight to float32, and
# autocast converts both back to bfloat16 before it multiplies them. Logits and weights of experts come out in bfloat16, and
# with 64 experts and top-8 one token in 15 has other experts than without autocast. Laguna converts the product to float32,
# and one token in 36 has other experts. ERNIE 4.5 switches autocast off around its router, and none has. The model is
# float32 here, as it is with bf16=True in Trainer.
#
# A good guess: a router that says float32 computes in float32, under autocast too, as that of ERNIE does. It matters because
# the choice of experts is what the float32 is for: a model that was trained with float32 routers is fine-tuned with others,
# and its log-probabilities differ from those of an inference engine that keeps float32.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0

cat > "$folder/routers.py" <<'PYTHON'
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()
TOKENS, HIDDEN = 4096, 128
SIZES = dict(
    vocab_size=64,
    hidden_size=HIDDEN,
    intermediate_size=32,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    num_experts_per_tok=8,
    n_group=1,
    topk_group=1,
    pad_token_id=0,
)
DENSE = dict(n_routed_experts=64, first_k_dense_replace=0)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
MODELS = {
    "DeepseekV3": DENSE | LATENT,
    "Glm4Moe": DENSE,
    "NemotronH": dict(n_routed_experts=64),
    "ExaoneMoe": dict(num_experts=64, layer_types=["full_attention"] * 2, mlp_layer_types=["sparse"] * 2),
    "Laguna": dict(num_experts=64),
    "Ernie4_5_Moe": dict(moe_num_experts=64, moe_k=8, moe_layer_start_index=0),
}


@torch.no_grad()
def look(family, options):
    """Return the dtype of the weights of experts under autocast, and the fraction of tokens that get other experts."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    router = [module for name, module in model.named_modules() if name.endswith(".gate")][-1]
    for weight in router.parameters():
        if weight.ndim == 2 and weight.shape[1] == HIDDEN:
            weight.normal_(std=0.1)
    tokens = torch.randn(TOKENS, HIDDEN)
    (_, weights, experts) = router(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        (_, weights_then, experts_then) = router(tokens)
    assert weights.dtype == torch.float32
    differs = (experts.sort(-1)[0] != experts_then.sort(-1)[0]).any(-1)
    return str(weights_then.dtype).removeprefix("torch."), differs.float().mean().item()


print(
    f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}, 64 experts, top-8, autocast"
)
seen = {}
for family, options in MODELS.items():
    seen[family] = dtype, differs = look(family, options)
    print(f"  {family:12} weights of experts in {dtype:8}, {differs:.1%} of the tokens have other experts")
rounded = [seen[family] for family in ("DeepseekV3", "Glm4Moe", "NemotronH", "ExaoneMoe")]
as_described = (
    all(dtype == "bfloat16" and differs > 0.03 for dtype, differs in rounded)
    and seen["Laguna"][0] == "float32"
    and seen["Laguna"][1] > 0.005
    and seen["Ernie4_5_Moe"] == ("float32", 0)
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/routers.py"
