#!/usr/bin/env bash
# transformers 5.24.0 with PyTorch 2.13.0, on a CPU: experts of float32 models under torch.autocast("cpu", torch.bfloat16).
#
# Seen: with the implementation that transformers chooses by itself, "grouped_mm", experts multiply in float32: the result is
# the same bit for bit as without autocast. With "eager" and "batched_mm" they multiply in bfloat16, like the attention in
# all three. PyTorch's autocast has no rule for grouped_mm, neither on a CPU nor for CUDA, and transformers converts the
# input to the dtype of the weights. So implementations that agree to 1e-6 without autocast are 0.6 % apart with it.
#
# A good guess: autocast takes all matrix products to bfloat16, and above all those of the experts, which are most of a
# model. It matters for float32 weights with bf16=True in Trainer: the largest part of a step gets none of the speed, the
# log says that the model trains in bfloat16, and a change of the implementation changes the precision.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0

cat > "$folder/autocast.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM

TOKENS, HIDDEN, EXPERTS = 64, 32, 8
torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=64,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
)
model = MixtralForCausalLM(config).eval()
chosen_by_itself = model.config._experts_implementation
experts = next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")
for weight in experts.parameters():
    torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
rows = torch.randn(TOKENS, HIDDEN)
chosen = torch.rand(TOKENS, EXPERTS).topk(2).indices
weights = torch.full((TOKENS, 2), 0.5)


@torch.no_grad()
def products(implementation, autocast):
    """Return what the experts make of the rows."""
    model.set_experts_implementation(implementation)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return experts(rows, chosen, weights)


def relative_error(seen, expected):
    return ((seen - expected).norm() / expected.norm()).item()


print(f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}, Mixtral's experts")
print(f"  transformers chooses {chosen_by_itself}")
reference = products("eager", autocast=False)
seen = {}
for implementation in ("eager", "batched_mm", "grouped_mm"):
    plain = products(implementation, autocast=False)
    under_autocast = products(implementation, autocast=True)
    seen[implementation] = relative_error(under_autocast, plain)
    print(
        f"  {implementation:10} without autocast {relative_error(plain, reference):.0e} from eager,"
        f" autocast changes it by {seen[implementation]:.1e}"
    )
has_rule = [
    torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
    for name in ("linear", "bmm", "_grouped_mm")
    for key in ("AutocastCPU", "AutocastCUDA")
]
print("  autocast has a rule, CPU and CUDA: linear {} {}, bmm {} {}, grouped_mm {} {}".format(*has_rule))
as_described = (
    chosen_by_itself == "grouped_mm"
    and seen["grouped_mm"] == 0
    and min(seen["eager"], seen["batched_mm"]) > 1e-3
    and has_rule == [True, True, True, True, False, False]
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/autocast.py"
