#!/usr/bin/env bash
# peft 0.21.2 and transformers 5.24.0 with PyTorch 2.13.0, on a CPU: LoRA on the experts (target_parameters) of Qwen3-MoE.
#
# Seen: what the forward pass keeps for the backward grows by the size of the experts. The adapted weight, experts plus
# product of the adapters, is a new tensor in every layer, and lives until the layer's backward. With rank 4 and 16 tokens a
# model of 8 layers keeps 19 times as much as in full fine-tuning, which keeps no weight twice, and the excess does not
# shrink with the batch. LoRA on Linear layers (attention) keeps less than full fine-tuning.
#
# A good guess: LoRA keeps activations and its own small products, as LoRA on Linear layers does: x A B is added to x W, and
# W stays as it is. It matters because LoRA is chosen where memory is short: for the 57 GB of experts of Qwen3-30B-A3B a step
# asks for 57 GB more, at a batch of one token too, and the usual estimate (weights, adapters, activations) knows nothing of
# it.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2

cat > "$folder/memory.py" <<'PYTHON'
import sys

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

transformers.logging.set_verbosity_error()


def kept(tokens, **adapters):
    """Return the megabytes that a forward pass keeps for the backward, without parameters, and those of the experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=256,
        moe_intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, **adapters))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(64, (1, tokens))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    bytes_kept = sum(storages.values())
    loss.backward()  # so that everything kept is alive until here
    return bytes_kept / 1e6, experts / 1e6


ON_EXPERTS = dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
ON_ATTENTION = dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
print(
    f"peft {peft.__version__}, transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}"
)
seen = {}
for tokens in (16, 64):
    for name, adapters in (("full", {}), ("LoRA on attention", ON_ATTENTION), ("LoRA on experts", ON_EXPERTS)):
        seen[name, tokens], experts = kept(tokens, **adapters)
        print(
            f"  {tokens} tokens, {name:17}: {seen[name, tokens]:5.1f} MB kept for the backward, experts {experts:.1f} MB"
        )
more = [seen["LoRA on experts", tokens] - seen["LoRA on attention", tokens] for tokens in (16, 64)]
as_described = min(more) > 0.8 * experts and all(
    seen["LoRA on attention", tokens] < seen["full", tokens] for tokens in (16, 64)
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/memory.py"
