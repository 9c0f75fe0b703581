"""Ranks on one host and random routings, for tests and benchmarks.

with RankPool(4) as pool:                 # four processes in one gloo group
    results = pool.run(fn, a, b)          # fn(rank, a, b) on every rank; results in rank order
"""

from __future__ import annotations

import copyreg
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ep_dispatcher import Buffer
    from ep_dispatcher.statistics import BalanceStats

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
LOOPBACK = "127.0.0.1"
KILL_S = 30.0  # how long a killed rank may take to end
GRACE_S = 10.0  # how long the other ranks may go on after the first failure: long enough to report one of their own
ROUTINGS = ("uniform", "skewed", "one_expert", "masked", "empty")
# The server from which the ranks are forked imports these once. The first custom operator imports torch._dynamo.
_PRELOAD = [
    "__main__",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.testing",
    "ep_dispatcher",
    "ep_dispatcher.tools.testing",
]


class RankError(RuntimeError):
    """One or more ranks failed. ``failures[rank]`` is ``(type_name, message, traceback_text)``.

    ``type_name`` is the type of the rank's exception, or ``"Died"`` (the process has ended), ``"Timeout"`` (killed at
    the limit) or ``"Stopped"`` (killed because it still ran ``GRACE_S`` after another rank had failed).
    """

    def __init__(self, failures: dict[int, tuple[str, str, str]]):
        self.failures = dict(sorted(failures.items()))
        # First a line each: one that died is the reason why others raise, and lies between their long stacks.
        lines = [f"rank {r}: {name}: {message}" for r, (name, message, _) in self.failures.items()]
        stacks = [f"rank {r}:\n{text}" for r, (_, _, text) in self.failures.items() if text]
        super().__init__("\n".join([f"{len(lines)} rank(s) failed", *lines, *stacks]))

    def __reduce__(self):
        return RankError, (self.failures,)


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape).requires_grad_(requires_grad)


def _reduce_tensor(tensor: Tensor) -> tuple:
    """Pickle the elements alone: without shared memory, the rest of their storage, or a device."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    return _rebuild_tensor, (data, tensor.dtype, tensor.shape, tensor.requires_grad)


def _dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: _reduce_tensor}
    pickler.dump(obj)
    return buffer.getvalue()


def _failure(error: BaseException) -> tuple[bool, tuple[str, str, str]]:
    return False, (type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _loads(message: bytes) -> tuple[bool, Any]:
    """Restore a pair (ok, value) of ``_dumps``. Return (False, failure) if that fails here."""
    try:
        return pickle.loads(message)
    except Exception as error:  # of any kind: the parent reports it
        return _failure(error)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def rank_main(rank: int, connection: Connection) -> None:
    """Answer calls (fn, args) with (ok, value), until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and closes the pool
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        while True:
            request = connection.recv_bytes()
            try:
                fn, args = pickle.loads(request)
                reply = _dumps((True, fn(rank, *args)))
            except BaseException as error:  # also SystemExit and pytest's outcomes: the parent decides about them
                reply = _dumps(_failure(error))
            connection.send_bytes(reply)
            fn = args = None  # not until the next call
    except (EOFError, ConnectionError):
        pass  # the parent has closed its end, or is gone
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(rank: int, num_ranks: int, host: str, port: int, threads: int, timeout_s: float, backend: str) -> int:
    """Make the default group. Return the file descriptor to which SIGUSR1 writes the stacks of this process."""
    stacks = os.memfd_create("stacks")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    if host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
    return stacks


