"""Handles of dispatches: tuples of tensors like DeepEP's, which carry plans of our engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.config import NVL_PEERS, num_rdma_ranks, say_once
from ep_dispatcher.integrations.deep_ep.layout import routing_of_ranks
from ep_dispatcher.integrations.deep_ep.pool import Key, Pool
from ep_dispatcher.integrations.deep_ep.rows import Kind, Rows

_OTHER_WEIGHTS = "topk_weights: other than 0 where recv_topk_idx is -1, which the engine would leave out of the sum; "
_OTHER_WEIGHTS += "set EP_DISPATCHER_DEEP_EP_EXACT=1, which costs one small operation more in every such combine"
_UNCHANGED = "them while recv_topk_idx of the dispatch is as it was, or with EP_DISPATCHER_DEEP_EP_EXACT=1"
_SHORT, _LONG = 6, 10  # items of a handle up to 8 ranks, and with more
_META_BYTES = 8  # of a row of recv_src_meta


@cache
def _largest(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor that is made in inference mode cannot be saved for a backward
        return torch.full((1,), torch.iinfo(dtype).max, dtype=dtype, device=device)


def missing(*shape: int, dtype: torch.dtype = torch.int32, device: torch.device) -> Tensor:
    """Return an item that this engine does not have: every element is the largest number. It takes no memory.

    As an index it is an IndexError. -1 would be the last row, and in DeepEP it stands for "not sent".
    """
    return _largest(dtype, device).expand(shape)


def say_missing(items: str) -> None:
    """Say once which items a handle would have with the switch: a tensor cannot raise an error when it is read."""
    how = "EP_DISPATCHER_DEEP_EP_EXACT=1 gives DeepEP's values"
    say_once(f"handle: every element of {items} is the largest number; {how}")


def carried_by(handle: object, item: int) -> object:
    """Return the object that an item carries, of a handle or a tuple or list of its items. None for anything else."""
    if not isinstance(handle, (tuple, list)) or not -len(handle) <= item < len(handle):
        return None
    return getattr(handle[item], "carried", None)


class Plans:
    """The routing of one dispatch, and its plans in the buffers of the pool, by kind of rows.

    DeepEP's handle serves rows of any size. Ours makes a plan for another kind by a dispatch with ``is_token_in_rank``.
    It is made before the dispatch, and ``begin`` completes it.
    """

    def __init__(self, pool: Pool, is_token_in_rank: Tensor, max_tokens: int, max_rows: int | None):
        self.pool = pool
        self.is_token_in_rank = is_token_in_rank
        self.gathered: list[Tensor] = []  # items of the handle that an operation has made
        self._max_tokens, self._max_rows = max_tokens, max_rows

    @classmethod
    def again(cls, pool: Pool, is_token_in_rank: Tensor, num_rows: int) -> Plans:
        """Return plans of a routing that was dispatched before. An operation plans again for its kind of rows."""
        plans = cls(pool, is_token_in_rank, pool.most_tokens(), num_rows)
        plans.num_tokens, plans.num_rows = len(is_token_in_rank), num_rows
        plans._topk_idx = plans._version = plans._weights_of = None
        plans._known = {}
        return plans

    def begin(self, key: Key, buffer: ep.Buffer, out: ep.DispatchOutput) -> None:
        """Take the plan that the dispatch has made. No other method works before."""
        handle, topk_idx = out.handle, out.topk_idx
        assert topk_idx is not None  # in rank layout
        is_inference = topk_idx.is_inference()
        # [num_recv_tokens, num_topk], -1 for experts of other ranks. The program has it too, and may change it. The
        # version shows changes, but tensors of torch.inference_mode() have none.
        self._topk_idx: Tensor | None = topk_idx.clone() if is_inference else topk_idx
        self._version: int | None = None if is_inference else topk_idx._version
        self.num_tokens, self.num_rows = handle.num_tokens, handle.num_rows
        self._known: dict[Kind, tuple[ep.Buffer, ep.Handle]] = {key.kind: (buffer, handle)}
        # A combine returns weights with rows of this kind, this many for each; none without topk_idx.
        self._weights_of: tuple[Kind, int] | None = None if out.topk_weights is None else (key.kind, key.num_topk)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that operations read."""
        read = [self.is_token_in_rank, *self.gathered, *(handle.plan for _, handle in self._known.values())]
        return read if self._topk_idx is None else [self._topk_idx, *read]

    def dispatch(self, rows: Rows) -> Tensor | tuple[Tensor, Tensor]:
        """Return the rows that this rank receives by the same routing."""
        if rows.kind in self._known:
            buffer, handle = self._known[rows.kind]
            return buffer.dispatch(rows.data, handle=handle).x
        buffer, idx, options = self._new_plan(rows.kind)
        out = buffer.dispatch(rows.data, idx, **options)
        self._known[rows.kind] = buffer, out.handle
        return out.x

    def combine(self, y: Tensor, topk_weights: Tensor | None = None) -> ep.CombineOutput:
        kind = Kind(y.shape[1], y.dtype)
        if kind not in self._known:
            buffer, idx, options = self._new_plan(kind)
            self._known[kind] = buffer, buffer.plan(idx, **options)
        buffer, handle = self._known[kind]
        return buffer.combine(y, handle, topk_weights=topk_weights)

    def summable(self, topk_weights: Tensor) -> Tensor:
        """Return the weights for a combine. It ignores those of experts on other ranks, so these must be 0.

        Otherwise raise. On a GPU the host does not wait to see them; there all weights of the row become NaN.
        """
        # Not in the dispatch: most dispatches have no such combine, and each operation costs the host 10 us.
        assert self._topk_idx is not None  # of a plan that takes weights
        if self._version is not None and self._topk_idx._version != self._version:
            checks.fail("topk_weights", "weights after a change of recv_topk_idx in place", _UNCHANGED)
        is_elsewhere = self._topk_idx < 0
        wrong = is_elsewhere.logical_and(topk_weights).any(1)
        if topk_weights.is_cuda:
            return topk_weights.masked_fill(wrong[:, None], float("nan"))
        if (wrong & ~is_elsewhere.all(1)).any():  # a row without experts here is unused
            raise NotImplementedError(_OTHER_WEIGHTS)
        return topk_weights

    def takes_weights(self, kind: Kind, num_topk: int) -> bool:
        """Return whether a combine of rows of this kind can return so many weights for each row."""
        return self._weights_of == (kind, num_topk)

    def _new_plan(self, kind: Kind) -> tuple[ep.Buffer, Tensor, dict[str, Any]]:
        """Return the buffer for rows of another kind, the routing in it, and how to plan it."""
        num_ranks = self.pool.group.size()
        sized = self.pool.sized(Key(kind, num_ranks, num_ranks), self._max_tokens)
        return sized.buffer, routing_of_ranks(self.is_token_in_rank), dict(layout="rank", max_recv_rows=self._max_rows)


