"""Megatron's gradient buckets."""

import pytest
import torch

from lib.megatron_layer import grads_of, on_gpu, step, tokens_of


def ddp_of(layer, config, **settings):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = dict(grad_reduce_in_fp32=True, overlap_grad_reduce=True) | settings
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), layer)


def iterations(ddp, rank: int, between=lambda: None, overwritten=()) -> dict[str, torch.Tensor]:
    """Two iterations of two microbatches; every main_grad, summed over the ranks that share the weight.

    The first microbatch writes over the main_grad of ``overwritten``, and does not read it.
    """
    found = {}
    for iteration in range(2):
        ddp.zero_grad_buffer()
        for parameter in overwritten:
            parameter.main_grad.fill_(7)
        if ddp.ddp_config.overlap_param_gather:
            lose_weights_of_others(ddp)
        with ddp.no_sync():
            found[f"{iteration} first"] = step(ddp, tokens_of(rank, 2 * iteration))["output"]
            between()
        found[f"{iteration} second"] = step(ddp, tokens_of(rank, 2 * iteration + 1))["output"]
        between()
        ddp.finish_grad_sync()
        for name, parameter in ddp.module.named_parameters():
            assert parameter.grad is None, name
            found[f"{iteration} {name}"] = parameter.main_grad.clone()
    return found


def lose_weights_of_others(ddp) -> None:
    """As after a step of the distributed optimizer: a rank has its part of the weights, the others are on the way."""
    for buffer in ddp.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = bucket.param_data.view(group.size(), -1)
            own = parts[group.rank()].clone()
            parts.fill_(float("nan"))
            parts[group.rank()] = own
    ddp.start_param_sync()


IN_BUCKETS = dict(use_distributed_optimizer=True, bucket_size=3000)  # Gloo reduces these on GPUs too

# For tests whose ranks may share a GPU, where NCCL does not start.
GLOO_TAKES_LISTS = pytest.mark.skipif(
    on_gpu(), reason="Megatron reduces lists of gradients, and Gloo takes no list of CUDA tensors"
)


def main_grads(layer, *xs) -> dict[str, torch.Tensor]:
    """What these microbatches add to main_grad, which a script has made by itself."""
    for weight in layer.experts.parameters():
        weight.main_grad = torch.ones(weight.shape, dtype=torch.float32, device=weight.device)
    for x in xs:
        step(layer, x)
    found = {name: weight.main_grad - 1 for name, weight in layer.experts.named_parameters()}
    if layer.config.gradient_accumulation_fusion:
        assert all(weight.grad is None for weight in layer.experts.parameters())
        return found
    return {name: found[name] + grad for name, grad in grads_of(layer.experts).items()}
