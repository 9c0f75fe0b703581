"""Runs a step again if more rows have arrived than the rank capacity has room for: it costs a step, not the job.

    while True:
        run the schedule                         # dispatches with too many rows give zeros; nothing is raised inside it
        agree with all ranks of the job          # one number, the largest factor that is needed; 0: the step is over
        throw the gradients away, grow the capacity, make new CUDA graphs, put everything else back

An error inside a pipeline schedule would leave the ranks of other stages waiting. So the schedule always runs to its
end. Then all ranks agree, those too whose dispatches had room: other expert parallel groups, stages and replicas.

Megatron 0.18 and newer can run such a step again themselves (PagedStashRunner), but for other backends, without putting
back random numbers, auxiliary losses and expert bias, and without a capacity for that run, which CUDA graphs need.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from ep_dispatcher.integrations.agree import say
from ep_dispatcher.integrations.megatron import buffers, capacity, graphs, limits, replay
from ep_dispatcher.integrations.megatron.capacity import Overflow

ROOM = 110  # percent: the new factor in terms of the one that was needed. Routing that drifts would soon need more
COUNTER = "ep_dispatcher/repeated_steps"
NOTE = "the end of a step"
_PARTS = 10000  # of a factor, in what ranks agree on
_repeated = 0


def repeated_steps() -> int:
    """Return how many steps have run again in this job because too many rows arrived."""
    return _repeated


def run_again(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a schedule, which runs a step's forward and backward passes. Replays of CUDA graphs are checked after it."""

    def run(*args, **kwargs):
        if capacity.found is not None or graphs.stream_is_captured():  # a wrapper around this one does it
            return old(*args, **kwargs)
        given = kwargs.get("model")
        models = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, Module)]
        factor = _configured(models)
        if factor is None:
            result = old(*args, **kwargs)
            graphs.check_replays()
            return result
        return _run(functools.partial(old, *args), kwargs, models, factor)

    return run


def _run(schedule: Callable[..., Any], given: dict[str, Any], models: Sequence[Module], configured: float) -> Any:
    trains = not given.get("forward_only", False)
    if trains:
        graphs.capture_again()  # those that a step without gradients has discarded
    tapes, before = replay.Tapes(given.get("data_iterator")), replay.Before(models)
    gradients = replay.Gradients(models if trains else ())
    while True:
        with capacity.watched() as found:
            result = schedule(**given | {"data_iterator": tapes.iterators})
            buffers.check_buffers(graphs.NOTE if graphs.are_used else NOTE)  # late errors: on GPUs too many rows too
        worst = _agree(max(found, default=None))
        if worst is None:
            return result
        del result
        _grow(worst, configured, trains)
        gradients.throw_new_away()
        graphs.discard(models)
        if trains:
            graphs.capture_again()
        before.restore()
        tapes.rewind()


def _configured(models: Sequence[Module]) -> float | None:
    """Return the factor of these models; None: they have none, or cannot run a step again.

    The same on all ranks of the job, also where a stage has no MoE layer.
    """
    if not models:
        return None
    from megatron.core.utils import get_attr_wrapped_model

    try:
        config = get_attr_wrapped_model(models[0], "config", allow_none=False)
    except RuntimeError:  # it has none
        return None
    if getattr(config, "num_moe_experts", None) is None:
        return None
    for model in models:  # their gradients lie where the weights of the next forward pass are
        if getattr(getattr(model, "ddp_config", None), "reuse_grad_buf_for_mxfp8_param_ag", False):
            return None
    return limits.any_factor(config)


def _agree(own: Overflow | None) -> Overflow | None:
    """Return what needs the largest factor on any rank of the job. Collective; None: every dispatch had room."""
    needed = 0 if own is None else math.ceil(own.factor * _PARTS)
    (most,) = _largest(needed)
    if most == 0:
        return None
    rows, layer = _largest(own.rows, own.layer) if own is not None and needed == most else _largest(0, 0)
    return Overflow(most / _PARTS, rows, layer)


def _largest(*values: int) -> list[int]:
    """Return the largest of each value over all ranks of the job. On GPUs the step's work is complete by now."""
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    most = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def _grow(worst: Overflow, configured: float, trains: bool) -> None:
    global _repeated
    before, layer = capacity.grown, f"layer {worst.layer or 'unknown'}"
    if worst.factor <= before:
        raise RuntimeError(
            f"{layer} needs {worst.rows} rows on a rank. The factor has grown to {before:g}, "
            "which is enough, but the layer has the old one: it runs in a CUDA graph that ep_dispatcher cannot capture "
            f"again. Start with {limits.FACTOR} {before:g}"
        )
    capacity.grown = math.ceil(round(worst.factor * ROOM, 2)) / 100
    _repeated += 1
    _log(_repeated)
    step, after = "step" if trains else "evaluation step", f"{capacity.grown:g}"
    say(
        f"ep_dispatcher runs this {step} again, on all ranks: {layer} needs {worst.rows} rows on a rank, more than "
        f"rank capacity factor {before or configured:g} has room for. From now on it is {after} in all layers. "
        f"Repeated steps: {_repeated}. {limits.FACTOR} {after} at the next start saves them"
    )


def _log(number: int) -> None:
    """Write the counter to Megatron's TensorBoard and W&B logs, on the rank that has them."""
    module = sys.modules.get("megatron.training.global_vars")
    args = getattr(module, "_GLOBAL_ARGS", None)
    step = getattr(args, "curr_iteration", None)
    board, wandb = (getattr(module, f"_GLOBAL_{name}_WRITER", None) for name in ("TENSORBOARD", "WANDB"))
    if board is not None:
        board.add_scalar(COUNTER, number, step)
    if wandb is not None:
        wandb.log({COUNTER: number}, step)
