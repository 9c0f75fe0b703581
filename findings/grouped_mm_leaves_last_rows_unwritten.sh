#!/usr/bin/env bash
# PyTorch 2.13.0, torch.nn.functional.grouped_mm(rows, matrices, offs=...) on a CPU, bfloat16 and float32.
#
# Seen: rows behind the last offset belong to no group. The product's rows there are not written, and neither are those
# of the gradient of the rows: both have what the memory had before. Where PyTorch fills new memory with NaN
# (use_deterministic_algorithms) they are NaN, and stay NaN when they are multiplied by a weight of 0. The gradient of the
# matrix of a group without rows is zeros.
#
# A good guess: a row of no group is multiplied by nothing, so the result is zeros, as it is for the gradient of a matrix
# without rows. It matters for experts with a fixed number of rows, of which a step fills some: what fills the rest must
# be masked by torch.where, not by a weight of 0, and gradients of unused rows are not zeros either.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat > "$folder/last_rows.py" <<'PYTHON'
import sys

import torch
from torch.nn.functional import grouped_mm

ROWS, USED = 24, 16
torch.use_deterministic_algorithms(True)  # new memory is filled with NaN, so that what is not written shows
torch.manual_seed(0)
print(f"PyTorch {torch.__version__.partition('+')[0]}, {ROWS} rows, of which 4 groups have 8, 0, 8 and 0")
found = []
for dtype in (torch.bfloat16, torch.float32):
    rows = torch.randn(ROWS, 16).to(dtype).requires_grad_()
    matrices = torch.randn(4, 16, 32).to(dtype).requires_grad_()
    product = grouped_mm(rows, matrices, offs=torch.tensor([8, 8, 16, 16], dtype=torch.int32))
    weights = (torch.arange(ROWS) < USED).to(dtype)
    weighted = product * weights[:, None]
    torch.where(weights[:, None] > 0, product, 0).sum().backward()
    facts = {
        "used rows of the product are numbers": not product[:USED].isnan().any(),
        "its other rows are NaN": product[USED:].isnan().all(),
        "and NaN when multiplied by a weight of 0": weighted[USED:].isnan().all(),
        "used rows of the gradient are numbers": not rows.grad[:USED].isnan().any(),
        "the gradient's other rows are NaN": rows.grad[USED:].isnan().all(),
        "gradients of matrices without rows are zeros": matrices.grad[[1, 3]].eq(0).all(),
    }
    for text, fact in facts.items():
        print(f"  {dtype}: {text}: {bool(fact)}")
    found += map(bool, facts.values())
as_described = all(found)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/last_rows.py"
