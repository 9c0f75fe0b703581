"""The engine's buffers behind ``deep_ep.Buffer``: one for each kind of rows and routing, made when needed."""

from __future__ import annotations

import atexit
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher import checks, envs
from ep_dispatcher.errors import copy_error
from ep_dispatcher.gather import Gather
from ep_dispatcher.integrations.agree import all_reduce, check_same, say_in_use
from ep_dispatcher.integrations.deep_ep.config import say_once
from ep_dispatcher.integrations.deep_ep.events import CommStream, outside_graphs
from ep_dispatcher.integrations.deep_ep.late import LateMistakes
from ep_dispatcher.integrations.deep_ep.rows import Kind
from ep_dispatcher.memory import default_sms
from ep_dispatcher.topology import process_group, registered_group

_LEFT = ". The other ranks have been told that this one left the operation: destroy() this buffer"
_OUT_OF_STEP = (
    ". The device found it after other operations had begun, so the ranks may be out of step: destroy() this buffer"
)


class Key(NamedTuple):
    kind: Kind
    num_experts: int
    num_topk: int

    def digest(self) -> int:
        """Return a number that is the same on all ranks whose rows and routing are of this kind."""
        return zlib.crc32(repr((self.kind.hidden, str(self.kind.dtype), self.num_experts, self.num_topk)).encode())


class Settings(NamedTuple):
    """Variables of the environment that decide which operations run, and so have to be the same on all ranks."""

    exact: bool
    max_tokens: int | None


class HookedBuffer:
    """A buffer of our engine in decode layout, and the hook of its last operation until that is called."""

    def __init__(self, buffer: ep.Buffer, has_masks: bool):
        self.buffer, self.has_masks = buffer, has_masks
        self.turn = [0]  # number of operations, shared by the two buffers of Pool.in_turn
        self._hook: Callable[[], None] | None = None

    def ready(self) -> ep.Buffer:
        """Return the buffer for an operation. First complete the last one: only one may be under way."""
        if self._hook is not None:
            self._hook()
        return self.buffer

    def unmask(self) -> None:
        """Unmask all ranks. A masked rank drops an operation that has sent, because it cannot receive."""
        with suppress(ep.PeerTimeoutError):
            self.ready()
        self._hook = None
        self.buffer.unmask()

    def hook(
        self, out: ep.DispatchOutput | ep.CombineOutput, complete: Callable[[], object] | None = None
    ) -> Callable[[], None]:
        """Return a hook. Its first call receives and completes; in later ones the current stream waits for that."""
        receive, received = out.hook, False

        def hook() -> None:
            nonlocal received
            if received:
                out.event.wait()
                return
            receive()
            received, self._hook = True, None
            if complete is not None:
                complete()

        self._hook = hook
        return hook


