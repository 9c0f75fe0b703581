"""Mistakes that only the values of tensors show."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse(mistaken: Tensor, error: Exception) -> None:
    """Raise the error where ``mistaken``, a bool without dimensions, is true.

    On a GPU, where a host that waits would cost more than the operation, this is an assert on the device.
    """
    if mistaken.is_cuda:
        torch._assert_async(~mistaken, str(error))
    elif mistaken:
        raise error
