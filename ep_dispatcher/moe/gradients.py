"""Gradients on their way back: their mean over the ranks of a buffer, and rows that nobody has computed.

The mean is what other parameters get from FSDP2 and DDP. The backward of a dispatch brings the tokens of all ranks to
an expert, so its gradient is the sum over their losses. It is divided here, before FSDP2 or a hook sees it. Then these
need no factor of their own: they average the gradients of experts over the replicas of the experts, as they average all
others. FSDP2's set_gradient_divide_factor would do both in one step, but with one replica it depends on the version of
PyTorch and on other settings how often it divides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_dispatcher.buffer import Buffer


def mean_gradient(buffer: Buffer, t: Tensor) -> Tensor:
    """Return a parameter of experts itself, whose gradient is divided by the ranks of the buffer.

    What is no tensor comes back too: nobody has checked it yet.
    """
    return scale_gradient(t, 1 / buffer.topology.num_ranks) if isinstance(t, Tensor) else t


def scale_gradient(t: Tensor, factor: float) -> Tensor:
    """Return the tensor itself, whose gradient is multiplied by a factor on its way back."""
    return _ScaleGradient.apply(t, factor) if t.requires_grad and factor != 1 else t


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return t.view_as(t)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def clear_unused_rows(ends: Tensor, *grads: Tensor | None) -> None:
    """Write zeros to the gradients of rows that no expert has, if autograd's anomaly mode is going to look at them.

    With max_recv_rows there are such rows, at ends[-1] and behind. Kernels neither read nor write them, and where new
    memory holds NaNs, anomaly mode would take them for a wrong gradient. Without it nothing is written. The host does
    not wait.
    """
    if torch.compiler.is_compiling() or not torch.is_anomaly_enabled():
        return
    for grad in grads:
        if grad is not None:
            row = torch.arange(grad.shape[0], dtype=torch.int32, device=grad.device)
            is_unused = row >= ends[-1]
            grad.masked_fill_(is_unused if grad.ndim == 1 else is_unused[:, None], 0)
