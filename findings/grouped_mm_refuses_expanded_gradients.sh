#!/usr/bin/env bash
# PyTorch 2.13.0, torch.nn.functional.grouped_mm on a CPU, bfloat16 and float32: the backward of a product that is summed.
#
# Seen: grouped_mm(...).sum().backward() raises "Invalid strides/sizes, got [0, 0] for strides and [16, 32] for sizes", and
# so does a sum over the rows or over the columns alone. The gradient of a sum is one number or one row that is expanded,
# with strides of 0. The backward passes it on to grouped_mm as it is, and that takes only strides of a matrix in memory. bmm
# takes the same gradients. With .mean(), which divides the gradient first, or after any product, grouped_mm works too.
#
# A good guess: a gradient may have any strides, as autograd promises for its own operators. It matters for tests, where
# y.sum().backward() is what one writes first, and for layers that end in a sum over tokens or experts: the forward works,
# and the error names strides that the program has never made.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat > "$folder/gradients.py" <<'PYTHON'
import sys

import torch
from torch.nn.functional import grouped_mm

LOSSES = {
    "y.sum()": lambda y: y.sum(),
    "y.sum(0).square().sum()": lambda y: y.sum(0).square().sum(),
    "y.sum(1).square().sum()": lambda y: y.sum(1).square().sum(),
    "y.mean()": lambda y: y.mean(),
    "y.square().sum()": lambda y: y.square().sum(),
    "y.mul(1).sum()": lambda y: y.mul(1).sum(),
}


def with_grouped_mm(rows, matrices):
    return grouped_mm(rows, matrices, offs=torch.tensor([8, 16], dtype=torch.int32))


def with_bmm(rows, matrices):
    return torch.bmm(rows.view(2, 8, 16), matrices).view(16, 32)


def backward(product, loss, dtype):
    """Return "right", or the error."""
    torch.manual_seed(0)
    rows = torch.randn(16, 16).to(dtype).requires_grad_()
    matrices = torch.randn(2, 16, 32).to(dtype).requires_grad_()
    try:
        loss(product(rows, matrices)).backward()
    except RuntimeError as error:
        return str(error)
    return "right"


print(f"PyTorch {torch.__version__.partition('+')[0]}")
as_described = True
for dtype in (torch.float32, torch.bfloat16):
    for name, loss in LOSSES.items():
        of_bmm, of_grouped_mm = (backward(product, loss, dtype) for product in (with_bmm, with_grouped_mm))
        print(f"  {str(dtype):14} {name:23} bmm: {of_bmm}, grouped_mm: {of_grouped_mm}")
        raises = "Invalid strides/sizes" in of_grouped_mm
        as_described &= of_bmm == "right" and raises == name.startswith("y.sum")
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/gradients.py"
