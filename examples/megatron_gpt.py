"""Train a small GPT of Megatron-core with ep_dispatcher, and the same model with Megatron's own dispatcher.

    torchrun --nproc-per-node 4 examples/megatron_gpt.py

Both models begin with the same weights and see the same text. They differ in two values of their TransformerConfig.
The first takes the dispatcher of Megatron's flags (--moe-token-dispatcher-type, --moe-flex-dispatcher-backend; ours by
default), the second ``allgather`` (on CPUs) or ``alltoall`` (on GPUs). The dense part is data parallel, the experts are
spread over all ranks. Layers are Megatron's local ones, without Transformer Engine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_lm.progress import Progress, is_line_due
from moe_lm.step import gradient, learning_rate, make_optimizer, update
from moe_lm.text import RandomWindows, held_out_batches, load_text, to_tensor, unigram_bits
from torch import Tensor, nn

import ep_dispatcher
import ep_dispatcher.integrations.megatron as ep_megatron

WARM_UP = 5  # steps that the times leave out, at most half of all
WARM_UP_LR = 15  # steps in which the learning rate rises, also in a short run: large steps make rounding errors grow
FIRST_STEPS, FIRST_LIMIT = 5, 1e-5  # relative limit for each of the first losses, before rounding errors grow
LAST_SHARE, LAST_LIMIT = 0.2, 0.01  # relative limit for the means of the losses of the last 20 % of the steps


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default: dict[str, Any] = dict(type=int, help="default: %(default)s")
    parser.add_argument("--moe-token-dispatcher-type", default="flex", help="default: %(default)s")
    parser.add_argument("--moe-flex-dispatcher-backend", default="ep_dispatcher", help="default: %(default)s")
    parser.add_argument("--num-layers", default=2, **default)
    parser.add_argument("--hidden-size", default=128, **default)
    parser.add_argument("--num-attention-heads", default=4, **default)
    parser.add_argument("--moe-ffn-hidden-size", default=256, **default)
    parser.add_argument("--num-experts", default=16, **default)
    parser.add_argument("--moe-router-topk", default=2, **default)
    parser.add_argument("--seq-length", default=128, **default)
    parser.add_argument("--micro-batch-size", default=4, **default)
    parser.add_argument("--train-iters", default=300, **default)
    parser.add_argument("--lr", type=float, default=5e-3, help="default: %(default)s")
    parser.add_argument("--bf16", action="store_true", help="parameters in bfloat16 (default: float32)")
    parser.add_argument("--seed", default=0, **default)
    parser.add_argument("--out", type=Path, default=Path("runs/megatron_gpt"), help="folder of the JSON; %(default)s")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"start it with torchrun --nproc-per-node 4 {sys.argv[0]}")
    if args.num_experts % int(os.environ["WORLD_SIZE"]):
        parser.error(
            f"--num-experts is {args.num_experts}, but has to be a multiple of {os.environ['WORLD_SIZE']} ranks"
        )
    return args


def make_model(args, dispatcher: dict[str, Any]) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        ffn_hidden_size=args.moe_ffn_hidden_size,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        num_moe_experts=args.num_experts,
        moe_router_topk=args.moe_router_topk,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.03,
        moe_router_dtype="fp32",
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_cpu_initialization=True,
        **dispatcher,
    )
    torch.manual_seed(args.seed)  # the same on every rank, and for both models
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=args.num_experts, moe_grouped_gemm=False),
        vocab_size=256,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
    )
    torch.manual_seed(1000 * args.seed + dist.get_rank() + 1)  # but every rank has experts of its own
    assert config.init_method is not None  # TransformerConfig has made one
    for parameter in expert_parameters(model):
        config.init_method(parameter.data)
    if args.bf16:
        model.bfloat16()  # as in Megatron's Float16Module, because Megatron makes norms in float32
    return model.to(device())


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that Megatron does not share between data-parallel ranks."""
    return [p for p in model.parameters() if not getattr(p, "allreduce", True)]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats per byte; inputs and targets int64 [batch, sequence]."""
    batch, length = inputs.shape
    positions = torch.arange(length, device=inputs.device).expand(batch, length)
    later = torch.ones(1, 1, length, length, dtype=torch.bool, device=inputs.device).triu(1)  # True: not to be seen
    return model(inputs, positions, later, labels=targets).float().mean()


def reduce_gradients(model: nn.Module, loss: Tensor) -> tuple[float, float]:
    """Turn gradients into those of the mean loss of all ranks, in place. Return that loss and the norm before clipping.

    An expert's gradient already includes every rank's tokens, so it is only divided.
    """
    num_ranks, experts = dist.get_world_size(), expert_parameters(model)
    mine = {id(p) for p in experts}
    dense = [p for p in model.parameters() if id(p) not in mine]
    torch._foreach_div_([gradient(p) for p in [*dense, *experts]], num_ranks)
    expert_square = sum((gradient(p).float().square().sum() for p in experts), loss.new_zeros((), dtype=torch.float32))
    bucket = torch.cat(
        [gradient(p).float().flatten() for p in dense] + [torch.stack([loss / num_ranks, expert_square])]
    )
    dist.all_reduce(bucket)
    *reduced, figures = bucket.split([p.numel() for p in dense] + [2])
    for parameter, flat in zip(dense, reduced):
        gradient(parameter).copy_(flat.view_as(parameter))
    figures[1] += sum(flat.square().sum() for flat in reduced)
    mean_loss, square = figures.tolist()  # the one time in a step that the host waits for the loss and the gradients
    return mean_loss, math.sqrt(square)


@torch.no_grad()
def held_out_bits(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    total = torch.zeros(2, dtype=torch.float64, device=device())
    for inputs, targets in batches:
        loss = loss_of(model, inputs.to(device()), targets.to(device()))
        total += torch.tensor([loss.item() * targets.numel(), targets.numel()], device=device())
    dist.all_reduce(total)
    return (total[0] / total[1]).item() / math.log(2)


def train(args, models: dict[str, nn.Module], text: Tensor) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Train both models on the same windows, a step of each in turn. Return losses (bits per byte), median step (s)."""
    windows = RandomWindows(text, args.micro_batch_size, args.seq_length, args.seed, dist.get_rank())
    optimizers = {name: make_optimizer(model, weight_decay=0.1) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    warmup_share = min(0.9, max(0.05, WARM_UP_LR / args.train_iters))
    tokens_per_step = args.micro_batch_size * args.seq_length * dist.get_world_size()
    with Progress(args.train_iters, tokens_per_step, shows=dist.get_rank() == 0) as progress:
        for step in range(1, args.train_iters + 1):
            inputs, targets = (t.to(device()) for t in windows.next())
            lr = learning_rate(args.lr, step / args.train_iters, warmup_share)
            for name, model in models.items():
                synchronize()
                begin = time.monotonic()
                loss = loss_of(model, inputs, targets)
                loss.backward()
                mean, norm = reduce_gradients(model, loss.detach())
                update(model, optimizers[name], lr, norm, max_norm=1.0)
                losses[name].append(mean / math.log(2))
                synchronize()
                seconds[name].append(time.monotonic() - begin)
            ours, theirs = (values[-1] for values in losses.values())
            of_ours = next(iter(seconds.values()))
            progress.step(ours, of_ours[-1])
            if step == 1:
                progress.say("\n step" + "".join(f"{name:>16}" for name in models) + "      difference   tokens/s")
            if is_line_due(step, args.train_iters):
                speed = step * tokens_per_step / sum(of_ours)
                progress.say(f"{step:5}{ours:16.5f}{theirs:16.5f}{ours - theirs:16.1e}{speed:11,.0f}")
    warm_up = min(WARM_UP, args.train_iters // 2)
    return losses, {name: statistics.median(of_model[warm_up:]) for name, of_model in seconds.items()}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare(losses: dict[str, list[float]]) -> dict[str, float]:
    """Return three differences of the losses; the first two have limits (FIRST_LIMIT, LAST_LIMIT)."""
    ours, theirs = losses.values()
    last = max(1, int(LAST_SHARE * len(ours)))
    means = [sum(values[-last:]) / last for values in (ours, theirs)]
    return {
        "first_steps_relative": max(abs(a - b) / b for a, b in zip(ours[:FIRST_STEPS], theirs)),
        "last_steps_relative": abs(means[0] - means[1]) / means[1],
        "largest_bits_per_byte": max(abs(a - b) for a, b in zip(ours, theirs)),
    }


def run(args) -> bool:
    say = partial(print, flush=True) if dist.get_rank() == 0 else lambda text: None
    chosen = {
        "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
        "moe_flex_dispatcher_backend": args.moe_flex_dispatcher_backend,
    }
    reference = "alltoall" if torch.cuda.is_available() else "allgather"
    name = args.moe_flex_dispatcher_backend if args.moe_token_dispatcher_type == "flex" else f"{reference} (chosen)"
    models = {
        name: make_model(args, chosen),
        reference: make_model(args, {"moe_token_dispatcher_type": reference}),
    }
    versions = {"megatron-core": megatron_version(), "torch": torch.__version__}
    versions["ep_dispatcher"] = ep_dispatcher.__version__
    where = f"{dist.get_world_size()} ranks on {device_name()}"
    say(f"{where}; {', '.join(f'{what} {version}' for what, version in versions.items())}")
    for key, model in models.items():
        layers = [module for module in model.modules() if hasattr(module, "token_dispatcher")]
        say(f"{key + ':':16}{', '.join(sorted({type(layer.token_dispatcher).__name__ for layer in layers}))}")
    train_bytes, held_out_bytes = load_text()
    unigram = unigram_bits(train_bytes, held_out_bytes)
    say(f"unigram entropy {unigram:.3f} bits per byte of the held-out text")
    losses, step_seconds = train(args, models, to_tensor(train_bytes))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = held_out_batches(to_tensor(held_out_bytes), args.micro_batch_size, args.seq_length, rank, ranks)
    held_out = {key: held_out_bits(model.eval(), batches) for key, model in models.items()}
    differences = compare(losses)
    rounding = 400 if args.bf16 else 1  # bfloat16 rounds at 2^-9 instead of 2^-24; sums over a batch hide most of it
    agree = differences["first_steps_relative"] <= FIRST_LIMIT * rounding
    agree = agree and differences["last_steps_relative"] <= LAST_LIMIT
    say("\nheld out, bits per byte: " + ", ".join(f"{key} {bits:.4f}" for key, bits in held_out.items()))
    tokens = args.micro_batch_size * args.seq_length * ranks
    speeds = {key: {"milliseconds": 1e3 * s, "tokens_per_s": tokens / s} for key, s in step_seconds.items()}
    shown = (f"{key} {one['milliseconds']:.1f} ms ({one['tokens_per_s']:,.0f} tokens/s)" for key, one in speeds.items())
    say("a step (median): " + ", ".join(shown))
    say(
        f"largest relative difference of the first {FIRST_STEPS} losses {differences['first_steps_relative']:.1e} "
        f"(limit {FIRST_LIMIT * rounding:.0e}),\nof the mean of the last {LAST_SHARE:.0%} of the steps "
        f"{differences['last_steps_relative']:.1e} (limit {LAST_LIMIT:.0e}), of any loss "
        f"{differences['largest_bits_per_byte']:.1e} bits per byte\n{'AGREE' if agree else 'DIFFERENT'}"
    )
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        report = {
            "config": {key: str(value) for key, value in vars(args).items()},
            "versions": versions,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": {"platform": platform.platform(), "device": device_name(), "ranks": ranks},
            "unigram_bits_per_byte": unigram,
            "held_out_bits_per_byte": held_out,
            "differences": differences,
            "agree": agree,
            "step": speeds,
            "training_bits_per_byte": losses,
        }
        (args.out / "report.json").write_text(json.dumps(report))
        say(f"figures: {args.out / 'report.json'}")
    dist.barrier()  # torchrun stops all ranks as soon as one fails: first print everything
    return agree


def megatron_version() -> str:
    import megatron.core

    return megatron.core.__version__


def main() -> int:
    args = parse_arguments()
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed")  # missing packages, deprecated calls
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=device())
    else:
        from ep_dispatcher.integrations.megatron.dispatcher.cpu import let_megatron_run_on_cpu

        dist.init_process_group("gloo")
        let_megatron_run_on_cpu()
    ep_megatron.register(max_tokens_per_rank=args.micro_batch_size * args.seq_length)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)  # attention forks these generators
    try:
        return 0 if run(args) else 1
    finally:
        ep_megatron.destroy_buffers()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
