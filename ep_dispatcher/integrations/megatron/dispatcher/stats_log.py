"""What Megatron's TensorBoard and W&B logs get from us: imbalance, waits for ranks, skipped steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ep_dispatcher.integrations.job_stats import JobStats, JobSums
from ep_dispatcher.integrations.megatron.dispatcher import arguments, registration
from ep_dispatcher.integrations.megatron.dispatcher.buffers import Buffers, all_buffers
from ep_dispatcher.integrations.megatron.dispatcher.dispatcher import MoEEPTokenDispatcher


class Sizes(NamedTuple):
    """What is to be logged of some models, the same on all ranks."""

    interval: int = 0  # steps; 0: nothing
    num_labels: int = 0  # the largest number of a layer plus 1
    num_experts: int = 0


@dataclass
class Log:
    """How far the log of this job is."""

    steps: int = 0  # since the last sum
    newest: JobStats | None = None


def job_stats() -> JobStats | None:
    """Return the newest figures of the whole job, with ``--ep-dispatcher-stats-interval``. None before there are any.

    Every rank gets them, a step or more after the last of their steps, but not all ranks in the same step.
    """
    return registration.part(Log).newest


def sizes_of(dispatchers: Sequence[MoEEPTokenDispatcher]) -> Sizes:
    """Return what is to be logged of the layers with these dispatchers."""
    return Sizes(*map(max, zip(*map(_sizes, dispatchers)))) if dispatchers else Sizes()


def _sizes(dispatcher: MoEEPTokenDispatcher) -> Sizes:
    interval = arguments.given(dispatcher.config, "stats_interval") or 0
    num_experts = (
        dispatcher.config.num_moe_experts * dispatcher.tp_size
    )  # a buffer has a part of an expert as an expert
    return Sizes(interval, (dispatcher.layer_number or 0) + 1, num_experts)


def forget() -> None:
    """Begin anew: the job's registration has ended."""
    registration.forget(Log)
    registration.part(Buffers).sums = JobSums()


@contextmanager
def schedule(trains: bool, sizes: Sizes) -> Iterator[None]:
    """Count a schedule that trains as a step, and leave out the rows of others. Collective every ``interval`` steps."""
    if not trains:
        with registration.part(Buffers).sums.paused():
            yield
        return
    yield
    if sizes.interval:
        _end_step(sizes)


def _end_step(sizes: Sizes) -> None:
    """Log what has arrived, and after ``interval`` steps begin the next sum."""
    log, sums = registration.part(Log), registration.part(Buffers).sums
    log.steps += 1
    found = sums.newest()
    if found is not None:
        log.newest = found
        write(found.scalars())
    if log.steps >= sizes.interval:
        sums.grow(sizes.num_labels, sizes.num_experts)
        for buffer in all_buffers():  # those that were there before this was asked for
            sums.start(buffer)
        sums.begin(log.steps)
        log.steps = 0


def write(scalars: Mapping[str, float]) -> None:
    """Write to Megatron's TensorBoard and W&B logs, on the rank that has them."""
    module = sys.modules.get("megatron.training.global_vars")
    args = getattr(module, "_GLOBAL_ARGS", None)
    step = getattr(args, "curr_iteration", None)
    board, wandb = (getattr(module, f"_GLOBAL_{name}_WRITER", None) for name in ("TENSORBOARD", "WANDB"))
    if board is not None:
        for name, value in scalars.items():
            board.add_scalar(name, value, step)
    if wandb is not None and scalars:
        wandb.log({**scalars}, step)
