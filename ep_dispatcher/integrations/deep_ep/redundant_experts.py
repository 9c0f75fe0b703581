"""Redundant experts of DeepEP 2.5: memory for copies of other ranks' experts, and the copies into it and out of it.

A program decides which experts are copied, where to, and which tokens go there. It plans tensors for the copies by
``BufferAllocator``, and an ``EPBuffer`` gives them memory that the ranks of a node map. The kernels are those of
balanced experts (balance/slots.py), over the program's own layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.balance.slot_layout import Homes, Piece
from ep_dispatcher.balance.slot_memory import SlotMemory, allocate_slots, gather_for_slots
from ep_dispatcher.integrations.deep_ep.late_errors import LateErrors
from ep_dispatcher.memory import round_up

ALLOCATION_ALIGNMENT = 2 << 20  # bytes, of DeepEP's buffers
GRANULARITY = 16  # bytes, of a slot's address: the kernels copy so many at a time
_WRONG_MAPPING = (
    "redundancy_mapping has an expert that does not exist, or one in a slot of its own rank: each element has to be -1 "
    "or rank * num_local_experts + local expert, of another rank of the node"
)


class BufferAllocator:
    """Plans the tensors in the memory of a buffer that does not exist yet.

        plan = BufferAllocator()
        weights = plan.allocate((num_redundant_experts, n), torch.bfloat16)      # a meta tensor
        buffer = EPBuffer(group, ..., lb_allocation_plan_or_num_bytes=plan)      # from now on it is in the buffer

    All ranks plan the same tensors in the same order.

    alignment     bytes, 2 MiB: every tensor begins at a multiple
    allocations   a tensor and its first byte, for each
    num_bytes     of all tensors, a multiple of ``alignment``
    materialized  whether the tensors have memory
    """

    def __init__(self) -> None:
        self.alignment = ALLOCATION_ALIGNMENT
        self.allocations: list[tuple[Tensor, int]] = []
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a meta tensor, which becomes one of the buffer's memory. ValueError once the tensors have memory."""
        if self.materialized:
            checks.refuse("this plan's buffer has been made, so no tensor can be added: make another plan and buffer")
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        self.num_bytes += round_up(tensor.nbytes, self.alignment)
        return tensor

    def materialize(self, storage: Tensor) -> None:
        """Turn the meta tensors into views of ``storage``, uint8 [num_bytes], contiguous. EPBuffer does it."""
        if self.materialized:
            checks.refuse("the tensors of this plan have memory already: make a plan for each buffer")
        checks.tensor("storage", storage, (torch.uint8,), (self.num_bytes,), storage.device.type)
        with torch.inference_mode(False):  # the tensors serve inside and outside of it
            for tensor, begin in self.allocations:
                view = storage[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                torch.utils.swap_tensors(tensor, view)
        self.materialized = True

    def describe(self) -> str:
        """Return the tensors as text, for ranks to compare."""
        return ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor, _ in self.allocations)


class Exchange(NamedTuple):
    """The checked arguments of a push or a pull."""

    homes: Homes
    mapping: Tensor
    pieces: list[Piece]  # of the slots
    of_experts: list[Tensor]  # of this rank's experts, one tensor for each piece