class Items:
    """Makes the handle of a dispatch: a tuple with the shapes and dtypes of DeepEP's, 6 items up to 8 ranks, else 10.

        up to 8 ranks: rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx,
                       is_token_in_rank, send_head
        else:          is_token_in_rank, rdma_channel_prefix_matrix, gbl_channel_prefix_matrix,
                       recv_rdma_channel_prefix_matrix, recv_rdma_rank_prefix_sum, recv_gbl_channel_prefix_matrix,
                       recv_gbl_rank_prefix_sum, recv_src_meta, send_rdma_head, send_nvl_head

    is_token_in_rank is always there. rank_prefix_matrix int32 [num_ranks, num_ranks] (tokens of ranks 0 to i for rank
    r) is there if it was gathered. All others are ``missing``; send_nvl_head has no rows, because only DeepEP's queues
    count them.

    The last item carries the plans, as an attribute. Everything but the number of rows is known before the dispatch.
    """

    def __init__(self, in_rank: Tensor, num_channels: int, carried: object):
        (num_tokens, num_ranks), device = in_rank.shape, in_rank.device
        channels = missing(num_ranks, num_channels, device=device)
        if num_ranks <= NVL_PEERS:
            ranks, head = missing(num_ranks, num_ranks, device=device), missing(num_tokens, num_ranks, device=device)
            self._items: list[Any] = [ranks, channels, channels, None, in_rank, head]
        else:
            num_nodes = num_rdma_ranks(num_ranks)
            node_channels = missing(num_nodes, num_channels, device=device)
            sums = missing(num_nodes, device=device), missing(num_ranks, device=device)
            heads = missing(num_tokens, num_nodes, device=device), missing(0, NVL_PEERS, device=device)
            self._items = [in_rank, node_channels, channels, node_channels, sums[0], channels, sums[1], None, *heads]
        self._items[-1].carried = carried

    def handle(self, num_rows: int, prefix: Tensor | None = None) -> tuple[Tensor, ...]:
        items = self._items
        if len(items) == _SHORT:
            items[0] = items[0] if prefix is None else prefix
            items[3] = missing(num_rows, device=items[-1].device)
        else:
            items[7] = missing(num_rows, _META_BYTES, dtype=torch.uint8, device=items[-1].device)
        return tuple(items)


def plans_of(handle: object, pool: Pool) -> Plans:
    """Return the plans of a handle, also of one whose tensors came back as copies.

    Saved tensors are the same objects, and carry their plans. Behind a hook such as ``save_on_cpu`` they are copies.
    For those the routing and the number of rows are enough to plan again, on all ranks alike.
    """
    plans = carried_by(handle, -1)
    if isinstance(plans, Plans):
        return plans
    if _is_like_a_handle(handle, pool.group.size()):
        in_rank, rows = _places(handle)
        return Plans.again(pool, handle[in_rank], len(handle[rows]))
    checks.fail("handle", type(handle).__name__, "the handle of a dispatch, or a tuple or list of its items")


def _places(handle: Sequence) -> tuple[int, int]:
    """Return the places of is_token_in_rank, and of an item with a row for each received one."""
    return (4, 3) if len(handle) == _SHORT else (0, 7)


def _is_like_a_handle(handle: object, num_ranks: int) -> TypeGuard[Sequence[Tensor]]:
    """Return whether these are tensors with the shapes and dtypes of a handle of so many ranks."""
    length = _SHORT if num_ranks <= NVL_PEERS else _LONG
    if not isinstance(handle, (tuple, list)) or len(handle) != length:
        return False
    if not all(isinstance(item, Tensor) and item.dim() for item in handle):
        return False
    in_rank, rows = (handle[place] for place in _places(handle))
    if in_rank.dtype != torch.bool or in_rank.shape[1:] != (num_ranks,):
        return False
    like = Items(in_rank, handle[1].shape[-1], None).handle(len(rows))
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(handle, like))
