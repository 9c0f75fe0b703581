"""Ranks that are late, die or are interrupted, and what must not be left behind."""

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import ep_dispatcher as ep
from lib.round_trip import device, inputs, make_buffer

LIMIT_S = 3.0

SLACK_S = 20.0  # how much later than the limit an error may come on a loaded machine

LONG_S = 120.0  # limit of whatever should not fail, however slow the machine is


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def tell(key: str, value: str = "") -> None:
    default_store().set(key, value)


def wait_for(*keys: str) -> None:
    """Wait until other ranks have told these."""
    default_store().wait(list(keys), timedelta(seconds=LONG_S))


def meet(name: str) -> None:
    """Wait for all ranks. The store is no rank's: ranks that die behind this do not disturb those still in it."""
    tell(f"{name}/{dist.get_rank()}")
    wait_for(*(f"{name}/{rank}" for rank in range(dist.get_world_size())))


@contextmanager
def store_on_rank_0(host: str = "127.0.0.1") -> Iterator[None]:
    """What this rank makes meanwhile asks a store that rank 0 hosts, as without torchrun. It has nobody else's keys."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = [store and store.port]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore(host, port[0], is_master=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        yield


def make_hasty_buffer(**changes) -> ep.Buffer:
    """Make a buffer whose first operations have time. ``hurry`` sets the limit; on GPUs it must be set here."""
    return make_buffer(**(dict(timeout_s=LIMIT_S if changes.get("engine") == "cuda" else LONG_S) | changes))


def hurry(buffer: ep.Buffer, timeout_s: float = LIMIT_S) -> None:
    """Give all further operations this limit, and begin them together with the other ranks."""
    if buffer.engine == "cpu":
        buffer._engine.config = replace(buffer._engine.config, timeout_s=timeout_s)
    meet(f"hurry/{buffer.id}")


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ep_dispatcher" in line]


def open_files() -> list[str]:
    files = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # that of the listing itself
    return files


def assert_nothing_left() -> None:
    assert not mappings() and not [name for name in open_files() if "memfd:ep_dispatcher" in name]


def number_of_files_and_threads() -> tuple[int, int]:
    return len(open_files()), len(os.listdir("/proc/self/task"))


def settles(measure, at_most) -> bool:
    """Whether every number that ``measure`` returns comes down; connections and threads end in the background."""
    deadline = time.monotonic() + LONG_S / 2
    while any(n > limit for n, limit in zip(measure(), at_most)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(n > limit for n, limit in zip(measure(), at_most))


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def assert_names(error: ep.PeerTimeoutError, rank: int, victim: int, epochs: list[int]) -> None:
    assert error.epoch in epochs
    assert error.operation == ("dispatch" if error.epoch % 2 else "combine")
    assert error.phase and error.rank == rank and error.late_ranks == (victim,)
    assert 0 <= error.waited_s < LIMIT_S + SLACK_S
    for words in (
        f"{error.operation}, epoch {error.epoch}, phase '{error.phase}'",
        f"rank {rank} waited {error.waited_s:.1f} s for rank {victim}.",
        "destroy() this buffer",
    ):
        assert words in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and vars(copy) == vars(error)


def assert_given_up(buffer: ep.Buffer, error: ep.PeerTimeoutError) -> None:
    """Every further operation says the same at once."""
    rank = buffer.topology.rank
    for operation in (buffer.dispatch, lambda *args: ep.dispatch(buffer, *args)):
        started = time.monotonic()
        with pytest.raises(ep.PeerTimeoutError) as again:
            operation(*inputs(rank, device=device(buffer)))
        assert time.monotonic() - started < LIMIT_S - 0.5 and str(again.value) == str(error)


@dataclass(frozen=True)
class Death:
    """Where a rank dies: before its n-th call of a step of the compiled engine, or before an operation begins."""

    operation: str
    step: str = "begin"
    call: int = 1

    def __str__(self) -> str:
        return f"{self.operation}-{self.step}" + f"{self.call}" * (self.call > 1)


class ActsIn:
    """The compiled engine of one rank, which calls ``act()`` before the n-th call of a step."""

    def __init__(self, engine, step: str, act: Callable[[], object], call: int = 1):
        self._engine, self._step, self._act, self._left = engine, step, act, call

    def __getattr__(self, name: str):
        step = getattr(self._engine, name)
        if name != self._step:
            return step

        def counted(*args):
            self._left -= 1
            if self._left == 0:
                self._act()
            return step(*args)

        return counted


def act_in(buffer: ep.Buffer, step: str, act: Callable[[], object], call: int = 1) -> None:
    """Have this rank call ``act()`` before the n-th call of a step of its compiled engine."""
    engine = buffer.live_engine()
    engine._c = ActsIn(engine._c, step, act, call)


def die_in(buffer: ep.Buffer, death: Death) -> None:
    act_in(buffer, death.step, lambda: os.kill(os.getpid(), signal.SIGKILL), death.call)


def operations_so_far(buffer: ep.Buffer) -> int:
    """The epoch of this rank's last operation: it stays the same where an error comes before anything is sent."""
    engine = buffer.live_engine()
    return engine._c.epoch if buffer.engine == "cpu" else engine._read_state(engine._state.cpu())[0]
