#!/usr/bin/env bash
# transformers 5.24.0 with PyTorch 2.13.0, on a CPU: router_jitter_noise of Mixtral, MiniMax and MiniMax-M2, in training.
#
# Seen: the noise does not stay in the router. The block multiplies its input by it in place, so the experts compute with
# the noisy rows too: with 0.1 each number that they get is 0.9 to 1.1 times what it was. In eval() there is no noise.
#
# A good guess: it is what its name says, and what the Switch Transformer and Megatron-core's moe_input_jitter_eps do: a
# perturbed copy of the input decides where a token goes, and the experts get the token as it is. It matters to whoever
# carries a value over from such a recipe, which is far more noise here, and to whoever compares two implementations.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0

cat > "$folder/jitter.py" <<'PYTHON'
import sys

import torch
import transformers

NOISE = 0.1
transformers.logging.set_verbosity_error()
print(
    f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}, router_jitter_noise {NOISE}"
)
as_described = True
got = {}
for family in ("Mixtral", "MiniMax", "MiniMaxM2"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_jitter_noise=NOISE,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    block = next(module for module in model.modules() if type(module).__name__.endswith("SparseMoeBlock"))
    block.experts.register_forward_pre_hook(lambda module, arguments: got.update(rows=arguments[0].clone()))
    rows = torch.randn(1, 64, 32)
    for training in (False, True):
        block.train(training)
        given = rows.clone()
        with torch.no_grad():
            block(given)
        noise = got["rows"].view_as(rows) / rows
        print(
            f"  {family:9} {'train()' if training else 'eval() '}: rows of the experts are the input times"
            f" {noise.min():.2f} to {noise.max():.2f}, the caller's tensor is unchanged: {given.equal(rows)}"
        )
        is_noisy = (noise.max() - noise.min()).item() > NOISE
        as_described &= is_noisy == training and given.equal(rows) == (not training)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/jitter.py"
