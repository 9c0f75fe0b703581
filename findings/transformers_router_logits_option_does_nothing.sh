#!/usr/bin/env bash
# transformers 5.24.0 with PyTorch 2.13.0, on a CPU: output_router_logits and norm_topk_prob in the configs of MoE models.
#
# Seen: the configs of DeepSeek-V2, DeepSeek-V3, GLM-4.5, Nemotron-H, EXAONE-MoE, Solar and LFM2-MoE have a field
# output_router_logits, which takes True, checks its type and is saved, and nothing reads it. There are no router logits, no
# auxiliary loss, and all gradients are the same bit for bit, whatever router_aux_loss_coef is. An argument of the forward
# pass of this name is accepted too. In Mixtral, Qwen3-MoE and ERNIE 4.5 both work. The field norm_topk_prob of DeepSeek-V2
# is not read either: weights of experts are never divided by their sum.
#
# A good guess: a field of a config does what it does in the other models, or the model refuses True. It matters because
# these models balance by a bias that transformers never moves, so a fine-tuning with an auxiliary loss is what one would
# reach for, and it looks as if it were on.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0

cat > "$folder/options.py" <<'PYTHON'
import dataclasses
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    pad_token_id=0,
)
ROUTED = dict(n_routed_experts=8, first_k_dense_replace=0)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
LAYERS = dict(layer_types=["full_attention"] * 2)
WORKS = {
    "Mixtral": dict(num_local_experts=8),
    "Qwen3Moe": dict(num_experts=8),
    "Ernie4_5_Moe": dict(moe_num_experts=8, moe_k=2, moe_layer_start_index=0),
}
DOES_NOTHING = {
    "DeepseekV2": ROUTED | LATENT | dict(topk_method="greedy"),
    "DeepseekV3": ROUTED | LATENT,
    "Glm4Moe": ROUTED,
    "NemotronH": dict(n_routed_experts=8),
    "ExaoneMoe": LAYERS | dict(num_experts=8, mlp_layer_types=["sparse"] * 2),
    "SolarOpen": dict(n_routed_experts=8),
    "Lfm2Moe": LAYERS | dict(num_experts=8, num_dense_layers=0),
}


def train(family, options, **more):
    """Return the loss and all gradients of a tiny model, and whether it returns an auxiliary loss."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | options | more)
    assert set(more) - {"router_aux_loss_coef"} <= {field.name for field in dataclasses.fields(config)}
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    outputs = model(input_ids=tokens, labels=tokens)
    outputs.loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [outputs.loss.detach(), *gradients], getattr(outputs, "aux_loss", None) is not None


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


print(f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}")
as_described = True
for family, options in (WORKS | DOES_NOTHING).items():
    without, _ = train(family, options, output_router_logits=False)
    with_it, has_loss = train(family, options, output_router_logits=True, router_aux_loss_coef=1.0)
    is_same = same(without, with_it)
    print(
        f"  {family:12} output_router_logits=True: an auxiliary loss {has_loss!s:5}, loss and gradients as without:"
        f" {is_same}"
    )
    as_described &= (has_loss, is_same) == ((True, False) if family in WORKS else (False, True))
for family in ("DeepseekV2", "DeepseekV3", "Qwen3Moe"):
    one, other = (train(family, (WORKS | DOES_NOTHING)[family], norm_topk_prob=on)[0] for on in (False, True))
    is_same = same(one, other)
    print(f"  {family:12} norm_topk_prob=True: loss and gradients as without: {is_same}")
    as_described &= is_same == (family == "DeepseekV2")
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/options.py"
