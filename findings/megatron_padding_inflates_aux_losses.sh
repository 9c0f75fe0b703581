#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: auxiliary losses of TopKRouter with a padding mask (True is padding).
#
# Seen: the router is perfectly balanced, and the coefficient is 1. "aux_loss" is 1 for any padding. "seq_aux_loss" is 3
# where 7 of 8 sequences have a tenth of the tokens, and up to the number of sequences: what a sequence has is divided by
# the square of the mean length, not by that of its own. "global_aux_loss" of a microbatch of 12 tokens after one of 1000
# is 42: its tokens times the mean count of both, divided by the square of its own count. For a microbatch that is all
# padding every loss is NaN, and so is the router's gradient. megatron-core 0.19.2 (Python 3.12) does the same.
#
# A good guess: padding is left out, so a balanced router has the loss 1 for any lengths, and a batch without tokens has 0,
# as the z loss has. It matters for fine-tuning on samples of different lengths: the weight of the loss follows the lengths
# in a batch, and one filler batch of the data loader makes the weights NaN.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/padding.py" <<'PYTHON'
import math
import sys
from types import SimpleNamespace

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS = 4
torch.cuda.current_device = lambda: "cpu"  # where the router puts its counters
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
itself = SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD, tp_cp=dist.group.WORLD, tp_dp_cp=dist.group.WORLD)
print(f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}, top-1 of {EXPERTS}")
LOGGED = dict(
    aux_loss="load_balancing_loss", seq_aux_loss="seq_load_balancing_loss", global_aux_loss="global_load_balancing_loss"
)


def losses(kind, *microbatches):
    """Return the loss of the last microbatch, and whether its gradient has NaN. A microbatch: lengths of sequences."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=1.0,
    )
    router = TopKRouter(config, itself)
    router.set_layer_number(1)
    for lengths in microbatches:
        clear_aux_losses_tracker()
        position = torch.arange(max(1000, *lengths))
        # The token at each position chooses expert (position % experts), so each has a fourth of every sequence.
        logits = 3.0 * torch.nn.functional.one_hot(position % EXPERTS, EXPERTS)
        logits = logits[:, None].repeat(1, len(lengths), 1).requires_grad_()
        probs, _ = router.routing(logits, padding_mask=position[:, None] >= torch.tensor(lengths))
        probs.sum().backward()
    loss = get_moe_layer_wise_logging_tracker()[LOGGED[kind]]["values"].item()
    return round(loss, 1), logits.grad.isnan().any().item()


cases = [
    ("aux_loss", [1000] * 8),
    ("aux_loss", [1000] + [100] * 7),
    ("aux_loss", [0] * 8),
    ("seq_aux_loss", [1000] * 8),
    ("seq_aux_loss", [1000] + [100] * 7),
    ("seq_aux_loss", [1000] + [4] * 7),
    ("seq_aux_loss", [0] * 8),
    ("global_aux_loss", [1000], [1000]),
    ("global_aux_loss", [1000], [12]),
    ("global_aux_loss", [12], [1000]),
    ("global_aux_loss", [1000], [0]),
]
seen = [losses(*case) for case in cases]
for (kind, *microbatches), (loss, has_nan) in zip(cases, seen):
    lengths = ", then ".join(map(str, microbatches))
    print(f"  {kind:15} of lengths {lengths:48} {loss:5}, gradient has NaN: {has_nan}")
expected = [1.0, 1.0, None, 1.0, 3.0, 7.6, None, 1.0, 42.2, 0.5, None]
as_described = all(
    (math.isnan(loss) and has_nan) if value is None else (loss == value and not has_nan)
    for (loss, has_nan), value in zip(seen, expected)
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/padding.py"
