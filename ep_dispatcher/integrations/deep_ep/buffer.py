"""``deep_ep.Buffer`` on ep_dispatcher: layout, dispatch and combine. low_latency.py has the other half."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ep_dispatcher import checks
from ep_dispatcher.integrations.deep_ep import layout
from ep_dispatcher.integrations.deep_ep.config import (
    NVL_PEERS,
    Config,
    get_low_latency_rdma_size_hint,
    num_rdma_ranks,
    warn_ignored,
    warn_once,
)
from ep_dispatcher.integrations.deep_ep.dispatch import Received, Routing, dispatch
from ep_dispatcher.integrations.deep_ep.events import CommStream, EventHandle, EventOverlap, outside_graphs
from ep_dispatcher.integrations.deep_ep.handle import plans_of
from ep_dispatcher.integrations.deep_ep.low_latency import LowLatency
from ep_dispatcher.integrations.deep_ep.row_conversion import Rows, add_biases, biases_of

_SET_NUM_SMS = "Buffer.set_num_sms has one"


class Runtime:
    """``buffer.runtime``, also named ``deep_ep_cpp.Buffer`` as DeepEP's compiled class: what programs ask it.

    A rank's node and local index, with DeepEP's nodes of 8 ranks. All else raises NotImplementedError.
    """

    def __init__(self, rank: int, num_ranks: int, comm: CommStream, *args, **kwargs):
        if not isinstance(comm, CommStream):
            raise NotImplementedError(
                "deep_ep_cpp.Buffer: a program makes deep_ep.Buffer(...), which has it as runtime"
            )
        self._rank, self._num_ranks, self._comm = rank, num_ranks, comm

    def is_available(self) -> bool:
        return True

    def is_internode_available(self) -> bool:
        return self.get_num_rdma_ranks() > 1

    def get_num_rdma_ranks(self) -> int:
        return num_rdma_ranks(self._num_ranks)

    def get_rdma_rank(self) -> int:
        return self._rank // NVL_PEERS

    def get_root_rdma_rank(self, is_global: bool) -> int:
        return self._rank % NVL_PEERS if is_global else 0

    def get_local_device_id(self) -> int:
        if not torch.cuda.is_available():
            raise NotImplementedError("runtime.get_local_device_id: there is no GPU")
        return torch.cuda.current_device()

    def get_comm_stream(self) -> torch.cuda.Stream:
        return self._comm.stream()

    def __getattr__(self, name: str):
        if name.startswith("_"):  # Python and tools look for such names
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NotImplementedError(f"runtime.{name}: of DeepEP's compiled runtime; use the methods of deep_ep.Buffer")


@outside_graphs
class Buffer(LowLatency):
    """Dispatch and combine with DeepEP's names, arguments and results.

        layout = buffer.get_dispatch_layout(topk_idx, num_experts)
        recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event = buffer.dispatch(...)
        combined_x, combined_topk_weights, event = buffer.combine(y, handle)

    Making one is local. The engine's buffers need sizes that DeepEP's constructor does not have. So the first operation
    that needs one makes it (buffer_pool.py), and all deep_ep.Buffers of a group share them.

    group               the ranks: a process group, or a DeviceMesh of one dimension
    num_qps_per_rank, allow_mnnvl, use_fabric  without effect, and a line says so once. comm and
                        allow_nvlink_for_low_latency_mode=False: NotImplementedError
    num_nvl_bytes, num_rdma_bytes  kept for programs that compare them; they reserve nothing
    low_latency_mode    allows the low_latency_ methods
    enable_shrink       low_latency_ methods mask a rank that does not answer within EP_DISPATCHER_TIMEOUT_S, and go on
                        without it (``ep.Buffer.mask``), if the engine can: on one node, with few tokens
    explicitly_destroy  allows destroy(); without it the memory stays until the group or ``destroy_buffers()`` ends it
    """

    deep_ep_class = "Buffer"

    num_sms: int = 20

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None,
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
        if not allow_nvlink_for_low_latency_mode:
            raise NotImplementedError(
                "allow_nvlink_for_low_latency_mode is False; ranks of a node read and write each other's memory. "
                "With EP_DISPATCHER_RANKS_PER_NODE=1 each rank is a node of its own"
            )
        if group is None:
            checks.fail("group", None, "a torch.distributed group")
        super().__init__(group, explicitly_destroy)
        group = self.group
        self.runtime: Runtime | None = Runtime(group.rank(), group.size(), self._comm)
        self.rank, self.group_size = group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        if num_qps_per_rank != 24:  # 24 is not worth a warning, because nearly every program gives it
            warn_ignored("num_qps_per_rank", "between nodes the engine uses the connections of its own wire")
        for name, given in (("allow_mnnvl", allow_mnnvl), ("use_fabric", use_fabric)):
            if given:
                warn_ignored(name, "the engine finds out which memory ranks can share when a buffer is made")

    def destroy(self) -> None:
        """Free the memory with the last buffer of the group, if all were made with explicitly_destroy. Collective."""
        super().destroy()
        self.runtime = None

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

    get_low_latency_rdma_size_hint = staticmethod(get_low_latency_rdma_size_hint)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a config, the same for any number of ranks."""
        checks.integer("num_ranks", num_ranks, 1)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Return a tensor without elements, for programs that zero DeepEP's memory after a fault.

        Nothing needs to be zeroed, and nothing of the engine's memory may be written from outside. A part of the memory
        raises NotImplementedError.
        """
        self._ready_pool()
        if size is not None or offset:
            raise NotImplementedError(
                "get_local_buffer_tensor has a size or an offset; the memory that ranks write into is the engine's: it "
                "has another layout, there is more than one, and nothing of it may be written from outside"
            )
        which = "low-latency" if use_rdma_buffer else "other"
        warn_once(f"get_local_buffer_tensor: returns 0 elements for the {which} memory, which needs no zeroing")
        return torch.empty(0, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Return num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank, event. Local.

        Shapes and dtypes are those of layout.Layout. On a GPU an expert that does not exist counts as none here; the
        dispatch refuses it. Here and elsewhere ``event`` is empty without ``async_finish``.
        """
        with self._comm.operation((topk_idx,), previous_event, async_finish, allocate_on_comm_stream) as operation:
            counted = layout.dispatch_layout(topk_idx, num_experts, self.group_size)
            layout.remember_origin(counted, topk_idx)
            operation.hand_over(*counted)
        return *counted[:4], operation.event

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
                          num_worst_tokens 0 or the handle's, and all results but recv_x and event are None. Other
                          arguments of a routing have no effect, and a line says so once
        topk_idx, topk_weights  int64 and float32 [num_tokens, num_topk], both or none: is_token_in_rank and
                          num_tokens_per_expert are enough
        expert_alignment  only rounds up num_recv_tokens_per_expert_list
        num_worst_tokens  rows of the output, the same on all ranks. Then no host waits, the list is empty, and unused
                          rows have -1 in recv_topk_idx
        config            without effect, but for the shapes of the handle's items. A line says so once

        Raises ValueError for arguments that are not allowed, PeerTimeoutError if a rank does not arrive.
        """
        pool, rows = self._ready_pool(), Rows(x)
        if config is not None:
            warn_ignored("config", _SET_NUM_SMS)
        expert_alignment = checks.integer("expert_alignment", expert_alignment, 1)
        num_worst_tokens = checks.integer("num_worst_tokens", num_worst_tokens, 0)
        given: tuple[Any, Any, Any] = num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        plans = None
        if handle is not None:
            plans = plans_of(handle, pool)
            if topk_idx is not None or topk_weights is not None:
                checks.refuse("topk_idx or topk_weights is given with a handle, which already has the routing")
            if num_worst_tokens not in (0, plans.num_rows):
                checks.fail("num_worst_tokens", num_worst_tokens, f"0, or the {plans.num_rows} rows of the handle")
            if any(one is not None for one in (*given, num_tokens_per_rdma_rank)) or expert_alignment != 1:
                arguments = "num_tokens_per_..., is_token_in_rank and expert_alignment with a handle"
                warn_ignored(arguments, "the handle has the routing")
        inputs = x, topk_idx, topk_weights, given, plans
        with self._comm.operation(inputs, previous_event, async_finish, allocate_on_comm_stream) as operation:
            if plans is not None:
                out = plans.dispatch(rows.row_format, rows.data)
                received: Received = rows.restore(out.x), None, None, None, None
            else:
                routing = Routing(*given, num_tokens_per_rdma_rank, topk_idx, topk_weights)  # it refuses None
                num_channels = max(1, (Buffer.num_sms if config is None else config.num_sms) // 2)
                received, plans = dispatch(pool, rows, routing, expert_alignment, num_worst_tokens, num_channels)
            operation.hand_over(*received[:3], plans)
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
        config        without effect, and a line says so once
        """
        plans = plans_of(handle, self._ready_pool())
        if config is not None:
            warn_ignored("config", _SET_NUM_SMS)
        device = x.device.type
        checks.tensor("x", x, checks.DTYPES, (plans.num_rows, "hidden"), device)
        biases = biases_of(bias, x, plans.num_tokens)
        if topk_weights is not None:
            checks.tensor("topk_weights", topk_weights, (torch.float32,), (plans.num_rows, "num_topk"), device)
        inputs = x, topk_weights, biases, plans
        with self._comm.operation(inputs, previous_event, async_finish, allocate_on_comm_stream) as operation:
            combined_x, combined_weights = plans.combine_with_weights(x, topk_weights)
            combined_x = add_biases(combined_x, biases, x.dtype)
            operation.hand_over(combined_x, combined_weights, plans)
        return combined_x, combined_weights, operation.event

    # The engine itself finds the ranks on other nodes.
    internode_dispatch = dispatch
    internode_combine = combine
