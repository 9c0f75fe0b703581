"""Buffers that give their memory back and take it again: nothing else changes, and every rank says the same."""

import ctypes
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on_ranks
from lib.cuda_build import needs_module
from lib.errors import assert_refused, error_of
from lib.faults import LONG_S, mappings, tell, wait_for
from lib.round_trip import CONFIG, assert_received, device, expected, inputs, make_buffer, outputs, round_trip

import ep_dispatcher as ep
from ep_dispatcher.engines import suspension
from ep_dispatcher.engines.health import Health
from ep_dispatcher.gather import Gather, History, Members
from ep_dispatcher.tools.testing import same_bits
from ep_dispatcher.topology import Topology

CYCLES, TOKENS = 100, 2**15  # so many tokens that the memory counts beside pages of 2 MiB: 7 MB a rank and more
PAGE = 4096


@pytest.fixture
def engine(engine: str) -> str:
    if engine == "cuda":
        pytest.importorskip("cuda.bindings", reason="no cuda-bindings")
    return engine


def make(engine: str, **changes) -> ep.Buffer:
    return make_buffer(engine=engine, suspendable=True, **changes)


def make_large(engine: str, **changes) -> ep.Buffer:
    return make(engine, **(dict(max_tokens_per_rank=TOKENS) | changes))


