"""Times GEMMs beside dispatches on GPUs, with and without a margin of multiprocessors that the GEMMs leave free.

    python benchmarks/gemm_margin.py                                      # a rank per GPU; a minute
    python benchmarks/gemm_margin.py --sms 8 24 --shares 0.25 --gemms "TE GroupedLinear" "grouped experts"

A chain of GEMMs runs in one stream, and dispatches in another. Both begin together, and the time ends when both are
done. The number of dispatches comes from --shares: alone, with 24 multiprocessors, they take this share of the time of
the GEMMs. It stays the same for other numbers of multiprocessors. Times are medians, in microseconds, of CUDA graphs on
the slowest rank, all in turn:

    GEMMs, +margin      the chain alone; the same with a margin of as many multiprocessors as a dispatch has
    serial              the chain, then the dispatches
    beside, +margin     both at once; the same with the margin
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ep_dispatcher as ep
from ep_dispatcher.integrations.megatron.dispatcher.gemm_sm_margin import set_pytorch, set_transformer_engine
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.tools.benchmark.cases import inputs_of
from ep_dispatcher.tools.benchmark.harness import make_parser, median_times, on_device, start_gpu_ranks, use_gpu
from ep_dispatcher.tools.benchmark.ranks import largest_of, most_rows

TOKENS, HIDDEN, WIDE, INTERMEDIATE, EXPERTS, TOPK = 4096, 4096, 12288, 1536, 64, 8
SHARE_SMS = 24  # of the dispatches that a share is measured by
CHAIN_US = 6000  # of GEMMs, at least
GEMMS = ("TE Linear", "TE GroupedLinear", "cuBLASLt", "torch.matmul", "grouped experts")
SIDES = ("GEMMs", "GEMMs +margin", "serial", "beside", "beside +margin")


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, ranks=max(1, torch.cuda.device_count()), rounds=7)
    parser.add_argument("--gemms", nargs="+", choices=GEMMS, default=list(GEMMS), help="of the chain")
    parser.add_argument("--sms", type=int, nargs="+", default=[4, 8, 16, 24], help="multiprocessors of a dispatch")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.75], help="of the GEMMs' time")
    args = parser.parse_args(argv)
    with start_gpu_ranks(args.ranks) as pool:
        print(f"{TOKENS} tokens of {HIDDEN}, {EXPERTS} experts, top-{TOPK}, {args.ranks} ranks: us")
        print(f"{'':18}{'share':>6}{'SMs':>5}" + "".join(f"{side:>16}" for side in SIDES), flush=True)
        for name in args.gemms:
            ranks = pool.run(measure, name, args.sms, args.shares, args.rounds)
            for (share, sms), times in ranks[0].items():
                slowest = [max(rank[share, sms][side] for rank in ranks) for side in times]
                print(f"{name:18}{share:6.2f}{sms:5}" + "".join(f"{us:16.0f}" for us in slowest), flush=True)


Times = dict[tuple[float, int], dict[str, float]]  # by share and multiprocessors, then by side


def measure(rank: int, name: str, all_sms: list[int], shares: list[float], rounds: int) -> Times:
    """Return the median microseconds of every side. Collective."""
    use_gpu(rank)
    gemm = gemm_of(name)
    length = largest_of(max(1, round(CHAIN_US / on_device(gemm)())))
    chain = partial(repeat, gemm, length)
    with dispatching(SHARE_SMS) as dispatch:
        alone = on_device(chain, 1)() / on_device(dispatch)()
        counts = {share: largest_of(max(1, round(share * alone))) for share in shares}
    times = {}
    for sms in all_sms:
        with dispatching(sms) as dispatch:
            sides = {}
            for share, count in counts.items():
                pushes = partial(repeat, dispatch, count)
                calls = (chain, with_margin(chain, sms), partial(after, chain, pushes), partial(beside, chain, pushes))
                calls += (with_margin(calls[-1], sms),)
                sides |= {(share, side): on_device(call, 1) for side, call in zip(SIDES, calls, strict=True)}
            medians = median_times(sides, rounds)
            for share in shares:
                times[share, sms] = {side: medians[share, side] for side in SIDES}
    return times


def gemm_of(name: str) -> Callable[[], object]:
    """Return one GEMM, in bfloat16: dense ones of all tokens, grouped ones of the rows of a rank of two."""
    local, rows = EXPERTS // 2, TOKENS * TOPK
    options = dict(device="cuda", dtype=torch.bfloat16)
    if name in ("TE GroupedLinear", "grouped experts"):
        x = torch.randn(rows, HIDDEN, **options)
        if name == "grouped experts":
            weights = list(torch.randn(local, 2 * INTERMEDIATE, HIDDEN, **options) / HIDDEN**0.5)
            ends = torch.arange(1, local + 1, device="cuda", dtype=torch.int32) * (rows // local)
            return lambda: grouped_gemm.linear(x, weights, ends)
        import transformer_engine.pytorch as te

        layer = te.GroupedLinear(local, HIDDEN, 2 * INTERMEDIATE, bias=False, params_dtype=torch.bfloat16)
        return torch.no_grad()(lambda: layer(x, [rows // local] * local))
    x, weight = torch.randn(TOKENS, HIDDEN, **options), torch.randn(WIDE, HIDDEN, **options) / HIDDEN**0.5
    if name == "TE Linear":
        import transformer_engine.pytorch as te

        layer = te.Linear(HIDDEN, WIDE, bias=False, params_dtype=torch.bfloat16)
        return torch.no_grad()(lambda: layer(x))
    bias = torch.randn(WIDE, **options)
    return (lambda: x @ weight.t()) if name == "torch.matmul" else (lambda: F.linear(x, weight, bias))


@contextlib.contextmanager
def dispatching(
    sms: int, tokens: int = TOKENS, hidden: int = HIDDEN, experts: int = EXPERTS
) -> Iterator[Callable[[], object]]:
    """Yield a dispatch with so many multiprocessors. Collective."""
    sizes = dict(hidden=hidden, num_experts=experts, num_topk=TOPK, max_tokens_per_rank=tokens)
    with ep.Buffer(engine="cuda", timeout_s=20, num_sms=sms, **sizes) as buffer:
        x, idx, weights = inputs_of(dist.get_rank(), torch.device("cuda"), tokens, hidden, experts, TOPK)
        most = most_rows(buffer.dispatch(x, idx, weights))
        yield lambda: buffer.dispatch(x, idx, weights, max_recv_rows=most)
        torch.cuda.synchronize()
        buffer.check()


def repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def after(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


def beside(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Run the second in a stream of its own. It is launched first, so that it finds free multiprocessors."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        second()
    first()
    here.wait_stream(side)


def with_margin(call: Callable[[], object], sms: int) -> Callable[[], None]:
    """Return the call, with GEMMs that leave so many multiprocessors free. A graph keeps the margin of its capture."""

    def run() -> None:
        for set_margin in (set_transformer_engine, set_pytorch):
            set_margin(sms)
        try:
            call()
        finally:
            for set_margin in (set_transformer_engine, set_pytorch):
                set_margin(None)

    return run


if __name__ == "__main__":
    main()
