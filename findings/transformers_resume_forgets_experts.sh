#!/usr/bin/env bash
# transformers 5.24.0 and accelerate 1.15.0 with PyTorch 2.13.0, on a CPU: Trainer.train(resume_from_checkpoint=...) and
# load_best_model_at_end of MoE models.
#
# Seen: a resumed run of Mixtral, Qwen3-MoE or DeepSeek-V3 begins with the experts that the script has made before, which are
# those of step 0 or of the base model. All other weights and the optimizer's state are those of the checkpoint (in Mixtral
# the routers are forgotten too). With load_best_model_at_end the experts stay those of the last step, and the rest goes back
# to the best one. save_pretrained writes each expert under a name of its own; Trainer reads the file with
# load_state_dict(strict=False), and the model has one tensor for all of them. In the log are two warnings with lists of
# missing and unexpected keys. gpt-oss, whose files have the model's names, resumes right.
#
# A good guess: a resumed run goes on where the checkpoint was, or stops. It matters because it does go on: the loss after a
# restart is higher, falls again, and nearly all of what the run had learned is gone.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0

cat > "$folder/resume.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
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
    pad_token_id=0,
)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
MODELS = {
    "Mixtral": dict(num_local_experts=8),
    "Qwen3Moe": dict(num_experts=8),
    "DeepseekV3": LATENT | dict(n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=0),
    "GptOss": dict(num_local_experts=8),
}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, number):
        tokens = torch.randint(1, 64, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


class Snapshots(TrainerCallback):
    """Keep the weights before the first step of this run, and after each step."""

    def __init__(self):
        self.after = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.first = copy(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after[state.global_step] = copy(model)


def copy(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def differing(one, other):
    return {name.partition(".mlp.")[2] or name for name in one if not torch.equal(one[name], other[name])}


def run(folder, family, checkpoint=None, **options):
    """Train for 4 steps from the same first weights, or resume. Return snapshots, last weights and the best checkpoint."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**SIZES, **MODELS[family])
    )
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        save_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    snapshots = Snapshots()
    trainer = Trainer(model, arguments, train_dataset=Samples(), eval_dataset=Samples(), callbacks=[snapshots])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    return snapshots, copy(model), trainer.state.best_model_checkpoint


print(f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}")
seen = {}
for family in MODELS:
    folder = f"{sys.argv[1]}/{family}"
    whole, last, _ = run(folder, family)
    resumed, last_resumed, _ = run(folder, family, f"{folder}/checkpoint-2")
    forgotten = differing(resumed.first, whole.after[2])
    from_the_start = all(torch.equal(resumed.first[n], whole.first[n]) for n in whole.first if ".experts." in n)
    # The largest loss is taken for the best, so that the best step is the first one that is evaluated.
    best, at_end, where = run(
        f"{folder}/best",
        family,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    assert where.endswith("checkpoint-2")
    not_best = differing(at_end, best.after[2])
    experts_of_last = all(torch.equal(at_end[n], best.after[4][n]) for n in at_end if ".experts." in n)
    seen[family] = forgotten, from_the_start, not_best, experts_of_last
    print(
        f"  {family:10} resumed at step 2, not of step 2: {sorted(forgotten) or 'nothing'}, experts are those of step"
        f" 0: {from_the_start}; best step 2, not of step 2: {sorted(not_best) or 'nothing'}, experts are those of step 4:"
        f" {experts_of_last}"
    )
experts = {"experts.gate_up_proj", "experts.down_proj"}
as_described = seen.pop("GptOss") == (set(), False, set(), False) and all(
    one == other == experts | ({"gate.weight"} if family == "Mixtral" else set()) and start and end
    for family, (one, start, other, end) in seen.items()
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/resume.py" "$folder/out"
