"""Handles of ``deep_ep.Buffer``: tuples of tensors like DeepEP's. One tensor carries the plans of our engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.buffer_pool import BufferKey, BufferPool
from ep_dispatcher.integrations.deep_ep.config import NVL_PEERS, logger, num_rdma_ranks
from ep_dispatcher.integrations.deep_ep.layout import routing_of_ranks, version_of
from ep_dispatcher.integrations.deep_ep.row_conversion import RowFormat

_OTHER_WEIGHTS = (
    "topk_weights: not 0 where recv_topk_idx is -1, and the engine would leave these weights out of the sum; set "
    "EP_DISPATCHER_DEEP_EP_EXACT=1, which costs one more small operation in every such combine"
)
_UNCHANGED = "leave it as the dispatch returned it, or set EP_DISPATCHER_DEEP_EP_EXACT=1"
_SHORT, _LONG = 6, 10  # the number of items of a handle with up to 8 ranks, and with more
_META_BYTES = 8  # of a row of recv_src_meta


@cache
def _largest(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor that is made in inference mode cannot be saved for a backward
        return torch.full((1,), torch.iinfo(dtype).max, dtype=dtype, device=device)


@lru_cache(256)  # each takes the host a microsecond
def placeholder(*shape: int, dtype: torch.dtype = torch.int32, device: torch.device) -> Tensor:
    """Return a stand-in for an item that this engine does not have. Every element is the largest number of its dtype.

    It takes no memory. A program that uses it as an index gets an IndexError. With -1 it would silently get the last
    row; in DeepEP -1 also stands for "not sent".
    """
    return _largest(dtype, device).expand(shape)


@cache
def log_placeholders(items: str) -> None:
    """Log once, as information, which items of a handle are placeholders without the switch.

    This is not a warning, because most programs read none of them. Those that do use them as indices, and fail there.
    """
    logger.info(
        "ep_dispatcher as deep_ep: the engine does not fill %s of a handle. Every element is the largest number, which "
        "no index can be; EP_DISPATCHER_DEEP_EP_EXACT=1 gives DeepEP's values",
        items,
    )


def attach(item: Tensor, value: object) -> Tensor:
    """Return a view of an item, with an object attached to it. The item itself may belong to many handles."""
    view: Any = item.view_as(item)
    view.attached = value
    return view


def attached_to(handle: object, item: int) -> object:
    """Return the object attached to an item of a handle, or of a tuple or list of its items; None if there is none."""
    if not isinstance(handle, (tuple, list)) or not -len(handle) <= item < len(handle):
        return None
    return getattr(handle[item], "attached", None)


class RoutingPlans:
    """The plans of one routing, by row format and layout. The first operation of each makes its plan.

    A handle of DeepEP serves rows of any size, but a plan of ours serves only the rows of its buffer.
    """

    def __init__(self, pool: BufferPool, max_tokens: int):
        self._pool, self._max_tokens = pool, max_tokens
        self._plans: dict[tuple[RowFormat, str], tuple[ep.Buffer, ep.Handle]] = {}

    def routing(self, layout: str) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the topk_idx of a new plan, its number of experts, and other arguments of a dispatch that makes it."""
        raise NotImplementedError

    def dispatch(
        self, row_format: RowFormat, rows: Any, topk_weights: Tensor | None = None, layout: str = "rank"
    ) -> ep.DispatchOutput:
        buffer, how = self._find(row_format, layout)
        out = buffer.dispatch(rows, topk_weights=topk_weights, **how)
        if "handle" not in how:
            self._plans[row_format, layout] = buffer, out.handle
        return out

    def combine(self, y: Tensor, topk_weights: Tensor | None = None, layout: str = "rank") -> ep.CombineOutput:
        row_format = RowFormat(y.shape[1], y.dtype)
        buffer, how = self._find(row_format, layout)
        if "handle" not in how:
            how = dict(handle=buffer.plan(**how))
            self._plans[row_format, layout] = buffer, how["handle"]
        return buffer.combine(y, topk_weights=topk_weights, **how)

    def _find(self, row_format: RowFormat, layout: str) -> tuple[ep.Buffer, dict[str, Any]]:
        """Return the buffer for a row format, and the arguments of a dispatch there: the plan, or else the routing."""
        known = self._plans.get((row_format, layout))
        if known is not None:
            return known[0], dict(handle=known[1])
        topk_idx, num_experts, options = self.routing(layout)
        buffer = self._pool.buffer_for(BufferKey(row_format, num_experts, topk_idx.shape[1]), self._max_tokens)
        return buffer, dict(topk_idx=topk_idx, layout=layout, **options)


