"""The engine's buffers behind DeepEP's classes: one for each row format and size of routing, made when needed."""

from __future__ import annotations

import atexit
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher import checks, envs
from ep_dispatcher.errors import copy_error
from ep_dispatcher.gather import Gather
from ep_dispatcher.integrations.collectives import all_reduce
from ep_dispatcher.integrations.deep_ep.config import warn_once
from ep_dispatcher.integrations.deep_ep.events import CommStream, outside_graphs
from ep_dispatcher.integrations.deep_ep.late_errors import LateErrors
from ep_dispatcher.integrations.deep_ep.redundant_experts import RedundantExperts
from ep_dispatcher.integrations.deep_ep.row_conversion import RowFormat
from ep_dispatcher.integrations.messages import announce
from ep_dispatcher.memory import default_sms
from ep_dispatcher.topology import GroupReference, process_group, registered_group

_LEFT = ". The other ranks have been told that this rank has left the operation: destroy() this buffer"
_OUT_OF_STEP = (
    ". The device found it after other operations had begun, so the ranks may be out of step: destroy() this buffer"
)


class BufferKey(NamedTuple):
    row_format: RowFormat
    num_experts: int
    num_topk: int

    def digest(self) -> int:
        """Return a number that is the same on all ranks that have the same key."""
        hidden, dtype = self.row_format
        return zlib.crc32(repr((hidden, str(dtype), self.num_experts, self.num_topk)).encode())


class Settings(NamedTuple):
    """Environment variables that decide which operations run, and so have to be the same on all ranks."""

    exact: bool
    max_tokens: int | None


@dataclass
class Turns:
    """The number of operations of two buffers that take turns."""

    count: int = 0


class DecodeBuffer:
    """A buffer of our engine in decode layout, and the hook of its last operation until that is called."""

    def __init__(self, buffer: ep.Buffer, has_masks: bool):
        self.buffer, self.has_masks = buffer, has_masks
        self.turns = Turns()  # shared by the two buffers of BufferPool.next_decode_buffer
        self._hook: Callable[[], None] | None = None

    def ready(self) -> ep.Buffer:
        """Return the buffer for an operation. First complete the previous one, because only one may be under way."""
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
        """Return a hook. Its first call receives and completes. In later calls the current stream waits for that."""
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


