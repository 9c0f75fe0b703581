#!/usr/bin/env bash
# transformers 5.24.0 and accelerate 1.15.0 with PyTorch 2.13.0, on a CPU: a tiny Mixtral in Trainer, with
# output_router_logits.
#
# Seen: one optimizer step on 8 samples. As one batch of 8, the auxiliary loss has the weight router_aux_loss_coef. As 8
# batches of 1 with gradient_accumulation_steps=8 its gradient is 8 times as large, and with 2 processes of 4 samples twice
# as large. The gradient of the main loss stays the same. Trainer divides that by the tokens of the whole step, and the
# model adds the auxiliary loss of each batch undivided behind this. The samples here are all the same one, so the loss of
# a part is that of the whole.
#
# A good guess: how a step is divided does not change its gradient, as it does not for the main loss since num_items_in_batch.
# It matters to whoever moves a recipe to fewer or more GPUs: with 8 GPUs and 16 accumulated batches a coefficient of 0.001
# is 0.128, and the router balances where it should learn. The logged loss has the same excess.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0

cat > "$folder/step.py" <<'PYTHON'
"""Train one step with a learning rate of 0, and save the gradients of both routers."""

import os
import sys
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments

SAMPLES, LENGTH, WORDS = 8, 32, 64
coefficient, accumulation, out = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
num_processes = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
model = MixtralForCausalLM(
    MixtralConfig(
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
    )
)
sample = torch.randint(0, WORDS, (LENGTH,))
gradients = []


class KeepGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        gradients.extend(p.grad.flatten() for name, p in model.named_parameters() if name.endswith("gate.weight"))


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=SAMPLES // accumulation // num_processes,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        learning_rate=0.0,
        max_grad_norm=1e9,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    data = [dict(input_ids=sample, labels=sample)] * SAMPLES
    Trainer(model, arguments, train_dataset=data, callbacks=[KeepGradients()]).train()
if int(os.environ.get("RANK", 0)) == 0:
    torch.save(torch.cat(gradients), out)
PYTHON

cat > "$folder/compare.py" <<'PYTHON'
import sys
from pathlib import Path

import accelerate
import torch
import transformers

folder = Path(sys.argv[1])
print(f"transformers {transformers.__version__}, accelerate {accelerate.__version__}: 8 samples, gradients of the routers")


def of(case, coefficient):
    return torch.load(folder / f"{case}_{coefficient}")


def times(gradient, reference):
    """Return the factor between two gradients that differ by a factor alone."""
    factor = (gradient @ reference / (reference @ reference)).item()
    assert torch.allclose(gradient, factor * reference, rtol=1e-3, atol=1e-6)
    return round(factor, 2)


seen = []
for processes, accumulation in ((1, 1), (1, 2), (1, 8), (2, 1), (2, 4)):
    main, both = (of(f"{processes}_{accumulation}", one) for one in (0, 1))
    reference, reference_both = of("1_1", 0), of("1_1", 1)
    seen.append((times(main, reference), times(both - main, reference_both - reference)))
    print(f"  {processes} processes, {accumulation} accumulated: main loss x {seen[-1][0]}, auxiliary loss x {seen[-1][1]}")
as_described = seen == [(1, 1), (1, 2), (1, 8), (1, 2), (1, 8)]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
for case in 1_1 1_2 1_8 2_1 2_4; do
    for coefficient in 0 1; do
        "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node "${case%_*}" "$folder/step.py" \
            "$coefficient" "${case#*_}" "$folder/${case}_$coefficient" > "$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
    done
done
"$folder/venv/bin/python" "$folder/compare.py" "$folder" 2> /dev/null
