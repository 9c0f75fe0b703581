"""Mistakes that only the values of tensors show."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_unless(right: Tensor, error: Exception) -> None:
    """Raise the error if ``right``, a bool without dimensions, is false.

    On a GPU this is an assert on the device: a host wait would cost more than the operation.
    """
    if right.is_cuda:
        torch._assert_async(right, str(error))
    elif not right:
        raise error
