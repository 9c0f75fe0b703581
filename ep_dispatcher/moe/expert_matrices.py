"""The matrices of grouped GEMMs: one per expert, as one tensor or as separate tensors anywhere in memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_dispatcher import checks

LINE_BYTES = 16  # the kernels need the address of a matrix, and of each of its rows, to be a multiple of this
ExpertMatrices = Sequence[Tensor] | Tensor  # one matrix per expert: separate tensors, or one tensor of all of them
WeightGradInputs = tuple[Tensor, Tensor, Tensor]  # grad, rows and ends of linear_grad_weights
BiasGradInputs = tuple[Tensor, Tensor, Tensor | None]  # grad, ends and row_weights of linear_grad_bias


class WithCopies(Sequence[Tensor]):
    """The matrices of a rank's own experts, and behind them those of redundant copies, which lie far away in memory."""

    def __init__(self, own: ExpertMatrices, copies: ExpertMatrices):
        self.own, self.copies = own, copies

    def __len__(self) -> int:
        return num_matrices(self.own) + num_matrices(self.copies)

    def __getitem__(self, expert: Any) -> Any:
        num_own = num_matrices(self.own)
        return self.own[expert] if expert < num_own else self.copies[expert - num_own]

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.chain(self.own, self.copies)


class DescribedMatrices(list[Tensor]):
    """Separate matrices, in a list that does not change from pass to pass.

    described  what places_of found, and the addresses then: by assigning to its ``data`` a tensor may get other memory,
               but not other strides
    """

    def __init__(self, matrices: Iterable[Tensor]):
        super().__init__(matrices)
        self.described: tuple[tuple[int, ...], Places] | None = None


class Places(NamedTuple):
    """Where the matrices of experts are: each a number of shifts, of LINE_BYTES, behind the lowest one.

    Without `shifts` that of expert e is first + e * step.
    """

    base: Tensor  # that matrix, or one tensor of all of them
    num_shifts: int  # larger than each shift
    shifts: Tensor | None  # int32 [experts]
    first: int
    step: int


def places_of(weights: ExpertMatrices) -> Places:
    """Return where matrices are, or copies of all of them where kernels cannot find one (see lowest_and_shifts)."""
    if isinstance(weights, Tensor):
        weights = weights.contiguous()
        even_step = step_of(weights)
        if even_step is not None:  # as below, without a tuple of all shifts
            return Places(weights, (num_matrices(weights) - 1) * even_step + 1, None, 0, even_step)
    if type(weights) is not DescribedMatrices:
        return _find_places(weights)
    addresses = addresses_of(weights)
    if weights.described is not None and weights.described[0] == addresses:
        return weights.described[1]
    places = _find_places(weights)
    if any(places.base is one for one in weights):  # otherwise they are copies
        weights.described = addresses, places
    return places


def _find_places(weights: ExpertMatrices) -> Places:
    base, shifts = lowest_and_shifts(weights)
    return Places(base, *_shift_table(shifts, base.device))