class RankPool:
    """``num_ranks`` processes on this host that form the default ``torch.distributed`` group.

        with RankPool(2) as pool:
            assert pool.run(fn, 3) == [fn(0, 3), fn(1, 3)]

    Every rank uses ``threads_per_rank`` threads in PyTorch. ``timeout_s`` (seconds) limits a run, the start and every
    collective of the group. With NCCL in the ``backend`` each rank's GPU is its current device. The ranks live until
    ``close()``, or until this process ends in any way.
    """

    def __init__(self, num_ranks: int, *, threads_per_rank: int = 1, timeout_s: float = 120.0, backend: str = "gloo"):
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        # This process hosts the store, so that it survives ranks that are killed.
        self._store: dist.TCPStore | None = self._serve_store()
        self._processes, self._connections, self._stacks = [], [], [None] * num_ranks
        self.closed, self.pids = False, []  # process ids in rank order
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                process = context.Process(target=self._main_of(rank), args=(rank, theirs), daemon=True)
                process.start()
                self._processes.append(process)
                self.pids.append(process.pid)
                theirs.close()
            self._stacks = self.run(
                _join_group, num_ranks, self._store.host, self._store.port, threads_per_rank, timeout_s, backend
            )
        except BaseException:  # it is raised again
            self.close()
            raise

    def _serve_store(self) -> dist.TCPStore:
        return dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def _main_of(self, rank: int) -> Callable[[int, Connection], None]:
        """What the process of a rank calls; tests/lib/two_hosts.py moves it to another host first."""
        return rank_main

    def run(
        self, fn: Callable, *args: Any, timeout_s: float | None = None, allow_dead: Collection[int] = ()
    ) -> list[Any]:
        """Call ``fn(rank, *args)`` on every rank and return the results in rank order.

        ``fn`` is pickled by reference, so it must be a function at the top level of a module. Arguments and results are
        pickled by value, and tensors arrive as copies on the CPU. Raises ``RankError`` if a rank raises, dies or takes
        longer than ``timeout_s``. The ranks in ``allow_dead`` may die: their result is None. If a rank has died or was
        killed, the pool is closed; after exceptions alone it can be used again.
        """
        if self.closed:
            raise RuntimeError("the pool is closed")
        request = _dumps((fn, args))
        for connection in self._connections:
            try:
                connection.send_bytes(request)
            except ConnectionError:
                pass  # died since the last run: _collect reports it
        try:
            return self._collect(self.timeout_s if timeout_s is None else timeout_s, allow_dead)
        except RankError:
            raise
        except BaseException:  # interrupted while ranks are running: their state is unknown
            self.close()
            raise

    def _collect(self, timeout_s: float, allow_dead: Collection[int]) -> list[Any]:
        results, failures, broken = [None] * self.num_ranks, {}, False
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout_s
        late = ("Timeout", f"still running after {timeout_s:g} s, killed")
        while pending:
            for connection in wait(list(pending), max(0.0, deadline - time.monotonic())):
                assert isinstance(connection, Connection)  # wait() takes sockets too
                rank = pending.pop(connection)
                try:
                    ok, value = _loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    broken = True
                    if rank in allow_dead:
                        continue
                    ok, value = False, ("Died", self._how_it_died(rank), "")
                if ok:
                    results[rank] = value
                    continue
                failures[rank] = value
                if time.monotonic() + GRACE_S < deadline:
                    deadline = time.monotonic() + GRACE_S
                    late = ("Stopped", f"still running {GRACE_S:g} s after rank {rank} failed, killed")
            if pending and time.monotonic() >= deadline:
                failures |= {rank: (*late, self._stack_of(rank)) for rank in pending.values()}
                broken = True
                break
        if broken:
            for process in self._processes:
                process.kill()
            self.close()
        if failures:
            raise RankError(failures)
        return results

    def _how_it_died(self, rank: int) -> str:
        self._processes[rank].join(30)
        code = self._processes[rank].exitcode
        return f"died with signal {-code}" if code is not None and code < 0 else f"exited with code {code}"

    def _stack_of(self, rank: int) -> str:
        """Return the Python stacks of a rank that does not answer. Wait until it has written them."""
        if self._stacks[rank] is None or not self._processes[rank].is_alive():
            return ""
        pid, text, before = self.pids[rank], "", None
        assert pid is not None  # since it was started
        deadline = time.monotonic() + 10
        try:
            os.kill(pid, signal.SIGUSR1)
            while text != before or (not text and time.monotonic() < deadline):
                before = text
                time.sleep(0.1)
                with open(f"/proc/{pid}/fd/{self._stacks[rank]}") as file:
                    text = file.read()
            return text
        except OSError as error:
            return f"(no stack: {error})"

    def close(self) -> None:
        """Stop all ranks, and kill those that do not stop within five seconds. May be called more than once."""
        if self.closed:
            return
        self.closed = True
        for connection in self._connections:
            connection.close()  # the rank ends
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join(KILL_S)
            if not process.is_alive():  # a driver that hangs keeps even a killed process
                process.close()
        self._store = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def run_ranks(num_ranks: int, fn: Callable, *args: Any, **options: Any) -> list[Any]:
    """Make a RankPool, run ``fn`` in it and close it. ``options`` are those of RankPool."""
    with RankPool(num_ranks, **options) as pool:
        return pool.run(fn, *args)


def device_of(engine: str, rank: int) -> str:
    """Return the device of ``engine`` on this rank, and make it the current one."""
    if engine == "cpu":
        return "cpu"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return f"cuda:{torch.cuda.current_device()}"