class HandleState(RoutingPlans):
    """The state that a handle carries: the routing and its plans.

    The dispatch by topk_idx makes the first plan, which ``set_first_plan`` takes. Other plans are made from
    ``is_token_in_rank`` alone, which copies of a handle have too. max_rows: the rows of the dispatch, if no host waits
    for their number
    """

    def __init__(self, pool: BufferPool, is_token_in_rank: Tensor, max_tokens: int, max_rows: int | None):
        super().__init__(pool, max_tokens)
        self.is_token_in_rank, self._max_rows = is_token_in_rank, max_rows
        self.num_tokens, self.num_rows = len(is_token_in_rank), max_rows or 0
        self.rank_prefix: Tensor | None = None  # rank_prefix_matrix, if an operation has made it
        self._topk_idx: Tensor | None = None
        self._version = 0
        # The row format and the number of weights of the first plan, whose combine returns weights; None without
        # topk_idx.
        self._weights_format: tuple[RowFormat, int] | None = None

    def set_first_plan(self, key: BufferKey, buffer: ep.Buffer, out: ep.DispatchOutput) -> None:
        """Take the plan that the dispatch has made."""
        assert out.topk_idx is not None  # in rank layout
        # [num_recv_tokens, num_topk], -1 for experts of other ranks. The program has this tensor too, and may change
        # it. The version shows changes, but tensors made in torch.inference_mode() have none.
        self._topk_idx = out.topk_idx.clone() if out.topk_idx.is_inference() else out.topk_idx
        self._version = version_of(self._topk_idx)
        self.num_rows = out.handle.num_rows
        self._plans[key.row_format, "rank"] = buffer, out.handle
        self._weights_format = None if out.topk_weights is None else (key.row_format, key.num_topk)

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors that operations read or have made."""
        plans = [plan.plan for _, plan in self._plans.values()]
        return [self._topk_idx, self.is_token_in_rank, self.rank_prefix, *plans]

    def routing(self, layout: str) -> tuple[Tensor, int, dict[str, Any]]:
        in_rank = self.is_token_in_rank
        return routing_of_ranks(in_rank), in_rank.shape[1], dict(max_recv_rows=self._max_rows)

    def combine_with_weights(self, y: Tensor, topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the sums of rows, and the sums of their weights if these are given."""
        if topk_weights is None:
            return self.combine(y).x, None
        num_topk = topk_weights.shape[1]
        if not self._pool.settings().exact and self._weights_format == (RowFormat(y.shape[1], y.dtype), num_topk):
            out = self.combine(y, self._checked_weights(topk_weights))
            return out.x, out.topk_weights
        wide = torch.nn.functional.pad(topk_weights, (0, -num_topk % 4))  # rows of 16 bytes
        return self.combine(y).x, self.combine(wide).x[:, :num_topk].contiguous()

    def _checked_weights(self, topk_weights: Tensor) -> Tensor:
        """Return the weights for a combine, which ignores those of experts on other ranks, so these must be 0.

        If they are not, raise an error. On a GPU the host does not wait to see them. There all weights of the row
        become NaN instead.
        """
        # The dispatch does not prepare this, because most dispatches have no such combine, and each operation costs the
        # host 10 us.
        assert self._topk_idx is not None  # of a plan that takes weights
        if version_of(self._topk_idx) != self._version:
            checks.refuse(f"topk_weights cannot be combined after a change of recv_topk_idx in place: {_UNCHANGED}")
        is_elsewhere = self._topk_idx < 0
        wrong = is_elsewhere.logical_and(topk_weights).any(1)
        if topk_weights.is_cuda:
            return topk_weights.masked_fill(wrong[:, None], float("nan"))
        if (wrong & ~is_elsewhere.all(1)).any():  # a row without experts here is unused
            self._pool.refuse(NotImplementedError(_OTHER_WEIGHTS))
        return topk_weights


