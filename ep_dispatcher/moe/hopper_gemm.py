"""Compiled kernels for grouped GEMMs on GPUs of compute capability 9.0 (csrc/cuda/moe): of rows in bfloat16 and float8,
and for gradients of weights.

Their results are those of the Triton kernels, bit for bit, but subnormal numbers count as 0 where gradients are added.
Measured with benchmarks/grouped_gemm.py and float8_experts.py (benchmarks/results/RUNS.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher import engines
from ep_dispatcher.moe.address_table import address_table
from ep_dispatcher.moe.expert_matrices import (
    LINE_BYTES,
    ExpertMatrices,
    Places,
    QuantizedMatrices,
    WeightGradInputs,
    WithCopies,
    matrix_shape,
    num_matrices,
    places_of,
)

# Rows per expert up to which the Triton kernel is used: for a forward and float8, for gradients of rows in bfloat16,
# and for gradients of weights that are added.
FEW_ROWS, FEW_ROWS_BACK, FEW_ADDED_ROWS = 64, 128, 768
_GRAD_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def num_sms(device: int) -> int:
    """Return the number of a GPU's multiprocessors, 0 if the kernels do not run there."""
    if device < 0:  # the CPU, where Triton's interpreter takes the kernels' place in tests
        return 0
    found = torch.cuda.get_device_properties(device)
    is_usable = (found.major, found.minor) == (9, 0) and "cuda" in engines.ENGINES
    return found.multi_processor_count if is_usable else 0


@functools.cache
def _compiled() -> Any:
    return import_module("ep_dispatcher._C_cuda")


def multiply(
    rows: Tensor,
    weights: ExpertMatrices,
    ends: Tensor,
    out: Tensor,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> bool:
    """Write what grouped_gemm.linear returns, or where weights are not `transposed` what linear_grad_rows does.

    The first of the weights is that of expert 0. False: nothing is done; the Triton kernel is faster, or the only one.
    """
    few_rows = FEW_ROWS if transposed else FEW_ROWS_BACK
    if not _takes(rows, few_rows * num_matrices(weights), ends, out) or rows.dtype != torch.bfloat16:
        return False
    own, copies = (weights.own, weights.copies) if type(weights) is WithCopies else (weights, None)
    places, of_copies = places_of(own), None if copies is None else places_of(copies)
    if any(one is not None and one.base.dtype != torch.bfloat16 for one in (places, of_copies)):
        return False
    device = rows.get_device()
    _compiled().bfloat16_gemm(
        _gemm_of_rows(rows, places, ends, num_matrices(weights), out, bias, row_weights),
        transposed,
        None if of_copies is None else _addresses(of_copies),
        num_matrices(own),
        num_sms(device),
        torch._C._cuda_getCurrentRawStream(device),
    )
    return True


def multiply_float8(
    pair: tuple[Tensor, Tensor],
    weights: QuantizedMatrices,
    ends: Tensor,
    out: Tensor,
    bias: Tensor | None,
    row_weights: Tensor | None,
) -> bool:
    """Write what float8_gemm.linear returns. The first of the weights is that of expert 0. False: as in `multiply`."""
    rows, scales = pair
    experts = num_matrices(weights.rows)
    if not _takes(rows, FEW_ROWS * experts, ends, out):
        return False
    if isinstance(weights.scales, Tensor):
        scale_places = weights.scales.data_ptr(), 0, *weights.scales.stride()[:2]
    else:
        table, _ = address_table(weights.scales, rows.device)
        scale_places = 0, table.data_ptr(), 0, weights.scales[0].stride(0)
    device, places = rows.get_device(), places_of(weights.rows)
    _compiled().float8_gemm(
        _gemm_of_rows(rows, places, ends, experts, out, bias, row_weights),
        (scales.data_ptr(), *scale_places),
        num_sms(device),
        torch._C._cuda_getCurrentRawStream(device),
    )
    return True


def _takes(rows: Tensor, few_rows: int, ends: Tensor, out: Tensor) -> bool:
    """Return whether a kernel computes rows with these results, and sooner than the Triton kernel."""
    return (
        rows.shape[0] > few_rows
        and num_sms(rows.get_device()) > 0
        and out.dtype == torch.bfloat16
        and (out.data_ptr() | out.shape[1] * out.itemsize) % LINE_BYTES == 0  # they store so many bytes at a time
        and rows.is_contiguous()
        and ends.dtype == torch.int32
    )


def _gemm_of_rows(
    rows: Tensor,
    places: Places,
    ends: Tensor,
    experts: int,
    out: Tensor,
    bias: Tensor | None,
    row_weights: Tensor | None,
) -> tuple[Any, ...]:
    """Return the first argument of both GEMMs."""
    bias_dtype = _dtype(torch.float32 if bias is None else bias.dtype)
    results = out.data_ptr(), out.shape[1], _address(bias), bias_dtype, _address(row_weights)
    return rows.data_ptr(), *rows.shape, _addresses(places), ends.data_ptr(), experts, *results


def _addresses(places: Places) -> tuple[int, int, int, int, int]:
    """Return what a kernel needs of `places`. The caller keeps those until it is launched: they may be of copies."""
    base, num_shifts, shifts, first, step = places
    return base.data_ptr(), _address(shifts), num_shifts, first, step


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _dtype(dtype: torch.dtype) -> Any:
    return getattr(_compiled().DType, str(dtype).removeprefix("torch."))


def write_weight_grads(sets: Sequence[WeightGradInputs], out: ExpertMatrices, accumulate: bool) -> bool:
    """Write what grouped_gemm.linear_grad_weights writes. False: as in `multiply`."""
    _, first_rows, _ = sets[0]
    device, num_rows = first_rows.get_device(), sum([rows.shape[0] for _, rows, _ in sets])
    few_rows = FEW_ADDED_ROWS if accumulate else 0
    if num_rows <= few_rows * num_matrices(out) or first_rows.dtype != torch.bfloat16 or not num_sms(device):
        return False
    dtype, (n, k) = out[0].dtype, matrix_shape(out)
    if dtype not in _GRAD_DTYPES or (accumulate and dtype != torch.float32) or k * dtype.itemsize % LINE_BYTES:
        return False
    table, is_aligned = address_table(out, first_rows.device)
    if not is_aligned or any(ends.dtype != torch.int32 for _, _, ends in sets):
        return False
    given = []
    for grad, rows, ends in sets:
        if rows.shape[0]:
            row_bytes = grad.stride(0) * grad.itemsize, rows.stride(0) * rows.itemsize
            given.append((grad.data_ptr(), rows.data_ptr(), *row_bytes, rows.shape[0], ends.data_ptr()))
    sizes = n, k, num_matrices(out), num_sms(device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    _compiled().weight_grad(given, table.data_ptr(), _dtype(dtype), accumulate, *sizes, stream)
    return True
