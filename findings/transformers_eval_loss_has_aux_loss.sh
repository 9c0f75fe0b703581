#!/usr/bin/env bash
# transformers 5.24.0 and accelerate 1.15.0 with PyTorch 2.13.0, on a CPU: Trainer.evaluate of models with
# output_router_logits.
#
# Seen: eval_loss is the cross entropy plus router_aux_loss_coef times the auxiliary loss, in eval() as in training. With the
# coefficient and the top-8 that OLMoE has by default it is 0.08 too high even for a balanced router, so the perplexity that
# one computes from it is 8 % too high; for Qwen3-MoE it is 0.8 %, for Mixtral 0.2 %. With output_router_logits=False it is
# the cross entropy.
#
# A good guess: the loss of an evaluation is the cross entropy, as that of Megatron-core is, which has its auxiliary losses in
# training only. It matters for perplexities, for comparisons with a dense model, with another number of experts per token or
# with another library, and for load_best_model_at_end: a step with better balance can be taken for a better model.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0

cat > "$folder/evaluate.py" <<'PYTHON'
import math
import sys

import torch
import transformers
from transformers import PrinterCallback, Trainer, TrainingArguments

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
    pad_token_id=0,
)
MODELS = {
    "Olmoe": dict(num_experts=64, num_experts_per_tok=8),
    "Qwen3Moe": dict(num_experts=128, num_experts_per_tok=8),
    "Mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
}
tokens = torch.randint(1, 64, (16, 32), generator=torch.Generator().manual_seed(0))
samples = [{"input_ids": one, "labels": one} for one in tokens]


def evaluate(folder, family, options, on):
    """Return eval_loss, the cross entropy of the same model and tokens, and the coefficient of the auxiliary loss."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options, output_router_logits=on)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    arguments = TrainingArguments(folder, report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments, eval_dataset=samples)
    trainer.remove_callback(PrinterCallback)
    loss = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
    entropy = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
    return loss, entropy, config.router_aux_loss_coef


print(f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}")
more = {}
for family, options in MODELS.items():
    for on in (False, True):
        loss, entropy, coefficient = evaluate(sys.argv[1], family, options, on)
        more[family, on] = loss - entropy
        print(
            f"  {family:8} output_router_logits={on!s:5}, coefficient {coefficient}: eval_loss {loss:.4f}, cross entropy"
            f" {entropy:.4f}, perplexity {abs(math.exp(loss - entropy) - 1):.1%} off"
        )
as_described = (
    all(abs(more[family, False]) < 1e-4 for family in MODELS)
    and more["Olmoe", True] > 0.07
    and more["Qwen3Moe", True] > 0.007
    and more["Mixtral", True] > 0.0015
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/evaluate.py" "$folder/out"
