"""Times the grouped GEMMs of a layer of experts beside PyTorch's and beside one dense GEMM of the same work, on a GPU.

    python benchmarks/grouped_gemm.py                    # the cases below, bfloat16
    python benchmarks/grouped_gemm.py --tiles 128,256,64,8,3 128,128,64,4,4

Times are medians, in microseconds, of CUDA graphs of ten calls, all sides in turn; in brackets TFLOP/s. Then the time
that a call takes the host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from compare_builds import on_device

from ep_dispatcher import grouped_gemm, grouped_gemm_kernels

ROUNDS = 12


class Case(NamedTuple):
    """rows of all experts, their weights [n, k], and how unevenly the rows are spread: 0 for evenly."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiles", nargs="+", metavar="M,N,K,WARPS,STAGES", help="instead of those that are chosen")
    parser.add_argument("--cases", type=int, nargs="+", help="by number, from 0")
    args = parser.parse_args()
    tiles = [grouped_gemm_kernels.Tile(*map(int, text.split(","))) for text in args.tiles or []]
    for number in args.cases or range(len(CASES)):
        case = CASES[number]
        print(case, flush=True)
        for name, sides in operations(case, tiles):
            times = in_turn(sides)
            flop = 2 * case.rows * case.k * case.n
            shown = (f"{side} {us:.0f} ({flop / us / 1e6:.0f})" for side, us in times.items())
            print(f"  {name:14}" + "   ".join(shown), flush=True)
    print("host, us a call:", host_times(), flush=True)


def operations(case: Case, tiles: list):
    """Yield each operation's name and its sides."""
    torch.manual_seed(0)
    shares = torch.rand(case.experts).mul(4 * case.skew).exp()
    counts = (shares / shares.sum() * case.rows).int()
    counts[-1] += case.rows - counts.sum()
    ends = counts.cumsum(0).int().cuda()
    rows = torch.randn(case.rows, case.k, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(case.rows, case.n, device="cuda", dtype=torch.bfloat16)
    stack = torch.randn(case.experts, case.n, case.k, device="cuda", dtype=torch.bfloat16) / case.k**0.5
    weights = list(stack)
    sums = list(torch.zeros(case.experts, case.n, case.k, device="cuda"))
    # cuBLAS on the first expert's weights, with all rows: as fast as it gets
    yield (
        "forward",
        with_tiles("multiply", tiles, lambda: grouped_gemm.linear(rows, weights, ends))
        | {
            "grouped_mm": lambda: F.grouped_mm(rows, stack.transpose(1, 2), offs=ends),
            "dense": lambda: rows @ stack[0].t(),
        },
    )
    yield (
        "grad of rows",
        with_tiles("multiply", tiles, lambda: grouped_gemm.linear_grad_rows(grad, weights, ends))
        | {
            "grouped_mm": lambda: F.grouped_mm(grad, stack, offs=ends),
            "dense": lambda: grad @ stack[0],
        },
    )
    out = torch.zeros_like(stack)

    def of_weights(to, accumulate):
        return lambda: grouped_gemm.linear_grad_weights(grad, rows, ends, to, accumulate=accumulate)

    yield (
        "grad of W, +=",
        with_tiles("outer", tiles, of_weights(sums, True))
        | {
            "stored": of_weights(list(out), False),
            "grouped_mm": lambda: F.grouped_mm(grad.t(), rows, offs=ends),
            "dense": lambda: grad.t() @ rows,
        },
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
    names = {"multiply": ("TRANSPOSED_TILE", "TILE", "SMALL_TILE"), "outer": ("OUTER_TILE",)}[kind]

    def with_tile(tile):
        def run():
            before = [getattr(grouped_gemm_kernels, name) for name in names]
            for name in names:
                setattr(grouped_gemm_kernels, name, tile)
            call()
            for name, value in zip(names, before):
                setattr(grouped_gemm_kernels, name, value)

        return run

    return {"ours": call} | {"x".join(map(str, tile)): with_tile(tile) for tile in tiles}


def in_turn(sides: dict[str, Callable]) -> dict[str, float]:
    replays = {}
    for name, call in sides.items():
        try:
            replays[name] = on_device(call)
        except Exception as error:  # a tile that does not fit
            print("   ", name, type(error).__name__, str(error).splitlines()[0][:90])
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            times[name].append(replay())
    return {name: statistics.median(of_side) for name, of_side in times.items()}


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
