#!/usr/bin/env bash
# transformers 5.24.0 with PyTorch 2.13.0, on a CPU: load_balancing_loss_func, as Mixtral and the classes made from it use it.
#
# Seen: in a model of 8 layers, each layer sends all tokens to one expert, another one in each layer. The loss is 1, the
# least there is for top-1, and its gradient is 0. Each layer alone has a loss of 5.93, and a gradient. The function puts
# the tokens of all layers together before it counts, as if expert 3 of one layer were expert 3 of the next.
#
# A good guess: the loss is the mean over layers of the loss of each layer, so collapsed layers have the highest one. It
# matters because the loss is what one logs to see whether a router has collapsed, and what should pull it back. The more
# layers there are, the less a single one shows: where 1 of 8 layers collapses, the loss rises from 1 to 1.08.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0

cat > "$folder/layers.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

TOKENS, EXPERTS, LAYERS = 64, 8, 8


def logits_of(experts):
    """Return router logits [tokens, experts]: token t gives experts[t % len(experts)] a probability of 0.74."""
    chosen = torch.tensor(experts)[torch.arange(TOKENS) % len(experts)]
    return (3.0 * torch.nn.functional.one_hot(chosen, EXPERTS)).requires_grad_()


def figures(experts_of_layers):
    """Return the loss of all layers, the mean of the losses of single layers, and the largest gradient of the former."""
    layers = tuple(map(logits_of, experts_of_layers))
    loss = load_balancing_loss_func(layers, EXPERTS, 1)
    loss.backward()
    by_layer = torch.stack([load_balancing_loss_func((layer,), EXPERTS, 1) for layer in layers]).mean()
    largest = max(layer.grad.abs().max().item() for layer in layers)
    return round(loss.item(), 2), round(by_layer.item(), 2), largest < 1e-7


print(f"transformers {transformers.__version__}, {LAYERS} layers with {EXPERTS} experts, top-1")
all_experts = list(range(EXPERTS))
cases = {
    "all layers balanced": [all_experts] * LAYERS,
    "one layer collapsed": [[0]] + [all_experts] * (LAYERS - 1),
    "all collapsed, each to another expert": [[layer] for layer in range(LAYERS)],
    "all collapsed, to expert 0": [[0]] * LAYERS,
}
seen = {name: figures(experts) for name, experts in cases.items()}
for name, (loss, by_layer, is_flat) in seen.items():
    print(f"  {name:38} loss {loss:.2f}, mean of the layers' losses {by_layer:.2f}, gradient is 0: {is_flat}")
as_described = list(seen.values()) == [(1.0, 1.0, True), (1.08, 1.62, False), (1.0, 5.93, True), (5.93, 5.93, False)]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/layers.py"
