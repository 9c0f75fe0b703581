"""Compiled kernels for two grouped GEMMs on GPUs of compute capability 9.0 (csrc/cuda/moe): float8, and gradients that
are added to float32.

Their results are those of the Triton kernels, bit for bit, but subnormal numbers count as 0 where gradients are added.
On an H200 (benchmarks/float8_experts.py and grouped_gemm.py) the first takes 0.68 to 0.96 of the Triton kernel's time
with 512 to 4096 rows per expert, and longer with 64. The second takes 0.83 to 0.90 with 1024 rows or more, as long with
512, and longer with fewer.
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
    QuantizedMatrices,
    WeightGradInputs,
    matrix_shape,
    num_matrices,
)

FEW_ROWS = 64  # rows per expert up to which the Triton kernel of float8 is faster
FEW_GRAD_ROWS = 768  # and up to which that of gradients is


@functools.cache
def num_sms(device: int) -> int:
    """Return the number of a GPU's multiprocessors, 0 if the kernels do not run there."""
    found = torch.cuda.get_device_properties(device)
    is_usable = (found.major, found.minor) == (9, 0) and "cuda" in engines.ENGINES
    return found.multi_processor_count if is_usable else 0


@functools.cache
def _compiled() -> Any:
    return import_module("ep_dispatcher._C_cuda")


def takes_float8(rows: Tensor, weights: QuantizedMatrices, out: Tensor) -> bool:
    """Return whether `multiply_float8` computes this, and sooner than the Triton kernel."""
    return (
        rows.shape[0] > FEW_ROWS * num_matrices(weights.rows)
        and num_sms(rows.get_device()) > 0
        and out.dtype == torch.bfloat16
        and (out.data_ptr() | out.shape[1] * out.itemsize) % LINE_BYTES == 0  # it stores so many bytes at a time
        and rows.is_contiguous()
    )


def multiply_float8(
    pair: tuple[Tensor, Tensor],
    weights: QuantizedMatrices,
    ends: Tensor,
    out: Tensor,
    bias: Tensor | None,
    row_weights: Tensor | None,
) -> None:
    """Write what float8_gemm.linear returns. The first of the weights is that of expert 0."""
    from ep_dispatcher.moe.grouped_gemm_kernels import describe_weights

    rows, scales = pair
    device = rows.get_device()
    matrix, shifts, first, step = describe_weights(weights.rows, [1, 1])
    if isinstance(weights.scales, Tensor):
        scale_places = weights.scales.data_ptr(), 0, *weights.scales.stride()[:2]
    else:
        table, _ = address_table(weights.scales, rows.device)
        scale_places = 0, table.data_ptr(), 0, weights.scales[0].stride(0)
    _compiled().float8_gemm(
        rows.data_ptr(),
        scales.data_ptr(),
        *rows.shape,
        matrix.base.data_ptr(),
        _address(shifts),
        matrix.shape[0],
        first,
        step,
        *scale_places,
        ends.data_ptr(),
        num_matrices(weights.rows),
        out.data_ptr(),
        out.shape[1],
        _address(bias),
        _dtype(torch.float32 if bias is None else bias.dtype),
        _address(row_weights),
        num_sms(device),
        torch._C._cuda_getCurrentRawStream(device),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _dtype(dtype: torch.dtype) -> Any:
    return getattr(_compiled().DType, str(dtype).removeprefix("torch."))


def add_weight_grads(sets: Sequence[WeightGradInputs], out: ExpertMatrices) -> bool:
    """Add what grouped_gemm.linear_grad_weights adds to `out`. False: nothing is done, the Triton kernel is faster."""
    _, first_rows, _ = sets[0]
    device, num_rows = first_rows.get_device(), sum([rows.shape[0] for _, rows, _ in sets])
    if num_rows <= FEW_GRAD_ROWS * num_matrices(out) or not num_sms(device):
        return False
    table, is_aligned = address_table(out, first_rows.device)
    if not is_aligned or out[0].dtype != torch.float32 or first_rows.dtype != torch.bfloat16:
        return False
    given = []
    for grad, rows, ends in sets:
        if rows.shape[0]:
            row_bytes = grad.stride(0) * grad.itemsize, rows.stride(0) * rows.itemsize
            given.append((grad.data_ptr(), rows.data_ptr(), *row_bytes, rows.shape[0], ends.data_ptr()))
    n, k = matrix_shape(out)
    stream = torch._C._cuda_getCurrentRawStream(device)
    _compiled().weight_grad(given, table.data_ptr(), n, k, num_matrices(out), num_sms(device), stream)
    return True
