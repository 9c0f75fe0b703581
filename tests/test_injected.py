"""An exception anywhere inside destroy(), or after the last step of making: the peers learn of it at once."""

import sys
import time

import pytest
import torch.distributed as dist
from conftest import exhaustive, on_ranks
from lib.round_trip import inputs, make_buffer

import ep_dispatcher as ep
from ep_dispatcher.gather import Gather

LONG_S = 120.0  # a limit that no test should wait for


class Injected(BaseException):
    """Like an interrupt, it is no Exception."""


class At:
    """Raise ``kind`` at the ``number``-th call of a Python function of the package in this thread."""

    def __init__(self, number: int, kind: type[BaseException]):
        self.left, self.kind = number, kind

    def _trace(self, frame, event, arg):
        if event in ("call", "line") and "/ep_dispatcher/" in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                raise self.kind("injected")

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *exc_info):
        sys.settrace(None)


@pytest.mark.parametrize("kind", [Injected, RuntimeError])
@pytest.mark.parametrize(
    "ranks_per_node,where", [(2, "destroy"), (1, "last step"), exhaustive(1, "destroy"), exhaustive(2, "last step")]
)
@on_ranks(2)
def test_peers_learn_at_once_of_an_exception(rank, where, ranks_per_node, kind):
    """Rank 0 fails at each of the calls in turn; rank 1 is told within seconds."""
    numbers, failed = range(2, 13, 1 if ranks_per_node == 2 else 4), 0  # between nodes each takes 2 s
    for number in numbers:
        dist.barrier()
        at = At(number, kind)
        try:
            if where == "destroy":
                buffer = make_buffer(ranks_per_node=ranks_per_node, timeout_s=LONG_S)
                if rank == 0:
                    with at:
                        buffer.destroy()
            else:
                buffer = make_after_the_last_step(rank, at, ranks_per_node)
                if rank == 0:  # there were fewer calls
                    buffer.destroy()
        except kind:
            failed += 1
        if rank == 1:
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match="rank 0|Rank 0") as caught:
                buffer.dispatch(*inputs(rank)[:2])
            assert time.monotonic() - begin < LONG_S / 4, caught.value
            if isinstance(caught.value, ep.PeerTimeoutError):
                assert caught.value.late_ranks == (0,)
            buffer.destroy()
    assert rank == 1 or failed >= len(numbers) // 2


def make_after_the_last_step(rank: int, at: At, ranks_per_node: int) -> ep.Buffer:
    """Make a buffer. On rank 0 count calls from the end of the last exchange on."""
    last = "memory of the other ranks" if ranks_per_node == 2 else "connections between nodes"
    usual = Gather.__call__

    def traced(gather, phase, *args, **options):
        result = usual(gather, phase, *args, **options)
        if phase == last and rank == 0:
            at.__enter__()
            sys._getframe(1).f_trace = at._trace
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gather, "__call__", traced)
        try:
            return make_buffer(ranks_per_node=ranks_per_node, timeout_s=LONG_S)
        finally:
            at.__exit__()
