"""The training loop of one rank."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_lm.device import synchronize
from moe_lm.progress import Progress, is_line_due
from moe_lm.report import Recorder
from moe_lm.step import backward, learning_rate, make_optimizer, reduce_gradients, update
from moe_lm.text import RandomWindows, held_out_batches

QUICK_WINDOWS = 64  # held-out windows for evaluations during training; the last one takes all


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Return bits per byte of the batches of all ranks."""
    total = torch.zeros(2, dtype=torch.float64, device=batches[0][0].device)
    for inputs, targets in batches:
        total[0] += F.cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten(), reduction="sum")
        total[1] += targets.numel()
    dist.all_reduce(total)
    return (total[0] / total[1]).item() / math.log(2)


def train(args, model: nn.Module, train_text: Tensor, held_out: Tensor, recorder: Recorder) -> None:
    """Train for ``args.steps`` steps, and give all figures to ``recorder``.

    Nothing but figures of time depends on the time that a step takes. The texts and the model are on the same device.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    windows = RandomWindows(train_text, args.batch, args.seq_len, args.seed, rank)
    quick = held_out_batches(held_out, args.batch, args.seq_len, rank, num_ranks, QUICK_WINDOWS)
    optimizer = make_optimizer(model, args.weight_decay)
    start = time.monotonic()
    with Progress(args.steps, recorder.tokens_per_step, shows=recorder.printing) as progress:
        for step in range(1, args.steps + 1):
            step_began = time.monotonic()
            result = reduce_gradients(model, *backward(model, *windows.next(), args.balance))
            update(model, optimizer, learning_rate(args.lr, step / args.steps), result.grad_norm, args.clip)
            synchronize(train_text.device)
            seconds = time.monotonic() - step_began
            recorder.step(result, seconds)
            progress.step(recorder.training[-1], seconds)
            if is_line_due(step, args.steps):
                line = recorder.line(time.monotonic() - start, step / args.steps, evaluate(model, quick))
                progress.say(line)
    everything = held_out_batches(held_out, args.batch, args.seq_len, rank, num_ranks)
    recorder.finish(time.monotonic() - start, evaluate(model, everything))
