"""Says where the host's time goes in one MoE layer of Megatron: by owner, by function, and by line.

    torchrun --nproc-per-node 2 benchmarks/layer_host_time.py
    torchrun --nproc-per-node 2 benchmarks/layer_host_time.py --experts transformer_engine --float8 --sides today copies

A rank per GPU; without GPUs on the CPU engine, for trying the script. The layer is that of megatron_balance.py, or with
Transformer Engine's grouped experts. A pass is its forward and backward, of which the host launches everything; the GPU
is idle before each of them. Times are medians on rank 0. They include the wait for the counts of a dispatch.

A signal every --sample-us looks at the host's stack in as many passes again (host_samples.py). Machines are noisy:
compare the shares of a run, or run two builds in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_balance
import torch
import torch.distributed as dist
from host_samples import Sampler, shares
from megatron_balance import SIDES, Case, Side
from torch import Tensor, nn

from ep_dispatcher.tools.benchmark.harness import make_parser, number
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json
from ep_dispatcher.tools.benchmark.ranks import TorchrunRanks
from ep_dispatcher.tools.benchmark.suite import BACKENDS

WARM_UP = 25


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    engine = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = TorchrunRanks(torch.get_num_threads(), BACKENDS[engine])
    found = {}
    try:
        case = megatron_balance.make_case(args.case, args, engine)
        with megatron_balance.megatron_groups(engine):
            for name in args.sides:
                found[name] = measure(case, SIDES[name], args)
                megatron_balance.free_memory(case)
                if dist.get_rank() == 0:
                    print(report(name, found[name], args.lines), flush=True)
        if args.json and dist.get_rank() == 0:
            args.json.write_text(to_json(dict(machine=describe_machine(), case=args.case, sides=found)))
    finally:
        ranks.close()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, passes=300, sample_us=150, lines=40, redundant=8, microbatches=1, seq_length=512)
    add = parser.add_argument
    add("--case", default="512x2048x128x768x1", metavar="TOKENSxHIDDENxEXPERTSxINTERMEDIATExLAYERS", help="sizes")
    add("--sides", nargs="+", choices=SIDES, default=["today"], help="see megatron_balance.py")
    add("--experts", choices=("local", "transformer_engine"), default="local", help="the module of the experts")
    add("--float8", action="store_true", help="the blockwise recipe, with Transformer Engine's experts")
    add("--popularity", default="trace", help="of experts, as in balance.py")
    add("--fullest", type=number(float, 1), default=1.6, help="rows of the fullest rank over the mean")
    add("--json", type=Path, help="write the figures there")
    args = parser.parse_args(argv)
    if args.float8 and args.experts != "transformer_engine":
        parser.error("--float8 needs --experts transformer_engine")
    return args


# ---- the layer ------------------------------------------------------------------------------------------------------


def make_layer(case: Case, side: Side, args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return a model in Megatron's DistributedDataParallel, and its first MoE layer."""
    if args.experts == "local":
        model = megatron_balance.make_model(case, side)
    else:
        model = make_transformer_engine_model(case, side, args.float8)
    return model, megatron_balance.moe_layers(model)[0]


def make_transformer_engine_model(case: Case, side: Side, is_float8: bool) -> nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    fields: dict[str, Any] = dict(moe_grouped_gemm=True, moe_permute_fusion=True)
    if is_float8:
        fields |= dict(fp8="e4m3", fp8_recipe="blockwise")
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=case.routing.experts, moe_grouped_gemm=True)
    return megatron_balance.make_model(case, side._replace(dispatcher=side.dispatcher | fields), spec)


@contextlib.contextmanager
def recipe_of(layer: Any) -> Iterator[None]:
    """Run what is inside by the layer's float8 recipe, if it has one."""
    if not layer.config.fp8:
        yield
        return
    from megatron.core.fp8_utils import get_fp8_context

    with get_fp8_context(layer.config, 0):
        yield


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(case: Case, side: Side, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one side for the JSON, in microseconds of a pass."""
    model, layer = make_layer(case, side, args)
    x = torch.randn(case.tokens, 1, case.routing.hidden, device=case.device, dtype=next(model.parameters()).dtype)
    x.requires_grad_()
    grad, sampler = torch.randn_like(x), Sampler(args.sample_us)
    # In one thread, because a signal does not see the others. No hook of DistributedDataParallel sends anything.
    with model.no_sync(), torch.autograd.set_multithreading_enabled(False):  # type: ignore[operator]  # of Megatron
        for _ in range(WARM_UP):
            one_pass(case, layer, x, grad, contextlib.nullcontext())
        times = [one_pass(case, layer, x, grad, contextlib.nullcontext()) for _ in range(args.passes)]
        for _ in range(args.passes):
            one_pass(case, layer, x, grad, sampler)
    layer.token_dispatcher = None  # see megatron_balance.take_turn
    forward, backward = (1e6 * statistics.median(of_pass) for of_pass in zip(*times))
    return dict(forward=forward, backward=backward) | shares(sampler.samples, forward + backward)


def one_pass(case: Case, layer: Any, x: Tensor, grad: Tensor, scope: Any) -> tuple[float, float]:
    """Return the seconds of the host in a forward and in its backward, each inside of ``scope``."""
    megatron_balance.synchronize(case)
    with recipe_of(layer), scope:
        begin = time.perf_counter()
        y = layer(x)[0]
        forward = time.perf_counter() - begin
    megatron_balance.synchronize(case)
    with scope:
        begin = time.perf_counter()
        y.backward(grad)
        backward = time.perf_counter() - begin
    return forward, backward


# ---- results --------------------------------------------------------------------------------------------------------


def report(name: str, found: dict[str, Any], num_lines: int) -> str:
    rows = [f"\n{name}: forward {found['forward']:.0f} us, backward {found['backward']:.0f} us"]
    for title in ("owners", "functions", "lines"):
        rows += [f"-- {title}", *(f"{us:9.1f}  {key}" for key, us in list(found[title].items())[:num_lines])]
    return "\n".join(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
