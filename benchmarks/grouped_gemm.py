"""Times the grouped GEMMs of a layer of experts beside PyTorch's and beside dense GEMMs, on a GPU.

    python benchmarks/grouped_gemm.py                    # the cases below, bfloat16
    python benchmarks/grouped_gemm.py --even --rounds 3  # 16 to 64 experts with 128 and 4096 rows each
    python benchmarks/grouped_gemm.py --tiles 128,256,64,8,3 128,128,64,4,4

Times are medians, in microseconds, of CUDA graphs of ten calls, all sides in turn; in brackets TFLOP/s. "dense" is
cuBLAS with all rows and the first expert's weights, "one expert" cuBLAS with the rows of one expert. "grad of W, +="
adds in float32; for grouped_mm add_ does. The last lines give each operation's lowest throughput relative to
grouped_mm's, whether it reaches 0.85, and the host time of a call.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from compare_builds import in_turn, on_device

from ep_dispatcher.moe import grouped_gemm, grouped_gemm_kernels

DEVICE = "cuda"
BAR = 0.85  # the least part of grouped_mm's throughput


class Case(NamedTuple):
    """Rows of all experts, their weights [n, k], and the unevenness of rows per expert: 0 for equal numbers."""

    experts: int
    rows: int
    k: int
    n: int
    skew: float = 0.0


CASES = [
    Case(32, 32768, 4096, 3072),
    Case(32, 32768, 1536, 4096),
    Case(32, 32768, 2048, 1536),
    Case(32, 32768, 768, 2048),
    Case(64, 32768, 7168, 4096),
    Case(64, 32768, 2048, 7168),
    Case(64, 32768, 7168, 4096, 1.0),
    Case(64, 1024, 7168, 4096),
    Case(16, 65536, 2048, 1536),
]
EVEN = [Case(e, e * each, k, n) for k, n in ((2048, 1536), (7168, 4096)) for e in (16, 32, 64) for each in (128, 4096)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiles", nargs="+", metavar="M,N,K,WARPS,STAGES", help="time these, not the default tiles")
    parser.add_argument("--cases", type=int, nargs="+", help="only these cases, numbered from 0")
    parser.add_argument("--even", action="store_true", help="other cases: the same number of rows for each expert")
    parser.add_argument("--rounds", type=int, default=12, help="times of each side (default: 12)")
    args = parser.parse_args()
    tiles = [grouped_gemm_kernels.Tile(*map(int, text.split(","))) for text in args.tiles or []]
    cases = EVEN if args.even else CASES
    least: dict[str, tuple[float, Case]] = {}
    for case in [cases[number] for number in args.cases or range(len(cases))]:
        print(case, flush=True)
        for name, sides in operations(case, tiles):
            times = time_sides(sides, args.rounds)
            print(f"  {name:14}" + line(case, times), flush=True)
            if ratio := part_of_grouped_mm(times):
                least[name] = min(least.get(name, (ratio, case)), (ratio, case))
    for name, (ratio, case) in least.items():
        met = "at least" if ratio >= BAR else "BELOW"
        print(f"least of {name}: {ratio:.2f} of grouped_mm's throughput, {met} {BAR}, {case}", flush=True)
    print("host, us a call:", host_times(), flush=True)


def line(case: Case, times: dict[str, float]) -> str:
    """Return a line with the sides of an operation: microseconds, TFLOP/s, and throughput relative to grouped_mm."""
    flop = 2 * case.rows * case.k * case.n
    shown = []
    for side, us in times.items():
        of_side = flop / case.experts if side == "one expert" else flop
        shown.append(f"{side} {us:.0f} ({of_side / us / 1e6:.0f})")
    ratio = part_of_grouped_mm(times)
    return "   ".join(shown) + (f"   {ratio:.2f} of grouped_mm" if ratio else "")


def part_of_grouped_mm(times: dict[str, float]) -> float | None:
    """Return the throughput relative to grouped_mm; None if one of the two could not run."""
    return times["grouped_mm"] / times["ours"] if times.keys() >= {"grouped_mm", "ours"} else None


def operations(case: Case, tiles: list):
    """Yield each operation's name and its sides."""
    torch.manual_seed(0)
    shares = torch.rand(case.experts).mul(4 * case.skew).exp()
    counts = (shares / shares.sum() * case.rows).int()
    counts[-1] += case.rows - counts.sum()
    ends = counts.cumsum(0).int().to(DEVICE)
    rows = torch.randn(case.rows, case.k, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn(case.rows, case.n, device=DEVICE, dtype=torch.bfloat16)
    stack = torch.randn(case.experts, case.n, case.k, device=DEVICE, dtype=torch.bfloat16) / case.k**0.5
    weights = list(stack)
    sums = torch.zeros(case.experts, case.n, case.k, device=DEVICE)
    of_one = slice(case.rows // case.experts)
    yield (
        "forward",
        with_tiles("multiply", tiles, lambda: grouped_gemm.linear(rows, weights, ends))
        | {
            "grouped_mm": lambda: F.grouped_mm(rows, stack.transpose(1, 2), offs=ends),
            "dense": lambda: rows @ stack[0].t(),
            "one expert": lambda: rows[of_one] @ stack[0].t(),
        },
    )
    yield (
        "grad of rows",
        with_tiles("multiply", tiles, lambda: grouped_gemm.linear_grad_rows(grad, weights, ends))
        | {
            "grouped_mm": lambda: F.grouped_mm(grad, stack, offs=ends),
            "dense": lambda: grad @ stack[0],
            "one expert": lambda: grad[of_one] @ stack[0],
        },
    )
    out = torch.zeros_like(stack)

    def of_weights(to, accumulate):
        return lambda: grouped_gemm.linear_grad_weights(grad, rows, ends, to, accumulate=accumulate)

    yield (
        "grad of W",
        with_tiles("outer", tiles, of_weights(list(out), False))
        | {
            "grouped_mm": lambda: F.grouped_mm(grad.t(), rows, offs=ends),
            "dense": lambda: grad.t() @ rows,
            "one expert": lambda: grad[of_one].t() @ rows[of_one],
        },
    )
    yield (
        "grad of W, +=",  # in float32, as main_grad is
        with_tiles("outer", tiles, of_weights(list(sums), True))
        | {"grouped_mm": lambda: sums.add_(F.grouped_mm(grad.t(), rows, offs=ends))},
    )
    close = dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(
        grouped_gemm.linear(rows, weights, ends), F.grouped_mm(rows, stack.transpose(1, 2), offs=ends), **close
    )
    torch.testing.assert_close(
        grouped_gemm.linear_grad_rows(grad, weights, ends), F.grouped_mm(grad, stack, offs=ends), rtol=2e-2, atol=5e-2
    )
    of_weights(list(out), False)()
    torch.testing.assert_close(out, F.grouped_mm(grad.t(), rows, offs=ends), rtol=2e-2, atol=0.5)


def with_tiles(kind: str, tiles: list, call: Callable) -> dict[str, Callable]:
    names = {
        "multiply": ("TRANSPOSED_TILE", "TILE", "SMALL_TILE"),
        "outer": ("STORED_TILES", "ADDED_TILES"),
    }[kind]

    def with_tile(tile):
        def run():
            before = [getattr(grouped_gemm_kernels, name) for name in names]
            for name in names:
                setattr(grouped_gemm_kernels, name, tile if kind == "multiply" else {math.inf: tile})
            call()
            for name, value in zip(names, before):
                setattr(grouped_gemm_kernels, name, value)

        return run

    return {"ours": call} | {"x".join(map(str, tile)): with_tile(tile) for tile in tiles}


def time_sides(sides: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Return the median of each side. One that cannot run is left out."""
    replays = {}
    for name, call in sides.items():
        try:
            replays[name] = on_device(call)
        except Exception as error:  # a tile that does not fit
            print("   ", name, type(error).__name__, str(error).splitlines()[0][:90])
    return in_turn(replays, rounds)


def host_times() -> dict[str, float]:
    rows, ends = torch.randn(256, 128, device="cuda").bfloat16(), torch.arange(8, 264, 8, device="cuda").int()
    stack = torch.randn(32, 128, 128, device="cuda").bfloat16()
    weights, out = list(stack), list(torch.zeros(32, 128, 128, device="cuda"))
    calls = {
        "linear": lambda: grouped_gemm.linear(rows, weights, ends),
        "grad of rows": lambda: grouped_gemm.linear_grad_rows(rows, weights, ends),
        "grad of W": lambda: grouped_gemm.linear_grad_weights(rows, rows, ends, out, accumulate=True),
        "swiglu": lambda: grouped_gemm.weighted_swiglu(rows, torch.ones(256, device="cuda"), ends),
        "grouped_mm": lambda: F.grouped_mm(rows, stack.transpose(1, 2), offs=ends),
    }
    times = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            call()
        times[name] = round((time.perf_counter() - begin) * 1e4, 1)
        torch.cuda.synchronize()
    return times


if __name__ == "__main__":
    main()
