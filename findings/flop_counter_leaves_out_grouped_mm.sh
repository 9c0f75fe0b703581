#!/usr/bin/env bash
# PyTorch 2.13.0 and transformers 5.24.0, on a CPU: torch.utils.flop_counter.FlopCounterMode and grouped_mm.
#
# Seen: the counter says 0 for torch.nn.functional.grouped_mm, in the forward and the backward, where it counts mm, bmm and
# attention. So the operations of a model depend on the implementation of its experts: a Mixtral whose experts are
# "grouped_mm", which is what transformers chooses by itself, has the operations of its attention, routers and head alone,
# 28 % of what the same model has with "eager". Nothing says that an operator was left out.
#
# A good guess: the counter knows all matrix products of PyTorch, or says what it does not know. It matters for every figure
# of FLOPs per second or per cent of the peak: most of an MoE model is missing, and a faster implementation of the experts
# looks like a slower machine.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0

cat > "$folder/flops.py" <<'PYTHON'
import sys

import torch
import transformers
from torch.nn.functional import grouped_mm
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

GROUPS, ROWS, IN, OUT = 4, 16, 32, 48


def flops(function):
    """Return the floating-point operations of a forward and a backward pass."""
    counts = []
    with FlopCounterMode(display=False) as forward:
        result = function()
    counts.append(forward.get_total_flops())
    with FlopCounterMode(display=False) as backward:
        result.backward(torch.ones_like(result))
    counts.append(backward.get_total_flops())
    return counts


rows = torch.randn(GROUPS * ROWS, IN, requires_grad=True)
matrices = torch.randn(GROUPS, IN, OUT, requires_grad=True)
ends = torch.arange(ROWS, GROUPS * ROWS + 1, ROWS, dtype=torch.int32)
products = {
    "mm for each group": lambda: torch.cat([part @ matrix for part, matrix in zip(rows.split(ROWS), matrices)]),
    "bmm": lambda: torch.bmm(rows.view(GROUPS, ROWS, IN), matrices),
    "grouped_mm": lambda: grouped_mm(rows, matrices, offs=ends),
}
print(f"PyTorch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}")
seen = {name: flops(product) for name, product in products.items()}
for name, (forward, backward) in seen.items():
    print(f"  {name:18} forward {forward:7,}, backward {backward:7,}")

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_local_experts=8,
    num_experts_per_tok=2,
)
model = MixtralForCausalLM(config)
chosen_by_itself = model.config._experts_implementation
tokens = torch.randint(1, 64, (2, 32))
of_model = {}
for implementation in ("eager", "grouped_mm"):
    model.set_experts_implementation(implementation)
    of_model[implementation] = sum(flops(lambda: model(tokens, labels=tokens, use_cache=False).loss))
    print(f"  Mixtral with {implementation:10} {of_model[implementation]:,}")
print(f"  transformers chooses {chosen_by_itself}")
expected = 2 * GROUPS * ROWS * IN * OUT
as_described = (
    seen["mm for each group"] == seen["bmm"] == [expected, 2 * expected]
    and seen["grouped_mm"] == [0, 0]
    and of_model["grouped_mm"] < 0.4 * of_model["eager"]
    and chosen_by_itself == "grouped_mm"
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/flops.py"
