"""``deep_ep.Buffer`` on ep_dispatcher: layout, dispatch and combine. low_latency.py has the other half."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ep_dispatcher import checks, envs
from ep_dispatcher.integrations.deep_ep import config as configs
from ep_dispatcher.integrations.deep_ep import layout
from ep_dispatcher.integrations.deep_ep.config import Config, say_once
from ep_dispatcher.integrations.deep_ep.dispatch import Routing, dispatch
from ep_dispatcher.integrations.deep_ep.events import CommStream, EventHandle, EventOverlap
from ep_dispatcher.integrations.deep_ep.handle import Plans, carried_by
from ep_dispatcher.integrations.deep_ep.low_latency import EXACT_HAS_NO_MASKS, LowLatency
from ep_dispatcher.integrations.deep_ep.pool import Pool, pool_of
from ep_dispatcher.integrations.deep_ep.rows import Kind, Rows
from ep_dispatcher.integrations.deep_ep.runtime import Runtime


class Buffer(LowLatency):
    """Dispatch and combine with DeepEP's names, arguments and results.

        layout = buffer.get_dispatch_layout(topk_idx, num_experts)
        recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event = buffer.dispatch(...)
        combined_x, combined_topk_weights, event = buffer.combine(y, handle)

    Making one is local. The engine's buffers need sizes that DeepEP's constructor does not have. So the first operation
    that needs one makes it (pool.py), and all deep_ep.Buffers of a group share them.

    group               the ranks
    num_nvl_bytes, num_rdma_bytes  kept for programs that compare them; they reserve nothing
    low_latency_mode    allows the low_latency_ methods
    enable_shrink       low_latency_ methods mask a rank that does not answer within EP_DISPATCHER_TIMEOUT_S, and go on
                        without it (``ep.Buffer.mask``), if the engine can: on one node, with few tokens
    explicitly_destroy  allows destroy(); without it the memory is freed with the last buffer and handle of the group
    """

    num_sms: int = 20
    _chosen_sms: int | None = None  # by set_num_sms; None: the engine's default

    def __init__(
        self,
        group: ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm=None,
        *,
        use_fabric: bool = False,
    ):
        if group is None and comm is not None:
            raise NotImplementedError("comm: the ranks of an engine are a torch.distributed group, not MPI's")
        if group is None:
            checks.fail("group", None, "a torch.distributed group")
        self._pool: Pool | None = pool_of(group)
        self._pool.users.add(self)
        self._comm = CommStream()
        self.runtime: Runtime | None = Runtime.of(group.rank(), group.size(), self._comm)
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        if enable_shrink and envs.deep_ep_exact():
            say_once(f"enable_shrink: a rank that does not answer is a PeerTimeoutError: {EXACT_HAS_NO_MASKS}")

    def destroy(self) -> None:
        """Free the memory with the last buffer of the group. Collective."""
        if not self.explicitly_destroy:
            checks.fail("destroy", "a buffer made without explicitly_destroy", "one made with explicitly_destroy=True")
        pool = self._live_pool()
        self._pool = self.runtime = None
        pool.users.discard(self)
        if not pool.users:
            pool.destroy()

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the multiprocessors of engine buffers that are made from now on: an even number, as in DeepEP."""
        new_num_sms = checks.integer("new_num_sms", new_num_sms, 2)
        if new_num_sms % 2:
            checks.fail("new_num_sms", new_num_sms, "an even number")
        Buffer.num_sms = Buffer._chosen_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of all work so far in the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return configs.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a config for any number of ranks. Only ``num_sms`` has an effect."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the stream of operations with async_finish or previous_event."""
        return self._comm.stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        raise NotImplementedError(
            "get_local_buffer_tensor: the memory that ranks write into is the engine's; it is laid out in another way, "
            "there is more than one, and nothing of it may be written from outside"
        )

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Return num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank, event. Local.

        Shapes and dtypes are those of layout.dispatch_layout. Here and elsewhere ``event`` is empty without
        ``async_finish``.
        """
        with self._comm.operation(topk_idx, previous_event=previous_event, async_finish=async_finish) as operation:
            counted = layout.dispatch_layout(topk_idx, num_experts, self.group_size)
            layout.remember(counted[-1], topk_idx, counted[0], counted[2])
            operation.hand_over(*counted)
        return *counted, operation.event

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, list[int] | None, tuple | None, EventOverlap
    ]:
        """Bring every token once to each rank that has one of its experts. Rows are in order of (source rank, token).

            recv_topk_idx[row, k] = local expert or -1;  recv_topk_weights[row, k] = its weight, or 0

        x                 rows, or a pair of rows and scales: see rows.Rows
        handle            of an earlier dispatch, to use its routing again. Then topk_idx and topk_weights must be None,
                          other arguments of a routing are ignored, and all results but recv_x and event are None
        topk_idx, topk_weights  int64 and float32 [num_tokens, num_topk], both or none: is_token_in_rank and
                          num_tokens_per_expert are enough
        expert_alignment  only rounds up num_recv_tokens_per_expert_list
        num_worst_tokens  rows of the output, the same on all ranks. Then no host waits, the list is empty, and unused
                          rows have -1 in recv_topk_idx
        config            accepted, without effect

        Raises ValueError for arguments that are not allowed, PeerTimeoutError if a rank does not arrive.
        """
        pool, rows = self._live_pool(), Rows(x)
        self._say_of_config(config)
        inputs: tuple[Tensor | None, ...] = ()
        if async_finish or previous_event is not None:
            inputs = topk_idx, topk_weights, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
            inputs += rows.tensors() if handle is None else (*rows.tensors(), *_plans(handle).tensors())
        with self._comm.operation(*inputs, previous_event=previous_event, async_finish=async_finish) as operation:
            if handle is not None:
                if topk_idx is not None or topk_weights is not None:
                    checks.fail("topk_idx", "tensors beside handle", "None: the handle has the routing")
                plans = _plans(handle)
                recv_x = rows.restore(plans.dispatch(rows))
                if operation.is_apart:
                    operation.hand_over(*_flat(recv_x), *plans.tensors())  # rows of another kind have made a plan
                received: tuple[Any, ...] = (recv_x, None, None, None, None)
            else:
                given = num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
                routing = Routing(*given, topk_idx, topk_weights)  # it refuses None
                made = received = dispatch(
                    pool, rows, routing, expert_alignment=expert_alignment, num_worst_tokens=num_worst_tokens
                )
                if operation.is_apart:
                    operation.hand_over(*_flat(made.x), *made[1:3], *made.handle.tensors())
        return *received, operation.event

    def combine(
        self,
        x: Tensor,
        handle: tuple | list,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sum every token's rows of all ranks on its source rank, without weights.

            combined_x[token] = sum of x[row of token] over its ranks + bias
            combined_topk_weights[token, k] = sum of topk_weights[row of token, k] over its ranks

        x             [num_recv_tokens, hidden] of bfloat16, float16 or float32
        topk_weights  float32 [num_recv_tokens, num_topk]. Weights of experts on other ranks must be 0, as dispatch
                      returns them. Otherwise NotImplementedError; on a GPU combined_topk_weights of the token is NaN.
                      With EP_DISPATCHER_DEEP_EP_EXACT=1 they may have any value, for one more small operation
        bias          one or two tensors [num_tokens, hidden] of the dtype of x, added in float32 after the sum
        config        accepted, without effect
        """
        self._live_pool()
        plans = _plans(handle)
        self._say_of_config(config)
        biases = () if bias is None else (bias,) if isinstance(bias, Tensor) else tuple(bias)
        device = x.device.type
        checks.tensor("x", x, checks.DTYPES, (plans.num_rows, "hidden"), device)
        if len(biases) > 2:
            checks.fail("bias", f"{len(biases)} tensors", "at most two")
        for one in biases:
            checks.tensor("bias", one, (x.dtype,), (plans.num_tokens, x.shape[1]), device)
        if topk_weights is not None:
            checks.tensor("topk_weights", topk_weights, (torch.float32,), (plans.num_rows, "num_topk"), device)
        inputs: tuple[Tensor | None, ...] = ()
        if async_finish or previous_event is not None:
            inputs = x, topk_weights, *biases, *plans.tensors()
        with self._comm.operation(*inputs, previous_event=previous_event, async_finish=async_finish) as operation:
            combined_x, combined_weights = self._combine(plans, x, topk_weights)
            if biases:
                combined_x = sum((one.float() for one in biases), combined_x.float()).to(x.dtype)
            if operation.is_apart:
                operation.hand_over(combined_x, combined_weights, *plans.tensors())
        return combined_x, combined_weights, operation.event

    @staticmethod
    def _combine(plans: Plans, x: Tensor, topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if topk_weights is None:
            return plans.combine(x).x, None
        num_topk = topk_weights.shape[1]
        if not envs.deep_ep_exact() and plans.takes_weights(Kind(x.shape[1], x.dtype), num_topk):
            out = plans.combine(x, plans.summable(topk_weights))
            return out.x, out.topk_weights
        wide = torch.nn.functional.pad(topk_weights, (0, -num_topk % 4))  # rows of 16 bytes
        return plans.combine(x).x, plans.combine(wide).x[:, :num_topk].contiguous()

    def internode_dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ):
        """As ``dispatch``: the engine itself finds the ranks on other nodes."""
        return self.dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    def internode_combine(
        self,
        x: Tensor,
        handle: tuple | list,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ):
        """As ``combine``."""
        return self.combine(
            x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream
        )

    def _live_pool(self) -> Pool:
        if self._pool is None:
            checks.fail("buffer", "one that was destroyed", "a living buffer")
        self._pool.num_sms = Buffer._chosen_sms  # for engine buffers that this operation makes
        return self._pool

    @staticmethod
    def _say_of_config(config: Config | None) -> None:
        if config is not None:
            say_once("config: accepted, and without effect; Buffer.set_num_sms and EP_DISPATCHER_NUM_SMS have one")


def _plans(handle: tuple | list) -> Plans:
    plans = carried_by(handle, -1)
    if not isinstance(plans, Plans):
        checks.fail("handle", type(handle).__name__, "the handle of a dispatch, or a tuple or list of its items")
    return plans


def _flat(x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)
