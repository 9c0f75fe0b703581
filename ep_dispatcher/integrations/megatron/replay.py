"""What a step's schedule reads and changes, kept so that the schedule can run again as if for the first time.

    tapes, before, gradients = Tapes(data_iterator), Before(models), Gradients(models)
    schedule(data_iterator=tapes.iterators, ...)
    gradients.throw_new_away(); before.restore(); tapes.rewind()
    schedule(data_iterator=tapes.iterators, ...)          # the same microbatches, the same random numbers

Kept are states of random numbers, buffers of modules (expert bias and its counts), what Megatron adds up for its log
(auxiliary losses, the largest attention logits), and what its rerun state machine has seen. Amax histories of FP8 with
delayed scaling are not: they see both runs.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from ep_dispatcher.integrations.megatron.dispatcher import MoEEPTokenDispatcher

# Where Megatron adds up what it logs: module and name. No version has all.
_LOGS = (
    ("megatron.core.transformer.moe.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"),  # 0.16
    ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)
_RERUN_MACHINE = ("megatron.core.rerun_state_machine", "_GLOBAL_RERUN_STATE_MACHINE")
_SEEN_BY_IT = (
    "validation_counts",
    "rerun_requested",
    "failed_validation_call",
    "initial_result",
    "large_value_counts",
    "max_values",
)


class Tape:
    """A data iterator that keeps what it gives, to give it again after ``rewind``.

    An item may be drawn with random numbers of the host. So the states after it are kept too: they are the same when it
    is given again.
    """

    def __init__(self, source: Iterator[Any]):
        self._source, self._kept, self._position = source, list[tuple[Any, Callable[[], None]]](), 0

    def __iter__(self) -> Tape:
        return self

    def __next__(self) -> Any:
        if self._position == len(self._kept):
            item = next(self._source)
            self._kept.append((item, _keep_host_states()))
        else:
            self._kept[self._position][1]()
        self._position += 1
        return _copied(self._kept[self._position - 1][0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def rewind(self) -> None:
        self._position = 0


class Tapes:
    """A Tape in place of each data iterator of a schedule: of one, or of a list with one for each model chunk."""

    def __init__(self, given: Any):
        self._tapes: dict[int, Tape] = {}
        self.iterators = [self._tape(one) for one in given] if isinstance(given, list) else self._tape(given)

    def _tape(self, source: Any) -> Any:
        if not hasattr(source, "__next__"):  # None on ranks that get their data from others
            return source
        return self._tapes.setdefault(id(source), Tape(source))

    def rewind(self) -> None:
        for tape in self._tapes.values():
            tape.rewind()


def _copied(item: Any) -> Any:
    """Return the item with containers of its own: a step may put something into them, or take it out."""
    if type(item) is dict:
        return {key: _copied(value) for key, value in item.items()}
    return type(item)(map(_copied, item)) if type(item) in (list, tuple) else item


class Before:
    """What schedules of these models change besides gradients, as it is now."""

    @torch.no_grad()
    def __init__(self, models: Sequence[Module]):
        self._restore_host, self._restore_device = _keep_host_states(), _keep_device_states()
        self._buffers: list[tuple[Module, str, Tensor]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        for module in (one for model in models for one in model.modules()):
            self._buffers += [(module, *item) for item in module.named_buffers(recurse=False)]
            own = vars(module)
            if "current_max_attn_logits" in own:
                self._attributes.append((module, "current_max_attn_logits", own["current_max_attn_logits"]))
            dispatcher = own.get("token_dispatcher")
            if isinstance(dispatcher, MoEEPTokenDispatcher):
                self._attributes.append((dispatcher, "num_forwards", dispatcher.num_forwards))
        machine = getattr(sys.modules.get(_RERUN_MACHINE[0]), _RERUN_MACHINE[1], None)
        seen = vars(machine) if machine is not None else {}
        self._attributes += [(machine, name, copy.copy(seen[name])) for name in _SEEN_BY_IT if name in seen]
        logs = _logs()
        tensors = [one for *_, one in self._buffers] + list(logs.values())
        copies = [torch.empty_like(one) for one in tensors]
        if copies:
            torch._foreach_copy_(copies, tensors)
        self._copies, self._logged = copies[: len(self._buffers)], dict(zip(logs, copies[len(self._buffers) :]))

    @torch.no_grad()
    def restore(self) -> None:
        """Put it back, in place where CUDA graphs may know the address."""
        for (module, name, tensor), kept in zip(self._buffers, self._copies):
            tensor.copy_(kept)
            setattr(module, name, tensor)
        for owner, name, value in self._attributes:
            setattr(owner, name, copy.copy(value) if type(value) is not Tensor else value)
        for where, tensor in _logs().items():
            if where in self._logged:
                tensor.copy_(self._logged[where])
            else:
                tensor.zero_()
        self._restore_host()
        self._restore_device()


def _logs() -> dict[tuple[str, ...], Tensor]:
    """Return the tensors in which Megatron adds up what it logs, by where they are."""
    found: dict[tuple[str, ...], Tensor] = {}

    def walk(where: tuple[str, ...], value: Any) -> None:
        if isinstance(value, Tensor):
            found[where] = value
        elif isinstance(value, dict):
            for key, one in value.items():
                walk((*where, str(key)), one)
        elif type(value).__module__.startswith("megatron.") or isinstance(value, type):
            for name, one in vars(value).items():
                if isinstance(one, (Tensor, dict)):
                    walk((*where, name), one)

    for module, name in _LOGS:
        walk((module, name), getattr(sys.modules.get(module), name, None))
    return found


def _keep_host_states() -> Callable[[], None]:
    """Return what puts the host's random numbers back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore() -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

    return restore


def _keep_device_states() -> Callable[[], None]:
    """Return what puts back the GPU's generator and Megatron's tracker, which may have generators of its own."""
    if not torch.cuda.is_available():
        return lambda: None
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    own, tracker = torch.cuda.get_rng_state(), get_cuda_rng_tracker()
    kept = {
        name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
        for name, state in tracker.get_states().items()
    }

    def restore() -> None:
        states = tracker.get_states()
        for name, state in kept.items():
            if isinstance(states[name], torch.Generator):
                states[name].set_state(state)  # in place: CUDA graphs know the generator
            else:
                states[name] = state.clone()
        tracker.set_states(states)
        torch.cuda.set_rng_state(own)

    return restore


class Gradients:
    """The gradients before a step. Megatron's DistributedDataParallel has none then: train_step has cleared them.

    Other models may have some, and get them back.
    """

    def __init__(self, models: Sequence[Module]):
        self._wrapped = [model for model in models if hasattr(model, "zero_grad_buffer")]
        plain = [model for model in models if not hasattr(model, "zero_grad_buffer")]
        self._kept: list[tuple[Tensor, str, Tensor | None, Tensor | None]] = []
        for parameter in (one for model in plain for one in model.parameters()):
            for name in ("grad", "main_grad"):
                grad = getattr(parameter, name, None)
                self._kept.append((parameter, name, grad, None if grad is None else grad.clone()))

    @torch.no_grad()
    def throw_new_away(self) -> None:
        for model in self._wrapped:
            model.zero_grad_buffer()  # type: ignore[operator]
            for weight in model.parameters():
                weight.grad = None
        for parameter, name, grad, kept in self._kept:
            if grad is not None and kept is not None:
                grad.copy_(kept)
            if hasattr(parameter, name):
                setattr(parameter, name, grad)
