"""Converts a program's rows for our engine, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ep_dispatcher import checks


class Kind(NamedTuple):
    """The rows that an engine buffer is made for."""

    hidden: int
    dtype: torch.dtype


SMALLEST = Kind(8, torch.bfloat16)  # 16 bytes


def numbered_rows(num_rows: int, first: int, device: torch.device) -> Tensor:
    """Return rows of the smallest kind, which carry the numbers from ``first`` on as int32."""
    rows = torch.zeros(num_rows, 4, dtype=torch.int32, device=device)
    rows[:, 0] = torch.arange(first, first + num_rows, dtype=torch.int32, device=device)
    return rows.view(SMALLEST.dtype)


class Rows:
    """Rows that the engine moves as bytes: give it ``data``, and ``restore`` its output to the kind of ``x``.

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
        # _as_is: whether the engine takes x and returns its like as they are. Found here and not in `restore`: after a
        # wait for counts the device may wait for the host.
        if self._scales is not None:
            self._one_scale = self._scales.dim() == 1
            if self._one_scale:
                self._scales = self._scales[:, None]
            self._as_is = self._check_pair(self._scales) and not self._one_scale
            self.kind = Kind(hidden, torch.bfloat16)
        elif dtype in checks.DTYPES:
            self._as_is, self.kind = True, Kind(hidden, dtype)
        else:
            num_bytes = hidden * rows.element_size()
            if num_bytes % checks.ROW_GRANULARITY:
                checks.refuse(
                    f"x has rows of {num_bytes} bytes, but they have to be multiples of {checks.ROW_GRANULARITY}"
                )
            self._as_is, self.kind = False, Kind(num_bytes // 2, torch.bfloat16)

    @property
    def data(self) -> Tensor | tuple[Tensor, Tensor]:
        """Return the rows for the engine. Call it in the stream of the operation: it may copy."""
        if self._data is None:  # Python 3.11's cached_property takes a lock, which costs the host 3 us
            x, scales = self._x, self._scales
            if self._as_is:
                self._data = x if scales is None else (x, scales.contiguous())
            elif scales is None:
                self._data = x.contiguous().view(torch.bfloat16)
            else:  # the bits of the scales, with columns of zeros up to one for every block
                bits = _seen_as(scales.contiguous(), torch.float32)
                missing = checks.num_scales(x.shape[1]) - bits.shape[1]
                wide = torch.nn.functional.pad(bits, (0, missing)) if missing else bits
                self._data = _seen_as(x, torch.float8_e4m3fn), wide
        return self._data

    def restore(self, received: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(received, Tensor):  # as what was sent
            return received if self._as_is else received.view(self._x.dtype)
        rows, scales = received
        if self._as_is or self._scales is None:
            return rows, scales
        scales = _seen_as(scales[:, : self._scales.shape[1]].contiguous(), self._scales.dtype)
        return _seen_as(rows, self._x.dtype), scales[:, 0] if self._one_scale else scales

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


def _seen_as(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same bits in another dtype. A view costs the host some microseconds even if it changes nothing."""
    return t if t.dtype == dtype else t.view(dtype)


def biases_of(bias: Tensor | tuple[Tensor, Tensor] | None, x: Tensor, num_tokens: int) -> tuple[Tensor, ...]:
    """Return the biases of a combine of rows x, checked."""
    biases = () if bias is None else (bias,) if isinstance(bias, Tensor) else tuple(bias)
    if len(biases) > 2:
        checks.refuse(f"bias has {len(biases)} tensors, but at most two are allowed")
    for one in biases:
        checks.tensor("bias", one, (x.dtype,), (num_tokens, x.shape[1]), x.device.type)
    return biases


def add_biases(combined: Tensor, biases: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return the sums with the biases, added in float32, in ``dtype``."""
    if biases:
        combined = sum((one.float() for one in biases[1:]), biases[0].float()) + combined.float()
    return combined.to(dtype)