def check_not_capturing(num_addresses: int, device: torch.device) -> None:
    """Raise ValueError if a CUDA graph is captured: then no table of addresses can be copied from the host."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        checks.refuse(
            f"{num_addresses} matrices lie at new addresses, and at irregular steps, while a CUDA graph is captured: "
            "run one warm-up pass with these matrices first"
        )


@functools.lru_cache(4096)  # some matrices come and go; those of Megatron stay the same
def _shift_table(shifts: tuple[int, ...], device: torch.device) -> tuple[int, Tensor | None, int, int]:
    """Return what Places has behind its base."""
    first = shifts[0]
    step = shifts[-1] - shifts[-2] if len(shifts) > 1 else 0
    is_regular = all(b - a == step for a, b in zip(shifts, shifts[1:]))
    if not is_regular:
        check_not_capturing(len(shifts), device)
    table = None if is_regular else torch.tensor(shifts, dtype=torch.int32, device=device)
    return max(shifts) + 1, table, first, step


def addresses_of(matrices: ExpertMatrices) -> tuple[int, ...]:
    """Return the address of each matrix. A loop in Python would take the host almost twice as long."""
    return tuple(map(Tensor.data_ptr, matrices))


@functools.lru_cache(4096)
def even_step(addresses: tuple[int, ...]) -> int | None:
    """Return the bytes from each address to the next one, 0 for a single address. None: they differ."""
    steps = {after - before for before, after in itertools.pairwise(addresses)} or {0}
    return steps.pop() if len(steps) == 1 else None


def lowest_and_shifts(weights: ExpertMatrices) -> tuple[Tensor, tuple[int, ...]]:
    """Return the matrix at the lowest address, and the distance from it to each matrix, in units of LINE_BYTES.

    The matrices are copied if one is not contiguous or does not begin at a multiple of LINE_BYTES, or if two of them
    begin 32 GiB or more apart.
    """
    if isinstance(weights, Tensor):
        weights = weights.contiguous()
        step = step_of(weights)
        if step is not None:
            return weights[0], tuple(step * i for i in range(num_matrices(weights)))
    index_and_shifts = _shifts_from_lowest(addresses_of(weights))
    if index_and_shifts is None or not all(map(Tensor.is_contiguous, weights)):
        return lowest_and_shifts(torch.stack(tuple(weights)))
    lowest, shifts = index_and_shifts
    return weights[lowest], shifts


def step_of(weights: Tensor) -> int | None:
    """Return the distance between the matrices of a contiguous tensor, in units of LINE_BYTES.

    None: not all of them begin at a multiple of LINE_BYTES.
    """
    matrix_bytes = weights.nbytes // num_matrices(weights)
    return None if (weights.data_ptr() | matrix_bytes) % LINE_BYTES else matrix_bytes // LINE_BYTES


@functools.lru_cache(4096)  # Megatron's addresses stay the same from step to step
def _shifts_from_lowest(addresses: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Return the index of the lowest address, and the distance to each address. None: the matrices must be copied."""
    lowest = min(addresses)
    if any(address % LINE_BYTES for address in addresses) or max(addresses) - lowest >= LINE_BYTES * 2**31:
        return None
    return addresses.index(lowest), tuple((address - lowest) // LINE_BYTES for address in addresses)


def num_matrices(matrices: ExpertMatrices) -> int:
    """Return the number of matrices. len() of a tensor takes the host 8 us."""
    return matrices.shape[0] if isinstance(matrices, Tensor) else len(matrices)


def matrix_shape(matrices: ExpertMatrices) -> torch.Size:
    """Return the shape of each matrix."""
    return matrices.shape[1:] if isinstance(matrices, Tensor) else matrices[0].shape


class QuantizedMatrices(NamedTuple):
    """Quantized matrices [n, k], one per expert, and their transposed copies. All may lie anywhere in memory.

    The scales of an expert are float32 [ceil(n / 128), ceil(k / 128)], and may have further columns that nobody reads.
    The scales of all experts have the same strides. Each field may be WithCopies.
    """

    rows: ExpertMatrices  # float8_e4m3fn [n, k] each, contiguous
    scales: ExpertMatrices
    transposed: ExpertMatrices  # the same values, [k, n]
    transposed_scales: ExpertMatrices

    def t(self) -> QuantizedMatrices:
        """Return the transposed matrices. Nothing is copied."""
        return QuantizedMatrices(self.transposed, self.transposed_scales, self.rows, self.scales)

    def with_copies(self, copies: QuantizedMatrices) -> QuantizedMatrices:
        """Return these matrices, and behind them those of redundant copies."""
        return QuantizedMatrices(*map(WithCopies, self, copies))

    def split(self) -> list[QuantizedMatrices]:
        """Return what `with_copies` has joined. Other matrices are returned alone."""
        if type(self.rows) is not WithCopies:  # isinstance takes the host longer, because it is an abstract class's
            return [self]
        fields: list[Any] = [*self]
        return [QuantizedMatrices(*(one.own for one in fields)), QuantizedMatrices(*(one.copies for one in fields))]
