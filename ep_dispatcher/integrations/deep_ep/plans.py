"""The plans of a handle in the engine's buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.integrations.deep_ep.pool import Key, Pool
from ep_dispatcher.integrations.deep_ep.rows import Kind


class Plans:
    """The plans of one routing, by kind of rows and layout: the first operation of each makes one.

    DeepEP's handles serve rows of any size; a plan of ours serves those of its buffer.
    """

    def __init__(self, pool: Pool, max_tokens: int):
        self._pool, self._max_tokens = pool, max_tokens
        self._plans: dict[tuple[Kind, str], tuple[ep.Buffer, ep.Handle]] = {}

    def routing(self, layout: str) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the topk_idx of a new plan, its number of experts, and other arguments of a dispatch that makes it."""
        raise NotImplementedError

    def dispatch(self, kind: Kind, rows: Any, topk_weights: Tensor | None, layout: str) -> ep.DispatchOutput:
        buffer, how = self._find(kind, layout)
        out = buffer.dispatch(rows, topk_weights=topk_weights, **how)
        self._plans[kind, layout] = buffer, out.handle
        return out

    def combine(self, y: Tensor, topk_weights: Tensor | None, layout: str) -> ep.CombineOutput:
        kind = Kind(y.shape[1], y.dtype)
        buffer, how = self._find(kind, layout)
        plan = how["handle"] if "handle" in how else buffer.plan(**how)
        self._plans[kind, layout] = buffer, plan
        return buffer.combine(y, plan, topk_weights=topk_weights)

    def _find(self, kind: Kind, layout: str) -> tuple[ep.Buffer, dict[str, Any]]:
        """Return the buffer for rows of a kind, and how to dispatch there: by the plan, or else by the routing."""
        if (kind, layout) in self._plans:
            buffer, plan = self._plans[kind, layout]
            return buffer, dict(handle=plan)
        topk_idx, num_experts, options = self.routing(layout)
        buffer = self._pool.sized(Key(kind, num_experts, topk_idx.shape[1]), self._max_tokens)
        return buffer, dict(topk_idx=topk_idx, layout=layout, **options)
