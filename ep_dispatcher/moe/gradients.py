"""Changes gradients in a backward: averages them over the ranks of a buffer, and clears rows that were not computed.

FSDP2 and DDP give other parameters the mean of the ranks' gradients. The backward of a dispatch brings the tokens of
all ranks to an expert, so the gradient of an expert is a sum over their losses. It is divided here, before FSDP2 or a
hook sees it. So FSDP2 and DDP need no special factor for experts: they average over the replicas of an expert, as they
do for all other parameters. FSDP2's set_gradient_divide_factor would do both in one step, but with one replica the
number of divisions depends on the version of PyTorch and on other settings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_dispatcher.buffer import Buffer


def mean_gradient(buffer: Buffer, t: Tensor) -> Tensor:
    """Return a parameter of experts unchanged, but with its gradient divided by the number of ranks of the buffer.

    Anything that is not a tensor is returned as it is, because nothing has checked it yet.
    """
    return scale_gradient(t, 1 / buffer.topology.num_ranks) if isinstance(t, Tensor) else t


def scale_gradient(t: Tensor, factor: float) -> Tensor:
    """Return the tensor unchanged, but with its gradient multiplied by a factor."""
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
    """Write zeros to the gradients of rows without an expert, if autograd's anomaly mode is on.

    With max_recv_rows there are such rows, from ends[-1] on. Kernels neither read nor write them. New memory may hold
    NaNs, which anomaly mode would take for a wrong gradient. Without anomaly mode nothing is written. The host does not
    wait.
    """
    if torch.compiler.is_compiling() or not torch.is_anomaly_enabled():
        return
    for grad in grads:
        if grad is not None:
            row = torch.arange(grad.shape[0], dtype=torch.int32, device=grad.device)
            is_unused = row >= ends[-1]
            grad.masked_fill_(is_unused if grad.ndim == 1 else is_unused[:, None], 0)
