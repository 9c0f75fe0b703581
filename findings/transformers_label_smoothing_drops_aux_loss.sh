#!/usr/bin/env bash
# transformers 5.24.0 and accelerate 1.15.0 with PyTorch 2.13.0, on a CPU: label_smoothing_factor of Trainer, and a tiny
# Mixtral with output_router_logits.
#
# Seen: with any label_smoothing_factor above 0, be it 1e-9, the auxiliary loss is gone: the loss and the routers' gradients
# are the same bit for bit whether router_aux_loss_coef is 0 or 1. Trainer then makes a loss of its own from the logits, and
# leaves that of the model, which has the auxiliary loss in it, where it is. A compute_loss_func does the same, even if it is
# the cross entropy that the model would have used. Nothing is said, and outputs.aux_loss is still computed.
#
# A good guess: smoothing changes the loss of the labels, and nothing else. It matters because nothing fails: the loss falls,
# router_aux_loss_coef can be set to anything, and the routers lose what keeps them balanced by an option that is about
# something else.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0

cat > "$folder/smoothing.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()


def cross_entropy(outputs, labels, num_items_in_batch=None):
    """Return the cross entropy of the next token."""
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def step(folder, coefficient, smoothing, loss_func):
    """Return the loss that Trainer trains with, the auxiliary loss of the model, and the routers' gradients."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=8,
            output_router_logits=True,
            router_aux_loss_coef=coefficient,
        )
    )
    arguments = TrainingArguments(folder, label_smoothing_factor=smoothing, report_to="none", use_cpu=True)
    trainer = Trainer(model, arguments, compute_loss_func=loss_func)
    tokens = torch.randint(64, (4, 16))
    loss, outputs = trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens}, return_outputs=True)
    loss.backward()
    gradients = [p.grad.flatten() for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
    return loss.item(), outputs["aux_loss"].item(), torch.cat(gradients)


print(
    f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}, router_aux_loss_coef 0 and 1"
)
seen = {}
for name, smoothing, loss_func in (
    ("as it is", 0.0, None),
    ("label_smoothing_factor 1e-9", 1e-9, None),
    ("label_smoothing_factor 0.1", 0.1, None),
    ("compute_loss_func", 0.0, cross_entropy),
):
    (without, _, of_main), (with_it, aux_loss, of_both) = (
        step(sys.argv[1], coefficient, smoothing, loss_func) for coefficient in (0.0, 1.0)
    )
    seen[name] = without, with_it, torch.equal(of_main, of_both)
    print(
        f"  {name:27} loss {without:.3f} and {with_it:.3f}, auxiliary loss {aux_loss:.3f},"
        f" the same gradients of the routers: {seen[name][2]}"
    )
without, with_it, same = seen.pop("as it is")
as_described = with_it - without > 1 and not same and all(one == other and same for one, other, same in seen.values())
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/smoothing.py" "$folder/out"
