"""Skips the optimizer step if more rows have arrived than the rank capacity has room for: it costs a step, not the job.

    run the schedule              # dispatches with too many rows give zeros; nothing is raised inside it
    agree with all ranks          # on the largest factor that is needed; 0: every dispatch had room
    grow the capacity, discard CUDA graphs, say so
    optimizer.step()              # returns (False, None, None), as for gradients that are not finite

An error inside a pipeline schedule would leave the ranks of other stages waiting. So the schedule always runs to its
end. Then all ranks agree, those too whose dispatches had room: other expert parallel groups, stages and replicas.

Megatron counts the step in its ``skipped iterations``, and leaves the learning rate as it is. The loss scale does not
change, because the gradients are not looked at. As after a step that was skipped for a loss scale, the data and the
random numbers of the step are used up. What the step has changed before the optimizer is put back.

In an evaluation, and without an optimizer of Megatron's, there is no step to skip: TooFewRowsError on all ranks.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import Router
from torch import Tensor
from torch.nn import Module

from ep_dispatcher.errors import TooFewRowsError, copy_error
from ep_dispatcher.integrations.agree import largest_in_job, say
from ep_dispatcher.integrations.megatron.dispatcher import arguments, buffers, capacity, graphs, limits, stats_log
from ep_dispatcher.integrations.megatron.dispatcher.capacity import Overflow
from ep_dispatcher.integrations.megatron.dispatcher.dispatcher import MoEEPTokenDispatcher

HEAD_ROOM = 1.1  # the new factor in terms of the one that was needed. Routing that drifts would soon need more
COUNTER = "ep_dispatcher/skipped_steps"
NOTE = "the end of a step"
_PARTS = 10000  # of a factor, in what ranks agree on
# Where Megatron adds up what it logs: module and name. No version has all.
_LOGS = (
    ("megatron.core.transformer.moe.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"),  # 0.16 and 0.17
    ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)


def skipped_steps() -> int:
    """Return how many optimizer steps this job has skipped because too many rows arrived."""
    return capacity.job().num_skipped


# ---- around a schedule ----------------------------------------------------------------------------------------------


def watch(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a schedule, which runs a step's forward and backward passes. Replays of CUDA graphs are checked after it."""

    @functools.wraps(old)
    def run(*args, **kwargs):
        job = capacity.job()
        if job.found is not None or graphs.stream_is_captured():  # a wrapper around this one does it
            return old(*args, **kwargs)
        trains = not kwargs.get("forward_only", False)
        if trains and (job.is_skipped or not job.optimizers):  # the step before
            job.pending, job.is_skipped = None, False
            graphs.put_optimizer_graph_back()
        if trains and graphs.num_optimizer_calls() != job.num_optimizer_calls:  # a step was replayed, and not skipped
            job.num_optimizer_calls = graphs.num_optimizer_calls()
            job.kept, job.last_was_skipped = None, False
        given = kwargs.get("model")
        models = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, Module)]
        facts = _facts_of(models)
        with stats_log.schedule(trains, stats_log.Sizes() if facts is None else facts.stats):
            if facts is None or facts.factor == 0:
                result = old(*args, **kwargs)
                graphs.check_replays()
                return result
            if trains:
                _begin(models, facts)
            with job.watch() as found:
                result = old(*args, **kwargs)
                # Late errors: on GPUs too many rows are one of them.
                buffers.check_buffers(graphs.NOTE if graphs.are_used() else NOTE)
            _conclude(max(found, default=None), models, facts, trains)
            return result

    return run


