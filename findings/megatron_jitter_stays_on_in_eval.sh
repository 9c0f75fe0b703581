#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: TopKRouter in eval(), with moe_input_jitter_eps.
#
# Seen: the router multiplies its input by noise in an evaluation as it does in training. With an eps of 0.1 and top-2 of 8
# experts, 8 % of the tokens have another pair of experts when the same input comes a second time, and with 0.01 about 1 %.
# Dropout is off in eval(), and so are the auxiliary losses and the z loss of the same router; the jitter asks only whether
# eps is set. megatron-core 0.19.2 (Python 3.12) does the same.
#
# A good guess: noise is for training, as in the Switch Transformer paper, which the docstring names, and as the jitter of
# Mixtral in transformers is. It matters for validation losses, for text that is generated in the middle of a run, and for
# whoever compares a converted checkpoint or a dispatcher with this one: two runs differ, and eval() does not help.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/twice.py" <<'PYTHON'
import sys
from types import SimpleNamespace

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS, HIDDEN, EXPERTS = 1000, 16, 8
torch.cuda.current_device = lambda: "cpu"  # the router moves its weight there
moe_utils.te_general_gemm = None  # 0.16 reads the name also where Transformer Engine is missing
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
itself = SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD, tp_cp=dist.group.WORLD, tp_dp_cp=dist.group.WORLD)


@torch.no_grad()
def fraction_that_differs(eps, training):
    """Return the fraction of tokens that get other experts when the router runs a second time."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_input_jitter_eps=eps,
        use_cpu_initialization=True,
    )
    router = TopKRouter(config, itself).train(training)
    router.weight.normal_()
    tokens = torch.randn(TOKENS, 1, HIDDEN)
    (_, first), (_, second) = router(tokens), router(tokens)
    return (first != second).any(-1).float().mean().item()


print(
    f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}, the same tokens twice"
)
seen = {}
for eps in (None, 0.01, 0.1):
    seen[eps] = [fraction_that_differs(eps, training) for training in (True, False)]
    print(
        f"  moe_input_jitter_eps {eps}: other experts for {seen[eps][0]:.1%} in train(), {seen[eps][1]:.1%} in eval()"
    )
as_described = seen[None] == [0, 0] and all(train == evaluation > 0 for train, evaluation in (seen[0.01], seen[0.1]))
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/twice.py"
