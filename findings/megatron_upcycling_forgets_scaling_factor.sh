#!/usr/bin/env bash
# megatron-core 0.16.1 with PyTorch 2.13.0, on a CPU: upcycle_state_dict, which makes experts of a dense MLP.
#
# Seen: with moe_router_topk_scaling_factor 2.5, as DeepSeek-V3 routes, the upcycled layer returns 2.5 times what the dense
# MLP returns. Without the factor it returns the same within rounding, with softmax and sigmoid alike. The conversion scales
# weights for moe_router_pre_softmax and for experts that are a part of the MLP, but not for the factor. Those two scales
# hold roughly: one assumes equal probabilities, and is 27 % off with a fresh router. The other goes through the activation,
# and is 7 % off with halved experts. Top-3 of halved experts, one and a half MLPs, is accepted too, and 35 % off.
# megatron-core 0.19.2 (Python 3.12) does the same.
#
# A good guess: an upcycled model starts as the dense one, or the conversion refuses what it cannot do. It matters because
# nothing fails: each MLP adds 2.5 times what it should to the residual stream, the first loss is far above that of the
# dense checkpoint, and the router or the learning rate gets the blame.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy

cat > "$folder/upcycle.py" <<'PYTHON'
import sys

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, DENSE = 32, 64
torch.cuda.current_device = lambda: "cpu"  # the router makes its tensors there
moe_utils.te_general_gemm = None  # 0.16 reads the name also where Transformer Engine is missing
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()


def model(experts=None, **options):
    """Return a module with an MLP, or with a layer of so many experts, under the name that the conversion looks for."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=DENSE,
        num_attention_heads=2,
        num_moe_experts=experts,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        use_cpu_initialization=True,
        **options,
    )
    spec = get_mlp_module_spec(use_te=False, num_experts=experts)
    module = torch.nn.Module()
    module.mlp = spec.module(config, spec.submodules) if experts is None else spec.module(config, spec.submodules, 1)
    return module


@torch.no_grad()
def compare(**options):
    """Return the length of the upcycled output over the dense one's, and the relative error."""
    torch.manual_seed(0)
    dense = model()
    for weight in dense.parameters():
        weight.normal_(std=weight.shape[1] ** -0.5)
    moe = model(moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather", **options)
    moe.load_state_dict(upcycle_state_dict([moe], [dense])["model"], strict=False)
    x = torch.randn(64, 1, HIDDEN)
    expected, seen = dense.mlp(x)[0], moe.mlp(x)[0]
    return (seen.norm() / expected.norm()).item(), ((seen - expected).norm() / expected.norm()).item()


whole = dict(experts=8, moe_router_topk=2, moe_ffn_hidden_size=DENSE)
half = dict(experts=8, moe_ffn_hidden_size=DENSE // 2)
cases = {
    "softmax": whole,
    "sigmoid": whole | dict(moe_router_score_function="sigmoid"),
    "sigmoid, scaling factor 2.5": whole
    | dict(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5),
    "softmax, scaling factor 2.5": whole | dict(moe_router_topk_scaling_factor=2.5),
    "softmax before top-k": whole | dict(moe_router_pre_softmax=True),
    "experts of half the size, top-2": half | dict(moe_router_topk=2),
    "experts of half the size, top-3": half | dict(moe_router_topk=3),
}
print(
    f"megatron-core {megatron.core.__version__}, PyTorch {torch.__version__.partition('+')[0]}, upcycled against dense"
)
seen = {name: compare(**options) for name, options in cases.items()}
for name, (length, error) in seen.items():
    print(f"  {name:32} length {length:.2f}, relative error {error:.1%}")
lengths = [round(length, 2) for length, _ in seen.values()]
errors = [error for _, error in seen.values()]
as_described = lengths[:4] == [1.0, 1.0, 2.5, 2.5] and max(errors[:2]) < 1e-5 and min(errors[4:]) > 0.01
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/upcycle.py"
