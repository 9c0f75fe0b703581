#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: TopKRouter with group-limited routing and an auxiliary loss.
#
# Seen: 4 experts in 2 groups, of which a token may use one, top-2. Every token goes to experts 0 and 1. The auxiliary loss
# is 1, its least value, and its gradient is 0. It counts the experts that each token would choose if there were no
# groups, and those are spread evenly. The same router without groups has the same loss, and there it is right.
# megatron-core 0.19.2 (Python 3.12) does the same.
#
# A good guess: the loss counts the tokens that experts get, as its docstring says ("fraction of tokens dispatched to
# expert i"). Then it is 1.29 here, and pulls tokens away from the full experts. It matters for device- or node-limited
# routing: the groups are what makes ranks uneven, and the loss that should even them out, and its log, see nothing.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/groups.py" <<'PYTHON'
import sys
from types import SimpleNamespace

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS, EXPERTS, TOPK = 8, 4, 2
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
itself = SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD, tp_cp=dist.group.WORLD, tp_dp_cp=dist.group.WORLD)
print(f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}, top-{TOPK} of {EXPERTS}")


def loss_from(tokens, probabilities):
    """Return the auxiliary loss as the docstring defines it: experts * sum over experts of f * P."""
    return EXPERTS * (tokens / tokens.sum() * probabilities.mean(0)).sum().item()


seen = {}
for groups in (None, 2):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_num_groups=groups,
        moe_router_group_topk=groups and 1,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1.0,
    )
    router = TopKRouter(config, itself)
    router.set_layer_number(1)
    # Even tokens like experts 0 and 2 best, odd ones 1 and 3. Of group 0 they like the other expert too.
    logits = torch.tensor([[3.0, 2.9, 3.0, 0.0], [2.9, 3.0, 0.0, 3.0]]).repeat(TOKENS // 2, 1)[:, None].requires_grad_()
    probs, routing_map = router.routing(logits)
    probs.sum().backward()  # the sum of a token's probabilities is 1, so the gradient is that of the auxiliary loss
    is_flat = logits.grad.abs().max().item() < 1e-6
    tokens = routing_map.sum(0)
    loss = get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"].item()
    clear_aux_losses_tracker()
    by_definition = loss_from(tokens, logits.detach()[:, 0].softmax(-1))
    seen[groups] = tokens.tolist(), round(loss, 2), is_flat, round(by_definition, 2)
    print(f"  groups {groups}: tokens of each expert {tokens.tolist()}, loss {loss:.2f}, gradient is 0: {is_flat}")
    print(f"    by its docstring the loss of these tokens is {by_definition:.2f}")
as_described = seen == {None: ([4, 4, 4, 4], 1.0, True, 1.0), 2: ([8, 8, 0, 0], 1.0, True, 1.29)}
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/groups.py"
