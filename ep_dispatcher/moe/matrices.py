"""The matrices of grouped GEMMs: one per expert, wherever they lie."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LINE_BYTES = 16  # the kernels read matrices that begin, and whose rows begin, at multiples of it
Matrices = Sequence[Tensor] | Tensor  # one per expert: a tensor each, or one tensor of them all
RowSet = tuple[Tensor, Tensor, Tensor]  # grad, rows and ends of linear_grad_weights
BiasSet = tuple[Tensor, Tensor, Tensor | None]  # grad, ends and row_weights of linear_grad_bias


def shifts_of(weights: Matrices) -> tuple[Tensor, tuple[int, ...]]:
    """Return the matrix at the lowest address, and how far behind it each begins, in units of LINE_BYTES.

    They are copied if one is not contiguous or does not begin at a multiple of LINE_BYTES, or if one begins 32 GiB or
    more behind another.
    """
    if isinstance(weights, Tensor):
        weights = weights.contiguous()
        first = weights[0]  # a view of each would take the host longer than a launch
        if not (first.data_ptr() | first.nbytes) % LINE_BYTES:
            step = first.nbytes // LINE_BYTES
            return first, tuple(step * i for i in range(len(weights)))
    found = _shifts(tuple([weight.data_ptr() for weight in weights]))
    if found is None or not all(map(Tensor.is_contiguous, weights)):
        return shifts_of(torch.stack(tuple(weights)))
    lowest, shifts = found
    return weights[lowest], shifts


@functools.lru_cache(4096)  # those of Megatron stay the same
def _shifts(addresses: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Return the index of the lowest address, and how far behind it the others are. None: copy the matrices."""
    lowest = min(addresses)
    if any(address % LINE_BYTES for address in addresses) or max(addresses) - lowest >= LINE_BYTES * 2**31:
        return None
    return addresses.index(lowest), tuple((address - lowest) // LINE_BYTES for address in addresses)


def shape_of(matrices: Matrices) -> torch.Size:
    """Return the shape of each matrix."""
    return matrices.shape[1:] if isinstance(matrices, Tensor) else matrices[0].shape


class QuantizedMatrices(NamedTuple):
    """Matrices [n, k], one per expert, and their transposed copies, all wherever they lie.

    The scales of an expert are float32 [ceil(n / 128), ceil(k / 128)], or have more columns that nobody reads. Those of
    all experts have the same strides.
    """

    rows: Matrices  # float8_e4m3fn [n, k] each, contiguous
    scales: Matrices
    transposed: Matrices  # the same values, [k, n]
    transposed_scales: Matrices

    def t(self) -> QuantizedMatrices:
        """Return the transposed matrices: nothing is copied."""
        return QuantizedMatrices(self.transposed, self.transposed_scales, self.rows, self.scales)