class RedundantExperts:
    """Memory of every rank for copies of experts, as one rank sees it.

    buffer      of the group's ranks
    num_bytes   of each rank, the same on all ranks
    planned     the tensors in it, as text: compared with those of the other ranks
    number      counts what is made for this buffer: the same on all ranks, and another one each time

    storage     uint8 [num_bytes] of this rank, which begins with zeros

    Collective, with the limit of the buffer and its errors. ValueError on all ranks if they plan other tensors.
    """

    def __init__(self, buffer: ep.Buffer, num_bytes: int, planned: str, number: int):
        config, self._device = buffer.config, buffer.device
        # Outside of inference mode, because the memory serves inside and outside of it.
        with torch.inference_mode(False), gather_for_slots(config, self._device, number) as gather:
            everyone = gather("plans", lambda: planned)
            with gather.same_on_all_ranks():
                plans = [dict(lb_allocation_plan_or_num_bytes=one or None) for one in everyone]
                checks.require_same(plans, none="no tensors", more=" tensors in the same order")
            self._memory: SlotMemory | None = allocate_slots(gather, config, self._device, num_bytes, number)
        self._num_bytes, self._topology = num_bytes, config.topology

    @property
    def storage(self) -> Tensor:
        return self._live().memory

    def weights(self, redundant_expert_weights: Any, expert_weights: Any, redundancy_mapping: Tensor) -> Exchange:
        """Check the arguments of EPBuffer.lb_prefetch_weights."""
        num_slots = self._check_mapping(redundancy_mapping)
        of_slots = _named("redundant_expert_weights", redundant_expert_weights)
        of_experts = _named("expert_weights", expert_weights)
        if not of_experts or len(of_slots) != len(of_experts):
            checks.refuse(
                f"redundant_expert_weights has {len(of_slots)} tensors, and expert_weights has {len(of_experts)}: give "
                "as many of both, at least one"
            )
        first_name, first = of_experts[0]
        self._check(first_name, first, "num_local_experts")
        pieces, matrices = [], []
        for (slots_name, slots), (name, own) in zip(of_slots, of_experts, strict=True):
            self._check(name, own, len(first))
            self._check(slots_name, slots, num_slots)
            num_bytes = own.nbytes // len(own)
            if slots.nbytes // num_slots != num_bytes or num_bytes % GRANULARITY or not num_bytes:
                checks.refuse(
                    f"{slots_name} has {slots.nbytes // num_slots} bytes for each expert, and {name} has {num_bytes}: "
                    f"both need the same number, a multiple of {GRANULARITY}"
                )
            pieces.append(Piece((num_bytes,), torch.uint8, self._first_byte(slots_name, slots), num_bytes))
            matrices.append(own.detach().view(-1).view(torch.uint8).view(len(own), num_bytes))
        return Exchange(self._homes(len(first)), redundancy_mapping, pieces, matrices)

    def gradients(self, redundant_expert_grads: Tensor, expert_grads: Tensor, redundancy_mapping: Tensor) -> Exchange:
        """Check the arguments of EPBuffer.lb_reduce_grads."""
        num_slots, float32 = self._check_mapping(redundancy_mapping), (torch.float32,)
        device = self._device.type
        checks.tensor("expert_grads", expert_grads, float32, ("num_local_experts", "n"), device)
        num_local, n = expert_grads.shape
        checks.tensor("redundant_expert_grads", redundant_expert_grads, float32, (num_slots, n), device)
        self._check("expert_grads", expert_grads, "num_local_experts")
        self._check("redundant_expert_grads", redundant_expert_grads, num_slots)
        if n * torch.float32.itemsize % GRANULARITY or not n:
            checks.fail("expert_grads", f"[{num_local}, {n}]", f"of rows whose bytes are a multiple of {GRANULARITY}")
        begin = self._first_byte("redundant_expert_grads", redundant_expert_grads)
        piece = Piece((n,), torch.float32, begin, n * torch.float32.itemsize)
        return Exchange(self._homes(num_local), redundancy_mapping, [piece], [expert_grads.detach()])

    def copies(self, exchange: Exchange, late: LateErrors) -> Tensor:
        """Return the plan of copies, int32 [ranks of the node, num_slots, 3], in the current stream.

        A wrong mapping is a ValueError: now, or on a GPU later. Until then the kernels skip what is wrong in it.
        """
        mapping, homes = exchange.mapping, exchange.homes
        owners = mapping.div(homes.num_local_experts, rounding_mode="floor")
        holders = torch.arange(len(mapping), dtype=torch.int32, device=mapping.device)
        is_of_another_rank = (owners < len(mapping)) & (owners != holders[:, None])
        late.refuse_unless(((mapping < 0) | is_of_another_rank).all(), _WRONG_MAPPING)
        return mapping[:, :, None].expand(-1, -1, 3).contiguous()

    def push(self, exchange: Exchange, copies: Tensor, num_blocks: int) -> None:
        self._live().push(exchange.homes, copies, exchange.pieces, exchange.of_experts, num_blocks)

    def pull(self, exchange: Exchange, copies: Tensor, num_blocks: int) -> None:
        self._live().pull(exchange.homes, copies, exchange.pieces, exchange.of_experts, num_blocks)

    def free(self) -> None:
        """Free this rank's memory, once the views of it are gone too. A second call does nothing."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.free()

    def _live(self) -> SlotMemory:
        if self._memory is None:
            checks.refuse("the memory for redundant experts was freed, by destroy() or destroy_buffers()")
        return self._memory

    def _homes(self, num_local_experts: int) -> Homes:
        """Return whose experts a mapping names: it has its own numbers for ranks and experts, those of the node."""
        ranks = tuple(range(self._topology.ranks_per_node))
        return Homes(ranks, self._topology.local_rank, num_local_experts)

    def _check_mapping(self, mapping: Tensor) -> int:
        """Return the number of slots of a rank."""
        shape = (self._topology.ranks_per_node, "num_redundant_experts")
        checks.tensor("redundancy_mapping", mapping, (torch.int32,), shape, self._device.type)
        return checks.integer("redundancy_mapping.shape[1]", mapping.shape[1], 1)

    def _check(self, name: str, given: Tensor, num: int | str) -> None:
        """Check a tensor [num, ...] of any dtype."""
        checks.dtensor(name, given)
        device = self._device.type
        if given.ndim and given.is_contiguous() and given.device.type == device:
            if len(given) == num or (isinstance(num, str) and len(given)):
                return
        contiguous = "" if given.is_contiguous() else ", not contiguous"
        checks.fail(name, f"{list(given.shape)} on {given.device}{contiguous}", f"[{num}, ...] on {device}, contiguous")

    def _first_byte(self, name: str, slots: Tensor) -> int:
        """Return where a tensor begins in ``storage``."""
        begin = slots.data_ptr() - self.storage.data_ptr()
        if begin < 0 or begin + slots.nbytes > self._num_bytes:
            checks.refuse(
                f"{name} is not in this buffer's memory for redundant experts: give a tensor of the plan that the "
                "buffer was made with (lb_allocation_plan_or_num_bytes), or a view of runtime.lb_storage"
            )
        if begin % GRANULARITY:
            checks.fail(name, f"at byte {begin} of that memory", f"at a multiple of {GRANULARITY}")
        return begin


def _named(argument: str, given: Tensor | Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Return tensors with their names in errors."""
    if isinstance(given, Tensor):
        return [(argument, given)]
    if not isinstance(given, Sequence):
        checks.fail(argument, f"of type {type(given).__name__}", "a tensor, or a sequence of tensors")
    tensors = [(f"{argument}[{i}]", one) for i, one in enumerate(given)]
    for name, one in tensors:
        if not isinstance(one, Tensor):
            checks.fail(name, f"of type {type(one).__name__}", "a tensor")
    return tensors
