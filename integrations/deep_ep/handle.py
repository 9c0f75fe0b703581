"""Handles of dispatches: tuples like DeepEP's, which carry plans of our engine."""

from __future__ import annotations

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep.config import NVL_PEERS
from ep_dispatcher.integrations.deep_ep.layout import routing_of_ranks
from ep_dispatcher.integrations.deep_ep.pool import Key, Pool
from ep_dispatcher.integrations.deep_ep.rows import Kind, Rows

_QUEUES = "it is a position in DeepEP's queues, and this engine has none"
_OTHER_WEIGHTS = "topk_weights: other than 0 where recv_topk_idx is -1, which the engine would leave out of the sum; "
_OTHER_WEIGHTS += "set EP_DISPATCHER_DEEP_EP_EXACT=1, which costs one small operation more in every such combine"
_UNCHANGED = "them while recv_topk_idx of the dispatch is as it was, or with EP_DISPATCHER_DEEP_EP_EXACT=1"
_EXACT = "set EP_DISPATCHER_DEEP_EP_EXACT=1, which costs one small exchange more in every dispatch"


class Unavailable:
    """An item of a handle that this engine does not have. Any use raises NotImplementedError.

    carried  an object for our own operations
    """

    def __init__(self, name: str, reason: str, carried: object = None):
        self._what, self.carried = f"handle: {name} is not available: {reason}", carried

    def carrying(self, carried: object) -> Unavailable:
        carrier = object.__new__(Unavailable)  # not by __init__, which formats a text: every dispatch makes one
        carrier._what, carrier.carried = self._what, carried
        return carrier

    def __repr__(self) -> str:
        return f"<{self._what}>"

    def _refuse(self, *args, **kwargs):
        raise NotImplementedError(self._what)

    __getitem__ = __setitem__ = __len__ = __iter__ = __int__ = __index__ = __array__ = _refuse
    __add__ = __sub__ = __eq__ = __lt__ = __gt__ = _refuse
    __hash__ = None  # type: ignore[assignment]  # no hash, as in other classes with their own __eq__

    def __getattr__(self, name: str):
        if name.startswith("__"):  # Python and copy look for such names, even before any attribute is set
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(next(a._what for a in args if isinstance(a, cls)))


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

    def __init__(self, pool: Pool, is_token_in_rank: Tensor, max_tokens: int, *, num_worst_tokens: int):
        self.pool = pool
        self.is_token_in_rank = is_token_in_rank
        self._max_tokens, self._max_rows = max_tokens, num_worst_tokens or None

    def begin(self, key: Key, buffer: ep.Buffer, out: ep.DispatchOutput) -> None:
        """Take the plan that the dispatch has made. No other method works before."""
        handle, topk_idx = out.handle, out.topk_idx
        assert topk_idx is not None  # in rank layout
        is_inference = topk_idx.is_inference()
        # [num_recv_tokens, num_topk], -1 for experts of other ranks. The program has it too, and may change it. The
        # version shows changes, but tensors of torch.inference_mode() have none.
        self._topk_idx = topk_idx.clone() if is_inference else topk_idx
        self._version = None if is_inference else topk_idx._version
        self.num_tokens, self.num_rows = handle.num_tokens, handle.num_rows
        self._known: dict[Kind, tuple[ep.Buffer, ep.Handle]] = {key.kind: (buffer, handle)}
        # A combine returns weights with rows of this kind, this many for each; none without topk_idx.
        self._weights_of = None if out.topk_weights is None else (key.kind, key.num_topk)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that operations read."""
        return [self.is_token_in_rank, self._topk_idx, *(handle.plan for _, handle in self._known.values())]

    def dispatch(self, rows: Rows) -> Tensor | tuple[Tensor, Tensor]:
        """Return the rows that this rank receives by the same routing."""
        if rows.kind in self._known:
            buffer, handle = self._known[rows.kind]
            return buffer.dispatch(rows.data, handle=handle).x
        return self._new_plan(rows.kind, rows.data)

    def combine(self, y: Tensor, topk_weights: Tensor | None = None) -> ep.CombineOutput:
        kind = Kind(y.shape[1], y.dtype)
        if kind not in self._known:
            self._new_plan(kind, y.new_zeros(self.num_tokens, kind.hidden))
        buffer, handle = self._known[kind]
        return buffer.combine(y, handle, topk_weights=topk_weights)

    def summable(self, topk_weights: Tensor) -> Tensor:
        """Return the weights for a combine. It ignores those of experts on other ranks, so these must be 0.

        Otherwise raise. On a GPU the host does not wait to see them; there all weights of the row become NaN.
        """
        # Not in the dispatch: most dispatches have no such combine, and each operation costs the host 10 us.
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

    def _new_plan(self, kind: Kind, data) -> Tensor | tuple[Tensor, Tensor]:
        num_ranks = self.pool.group.size()
        key = Key(kind, num_ranks, num_ranks)
        sized = self.pool.sized(key, self._max_tokens)
        idx = routing_of_ranks(self.is_token_in_rank)
        out = sized.buffer.dispatch(data, idx, layout="rank", max_recv_rows=self._max_rows)
        self._known[kind] = (sized.buffer, out.handle)
        return out.x


_QUEUE_NAMES = "rdma_channel_prefix_matrix gbl_channel_prefix_matrix recv_rdma_channel_prefix_matrix "
_QUEUE_NAMES += "recv_rdma_rank_prefix_sum recv_gbl_channel_prefix_matrix recv_gbl_rank_prefix_sum recv_src_meta "
_QUEUE_NAMES += "send_rdma_head send_nvl_head"
_NO_QUEUES = tuple(Unavailable(name, _QUEUES) for name in _QUEUE_NAMES.split())
_NO_CHANNELS = tuple(Unavailable(name, _QUEUES) for name in ("channel_prefix_matrix", "recv_channel_prefix_matrix"))
_NO_SEND_HEAD = Unavailable("send_head", _QUEUES)
_NO_PREFIX, _NO_SRC_IDX = (Unavailable(name, _EXACT) for name in ("rank_prefix_matrix", "recv_src_idx"))


class DispatchHandle(tuple):
    """A tuple like DeepEP's: 6 items with up to 8 ranks, 10 with more.

    The last item carries the plans, also in a plain tuple of the items. is_token_in_rank is always there.
    rank_prefix_matrix int32 [num_ranks, num_ranks] (tokens of ranks 0 to i for rank r) and recv_src_idx int32
    [num_recv_tokens] (a row's token on its source rank) are there if they were gathered. All others raise
    NotImplementedError when used.
    """

    plans: Plans

    @classmethod
    def make(cls, plans: Plans, prefix: Tensor | None = None, src_idx: Tensor | None = None) -> DispatchHandle:
        if plans.pool.group.size() <= NVL_PEERS:
            items: tuple[object, ...] = (
                _NO_PREFIX if prefix is None else prefix,
                *_NO_CHANNELS,
                _NO_SRC_IDX if src_idx is None else src_idx,
                plans.is_token_in_rank,
                _NO_SEND_HEAD.carrying(plans),
            )
        else:
            items = (plans.is_token_in_rank, *_NO_QUEUES[:-1], _NO_QUEUES[-1].carrying(plans))
        handle = cls(items)
        handle.plans = plans
        return handle

    def tensors(self) -> list[Tensor]:
        return [*self.plans.tensors(), *(item for item in self if isinstance(item, Tensor))]

    def __reduce__(self):
        raise TypeError("a handle belongs to the buffers of this process and cannot be pickled")


def sources(plans: Plans) -> Tensor:
    """Return each received row's token on its source rank, int32 [num_recv_tokens]. Exchanges 16 bytes per row."""
    token = torch.arange(plans.num_tokens, dtype=torch.float32, device=plans.is_token_in_rank.device)
    received = plans.dispatch(Rows(token[:, None].repeat(1, 4)))
    assert isinstance(received, Tensor)  # as what was sent
    return received[:, 0].int()