def different_bits(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors of the same dtype and shape differ in a bit: bool, of their shape.

    Unlike in ``torch.equal`` the sign of zero counts, and all NaNs are equal.
    """
    bits = _BITS[a.itemsize]
    different = a.view(bits) != b.view(bits)
    return different & ~(a.float().isnan() & b.float().isnan()) if a.is_floating_point() else different


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether dtype, shape and all elements (by ``different_bits``) are the same."""
    return a.dtype == b.dtype and a.shape == b.shape and not different_bits(a, b).any()


def _rand(generator: torch.Generator, *shape: int) -> Tensor:
    """Return random float32 in [0, 1) on the CPU, whatever the process's defaults are."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


def with_negative_zeros(t: Tensor, *, seed: int) -> Tensor:
    """Return ``t`` with -0.0 at a random quarter of its elements; the same for the same arguments."""
    chosen = _rand(torch.Generator().manual_seed(seed), *t.shape) < 1 / 4
    return t.masked_fill(chosen.to(t.device), -0.0)


def make_routing(
    kind: str, num_tokens: int, num_experts: int, num_topk: int, *, seed: int, weights: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Choose random experts for every token. Return ``(topk_idx, topk_weights)``, the same for the same arguments.

        uniform     num_topk different experts, all equally likely
        skewed      num_topk different experts, expert e chosen in proportion to 1 / (e + 1)
        one_expert  every token goes to expert 0 alone, the other entries are -1
        masked      as uniform, but a third of the entries are -1; a ninth of the rows have no other entry
        empty       every entry is -1

    ``topk_idx`` is int64 [num_tokens, num_topk], without an expert twice in a row. ``topk_weights`` is float32 of the
    same shape, in (0, 1] (also beside -1), or None without ``weights``.
    """
    if kind not in ROUTINGS:
        raise ValueError(f"kind is {kind!r}, but has to be one of {ROUTINGS}")
    if not 0 < num_topk <= num_experts:
        raise ValueError(f"num_topk is {num_topk}, but has to be from 1 to num_experts = {num_experts}")
    generator = torch.Generator().manual_seed(seed)
    score = _rand(generator, num_tokens, num_experts).clamp(1e-7, 1 - 1e-7)
    if kind == "skewed":  # adding Gumbel noise to log(popularity) draws without replacement in proportion to it
        score = -(-score.log()).log() - torch.arange(1, num_experts + 1, dtype=torch.float32, device="cpu").log()
    topk_idx = score.topk(num_topk, dim=1).indices
    columns = _rand(generator, num_tokens, num_topk)
    rows = _rand(generator, num_tokens, 1)
    if kind == "one_expert":
        topk_idx = torch.where(columns == columns.amax(1, keepdim=True), 0, -1)
    elif kind == "masked":
        topk_idx = topk_idx.masked_fill((columns < 1 / 4) | (rows < 1 / 9), -1)
    elif kind == "empty":
        topk_idx = torch.full_like(topk_idx, -1)
    topk_weights = 1 - _rand(generator, num_tokens, num_topk) if weights else None
    return topk_idx, topk_weights


def make_hot_routing(
    num_tokens: int, num_experts: int, num_topk: int, num_ranks: int, *, seed: int, times: int = 4
) -> tuple[Tensor, Tensor]:
    """As ``make_routing`` "uniform", but rank 0 gets ``times`` times the mean, or everything if ranks are too few.

    Its share is exact to one row. Its experts are equally likely, and so are the others. Raises ValueError if it has
    too few experts.
    """
    num_local = num_experts // num_ranks
    share = min(1.0, times / num_ranks)
    wanted = (torch.arange(num_tokens + 1, dtype=torch.float64, device="cpu") * num_topk * share).floor().long().diff()
    others = num_topk - wanted
    if num_tokens and (int(wanted.max()) > num_local or int(others.max()) > num_experts - num_local):
        allowed = f"no more than its {num_local} experts"
        raise ValueError(f"num_topk is {num_topk}, of which {share:.0%} to one rank, but has to be {allowed}")
    generator = torch.Generator().manual_seed(seed)
    score = _rand(generator, num_tokens, num_experts)

    def is_best(score: Tensor, number: Tensor) -> Tensor:
        """Return which scores are among the ``number`` best of their row."""
        return score.argsort(1, descending=True).argsort(1) < number[:, None]

    chosen = torch.cat([is_best(score[:, :num_local], wanted), is_best(score[:, num_local:], others)], 1)
    topk_idx = chosen.nonzero()[:, 1].view(num_tokens, num_topk)
    return topk_idx, 1 - _rand(generator, num_tokens, num_topk)


def balance_so_far(buffer: Buffer) -> BalanceStats:
    """Return what ``stats()`` says of balancing since its last result. The host waits for the GPU.

    A copy of the sums is not there at once, so two results may have to be added.
    """
    results = [buffer.stats()]
    if buffer.engine == "cuda":
        torch.cuda.synchronize()
        results.append(buffer.stats())
    found = [one.balance for one in results if one is not None and one.balance is not None]
    return type(found[0])._make([*(sum(numbers) for numbers in zip(*(one[:-1] for one in found))), found[0].num_ranks])