def make_items(in_rank: Tensor, num_channels: int) -> list[Any]:
    """Return the items of a handle, with the shapes and dtypes of DeepEP's: 6 up to 8 ranks, else 10.

        up to 8 ranks: rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx,
                       is_token_in_rank, send_head
        else:          is_token_in_rank, rdma_channel_prefix_matrix, gbl_channel_prefix_matrix,
                       recv_rdma_channel_prefix_matrix, recv_rdma_rank_prefix_sum, recv_gbl_channel_prefix_matrix,
                       recv_gbl_rank_prefix_sum, recv_src_meta, send_rdma_head, send_nvl_head

    All but is_token_in_rank are placeholders. ``set_num_rows`` adds recv_src_idx or recv_src_meta. send_nvl_head has no
    rows, because only DeepEP's queues count them.
    """
    (num_tokens, num_ranks), none = in_rank.shape, partial(placeholder, device=in_rank.device)
    channels, ranks = none(num_ranks, num_channels), none(num_ranks, num_ranks)
    if num_ranks <= NVL_PEERS:
        return [ranks, channels, channels, None, in_rank, none(num_tokens, num_ranks)]
    num_nodes = num_rdma_ranks(num_ranks)
    node_channels = none(num_nodes, num_channels)
    sums = node_channels, none(num_nodes), channels, none(num_ranks)
    return [in_rank, node_channels, channels, *sums, None, none(num_tokens, num_nodes), none(0, NVL_PEERS)]


def set_num_rows(items: list[Any], num_rows: int) -> None:
    """Set the item that has a row for each received row."""
    if len(items) == _SHORT:
        items[3] = placeholder(num_rows, device=items[-1].device)
    else:
        items[7] = placeholder(num_rows, _META_BYTES, dtype=torch.uint8, device=items[-1].device)


def plans_of(handle: object, pool: BufferPool) -> HandleState:
    """Return the plans of a handle, also of one whose tensors came back as copies.

    Tensors that autograd has saved are the same objects, so the plans are still attached. After a hook such as
    ``save_on_cpu`` they are copies. For copies the routing and the number of rows are enough to plan again, as all
    ranks then do.
    """
    plans = attached_to(handle, -1)
    if isinstance(plans, HandleState):
        return plans
    if _is_like_a_handle(handle, pool.group.size()):
        in_rank, rows = _item_indices(handle)
        return HandleState(pool, handle[in_rank], pool.largest_size(), len(handle[rows]))
    checks.fail(
        "handle", f"of type {type(handle).__name__}", "the handle of a dispatch, or a tuple or list of its items"
    )


def _item_indices(handle: Sequence) -> tuple[int, int]:
    """Return the indices of is_token_in_rank, and of an item that has a row for each received row."""
    return (4, 3) if len(handle) == _SHORT else (0, 7)


def _is_like_a_handle(handle: object, num_ranks: int) -> TypeGuard[Sequence[Tensor]]:
    """Return whether these are tensors with the shapes and dtypes of a handle for this number of ranks."""
    length = _SHORT if num_ranks <= NVL_PEERS else _LONG
    if not isinstance(handle, (tuple, list)) or len(handle) != length:
        return False
    if not all(isinstance(item, Tensor) and item.dim() for item in handle):
        return False
    in_rank, rows = (handle[index] for index in _item_indices(handle))
    if in_rank.dtype != torch.bool or in_rank.shape[1:] != (num_ranks,):
        return False
    like = make_items(in_rank, handle[1].shape[-1])
    set_num_rows(like, len(rows))
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(handle, like))
