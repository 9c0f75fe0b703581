"""Writes imbalance, waits for ranks and skipped steps to Megatron's TensorBoard and W&B logs."""

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
    """How often to log, and for how many layers and experts: the same on all ranks."""

    interval: int = 0  # in steps; 0: nothing is logged
    num_labels: int = 0  # the largest layer number plus 1
    num_experts: int = 0


@dataclass
class Log:
    """The progress of this job's log."""

    steps: int = 0  # since the last sum began
    newest: JobStats | None = None


def job_stats() -> JobStats | None:
    """Return the newest figures of the whole job, with ``--ep-dispatcher-stats-interval``. None before there are any.

    Every rank gets them, a step or more after the last of their steps, but not all ranks in the same step.
    """
    return registration.process_wide(Log).newest


def sizes_of(dispatchers: Sequence[MoEEPTokenDispatcher]) -> Sizes:
    """Return the sizes that are enough for the layers with these dispatchers."""
    sizes = Sizes()
    for dispatcher in dispatchers:
        config = dispatcher.config
        sizes = Sizes(
            interval=max(sizes.interval, arguments.setting(config, "stats_interval") or 0),
            num_labels=max(sizes.num_labels, (dispatcher.layer_number or 0) + 1),
            # a buffer counts each slice of an expert as an expert
            num_experts=max(sizes.num_experts, config.num_moe_experts * dispatcher.tp_size),
        )
    return sizes


def forget() -> None:
    """Start over, because the job's registration has ended."""
    registration.forget(Log)
    registration.process_wide(Buffers).sums = JobSums()


@contextmanager
def schedule(trains: bool, sizes: Sizes) -> Iterator[None]:
    """Count a schedule as a step if it trains; otherwise leave its rows out. Collective every ``interval`` steps."""
    if not trains:
        with registration.process_wide(Buffers).sums.paused():
            yield
        return
    yield
    if sizes.interval:
        _end_step(sizes)


def _end_step(sizes: Sizes) -> None:
    """Log the sums that have arrived, and after ``interval`` steps begin the next one."""
    log, sums = registration.process_wide(Log), registration.process_wide(Buffers).sums
    log.steps += 1
    found = sums.newest()
    if found is not None:
        log.newest = found
        write(found.scalars())
    if log.steps >= sizes.interval:
        sums.grow(sizes.num_labels, sizes.num_experts)
        for buffer in all_buffers():  # some may be older than the request for statistics
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
