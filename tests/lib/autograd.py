"""Random numbers, and a layer of experts in plain PyTorch with gradients."""

import torch

from ep_dispatcher.tools.testing import with_negative_zeros
from lib.dispatch_combine import Case, Inputs


def normal(shape, seed: int, dtype=torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return with_negative_zeros(values, seed=seed)


def dense_moe_layer(case: Case, inputs: Inputs, matrices: list[torch.Tensor], experts):
    """A layer and its loss in float64 in one process: results, gradients of x and of topk_weights by rank, of matrices.

    experts(x, *matrices): every expert's result for every token, [num_tokens, num_experts, hidden]
    """
    matrices = [matrix.double().requires_grad_() for matrix in matrices]
    results, leaves = [], []
    for rank, (x, idx, weights) in enumerate(zip(inputs.x, inputs.topk_idx, inputs.topk_weights)):
        x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
        chosen = experts(x, *matrices).gather(1, idx.clamp(min=0).long()[:, :, None].expand(-1, -1, case.hidden))
        result = (chosen * torch.where(idx >= 0, weights, 0)[:, :, None]).sum(1)
        (result * normal(result.shape, 50 + rank)).sum().backward()
        results.append(result.detach())
        leaves.append((x, weights))
    return results, [x.grad for x, _ in leaves], [w.grad for _, w in leaves], [matrix.grad for matrix in matrices]