class BufferPool:
    """The buffers of one group, from the first ``deep_ep.Buffer`` of the group to the end of the group.

    A handle of DeepEP does not belong to one buffer, so all deep_ep.Buffers of a group share the engine's buffers.
    Their tokens per rank are not known when a deep_ep.Buffer is made. They are EP_DISPATCHER_MAX_TOKENS_PER_RANK, or
    given by the arguments of an operation, or the ranks agree on them before every dispatch. A buffer that has become
    too small stays for its handles.

    Making a buffer is collective, so all ranks have to make the same decisions. No decision here depends on which
    objects Python has freed, because a reference cycle may keep an object for longer on one rank than on another.
    """

    def __init__(self, group: ProcessGroup):
        self._group_reference = GroupReference(group)
        self.framework = "deep_ep"  # the framework whose tokens its buffers carry
        self.num_to_destroy = 0  # deep_ep.Buffers with explicitly_destroy whose destroy() has not been called
        self.is_permanent = False  # whether a deep_ep.Buffer without explicitly_destroy is in use
        self._settings: Settings | None = None  # those that all ranks have compared
        self.num_sms: int | None = None  # of buffers made from now on; timeout_s likewise
        self.timeout_s: float | None = None
        self.late = LateErrors()
        self._failure: Callable[[], Exception] | None = None  # makes the error that ended the use of all buffers
        self._made: list[ep.Buffer] = []
        self._redundant_experts: list[RedundantExperts] = []
        self._num_redundant_experts = 0  # attempts to make some
        self._buffers: dict[BufferKey, list[ep.Buffer]] = {}  # the last buffer of a list is in use
        # Pairs of buffers that take turns. The key has their tokens per rank, and whether they have masks.
        self._decode_buffers: dict[tuple[BufferKey, int, bool], list[DecodeBuffer]] = {}
        self._masked: set[int] = set()  # ranks masked by hand
        self._why_no_masks: str | None = None  # why buffers have no masks although enable_shrink asks for them

    @property
    def group(self) -> ProcessGroup:
        """The group of the ranks. ValueError after destroy_process_group."""
        return self._group_reference.group()

    def settings(self, num_worst_tokens: int = 0) -> Settings:
        """Return the settings of this rank. Collective at the first use, and after a change of one of them.

        In a collective call ranks compare the settings and num_worst_tokens. If they differ, all ranks raise the same
        ValueError.
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
                checks.require_same(everyone, none="none")
        self._settings = _own_settings()
        return self._settings

    def refuse(self, error: Exception) -> NoReturn:
        """Raise an error that depends on this rank's data, so other ranks may be in the operation already.

        They learn at once that this rank has left. Call it only after the buffers of the operation have been made.
        Until destroy() every operation of this rank raises the error again.
        """
        self._end_use(partial(copy_error, copy_error(error), _LEFT))
        raise error

    def _end_use(self, failure: Callable[[], Exception]) -> None:
        """End the use of all buffers, so that other ranks learn that this rank has left."""
        self._failure = failure
        for buffer in self._made:
            if not buffer.is_destroyed:
                buffer.live_engine().health.end(failure)

    def buffer_for(self, key: BufferKey, max_tokens: int) -> ep.Buffer:
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
        self._warn_of_older_settings(made[-1], "rank")
        return made[-1]

    def largest_size(self) -> int:
        """Return a number of tokens per rank that was enough for every dispatch so far. It is the same on all ranks."""
        sizes = [buffer.config.max_tokens_per_rank for made in self._buffers.values() for buffer in made]
        if not sizes:
            checks.refuse("handle is of buffers that are destroyed")
        return max(sizes)

    def next_decode_buffer(self, key: BufferKey, max_tokens: int, masks: bool) -> DecodeBuffer:
        """Return one of two buffers of exactly ``max_tokens``, in turn. As in DeepEP, two hooks may be pending.

        Combines count as turns too, as in DeepEP (see LowLatencyPlan.combine). So a layer does not change whose turn it
        is, and a rank that replays a CUDA graph stays in step with ranks that replay none, or one of another size.

        The first call makes both buffers, and is collective. Later calls may be in a CUDA graph. masks: give the
        buffers masks if possible
        """
        both = self._decode_buffers.get((key, max_tokens, masks))
        if both is None:
            both = self._decode_buffers[key, max_tokens, masks] = [
                self._make_decode_buffer(key, max_tokens, masks) for _ in range(2)
            ]
            both[1].turns = both[0].turns
        turns = both[0].turns
        turns.count += 1
        self._warn_of_older_settings(both[0].buffer, "decode")
        return both[turns.count % 2]

    def _warn_of_older_settings(self, buffer: ep.Buffer, layout: str) -> None:
        """Warn once about settings that have changed since this buffer was made: the buffer keeps the old ones."""
        if self.num_sms is None and self.timeout_s is None:
            return
        sms, timeout_s = default_sms(buffer.config.num_sms)[layout], buffer.config.timeout_s
        if self.num_sms not in (None, sms):
            warn_once(f"num_sms is {self.num_sms}; buffers that were made before keep {sms} multiprocessors")
        if self.timeout_s not in (None, timeout_s):
            warn_once(
                f"num_gpu_timeout_secs is {self.timeout_s}; buffers that were made before keep {timeout_s:g} seconds"
            )

    def _make(self, key: BufferKey, max_tokens: int, mask_late_ranks: bool = False) -> ep.Buffer:
        buffer = ep.Buffer(
            self.group,
            hidden=key.row_format.hidden,
            dtype=key.row_format.dtype,
            num_experts=key.num_experts,
            num_topk=key.num_topk,
            max_tokens_per_rank=max_tokens,
            num_sms=self.num_sms,
            timeout_s=self.timeout_s,
            mask_late_ranks=mask_late_ranks,
        )
        self._made.append(buffer)
        announce(self.framework, buffer)
        if buffer.engine == "cuda":
            self.late.prepare(torch.device("cuda", torch.cuda.current_device()))
        return buffer

    def make_redundant_experts(self, buffer: ep.Buffer, num_bytes: int, planned: str) -> RedundantExperts:
        """Make memory for redundant experts on all ranks. The caller frees it, or destroy_buffers() does."""
        number = self._num_redundant_experts
        self._num_redundant_experts += 1  # also if it fails: names are used once
        made = RedundantExperts(buffer, num_bytes, planned, number)
        self._redundant_experts.append(made)
        return made

    def raise_late_error(self, *, ends: bool) -> None:
        """Raise an error of this rank that the device has found since the last call. Never wait.

        ends: whether other ranks may be in an operation that this rank now refuses. Then the use of all buffers ends,
        and the others learn that this rank has left. Until destroy() every operation raises the same error
        """
        error = self.late.take()
        if error is not None and not ends:
            raise error
        if error is not None and self._failure is None:
            self._end_use(partial(copy_error, error, _OUT_OF_STEP))
        if self._failure is not None:
            raise self._failure()

    def _raise_last_error(self, has_failed: bool) -> None:
        """Raise a late error that no operation has raised, unless the use of the buffers has ended with an error."""
        self.late.synchronize()
        error = self.late.take()
        if error is not None and not has_failed:
            raise error

    def _make_decode_buffer(self, key: BufferKey, max_tokens: int, masks: bool) -> DecodeBuffer:
        try:
            buffer = self._make(key, max_tokens, mask_late_ranks=masks)
        except ValueError as error:
            if not (masks and str(error).startswith("mask_late_ranks is True ")):
                raise
            self._why_no_masks = f"the engine has no masks here. {error}"
            warn_once(f"enable_shrink: a rank that does not answer is a PeerTimeoutError, because {self._why_no_masks}")
            return DecodeBuffer(self._make(key, max_tokens), has_masks=False)
        if masks:
            for rank in self._masked:
                buffer.mask_rank(rank)
        return DecodeBuffer(buffer, masks)

    def mask_rank(self, rank: int) -> None:
        """Mask a rank by hand in all buffers that have masks, also in later ones."""
        if self._why_no_masks is not None:
            raise NotImplementedError(f"low_latency_update_mask_buffer: {self._why_no_masks}")
        if rank == self.group.rank():
            checks.refuse(f"rank_to_mask is {rank}, which is this rank: a rank cannot mask itself")
        self._masked.add(rank)
        for hooked in self._with_masks():
            hooked.ready().mask_rank(rank)

    def merge_masks_into(self, status: Tensor) -> None:
        """Set int32 [num_ranks] to 1 for every rank that is masked in any buffer. This calls no hook."""
        for rank in self._masked:
            status[rank] = 1
        for hooked in self._with_masks():
            torch.maximum(status, hooked.buffer.mask.to(status.device), out=status)

    def unmask(self) -> None:
        """Unmask all ranks in all buffers. Collective."""
        for hooked in self._with_masks():
            hooked.unmask()
        self._masked.clear()

    def _with_masks(self) -> list[DecodeBuffer]:
        return [hooked for both in self._decode_buffers.values() for hooked in both if hooked.has_masks]

    def buffer_for_dispatch(self, key: BufferKey, num_tokens: int, num_worst_tokens: int) -> ep.Buffer:
        """Return the buffer for a dispatch of ``num_tokens`` by this rank. Other ranks may dispatch other numbers."""
        given = self.settings(num_worst_tokens).max_tokens
        if given is not None:
            most, source = given, f"EP_DISPATCHER_MAX_TOKENS_PER_RANK={given}"
        elif num_worst_tokens:  # no host may wait; in the worst case one rank receives all tokens of all ranks
            most = -(-num_worst_tokens // self.group.size())
            source = f"num_worst_tokens / ranks = {most}; or set EP_DISPATCHER_MAX_TOKENS_PER_RANK"
        else:
            return self.buffer_for(key, max(1, self._agree_on_tokens(key, num_tokens)))
        buffer = self.buffer_for(key, most)
        if num_tokens > most:
            self.refuse(ValueError(f"x has {num_tokens} tokens on rank {self.group.rank()}, but at most {source}"))
        return buffer

    def _agree_on_tokens(self, key: BufferKey, num_tokens: int) -> int:
        """Return the most tokens of any rank. Raise ValueError on all ranks if their keys differ."""
        digest = key.digest()  # if all ranks have the same one, its minimum is its maximum
        agreed = torch.tensor([num_tokens, digest, -digest], dtype=torch.int64, device="cpu")
        all_reduce(agreed, dist.ReduceOp.MAX, self.group, about="agree on the number of tokens")
        most, largest, least = agreed.tolist()
        if largest != -least:
            raise ValueError(
                f"x, topk_idx: this rank gave rows of {key.row_format.hidden} {key.row_format.dtype} to "
                f"{key.num_experts} experts, {key.num_topk} for a token, and another rank gave rows of another size or "
                "dtype, another number of experts or choices, or no topk_idx; all ranks must give the same"
            )
        return most

    def destroy(self) -> None:
        """Destroy all buffers, then raise late errors of their last operations. Collective."""
        self.is_permanent = False
        with ExitStack() as stack:
            stack.callback(self._raise_last_error, self._failure is not None)
            for buffer in self._made:
                stack.callback(buffer.destroy)
            for redundant in self._redundant_experts:
                stack.callback(redundant.free)
            for known in (self._redundant_experts, self._made, self._buffers, self._decode_buffers, self._masked):
                known.clear()
            self._why_no_masks = self._failure = self._settings = None


_pools: WeakKeyDictionary[ProcessGroup, BufferPool] = WeakKeyDictionary()  # of groups that are not destroyed


def pool_of(group: ProcessGroup) -> BufferPool:
    group = registered_group(group)
    for ended in [known for known in list(_pools) if known not in dist.distributed_c10d._world.pg_map]:
        del _pools[ended]
    pool = _pools.get(group)
    if pool is None:
        pool = _pools[group] = BufferPool(group)
    return pool


def destroy_buffers() -> None:
    """Free the memory of all groups, also of buffers made without explicitly_destroy. Collective.

    A later operation of a buffer makes new memory. Handles of earlier dispatches are invalid then.
    """
    with ExitStack() as stack:
        for pool in list(_pools.values()):
            stack.callback(pool.destroy)


def _own_settings() -> Settings:
    return Settings(envs.deep_ep_exact(), envs.max_tokens_per_rank())


@outside_graphs
class PoolUser:
    """What Buffer and ElasticBuffer share: the pool of their group, and a stream."""

    deep_ep_class: str  # the name of the class of DeepEP that it stands for

    def __init__(self, group: ProcessGroup | DeviceMesh, explicitly_destroy: bool):
        group = process_group(group)
        self._pool: BufferPool | None = pool_of(group)
        self._pool.num_to_destroy += explicitly_destroy
        self._comm = CommStream()
        self.group, self.explicitly_destroy = group, explicitly_destroy

    def destroy(self) -> None:
        """Free the memory with the last buffer of the group, if all were made with explicitly_destroy. Collective."""
        if not self.explicitly_destroy:
            checks.refuse("destroy() needs a buffer made with explicitly_destroy=True")
        pool = self._require_pool()
        self._pool = None
        pool.num_to_destroy -= 1
        if not pool.num_to_destroy and not pool.is_permanent:
            pool.destroy()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the stream of asynchronous operations, and of those with previous_event."""
        return self._comm.stream()

    def _pool_for(self, num_sms: int | None, timeout_s: float | None = None) -> BufferPool:
        """Return the pool, with settings for buffers that the next operation makes. Raise late errors first."""
        pool = self._require_pool()
        pool.framework = f"deep_ep ({self.deep_ep_class})"
        pool.is_permanent |= not self.explicitly_destroy
        pool.raise_late_error(ends=True)
        pool.num_sms, pool.timeout_s = num_sms, timeout_s
        return pool

    def _require_pool(self) -> BufferPool:
        """Return the pool. Raise ValueError after destroy()."""
        if self._pool is None:
            checks.refuse("buffer was destroyed")
        return self._pool


@atexit.register
def _destroy_all() -> None:
    for pool in list(_pools.values()):
        pool.destroy()
