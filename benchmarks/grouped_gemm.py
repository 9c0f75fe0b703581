"""Times the grouped GEMMs of a layer of experts beside PyTorch's and beside dense GEMMs, on a GPU.

    python benchmarks/grouped_gemm.py                    # the cases below, bfloat16
    python benchmarks/grouped_gemm.py --even --rounds 3  # 16 to 64 experts with 128 and 4096 rows each
    python benchmarks/grouped_gemm.py --tiles 128,256,64,8,3 128,128,64,4,4

Times are medians, in microseconds, of CUDA graphs of ten calls, all sides in turn; in brackets TFLOP/s. "Triton" is
ours without the compiled kernels for Hopper, "dense" cuBLAS with all rows and the first expert's weights, "one expert"
cuBLAS with the rows of one expert. "grad of W, +=" adds in float32; for grouped_mm add_ does. The last lines give each
operation's lowest throughput relative to grouped_mm's, whether it reaches 0.85, and the host time of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from float8_experts import by_triton

from ep_dispatcher.moe import grouped_gemm, grouped_gemm_kernels, weight_grad_kernels
from ep_dispatcher.tools.benchmark.harness import make_parser, median_times, on_device, on_host

DEVICE = "cuda"
MULTIPLY_TILES = grouped_gemm_kernels, ("TRANSPOSED_TILE", "TILE", "SMALL_TILE")  # a module and its constants
OUTER_TILES = weight_grad_kernels, ("STORED_TILES", "ADDED_TILES")
BAR = 0.85  # the least part of grouped_mm's throughput
Sides = dict[str, Callable[[], object]]


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
    parser = make_parser(__doc__, rounds=12)
    parser.add_argument("--tiles", nargs="+", default=[], metavar="M,N,K,WARPS,STAGES", help="time these too")
    parser.add_argument("--cases", type=int, nargs="+", help="only these cases, numbered from 0")
    parser.add_argument("--even", action="store_true", help="other cases: the same number of rows for each expert")
    args = parser.parse_args()
    tiles = [grouped_gemm_kernels.Tile(*map(int, text.split(","))) for text in args.tiles]
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


def operations(case: Case, tiles: list) -> Iterator[tuple[str, Sides]]:
    """Yield each operation's name and its sides. Raise where ours and grouped_mm differ."""
    torch.manual_seed(0)
    shares = torch.rand(case.experts).mul(4 * case.skew).exp()
    counts = (shares / shares.sum() * case.rows).int()
    counts[-1] += case.rows - counts.sum()
    ends = counts.cumsum(0).int().to(DEVICE)
    rows = torch.randn(case.rows, case.k, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn(case.rows, case.n, device=DEVICE, dtype=torch.bfloat16)
    stack = torch.randn(case.experts, case.n, case.k, device=DEVICE, dtype=torch.bfloat16) / case.k**0.5
    weights, out = list(stack), torch.zeros_like(stack)
    sums = torch.zeros(case.experts, case.n, case.k, device=DEVICE)

    def grad_weights(to: torch.Tensor, accumulate: bool) -> torch.Tensor:
        grouped_gemm.linear_grad_weights([(grad, rows, ends)], list(to), accumulate=accumulate)
        return to

    grad_w = lambda: F.grouped_mm(grad.t(), rows, offs=ends)  # noqa: E731
    every, some = slice(None), slice(case.rows // case.experts)
    # Ours, grouped_mm, the dense GEMM of some rows, and how far ours and grouped_mm may be apart.
    calls: dict[str, tuple] = {
        "forward": (
            lambda: grouped_gemm.linear(rows, weights, ends),
            lambda: F.grouped_mm(rows, stack.transpose(1, 2), offs=ends),
            lambda some: rows[some] @ stack[0].t(),
            2e-2,
        ),
        "grad of rows": (
            lambda: grouped_gemm.linear_grad_rows(grad, weights, ends),
            lambda: F.grouped_mm(grad, stack, offs=ends),
            lambda some: grad[some] @ stack[0],
            5e-2,
        ),
        "grad of W": (lambda: grad_weights(out, False), grad_w, lambda some: grad[some].t() @ rows[some], 0.5),
        "grad of W, +=": (lambda: grad_weights(sums, True), lambda: sums.add_(grad_w()), None, 0),  # as main_grad is
    }
    for name, (ours, theirs, dense, allowed) in calls.items():
        of_kernel = OUTER_TILES if "W" in name else MULTIPLY_TILES
        sides = {"ours": ours, "Triton": partial(by_triton, ours), "grouped_mm": theirs}
        if dense is not None:
            torch.testing.assert_close(ours(), theirs(), rtol=2e-2, atol=allowed)
            sides |= {"dense": partial(dense, every), "one expert": partial(dense, some)}
        yield name, sides | {"x".join(map(str, tile)): partial(with_tile, tile, of_kernel, ours) for tile in tiles}


def with_tile(tile: tuple, of_kernel: tuple[ModuleType, tuple[str, ...]], call: Callable[[], object]) -> None:
    module, names = of_kernel
    usual = {name: getattr(module, name) for name in names}
    vars(module).update(dict.fromkeys(names, {math.inf: tile} if of_kernel is OUTER_TILES else tile))
    try:
        by_triton(call)
    finally:  # a tile may not fit
        vars(module).update(usual)


def time_sides(sides: Sides, rounds: int) -> dict[str, float]:
    """Return the median of each side. One that cannot run is left out."""
    replays = {}
    for name, call in sides.items():
        try:
            replays[name] = on_device(call)
        except Exception as error:  # a tile that does not fit
            print("   ", name, type(error).__name__, str(error).splitlines()[0][:90])
    return median_times(replays, rounds)


def host_times() -> dict[str, float]:
    """Return the microseconds of a call whose kernels take less than its launch; with few rows those are Triton's."""
    some, few = (dict(operations(Case(2, rows, 128, 128), [])) for rows in (2048, 64))
    calls = {name: sides["ours"] for name, sides in some.items()}
    calls |= {f"{name}, few rows": sides["ours"] for name, sides in few.items()}
    calls |= {"grouped_mm": some["forward"]["grouped_mm"]}
    return {name: round(on_host(call, 100)(), 1) for name, call in calls.items()}  # operations() ran each once


if __name__ == "__main__":
    main()
