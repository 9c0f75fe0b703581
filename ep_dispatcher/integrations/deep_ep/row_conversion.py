"""Converts a program's rows to what our engine moves, and received rows back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ep_dispatcher import checks


class RowFormat(NamedTuple):
    """The size and the dtype of the rows that an engine buffer is made for."""

    hidden: int
    dtype: torch.dtype


SMALLEST = RowFormat(8, torch.bfloat16)  # 16 bytes


def numbered_rows(num_rows: int, first: int, device: torch.device) -> Tensor:
    """Return rows of the smallest format, which carry the numbers from ``first`` on as int32."""
    rows = torch.zeros(num_rows, 4, dtype=torch.int32, device=device)
    rows[:, 0] = torch.arange(first, first + num_rows, dtype=torch.int32, device=device)
    return rows.view(SMALLEST.dtype)


class Rows:
    """The rows of a program. The engine moves ``data``, and ``restore`` turns its output into the form of ``x``.

    x  rows [num_tokens, hidden] of any dtype, a multiple of 16 bytes each. Or a pair: rows with elements of one byte
       (hidden a multiple of 16), and scales with elements of four bytes and any strides, [num_tokens, up to
       ceil(hidden / 128)] or [num_tokens]
    """

    def __init__(self, x: Tensor | tuple[Tensor, Tensor]):
        self._x: Tensor
        self._scales: Tensor | None
        self._x, self._scales = x if isinstance(x, (tuple, list)) else (x, None)
        self._data: Tensor | tuple[Tensor, Tensor] | None = None
        rows = self._x
        if not isinstance(rows, Tensor) or rows.dim() != 2:
            checks.fail("x", getattr(rows, "shape", type(rows).__name__), "a tensor [num_tokens, hidden], or a pair")
        (self.num_tokens, hidden), self.device, dtype = rows.shape, rows.device, rows.dtype
        # _as_is: whether the engine takes x without a conversion. It is found here and not in `restore`, because after
        # a wait for counts the device may be waiting for the host.
        if self._scales is not None:
            self._one_scale = self._scales.dim() == 1
            if self._one_scale:
                self._scales = self._scales[:, None]
            self._as_is = self._check_pair(self._scales) and not self._one_scale
            self.row_format = RowFormat(hidden, torch.bfloat16)
        elif dtype in checks.DTYPES:
            self._as_is, self.row_format = True, RowFormat(hidden, dtype)
        else:
            num_bytes = hidden * rows.element_size()
            if num_bytes % checks.ROW_GRANULARITY:
                checks.refuse(
                    f"x has rows of {num_bytes} bytes, but rows have to be multiples of {checks.ROW_GRANULARITY} bytes"
                )
            self._as_is, self.row_format = False, RowFormat(num_bytes // 2, torch.bfloat16)

    @property
    def data(self) -> Tensor | tuple[Tensor, Tensor]:
        """Return the rows for the engine. Call it in the stream of the operation: it may copy."""
        if self._data is None:  # Python 3.11's cached_property takes a lock, which costs the host 3 us
            x, scales = self._x, self._scales
            if self._as_is:
                self._data = x if scales is None else (x, scales.contiguous())
            elif scales is None:
                self._data = x.contiguous().view(torch.bfloat16)
            else:  # the bits of the scales, with columns of zeros appended until every block has a column
                bits = _view_as(scales.contiguous(), torch.float32)
                num_missing = checks.num_scales(x.shape[1]) - bits.shape[1]
                padded = torch.nn.functional.pad(bits, (0, num_missing)) if num_missing else bits
                self._data = _view_as(x, torch.float8_e4m3fn), padded
        return self._data

    def restore(self, received: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(received, Tensor):  # as x was
            return received if self._as_is else received.view(self._x.dtype)
        rows, scales = received
        if self._as_is or self._scales is None:
            return rows, scales
        scales = _view_as(scales[:, : self._scales.shape[1]].contiguous(), self._scales.dtype)
        return _view_as(rows, self._x.dtype), scales[:, 0] if self._one_scale else scales

    def _check_pair(self, scales: Tensor) -> bool:
        """Refuse a pair that the engine cannot move. Return whether its dtypes and columns are the engine's."""
        x, sizes = self._x, scales.shape
        hidden, most = x.shape[1], checks.num_scales(x.shape[1])
        if x.element_size() != 1 or hidden % checks.ROW_GRANULARITY or len(sizes) != 2 or scales.element_size() != 4:
            raise NotImplementedError(
                f"x: a pair of {list(x.shape)} {x.dtype} and {list(sizes)} {scales.dtype}; the engine moves "
                f"rows of one-byte elements, a multiple of {checks.ROW_GRANULARITY}, with scales [num_tokens, n] or "
                "[num_tokens] of four bytes"
            )
        if sizes[0] != self.num_tokens:
            checks.refuse(f"x[1] has scales of {sizes[0]} tokens, but x[0] has {self.num_tokens} tokens")
        if sizes[1] > most:
            raise NotImplementedError(f"x[1]: {sizes[1]} scales a row; the engine moves {most}")
        return (x.dtype, scales.dtype, sizes[1]) == (torch.float8_e4m3fn, torch.float32, most)


def _view_as(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same bits in another dtype. Make no view if none is needed, which saves the host microseconds."""
    return t if t.dtype == dtype else t.view(dtype)


def biases_of(bias: Tensor | tuple[Tensor, Tensor] | None, x: Tensor, num_tokens: int) -> tuple[Tensor, ...]:
    """Return the biases of a combine of rows x, checked."""
    if bias is None:
        return ()
    biases = (bias,) if isinstance(bias, Tensor) else tuple(bias)
    if len(biases) > 2:
        checks.refuse(f"bias has {len(biases)} tensors, but at most two are allowed")
    for one in biases:
        checks.tensor("bias", one, (x.dtype,), (num_tokens, x.shape[1]), x.device.type)
    return biases


def add_biases(combined: Tensor, biases: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Add the biases to the sums in float32. Return the result in ``dtype``."""
    if biases:
        total = biases[0].float()
        for bias in biases[1:]:
            total = total + bias.float()
        combined = total + combined.float()
    return combined.to(dtype)
