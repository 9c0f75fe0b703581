"""Lets a recompute of activations use the plans of its forward pass.

A checkpoint runs a function once in the forward pass, and again when the backward reaches it. Each is a
``CheckpointRun``. In the first one dispatches save their plans, and in the second each dispatch gets its plan back. So
a plan belongs to one forward pass, in whatever order the backwards run. It lives as long as the graph of that pass. A
pass without gradients saves none.

The host does not compare routings, and the ranks exchange nothing for it: the engine finds a recompute that chooses
other experts (``Engine.compare_routing``).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ep_dispatcher import checks
from ep_dispatcher.addressable import as_addressable
from ep_dispatcher.engines.base import Engine
from ep_dispatcher.handle import Handle
from ep_dispatcher.request import DispatchRequest

_IN_ORDER = "in order"  # the key of dispatches without a key of their own, which a run takes one after the other
_numbers = itertools.count(1)


def recompute_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Let the recompute of a checkpoint use the plans of its forward pass.

        y = checkpoint(layer, x, use_reentrant=False, context_fn=ep.recompute_contexts)

    In the recompute ep.dispatch, ep.moe_mlp and ep.MoELayer make no plan, and the host waits for no counts. Rows move
    again. Plans stay in memory until the graph is freed.

    The recompute must repeat the forward pass on every rank. A different number of dispatches, another buffer or other
    sizes are a ValueError. So are other experts, which are reported later on a GPU (docs/errors.md). Code that
    torch.compile compiles makes its plans again.
    """
    if get_proxy_mode() is not None:  # torch.compile traces the checkpoint, and allows nothing else
        return create_selective_checkpoint_contexts([])
    return checkpoint_runs()


def checkpoint_runs() -> tuple[CheckpointRun, CheckpointRun]:
    """Return the contexts of a checkpoint's forward pass and of its recompute."""
    number, saved = next(_numbers), defaultdict[object, list[SavedPlan]](list)
    return CheckpointRun(number, saved, is_recompute=False), CheckpointRun(number, saved, is_recompute=True)


@dataclass(frozen=True, eq=False)
class SavedPlan:
    """The plan of a dispatch in a forward pass."""

    engine: Engine  # of the buffer that made it
    topk_idx: Tensor  # the routing that it was made from
    where: tuple[int, int]  # what Wording.plan_text says about it
    handles: list[Handle]  # one, or one for each part of the tokens (moe/overlap.py); empty until they are made
    options: dict[str, object] | None = None

    def compare(self, topk_idx: Tensor) -> None:
        """Find a routing that differs from this plan's. On a GPU the error comes later, as for a wrong topk_idx."""
        if type(topk_idx) is Tensor:  # otherwise no engine reads it
            # Selective checkpoints refuse operators that the forward pass did not have, so hide these from them.
            without_modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
            with without_modes:
                compare_routing(self.engine, self.topk_idx.long(), topk_idx.long(), self.where)

    @property
    def is_gone(self) -> bool:
        """Whether the buffer of the plan was destroyed."""
        return self.engine.health.is_stopped


def compare_routing(engine: Engine, planned: Tensor, given: Tensor, where: tuple[int, int]) -> None:
    """Find a routing that differs from that of a plan, before a dispatch with it. See Engine.compare_routing.

    planned, given: int64 [num_tokens, num_topk]. Raises ValueError at once for unequal numbers of tokens.
    """
    if given.shape != planned.shape:
        error = checks.other_routing_error("topk_idx", f"{len(given)} tokens", f"{len(planned)} tokens", where)
        raise engine.config.wording.reword(error)
    engine.compare_routing(as_addressable("topk_idx", planned), as_addressable("topk_idx", given), where)


