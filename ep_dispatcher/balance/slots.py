"""The expert slots of one buffer: memory for copies of the experts of other ranks, which the ranks of a node map.

    slots = Slots(config, device, 1, [(n, k), (k, n)], torch.bfloat16, number=0)     # all ranks
    slots.push(copies, [w1, w2])             # home ranks write weights into the slots of other ranks
    grouped_mlp(..., slots.weights)          # each rank multiplies by them, and writes slots.gradients
    slots.pull(copies, [grad_w1, grad_w2])   # home ranks read the gradients, and add them to those of their own

``push`` and ``pull`` are plain copies in the current stream: no rank waits for another one in them. The caller runs a
collective operation of the buffer, which all ranks pass together in the order of their streams,

- before a push: no rank uses the copies of before any more,
- between a push and the first use of the copies,
- between the last write of gradients and the pull,
- between a pull and the next write of gradients.

On GPUs that is enough. A push drains its stores by a fence at system scope before it ends, and kernels behind it in the
stream begin after that. Peers acquire what the operation behind it announces, so what follows there sees the stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.balance.slot_layout import Homes, SlotLayout, slot_layout
from ep_dispatcher.balance.slot_memory import SlotMemory, allocate_slots, gather_for_slots
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.gather import Gather
from ep_dispatcher.moe.expert_matrices import ExpertMatrices


class Slots:
    """The slots of each rank of one buffer, as one rank sees them.

    config      of the buffer
    device      of its tensors
    num_slots   slots of each rank
    shapes      of each parameter of an expert, such as [(n, k), (k, n)]
    dtype       of the parameters
    number      counts the Slots that are made for this buffer: the same on all ranks, and another one each time

    weights     [parameter][slot] views of this rank's slots, each at a multiple of 128 bytes. The slots of a parameter
                follow each other at equal steps.
    gradients   [parameter][slot] likewise, float32

    num_bytes   of this rank's slots

    All begin with zeros. Collective over all ranks of the buffer, with its limit. Raises ValueError on every rank if
    the ranks give different sizes, PeerTimeoutError if a rank does not come, and RuntimeError if one has no memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device | str,
        num_slots: int,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        number: int,
    ):
        device = torch.device(device)
        with gather_for_slots(config, device, number) as gather:
            layout = _agree(gather, num_slots, shapes, dtype)
            memory = allocate_slots(gather, config, device, layout.num_bytes, number)
        topology = config.topology
        self._homes = Homes(topology.node_ranks, topology.local_rank, config.num_own_experts)
        self._memory: SlotMemory | None = memory
        self._layout, self._device_type = layout, device.type
        self._rows, self.num_bytes = (config.num_ranks, num_slots, 3), layout.num_bytes  # rows: of copies
        self.weights = [[piece.of_slot(memory.memory, slot) for slot in range(num_slots)] for piece in layout.weights]
        self.gradients = [
            [piece.of_slot(memory.memory, slot) for slot in range(num_slots)] for piece in layout.gradients
        ]

    @torch.no_grad()
    def push(self, copies: Tensor, parameters: Sequence[ExpertMatrices]) -> None:
        """Write the weights of this rank's experts into the slots of other ranks that hold copies of them.

            for rank, slot in the slots of this node's other ranks:
                if home of copies[rank, slot, 0] is this rank:
                    weights[p][slot] on that rank = parameters[p][expert]

        copies      int32 [num_ranks, num_slots, 3], contiguous, on the slots' device: (expert or -1, begin, end)
        parameters  by parameter [own experts, ...], or so many tensors; each expert's is contiguous

        On GPUs the host does not wait, and the parameters must not change before the kernel has ended.
        """
        memory = self._live()
        self._check_copies(copies)
        self._check_matrices("parameters", parameters, (self._layout.dtype,))
        memory.push(self._homes, copies, self._layout.weights, parameters)

    @torch.no_grad()
    def pull(self, copies: Tensor, gradients: Sequence[ExpertMatrices | None]) -> None:
        """Add the gradients in the slots to those of this rank's experts.

            for each expert of this rank with copies:
                total = gradients[p][expert] as float32
                for rank, slot in ascending order of the copies:
                    total += gradients[p][slot] on that rank
                gradients[p][expert] = total, rounded once

        copies      as in push
        gradients   by parameter [own experts, ...], or so many tensors; each expert's is contiguous. Those of one
                    parameter have one dtype, float32 or that of the parameters. None: not this parameter
        """
        memory = self._live()
        self._check_copies(copies)
        self._check_matrices("gradients", gradients, (torch.float32, self._layout.dtype))
        memory.pull(self._homes, copies, self._layout.gradients, gradients)

    def free(self) -> None:
        """Free this rank's slots. No rank may push or pull any more. A second call does nothing.

        It waits for no other rank, but for this rank's GPU. Memory lives on while the caller has a view of it, or
        another rank has it mapped.
        """
        memory, self._memory = self._memory, None
        self.weights, self.gradients = [], []
        if memory is not None:
            memory.free()

    def _live(self) -> SlotMemory:
        if self._memory is None:
            checks.refuse("the expert slots were freed")
        return self._memory

    def _check_copies(self, copies: Tensor) -> None:
        if copies.dtype == torch.int32 and copies.shape == self._rows and copies.is_contiguous():
            if copies.device.type == self._device_type:
                return
        given = f"{copies.dtype} {list(copies.shape)} on {copies.device}, contiguous: {copies.is_contiguous()}"
        checks.fail("copies", given, f"torch.int32 {list(self._rows)} on {self._device_type}, contiguous")

    def _check_matrices(
        self, argument: str, given: Sequence[ExpertMatrices | None], dtypes: tuple[torch.dtype, ...]
    ) -> None:
        """Check what compiled code reads by address."""
        shapes, num_experts = self._layout.shapes, self._homes.num_local_experts
        if len(given) != len(shapes):
            checks.fail(argument, f"a sequence of {len(given)}", f"one of {len(shapes)}, as the shapes of the slots")
        for p, (matrices, shape) in enumerate(zip(given, shapes, strict=True)):
            if matrices is None:
                continue
            if len(matrices) != num_experts:
                checks.fail(f"{argument}[{p}]", f"of {len(matrices)} experts", f"of {num_experts}, those of this rank")
            of_experts = [matrices[0]] if isinstance(matrices, Tensor) else matrices  # all have the same strides
            dtype = of_experts[0].dtype
            for e, one in enumerate(of_experts):
                if one.shape != shape or one.dtype != dtype or dtype not in dtypes or not one.is_contiguous():
                    name = f"{argument}[{p}]" if isinstance(matrices, Tensor) else f"{argument}[{p}][{e}]"
                    contiguous = "" if one.is_contiguous() else ", not contiguous"
                    allowed = " or ".join(dict.fromkeys(map(str, dtypes)))
                    checks.fail(
                        name,
                        f"{one.dtype} {list(one.shape)}{contiguous}",
                        f"{allowed} {list(shape)}, contiguous, and of one dtype for all experts",
                    )
                if one.device.type != self._device_type:
                    checks.fail(f"{argument}[{p}]", f"on {one.device}", f"on {self._device_type}, as the slots are")


def _agree(gather: Gather, num_slots: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> SlotLayout:
    """Return the layout that all ranks have given. ValueError on all ranks if they differ."""

    def own() -> dict[str, Any]:
        checks.integer("num_slots", num_slots, 1)
        if not shapes or any(not shape or any(size < 1 for size in shape) for shape in shapes):
            given = [tuple(shape) for shape in shapes]
            checks.fail("shapes", given, "a shape for each parameter, of sizes of at least 1")
        checks.one_of("dtype", dtype, checks.DTYPES)
        return dict(num_slots=num_slots, shapes=[list(shape) for shape in shapes], dtype=str(dtype))

    everyone = gather("sizes", own)
    with gather.same_on_all_ranks():
        for rank, one in enumerate(everyone):
            for name, first in everyone[0].items():
                if one[name] != first:
                    checks.refuse(
                        f"{name} of expert slots: rank 0 gave {first}, rank {rank} gave {one[name]}; all ranks must "
                        "give the same"
                    )
    return slot_layout(shapes, dtype, num_slots)
