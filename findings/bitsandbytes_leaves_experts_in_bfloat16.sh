#!/usr/bin/env bash
# bitsandbytes 0.50.2 and transformers 5.24.0 with PyTorch 2.13.0, on a CPU: BitsAndBytesConfig for MoE models.
#
# Seen: load_in_4bit=True and load_in_8bit=True leave the experts of Mixtral, Qwen3-MoE and gpt-oss in bfloat16. Layers that
# are a Linear are replaced, and experts are one tensor of all of them. The small models here keep 98 % of their bytes in
# 4 bits, a dense Mistral 27 %. Nothing is logged about it, and model.is_loaded_in_4bit is True.
#
# A good guess: a quarter of the memory, as in the dense model, and as it was for Mixtral when each expert was made of
# Linear layers. It matters because experts are nearly all of such a model: a Mixtral 8x7B in 4 bits, which is known to
# fit in 27 GB, asks for more than 90, and a QLoRA recipe that ran with an older version runs out of memory.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.2 numpy

cat > "$folder/quantised.py" <<'PYTHON'
import logging
import sys

import bitsandbytes
import torch
import transformers
from transformers import BitsAndBytesConfig

transformers.logging.set_verbosity_warning()
transformers.logging.disable_progress_bar()
SIZES = dict(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    num_experts_per_tok=2,
    pad_token_id=0,
)
MODELS = {
    "Mistral": {},
    "Mixtral": dict(num_local_experts=32),
    "Qwen3Moe": dict(num_experts=32),
    "GptOss": dict(num_local_experts=32),
}


class Said(logging.Handler):
    """Keep what transformers logs."""

    def emit(self, record):
        said.append(record.getMessage())


said = []
logging.getLogger("transformers").addHandler(Said())
print(
    f"bitsandbytes {bitsandbytes.__version__}, transformers {transformers.__version__}, PyTorch"
    f" {torch.__version__.partition('+')[0]}"
)
as_described = True
for family, options in MODELS.items():
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    path = f"{sys.argv[1]}/{family}"
    model.save_pretrained(path)
    for bits in (4, 8):
        said.clear()
        quantization = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
        loaded = type(model).from_pretrained(
            path, quantization_config=quantization, dtype=torch.bfloat16, device_map="cpu"
        )
        dtypes = {str(p.dtype).removeprefix("torch.") for name, p in loaded.named_parameters() if ".experts." in name}
        left = loaded.get_memory_footprint() / model.get_memory_footprint()
        logged = any("expert" in line for line in said)
        print(
            f"  {family:8} {bits} bits: {left:3.0%} of the bytes of bfloat16, experts {', '.join(dtypes) or 'none'},"
            f" something logged about experts: {logged}"
        )
        if family == "Mistral":
            as_described &= left < 0.6
        else:
            as_described &= left > 0.97 and dtypes == {"bfloat16"} and not logged
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/quantised.py" "$folder/models" 2> "$folder/errors" || {
    cat "$folder/errors"
    exit 1
}
