"""Where the copies of experts lie in the memory that a rank has for them: the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ep_dispatcher.memory import round_up

# Blocks of the kernels: few, as grouped GEMMs run beside them, and enough to fill NVLink (csrc/cuda/balance/slots.cu).
PUSH_BLOCKS, PULL_BLOCKS = 24, 32
ALIGNMENT = 128  # bytes: every tensor of a slot begins at a multiple
Shape = tuple[int, ...]


class Piece(NamedTuple):
    """One weight, or one gradient, in all slots of a rank: they follow each other at equal steps."""

    shape: Shape
    dtype: torch.dtype
    begin: int  # bytes from the start of a rank's memory to slot 0
    step: int  # bytes from one slot to the next

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes in one slot."""
        return self.num_elements * self.dtype.itemsize

    def of_slot(self, memory: Tensor, slot: int) -> Tensor:
        """Return the view of this piece in one slot. memory: uint8, of one rank."""
        begin = self.begin + slot * self.step
        return memory[begin : begin + self.num_bytes].view(self.dtype).view(self.shape)


class Homes(NamedTuple):
    """Whose experts a plan of copies names: expert e is number ``e % num_local_experts`` of the rank
    ``e // num_local_experts``.

    ranks              of this node, in ascending order. A rank's slots are the row of its number in the plan
    local_rank         the place of this rank among them
    num_local_experts  of each rank, not counting copies
    """

    ranks: tuple[int, ...]
    local_rank: int
    num_local_experts: int


@dataclass(frozen=True)
class SlotLayout:
    """First all weights of an expert, then all gradients, each by the shape that one slot has of it.

    Gradients are float32, because they are parts of sums.
    """

    num_slots: int
    weight_shapes: tuple[tuple[Shape, torch.dtype], ...]
    gradient_shapes: tuple[Shape, ...]

    @cached_property
    def _pieces(self) -> tuple[list[Piece], int]:
        """Return the pieces of the weights and then those of the gradients, and the bytes of all."""
        pieces, end = [], 0
        for shape, dtype in (*self.weight_shapes, *((shape, torch.float32) for shape in self.gradient_shapes)):
            step = round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT)
            pieces.append(Piece(shape, dtype, end, step))
            end += self.num_slots * step
        return pieces, end

    @property
    def weights(self) -> list[Piece]:
        return self._pieces[0][: len(self.weight_shapes)]

    @property
    def gradients(self) -> list[Piece]:
        return self._pieces[0][len(self.weight_shapes) :]

    @property
    def num_bytes(self) -> int:
        """The bytes of the slots of one rank.

            num_slots * (sum over weights of up(size * itemsize) + sum over gradients of up(size * 4))

        up(n) is n rounded up to a multiple of 128.
        """
        return self._pieces[1]


def slot_layout(
    weights: Sequence[tuple[Sequence[int], torch.dtype]], gradients: Sequence[Sequence[int]], num_slots: int
) -> SlotLayout:
    weight_shapes = tuple((_as_shape(shape), dtype) for shape, dtype in weights)
    return SlotLayout(num_slots, weight_shapes, tuple(map(_as_shape, gradients)))


def _as_shape(sizes: Sequence[int]) -> Shape:
    return tuple(map(int, sizes))
