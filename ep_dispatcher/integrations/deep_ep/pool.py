"""The engine's buffers behind ``deep_ep.Buffer``: one for each kind of rows and routing, made when needed."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher import checks, envs
from ep_dispatcher.integrations.agree import all_reduce
from ep_dispatcher.integrations.deep_ep.config import say_once
from ep_dispatcher.integrations.deep_ep.events import CommStream, outside_graphs
from ep_dispatcher.integrations.deep_ep.rows import Kind
from ep_dispatcher.topology import process_group, registered_group


class Key(NamedTuple):
    kind: Kind
    num_experts: int
    num_topk: int


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
        assert receive is not None  # as it was asked for

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
    """The buffers of one group. Every ``deep_ep.Buffer`` of the group and every handle keeps it alive.

    A handle of DeepEP does not belong to one buffer, so all deep_ep.Buffers of a group share the engine's buffers.
    Their tokens per rank are not known when a deep_ep.Buffer is made. They are EP_DISPATCHER_MAX_TOKENS_PER_RANK, or
    given by the arguments of an operation, or the ranks agree on them before every dispatch. A buffer that is too small
    now stays for its handles.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.users: WeakSet = WeakSet()  # the deep_ep.Buffers that are not destroyed
        self.num_sms: int | None = None  # of buffers made from now on; timeout_s likewise
        self.timeout_s: float | None = None
        self._made: list[ep.Buffer] = []
        self._buffers: dict[Key, list[ep.Buffer]] = {}  # the last is in use
        # By tokens per rank, and whether they have masks.
        self._in_turn: dict[tuple[Key, int, bool], list[HookedBuffer]] = {}
        self._masked: set[int] = set()  # ranks masked by hand
        self._no_masks: str | None = None  # why buffers have no masks, though enable_shrink asks for them

    def sized(self, key: Key, max_tokens: int) -> ep.Buffer:
        """Return the buffer for ``max_tokens``, the same on all ranks. Collective if it must be made."""
        made = self._buffers.setdefault(key, [])
        largest = made[-1].config.max_tokens_per_rank if made else 0
        if largest < max_tokens:
            made.append(self._make(key, max(max_tokens, 2 * largest)))  # bounds the memory of all old ones together
        return made[-1]

    def most_tokens(self) -> int:
        """Return tokens per rank that were enough for every dispatch so far, the same on all ranks."""
        sizes = [buffer.config.max_tokens_per_rank for made in self._buffers.values() for buffer in made]
        if not sizes:
            checks.fail("handle", "one of buffers that are destroyed", "a handle of this group's living buffers")
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
        return both[turn[0] % 2]

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
        return buffer

    def _make_hooked(self, key: Key, max_tokens: int, masks: bool) -> HookedBuffer:
        try:
            buffer = self._make(key, max_tokens, mask_late_ranks=masks)
        except ValueError as error:
            if not (masks and str(error).startswith("mask_late_ranks: ")):
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
            checks.fail("rank_to_mask", f"{rank}, which is this rank", "another one")
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
        given = envs.max_tokens_per_rank()
        if given is not None:
            most, source = given, f"EP_DISPATCHER_MAX_TOKENS_PER_RANK={given}"
        elif num_worst_tokens:  # no host may wait; in the worst case one rank receives all tokens of all ranks
            most = -(-num_worst_tokens // self.group.size())
            source = f"num_worst_tokens / ranks = {most}; or set EP_DISPATCHER_MAX_TOKENS_PER_RANK"
        else:
            agreed = torch.tensor(num_tokens, dtype=torch.int64, device="cpu")
            all_reduce(agreed, dist.ReduceOp.MAX, self.group, about="agree on the number of tokens")
            return self.sized(key, max(1, int(agreed)))
        if num_tokens > most:
            checks.fail("x", f"{num_tokens} tokens", f"up to {source}")
        return self.sized(key, most)

    def destroy(self) -> None:
        """Destroy all buffers, then raise late errors of their last operations. Collective."""
        with ExitStack() as stack:
            for buffer in self._made:
                stack.callback(buffer.destroy)
            for known in (self._made, self._buffers, self._in_turn, self._masked):
                known.clear()
            self._no_masks = None


_pools: WeakValueDictionary[ProcessGroup, Pool] = WeakValueDictionary()


def pool_of(group: ProcessGroup) -> Pool:
    group = registered_group(group)
    pool = _pools.get(group)
    if pool is None:
        pool = _pools[group] = Pool(group)
    return pool


@outside_graphs
class PoolUser:
    """What Buffer and ElasticBuffer share: the pool of their group, and a stream."""

    def __init__(self, group: ProcessGroup | DeviceMesh, explicitly_destroy: bool):
        group = process_group(group)
        self._pool: Pool | None = pool_of(group)
        self._pool.users.add(self)
        self._comm = CommStream()
        self.group, self.explicitly_destroy = group, explicitly_destroy

    def destroy(self) -> None:
        """Free the memory with the last buffer of the group. Collective."""
        if not self.explicitly_destroy:
            checks.fail("destroy", "a buffer made without explicitly_destroy", "one made with explicitly_destroy=True")
        pool = self._pool_for(None)
        self._pool = None
        pool.users.discard(self)
        if not pool.users:
            pool.destroy()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the stream of asynchronous operations, and of those with previous_event."""
        return self._comm.stream()

    def _pool_for(self, num_sms: int | None, timeout_s: float | None = None) -> Pool:
        """Return the pool, set up for engine buffers that the next operation makes. ValueError after destroy()."""
        if self._pool is None:
            checks.fail("buffer", "one that was destroyed", "a living buffer")
        self._pool.num_sms, self._pool.timeout_s = num_sms, timeout_s
        return self._pool


@atexit.register
def _destroy_all() -> None:
    for pool in list(_pools.values()):
        pool.destroy()
