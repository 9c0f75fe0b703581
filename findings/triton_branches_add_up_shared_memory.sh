#!/usr/bin/env bash
# Triton 3.6.0, compiled for compute capability 9.0. No GPU is needed.
#
# Seen: a kernel picks one of two matrices by an `if`, and multiplies tiles of it in a pipelined loop. With one such loop
# in each branch the kernel needs twice the shared memory of one loop, although a program runs only one of them. A tile of
# 128 x 256 x 64 in three stages then asks for more than the 227 KiB of a Hopper block, and the kernel cannot be launched.
# If the `if` picks the tensor descriptor instead, with one loop behind it, the kernel needs what one loop needs.
#
# A good guess: buffers of two branches are never alive together, so they share memory, as registers do; and a descriptor
# of the tensor memory accelerator, which is an argument of the kernel, is the one thing that a branch cannot choose. It
# matters for grouped GEMMs whose matrices lie further apart than one descriptor reaches.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet triton==3.6.0

cat > "$folder/branches.py" <<'PYTHON'
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

M, N, K, STAGES, WARPS = 128, 256, 64, 3, 8


@triton.jit
def products(a, b, length, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, length, K):
        total = tl.dot(a.load([0, k]), b.load([k, 0]), total)
    return total


@triton.jit
def one_matrix(a, first, second, out, choice, length, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    total = products(a, first, length, M, N, K)
    tl.store(out + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], total)


@triton.jit
def loop_in_each_branch(a, first, second, out, choice, length, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    if choice == 0:
        total = products(a, first, length, M, N, K)
    else:
        total = products(a, second, length, M, N, K)
    tl.store(out + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], total)


@triton.jit
def branch_picks_descriptor(a, first, second, out, choice, length, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    if choice == 0:
        chosen = first
    else:
        chosen = second
    total = products(a, chosen, length, M, N, K)
    tl.store(out + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], total)


def shared_bytes(kernel):
    matrix = f"tensordesc<bf16[{K}, {N}]>"
    types = [f"tensordesc<bf16[{M}, {K}]>", matrix, matrix, "*fp32", "i32", "i32", "constexpr", "constexpr", "constexpr"]
    signature = dict(zip(kernel.arg_names, types))
    source = ASTSource(fn=kernel, signature=signature, constexprs={(6,): M, (7,): N, (8,): K})
    options = dict(num_warps=WARPS, num_stages=STAGES)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


one, each, picked = map(shared_bytes, (one_matrix, loop_in_each_branch, branch_picks_descriptor))
print(f"Triton {triton.__version__}, tiles of {M} x {N} x {K}, {STAGES} stages: bytes of shared memory")
print(f"  one matrix                     {one}")
print(f"  a loop in each branch          {each}")
print(f"  a branch picks the descriptor  {picked}")
as_described = 1.9 * one < each and each > 227 * 1024 and picked == one
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/branches.py"
