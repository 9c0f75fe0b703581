"""Addressable tensors: compiled code can read their elements by address. They are contiguous, aligned and in memory.

Many tensors are not addressable. PyTorch has tensors that stand for other ones, on other ranks or still on their way
(DTensor, AsyncCollectiveTensor), tensors without any elements behind them (FakeTensor, ZeroTensor), and tensors whose
memory was freed (FSDP does that).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from ep_dispatcher import _C_cpu, checks

OWN_TYPES = frozenset((Tensor, Parameter))
ALIGNMENT = 16  # the number of bytes that kernels copy at a time


def is_addressable(t: Tensor) -> bool:
    """Return whether compiled code can read a tensor as it is.

    This runs for each tensor of every operation, so every call into PyTorch counts. It does not ask how large the
    storage is: that makes a Python object, which takes the host 1 us. The CPU engine asks (check_memory).
    """
    if type(t) not in OWN_TYPES or not t.is_contiguous() or t.is_neg():
        return False
    address = t.data_ptr()
    return address % ALIGNMENT == 0 and (address != 0 or t.numel() == 0)


def as_addressable(argument: str, t: Tensor) -> Tensor:
    """Return the tensor itself if it is addressable, otherwise a copy that is. Autograd does not record the copy.

    Raises ValueError, with the name of the argument, if there are no values to read.
    """
    if is_addressable(t):
        return t
    checks.dtensor(argument, t)
    if checks.is_instance(t, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        return as_addressable(argument, t.wait())  # type: ignore[attr-defined]  # an AsyncCollectiveTensor has wait()
    if type(t) in OWN_TYPES and t._is_zerotensor():
        return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    check_memory(argument, t)
    t = t.detach().contiguous().resolve_neg()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


def check_writable(argument: str, t: Tensor) -> None:
    """Check a tensor that an operation will write. It may be strided, but the process must be allowed to write it."""
    if type(t) not in OWN_TYPES or t._is_zerotensor():
        checks.fail(argument, f"a {type(t).__name__}", "a plain tensor")
    check_memory(argument, t)
    if t.device.type == "cpu" and t.numel() > 0 and not _C_cpu.is_writable(t.data_ptr()):
        checks.refuse(f"{argument} lies in memory that may only be read, but is written")


def check_memory(argument: str, t: Tensor) -> None:
    """Raise ValueError unless there is memory for all elements of a tensor."""
    if t.numel() == 0:
        return
    last = t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    try:
        storage = t.untyped_storage()
        if storage.data_ptr() != 0 and (last + 1) * t.itemsize <= storage.nbytes():
            return
    except RuntimeError:  # PyTorch raises it for a tensor without a storage, or with a storage without memory
        pass
    given = f"a {type(t).__name__} {list(t.shape)} whose elements are not in memory"
    checks.fail(argument, given, "a tensor whose storage is there, and as large as its shape")
