"""Skips the optimizer step if there were more rows than a capacity allows: that costs a step, not the job.

    run the schedule              # dispatches with too many rows give zeros; nothing is raised inside it
    agree with all ranks          # on the largest factors that are needed; 0: every dispatch had room
    grow the capacities, discard CUDA graphs, print a line
    optimizer.step()              # returns (False, None, None), as for gradients that are not finite

An error inside a pipeline schedule would leave the ranks of other stages waiting. So the schedule always runs to its
end. Then all ranks of the job agree, including those whose dispatches had room.

Megatron counts the step in its ``skipped iterations``, and leaves the learning rate as it is. The loss scale does not
change, because the gradients are not looked at. The data and the random numbers of the step are used up, as after a
step that was skipped for its loss scale. What the step has changed before the optimizer is restored.

An evaluation has no step to skip, and neither has a job without an optimizer of Megatron's. There all ranks raise
TooFewRowsError.
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
from ep_dispatcher.integrations.collectives import max_over_job
from ep_dispatcher.integrations.megatron.dispatcher import (
    arguments,
    buffers,
    graphs,
    rank_capacity,
    stats_log,
)
from ep_dispatcher.integrations.megatron.dispatcher.dispatcher import MoEEPTokenDispatcher
from ep_dispatcher.integrations.megatron.dispatcher.rank_capacity import Overflow
from ep_dispatcher.integrations.messages import print_on_first_rank

HEADROOM = 1.1  # the new factor divided by the one that was needed, because routing that drifts would soon need more
COUNTER = "ep_dispatcher/skipped_steps"
NOTE = "the end of a step"
_FACTOR_UNITS = 10000  # ranks agree on integers, so a factor travels in units of 1 / 10000
# The module and the name of each object in which Megatron adds up what it logs. No version has all of them.
_LOGS = (
    ("megatron.core.transformer.moe.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"),  # 0.16 and 0.17
    ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)


def skipped_steps() -> int:
    """Return how many optimizer steps this job has skipped because too many rows arrived."""
    return rank_capacity.state().num_skipped


# ---- around a schedule ----------------------------------------------------------------------------------------------


def wrap_schedule(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a schedule, which runs a step's forward and backward passes. Replays of CUDA graphs are checked after it."""

    @functools.wraps(old)
    def run(*args, **kwargs):
        state = rank_capacity.state()
        if state.overflows is not None or graphs.stream_is_captured():  # a schedule around this one is watched already
            return old(*args, **kwargs)
        trains = not kwargs.get("forward_only", False)
        if trains and (state.has_skipped or not state.optimizers):  # the previous step is over
            state.pending_error, state.has_skipped = None, False
            graphs.put_optimizer_graph_back()
        if trains and graphs.num_optimizer_calls() != state.num_optimizer_calls:  # a step was replayed, and not skipped
            state.num_optimizer_calls = graphs.num_optimizer_calls()
            state.saved, state.last_was_skipped = None, False
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
            with state.watch() as overflows:
                result = old(*args, **kwargs)
                # Late errors: on GPUs too many rows are one of them.
                buffers.check_buffers(graphs.NOTE if graphs.are_used() else NOTE)
            _conclude(overflows, models, facts, trains)
            return result

    return run