def present_pages(mapping: str) -> int:
    """Pages of the mapped file, whoever has touched them."""
    begin, end = (int(part, 16) for part in mapping.split()[0].split("-"))
    present = (ctypes.c_ubyte * ((end - begin) // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), present) == 0
    return sum(page & 1 for page in present)


def memory_in_use(buffer: ep.Buffer) -> int:
    """Collective: bytes of all regions that this rank has mapped (CPU), or bytes in use on its GPU."""
    if buffer.engine == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    dist.barrier()  # ranks may share the GPU
    if buffer.engine == "cuda":
        free, total = torch.cuda.mem_get_info()
        used = total - free
    else:
        used = PAGE * sum(map(present_pages, mappings()))
    dist.barrier()  # it is read before anybody frees or takes memory
    return used


def fill(buffer: ep.Buffer) -> tuple:
    """A dispatch and a combine with as many tokens as the buffer takes. Return the tensors and the right results."""
    rank = buffer.topology.rank
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, CONFIG["hidden"], generator=generator).bfloat16().to(device(buffer))
    idx = torch.rand(TOKENS, CONFIG["num_experts"], generator=generator).argsort(1)[:, : CONFIG["num_topk"]]
    out = buffer.dispatch(x, idx.contiguous().to(device(buffer)))
    return x, out, buffer.combine(out.x, out.handle).x


def fill_again(buffer: ep.Buffer, x, out, total) -> None:
    """The same with the handle of before: every bit is the same."""
    again = buffer.dispatch(x, handle=out.handle)
    assert same_bits(again.x, out.x) and same_bits(buffer.combine(again.x, out.handle).x, total)


def cycle(rank: int, engine: str, ranks_per_node: int) -> None:
    with make_large(engine, ranks_per_node=ranks_per_node) as buffer:
        filled = fill(buffer)
        fill_again(buffer, *filled)
        round_trip(buffer)
        full, suspended, resumed = memory_in_use(buffer), [], []
        for turn in range(CYCLES):
            buffer.suspend()
            assert buffer.is_suspended and repr(buffer).endswith(", suspended)")
            suspended.append(memory_in_use(buffer))
            buffer.resume()
            assert not buffer.is_suspended and "suspended" not in repr(buffer)
            if turn % 10 == 0:
                fill_again(buffer, *filled)
                round_trip(buffer, seed=turn)
                resumed.append(memory_in_use(buffer))
        fill_again(buffer, *filled)
        round_trip(buffer)
    if engine == "cpu":  # what is left are flags: a few pages a rank
        assert max(suspended) <= ranks_per_node * 16 * PAGE < full / 50
        assert full * 0.8 < min(resumed) == max(resumed) <= full  # without the lists of a new plan
    else:  # other ranks and PyTorch use the GPU too: at least the rows of this rank are gone, each time
        placed = dict(num_ranks=dist.get_world_size(), ranks_per_node=ranks_per_node, engine=engine)
        region = ep.buffer_bytes(**placed, **CONFIG | dict(max_tokens_per_rank=TOKENS)).region_bytes
        kept, slack = 4 * 2**20, 8 * 2**20
        assert max(suspended) <= full - (region - kept)
        assert max(suspended) - min(suspended) <= slack and max(resumed) <= full + slack


@pytest.mark.parametrize("num_ranks,ranks_per_node", [(2, 2), exhaustive(4, 2)])
def test_memory_goes_and_comes_a_hundred_times(pools, engine, num_ranks, ranks_per_node):
    pools(num_ranks).run(cycle, engine, ranks_per_node)


@on_ranks(2)
def test_a_suspended_buffer_refuses_operations_and_can_be_destroyed(rank: int, engine: str) -> None:
    buffer = make_large(engine)
    _, out, _ = fill(buffer)
    x, idx, weights = inputs(rank, device=device(buffer))
    assert "is not suspended" in assert_refused("buffer", buffer.resume)
    hooked = buffer.dispatch(x, idx, layout="decode", return_hook=True)
    assert_refused("hook", buffer.suspend)
    hooked.hook()
    before = buffer.counters()
    buffer.suspend()
    for operation in (
        lambda: buffer.dispatch(x, idx, weights),
        lambda: ep.dispatch(buffer, x.clone().requires_grad_(), idx, weights),
        lambda: buffer.dispatch(torch.zeros_like(out.x)[:TOKENS], handle=out.handle),
        lambda: buffer.combine(out.x, out.handle),
        lambda: buffer.plan(idx),
        buffer.check,
        buffer.suspend,
    ):
        assert "is suspended" in assert_refused("buffer", operation)
    assert buffer.counters() == before
    buffer.resume()  # nothing of this has brought the ranks out of step
    round_trip(buffer)
    buffer.suspend()
    buffer.destroy()
    assert not buffer.is_suspended and repr(buffer).endswith("destroyed)")
    for change in (buffer.suspend, buffer.resume):
        assert "was destroyed" in error_of(change)


@on_ranks(2)
def test_all_ranks_say_alike_whether_it_can_be_suspended(rank: int, engine: str) -> None:
    with make_buffer(engine=engine) as buffer:
        for change in (buffer.suspend, buffer.resume):
            assert "cannot be suspended" in assert_refused("buffer", change)
        assert not buffer.is_suspended
        round_trip(buffer)
    text = error_of(make_buffer, engine=engine, suspendable=rank == 1)
    assert text.startswith("suspendable: rank 0 gave False, rank 1 gave True")
    for given in (1, "yes", None, torch.tensor(True)):
        assert_refused("suspendable", make_buffer, engine=engine, suspendable=given)
    with make(engine) as buffer:
        round_trip(buffer)


@pytest.mark.parametrize("change", ["suspend", exhaustive("resume")])
@on_ranks(2, fresh=True)
def test_a_rank_that_does_not_come(rank, engine, change):
    buffer = make_large(engine, timeout_s=3.0)
    round_trip(buffer)
    if change == "resume":
        buffer.suspend()
    begin = time.monotonic()
    if rank == 1:
        wait_for("given up")
        begin = time.monotonic()
        with pytest.raises(ep.PeerTimeoutError, match="rank 1 came too late: the other ranks have given up") as caught:
            getattr(buffer, change)()
        assert caught.value.late_ranks == (1,) and time.monotonic() - begin < 2.5, "it waits for nobody"
        return buffer.destroy()
    with pytest.raises(ep.PeerTimeoutError) as caught:
        getattr(buffer, change)()
    assert 2.5 < time.monotonic() - begin < 25
    error = caught.value
    assert (error.operation, error.phase, error.late_ranks, error.epoch) == (change, "call", (1,), 0)
    assert str(error).startswith(f"{change}, phase 'call': rank {rank} waited ")
    for operation in (lambda: buffer.dispatch(*inputs(rank, device=device(buffer))), buffer.resume):
        with pytest.raises(ep.PeerTimeoutError) as again:
            operation()
        assert str(again.value) == str(error)
    tell("given up")
    buffer.destroy()


def let_fail(rank: int, error: BaseException):
    """Let the first step of suspend() or resume() raise on rank 1; for ``with``."""
    own = suspension.change

    def fail() -> None:
        raise error

    if rank != 1:
        return nullcontext()
    return mock.patch.object(
        suspension, "change", lambda name, meet, health, first, *then: own(name, meet, health, fail, *then)
    )


@on_ranks(2)
def test_what_fails_on_one_rank_fails_alike_on_all(rank, engine):
    """Suspending fails on rank 1 before anything is freed; resuming finds no memory there, and later does."""
    with make_large(engine) as buffer:
        filled = fill(buffer)
        with pytest.raises(ValueError) as mistake, let_fail(rank, ValueError("topk_idx[0, 0]: a late one")):
            buffer.suspend()
        assert str(mistake.value) == "suspend: topk_idx[0, 0]: a late one (on rank 1)"
        fill_again(buffer, *filled)  # nothing was freed
        buffer.suspend()
        with pytest.raises(RuntimeError) as no_memory, let_fail(rank, torch.OutOfMemoryError("none left")):
            buffer.resume()
        assert str(no_memory.value).startswith("resume: none left (on rank 1); the buffer stays suspended")
        assert buffer.is_suspended
        buffer.resume()
        fill_again(buffer, *filled)


@on_ranks(2)
def test_an_interrupt_ends_the_buffer_on_all_ranks(rank, engine):
    buffer = make_large(engine)
    buffer.suspend()
    with pytest.raises(BaseException) as caught, let_fail(rank, KeyboardInterrupt("stop")):
        buffer.resume()
    seen = ["RuntimeError: resume, phase 'memory': rank 1 left: KeyboardInterrupt: stop", "KeyboardInterrupt: stop"]
    assert f"{type(caught.value).__name__}: {caught.value}" == seen[rank]
    with pytest.raises(RuntimeError, match="this buffer gave up in resume"):
        buffer.resume()
    buffer.destroy()


@pytest.mark.parametrize("change", ["suspend", exhaustive("resume")])
@on_ranks(3)
def test_a_rank_that_another_thread_destroys_meanwhile(rank, engine, change):
    """It leaves at once, though one rank has not come yet, and so do the others."""
    buffer = make(engine)
    if change == "resume":
        buffer.suspend()
    engine_of_buffer = buffer.live_engine()
    if rank == 2:
        wait_for(f"left/{buffer.id}/0", f"left/{buffer.id}/1")
    watchdog = threading.Timer(0.5, buffer.destroy)
    if rank == 0:
        watchdog.start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        getattr(buffer, change)()
    assert time.monotonic() - begin < 15, "the limit is 30 s"
    if rank == 0:
        assert str(caught.value).endswith(f"by another thread or a signal handler, while this thread was in {change}")
        watchdog.join()
        assert engine_of_buffer.health.is_stopped and not engine_of_buffer.health.waits_to_be_freed
    else:
        said = f"{change}, phase 'call': rank 0 left: RuntimeError: the buffer was destroyed meanwhile"
        assert str(caught.value) == said
    tell(f"left/{buffer.id}/{rank}")
    buffer.destroy()


@on_ranks(2)
def test_two_buffers_take_turns(rank, engine):
    """They have different sizes, and one is suspended while the other one works."""
    levels, of_other = [], dict(hidden=256, max_tokens_per_rank=TOKENS // 2)
    with make_large(engine) as large, make(engine, **of_other) as other:
        other.suspend()
        filled = fill(large)
        for _ in range(3):
            levels.append(memory_in_use(large))
            large.suspend()
            other.resume()
            x = torch.randn(TOKENS // 2, 256, generator=torch.Generator().manual_seed(rank)).bfloat16()
            idx = torch.arange(TOKENS // 2).view(-1, 1) % 12 + torch.arange(3)
            out = other.dispatch(x.to(device(other)), (idx % 12).to(device(other)))
            assert same_bits(other.combine(out.x, out.handle).x.cpu(), (x.float() * 3).bfloat16())
            levels.append(memory_in_use(large))
            other.suspend()
            large.resume()
            fill_again(large, *filled)
    buffers = dict(max_tokens_per_rank=TOKENS), of_other
    sizes = [ep.buffer_bytes(num_ranks=2, engine=engine, **CONFIG | changes).region_bytes for changes in buffers]
    levels = levels[2:]  # in the first turn, GPUs load kernels
    assert max(levels) - min(levels) < 2 * sum(sizes)
    if engine == "cpu":  # of both ranks; never both buffers at once
        assert max(levels) <= 2 * max(sizes) + 64 * PAGE


@on_ranks(2)
def test_its_group_may_be_destroyed(rank: int, engine: str) -> None:
    """The ranks of a buffer know each other without it, as long as torch.distributed has a default group."""
    group = dist.new_group()
    with make(engine, group=group) as buffer:
        round_trip(buffer)
        buffer.suspend()
        dist.destroy_process_group(group)
        del group
        buffer.resume()
        round_trip(buffer)


@on_ranks(2)
def test_handles_and_backwards_from_before(rank: int, engine: str) -> None:
    """Plans and autograd graphs made before stay good."""
    with make(engine) as buffer:
        x, idx, weights = inputs(rank, device=device(buffer))
        handle = buffer.plan(idx)
        leaf = x.clone().requires_grad_()
        out = ep.dispatch(buffer, leaf, idx, weights)
        total = ep.combine(buffer, out.x, out.handle).float().sum()
        for _ in range(2):
            buffer.suspend()
            buffer.resume()
        total.backward()
        rows = (idx >= 0).sum(1, keepdim=True).to(torch.float32)
        assert torch.equal(leaf.grad.float(), rows.expand(-1, x.shape[1]))
        again = buffer.dispatch(x, topk_weights=weights, handle=handle)
        assert_received(again, expected(buffer)[0])
        y = outputs(rank, again.x.shape[0], device=device(buffer))
        assert same_bits(buffer.combine(y, handle).x.cpu(), expected(buffer)[1])


class Replayed:
    """A rank of the CUDA engine without a GPU, as suspend() leaves it after a replay that it has ended half-way."""

    COUNTED, STALE = 41, 1  # bytes in counters; what is in all other bytes

    def __init__(self, rank: int, epoch: int):
        from ep_dispatcher import _C_cuda
        from ep_dispatcher.engines.cuda.engine import CudaEngine
        from ep_dispatcher.engines.cuda.regions import SuspendableRegions
        from ep_dispatcher.memory import Shape

        sizes = dict(num_nodes=1, ranks_per_node=2, num_experts=4, num_topk=2, max_tokens_per_rank=8, hidden=64)
        c = Shape(**sizes, dtype=torch.bfloat16).cuda_config(_C_cuda.Config())
        self.flag_bytes = _C_cuda.flag_bytes(c)
        at = _C_cuda.state_offsets(c)
        self.counters = slice(at["bytes_read"], at["masked"])
        self.aborted = slice(_C_cuda.state_aborted_offset, _C_cuda.state_aborted_offset + 4)
        self.state = torch.full((_C_cuda.state_bytes(c, 4),), self.STALE, dtype=torch.uint8)
        self.state[_C_cuda.epoch_offset : _C_cuda.epoch_offset + 8].view(torch.int64).fill_(epoch)
        self.state[self.counters] = self.COUNTED
        self.memory = torch.full((self.flag_bytes + 64,), self.STALE, dtype=torch.uint8)
        self.memory_is_mapped = False
        engine = self.engine = object.__new__(CudaEngine)
        engine._compiled, engine._c_config, engine._state = _C_cuda, c, self.state
        engine._topology = Topology.make(rank, ["one", "one"], 2)
        engine._device, engine.config = torch.device("cpu"), SimpleNamespace(timeout_s=LONG_S)
        engine.health = Health(lambda: None, LONG_S)
        engine.health.suspended = True
        regions = engine._regions = object.__new__(SuspendableRegions)
        regions.memory, regions.take, regions.attach_again = self.memory, lambda: None, self.attach

    def attach(self) -> None:
        """All ranks have come so far, and no kernel may run before."""
        assert self.state[self.aborted].any() and not self.memory[: self.flag_bytes].any()
        dist.barrier()
        self.memory_is_mapped = True


@needs_module
@on_ranks(2)
def test_ranks_begin_again_together_after_a_replay_that_one_of_them_began(rank):
    """suspend() may end a replay in which one rank has completed an operation, or has sent words of the next one.

    After resume() a word of the last epoch of one rank passed for one of the next epoch: see
    test_cuda_engine.test_suspend_ends_a_replay_that_one_rank_began_alone.
    """
    from ep_dispatcher.engines.cuda import engine as cuda

    with mock.patch.object(cuda, "wait_for_device", lambda device, limit_s: None):
        made = Replayed(rank, epoch=7 + rank)
        dist.barrier()
        members, history = Members(rank, 2), History("test/replayed")
        made.engine.resume(partial(Gather, members, LONG_S, operation="resume", history=history))
    assert made.memory_is_mapped and not made.engine.health.suspended
    assert made.engine._read_state(made.state)[0] == 8, "the last one of all ranks"
    assert (made.state[made.counters] == made.COUNTED).all(), "counters() goes on"
    made.state[made.counters] = 0
    made.state[:8] = 0  # the epoch
    assert not made.state.any() and not made.memory[: made.flag_bytes].any()
