"""Train a mixture-of-experts language model with expert parallelism, on the GPUs of one machine or on its CPUs.

    python examples/train_moe_lm.py            # two minutes; one rank per GPU, else 4 ranks in 2 virtual nodes
    python examples/train_moe_lm.py --check    # a few steps, compared with a model without dispatcher
    torchrun --nproc-per-node 4 examples/train_moe_lm.py

The dense part is data parallel: every rank has a copy of it and trains on its own sequences. The experts are spread
over the ranks. In every layer ``ep.dispatch`` brings each token to the ranks of its experts, and ``ep.combine`` brings
the results back, in forward and backward. The MoE layer is in moe_lm/layer.py.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time

import torch
import torch.distributed as dist
from moe_lm.arguments import parse_arguments
from moe_lm.charts import draw
from moe_lm.check import check
from moe_lm.device import device_name, prepare_ranks, ranks_on_host, ranks_per_gpu
from moe_lm.generate import generate
from moe_lm.layer import MoELayer
from moe_lm.model import ModelConfig, MoELanguageModel, is_expert
from moe_lm.report import Recorder
from moe_lm.text import bigram_bits, load_text, to_tensor, unigram_bits
from moe_lm.train import train

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import RankError, device_of, run_ranks

PROMPT = "The value of "
NO_LIMIT_S = 7 * 24 * 3600.0  # --steps limits a run; the buffer itself reports late ranks


def make_model(args, config: ModelConfig, buffer: ep.Buffer) -> MoELanguageModel:
    num_local = config.num_experts // args.ranks
    local_experts = range(dist.get_rank() * num_local, (dist.get_rank() + 1) * num_local)

    def make_moe(layer: int) -> MoELayer:
        return MoELayer(
            buffer,
            hidden=config.hidden,
            intermediate=config.intermediate,
            num_experts=config.num_experts,
            num_topk=config.num_topk,
            local_experts=local_experts,
            seed=config.seed,
            layer=layer,
            dtype=config.dtype,
        )

    return MoELanguageModel(config, make_moe).to(args.device)  # "cuda" is the current GPU


def run(rank: int, args, config: ModelConfig, started: float) -> bool:
    """Do all work of one rank, whose process has joined the default group. Return whether it succeeded."""
    device = device_of(args.device, rank)
    torch.set_float32_matmul_precision("highest")  # no TF32, whatever the environment says
    train_bytes, held_out_bytes = load_text()
    train_text, held_out = (to_tensor(text).to(device) for text in (train_bytes, held_out_bytes))
    with ep.Buffer(
        dist.group.WORLD,
        hidden=config.hidden,
        num_experts=config.num_experts,
        num_topk=config.num_topk,
        max_tokens_per_rank=args.batch * config.seq_len,
        dtype=config.dtype,
        engine=args.device,
        ranks_per_node=args.ranks_per_node,
    ) as buffer:
        model = make_model(args, config, buffer)
        if args.check:
            return check(args, config, model, train_text)
        unigram, bigram = unigram_bits(train_bytes, held_out_bytes), bigram_bits(train_bytes, held_out_bytes)
        recorder = Recorder(rank == 0, args.ranks * args.batch * config.seq_len, unigram, bigram)
        recorder.say(describe(args, config, model))
        recorder.say(f"unigram entropy {unigram:.3f}, bigram {bigram:.3f} bits per byte of the held-out text")
        train(args, model, train_text, held_out, recorder)
        sample = generate(model, PROMPT, args.sample_bytes, config.seq_len, seed=args.seed + rank)
    if rank == 0:
        text = {"training_bytes": len(train_bytes), "held_out_bytes": len(held_out_bytes)}
        finish(args, recorder, text, sample, started)
    return True


def describe(args, config: ModelConfig, model: torch.nn.Module) -> str:
    num_nodes = args.ranks // args.ranks_per_node
    virtual = "virtual " * (ranks_on_host(args.ranks) == args.ranks)
    nodes = f"{num_nodes} {virtual}nodes" if num_nodes > 1 else "one node"
    dense = sum(p.numel() for name, p in model.named_parameters() if not is_expert(name)) / 1e6
    experts = sum(p.numel() for name, p in model.named_parameters() if is_expert(name)) * args.ranks / 1e6
    lines = (
        f"{args.ranks} ranks in {nodes} {where(args)}, {args.batch} x {config.seq_len} bytes on each",
        f"{config.num_layers} layers, hidden {config.hidden}, top-{config.num_topk} of {config.num_experts} experts, "
        f"{args.dtype}",
        f"{dense:.2f} M parameters on every rank, {experts:.2f} M in the experts of all ranks",
    )
    return "\n".join(lines)


def where(args) -> str:
    if args.device == "cpu":
        return f"on the CPU ({args.why_cpu})"
    shared = ranks_per_gpu(args.ranks)
    share = f"{shared} ranks on a GPU take turns, so times say little" if shared > 1 else "one GPU per rank"
    return f"on {device_name('cuda')} ({share})"


def finish(args, recorder: Recorder, text: dict, sample: str, started: float) -> None:
    """Print the sample and the table, and write the JSON and the chart; on rank 0 only."""
    wall_seconds = time.time() - started
    if args.sample_bytes:
        print(f"\nGenerated after {PROMPT!r}:\n" + textwrap.indent(sample, "  | ", lambda line: True))
    print(f"\nFinal figures\n{recorder.table(wall_seconds)}\n")
    config = {name: value for name, value in vars(args).items() if name != "check"} | {"out": str(args.out)}
    report = recorder.write(args.out / "report.json", config, device_name(args.device), text, sample, wall_seconds)
    print(f"figures: {args.out / 'report.json'}")
    try:
        draw(report, args.out / "chart.png")
        print(f"chart:   {args.out / 'chart.png'}", flush=True)
    except ImportError:
        print("chart:   not drawn, matplotlib is missing (pip install matplotlib)", flush=True)
    print(f"\n{recorder.verdict()}", flush=True)


def main() -> int:
    started = time.time()
    args, config = parse_arguments()
    backend = prepare_ranks(args.device, args.ranks)
    if "RANK" in os.environ:  # started by torchrun
        device_of(args.device, int(os.environ["RANK"]))  # set the current GPU, for NCCL
        dist.init_process_group(backend)
        try:
            return 0 if run(dist.get_rank(), args, config, started) else 1
        finally:
            dist.destroy_process_group()
    try:
        done = run_ranks(args.ranks, run, args, config, started, timeout_s=NO_LIMIT_S, backend=backend)
        return 0 if all(done) else 1
    except RankError as error:
        print(error, file=sys.stderr)
        if args.device == "cuda":
            print("On the CPU: --device cpu. What was found here: make doctor", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
