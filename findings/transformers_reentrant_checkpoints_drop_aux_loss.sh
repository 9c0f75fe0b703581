#!/usr/bin/env bash
# transformers 5.24.0 with PyTorch 2.13.0, on a CPU: a tiny Mixtral with output_router_logits and gradient checkpointing.
#
# Seen: with gradient_checkpointing_enable({"use_reentrant": True}) the auxiliary loss has its usual value, and no gradient:
# requires_grad is False, and the routers get the gradient of the main loss alone. The router logits are collected on the
# way through each layer, in the first pass of a reentrant checkpoint, which runs without autograd. A dictionary that does
# not name use_reentrant does the same, as PyTorch's default is reentrant. Without a dictionary, or with
# {"use_reentrant": False}, the gradient is the one that there is without checkpoints.
#
# A good guess: checkpoints save memory and change no gradient. It matters because nothing fails: the loss goes down, the
# auxiliary loss is logged, router_aux_loss_coef can be set to anything, and the router slowly collapses.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0

cat > "$folder/checkpoints.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM

WORDS = 64
tokens = torch.randint(0, WORDS, (2, 32), generator=torch.Generator().manual_seed(0))


def pass_through(coefficient, checkpoints):
    """Return the auxiliary loss and the gradients of all routers, after a backward of loss + coefficient * auxiliary."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
        use_cache=False,
    )
    model = MixtralForCausalLM(config).train()
    if checkpoints is not None:
        model.gradient_checkpointing_enable(*checkpoints)
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    routers = [p.grad.flatten() for name, p in model.named_parameters() if name.endswith("gate.weight")]
    return out.aux_loss, torch.cat(routers)


print(f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}")
cases = {
    "no checkpoints": None,
    "checkpoints, as they are": (),
    "{'use_reentrant': False}": ({"use_reentrant": False},),
    "{'use_reentrant': True}": ({"use_reentrant": True},),
    "{'preserve_rng_state': True}": ({"preserve_rng_state": True},),
}
seen = {}
for name, checkpoints in cases.items():
    _, main = pass_through(0.0, checkpoints)
    aux_loss, both = pass_through(1.0, checkpoints)
    seen[name] = round(aux_loss.item(), 3), aux_loss.requires_grad, round((both - main).norm().item(), 4)
    value, requires_grad, norm = seen[name]
    print(f"  {name:29} auxiliary loss {value}, requires_grad {requires_grad!s:5}, norm of its gradient in routers {norm}")
value, requires_grad, norm = seen["no checkpoints"]
full, none = (value, True, norm), (value, False, 0.0)
as_described = requires_grad and norm > 0.01 and list(seen.values()) == [full, full, full, none, none]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/checkpoints.py"