class Pool:
    """The buffers of one group, from the first ``deep_ep.Buffer`` of the group to the end of the group.

    A handle of DeepEP does not belong to one buffer, so all deep_ep.Buffers of a group share the engine's buffers.
    Their tokens per rank are not known when a deep_ep.Buffer is made. They are EP_DISPATCHER_MAX_TOKENS_PER_RANK, or
    given by the arguments of an operation, or the ranks agree on them before every dispatch. A buffer that is too small
    now stays for its handles.

    Making them is collective, so ranks have to decide it alike. No decision here depends on which objects Python has
    freed: a reference cycle keeps an object for longer on one rank than on another.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.serves = "deep_ep"  # the framework whose tokens its buffers carry
        self.to_destroy = 0  # deep_ep.Buffers with explicitly_destroy, until destroy()
        self.is_kept = False  # a deep_ep.Buffer without it is in use, which nobody destroys
        self._settings: Settings | None = None  # those that all ranks have
        self.num_sms: int | None = None  # of buffers made from now on; timeout_s likewise
        self.timeout_s: float | None = None
        self.late = LateMistakes()
        self._failure: Callable[[], Exception] | None = None  # makes the error of the mistake that ended the use
        self._made: list[ep.Buffer] = []
        self._buffers: dict[Key, list[ep.Buffer]] = {}  # the last is in use
        # By tokens per rank, and whether they have masks.
        self._in_turn: dict[tuple[Key, int, bool], list[HookedBuffer]] = {}
        self._masked: set[int] = set()  # ranks masked by hand
        self._no_masks: str | None = None  # why buffers have no masks, though enable_shrink asks for them

    def settings(self, num_worst_tokens: int = 0) -> Settings:
        """Return the settings of this rank. Collective at the first use, and after a change of one of them.

        Then ranks compare them, and num_worst_tokens. Where they differ, all ranks raise the same ValueError.
        """
        if self._settings is not None and self._settings == _own_settings():
            return self._settings

        def own() -> dict[str, int | None]:
            exact, max_tokens = _own_settings()
            return dict(
                EP_DISPATCHER_DEEP_EP_EXACT=int(exact),
                EP_DISPATCHER_MAX_TOKENS_PER_RANK=max_tokens,
                num_worst_tokens=num_worst_tokens,
            )

        with Gather(self.group, envs.timeout_s()) as gather:
            everyone = gather("compare the settings", own)
            with gather.same_on_all_ranks():
                check_same(everyone)
        self._settings = _own_settings()
        return self._settings

    def refuse(self, mistake: Exception) -> NoReturn:
        """Raise a mistake that depends on this rank's data, so other ranks may be in the operation already.

        They learn at once that this rank has left. Call it where they have made the buffers of the operation. Until
        destroy() every operation of this rank raises the mistake again.
        """
        self._end(partial(copy_error, copy_error(mistake), _LEFT))
        raise mistake

    def _end(self, failure: Callable[[], Exception]) -> None:
        """End the use of all buffers, so that other ranks learn that this one has left."""
        self._failure = failure
        for buffer in self._made:
            if not buffer.is_destroyed:
                buffer.live_engine().health.end(failure)

    def sized(self, key: Key, max_tokens: int) -> ep.Buffer:
        """Return the buffer for ``max_tokens``, the same on all ranks. Collective if it must be made."""
        made = self._buffers.setdefault(key, [])
        largest = made[-1].config.max_tokens_per_rank if made else 0
        if largest < max_tokens:
            try:
                made.append(self._make(key, max(max_tokens, 2 * largest)))  # bounds the memory of all old ones together
            except ep.PeerTimeoutError as error:
                if largest:
                    error.note = (
                        f"this rank needs buffers for {max_tokens} tokens of a rank, and has some for {largest}: the "
                        "other ranks must give the same num_worst_tokens, or num_max_tokens_per_rank"
                    )
                raise
        self._say_kept(made[-1], "rank")
        return made[-1]

    def most_tokens(self) -> int:
        """Return tokens per rank that were enough for every dispatch so far, the same on all ranks."""
        sizes = [buffer.config.max_tokens_per_rank for made in self._buffers.values() for buffer in made]
        if not sizes:
            checks.refuse("handle is of buffers that are destroyed")
        return max(sizes)

    def in_turn(self, key: Key, max_tokens: int, masks: bool) -> HookedBuffer:
        """Return one of two buffers of exactly ``max_tokens``, in turn. Like in DeepEP, two hooks may wait at a time.

        Combines count as turns too, as in DeepEP (low_latency.Trip). So the turn is the same before and after a
        layer, and a rank that replays a CUDA graph stays in step with ranks that replay none, or one of another size.

        The first call makes both, and is collective; later ones may be in a CUDA graph. masks: give them masks if
        possible
        """
        both = self._in_turn.get((key, max_tokens, masks))
        if both is None:
            both = self._in_turn[key, max_tokens, masks] = [self._make_hooked(key, max_tokens, masks) for _ in range(2)]
            both[1].turn = both[0].turn
        turn = both[0].turn
        turn[0] += 1
        self._say_kept(both[0].buffer, "decode")
        return both[turn[0] % 2]

    def _say_kept(self, buffer: ep.Buffer, layout: str) -> None:
        """Say once what the program has set since this buffer was made, and what the buffer keeps."""
        if self.num_sms is None and self.timeout_s is None:
            return
        sms, timeout_s = default_sms(buffer.config.num_sms)[layout], buffer.config.timeout_s
        if self.num_sms not in (None, sms):
            say_once(f"num_sms is {self.num_sms}; memory that was made before keeps {sms} multiprocessors")
        if self.timeout_s not in (None, timeout_s):
            say_once(
                f"num_gpu_timeout_secs is {self.timeout_s}; memory that was made before keeps {timeout_s:g} seconds"
            )

    def _make(self, key: Key, max_tokens: int, mask_late_ranks: bool = False) -> ep.Buffer:
        buffer = ep.Buffer(
            self.group,
            hidden=key.kind.hidden,
            dtype=key.kind.dtype,
            num_experts=key.num_experts,
            num_topk=key.num_topk,
            max_tokens_per_rank=max_tokens,
            num_sms=self.num_sms,
            timeout_s=self.timeout_s,
            mask_late_ranks=mask_late_ranks,
        )
        self._made.append(buffer)
        say_in_use(self.serves, buffer)
        if buffer.engine == "cuda":
            self.late.prepare(torch.device("cuda", torch.cuda.current_device()))
        return buffer

    def raise_late(self, *, ends: bool) -> None:
        """Raise a mistake of this rank that the device has found meanwhile. Never wait.

        ends: other ranks may be in an operation that this rank now refuses. So the use of all buffers ends, and the
        others learn that this rank has left. Until destroy() every operation raises the same error
        """
        mistake = self.late.take()
        if mistake is not None and not ends:
            raise mistake
        if mistake is not None and self._failure is None:
            self._end(partial(copy_error, mistake, _OUT_OF_STEP))
        if self._failure is not None:
            raise self._failure()

    def _raise_last(self, failed: bool) -> None:
        """After all operations: raise a mistake that none of them has raised."""
        self.late.synchronize()
        mistake = self.late.take()
        if mistake is not None and not failed:
            raise mistake

    def _make_hooked(self, key: Key, max_tokens: int, masks: bool) -> HookedBuffer:
        try:
            buffer = self._make(key, max_tokens, mask_late_ranks=masks)
        except ValueError as error:
            if not (masks and str(error).startswith("mask_late_ranks is True ")):
                raise
            self._no_masks = f"the engine has no masks here. {error}"
            say_once(f"enable_shrink: a rank that does not answer is a PeerTimeoutError, because {self._no_masks}")
            return HookedBuffer(self._make(key, max_tokens), has_masks=False)
        if masks:
            for rank in self._masked:
                buffer.mask_rank(rank)
        return HookedBuffer(buffer, masks)

    def mask_rank(self, rank: int) -> None:
        """Mask a rank by hand in all buffers that have masks, also in later ones."""
        if self._no_masks is not None:
            raise NotImplementedError(f"low_latency_update_mask_buffer: {self._no_masks}")
        if rank == self.group.rank():
            checks.refuse(f"rank_to_mask is {rank}, which is this rank: a rank cannot mask itself")
        self._masked.add(rank)
        for hooked in self._masking():
            hooked.ready().mask_rank(rank)

    def add_masks(self, status: Tensor) -> None:
        """Set int32 [num_ranks] to 1 for every rank that is masked in any buffer. Call no hook."""
        for rank in self._masked:
            status[rank] = 1
        for hooked in self._masking():
            torch.maximum(status, hooked.buffer.mask.to(status.device), out=status)

    def unmask(self) -> None:
        """Unmask all ranks in all buffers. Collective."""
        for hooked in self._masking():
            hooked.unmask()
        self._masked.clear()

    def _masking(self) -> list[HookedBuffer]:
        return [hooked for both in self._in_turn.values() for hooked in both if hooked.has_masks]

    def for_dispatch(self, key: Key, num_tokens: int, num_worst_tokens: int) -> ep.Buffer:
        """Return the buffer for a dispatch of ``num_tokens`` by this rank. Other ranks may have other numbers."""
        given = self.settings(num_worst_tokens).max_tokens
        if given is not None:
            most, source = given, f"EP_DISPATCHER_MAX_TOKENS_PER_RANK={given}"
        elif num_worst_tokens:  # no host may wait; in the worst case one rank receives all tokens of all ranks
            most = -(-num_worst_tokens // self.group.size())
            source = f"num_worst_tokens / ranks = {most}; or set EP_DISPATCHER_MAX_TOKENS_PER_RANK"
        else:
            return self.sized(key, max(1, self._agree_on_tokens(key, num_tokens)))
        buffer = self.sized(key, most)
        if num_tokens > most:
            self.refuse(ValueError(f"x has {num_tokens} tokens on rank {self.group.rank()}, but at most {source}"))
        return buffer

    def _agree_on_tokens(self, key: Key, num_tokens: int) -> int:
        """Return the most tokens of any rank. ValueError on all ranks if rows or routing are not of one kind."""
        digest = key.digest()  # its least and its largest are the same if there is only one
        agreed = torch.tensor([num_tokens, digest, -digest], dtype=torch.int64, device="cpu")
        all_reduce(agreed, dist.ReduceOp.MAX, self.group, about="agree on the number of tokens")
        most, largest, least = agreed.tolist()
        if largest != -least:
            raise ValueError(
                f"x, topk_idx: this rank gave rows of {key.kind.hidden} {key.kind.dtype} to {key.num_experts} experts, "
                f"{key.num_topk} for a token, and another rank gave rows of another size or dtype, another number of "
                "experts or choices, or no topk_idx; all ranks must give the same"
            )
        return most

    def destroy(self) -> None:
        """Destroy all buffers, then raise late errors of their last operations. Collective."""
        self.is_kept = False
        with ExitStack() as stack:
            stack.callback(self._raise_last, self._failure is not None)
            for buffer in self._made:
                stack.callback(buffer.destroy)
            for known in (self._made, self._buffers, self._in_turn, self._masked):
                known.clear()
            self._no_masks = self._failure = self._settings = None


_pools: dict[ProcessGroup, Pool] = {}  # of groups that torch.distributed has not destroyed


def pool_of(group: ProcessGroup) -> Pool:
    group = registered_group(group)
    for ended in [known for known in _pools if known not in dist.distributed_c10d._world.pg_map]:
        del _pools[ended]
    pool = _pools.get(group)
    if pool is None:
        pool = _pools[group] = Pool(group)
    return pool


def destroy_buffers() -> None:
    """Free the memory of all groups, also of buffers made without explicitly_destroy. Collective.

    A later operation of a buffer makes new memory. Handles of earlier dispatches are of no use then.
    """
    with ExitStack() as stack:
        for pool in _pools.values():
            stack.callback(pool.destroy)


def _own_settings() -> Settings:
    return Settings(envs.deep_ep_exact(), envs.max_tokens_per_rank())


@outside_graphs
class PoolUser:
    """What Buffer and ElasticBuffer share: the pool of their group, and a stream."""

    stands_for: str  # the class of DeepEP whose programs use it

    def __init__(self, group: ProcessGroup | DeviceMesh, explicitly_destroy: bool):
        group = process_group(group)
        self._pool: Pool | None = pool_of(group)
        self._pool.to_destroy += explicitly_destroy
        self._comm = CommStream()
        self.group, self.explicitly_destroy = group, explicitly_destroy

    def destroy(self) -> None:
        """Free the memory with the last buffer of the group, if all were made with explicitly_destroy. Collective."""
        if not self.explicitly_destroy:
            checks.refuse("destroy() needs a buffer made with explicitly_destroy=True")
        pool = self._living_pool()
        self._pool = None
        pool.to_destroy -= 1
        if not pool.to_destroy and not pool.is_kept:
            pool.destroy()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the stream of asynchronous operations, and of those with previous_event."""
        return self._comm.stream()

    def _pool_for(self, num_sms: int | None, timeout_s: float | None = None) -> Pool:
        """Return the pool, set up for engine buffers that the next operation makes. Raise late mistakes."""
        pool = self._living_pool()
        pool.serves = f"deep_ep ({self.stands_for})"
        pool.is_kept |= not self.explicitly_destroy
        pool.raise_late(ends=True)
        pool.num_sms, pool.timeout_s = num_sms, timeout_s
        return pool

    def _living_pool(self) -> Pool:
        """Return the pool. ValueError after destroy()."""
        if self._pool is None:
            checks.refuse("buffer was destroyed")
        return self._pool


@atexit.register
def _destroy_all() -> None:
    for pool in list(_pools.values()):
        pool.destroy()
