"""Events, and the stream of operations that a program overlaps. On a CPU every operation is complete on return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.engines.cuda.streams import in_stream

C = TypeVar("C", bound=type)


def outside_graphs(cls: C) -> C:
    """Let torch.compile break its graph at every public method of a class, and run the method as it is.

    It does so at DeepEP's methods too, because they are compiled code. A custom operator is not possible here: a handle
    carries Python objects, only the host knows the number of received rows, and ranks agree on sizes.
    """
    for name, member in list(vars(cls).items()):
        function = member.__func__ if isinstance(member, staticmethod) else member
        if isinstance(function, FunctionType) and (name == "__init__" or not name.startswith("_")):
            eager = torch.compiler.disable(function, reason="the host takes part in operations of deep_ep")
            setattr(cls, name, staticmethod(eager) if isinstance(member, staticmethod) else eager)
    return cls


@outside_graphs
class EventHandle:
    """An event of all work so far in the current stream; of nothing without a GPU.

    Streams and events of torch.cuda would be made in Python, which takes the host ten times as long.
    """

    def __init__(self):
        self._event = torch.accelerator.current_stream().record_event() if torch.cuda.is_available() else None

    def current_stream_wait(self) -> None:
        """Let the current stream wait for it."""
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)


@outside_graphs
class EventOverlap:
    """An event for which the current stream waits at the end of a ``with`` block.

        with buffer.dispatch(..., async_finish=True)[-1]:
            work that needs nothing of the dispatch

    event            an EventHandle; None for an operation that was not asynchronous
    extra_tensors    kept alive as long as this object
    hook_after_wait  a function without arguments. The first wait calls it, and returns what it returns; None: nothing
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Let the current stream wait for the event. Then call and drop the hook, and return what it returns.

        With release_handle drop the event too. ValueError if there is none.
        """
        if self.event is None:
            checks.fail("event", None, "the event of an asynchronous operation")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """Do what ``current_stream_wait()`` does."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Let the first wait call a function. ValueError if another one is registered."""
        if self.hook_after_wait is not None:
            raise ValueError("hook_after_wait is given, but this event has a hook already, which no wait has called")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Return the object, for a ``with`` block at whose end the event is dropped or not."""
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self.event is not None:
            self.current_stream_wait(self._releases)
        self._releases = False


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among tensors, None, tuples and lists of these, and what has a method ``tensors``."""
    found: list[Tensor] = []
    for value in values:
        if value is None:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        else:
            found += tensors_in(value if isinstance(value, (tuple, list)) else value.tensors())
    return found


def in_current_stream(values: Iterable[Any]) -> None:
    """Let the memory of tensors, as tensors_in finds them, be reused only after the current stream's work so far."""
    for t in tensors_in(values):
        if t.is_cuda:
            t.record_stream(torch.accelerator.current_stream())


class Operation:
    """One operation: its tensors, and its event when it ends. Without overlap the tensors are not needed."""

    def __init__(self, is_overlapped: bool = False, inputs: Sequence[Tensor] = ()):
        self.event, self.is_overlapped, self.inputs = EventOverlap(), is_overlapped, inputs
        self.outputs: list[Tensor] = []

    def hand_over(self, *outputs: Any) -> None:
        """Note outputs that the caller's stream will use."""
        if self.is_overlapped:
            self.outputs += tensors_in(outputs)

    def keep_tensors(self) -> None:
        """Let the event keep the tensors, as that of low latency does in DeepEP."""
        if self.event.event is not None:
            self.event.extra_tensors = (*self.inputs, *self.outputs)


class CommStream:
    """Runs operations in the current stream, or in a stream of its own if the caller asks for overlap."""

    def __init__(self):
        self._stream: torch.cuda.Stream | None = None

    def stream(self) -> torch.cuda.Stream:
        if not torch.cuda.is_available():
            raise NotImplementedError("get_comm_stream: there is no GPU, and a CPU has no streams")
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        return self._stream

    def operation(
        self,
        inputs: Iterable[Any],
        previous_event: EventOverlap | EventHandle | None,
        async_finish: bool,
        on_comm_stream: bool = False,
    ) -> AbstractContextManager[Operation]:
        """Run the operation inside after ``previous_event``, or else after all work so far in the current stream.

        Without ``async_finish`` the current stream waits for it; with it, the caller waits by ``event``. ``inputs``, as
        tensors_in takes them, are needed only with ``previous_event`` or ``async_finish``.

        An operation in a stream of its own allocates there in any case. on_comm_stream: allocate_on_comm_stream, which
        DeepEP takes only with both others
        """
        before = previous_event.event if isinstance(previous_event, EventOverlap) else previous_event
        if on_comm_stream and (before is None or not async_finish):
            checks.fail("allocate_on_comm_stream", True, "False without previous_event and async_finish")
        if async_finish or before is not None:
            return self._overlapped(Operation(True, tensors_in(inputs)), before, async_finish)
        return nullcontext(Operation())

    @contextmanager
    def _overlapped(self, operation: Operation, before: EventHandle | None, async_finish: bool) -> Iterator[Operation]:
        if not any(t.is_cuda for t in operation.inputs):
            yield operation
            if async_finish:
                operation.event = EventOverlap(EventHandle())
            return
        caller, stream = torch.accelerator.current_stream(), self.stream()
        begin = EventHandle() if before is None else before
        with in_stream(stream):
            begin.current_stream_wait()
            for t in operation.inputs:
                t.record_stream(stream)
            yield operation
            for t in operation.outputs:  # allocated in this stream, used in the caller's
                t.record_stream(caller)
            end = EventHandle()
        if async_finish:
            operation.event = EventOverlap(end)
        else:
            end.current_stream_wait()
