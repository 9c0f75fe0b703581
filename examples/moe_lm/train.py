"""The training loop of one rank."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_lm.device import synchronize
from moe_lm.report import Recorder
from moe_lm.step import backward, learning_rate, make_optimizer, reduce_gradients, update
from moe_lm.text import RandomWindows, held_out_batches

REPORT_EVERY_S = 5.0
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


def share_done(args, steps: int, seconds: float) -> float:
    """Return which share of the run is done, from 0 to 1: the last step may end long after the minutes are over."""
    by_steps = steps / args.steps if args.steps else 0.0
    by_time = seconds / (60 * args.minutes) if args.minutes else 0.0
    return min(1.0, max(by_steps, by_time))


def train(args, model: nn.Module, train_text: Tensor, held_out: Tensor, recorder: Recorder) -> None:
    """Train for ``args.steps`` steps or ``args.minutes`` minutes, and give all figures to ``recorder``.

    The learning rate follows the share of the run that is done, so a slow machine takes fewer steps of the same
    schedule. All ranks use rank 0's clock, which the gradients' all-reduce carries. So they evaluate and stop at the
    same step. The texts and the model are on the same device.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    windows = RandomWindows(train_text, args.batch, args.seq_len, args.seed, rank)
    quick = held_out_batches(held_out, args.batch, args.seq_len, rank, num_ranks, QUICK_WINDOWS)
    optimizer = make_optimizer(model, args.weight_decay)
    start, step, done, next_report = time.monotonic(), 0, 0.0, 0.0
    step_began = start
    while done < 1.0:
        local = backward(model, *windows.next(), args.balance)
        result = reduce_gradients(model, *local, clock=time.monotonic() - start)
        step += 1
        done = share_done(args, step, result.clock)
        update(model, optimizer, learning_rate(args.lr, done), result.grad_norm, args.clip)
        synchronize(train_text.device)
        now = time.monotonic()
        recorder.step(result, now - step_began)
        step_began = now
        if result.clock >= next_report or done >= 1.0:
            recorder.progress(result.clock, done, evaluate(model, quick))
            next_report = result.clock + REPORT_EVERY_S
            step_began = time.monotonic()  # evaluate() has waited for the device
    everything = held_out_batches(held_out, args.batch, args.seq_len, rank, num_ranks)
    recorder.finish(time.monotonic() - start, evaluate(model, everything))