class CheckpointRun:
    """One run of a function in a checkpoint, a context manager. A retained graph enters its recompute again."""

    def __init__(self, number: int, saved: defaultdict[object, list[SavedPlan]], *, is_recompute: bool):
        self.number, self.saved, self.is_recompute = number, saved, is_recompute
        self._num_taken: Counter[object] = Counter()

    def __enter__(self) -> None:
        self._num_taken.clear()
        _thread.runs = (*_thread.runs, self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _thread.runs = _thread.runs[:-1]
        # A checkpoint ends a recompute early, by an exception, when it has all that the backward needs.
        if self.is_recompute and kind is None and self.peek(_IN_ORDER) is not None:
            self._fail(self._num_taken[_IN_ORDER])

    def peek(self, key: object) -> SavedPlan | None:
        """Return the plan that `take` returns next, or None."""
        plans, number = self.saved[key], self._num_taken[key]
        return plans[number] if number < len(plans) else None

    def take(self, key: object) -> SavedPlan | None:
        """Return the next plan with this key, or None. ValueError if a dispatch has none although it should."""
        plan = self.peek(key)
        self._num_taken[key] += 1
        if plan is None and key is _IN_ORDER:
            self._fail(self._num_taken[key])
        return plan

    def _fail(self, given: int) -> None:
        allowed = f"{len(self.saved[_IN_ORDER])}, as in checkpointed forward pass {self.number}"
        checks.fail("the number of dispatches", f"{given} in a recompute", allowed)


class _Thread(threading.local):  # a backward runs in threads of autograd
    runs: tuple[CheckpointRun, ...] = ()  # the innermost last


_thread = _Thread()


def is_running() -> bool:
    """Return whether plans are saved or taken here. Code that is being compiled saves none."""
    return not torch.compiler.is_compiling() and bool(_thread.runs)


def is_expected() -> bool:
    """Return whether a checkpoint runs this forward pass for the first time."""
    return is_running() and not all(run.is_recompute for run in _thread.runs)


def save_plan(key: object, plan: SavedPlan) -> None:
    """Save a plan for the recompute of this forward pass."""
    for run in _thread.runs:
        if not run.is_recompute:
            run.saved[key].append(plan)


def take_plan(key: object) -> SavedPlan | None:
    """Return the plan that the same dispatch used in the forward pass, or None outside of a recompute.

    Plans of a destroyed buffer are not returned. A checkpoint inside a recompute runs for the first time there, and its
    own recompute will need the plan again.
    """
    runs = _thread.runs if is_running() else ()
    for i in reversed(range(len(runs))):
        if runs[i].is_recompute:
            plan = runs[i].take(key)
            if plan is None or plan.is_gone:
                return None
            for inner_run in runs[i + 1 :]:
                inner_run.saved[key].append(plan)
            return plan
    return None


def planned_buffer_id() -> str | None:
    """Return the id of the buffer that the next dispatch has to use if it belongs to a recompute, otherwise None."""
    if not is_running():
        return None
    recomputes = [run for run in _thread.runs if run.is_recompute]
    if not recomputes:
        return None
    plan = recomputes[-1].peek(_IN_ORDER)
    return None if plan is None or plan.is_gone else plan.engine.config.buffer_id


def handles_for(engine: Engine, request: DispatchRequest, num_parts: int = 1) -> list[Handle]:
    """Return the handles of a dispatch from its forward pass, or else an empty list, which gets the new ones."""
    if not is_running():
        return []
    options = dict(
        layout=request.layout,
        expert_alignment=request.expert_alignment,
        max_recv_rows=None if request.num_rows < 0 else request.num_rows,
        num_parts=num_parts,
    )
    assert request.topk_idx is not None
    run = next((run for run in reversed(_thread.runs) if not run.is_recompute), None)
    where = (0, 0) if run is None else (run.number, len(run.saved[_IN_ORDER]) + 1)
    planned = take_plan(_IN_ORDER)
    if planned is None:
        new_plan = SavedPlan(engine, request.topk_idx, where, [], options)
        save_plan(_IN_ORDER, new_plan)
        return new_plan.handles
    assert planned.options is not None
    forward = "as in the forward pass of this recompute"
    if planned.engine is not engine:
        given_buffer = engine.config.describe(engine.summary)
        planned_buffer = planned.engine.config.describe(planned.engine.summary)
        checks.fail("buffer", given_buffer, f"{planned_buffer}, {forward}")
    for name, given in options.items():
        allowed = planned.options[name]
        if given != allowed:
            checks.fail(name, given, f"{allowed}, {forward}")
    planned.compare(request.topk_idx)
    return planned.handles if len(planned.handles) == num_parts else []  # empty if the forward pass has failed here


def use_plan(request: DispatchRequest, handle: Handle) -> None:
    """Make a dispatch use the plan of a handle instead of a new one."""
    request.topk_idx = None
    request.plan, request.message_rows, request.num_rows = handle.plan, handle.message_rows, handle.num_rows
    request.max_tokens_to_node = handle.max_tokens_to_node
