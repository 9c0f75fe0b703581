"""Signal to noise and times of experts in float8 beside bfloat16, on a GPU.

    python benchmarks/float8_experts.py                          # 4096 rows for float64, then the cases below
    python benchmarks/float8_experts.py --cases 0 --rounds 3

Decibels are those of grouped_mlp's results and gradients beside float64, for SwiGLU. Times are medians in microseconds
of CUDA graphs of ten calls, all sides in turn; in brackets TFLOP/s of GEMMs, TB/s that others read and write. "Triton"
is our kernel for GPUs other than Hopper. PyTorch's scaled_grouped_mm has one scale for each row and column, "fast"
without promoted sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ep_dispatcher.moe import float8_gemm, grouped_gemm, hopper_gemm
from ep_dispatcher.moe.activation import SWIGLU, Activation
from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp
from ep_dispatcher.tools.benchmark.harness import make_parser, median_times, on_device

DEVICE = "cuda"
NAMES = ("result", "grad of rows", "of row_weights", "of w1", "of w2")


class Case(NamedTuple):
    experts: int
    rows: int
    hidden: int
    intermediate: int


CASES = [
    Case(32, 32768, 2048, 768),
    Case(32, 32768, 4096, 1536),
    Case(64, 32768, 7168, 2048),
    Case(16, 2048, 2048, 768),
]


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--cases", type=int, nargs="*", help="only these cases, numbered from 0")
    args = parser.parse_args()
    for name, lost in decibels(Case(8, 4096, 2048, 768)).items():
        print(f"{name:9}", "   ".join(f"{what} {db:.1f} dB" for what, db in zip(NAMES, lost)), flush=True)
    for case in [CASES[number] for number in (range(len(CASES)) if args.cases is None else args.cases)]:
        print(case, flush=True)
        for name, (amount, sides) in operations(case).items():
            times = median_times({side: on_device(call) for side, call in sides.items()}, args.rounds)
            shown = (f"{side} {us:.0f} ({amount[side] / us / 1e6:.3g})" for side, us in times.items())
            print(f"  {name:22}", "   ".join(shown), flush=True)


def operands(case: Case) -> tuple[torch.Tensor, ...]:
    """rows, row_weights, w1, w2, ends and a gradient of the result; experts have unequal numbers of rows"""
    torch.manual_seed(0)
    counts = torch.rand(case.experts).add(0.5)
    counts = (counts / counts.sum() * case.rows).int()
    counts[-1] += case.rows - counts.sum()
    w1 = torch.randn(case.experts, 2 * case.intermediate, case.hidden, device=DEVICE) / case.hidden**0.5
    w2 = torch.randn(case.experts, case.hidden, case.intermediate, device=DEVICE) / case.intermediate**0.5
    rows, grad = (torch.randn(case.rows, case.hidden, device=DEVICE).bfloat16() for _ in range(2))
    row_weights = torch.rand(case.rows, device=DEVICE)
    return rows, row_weights, w1.bfloat16(), w2.bfloat16(), counts.cumsum(0).int().to(DEVICE), grad


def decibels(case: Case) -> dict[str, list[float]]:
    """Return the signal to noise of the result and of each gradient, in float8 and bfloat16."""
    *given, ends, grad = operands(case)
    exact = [t.double().requires_grad_() for t in given]
    rows, row_weights, w1, w2 = exact
    parts = []
    for e, (begin, end) in enumerate(zip([0, *ends.tolist()], ends.tolist())):
        gate, up = (rows[begin:end] @ w1[e].t()).chunk(2, dim=1)
        parts.append((F.silu(gate) * up * row_weights[begin:end, None]) @ w2[e].t())
    result = torch.cat(parts)
    result.backward(grad.double())
    right, lost = [result.detach(), *(t.grad for t in exact)], {}
    for name in ("float8", "bfloat16"):
        rows, row_weights, w1, w2 = leaves = [t.clone().requires_grad_() for t in given]
        float8 = (float8_gemm.quantize_weights(w1), float8_gemm.quantize_weights(w2)) if name == "float8" else None
        (out,) = grouped_mlp([(rows, row_weights, ends)], Parameters(w1, w2), float8=float8)
        out.backward(grad)
        seen = [out.detach(), *(t.grad for t in leaves)]
        noise = [(a.double() - b).square().sum() / b.square().sum() for a, b in zip(seen, right)]
        lost[name] = [float(-10 * torch.log10(ratio)) for ratio in noise]
    return lost


def operations(case: Case) -> dict[str, tuple[dict[str, float], dict[str, Callable[[], object]]]]:
    """Return the FLOP or bytes of each operation by dtype, and its calls."""
    rows, row_weights, w1, w2, ends, grad = operands(case)
    num_rows, hidden, n = case.rows, case.hidden, w1.shape[1]
    of_w1, of_w2 = float8_gemm.quantize_weights(w1), float8_gemm.quantize_weights(w2)
    pair = float8_gemm.quantize_rows(rows, ends)
    first = grouped_gemm.linear(rows, w1, ends)
    second = grouped_gemm.activate(first, row_weights, ends, SWIGLU)
    activated, first_pair = float8_gemm.quantize_rows(second, ends), float8_gemm.quantize_rows(first, ends)
    inputs = second, first, row_weights, ends, SWIGLU
    flop, entries, wide = 2 * num_rows * n * hidden, num_rows * hidden, num_rows * n

    def gemm(amount: float, pair, weights, bfloat16: Callable[[], object]) -> tuple:
        call = partial(float8_gemm.linear, pair, weights, ends)
        sides = {"float8": call, "bfloat16": bfloat16, "Triton": partial(by_triton, call)}
        sides |= {name: partial(by_pytorch, pair, weights, ends, name == "fast") for name in ("PyTorch", "fast")}
        return dict.fromkeys(sides, amount), sides

    def alone(amount: float, call: Callable[[], object]) -> tuple:
        return {"float8": amount}, {"float8": call}

    return {
        "w1, forward": gemm(flop, pair, of_w1, lambda: grouped_gemm.linear(rows, w1, ends)),
        "w2, forward": gemm(flop / 2, activated, of_w2, lambda: grouped_gemm.linear(second, w2, ends)),
        "w1, grad of rows": gemm(flop, first_pair, of_w1.t(), lambda: grouped_gemm.linear_grad_rows(first, w1, ends)),
        "activate": (
            {"float8": 2.5 * wide, "bfloat16": 3 * wide},
            {
                "float8": lambda: float8_gemm.activate(first, row_weights, ends, SWIGLU),
                "bfloat16": lambda: grouped_gemm.activate(first, row_weights, ends, SWIGLU),
            },
        ),
        "activate, gradients": (
            {"float8": 7 * wide, "apart": 11 * wide},
            {
                "float8": lambda: float8_gemm.activate_grad(*inputs, with_activated=True),
                "apart": lambda: gradients_apart(*inputs),
            },
        ),
        "quantize_rows": alone(3 * entries, lambda: float8_gemm.quantize_rows(grad, ends)),
        "dequantize_rows": alone(3 * entries, lambda: float8_gemm.dequantize_rows(pair, ends)),
        "quantize_weights": alone(4 * w1.numel(), lambda: float8_gemm.quantize_weights(w1)),
    }


def gradients_apart(grad, hidden, row_weights, ends: torch.Tensor, activation: Activation) -> tuple:
    """The kernels that float8_gemm.activate_grad stands for."""
    grads = grouped_gemm.activate_grad(grad, hidden, row_weights, ends, activation)
    return float8_gemm.quantize_rows(grads.rows, ends), grouped_gemm.activate(hidden, row_weights, ends, activation)


def by_triton(call: Callable[[], object]) -> None:
    """Call with the Triton kernels only, as on GPUs other than Hopper."""
    usual, hopper_gemm.num_sms = hopper_gemm.num_sms, lambda device: 0  # type: ignore[assignment]
    try:
        call()
    finally:
        hopper_gemm.num_sms = usual  # type: ignore[assignment]


def by_pytorch(pair, weights, ends: torch.Tensor, is_fast: bool) -> torch.Tensor:
    """The same GEMM with scales of 1."""
    ones = torch.ones(pair[0].shape[0], device=DEVICE), torch.ones(weights.rows.shape[:2], device=DEVICE)
    options = dict(offs=ends, out_dtype=torch.bfloat16, use_fast_accum=is_fast)
    return torch._scaled_grouped_mm(pair[0], weights.rows.transpose(-2, -1), *ones, **options)


if __name__ == "__main__":
    main()
