"""The expert slots of one buffer: memory for copies of the experts of other ranks, which the ranks of a node map.

    shapes = (n, k), (k, n)
    slots = Slots(config, device, 1, [(shape, torch.bfloat16) for shape in shapes], shapes, number=0)     # all ranks
    slots.push(copies, [w1, w2])             # home ranks write weights into the slots of other ranks
    grouped_mlp(..., slots.weights)          # each rank multiplies by them, and writes slots.gradients
    slots.pull(copies, [grad_w1, grad_w2])   # home ranks read the gradients, and add them to those of their own

``push`` and ``pull`` are plain copies in the current stream: no rank waits for another one in them. The caller runs a
collective operation of the buffer, which all ranks pass together in the order of their streams,

- before a push: no rank uses the copies of before any more,
- between a push and the first use of the copies,
- between the last write of gradients and the pull,
- between a pull and the next write of gradients.

The caller has also checked the tensors that it gives them, which compiled code reads by address. So they are checked
once a layer, where a user gives them.

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
    weights     shape and dtype of each weight of an expert, such as [((n, k), torch.bfloat16)]. Any dtype
    gradients   the shape of each gradient of an expert. They need not be those of the weights
    number      counts the Slots that are made for this buffer: the same on all ranks, and another one each time

    The fields of the same names have the memory:
    weights     [weight][slot] views of this rank's slots, each at a multiple of 128 bytes. The slots of a weight
                follow each other at equal steps.
    gradients   [gradient][slot] likewise, float32

    num_bytes   of this rank's slots

    All begin with zeros. Collective over all ranks of the buffer, with its limit. Raises ValueError on every rank if
    the ranks give different sizes, PeerTimeoutError if a rank does not come, and RuntimeError if one has no memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device | str,
        num_slots: int,
        weights: Sequence[tuple[Sequence[int], torch.dtype]],
        gradients: Sequence[Sequence[int]],
        number: int,
    ):
        device = torch.device(device)
        with gather_for_slots(config, device, number) as gather:
            layout = _agree(gather, num_slots, weights, gradients)
            memory = allocate_slots(gather, config, device, layout.num_bytes, number)
        topology = config.topology
        self._homes = Homes(topology.node_ranks, topology.local_rank, config.num_own_experts)
        self._memory: SlotMemory | None = memory
        self._layout, self.num_bytes = layout, layout.num_bytes
        self.weights = [[piece.of_slot(memory.memory, slot) for slot in range(num_slots)] for piece in layout.weights]
        self.gradients = [
            [piece.of_slot(memory.memory, slot) for slot in range(num_slots)] for piece in layout.gradients
        ]

    def push(self, copies: Tensor, weights: Sequence[ExpertMatrices | None]) -> None:
        """Write the weights of this rank's experts into the slots of other ranks that hold copies of them.

            for rank, slot in the slots of this node's other ranks:
                if home of copies[rank, slot, 0] is this rank:
                    weights[w][slot] on that rank = weights[w][expert]

        copies      int32 [num_ranks, num_slots, 3], contiguous, on the slots' device: (expert or -1, begin, end)
        weights     each [own experts, ...], or so many tensors; each expert's is contiguous. None: not this weight,
                    of which slots keep what they have

        On GPUs the host does not wait, and the weights must not change before the kernel has ended.
        """
        self._live().push(self._homes, copies, self._layout.weights, weights)

    def pull(self, copies: Tensor, gradients: Sequence[ExpertMatrices | None]) -> None:
        """Add the gradients in the slots to those of this rank's experts.

            for each expert of this rank with copies:
                total = gradients[g][expert] as float32
                for rank, slot in ascending order of the copies:
                    total += gradients[g][slot] on that rank
                gradients[g][expert] = total, rounded once

        copies      as in push
        gradients   each [own experts, ...], or so many tensors; each expert's is contiguous. Those of all experts have
                    one dtype: float32, bfloat16 or float16. None: not this gradient
        """
        self._live().pull(self._homes, copies, self._layout.gradients, gradients)

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


def _agree(
    gather: Gather,
    num_slots: int,
    weights: Sequence[tuple[Sequence[int], torch.dtype]],
    gradients: Sequence[Sequence[int]],
) -> SlotLayout:
    """Return the layout that all ranks have given. ValueError on all ranks if they differ."""

    def own() -> dict[str, Any]:
        checks.integer("num_slots", num_slots, 1)
        for name, shapes in (("weights", [shape for shape, _ in weights]), ("gradients", gradients)):
            if not shapes or any(not shape or any(size < 1 for size in shape) for shape in shapes):
                given = [tuple(shape) for shape in shapes]
                checks.fail(name, f"of the shapes {given}", "some, each of sizes of at least 1")
        sizes = dict(
            num_slots=num_slots,
            weights=[f"{dtype} {list(shape)}" for shape, dtype in weights],
            gradients=[list(shape) for shape in gradients],
        )
        return {f"{name} of expert slots": given for name, given in sizes.items()}

    everyone = gather("sizes", own)
    with gather.same_on_all_ranks():
        checks.require_same(everyone)
    return slot_layout(weights, gradients, num_slots)
