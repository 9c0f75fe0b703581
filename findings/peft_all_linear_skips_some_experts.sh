#!/usr/bin/env bash
# peft 0.21.2 and transformers 5.24.0 with PyTorch 2.13.0, on a CPU: LoraConfig(target_modules="all-linear") on MoE models.
#
# Seen: whether the experts get adapters depends on the class of the model. In Mixtral, Qwen3-MoE, OLMoE and DeepSeek-V3 they
# do, and so do the routers. In Qwen2-MoE, gpt-oss and Granite-MoE neither does: only attention (and a shared expert) is
# trained, and there is no warning. Experts are one tensor and no Linear in all of them. peft adds the names that they had
# when they were Linear layers, for the models in a table. Its pattern is called "qwen2_moe", but Qwen2-MoE is not in it.
#
# A good guess: all linear layers but the head, in any model; or, as experts are no Linear any more, none of them. It matters
# twice. A recipe that is moved from Qwen3-MoE to gpt-oss trains attention alone, and the loss still falls. And where routers
# are adapted the choice of experts changes in fine-tuning, which many recipes take care to freeze.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2

cat > "$folder/adapters.py" <<'PYTHON'
import sys
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model

transformers.logging.set_verbosity_error()
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    num_experts_per_tok=2,
    pad_token_id=0,
)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
MODELS = {
    "Mixtral": dict(num_local_experts=8),
    "Qwen3Moe": dict(num_experts=8),
    "Olmoe": dict(num_experts=8),
    "DeepseekV3": dict(n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=0) | LATENT,
    "Qwen2Moe": dict(num_experts=8, shared_expert_intermediate_size=16),
    "GptOss": dict(num_local_experts=8),
    "GraniteMoe": dict(num_local_experts=8),
}


def share(model, part):
    """Return the share of the model's parameters that belongs to a part."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(size for name, size in sizes.items() if part in name) / sum(sizes.values())


print(f"peft {peft.__version__}, transformers {transformers.__version__}, target_modules='all-linear'")
seen = {}
for family, options in MODELS.items():
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    share_of_experts = share(model, ".experts.")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    experts = any(".experts." in name for name in trained)
    routers = any(".gate." in name or ".router." in name for name in trained)
    warned = any("expert" in str(one.message) and "pattern" not in str(one.message) for one in said)
    seen[family] = experts, routers, warned
    print(
        f"  {family:10} experts are {share_of_experts:.0%} of the model: adapters on experts {experts},"
        f" on routers {routers}, a warning about experts: {warned}"
    )
skipped = ("Qwen2Moe", "GptOss", "GraniteMoe")
as_described = all(
    (experts, routers, warned) == (family not in skipped, family not in skipped, False)
    for family, (experts, routers, warned) in seen.items()
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/adapters.py"
