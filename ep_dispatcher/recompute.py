"""Lets a recompute of activations use the plans of its forward pass.

A checkpoint runs a function once in the forward pass, and again when the backward reaches it. Each is a ``Run``: in
the first one dispatches keep their plans, and in the second each gets its plan back. So a plan belongs to one forward
pass, in whatever order backwards come. It lives as long as the graph of that pass; a pass without gradients keeps none.

No host compares routings, and no ranks agree: the engine finds a recompute that chooses other experts
(``Engine.compare_routing``).
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
from ep_dispatcher.engines.base import Engine
from ep_dispatcher.handle import Handle
from ep_dispatcher.plain import plain
from ep_dispatcher.request import DispatchRequest

_IN_ORDER = "in order"  # the key of dispatches that have no other: all of a run, one after the other
_numbers = itertools.count(1)


def recompute_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Let the recompute of a checkpoint use the plans of its forward pass.

        y = checkpoint(layer, x, use_reentrant=False, context_fn=ep.recompute_contexts)

    In the recompute ep.dispatch, ep.moe_mlp and ep.MoELayer make no plan, and the host waits for no counts. Rows move
    again. Plans stay in memory until the graph is freed.

    The recompute must repeat the forward pass on every rank: a ValueError names another number of dispatches, another
    buffer, other sizes or, on a GPU later (docs/errors.md), other experts. What torch.compile compiles plans again.
    """
    if get_proxy_mode() is not None:  # torch.compile traces the checkpoint, and allows nothing else
        return create_selective_checkpoint_contexts([])
    return runs_of_a_checkpoint()


def runs_of_a_checkpoint() -> tuple[Run, Run]:
    """Return the forward pass of a checkpoint, and its recompute."""
    number, kept = next(_numbers), defaultdict[object, list[Kept]](list)
    return Run(number, kept, is_recompute=False), Run(number, kept, is_recompute=True)


@dataclass(frozen=True, eq=False)
class Kept:
    """The plan of a dispatch."""

    engine: Engine  # of its buffer
    topk_idx: Tensor  # that it was made from
    where: tuple[int, int]  # for Wording.plan_text
    handles: list[Handle]  # one, or one for each part of the tokens (moe/overlap.py); empty until they are made
    options: dict[str, object] | None = None

    def compare(self, topk_idx: Tensor) -> None:
        """Find a routing that is not this plan's. On a GPU the error comes later, as that of a wrong topk_idx."""
        if type(topk_idx) is Tensor:  # else no engine reads it
            # Selective checkpoints refuse operators that the forward pass did not have.
            hidden = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
            with hidden:
                compare_routing(self.engine, self.topk_idx.long(), topk_idx.long(), self.where)

    @property
    def is_gone(self) -> bool:
        """Whether its buffer was destroyed."""
        return self.engine.health.is_stopped


def compare_routing(engine: Engine, planned: Tensor, given: Tensor, where: tuple[int, int]) -> None:
    """Before a dispatch with a handle: find a routing that is not the one of its plan. Engine.compare_routing says how.

    planned, given: int64 [num_tokens, num_topk]. Raises ValueError at once for unequal numbers of tokens.
    """
    if given.shape != planned.shape:
        error = checks.other_routing("topk_idx", f"{len(given)} tokens", f"{len(planned)} tokens", where)
        raise engine.config.wording.explained(error)
    engine.compare_routing(plain("topk_idx", planned), plain("topk_idx", given), where)


class Run:
    """One run of a function in a checkpoint, a context manager. A retained graph enters its recompute again."""

    def __init__(self, number: int, kept: defaultdict[object, list[Kept]], *, is_recompute: bool):
        self.number, self.kept, self.is_recompute = number, kept, is_recompute
        self._num_taken: Counter[object] = Counter()

    def __enter__(self) -> None:
        self._num_taken.clear()
        _thread.runs = (*_thread.runs, self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _thread.runs = _thread.runs[:-1]
        # A checkpoint ends a recompute early, by an exception, when it has all that the backward needs.
        if self.is_recompute and kind is None and self.next(_IN_ORDER) is not None:
            self._fail(self._num_taken[_IN_ORDER])

    def next(self, key: object) -> Kept | None:
        """Return what `take` returns next, if there is something."""
        kept, number = self.kept[key], self._num_taken[key]
        return kept[number] if number < len(kept) else None

    def take(self, key: object) -> Kept | None:
        kept = self.next(key)
        self._num_taken[key] += 1
        if kept is None and key is _IN_ORDER:
            self._fail(self._num_taken[key])
        return kept

    def _fail(self, given: int) -> None:
        allowed = f"{len(self.kept[_IN_ORDER])}, as in checkpointed forward pass {self.number}"
        checks.fail("the number of dispatches", f"{given} in a recompute", allowed)


class _Thread(threading.local):  # a backward runs in threads of autograd
    runs: tuple[Run, ...] = ()  # the innermost last


_thread = _Thread()


def is_running() -> bool:
    """Return whether plans are kept or taken here. What is being compiled keeps none."""
    return not torch.compiler.is_compiling() and bool(_thread.runs)


def is_expected() -> bool:
    """Return whether a checkpoint runs this forward pass for the first time."""
    return is_running() and not all(run.is_recompute for run in _thread.runs)


def keep(key: object, kept: Kept) -> None:
    """Keep a plan for the recompute of this forward pass."""
    for run in _thread.runs:
        if not run.is_recompute:
            run.kept[key].append(kept)


def take(key: object) -> Kept | None:
    """Return the plan of the dispatch of which this is the recompute, or None. Plans of a destroyed buffer are none.

    A checkpoint inside a recompute runs for the first time: its own recompute will need the plan again.
    """
    runs = _thread.runs if is_running() else ()
    for i in reversed(range(len(runs))):
        if runs[i].is_recompute:
            kept = runs[i].take(key)
            if kept is None or kept.is_gone:
                return None
            for inside in runs[i + 1 :]:
                inside.kept[key].append(kept)
            return kept
    return None


def planned_buffer_id() -> str | None:
    """Return the id of the buffer that the next dispatch, if it is that of a recompute, has to use."""
    runs = [run for run in _thread.runs if run.is_recompute] if is_running() else []
    kept = runs[-1].next(_IN_ORDER) if runs else None
    return None if kept is None or kept.is_gone else kept.engine.config.buffer_id


def handles_of(engine: Engine, request: DispatchRequest, num_parts: int = 1) -> list[Handle]:
    """Return the handles of a dispatch that makes a plan: those of its forward pass, or a list that gets new ones."""
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
    where = (0, 0) if run is None else (run.number, len(run.kept[_IN_ORDER]) + 1)
    planned = take(_IN_ORDER)
    if planned is None:
        new = Kept(engine, request.topk_idx, where, [], options)
        keep(_IN_ORDER, new)
        return new.handles
    assert planned.options is not None
    forward = "as in the forward pass of this recompute"
    if planned.engine is not engine:
        mine, its = (one.config.described(one.summary) for one in (engine, planned.engine))
        checks.fail("buffer", mine, f"{its}, {forward}")
    for name, given in options.items():
        if given != (allowed := planned.options[name]):
            checks.fail(name, given, f"{allowed}, {forward}")
    planned.compare(request.topk_idx)
    return planned.handles if len(planned.handles) == num_parts else []  # none if the forward pass has failed here


def use_plan(request: DispatchRequest, handle: Handle) -> None:
    """Let a dispatch use the plan of a handle instead of making one."""
    request.topk_idx = None
    request.plan, request.message_rows, request.num_rows = handle.plan, handle.message_rows, handle.num_rows
