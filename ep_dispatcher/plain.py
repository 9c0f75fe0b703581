"""Tensors whose elements compiled code can read by address: contiguous, aligned, and all of them in memory.

Many a tensor is not: PyTorch has tensors that stand for others, on other ranks or still to come (DTensor,
AsyncCollectiveTensor), for none (FakeTensor, ZeroTensor), and tensors whose memory somebody has freed (FSDP does).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from ep_dispatcher import _C_cpu, checks

PLAIN_TYPES = frozenset((Tensor, Parameter))
ALIGNMENT = 16  # bytes: kernels copy so many at a time


def is_plain(t: Tensor) -> bool:
    """Return whether compiled code can read a tensor as it is.

    This runs for each tensor of every operation, so every call into PyTorch counts. It does not ask how large the
    storage is: that makes a Python object, which takes the host 1 us. The CPU engine asks (require_memory).
    """
    if type(t) not in PLAIN_TYPES or not t.is_contiguous() or t.is_neg():
        return False
    address = t.data_ptr()
    return address % ALIGNMENT == 0 and (address != 0 or t.numel() == 0)


def plain(argument: str, t: Tensor) -> Tensor:
    """Return the values in contiguous, aligned memory, without a lazy change of sign. Autograd records no copy.

    Raises ValueError, with the name of the argument, if there are no values to read.
    """
    if is_plain(t):
        return t
    checks.dtensor(argument, t)
    if checks.is_a(t, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        return plain(argument, t.wait())  # type: ignore[attr-defined]  # an AsyncCollectiveTensor has it
    if type(t) in PLAIN_TYPES and t._is_zerotensor():
        return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    require_memory(argument, t)
    t = t.detach().contiguous().resolve_neg()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


def writable(argument: str, t: Tensor) -> None:
    """Check a tensor that an operation is to write: plain or strided, in memory that this process may write."""
    if type(t) not in PLAIN_TYPES or t._is_zerotensor():
        checks.fail(argument, f"a {type(t).__name__}", "a plain tensor")
    require_memory(argument, t)
    if t.device.type == "cpu" and t.numel() > 0 and not _C_cpu.is_writable(t.data_ptr()):
        checks.refuse(f"{argument} lies in memory that may only be read, but is written")


def require_memory(argument: str, t: Tensor) -> None:
    """Raise ValueError unless a tensor has memory of its own for all of its elements."""
    if t.numel() == 0:
        return
    last = t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    try:
        storage = t.untyped_storage()
        if storage.data_ptr() != 0 and (last + 1) * t.itemsize <= storage.nbytes():
            return
    except RuntimeError:  # PyTorch's words for tensors that have no storage, or one without memory
        pass
    given = f"a {type(t).__name__} {list(t.shape)} whose elements are not in memory"
    checks.fail(argument, given, "a tensor whose storage is there, and as large as its shape")
