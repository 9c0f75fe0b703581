#!/usr/bin/env bash
# Triton 3.6.0, compiled for compute capability 9.0. No GPU is needed.
#
# Seen: a loop with num_stages=4 multiplies float8 tiles, and multiplies each product by scales that it loads in the same
# step, as blockwise recipes do. Both tiles come several steps ahead, but the scales do not come ahead at all: in Triton's
# own code their loads stand behind the wait for the product, although nothing in them depends on it. So every step of the
# sum waits for the memory once. If the program itself loads the scales of the next step before the product, and carries
# them through the loop, the loads stand before it, and bits do not change.
#
# A good guess: num_stages pipelines all loads of a loop, or at least the compiler moves a load that depends on nothing
# above a wait of hundreds of cycles. It matters for every blockwise float8 GEMM: on an H200 carrying the scales took 0 to
# 10 % off grouped GEMMs.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet triton==3.6.0

cat > "$folder/scales.py" <<'PYTHON'
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

M, N, K, STAGES, WARPS = 128, 128, 128, 4, 8


@triton.jit
def in_the_same_step(a, b, scales, out, length, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row = tl.arange(0, M)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, length, K):
        product = tl.dot(a.load([0, k]), b.load([0, k]).T)
        total += product * tl.load(scales + row * (length // K) + k // K)[:, None]
    tl.store(out + row[:, None] * N + tl.arange(0, N)[None, :], total)


@triton.jit
def a_step_ahead(a, b, scales, out, length, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row = tl.arange(0, M)
    total = tl.zeros((M, N), tl.float32)
    scale = tl.load(scales + row * (length // K))
    for k in range(0, length, K):
        factor = scale
        scale = tl.load(scales + row * (length // K) + k // K + 1, (k + K < length) & (row < M), 0)
        total += tl.dot(a.load([0, k]), b.load([0, k]).T) * factor[:, None]
    tl.store(out + row[:, None] * N + tl.arange(0, N)[None, :], total)


def steps_of_loop(kernel):
    """Return what the compiled loop does with memory and products, in order, by names of Triton's own operations."""
    tile = f"tensordesc<fp8e4nv[{M}, {K}]>"
    types = [tile, tile, "*fp32", "*fp32", "i32", "constexpr", "constexpr", "constexpr"]
    signature = dict(zip(kernel.arg_names, types))
    source = ASTSource(fn=kernel, signature=signature, constexprs={(5,): M, (6,): N, (7,): K})
    options = dict(num_warps=WARPS, num_stages=STAGES)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    loop = text[text.index("scf.for") : text.index("scf.yield")]
    names = {"tt.load": "load of scales", "warp_group_dot_wait": "wait for the product", "warp_group_dot ": "product"}
    found = re.findall("|".join(map(re.escape, names)), loop)
    ahead = len(re.findall("async_tma_copy_global_to_local", text[: text.index("scf.for")]))
    return [names[one] for one in found], ahead


print(f"Triton {triton.__version__}, float8 tiles of {M} x {N} x {K}, {STAGES} stages: one step of the loop")
same, tiles_ahead = steps_of_loop(in_the_same_step)
ahead, _ = steps_of_loop(a_step_ahead)
print(f"  scales loaded in the same step   {', '.join(same)}; loads of tiles before the loop: {tiles_ahead}")
print(f"  scales loaded a step ahead       {', '.join(ahead)}")
as_described = (
    same == ["product", "wait for the product", "load of scales"]
    and ahead == ["load of scales", "product", "wait for the product"]
    and tiles_ahead == 2 * (STAGES - 1)
)
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/scales.py"
