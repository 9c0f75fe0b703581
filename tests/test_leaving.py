"""Ranks that leave: the others of the node notice at once, and lose nothing that was complete."""

import os
import signal
import subprocess
import time
from threading import Timer

import pytest
import torch
from conftest import on_ranks
from lib.faults import act_in, default_store, hurry, make_hasty_buffer, mappings, tell, wait_for
from lib.round_trip import assert_received, expected, inputs, make_buffer, round_trip

import ep_dispatcher as ep
from ep_dispatcher import _C_cpu

LIMIT_S = 60.0
SOON_S = 15.0  # on a machine under load; an idle one needs 0.1 s


def leave(buffer: ep.Buffer, how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "destroyed":
        buffer.destroy()
    else:
        with pytest.raises(OSError), buffer:
            raise OSError("no more data")


@pytest.mark.parametrize("how", ["destroyed", "by an exception", "killed"])
@on_ranks(3, fresh=True, allow_dead={1})
def test_a_rank_that_leaves_is_noticed_at_once(rank, how):
    """Rank 1 leaves while the others wait for it."""
    buffer = make_buffer(timeout_s=LIMIT_S)
    round_trip(buffer)
    if rank == 1:
        time.sleep(0.3)
        return leave(buffer, how)
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as caught:
        buffer.dispatch(*inputs(rank))
    assert time.monotonic() - begin < SOON_S and caught.value.waited_s < SOON_S
    assert caught.value.late_ranks == (1,) and "Rank 1 has left" in str(caught.value)
    buffer.destroy()


@pytest.mark.parametrize("how", ["destroyed", "killed"])
@on_ranks(2, fresh=True, allow_dead={1})
def test_what_a_rank_completed_before_it_left_counts(rank, how):
    """Rank 1 leaves when it has its rows; rank 0 has not yet begun to pull those that rank 1 has staged."""
    buffer = make_buffer(timeout_s=LIMIT_S)
    right, _ = expected(buffer)
    if rank == 1:
        buffer.dispatch(*inputs(rank))
        tell("left", str(os.getpid()))
        return leave(buffer, how)

    def wait() -> None:
        wait_for("left")
        process = _C_cpu.Process(int(default_store().get("left")))
        while how == "killed" and not process.is_gone():
            time.sleep(0.01)

    act_in(buffer, "pull", wait)
    assert_received(buffer.dispatch(*inputs(rank)), right)
    with pytest.raises(ep.PeerTimeoutError, match="Rank 1 has left"):
        buffer.dispatch(*inputs(rank))
    buffer.destroy()


@on_ranks(2)
def test_different_operations_between_nodes_are_named(rank):
    with make_hasty_buffer(ranks_per_node=1) as buffer:
        out = buffer.dispatch(*inputs(rank))
        hurry(buffer, 1.5)
        with pytest.raises(ep.PeerTimeoutError, match="rank 0 is in a dispatch, rank 1 is in a combine"):
            buffer.combine(out.x, out.handle) if rank else buffer.dispatch(*inputs(rank))


# ---- what ends a process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "a) Z 1 (", "Z"])
def test_a_process_is_gone_when_it_has_ended_and_not_before(name):
    """Whatever its name; also before anybody has asked for its exit code."""
    program = f"open('/proc/self/comm', 'w').write({name!r}); print(flush=True); input()"
    child = subprocess.Popen(
        [os.path.realpath("/proc/self/exe"), "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        process = _C_cpu.Process(child.pid)
        assert not process.is_gone()
    finally:
        child.kill()
    deadline = time.monotonic() + LIMIT_S
    while not process.is_gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.is_gone(), "a zombie counts as running"
    child.communicate()
    assert process.is_gone() and _C_cpu.Process(child.pid).is_gone()
    assert not _C_cpu.Process(os.getpid()).is_gone()


# ---- forked children ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_a_forked_child_cannot_use_the_buffer_and_may_destroy_it(rank, ranks_per_node):
    """It has not the buffer's memory. The parent's buffer goes on."""
    with make_buffer(ranks_per_node=ranks_per_node, timeout_s=LIMIT_S) as buffer:
        round_trip(buffer)
        out = buffer.dispatch(*inputs(rank))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            said = [f"{len(mappings())} mappings"]
            calls = (lambda: buffer.dispatch(*inputs(rank)), lambda: buffer.combine(out.x, out.handle), buffer.check)
            for call in calls:
                try:
                    call()
                except ValueError as error:
                    said.append(str(error))
            buffer.destroy()
            buffer.config = None
            del calls, call, out, buffer  # and with them engine and connections
            os.write(writer, "\n".join([*said, "destroyed"]).encode())
            os._exit(0)
        os.close(writer)
        watchdog = Timer(SOON_S, os.kill, (child, signal.SIGKILL))
        watchdog.start()
        os.waitpid(child, 0)
        watchdog.cancel()
        with open(reader) as pipe:
            said = pipe.read().split("\n")
        assert len(said) == 5 and (said[0], said[-1]) == ("0 mappings", "destroyed")
        assert all(line.startswith("buffer was made in the parent process") for line in said[1:4])
        assert mappings()
        round_trip(buffer, seed=1)
        assert torch.equal(buffer.combine(out.x, out.handle).x, buffer.combine(out.x, out.handle).x)
