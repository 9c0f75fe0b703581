#!/usr/bin/env bash
# torchtitan 0.3.0 with PyTorch 2.13.0, on a CPU: GroupedExperts in a float32 model.
#
# Seen: the experts convert their rows and weights to bfloat16, whatever the model is in, multiply there, and convert the
# product back, so the result says float32. Output and gradients of a float32 layer are 0.5 % off, and equal, bit for bit,
# those of a layer whose rows and weights were rounded to bfloat16 beforehand. A change of the input by 1 / 1000 of a value
# changes nothing at all. The feed-forward of a dense layer in the same float32 is exact to 1e-6.
#
# A good guess: training.mixed_precision_param="float32" is a float32 training, as it is for all other layers. It matters to
# whoever looks for a difference between two implementations or two numbers of ranks in float32, or checks gradients: the
# experts, which are most of the model, keep the noise of bfloat16, and no dtype that one can print shows it.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy triton==3.6.0 tyro==1.0.17 spmd_types==0.2.3
"$folder/venv/bin/pip" install --quiet --no-deps torchtitan==0.3.0  # its layers need no more than the above

cat > "$folder/experts.py" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from torch.nn.functional import silu
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts

HIDDEN, INNER, EXPERTS, ROWS = 64, 128, 4, 16  # rows of each expert
torch.manual_seed(0)


def exact(x, w1, w2, w3):
    """Return SwiGLU in float64."""
    x, w1, w2, w3 = (t.double() for t in (x, w1, w2, w3))
    return (silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT


def error(seen, expected):
    return ((seen - expected).norm() / expected.norm()).item()


def experts_of(rows, round_first=False):
    """Return the output of the experts, and the gradient of the rows."""
    rows = rows.clone()
    layer = GroupedExperts.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=EXPERTS).build()
    for weight, value in zip(layer.parameters(), weights):
        weight.data.copy_(value.bfloat16() if round_first else value)
    rows = (rows.bfloat16().float() if round_first else rows).requires_grad_()
    output = layer(rows, torch.full((EXPERTS,), ROWS))
    return output.detach(), torch.autograd.grad(output, rows, grad_of_output)[0]


weights = [
    0.1 * torch.randn(*shape)
    for shape in ((EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER), (EXPERTS, INNER, HIDDEN))
]
rows, grad_of_output = torch.randn(EXPERTS * ROWS, HIDDEN), torch.randn(EXPERTS * ROWS, HIDDEN)
by_expert = rows.double().view(EXPERTS, ROWS, HIDDEN).requires_grad_()
expected = exact(by_expert, *weights)
(expected_gradient,) = torch.autograd.grad(expected, by_expert, grad_of_output.double().view_as(expected))
output, gradient = experts_of(rows)
rounded = experts_of(rows, round_first=True)
moved, _ = experts_of(rows.bfloat16().float() * (1 + 1e-3))

dense = FeedForward.Config(
    w1=Linear.Config(in_features=HIDDEN, out_features=INNER),
    w2=Linear.Config(in_features=INNER, out_features=HIDDEN),
    w3=Linear.Config(in_features=HIDDEN, out_features=INNER),
).build()
for name, value in zip(("w1", "w2", "w3"), weights):
    getattr(dense, name).weight.data.copy_(value[0])

seen = {
    "experts, output": error(output, expected.view_as(output)),
    "experts, gradient of the rows": error(gradient, expected_gradient.view_as(gradient)),
    "dense feed-forward, output": error(dense(rows[:ROWS]).detach(), expected[0]),
}
is_rounded = torch.equal(output, rounded[0]) and torch.equal(gradient, rounded[1])
is_blind = torch.equal(moved, rounded[0])
print(
    f"torchtitan {version('torchtitan')}, PyTorch {torch.__version__.partition('+')[0]}, weights, rows and result"
    f" {output.dtype}"
)
for name, value in seen.items():
    print(f"  {name:29} relative error {value:.1e}")
print(
    f"  the same bits with rows and weights rounded to bfloat16 first: {is_rounded}; with rows 0.1 % larger: {is_blind}"
)
first, second, third = seen.values()
as_described = output.dtype == torch.float32 and min(first, second) > 1e-3 and third < 1e-5 and is_rounded and is_blind
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/experts.py"