def wrap_get_schedule(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap get_forward_backward_func, which returns the schedule of a job."""

    def get_forward_backward_func(*args, **kwargs):
        return wrap_schedule(old(*args, **kwargs))

    return get_forward_backward_func


@dataclass
class ModelFacts:
    """Facts of the models that a schedule is given."""

    factor: float  # the largest rank capacity factor of a layer on any rank of the job; 0: there is none
    node_factor: float  # likewise the node capacity factor
    is_megatrons: bool  # whether it was given as moe_expert_rank_capacity_factor
    routers: list[Module]
    keeps_amaxes: bool  # whether layers are in FP8 with delayed scaling
    stats: stats_log.Sizes  # what statistics to log, on any rank


def _facts_of(models: Sequence[Module]) -> ModelFacts | None:
    """Return facts of these models; None if there are no models. Collective for models that are new.

    A rank without MoE layers may be in a job in which other ranks have some, so the ranks agree.
    """
    if not models:
        return None
    known = rank_capacity.state().model_facts.get(models[0])
    if known is None:
        modules = [module for model in models for module in model.modules()]
        dispatchers = [vars(module).get("token_dispatcher") for module in modules]
        ours = [one for one in dispatchers if isinstance(one, MoEEPTokenDispatcher)]
        factor = max((rank_capacity.factor_of(one.config) or 0.0 for one in ours), default=0.0)
        node_factor = max((arguments.node_capacity_factor(one.config) or 0.0 for one in ours), default=0.0)
        own = any(arguments.rank_capacity_factor(one.config) for one in ours)
        given = (math.ceil(one * _FACTOR_UNITS) for one in (factor, node_factor))
        units, node_units, is_own, *sizes = max_over_job(*given, own, *stats_log.sizes_of(ours))
        routers = [one for one in modules if isinstance(one, Router) or hasattr(one, "expert_bias")]
        scaled = any(map(_is_scaled_with_delay, modules))
        known = rank_capacity.state().model_facts[models[0]] = ModelFacts(
            units / _FACTOR_UNITS,
            node_units / _FACTOR_UNITS,
            not is_own,
            routers,
            scaled,
            stats_log.Sizes(*sizes),
        )
    return known


def _is_scaled_with_delay(module: Module) -> bool:
    config = getattr(module, "config", None)
    return bool(getattr(config, "fp8", None)) and getattr(config, "fp8_recipe", None) == "delayed"


def _begin(models: Sequence[Module], facts: ModelFacts) -> None:
    """Prepare for a schedule that trains. Several of them may run before an optimizer step."""
    state = rank_capacity.state()
    graphs.capture_again()  # the graphs that were discarded when the capacity grew
    if state.optimizers:
        state.saved = state.saved or SavedState()
        state.saved.add(models, facts.routers)


@dataclass
class _Excess:
    """An overflow that all ranks agree on, and the factor that had no room for it."""

    worst: Overflow
    factor: float
    name: str  # of the factor
    flag: str

    @property
    def needs(self) -> str:
        layer = f"layer {self.worst.layer}" if self.worst.layer else "a layer"
        if self.worst.argument == rank_capacity.OF_NODE:
            return f"{layer} has {self.worst.rows} tokens of a rank for another node"
        return f"{layer} needs {self.worst.rows} rows on a rank"

    @property
    def too_many(self) -> str:
        return f"{self.needs}, more than {self.name} {self.factor:g} has room for"

    @property
    def enough(self) -> str:
        return f"{self.flag} {_round_up(self.worst.factor):g}"


def _excess(worst: Overflow, facts: ModelFacts) -> _Excess:
    if worst.argument == rank_capacity.OF_NODE:
        name, flag, factor = "node capacity factor", rank_capacity.NODE_FACTOR_FLAG, facts.node_factor
    else:
        flag = rank_capacity.MEGATRON_FACTOR_FLAG if facts.is_megatrons else rank_capacity.FACTOR_FLAG
        name, factor = "rank capacity factor", facts.factor
    return _Excess(worst, max(factor, rank_capacity.state().grown(worst.argument)), name, flag)


def _conclude(own: Sequence[Overflow], models: Sequence[Module], facts: ModelFacts, trains: bool) -> None:
    """Let the next optimizer step be skipped if any rank had too many rows. Collective."""
    state = rank_capacity.state()
    overflows, last_was_skipped, has_optimizer = _agree(own)
    if not overflows:
        return
    excesses = [_excess(worst, facts) for worst in overflows]
    too_many = "; ".join(one.too_many for one in excesses)

    def error(reason: str) -> TooFewRowsError:
        enough = " and ".join(one.enough for one in excesses) + " is enough for these dispatches"
        worst = overflows[0]
        return TooFewRowsError(f"{too_many}, and {reason}. {enough}", worst.rows, worst.layer, worst.argument)

    if not trains:
        raise error("an evaluation has no optimizer step to skip")
    if not has_optimizer:
        raise error("there is no optimizer of Megatron, whose step could be skipped")
    for one in excesses:
        grown = state.grown(one.worst.argument)
        if one.worst.factor <= grown:
            raise RuntimeError(
                f"{one.needs}. The factor has grown to {grown:g}, which is enough, but the layer still has the old "
                f"one: it runs in a CUDA graph that ep_dispatcher cannot capture again. Start with {one.flag} {grown:g}"
            )
    if state.pending_error is None:
        state.num_skipped += 1
        stats_log.write({COUNTER: state.num_skipped})
    state.pending_error = error("an optimizer that is not Megatron's would use the gradients of this step")
    for one in excesses:
        state.grow(one.worst.argument, larger_factor(one.worst, one.factor, last_was_skipped))
    graphs.discard(models)
    graphs.set_optimizer_graph_aside()
    about_amaxes = " The amax histories of FP8 include this step." if facts.keeps_amaxes else ""
    grown_factors = " and ".join(f"the {one.name} is {state.grown(one.worst.argument):g}" for one in excesses)
    start_with = " ".join(f"{one.flag} {state.grown(one.worst.argument):g}" for one in excesses)
    print_on_first_rank(
        "ep_dispatcher: the optimizer step of this iteration is skipped on all ranks, and its losses are not valid, "
        f"because {too_many}. From the next step on {grown_factors} in all layers.{about_amaxes} "
        f"Skipped steps: {state.num_skipped}. Start with {start_with} to avoid them"
    )


def larger_factor(worst: Overflow, room: float, last_was_skipped: bool) -> float:
    """Return the factor that the job grows to, from ``room``. The ranks of the group are always enough."""
    wanted = HEADROOM * worst.factor
    if last_was_skipped:
        wanted = max(wanted, 2 * room)
    return min(_round_up(wanted), worst.most)


def _round_up(factor: float) -> float:
    """Return a factor rounded up to hundredths. Errors of floating point do not count."""
    return math.ceil(round(100 * factor, 2)) / 100


def _agree(own: Sequence[Overflow]) -> tuple[list[Overflow], bool, bool]:
    """Return the overflows that need the largest factors on any rank, at most one of each kind. Collective.

    Without an overflow every dispatch had room. Also return whether the last step was skipped, and whether there is an
    optimizer of Megatron, on any rank.
    """
    kinds = rank_capacity.OF_RANK, rank_capacity.OF_NODE
    worst = [max((one for one in own if one.argument == kind), default=None) for kind in kinds]
    needed = [0 if one is None else math.ceil(one.factor * _FACTOR_UNITS) for one in worst]
    most_needed = max_over_job(*needed)
    if not any(most_needed):
        return [], False, False
    of_own: list[int] = []
    for one, units, most_units in zip(worst, needed, most_needed):
        if one is not None and units == most_units:
            of_own += [one.rows, one.layer, math.ceil(one.most * _FACTOR_UNITS)]
        else:
            of_own += [0, 0, 0]
    state = rank_capacity.state()
    *details, was_skipped, has_optimizer = max_over_job(*of_own, state.last_was_skipped, len(state.optimizers) > 0)
    overflows = []
    for i, (kind, units) in enumerate(zip(kinds, most_needed)):
        rows, layer, most = details[3 * i : 3 * i + 3]
        if units > 0:
            overflows.append(Overflow(units / _FACTOR_UNITS, rows, layer, most / _FACTOR_UNITS, kind))
    return overflows, bool(was_skipped), bool(has_optimizer)


# ---- around an optimizer --------------------------------------------------------------------------------------------


def wrap_optimizer_init(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap MegatronOptimizer.__init__.

    A step of Megatron's optimizers first calls ``prepare_grads`` of every chained optimizer. If one returns True,
    gradients are not finite, and the step ends with (False, None, None). The replacement also returns True for a step
    that is to be skipped. It looks at no gradients then, so the loss scale does not change.
    """

    def init(self, *args, **kwargs):
        old(self, *args, **kwargs)
        rank_capacity.state().optimizers.add(self)
        reference = weakref.ref(self)

        def prepare_grads() -> bool:
            optimizer: Any = reference()
            return _skip_if_pending() or type(optimizer).prepare_grads(optimizer)

        self.prepare_grads = prepare_grads

    return init


def _skip_if_pending() -> bool:
    """Return whether the optimizer step under way is skipped. If so, restore what the iteration has changed.

    A job may have several optimizers. All of them skip until the next schedule begins.
    """
    state = rank_capacity.state()
    saved, state.saved = state.saved, None
    state.has_skipped = state.last_was_skipped = state.pending_error is not None
    if state.has_skipped and saved is not None:
        saved.restore()
    return state.has_skipped


def refuse_other_optimizers(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer would use gradients of a step that is to be skipped. A hook of all PyTorch optimizers."""
    pending = rank_capacity.state().pending_error
    if pending is not None:
        raise copy_error(pending)


# ---- what a step changes before its optimizer ------------------------------------------------------------------------


class SavedState:
    """Copies of the routers' buffers (expert bias and its counts), and of what Megatron adds up for its log."""

    def __init__(self) -> None:
        self._models: list[Module] = []
        self._buffers: list[tuple[Module, str, Tensor]] = []
        logs = _logs()
        self._logs = dict(zip(logs, _copies_of(list(logs.values()))))

    def add(self, models: Sequence[Module], routers: Sequence[Module]) -> None:
        """Copy the routers' buffers of these models, unless an earlier schedule of the step has done so."""
        if any(models[0] is one for one in self._models):
            return
        self._models += models
        given = [(router, *item) for router in routers for item in router.named_buffers(recurse=False)]
        copies = _copies_of([tensor for *_, tensor in given])
        self._buffers += [(router, name, copy) for (router, name, _), copy in zip(given, copies)]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the values back in place, because CUDA graphs may know the addresses."""
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
                logits.zero_()  # Megatron clips weights by them after the optimizer, even after a skipped step


@torch.no_grad()
def _copies_of(tensors: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


def _logs() -> dict[tuple[str, ...], Tensor]:
    """Return the tensors in which Megatron adds up what it logs, by where they are."""
    found: dict[tuple[str, ...], Tensor] = {}
    for module, name in _LOGS:
        log = getattr(sys.modules.get(module), name, None)
        found.update(_tensors_in((module, name), log))
    return found


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