def watch_schedules(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap get_forward_backward_func, which returns the schedule of a job."""

    def get_forward_backward_func(*args, **kwargs):
        return watch(old(*args, **kwargs))

    return get_forward_backward_func


@dataclass
class Models:
    """Facts of the models that a schedule is given."""

    factor: float  # the rank capacity factor of layers on any rank of the job; 0: there is none
    is_megatrons: bool  # whether it was given as moe_expert_rank_capacity_factor
    routers: list[Module]
    keeps_amaxes: bool  # whether layers are in FP8 with delayed scaling
    stats: stats_log.Sizes  # what is to be logged of them, on any rank


def _facts_of(models: Sequence[Module]) -> Models | None:
    """Return facts of these models, None if there are none. Collective for models that are new.

    Only other ranks may have MoE layers, and even another configuration. So ranks ask each other.
    """
    if not models:
        return None
    known = capacity.job().models.get(models[0])
    if known is None:
        modules = [module for model in models for module in model.modules()]
        dispatchers = [vars(module).get("token_dispatcher") for module in modules]
        ours = [one for one in dispatchers if isinstance(one, MoEEPTokenDispatcher)]
        factor = max((limits.any_factor(one.config) or 0.0 for one in ours), default=0.0)
        own = any(arguments.rank_capacity_factor(one.config) for one in ours)
        parts, is_own, *sizes = largest_in_job(math.ceil(factor * _PARTS), own, *stats_log.sizes_of(ours))
        routers = [one for one in modules if isinstance(one, Router) or hasattr(one, "expert_bias")]
        scaled = any(map(_is_scaled_with_delay, modules))
        known = capacity.job().models[models[0]] = Models(
            parts / _PARTS, not is_own, routers, scaled, stats_log.Sizes(*sizes)
        )
    return known


def _is_scaled_with_delay(module: Module) -> bool:
    config = getattr(module, "config", None)
    return bool(getattr(config, "fp8", None)) and getattr(config, "fp8_recipe", None) == "delayed"


def _begin(models: Sequence[Module], facts: Models) -> None:
    """Prepare for a schedule that trains: there may be several before an optimizer step."""
    job = capacity.job()
    graphs.capture_again()  # those that were discarded when the capacity grew
    if job.optimizers:
        job.kept = job.kept or Kept()
        job.kept.add(models, facts.routers)


def _conclude(own: Overflow | None, models: Sequence[Module], facts: Models, trains: bool) -> None:
    """Let the next optimizer step be skipped, if any rank had too many rows. Collective."""
    job = capacity.job()
    worst, last_was_skipped, has_optimizer = _agree(own)
    if worst is None:
        return
    flag = limits.MEGATRONS_FACTOR if facts.is_megatrons else limits.FACTOR
    room = max(facts.factor, job.grown)
    layer = f"layer {worst.layer}" if worst.layer else "a layer"
    needs = f"{layer} needs {worst.rows} rows on a rank"
    too_many = f"{needs}, more than rank capacity factor {room:g} has room for"

    def error(why: str) -> TooFewRowsError:
        enough = math.ceil(round(100 * worst.factor, 2)) / 100
        text = f"{too_many}, and {why}. {flag} {enough:g} is enough for this routing"
        return TooFewRowsError(text, worst.rows, worst.layer)

    if not trains:
        raise error("an evaluation has no optimizer step to skip")
    if not has_optimizer:
        raise error("there is no optimizer of Megatron, whose step could be skipped")
    if worst.factor <= job.grown:
        raise RuntimeError(
            f"{needs}. The factor has grown to {job.grown:g}, which is enough, but the layer has the old one: it runs "
            f"in a CUDA graph that ep_dispatcher cannot capture again. Start with {flag} {job.grown:g}"
        )
    if job.pending is None:
        job.num_skipped += 1
        stats_log.write({COUNTER: job.num_skipped})
    job.pending = error("an optimizer that is not Megatron's would use the gradients of this step")
    job.grown = larger_factor(worst, room, last_was_skipped)
    graphs.discard(models)
    graphs.set_optimizer_graph_aside()
    scaled = " Amax histories of FP8 have seen this step." if facts.keeps_amaxes else ""
    say(
        "ep_dispatcher: the optimizer step of this iteration is skipped on all ranks, and its losses are not valid, "
        f"because {too_many}. From the next step on it is {job.grown:g} in all layers.{scaled} Skipped steps: "
        f"{job.num_skipped}. Start with {flag} {job.grown:g} to avoid them"
    )


def larger_factor(worst: Overflow, room: float, last_was_skipped: bool) -> float:
    """Return the factor that the job grows to, from ``room``. The ranks of the group are always enough."""
    wanted = HEAD_ROOM * worst.factor
    if last_was_skipped:
        wanted = max(wanted, 2 * room)
    return min(math.ceil(round(100 * wanted, 2)) / 100, worst.most)


def _agree(own: Overflow | None) -> tuple[Overflow | None, bool, bool]:
    """Return what needs the largest factor on any rank of the job; None: every dispatch had room. Collective.

    Also return whether the last step was skipped, and whether there is an optimizer of Megatron, on any rank.
    """
    needed = 0 if own is None else math.ceil(own.factor * _PARTS)
    (most_needed,) = largest_in_job(needed)
    if most_needed == 0:
        return None, False, False
    details = [0, 0, 0]
    if own is not None and needed == most_needed:
        details = [own.rows, own.layer, own.most]
    job = capacity.job()
    rows, layer, most, was_skipped, has_optimizer = largest_in_job(
        *details, job.last_was_skipped, len(job.optimizers) > 0
    )
    return Overflow(most_needed / _PARTS, rows, layer, most), bool(was_skipped), bool(has_optimizer)


# ---- around an optimizer --------------------------------------------------------------------------------------------


def note_optimizer(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap MegatronOptimizer.__init__.

    Each step of Megatron's optimizers first calls ``prepare_grads``, of all that are chained. If one of these returns
    True, gradients are not finite, and the step ends with (False, None, None). So it says the same of a step that is
    to be skipped, and looks at no gradients: the loss scale does not change.
    """

    def init(self, *args, **kwargs):
        old(self, *args, **kwargs)
        capacity.job().optimizers.add(self)
        noted = weakref.ref(self)

        def prepare_grads() -> bool:
            one: Any = noted()
            return _skip_if_pending() or type(one).prepare_grads(one)

        self.prepare_grads = prepare_grads

    return init


def _skip_if_pending() -> bool:
    """Return whether the optimizer step under way is skipped. If so, put back what the iteration has changed.

    A job may have several optimizers. All of them skip until the next schedule begins.
    """
    job = capacity.job()
    kept, job.kept = job.kept, None
    job.is_skipped = job.last_was_skipped = job.pending is not None
    if job.is_skipped and kept is not None:
        kept.put_back()
    return job.is_skipped


def refuse_others(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer would use gradients of a step that is to be skipped: a hook of all PyTorch's optimizers."""
    pending = capacity.job().pending
    if pending is not None:
        raise copy_error(pending)


# ---- what a step changes before its optimizer ------------------------------------------------------------------------


class Kept:
    """Copies of buffers of routers (expert bias and its counts), and of what Megatron adds up for its log."""

    def __init__(self) -> None:
        self._models: list[Module] = []
        self._buffers: list[tuple[Module, str, Tensor]] = []
        logs = _logs()
        self._logs = dict(zip(logs, _copies_of(list(logs.values()))))

    def add(self, models: Sequence[Module], routers: Sequence[Module]) -> None:
        """Copy the buffers of these models, unless they are here: another schedule of the step has begun with them."""
        if any(models[0] is one for one in self._models):
            return
        self._models += models
        given = [(router, *item) for router in routers for item in router.named_buffers(recurse=False)]
        copies = _copies_of([tensor for *_, tensor in given])
        self._buffers += [(router, name, copy) for (router, name, _), copy in zip(given, copies)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Write the copies over what is there now, because CUDA graphs may know the addresses."""
        for router, name, copy in self._buffers:
            getattr(router, name).copy_(copy)
        for where, tensor in _logs().items():
            if where in self._logs:
                tensor.copy_(self._logs[where])
            else:
                tensor.zero_()
        for module in (one for model in self._models for one in model.modules()):
            logits = vars(module).get("current_max_attn_logits")
            if isinstance(logits, Tensor):
                logits.zero_()  # Megatron clips weights by them after the optimizer, also after one that has skipped


@torch.no_grad()
def _copies_of(tensors: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


def _logs() -> dict[tuple[str, ...], Tensor]:
    """Return the tensors in which Megatron adds up what it logs, by where they are."""
    return {
        where: tensor
        for module, name in _LOGS
        for where, tensor in _tensors_in((module, name), getattr(sys.modules.get(module), name, None))
    }


def _tensors_in(where: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield tensors in dictionaries, and in attributes of classes and objects of Megatron."""
    if isinstance(value, Tensor):
        yield where, value
        return
    if not isinstance(value, dict):
        is_megatrons = str(getattr(value, "__module__", "")).startswith("megatron.")
        value = vars(value) if is_megatrons and hasattr(value, "__dict__") else {}
    for key, one in value.items():
        yield from _tensors_in((*where, str(key)), one)
